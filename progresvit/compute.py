"""Multiply-accumulates and parameters of a config, in closed form. No torch.

There are two conventions. Never compare figures of one with figures of the other.

- ``"paper"``: matrix products, convolutions and attention products; the patch embedding at the model's full
  width in every round; every gate at its full width once per use. Norms, activations, interpolation and
  elementwise work are not counted. Merging tokens counts the products that match them. The head of a
  segmentation model, its linear decoder, is applied to every patch.
- ``"executed"``: the products of a deployed round. Only the active channels are embedded, and gates are constants
  folded into the weights, so they cost nothing.

Letters: N patches, T tokens (N + 1), d active channels, W channels of the whole backbone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal, get_args

from progresvit.config import HEAD_WIDTH, MLP_RATIO, PSG_METADATA, PSG_WIDTH, BackboneConfig, ModelConfig

Convention = Literal["paper", "executed"]
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)

BLOCK_GATES = 3
"""Attention, MLP and output."""

FUSION_GATES = 2
"""New image and previous round."""


@dataclass(frozen=True, kw_only=True)
class RoundMacs:
    """Multiply-accumulates that one round adds, per image, by component."""

    patch_embedding: int
    attention_projections: int
    attention_products: int
    mlp: int
    head: int
    block_gates: int = 0
    projector: int = 0
    fusion_gates: int = 0
    token_merging: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

    @property
    def transition(self) -> int:
        """The cost of projecting and fusing the previous round's tokens."""
        return self.projector + self.fusion_gates

    @property
    def stack(self) -> int:
        """The round without the transition into it."""
        return self.total - self.transition


