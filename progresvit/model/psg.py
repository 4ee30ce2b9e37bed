"""Progress-Conditioned Soft Gating (PSG): channel multipliers that condition the shared blocks on the current stage.

The gates do not depend on the image: for a given round they are constants. Training learns them, the engine folds them.

Letters: S rounds, D blocks, d active channels of a round, W channels of the whole backbone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from progresvit.config import PSG_METADATA, PSG_WIDTH

GateStart = Literal["paper", "torch"]
"""Start values of the hidden layers of the block gates: the authors', or torch's default for a linear layer."""


class BlockGates(NamedTuple):
    """Multipliers of one block; attn and mlp hold PSG's scale vectors too. Each (d,), or 1 where PSG is off."""

    attn: Tensor | float = 1.0
    mlp: Tensor | float = 1.0
    out: Tensor | float = 1.0


class FusionGates(NamedTuple):
    """Multipliers of the two streams that are fused at a transition. Each (d,), or 1 where PSG is off."""

    image: Tensor | float = 1.0
    previous: Tensor | float = 1.0


class RoundGates(NamedTuple):
    """All multipliers of one round. The first round has no transition and does not use its fusion gates."""

    fusion: FusionGates
    blocks: tuple[BlockGates, ...]

    @classmethod
    def off(cls, depth: int) -> RoundGates:
        """The gates of a model without PSG."""
        return cls(fusion=FusionGates(), blocks=(BlockGates(),) * depth)


def stage_metadata(resolutions: Sequence[int], depth: int) -> Tensor:
    """The stage of inference at each block of each round: (S, D, 5)."""
    steps = max(1, len(resolutions) * depth - 1)
    previous = (resolutions[0], *resolutions[:-1])
    return torch.tensor(
        [
            [
                [s, (s * depth + b) / steps, math.log2(r / 224), math.log2(r_prev / 224), math.log2(r / r_prev)]
                for b in range(depth)
            ]
            for s, (r, r_prev) in enumerate(zip(resolutions, previous))
        ],
        dtype=torch.float32,
    )


class Gate(nn.Module):
    """Maps a condition to multipliers, 1 + delta. The last layer starts at zero, so every gate starts at one.

    torch's start of the hidden layer gives about three times larger activations than the authors', so a gate changes
    that much faster.
    """

    def __init__(self, *, width: int, start: GateStart = "torch") -> None:
        super().__init__()
        self.hidden = nn.Linear(PSG_WIDTH, PSG_WIDTH)
        if start == "paper" and not self.hidden.weight.is_meta:
            nn.init.trunc_normal_(self.hidden.weight, std=0.02)
            nn.init.zeros_(self.hidden.bias)
        self.delta = nn.Linear(PSG_WIDTH, width)
        nn.init.zeros_(self.delta.weight)
        nn.init.zeros_(self.delta.bias)


def multipliers(gates: Sequence[Gate], conditions: Tensor) -> Tensor:
    """The output of each gate for its condition: (G, 128) -> (G, width).

    One batched product for all gates: they are so small that launching one kernel each would dominate the time.
    """
    hidden = F.silu(_each(conditions, [gate.hidden for gate in gates]))  # (G, 128)
    return 1 + _each(hidden, [gate.delta for gate in gates])  # (G, 128) -> (G, width)


