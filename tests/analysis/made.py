"""What tests of analyses share: samples of made images, rows of tables, and the boxes of a drawn figure."""

import csv
import io
from itertools import combinations

import torch

from progresvit.analysis.sample import Sample


def sample_of(pixels, labels, classes, *, name="class {}"):
    """A sample of bytes (N, 3, r, r); classes are numbered."""
    return Sample(
        pixels=torch.as_tensor(pixels),
        labels=torch.as_tensor(labels),
        ids=tuple(f"{number}.png" for number in range(len(pixels))),
        class_names={number: name.format(number) for number in range(classes)},
        class_ids={number: f"n{number:03d}" for number in range(classes)},
    )


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
