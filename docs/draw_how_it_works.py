"""Draw docs/figures/how_it_works.png: one image through the two rounds of the bundled model.

    python docs/draw_how_it_works.py

Widths, resolutions and GMACs are read from the bundled model's config; nothing is typed in.
"""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from PIL import Image

import progresvit
from progresvit.data.samples import samples_folder
from progresvit.io.model_folder import bundled_folder
from progresvit.model.registry import read_config
from progresvit.plots import few_colours

OUT = Path(__file__).parent / "figures" / "how_it_works.png"
BLUE, ORANGE, GREEN, GREY, PALE = "#0072B2", "#D55E00", "#009E73", "#555555", "#E8E8E8"
SAMPLE = "golden_retriever.jpg"


def draw() -> Figure:
    """The figure, in units of a hundredth of its width."""
    config = read_config(bundled_folder("nettewoof-tiny"))
    gmacs = progresvit.compute.cumulative_gmacs(config)
    figure = Figure(figsize=(10, 5.2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 52)
    axes.axis("off")
    image = square(Image.open(samples_folder() / SAMPLE).convert("RGB"))
    sides = [12.0 * round_.resolution / config.resolution for round_ in config.rounds]
    tops = (52.0, 23.0)  # of the two lanes
    for s, round_ in enumerate(config.rounds):
        lane(axes, image, top=tops[s], side=sides[s], s=s, config=config)
        colour, middle = BLUE if s == 0 else ORANGE, tops[s] - 8
        axes.text(2, middle - 7.6, f"round {s + 1}", fontsize=14, color=colour, weight="bold", va="top")
        text = f"{round_.resolution} px, {round_.heads} of {config.heads} heads"
        axes.text(2, middle - 10.2, text, fontsize=12, color=colour, va="top")
    first, second = (top - 8 for top in tops)
    box(axes, 58, first - 4, 16, 8, "top-10 entropy\nbelow τ ?", GREY)
    arrow(axes, (51, first), (58, first), GREY)
    arrow(axes, (74, first), (81, first), GREEN)
    axes.text(77.5, first + 1.2, "yes", fontsize=13, color=GREEN, ha="center")
    box(axes, 81, first - 4, 17, 8, f"exit\n{gmacs[0]:.2f} GMACs", GREEN)
    box(axes, 58, first - 18.2, 16, 6.4, "project tokens", GREY)
    arrow(axes, (66, first - 4), (66, first - 11.8), ORANGE)
    axes.text(67.2, first - 8.2, "no: continue", fontsize=13, color=ORANGE)
    axes.add_patch(
        FancyArrowPatch(
            (58, first - 15), (21.5, second + 1.2), connectionstyle="angle,angleA=0,angleB=90,rad=6", arrowstyle="-|>",
            mutation_scale=18, linewidth=2, color=ORANGE, shrinkA=0, shrinkB=0,
        )
    )  # fmt: skip
    axes.text(40, first - 14.3, "previous tokens", fontsize=12, color=ORANGE, ha="center")
    arrow(axes, (51, second), (81, second), GREEN)
    box(axes, 81, second - 4, 17, 8, f"exit\n{gmacs[1]:.2f} GMACs", GREEN)
    axes.text(
        60, 1.0, "one set of weights: a narrow round runs the leading heads and channels of the wide one",
        fontsize=12.5, color=GREY, ha="center",
    )  # fmt: skip
    return figure


def lane(axes, image, *, top, side, s, config):
    """Image, fusion, and the active slice of the backbone."""
    middle = top - 8
    left = 8 - side / 2
    axes.imshow(image, extent=(left, left + side, middle - side / 2, middle + side / 2), aspect="auto", zorder=2)
    if s:
        arrow(axes, (left + side, middle), (20.3, middle), GREY)
        axes.text(21.5, middle, "+", fontsize=18, ha="center", va="center", color=ORANGE, weight="bold")
        axes.add_patch(
            FancyBboxPatch((20.3, middle - 1.2), 2.4, 2.4, boxstyle="round,pad=0", fill=False, ec=ORANGE, lw=2)
        )
    arrow(axes, (22.7 if s else left + side, middle), (26, middle), GREY)
    height, share = 12.0, config.rounds[s].heads / config.heads
    colour = BLUE if s == 0 else ORANGE
    blocks = 6
    for block in range(blocks):
        x = 26.6 + block * 4
        axes.add_patch(Rectangle((x, middle - height / 2), 3, height, color=PALE))
        axes.add_patch(Rectangle((x, middle - height / 2), 3, height * share, color=colour, alpha=0.85))
    axes.text(
        38,
        middle - height / 2 - 2.1,
        f"{config.depth} shared blocks, gated by PSG",
        fontsize=12,
        ha="center",
        color=GREY,
    )


def square(image: Image.Image) -> Image.Image:
    """The middle of the image."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side)).resize((224, 224))


def box(axes, x, y, width, height, text, colour):
    """A labelled box."""
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=1", fc="white", ec=colour, lw=2)
    )
    axes.text(
        x + width / 2, y + height / 2, text, fontsize=13.5, ha="center", va="center", color=colour, linespacing=1.4
    )


def arrow(axes, start, end, colour):
    """A straight arrow."""
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=18, lw=2, color=colour, shrinkA=0, shrinkB=0)
    )


if __name__ == "__main__":
    drawn = io.BytesIO()
    draw().savefig(drawn, dpi=140)
    OUT.write_bytes(few_colours(drawn.getvalue()))
    print(OUT)
