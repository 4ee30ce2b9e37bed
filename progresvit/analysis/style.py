"""Common style of all figures: size, colour-blind safe palette, labelled axes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette."""
DPI = 160
"""Pixels per inch of a .png: 1,024 for the common width."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def new_figure(*, title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """An empty figure with labelled axes."""
    figure, (axes,) = new_panels(title=title, xs=[x], y=y)
    return figure, axes


def blank_figure(*, height: float, layout: Literal["constrained"] | None = "constrained") -> Figure:
    """A figure of the common width, without axes, independent of pyplot's global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("figures need matplotlib: pip install 'progresvit[plots]'.") from error
    return Figure(figsize=(6.4, height), layout=layout)


def new_panels(
    *, title: str, xs: Sequence[str], y: str | Sequence[str], height: float = 4.2
) -> tuple[Figure, list[Axes]]:
    """Panels side by side; ``xs`` are their x labels. They share the y axis if ``y`` is one label."""
    figure = blank_figure(height=height)
    panels: list[Axes] = list(figure.subplots(1, len(xs), sharey=isinstance(y, str), squeeze=False)[0])
    if len(panels) > 1:
        figure.suptitle(title, fontsize=12)
    else:
        panels[0].set_title(title, fontsize=12)
    for axes, label in zip(panels, [y] if isinstance(y, str) else y):
        axes.set_ylabel(label, fontsize=11)
    for axes, x in zip(panels, xs):
        axes.set_xlabel(x, fontsize=11)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def curve_style(number: int) -> dict[str, Any]:
    """Colour and line style of a curve; distinguishable in greyscale too."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number % len(LINES)]}


def render(figure: Figure, suffix: str, *, metadata: Mapping[str, str] | None = None) -> bytes:
    """The figure as .png, .svg or .pdf. A .png stores all ``metadata``; other formats store only the keys they know."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix.removeprefix("."), dpi=DPI, metadata=dict(metadata) if metadata else None)
    return buffer.getvalue()
