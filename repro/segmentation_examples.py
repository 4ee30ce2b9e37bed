"""Draws test images that exit after round 1 and images that continue, as thumbnails of at most 96 pixels:

    python repro/segmentation_examples.py MODEL --results repro/results/camvid --run progressive-1 --data camvid.tar

Scores and the threshold come from the results; MODEL is the model that it measured, which segments the chosen
images in both rounds. The image is written to docs/figures/results. The page does not redraw it, since that needs the
photographs.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).parents[1]))

from progresvit import api
from progresvit.analysis.overlay import blend, palette
from progresvit.data.segmentation import find_segmentation
from progresvit.data.segmentation.images import evaluation_image
from progresvit.data.segmentation.windows import WindowOptions
from progresvit.plots import few_colours
from progresvit.predict.segment import segment_rounds
from repro.measure.records import hash_names
from repro.segmentation import Measured
from repro.store import read_results
from repro.study import STUDY_FILE, read_study

SIDE = 96
"""Largest side of a thumbnail, in pixels."""
EXAMPLES = 4
"""Images that exit, and images that continue."""
GAP, LINE, FONT = 6, 16, 12


def choose(scores: NDArray[np.float64]) -> tuple[list[int], list[int]]:
    """Images of low and of high scores, some ranks apart: neighbouring frames of a video look the same."""
    order, step = np.argsort(scores, kind="stable"), max(1, len(scores) // 40)
    return order[: EXAMPLES * step : step].tolist(), order[::-1][: EXAMPLES * step : step].tolist()


def draw(rows: list[tuple[str, list[Image.Image]]], heads: list[str], names: tuple[str, ...]) -> Image.Image:
    """Rows of thumbnails, each under a line of text, and the colours of the classes below."""
    width = len(heads) * (SIDE + GAP) + GAP
    height = rows[0][1][0].height
    legend = -(-len(names) // 3)
    page = Image.new("RGB", (width, LINE + len(rows) * (height + LINE + GAP) + legend * LINE + GAP), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(FONT)
    for column, head in enumerate(heads):
        pen.text((GAP + column * (SIDE + GAP), 1), head, "#202020", font)
    top = LINE
    for text, images in rows:
        pen.text((GAP, top + 1), text, "#707070", font)
        for column, image in enumerate(images):
            page.paste(image, (GAP + column * (SIDE + GAP), top + LINE))
        top += height + LINE + GAP
    for number, name in enumerate(names):
        x, y = GAP + number % 3 * (width // 3), top + number // 3 * LINE
        pen.rectangle((x, y + 3, x + 10, y + 13), tuple(palette()[number].tolist()))
        pen.text((x + 15, y + 1), name, "#202020", font)
    return page


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--results", type=Path, required=True, help="results folder of the study")
    parser.add_argument("--run", required=True, help="measurement of the model, such as progressive-1")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, help="by default docs/figures/results/STUDY-examples.png")
    options = parser.parse_args()
    result = read_results(options.results).segmentation[options.run]
    plan = read_study(options.results / STUDY_FILE).segmentation
    assert plan is not None
    measured, model = Measured(result), api.load(options.model)
    dataset = find_segmentation(options.data, result.test.split, default_names=result.labels)
    by_name = sorted(range(len(dataset)), key=lambda index: dataset.entries[index].name)  # as in the results
    if hash_names(entry.name for entry in dataset.entries) != result.test.names:
        sys.exit(f"error: {options.data} holds other test images than {options.run} was measured on.")
    scores, threshold = measured.test.scores[:, 0], measured.routed(plan.max_drop / 100).threshold
    rows = []
    for place in (place for group in choose(scores) for place in group):
        photo, mask = dataset.read_pair(by_name[place])
        windows = evaluation_image(photo, None, model.config, WindowOptions(), "").cut(
            model.config, torch.device("cpu")
        )
        with torch.inference_mode():
            maps = segment_rounds(model, [windows], batch=16)[0]
        scale = SIDE / max(photo.size)
        size = round(photo.width * scale), round(photo.height * scale)
        small = photo.resize(size, Image.Resampling.LANCZOS)
        labels = [mask, *(map_.labels.numpy() for map_ in maps)]
        thumbnails = [np.array(Image.fromarray(map_).resize(size, Image.Resampling.NEAREST)) for map_ in labels]
        what = "exits after round 1" if scores[place] < threshold else "continues to round 2"
        drawn_over = [blend(small, thumbnail, result.labels) for thumbnail in thumbnails]
        rows.append((f"score {scores[place]:.2f}: {what}", [small, *drawn_over]))
    out = options.out or Path(__file__).parents[1] / f"docs/figures/results/{options.results.name}-examples.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    draw(rows, ["image", "labels", "round 1", "round 2"], result.labels).save(drawn, "PNG")
    out.write_bytes(few_colours(drawn.getvalue()))
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
