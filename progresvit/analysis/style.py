"""How every figure looks: one size, one palette that colour-blind readers can tell apart, labelled axes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def new_figure(*, title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """An empty figure with named axes. It belongs to no window and to no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("figures need one more package: pip install 'progresvit[plots]'.") from error
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=12)
    axes.set_xlabel(x, fontsize=11)
    axes.set_ylabel(y, fontsize=11)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def look(number: int) -> dict[str, Any]:
    """Colour and line of the number-th curve; told apart in grey as well."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number % len(LINES)]}


def render(figure: Figure, suffix: str) -> bytes:
    """The content of a .png, .svg or .pdf."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix.removeprefix("."), dpi=160)
    return buffer.getvalue()
