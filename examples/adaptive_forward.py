"""One picture, seen in rounds until the prediction is sure enough.

The weights are fresh, so what it predicts means nothing; what it shows is how an image flows: preprocessing, a round,
the entropy of its prediction, stop or go on. Run it with: python examples/adaptive_forward.py [PICTURE] [THRESHOLD]
"""

import sys
from pathlib import Path

import torch
from PIL import Image

import progresvit

PICTURE = Path(__file__).parent / "pictures" / "cat.jpg"
THRESHOLD = 0.35  # the paper's near-lossless point for this model lies at 0.3505


@torch.inference_mode()
def main(picture: Path, threshold: float) -> None:
    """Print what each round says of the picture."""
    torch.manual_seed(0)
    model = progresvit.create_model("progresvit_small_192_240").eval()
    image = progresvit.data.evaluation_transform(model.config)(Image.open(picture).convert("RGB"))
    images = image.unsqueeze(0)  # (3, 240, 240) -> (1, 3, 240, 240)
    gmacs = progresvit.compute.cumulative_gmacs(model.config, convention="executed")

    print(f"{picture.name} with fresh weights, stopping below an entropy of {threshold}:")
    tokens = None
    for s, round_ in enumerate(model.config.rounds):
        output = model.run_round(s, images, previous=tokens)
        tokens = output.tokens
        entropy = progresvit.routing.top10_entropy(output.logits).item()
        last = s == len(model.config.rounds) - 1
        step = "stop" if entropy < threshold else "stop, there is no further round" if last else "go on"
        print(
            f"  round {s + 1}: {round_.resolution} px, {round_.heads} heads, entropy {entropy:.3f}, "
            f"{gmacs[s]:.3f} GMACs so far (executed): {step}"
        )
        if entropy < threshold:
            break


if __name__ == "__main__":
    main(
        Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE,
        float(sys.argv[2]) if len(sys.argv) > 2 else THRESHOLD,
    )
