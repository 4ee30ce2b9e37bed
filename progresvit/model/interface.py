"""RoundModel: what training, evaluation, records, routing and analysis require of a model, and the outputs of a round.

Letters: B images, C image channels, H side of the images, K classes, N tokens (the class token and the patches), d
active channels, g side of the patch grid, S rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

from torch import Tensor, nn

from progresvit.compute import Convention
from progresvit.config import BaseConfig


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


@runtime_checkable
class RoundModel(Protocol):
    """An ``nn.Module`` that predicts in rounds.

    It is built from its config, ``Model(config, drop_path=0.1)``, on ``torch.device("meta")`` as on any other. The
    config and the ``state_dict`` are all that a model folder holds. Register the kind of a model to save and load it:
    :func:`progresvit.model.register`. Training also uses ``no_weight_decay``, ``set_grad_checkpointing``,
    ``blocks`` and ``keep_classes`` of a model that has them.
    """

    @property
    def config(self) -> BaseConfig:
        """The config that the model was built from."""
        ...

    def __call__(self, images: Tensor) -> tuple[RoundOutput, ...]:
        """Every round, first to last, with no early exit: (B, C, H, H) -> S outputs. It is the module's ``forward``."""
        ...

    def run_round(self, s: int, images: Tensor, previous: Tensor | None = None) -> RoundOutput:
        """Round s, counted from 0.

        ``previous`` holds the tokens of round s - 1. Round 0 takes none, and neither do rounds that are alternatives
        of each other (``config.routable`` is false).
        """
        ...

    def gmacs(self, convention: Convention = "paper") -> list[float]:
        """GMACs spent on an image that exits after each round, one number per round."""
        ...

    # of nn.Module
    training: bool

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def to(self, *args: Any, **kwargs: Any) -> Self: ...

    def eval(self) -> Self: ...

    def train(self, mode: bool = True) -> Self: ...


def capability(model: RoundModel, name: str, key: str, remedy: str) -> Any:
    """An attribute that only some models have; ``key`` is the option that needs it."""
    if not hasattr(model, name):
        raise ValueError(f"{key} needs a model with {name!r}, which {type(model).__name__} lacks; set {remedy}.")
    return getattr(model, name)
