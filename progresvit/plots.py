"""Common style of all figures: size, colour-blind safe palette, labelled axes, bands and legends.

``style.css`` beside this file is the common style of all HTML pages.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from progresvit.io.extras import not_installed
from progresvit.metrics.interval import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = Path(__file__).parent / "style.css"
"""Colours, fonts and panels of all HTML pages: the server's and the reports'."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette."""
DPI = 160
"""Pixels per inch of a .png: 1,024 for the common width."""
WIDTH = 6.4
"""Inches of a .png or .svg."""
COLUMN = 3.4
"""Inches of a .pdf: one column of a paper with two."""
COLUMN_HEIGHT, COLUMN_FONT = 0.66, 0.64
"""Scale of heights, and of fonts, lines and marks, in a .pdf; fonts of 10 points become 6.4."""
TITLE = 62
"""Characters in a line of a title."""
MANY_ROUNDS = 3
"""Models with at least this many rounds get a logarithmic axis of compute: most of their rounds are cheap."""
BAND = "band: 95 % interval over images"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
BELOW: dict[str, Any] = {"loc": "outside lower center", "frameon": False}
"""Place of legends: under the axes, where they lie over no data."""
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def new_figure(*, title: str, x: str, y: str, conditions: str = "") -> tuple[Figure, Axes]:
    """An empty figure with labelled axes; ``conditions`` is a further line of the title."""
    figure, (axes,) = new_panels(title=title, conditions=conditions, xs=[x], y=y)
    return figure, axes


def blank_figure(
    *, height: float, title: str = "", conditions: str = "", layout: Literal["constrained"] | None = "constrained"
) -> Figure:
    """A figure of the common width, without axes, independent of pyplot's global state.

    Args:
        height: Inches.
        title: What the figure shows; it is broken into lines.
        conditions: A further line of the title.
        layout: None for axes that are placed by hand.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"figures need more: {not_installed('matplotlib', 'plots')}") from error
    figure = Figure(figsize=(WIDTH, height), layout=layout)
    if title:
        figure.suptitle(_with_conditions(title, conditions), fontsize=11)
    return figure


def new_panels(
    *, title: str, xs: Sequence[str], y: str | Sequence[str], height: float = 4.2, conditions: str = ""
) -> tuple[Figure, list[Axes]]:
    """Panels side by side; ``xs`` are their x labels. They share the y axis if ``y`` is one label."""
    several = len(xs) > 1
    figure = blank_figure(height=height, title=title if several else "", conditions=conditions)
    panels: list[Axes] = list(figure.subplots(1, len(xs), sharey=isinstance(y, str), squeeze=False)[0])
    if not several:
        panels[0].set_title(_with_conditions(title, conditions), fontsize=11)
    for axes, label in zip(panels, [y] if isinstance(y, str) else y):
        axes.set_ylabel(label, fontsize=11)
    for axes, x in zip(panels, xs):
        axes.set_xlabel(x, fontsize=11)
        add_grid(axes)
    return figure, panels


def add_grid(axes: Axes, axis: Literal["both", "x"] = "both") -> None:
    """A pale grid, and no frame above and on the right."""
    axes.grid(alpha=0.3, axis=axis)
    axes.spines[["top", "right"]].set_visible(False)


def _with_conditions(title: str, conditions: str) -> str:
    return f"{in_lines(title)}\n{conditions}" if conditions else in_lines(title)


def in_lines(title: str) -> str:
    """A title in lines of about equal length that fit the axes; a number stays with its percent sign."""
    title = title.replace(" %", "\u00a0%")
    lines = -(-len(title) // TITLE)
    width = TITLE if lines < 2 else len(title) // lines + 8
    return textwrap.fill(title, width, break_on_hyphens=False)


def curve_style(number: int) -> dict[str, Any]:
    """Colour and line style of a curve; distinguishable in greyscale too."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number % len(LINES)]}


def draw_band(axes: Axes, x: ArrayLike, lowest: ArrayLike, highest: ArrayLike, *, colour: str) -> None:
    """A pale band between the ends of intervals along a curve."""
    axes.fill_between(x, lowest, highest, color=colour, alpha=0.15, linewidth=0, zorder=1)


def band_entry() -> dict[str, Any]:
    """Style of bands in :func:`legend_below`."""
    return {"color": "0.5", "alpha": 0.3, "linewidth": 7}


def percent_ends(shares: Sequence[Interval]) -> NDArray[np.float64]:
    """Means, lower ends and upper ends of shares, in percent: (3, n)."""
    ends = np.array([[share.mean, share.lowest, share.highest] for share in shares])
    return 100 * ends.reshape(-1, 3).T  # (n, 3) -> (3, n)


