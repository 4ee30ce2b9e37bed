"""The common style: figures of one column, whose titles and labels neither meet nor leave the page."""

import io
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.lines import Line2D
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from progresvit.plots import COLUMN, blank_figure, few_colours, legend_below, new_panels, render

LONG = "a title that is far too long for one of two panels beside each other in one column of a paper"


def boxes_of(figure):
    """Titles of panels and labels of their x axes, after the last drawing."""
    figure.draw_without_rendering()
    texts = [text for axes in figure.axes for text in (axes.title, axes.xaxis.label) if text.get_text()]
    return [text.get_window_extent() for text in texts]


def made_panels():
    figure, panels = new_panels(title=LONG, xs=["an x axis with a long name (points)"] * 2, y="y")
    for axes in panels:
        axes.plot([0, 1], [0, 1])
        axes.set_title(LONG[:60], fontsize=10)
    return figure


def test_titles_and_labels_of_a_column_do_not_meet_and_stay_on_the_page():
    figure = made_panels()
    assert any(one.overlaps(two) for one, two in combinations(boxes_of(figure), 2))  # at the width of a .png
    render(figure, ".pdf")
    assert figure.get_size_inches()[0] == COLUMN
    boxes = boxes_of(figure)
    assert not any(one.overlaps(two) for one, two in combinations(boxes, 2))
    for box in (*boxes, figure.texts[0].get_window_extent()):
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1
    assert " ".join(figure.axes[0].get_title().split()) == LONG[:60]  # words stay whole


def test_lines_of_a_broken_title_are_about_equally_long():
    figure = made_panels()
    render(figure, ".pdf")
    lines = [len(line) for line in figure.axes[0].get_title().split("\n")]
    assert len(lines) > 1
    assert max(lines) - min(lines) < 12


def test_a_short_title_stays_on_one_line():
    figure, (axes,) = new_panels(title="short", xs=["x"], y="y")
    render(figure, ".pdf")
    assert axes.get_title() == "short"


def test_a_legend_that_gets_more_lines_makes_the_column_higher():
    def height(columns):
        figure, (axes,) = new_panels(title="", xs=["x"], y="y")
        axes.plot([0, 1], [0, 1])
        legend_below(figure, {f"a rather long name of a run {n}": {"color": "0.5"} for n in range(6)}, columns)
        render(figure, ".pdf")
        assert figure.legends[0].get_window_extent().width <= figure.bbox.width
        return figure.get_size_inches()[1]

    assert height(3) > height(1)


def test_error_bars_keep_their_marks_in_the_legend_of_a_column():
    figure, (axes,) = new_panels(title="", xs=["x"], y="y")
    axes.errorbar([0, 1], [0, 1], yerr=[0.1, 0.1], marker="o", label="with intervals")
    figure.legend(loc="outside lower center")
    render(figure, ".pdf")
    assert "o" in [line.get_marker() for line in figure.legends[0].findobj(Line2D)]


def test_captions_of_thumbnails_shrink_with_them():
    figure = blank_figure(height=2)
    panels = figure.subplots(1, 2)
    for axes in panels:
        axes.imshow(np.zeros((4, 4)))
        axes.set_xlabel("a caption as wide as the image", fontsize=8)
    panels[0].set(xticks=[], yticks=[])
    width = figure.get_size_inches()[0]
    render(figure, ".pdf")
    assert panels[0].xaxis.label.get_fontsize() == pytest.approx(8 * COLUMN / width)
    assert "\n" not in panels[0].get_xlabel()
    assert panels[1].xaxis.label.get_fontsize() > 8 * COLUMN / width


@pytest.mark.long
def test_a_png_keeps_the_colours_of_the_style_and_its_text_in_fewer_bytes():
    pixels = np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)  # a photograph
    pixels[:20], pixels[20:22] = 255, (0, 158, 115)  # the page, and a mark in one of the colours
    file, text = io.BytesIO(), PngInfo()
    text.add_text("data", "abc")
    Image.fromarray(pixels).save(file, "PNG", pnginfo=text)
    smaller = few_colours(file.getvalue())
    assert len(smaller) < len(file.getvalue()) / 2
    with Image.open(io.BytesIO(smaller)) as image:
        assert image.info["data"] == "abc"
        assert np.array_equal(np.asarray(image.convert("RGB"))[:22], pixels[:22])
    smallest = few_colours(file.getvalue(), most_bytes=130_000)
    assert len(smallest) < 130_000 < len(smaller)


def test_figures_of_the_documentation_are_small():
    sizes = {path: path.stat().st_size for path in (Path(__file__).parents[1] / "docs" / "figures").rglob("*.png")}
    assert {path: size for path, size in sizes.items() if size > 150_000} == {}
