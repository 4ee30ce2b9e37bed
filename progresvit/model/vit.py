"""ProgResViT: one shared backbone that processes an image in rounds.

Letters: B images, C image channels, H side of the images, N tokens (patches and the class token), d active channels of
a round, s a round counted from 0, D blocks, r tokens merged in a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import Tensor, nn

from progresvit import compute
from progresvit.config import ModelConfig
from progresvit.model import slicing
from progresvit.model.backbone import Backbone
from progresvit.model.interface import RoundOutput
from progresvit.model.projector import TokenProjector
from progresvit.model.psg import PSG, BlockGates, FusionGates, GateStart, RoundGates
from progresvit.model.token_merging import Merging, unmerge


class ProgResViT(Backbone):
    """A Vision Transformer that refines its prediction round by round, on more pixels and with more channels."""

    config: ModelConfig

    def __init__(self, config: ModelConfig, *, drop_path: float = 0.0, start_gates: GateStart = "paper") -> None:
        super().__init__(config, drop_path=drop_path)
        self.merges = tuple(round_.merge for round_ in config.rounds)
        """Patch tokens merged in each block of each round."""
        self.projectors = nn.ModuleList(
            TokenProjector(source_width=source, target_width=target, target_grid=grid)
            for (source, target), grid in zip(pairwise(self.widths), self.grids[1:])
        )
        self.psg = (
            PSG(
                resolutions=self.resolutions,
                widths=self.widths,
                depth=config.depth,
                full_width=config.width,
                static=config.psg == "static",
                start=start_gates,
            )
            if config.psg
            else None
        )

    def run_round(self, s: int, images: Tensor, previous: Tensor | None = None) -> RoundOutput:
        """Round s, counted from 0. From the second round on, ``previous`` holds the tokens of the round before."""
        self.check_round(s, images, previous)
        return self._run(s, images, previous, resolution=self.resolutions[s])

    def run_at(self, images: Tensor, resolutions: Sequence[int]) -> tuple[RoundOutput, ...]:
        """Every round at another resolution than its own: the rounds of a crop that shows a part of the image.

        Multi-crop training (DINO) needs it. Every crop uses the gates of its round: they describe the stage, not the
        crop.
        """
        outputs: list[RoundOutput] = []
        for s, resolution in enumerate(resolutions):
            previous = outputs[-1].tokens if outputs else None
            outputs.append(self._run(s, images, previous, resolution=resolution))
        return tuple(outputs)

    def _run(self, s: int, images: Tensor, previous: Tensor | None, *, resolution: int) -> RoundOutput:
        gates = self.gates(s)
        x = self.embed(images, resolution=resolution, width=self.widths[s])  # (B, C, H, H) -> (B, N, d)
        if previous is not None:
            x = self.fuse(s, x, previous, gates.fusion)
        x = self.run_blocks(x, gates.blocks, merge=self.merges[s])
        tokens = slicing.layer_norm(x, self.norm)
        return RoundOutput(logits=self.classify(tokens), tokens=tokens)

    def run_blocks(self, x: Tensor, gates: Sequence[BlockGates], *, merge: int) -> Tensor:
        """All blocks; each merges ``merge`` patch tokens into others if it is not 0. (B, N, d) -> (B, N, d)"""
        if not merge:
            for block, block_gates in zip(self.blocks, gates):
                x = self.run_block(block, x, block_gates)
            return x
        merging = Merging.start(x, merge)
        for block, block_gates in zip(self.blocks, gates):
            x, merging = self.run_block(block, x, block_gates, merging=merging)  # (B, N, d) -> (B, N - r, d)
        return unmerge(x, merging)  # (B, N - D * r, d) -> (B, N, d)

    def round_macs(self, convention: compute.Convention = "paper") -> Sequence[compute.RoundMacs]:
        """MACs that each round adds to the rounds before it."""
        return compute.round_macs(self.config, convention)

    def gates(self, s: int) -> RoundGates:
        """The multipliers of round s; all one without PSG."""
        gates: RoundGates = RoundGates.off(len(self.blocks)) if self.psg is None else self.psg(s)
        return gates

    def fuse(self, s: int, x: Tensor, previous: Tensor, gates: FusionGates) -> Tensor:
        """Fuse the new tokens of round s with the projected tokens of the previous round: both (B, N, d)."""
        grid = math.isqrt(x.shape[1] - 1)
        projected: Tensor = self.projectors[s - 1](previous, grid)  # to the grid and the width of round s
        return gates.image * x + gates.previous * projected

    def start_quiet(self) -> None:
        """Begin with rounds that ignore the round before, so that the last one is the plain ViT of the backbone."""
        for projector in self.projectors:
            cast(TokenProjector, projector).start_quiet()

    def set_merge(self, merge: Sequence[int]) -> None:
        """Merge this many patch tokens in each block of each round (ToMe's r), 0 for none: ``set_merge([0, 8])``.

        It needs no training. Thresholds that were calibrated before do not hold any more.
        """
        self.config = self.config.with_merge(merge)
        self.merges = tuple(merge)
