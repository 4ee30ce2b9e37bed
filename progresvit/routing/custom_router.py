"""Routers of your own: a function of the statistics of a round's logits, given as an object or by import string.

Records hold these statistics and the engine computes them, so one function serves frontiers, calibration and inference.
Letters: B or N images, S rounds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from progresvit.io.imports import check_call, is_import_string, make, name_of, resolve, source_hash
from progresvit.routing.router import Router, RouterOrigin, load_router


class ExitScore(Protocol):
    """A router of your own: a function, or an object that can be called, such as an ``nn.Module``."""

    def __call__(self, s: int, statistics: Tensor, /) -> Tensor:
        """Scores from 0 to 1 after round s, counted from 0; low scores exit: (B, 23) -> (B,).

        ``routing.STATISTICS`` names the statistics, which are on the device of the model. On a GPU the function
        becomes part of a CUDA graph, so it must not read values on the host.
        """
        ...


class CustomRouter(Router):
    """The scores of a function in place of learned networks.

    Args:
        score: The function.
        rounds: Rounds of the model.
    """

    def __init__(self, score: ExitScore, rounds: int) -> None:
        name = name_of(score)
        example = "score(s, statistics), or as __call__(self, s, statistics) of a class"
        check_call(score, 0, None, what="router", example=example)
        super().__init__(rounds, RouterOrigin(target=name, images=0, epochs=0, seed=0))
        self.name, self.function, self.source = name, score, f"{name} {source_hash(score)}"

    def networks(self) -> list[nn.Module]:
        return []

    def probability(self, s: int, statistics: Tensor) -> Tensor:
        scores = self.function(s, statistics)
        if not isinstance(scores, Tensor) or scores.shape != statistics.shape[:1]:
            shape = tuple(scores.shape) if hasattr(scores, "shape") else type(scores).__name__
            raise ValueError(
                f"the router {self.name} must return a tensor with one score for each image, of shape "
                f"({len(statistics)},), not {shape}."
            )
        return scores.float()

    def scores(self, statistics: ArrayLike) -> NDArray[np.float32]:
        """Scores of records: (N, S, 23) -> (N, S), checked."""
        values = super().scores(statistics)
        finite = values[np.isfinite(values)]
        if finite.size and not 0 <= finite.min() <= finite.max() <= 1:
            raise ValueError(
                f"the router {self.name} gives scores from {finite.min():.4g} to {finite.max():.4g}; scale them to "
                "0 … 1, for example with a sigmoid."
            )
        return values


def open_router(router: Router | ExitScore | str | os.PathLike[str], rounds: int) -> Router:
    """A router that ``fit_router`` made or its file, or one of your own: a function, or its import string.

    A class that an import string names is called without arguments.
    """
    if isinstance(router, Router):
        return router
    score: Any = router
    if isinstance(router, str | os.PathLike):
        path = os.fspath(router)
        if not is_import_string(path) or Path(path).exists():
            return load_router(path)
        score = resolve(path, what="router")
    if isinstance(score, type):
        score = make(score, what="router", example="__init__(self), or name an object of the module")
    return CustomRouter(score, rounds)
