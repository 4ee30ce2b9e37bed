"""Projects the tokens of a round to the grid and width of the next round.

Letters: B images, N tokens, d channels, g side of the patch grid; primed (d', g') for the next round.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TokenProjector(nn.Module):
    """Resize, refine, widen. Its initial weights copy the shared channels and set the new ones to zero."""

    def __init__(self, *, source_width: int, target_width: int, target_grid: int) -> None:
        super().__init__()
        self.target_grid = target_grid
        self.depthwise = nn.Conv2d(
            source_width, source_width, kernel_size=3, padding=1, groups=source_width, bias=False
        )
        self.widen_patches = nn.Conv2d(source_width, target_width, kernel_size=1)
        self.widen_class = nn.Linear(source_width, target_width)
        self._start_as_identity()

    @torch.no_grad()
    def _start_as_identity(self) -> None:
        if self.widen_class.weight.is_meta:  # nothing to initialise, and torch would import its compiler for eye_
            return
        nn.init.dirac_(self.depthwise.weight, groups=self.depthwise.groups)
        nn.init.dirac_(self.widen_patches.weight)
        nn.init.eye_(self.widen_class.weight)
        nn.init.zeros_(self.widen_class.bias)
        assert self.widen_patches.bias is not None
        nn.init.zeros_(self.widen_patches.bias)

    @torch.no_grad()
    def start_quiet(self) -> None:
        """Set the widening layers to zero: nothing is added to the next round until training changes them."""
        for layer in (self.widen_patches, self.widen_class):
            for parameter in layer.parameters():
                parameter.zero_()

    def forward(self, tokens: Tensor, target_grid: int | None = None) -> Tensor:
        """(B, N, d) -> (B, N', d'); ``target_grid`` replaces the grid of the next round (for crops of its image)."""
        target = self.target_grid if target_grid is None else target_grid
        class_token, patches = tokens[:, :1], tokens[:, 1:]
        side = math.isqrt(patches.shape[1])
        grid = patches.mT.unflatten(2, (side, side))  # (B, N - 1, d) -> (B, d, g, g)
        if side != target:
            size = (target, target)
            grid = F.interpolate(grid, size=size, mode="bilinear", align_corners=False)  # -> (B, d, g', g')
        grid = self.widen_patches(self.depthwise(grid))  # (B, d, g', g') -> (B, d', g', g')
        patches = grid.flatten(2).mT  # (B, d', g', g') -> (B, N' - 1, d')
        return torch.cat([self.widen_class(class_token), patches], dim=1)  # (B, N', d')
