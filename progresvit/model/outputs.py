"""The outputs of a round.

Letters: B images, K classes, N tokens (the class token and the patches), d active channels, g side of the patch
grid.
"""

from typing import NamedTuple

from torch import Tensor


class RoundOutput(NamedTuple):
    """One round's prediction, and the state that is passed to the next round."""

    logits: Tensor
    """(B, K); of a segmentation model (B, K, g, g), one prediction for each patch."""
    tokens: Tensor
    """(B, N, d), after the final norm, class token first. Early exits hand on the residual stream before the norm."""


class RoundFeatures(NamedTuple):
    """One round's features, after its final norm."""

    class_token: Tensor
    """(B, d)"""
    patch_tokens: Tensor
    """(B, g * g, d), row by row."""
    grid: int
    """Side of the patch grid, g."""
