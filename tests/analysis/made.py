"""What tests of analyses share: models, samples of made images, rows of tables, and the boxes of a drawn figure."""

import csv
import io
from itertools import combinations

import numpy as np
import torch
import torch.nn.functional as F

from progresvit.analysis.block_points import BlockPoint
from progresvit.analysis.sample import Sample
from progresvit.data.transforms import normalise
from progresvit.model import registry

SIZES = {"depth": 2, "patch_size": 8, "num_classes": 5}
KINDS = {
    "progresvit": {"rounds": [{"resolution": 16, "heads": 1}, {"resolution": 32, "heads": 2}]},
    "thinkingvit": {"rounds": [{"resolution": 32, "heads": 1}, {"resolution": 32, "heads": 2}]},
    "hydravit": {"rounds": [{"resolution": 32, "heads": 1}, {"resolution": 16, "heads": 2}]},
    "sortednet": {"rounds": [{"resolution": 32, "heads": 1}, {"resolution": 32, "heads": 2}]},
    "matformer": {"rounds": [{"resolution": 16, "mlp_share": 0.5}, {"resolution": 32, "mlp_share": 1}]},
    "dynabert": {"rounds": [{"resolution": 32, "share": 0.5}, {"resolution": 32, "share": 1}]},
    "early_exit": {"rounds": [{"resolution": 32, "blocks": 1}, {"resolution": 32, "blocks": 2}]},
}


def model_of_kind(kind, **fields):
    """A model with the ViT of this library."""
    return registry.build(registry.config_class(kind)(heads=2, **{**SIZES, **KINDS[kind], **fields}))


def sample_of(pixels, labels, classes, *, name="class {}"):
    """A sample of bytes (N, 3, r, r); classes are numbered."""
    return Sample(
        pixels=torch.as_tensor(pixels),
        labels=torch.as_tensor(labels),
        ids=tuple(f"{number}.png" for number in range(len(pixels))),
        class_names={number: name.format(number) for number in range(classes)},
        class_ids={number: f"n{number:03d}" for number in range(classes)},
    )


def random_sample(*, images=60, classes=12, channels=3, side=32, name="class {}", seed=0):
    """Noise; classes take turns."""
    pixels = np.random.default_rng(seed).integers(0, 256, (images, channels, side, side), dtype=np.uint8)
    return sample_of(pixels, np.arange(images) % classes, min(classes, images), name=name)


def coloured_sample(per_class=(3, 3), side=32):
    """Noise whose mean colour is the colour of its class."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(len(per_class)).repeat_interleave(torch.tensor(per_class))
    colours = torch.randint(0, 100, (len(per_class), 3, 1, 1), generator=rng)
    noise = torch.randint(0, 150, (len(labels), 3, side, side), generator=rng)
    return sample_of((colours[labels] + noise).byte(), labels, len(per_class))


def answered_sample(model, *, images=40):
    """Noise with labels that one of the rounds gives, so that round 1 is right about a part of the images."""
    sample = random_sample(images=images)
    with torch.no_grad():
        outputs = model(normalise(sample.pixels, model.config))
    answers = torch.stack([output.logits.argmax(dim=-1) for output in outputs])
    labels = answers[torch.arange(images) % len(outputs), torch.arange(images)]
    return sample_of(sample.pixels, labels, 12, name="name {}")


@torch.no_grad()
def tokens_at_points(model, sample):
    """What the first block of each round receives and what each block returns, step by step, normalised by hand."""
    images, previous, rounds = normalise(sample.pixels, model.config), None, []
    for s, round_ in enumerate(model.config.rounds):
        gates = model.gates(s)
        x = model.embed(images, resolution=round_.resolution, width=round_.width)
        x = x if previous is None else model.fuse(s, x, previous, gates.fusion)
        points = [x]
        for block, block_gates in zip(model.blocks, gates.blocks):
            points.append(block(points[-1], block_gates))
        d = round_.width
        rounds.append([F.layer_norm(x, (d,), model.norm.weight[:d], model.norm.bias[:d], 1e-6) for x in points])
        previous = rounds[-1][-1]
    return [x for tokens in rounds for x in tokens]


def points_of(*blocks):
    """The points of rounds with these numbers of blocks."""
    return tuple(BlockPoint(s, block) for s, last in enumerate(blocks, start=1) for block in range(last + 1))


def rows_of(table):
    """The rows of a table, read from its CSV."""
    return list(csv.DictReader(io.StringIO(table.to_csv())))


def assert_on_page(figure, boxes, *, beyond=0):
    """No box ends outside of the figure, by more than ``beyond`` pixels."""
    page = figure.bbox
    for box in boxes:
        assert box.x0 >= page.x0 - beyond
        assert box.x1 <= page.x1 + beyond
        assert box.y0 >= page.y0 - beyond
        assert box.y1 <= page.y1 + beyond


def assert_apart(boxes, *, overlap):
    """No two boxes overlap by more than ``overlap`` pixels."""
    for box, other in combinations(boxes, 2):
        width, height = min(box.x1, other.x1) - max(box.x0, other.x0), min(box.y1, other.y1) - max(box.y0, other.y0)
        assert min(width, height) <= overlap


def assert_whole_figure_on_page(figure):
    """Nothing that is drawn lies outside of the page."""
    figure.draw_without_rendering()  # lays it out
    assert_on_page(figure, [figure.get_tightbbox().padded(-1 / 72).transformed(figure.dpi_scale_trans)])
