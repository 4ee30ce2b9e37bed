"""The script that measures a quiet start."""

import pytest
import timm
from PIL import Image
from safetensors.torch import save_file

from repro import quiet_start


@pytest.mark.parametrize("names", [("n01440764", "n15075141"), ("000", "999")])
def test_difference_and_top1_are_printed(names, tmp_path, capsys):
    weights = timm.create_model("deit_tiny_patch16_224").state_dict()
    weights["head.bias"][999] = 100  # the answer to every image
    save_file(weights, tmp_path / "vit.safetensors")
    for name, images in zip(names, (1, 3)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(images):
            Image.new("RGB", (256, 256), (60 * number, 90, 30)).save(tmp_path / "data" / name / f"{name}_{number}.png")
    quiet_start.main(["--weights", str(tmp_path / "vit.safetensors"), "--data", str(tmp_path / "data")])
    single, double, top1 = capsys.readouterr().out.splitlines()
    assert single.startswith("largest difference of logits on 4 images in float32: ")
    assert float(single.split()[-1]) <= 2e-5
    assert float(double.split()[-1]) <= 1e-10
    assert top1 == "top-1 of 4 images: round 1 75.00%, round 2 75.00%"