def _each(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """Row g through layer g: (G, inputs) -> (G, outputs)."""
    weight = torch.stack([layer.weight for layer in layers])  # (G, outputs, inputs)
    bias = torch.stack([layer.bias for layer in layers])  # (G, outputs)
    return torch.baddbmm(bias.unsqueeze(2), weight, x.unsqueeze(2)).squeeze(2)


class BlockPSG(nn.Module):
    """A block's own three gates and its own two scales."""

    def __init__(self, *, width: int, start: GateStart) -> None:
        super().__init__()
        self.attn_gate = Gate(width=width, start=start)
        self.mlp_gate = Gate(width=width, start=start)
        self.out_gate = Gate(width=width, start=start)
        self.attn_scale = nn.Parameter(torch.ones(width))
        self.mlp_scale = nn.Parameter(torch.ones(width))


class FusionPSG(nn.Module):
    """A transition's own two gates, as wide as the round that follows it. Their start is torch's, as the authors'."""

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.image_gate = Gate(width=width)
        self.previous_gate = Gate(width=width)


class PSG(nn.Module):
    """The shared encoder and all gates of a model.

    Static gates see the metadata of round 0 in every round: the same number of scales, but none that depends on the
    round.
    """

    metadata: Tensor

    def __init__(
        self,
        *,
        resolutions: Sequence[int],
        widths: Sequence[int],
        depth: int,
        full_width: int,
        static: bool = False,
        start: GateStart = "paper",
    ) -> None:
        super().__init__()
        self.resolutions, self.widths, self.depth, self.static = tuple(resolutions), tuple(widths), depth, static
        self.register_buffer("metadata", self._make_metadata(), persistent=False)  # (S, D, 5)
        self.encoder = nn.Linear(PSG_METADATA, PSG_WIDTH)
        self.blocks = nn.ModuleList(BlockPSG(width=full_width, start=start) for _ in range(depth))
        self.fusions = nn.ModuleList(FusionPSG(width=width) for width in self.widths[1:])
        self.register_load_state_dict_post_hook(_move_metadata)  # type: ignore[no-untyped-call]

    def forward(self, s: int) -> RoundGates:
        """The gates of round s. Computed without autocast: 1 + delta in bfloat16 would lose small deltas."""
        kind = self.metadata.device.type
        with torch.autocast("cpu" if kind == "meta" else kind, enabled=False):
            metadata = self.metadata[s].to(self.encoder.weight.dtype)
            conditions = F.silu(self.encoder(metadata))  # (D, 5) -> (D, 128)
            fusion = FusionGates()
            if s > 0:  # conditioned on the stage of the first block
                own = cast(FusionPSG, self.fusions[s - 1])
                fusion = FusionGates(*multipliers([own.image_gate, own.previous_gate], conditions[0].expand(2, -1)))
            return RoundGates(fusion=fusion, blocks=self._block_gates(conditions, self.widths[s]))

    def _block_gates(self, conditions: Tensor, width: int) -> tuple[BlockGates, ...]:
        """The gates of all blocks, with their scales: (D, 128) -> D times three vectors (d,)."""
        blocks = list(cast(Iterable[BlockPSG], self.blocks))
        gates = [gate for own in blocks for gate in (own.attn_gate, own.mlp_gate, own.out_gate)]
        values = multipliers(gates, conditions.repeat_interleave(3, dim=0))  # (3D, 128) -> (3D, W)
        values = values[:, :width].unflatten(0, (-1, 3))  # (3D, W) -> (D, 3, d)
        attn = values[:, 0] * torch.stack([own.attn_scale for own in blocks])[:, :width]  # (D, d)
        mlp = values[:, 1] * torch.stack([own.mlp_scale for own in blocks])[:, :width]  # (D, d)
        return tuple(BlockGates(*vectors) for vectors in zip(attn, mlp, values[:, 2]))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PSG:
        """Metadata moves with the module but stays exact: ``model.half().float()`` must not round it."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.metadata = self._make_metadata().to(self.metadata.device)
        return self

    def _make_metadata(self) -> Tensor:
        metadata = stage_metadata(self.resolutions, self.depth)
        return metadata[:1].expand_as(metadata).clone() if self.static else metadata


def _move_metadata(psg: PSG, _: object) -> None:
    """Create the metadata on the device of weights that were assigned to a model on the meta device.

    No file holds the metadata.
    """
    if psg.metadata.is_meta:
        psg.metadata = psg._make_metadata().to(psg.encoder.weight.device)
