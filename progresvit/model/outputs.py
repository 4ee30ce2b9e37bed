"""What a round gives back.

Letters: B images, K classes, N tokens (the class token and the patches), d active channels.
"""

from typing import NamedTuple

from torch import Tensor


class RoundOutput(NamedTuple):
    """One round's prediction, and the state that the next round starts from."""

    logits: Tensor
    """(B, K)"""
    tokens: Tensor
    """(B, N, d), after the final norm, class token first."""