def round_macs(config: ModelConfig, convention: Convention = "paper") -> tuple[RoundMacs, ...]:
    """MACs that each round adds to those before it."""
    full_width, widths = config.width, [round_.width for round_ in config.rounds]
    gated = config.psg and convention == "paper"
    block_gates = config.depth * (PSG_METADATA * PSG_WIDTH + BLOCK_GATES * _gate(full_width)) if gated else 0
    rounds = []
    for round_, width, before in zip(config.rounds, widths, (0, *widths)):  # before: of the previous round
        stack = stack_macs(config, convention, resolution=round_.resolution, width=width, merge=round_.merge)
        projector = _projector(before, width, patches=(round_.resolution // config.patch_size) ** 2)
        fusion_gates = FUSION_GATES * _gate(width) if gated and before else 0
        rounds.append(replace(stack, block_gates=block_gates, projector=projector, fusion_gates=fusion_gates))
    return tuple(rounds)


def cumulative_gmacs(config: ModelConfig, convention: Convention = "paper") -> list[float]:
    """GMACs spent on an image that exits after each round."""
    return accumulated_gmacs(round_macs(config, convention))


def accumulated_gmacs(rounds: Sequence[RoundMacs]) -> list[float]:
    """GMACs after each round, if the rounds build on each other."""
    return [total / 1e9 for total in accumulate(macs.total for macs in rounds)]


def average_gmacs(config: ModelConfig, exit_shares: Sequence[float], convention: Convention = "paper") -> float:
    """GMACs per image when ``exit_shares[s]`` of the images exit after round s."""
    if len(exit_shares) != len(config.rounds):
        raise ValueError(f"{len(exit_shares)} exit shares for {len(config.rounds)} rounds; give one per round.")
    if not (min(exit_shares) >= 0 and abs(sum(exit_shares) - 1) <= 1e-6):
        raise ValueError(f"exit shares must be at least 0 and sum to 1, not {list(exit_shares)}.")
    return sum(share * gmacs for share, gmacs in zip(exit_shares, cumulative_gmacs(config, convention)))


def parameters(config: ModelConfig) -> int:
    """Trainable parameters of the whole model."""
    width, classes, widths = config.width, config.num_classes, [round_.width for round_ in config.rounds]
    embedding = _linear(config.in_channels * config.patch_size**2, width)
    position = (config.stored_grid**2 + 1) * width
    norm = 2 * width
    attention = _linear(width, 3 * width) + _linear(width, width)
    mlp = _linear(width, MLP_RATIO * width) + _linear(MLP_RATIO * width, width)
    layer_scale = 2 * width if config.layer_scale is not None else 0
    block = 2 * norm + attention + mlp + layer_scale
    backbone = embedding + position + width + config.depth * block + norm  # + width: the class token
    head = _linear(width, classes) if classes else 0
    projectors = sum(9 * source + 2 * _linear(source, target) for source, target in pairwise(widths))
    psg = _psg_parameters(width, widths[1:], config.depth) if config.psg else 0
    return backbone + head + projectors + psg


def stack_macs(
    config: BackboneConfig,
    convention: Convention,
    *,
    resolution: int,
    width: int,
    attention_width: int | None = None,
    hidden: int | None = None,
    blocks: int | None = None,
    embeds: bool = True,
    merge: int = 0,
) -> RoundMacs:
    """MACs of a pass through a plain ViT, from the patch embedding to the head.

    Args:
        config: The whole backbone.
        convention: Under ``paper`` the patch embedding counts at the full width.
        resolution: Side of the image.
        width: Channels of the tokens.
        attention_width: Channels of queries, keys and values; None: as wide as the tokens.
        hidden: Hidden channels of the MLP; None: four times the width.
        blocks: Blocks that run; None: all.
        embeds: Whether the image is embedded, or tokens are continued.
        merge: Tokens merged between attention and MLP of each block.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"unknown convention {convention!r}; use 'paper' or 'executed'.")
    patches = (resolution // config.patch_size) ** 2
    attention_width = width if attention_width is None else attention_width
    hidden = MLP_RATIO * width if hidden is None else hidden
    blocks = config.depth if blocks is None else blocks
    merged = [merge * number for number in range(blocks)]  # ahead of each block
    tokens = [patches + 1 - before for before in merged]
    embedded = (config.heads * HEAD_WIDTH if convention == "paper" else width) if embeds else 0
    return RoundMacs(
        patch_embedding=patches * config.in_channels * config.patch_size**2 * embedded,
        attention_projections=sum(tokens) * 4 * width * attention_width,  # q, k, v and the output
        attention_products=sum(2 * T * T for T in tokens) * attention_width,  # queries with keys, weights with values
        mlp=sum(T - merge for T in tokens) * 2 * width * hidden,
        head=(patches if config.task == "segmentation" else 1) * width * config.num_classes,
        token_merging=sum(_matching(patches - before) for before in merged) if merge else 0,
    )


def _matching(patches: int) -> int:
    """MACs of the similarities between the keys of the two halves of the patch tokens."""
    return (patches - patches // 2) * (patches // 2) * HEAD_WIDTH


def _gate(width: int) -> int:
    """MACs of one gate: Linear(128, 128), SiLU, Linear(128, width)."""
    return PSG_WIDTH * (PSG_WIDTH + width)


def _projector(source: int, target: int, patches: int) -> int:
    """MACs of a projector: depthwise 3x3 and 1x1 on the patches, one linear on the class token; 0 without a source."""
    return patches * (9 * source + source * target) + source * target


def _linear(inputs: int, outputs: int) -> int:
    """Parameters of a linear layer, bias included."""
    return (inputs + 1) * outputs


def _psg_parameters(full_width: int, later_widths: Sequence[int], depth: int) -> int:
    """Parameters of the encoder, of the gates of all blocks, and of the gates of the transitions to later rounds."""

    def gate(width: int) -> int:
        return _linear(PSG_WIDTH, PSG_WIDTH) + _linear(PSG_WIDTH, width)

    block = BLOCK_GATES * gate(full_width) + 2 * full_width  # + the two scale vectors
    fusion = sum(FUSION_GATES * gate(width) for width in later_widths)
    return _linear(PSG_METADATA, PSG_WIDTH) + depth * block + fusion