def beside(place: int, count: int, step: float) -> float:
    """Offset of the place-th of ``count`` marks that would overlap, around 0."""
    return step * (place - (count - 1) / 2)


def draw_share(axes: Axes, place: float, share: Interval, **style: Any) -> None:
    """A mark with its 95 % interval in a panel of percentages, in the row ``place``."""
    reach = [[100 * (share.mean - share.lowest)], [100 * (share.highest - share.mean)]]
    axes.errorbar([100 * share.mean], [place], xerr=reach, **{"markersize": 5, "capsize": 2, "linewidth": 1.2, **style})


def shorten(name: str, length: int) -> str:
    """A name of at most ``length`` characters; no character of it starts a formula in matplotlib."""
    name = name if len(name) <= length else f"{name[: length - 1].rstrip()}…"
    return name.replace("$", r"\$")


def scale_compute(axes: Axes, rounds: int) -> None:
    """The x axis of compute is logarithmic for models of many rounds."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if rounds >= MANY_ROUNDS:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure, entries: Mapping[str, Mapping[str, Any]], columns: int | None = None) -> None:
    """A legend of styles by label."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label, **style) for label, style in entries.items()]
    fitting = max(1, min(len(entries), 4, 84 // (max(map(len, entries)) + 8)))
    figure.legend(handles=handles, ncols=columns or fitting, fontsize=10, **BELOW)


def fit_column(figure: Figure) -> None:
    """Shrink a figure to one column of a paper, with letters that stay readable.

    Wide legends get fewer columns, and the figure the height of their further lines; wide titles and labels get lines.
    """
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

    width, height = figure.get_size_inches()
    fixed = figure.get_layout_engine() is None  # places are given: everything shrinks alike
    scale = COLUMN / width
    font = scale if fixed else COLUMN_FONT
    figure.draw_without_rendering()  # ticks exist after it
    figure.set_size_inches(COLUMN, height * (scale if fixed else COLUMN_HEIGHT))
    for axes in figure.axes:
        size = axes.xaxis.get_ticklabels()[0].get_fontsize() if axes.xaxis.get_ticklabels() else 10.0
        axes.tick_params(labelsize=font * float(size), length=2, pad=2)
    ticks = {id(label) for axes in figure.axes for label in (*axes.get_xticklabels(), *axes.get_yticklabels())}
    captions = {id(axes.xaxis.label) for axes in figure.axes if _is_thumbnail(axes)}  # as wide as the image above
    for text in figure.findobj(Text):
        if id(text) not in ticks:
            text.set_fontsize((scale if id(text) in captions else font) * float(text.get_fontsize()))
    for line in figure.findobj(Line2D):
        line.set_markersize(font * line.get_markersize())
        line.set_linewidth(font * line.get_linewidth())
    for legend in figure.findobj(Legend):
        _wrap(legend.get_title(), COLUMN * figure.dpi)
        before = legend.get_window_extent().height
        after = _narrow(legend, figure, scaled=not fixed)
        if not fixed and after > before:
            figure.set_size_inches(COLUMN, figure.get_size_inches()[1] + (after - before) / figure.dpi)
    if not fixed:
        _wrap_wide(figure)


def _wrap_wide(figure: Figure) -> None:
    """Break titles and x labels that would leave the figure or overlap with the neighbouring panel's."""
    figure.draw_without_rendering()
    boxes = [axes.get_window_extent() for axes in figure.axes]
    for axes, box in zip(figure.axes, boxes):
        if _is_thumbnail(axes):
            continue
        level = [other for other in boxes if other.y0 < box.y1 and other.y1 > box.y0]  # panels side by side
        left = max([(other.x1 + box.x0) / 2 for other in level if other.x1 <= box.x0], default=figure.bbox.x0)
        right = min([(other.x0 + box.x1) / 2 for other in level if other.x0 >= box.x1], default=figure.bbox.x1)
        for text in (axes.title, axes.xaxis.label):
            _wrap(text, 2 * min((box.x0 + box.x1) / 2 - left, right - (box.x0 + box.x1) / 2))
    for text in (text for part in (figure, *figure.subfigs) for text in part.texts):
        _wrap(text, figure.bbox.width)


def _is_thumbnail(axes: Axes) -> bool:
    """An image without coordinates."""
    return bool(axes.images) and not len(axes.get_xticks())


def _wrap(text: Any, width: float) -> None:
    """Break the lines of a text between words, into parts of about equal length, until it is ``width`` pixels wide."""
    lines = text.get_text().split("\n")
    wide = text.get_window_extent().width
    fitting = int(max(map(len, lines)) * width / wide) if wide > width else 0  # letters
    while fitting > 7 and text.get_window_extent().width > width:
        parts = [len(line) // -(-len(line) // fitting) + 4 if len(line) > fitting else fitting for line in lines]
        look: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
        text.set_text("\n".join(textwrap.fill(line, part, **look) for line, part in zip(lines, parts)))
        fitting -= 1


def _narrow(legend: Any, figure: Figure, *, scaled: bool) -> float:
    """Lay out a legend again, for its new letters, in as many columns as fit; its height in pixels."""
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection

    parent, texts, title = legend.parent, legend.get_texts(), legend.get_title()
    inside = isinstance(parent, Axes)
    look = {"fontsize": texts[0].get_fontsize(), "frameon": legend.get_frame_on(), "title": title.get_text() or None}
    look |= {"title_fontsize": title.get_fontsize(), "loc": "best" if inside else "outside lower center"}
    drawn = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels())}
    labels = [text.get_text() for text in texts]
    handles = [  # of error bars, a legend keeps the bars alone
        drawn[label] if isinstance(handle, LineCollection) and label in drawn else handle
        for label, handle in zip(labels, legend.legend_handles)
    ]
    for columns in range(legend._ncols, 0, -1):
        legend.remove()
        legend = parent.legend(handles, labels, ncols=columns, **look)
        figure.draw_without_rendering()
        if not scaled or legend.get_window_extent().width <= figure.bbox.width:
            break
    return float(legend.get_window_extent().height)


def render(figure: Figure, suffix: str, *, metadata: Mapping[str, str] | None = None) -> bytes:
    """The figure as .png, .svg or .pdf; a .pdf is shrunk to one column of a paper.

    A .png has 256 colours, which is a third of the bytes, and stores all ``metadata``; other formats store only the
    keys they know.
    """
    buffer = io.BytesIO()
    if suffix == ".pdf":
        fit_column(figure)
    figure.savefig(buffer, format=suffix.removeprefix("."), dpi=DPI, metadata=dict(metadata) if metadata else None)
    return few_colours(buffer.getvalue()) if suffix == ".png" else buffer.getvalue()


def few_colours(png: bytes, most_bytes: int | None = None) -> bytes:
    """A .png with a palette of 256 colours: the style's colours and greys exactly, the others as near as possible.

    With ``most_bytes`` the palette is halved until the file fits, at most to 64 colours; photographs need that.
    """
    from PIL import Image, ImageColor
    from PIL.PngImagePlugin import PngInfo
    from scipy.spatial import cKDTree

    info = PngInfo()
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        pixels = np.asarray(image.convert("RGB"))  # (H, W, 3)
        for key, text in getattr(image, "text", {}).items():
            info.add_text(key, text)
    style = [*COLOURS, *(f"#{grey:02x}{grey:02x}{grey:02x}" for grey in range(0, 256, 17))]
    exact = np.array([ImageColor.getrgb(colour) for colour in style], np.uint8)
    colours, places, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    weights = np.minimum(np.ceil(counts**0.5), 40).astype(int)  # a background is no more important than a line
    weighted = Image.fromarray(np.repeat(colours, weights, axis=0)[None])
    for number in (256, 128, 64):
        others = weighted.quantize(number - len(exact), kmeans=2).getpalette() or []
        nearest_to = np.concatenate([exact, np.array(others, np.uint8).reshape(-1, 3)[: number - len(exact)]])
        palette = colours if len(colours) <= number else nearest_to
        nearest = cKDTree(palette).query(colours)[1].astype(np.uint8)
        figure = Image.fromarray(nearest[places].reshape(pixels.shape[:2]), "P")
        figure.putpalette(palette.tobytes())
        smaller = io.BytesIO()
        figure.save(smaller, "PNG", optimize=True, pnginfo=info)
        if most_bytes is None or len(smaller.getvalue()) <= most_bytes:
            break
    return smaller.getvalue()


def savings_title(savings: Mapping[str, float]) -> str:
    """A title that says how much near-lossless exits save; savings by the name of the model or comparison."""
    saved = percent_range(savings.values())
    return f"{f'{next(iter(savings))}: n' if len(savings) == 1 else 'N'}ear-lossless exits save {saved} of the GMACs"


def percent_range(shares: Collection[float]) -> str:
    """The lowest and the highest of several shares, in percent."""
    low, high = (round(100 * end) for end in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"
