"""Attention of the class token to the patches of one image, in the last block of every round.

Tokens that were merged (ToMe) attract as much attention as their patches, so each of these patches gets an equal part.

Letters: C image channels, r resolution of a round, g side of its patch grid, N tokens (g * g patches and the class
token), d active channels, h active heads, s a round counted from 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from progresvit.analysis.hooks import BlockCall, evaluation_mode, recorded_calls
from progresvit.analysis.model_checks import need_backbone
from progresvit.config import HEAD_WIDTH, BaseConfig
from progresvit.data.decode import upright_rgb
from progresvit.data.transforms import evaluation_transform
from progresvit.metrics.arrays import Float32s
from progresvit.model import slicing
from progresvit.model.backbone import resize
from progresvit.model.interface import RoundModel
from progresvit.model.token_merging import Merging, unmerge
from progresvit.plots import blank_figure
from progresvit.table import Column, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = "viridis"
"""Colour map of attention; its order is visible to colour-blind readers and in greyscale."""
MOST_COLUMNS = 6
"""Heads side by side; more of them continue on the next line."""

WHAT = "attention maps"


@dataclass(frozen=True)
class RoundAttention:
    """Attention of the class token in the last block of a round: probabilities that sum to 1 for each active head."""

    patches: Float32s
    """To the patches, (h, g, g)."""
    class_token: Float32s
    """To the class token itself, (h,)."""
    heads: int
    """Heads of the whole backbone. The round runs the first h of them; the others are inactive."""
    image: Float32s
    """The image at the resolution of the round, values from 0 to 1, (r, r, C)."""

    @property
    def active_heads(self) -> int:
        return len(self.patches)

    @property
    def resolution(self) -> int:
        return len(self.image)


def attention_maps(model: RoundModel, image: Image) -> tuple[RoundAttention, ...]:
    """Attention of the class token in every round, first to last, with no early exit.

    The last block of a round is the last one that the round runs: with early exits, the block before the exit.

    Args:
        model: A model with the ViT of this library: ProgResViT or a baseline, with or without a head.
        image: The model sees its evaluation crop.
    """
    return attention_of(model, evaluation_input(image, need_backbone(model, WHAT).config))


def attention_of(model: RoundModel, images: Tensor) -> tuple[RoundAttention, ...]:
    """Attention of the class token as in :func:`attention_maps`, for a normalised image (1, C, H, H)."""
    backbone = need_backbone(model, WHAT)
    config, images = backbone.config, images.to(backbone.cls_token)
    previous, rounds = None, []
    with evaluation_mode(backbone), torch.no_grad(), recorded_calls(backbone.blocks) as calls:
        for s, round_ in enumerate(config.rounds):
            tokens = backbone.run_round(s, images, previous).tokens
            previous = tokens if config.routable else None
            attention = class_attention(calls[-1]).cpu().numpy()  # (h, N)
            g = config.grid(round_)
            rounds.append(
                RoundAttention(
                    patches=attention[:, 1:].reshape(-1, g, g),  # (h, g * g) -> (h, g, g)
                    class_token=attention[:, 0],
                    heads=config.heads,
                    image=visible_image(resize(images, round_.resolution)[0], config),
                )
            )
    return tuple(rounds)


def attention_table(rounds: Sequence[RoundAttention]) -> Table:
    """Attention to each patch. Rounds, heads, and rows and columns of the patch grid are counted from 1."""
    columns = [Column(key, key) for key in ("round", "head", "row", "column", "attention")]
    rows = [
        {"round": number, "head": head + 1, "row": row + 1, "column": column + 1, "attention": attention}
        for number, round_ in enumerate(rounds, start=1)
        for (head, row, column), attention in np.ndenumerate(round_.patches)
    ]
    return Table("Attention of the class token in the last block", columns, rows)


def attention_figure(rounds: Sequence[RoundAttention]) -> Figure:
    """A row for each round: the image at its resolution, then every head of the backbone; inactive heads are grey.

    The heads of a round share one colour scale, from 0 to their largest value. It is a square-root scale, so that small
    values are visible beside a large one.

    Args:
        rounds: What :func:`attention_maps` returns.
    """
    page = _Page(rounds=len(rounds), heads=rounds[0].heads)
    page.write("Attention of the class token to the patches, last block", top=0.2, fontsize=12)
    for s, round_ in enumerate(rounds):
        r, g, active = round_.resolution, round_.patches.shape[-1], round_.active_heads
        row = f"round {s + 1}: {r} × {r} pixels, {g} × {g} patches, active heads: {active} of {round_.heads}"
        page.write(row, top=page.top(s) - 0.33, fontsize=10)
        _draw_round(page, s, round_)
    caption = "Colours: attention probability in %, on a square-root scale that the heads of a round share."
    page.write(caption, top=page.height - 0.15, fontsize=8.5)
    return page.figure


class _Page:
    """A figure with square panels at places in inches: a column for the image, one per head, and the colour scale."""

    width, left, right = 6.4, 0.06, 0.52
    """Sizes of the page and of its margins; the colour scale is in the right margin."""
    gap, label = 0.07, 0.25
    """Space between panels, and above a panel for its title."""

    def __init__(self, *, rounds: int, heads: int) -> None:
        self.lines = math.ceil(heads / MOST_COLUMNS)  # of heads in a round
        self.columns = math.ceil(heads / self.lines)
        panels = self.columns + 1
        self.side = min(1.8, (self.width - self.left - self.right - panels * self.gap) / panels)
        self.height = self.top(rounds) - 0.2
        self.figure = blank_figure(height=self.height, layout=None)

    def top(self, s: int) -> float:
        """Upper edge of the panels of round s; of the round after the last, the end of the page."""
        return 0.8 + s * (self.lines * (self.side + self.label) + 0.4)

    def write(self, text: str, *, top: float, fontsize: float) -> None:
        """A line of text, centred at a distance from the upper edge."""
        place = (self.left / self.width, 1 - top / self.height)
        self.figure.text(*place, text, fontsize=fontsize, ha="left", va="center")

    def panel(self, s: int, line: int, column: int) -> Axes:
        """Axes of round s."""
        top = self.top(s) + line * (self.side + self.label)
        return self._axes(self.left + column * (self.side + self.gap), top, width=self.side, height=self.side)

    def scale(self, s: int) -> Axes:
        """Axes of the colour scale of round s, right of its first line."""
        left = self.left + (self.columns + 1) * (self.side + self.gap)
        return self._axes(left, self.top(s), width=0.1, height=self.side)

    def _axes(self, left: float, top: float, *, width: float, height: float) -> Axes:
        bottom = self.height - top - height
        return self.figure.add_axes((left / self.width, bottom / self.height, width / self.width, height / self.height))


def _draw_round(page: _Page, s: int, round_: RoundAttention) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm

    r, largest = round_.resolution, float(round_.patches.max()) or 1.0
    place = (0, r, r, 0)  # a map covers the pixels of the image
    colours: dict[str, Any] = {"cmap": COLOURS, "norm": PowerNorm(0.5, vmin=0, vmax=largest)}
    panel = page.panel(s, 0, 0)
    panel.imshow(round_.image.squeeze(), extent=place, cmap="gray", vmin=0, vmax=1)
    _finish(panel, "image", r)
    for head in range(round_.heads):
        panel = page.panel(s, head // page.columns, 1 + head % page.columns)
        if head < round_.active_heads:
            panel.imshow(round_.patches[head], extent=place, interpolation="nearest", **colours)
        else:
            panel.set_facecolor("0.88")
            panel.text(r / 2, r / 2, "inactive", ha="center", va="center", fontsize=9)
        _finish(panel, f"head {head + 1}", r)
    ticks = [0, largest / 4, largest]
    page.figure.colorbar(ScalarMappable(**colours), cax=page.scale(s), ticks=ticks)
    page.figure.axes[-1].set_yticklabels([_percent(tick) for tick in ticks], fontsize=8)


def _percent(share: float) -> str:
    """Two digits, without the sign, which the caption has."""
    return f"{100 * share:.0f}" if share > 0.095 else f"{100 * share:.2g}"


def _finish(panel: Axes, title: str, r: int) -> None:
    panel.set(xticks=[], yticks=[], xlim=(0, r), ylim=(r, 0))
    panel.set_title(title, fontsize=9, pad=3)


def evaluation_input(image: Image, config: BaseConfig) -> Tensor:
    """The evaluation crop, normalised: (1, C, H, H)."""
    if config.in_channels not in (1, 3):
        raise ValueError(f"an image has 1 or 3 channels, and this model takes {config.in_channels}.")
    upright = upright_rgb(image)
    return evaluation_transform(config)(upright if config.in_channels == 3 else upright.convert("L"))[None]


def visible_image(image: Tensor, config: BaseConfig) -> Float32s:
    """Normalised values back to 0..1: (C, r, r) -> (r, r, C)."""
    mean, std = (torch.tensor(values) for values in (config.mean, config.std))
    pixels = (image.permute(1, 2, 0).cpu().float() * std + mean).clamp(0, 1)  # (C, r, r) -> (r, r, C)
    return pixels.numpy()


def class_attention(call: BlockCall) -> Tensor:
    """Attention probabilities of the class token, in float32: tokens (1, N, d) -> (h, N)."""
    block, x, options = call.block, call.x, call.options
    merging: Merging | None = options.get("merging")
    if merging is not None:
        x = unmerge(x, merging)  # equal keys give the same attention as a merged token with its bias
    q, k, _ = block.attn.heads(slicing.layer_norm(x, block.norm1), options.get("attention_width"))  # (1, h, N, 64)
    logits = q[0, :, :1].float() @ k[0].float().mT / math.sqrt(HEAD_WIDTH)  # (h, 1, 64) and (h, 64, N) -> (h, 1, N)
    return logits[:, 0].softmax(dim=-1)  # (h, 1, N) -> (h, N)
