"""Backends of your own: any library runs the rounds of a model on numpy arrays.

Letters: B images, C channels, R side of the images, N tokens, d channels of tokens, K classes, s a round from 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from progresvit.engine.array_backend import GRAPH_BATCH, ArrayBackend
from progresvit.engine.backends import TorchSource
from progresvit.engine.buffers import ArrayRounds, RoundBackend
from progresvit.engine.export.manifest import tokens_shape
from progresvit.engine.options import EngineOptions
from progresvit.io.imports import make, name_of, resolve, source_hash

if TYPE_CHECKING:
    from pathlib import Path

    from progresvit.model import ProgResViT
    from progresvit.routing.decide import Policy

CustomBackend = ArrayRounds | Callable[[Any], ArrayRounds]
"""Rounds, or what makes them from a model, such as their class."""


class CheckedRounds:
    """The rounds of a user, with a check of what they return.

    Args:
        backend: The rounds or what makes them, or the import string of either.
        model: The model; rounds are made from a copy of it.
    """

    def __init__(self, backend: CustomBackend | str, model: ProgResViT) -> None:
        rounds: Any = find_backend(backend) if isinstance(backend, str) else backend
        self.name = backend if isinstance(backend, str) else name_of(backend)
        self.source, self.config = source_hash(rounds), model.config
        if callable(rounds) and (isinstance(rounds, type) or not hasattr(rounds, "run")):
            rounds = make(rounds, copy.deepcopy(model).eval(), what="backend", example="__init__(self, model)")
        if not callable(getattr(rounds, "run", None)):
            raise ValueError(f"{self.name} is not a backend; define its method run(s, pixels, tokens).")
        self._rounds: ArrayRounds = rounds

    def run(
        self, s: int, pixels: NDArray[np.uint8], tokens: NDArray[np.float32] | None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Round s, as in ``ArrayRounds``."""
        returned = self._rounds.run(s, pixels, tokens)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ValueError(f"run of {self.name} returned {type(returned).__name__}; return (logits, tokens).")
        logits = self._checked("logits", s, returned[0], (len(pixels), self.config.num_classes))
        if s == len(self.config.rounds) - 1:
            return logits, None
        return logits, self._checked("tokens", s, returned[1], (len(pixels), *tokens_shape(self.config, s)))

    def _checked(self, what: str, s: int, value: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
        array = np.asarray(np.nan if value is None else value, np.float32)
        if array.shape != shape:
            got = None if value is None else array.shape
            raise ValueError(f"{what} of round {s} of {self.name} must have the shape {shape}, not {got}; correct run.")
        return array


def find_backend(where: str) -> Any:
    """The rounds that an import string names, or what makes them."""

    def accepts(value: object) -> bool:
        return callable(value) or hasattr(value, "run")

    return resolve(where, what="backend", kind="backend", accepts=accepts)


class CustomSource(TorchSource):
    """A model that a backend of your own runs."""

    def __init__(
        self, model: ProgResViT, backend: CustomBackend | str, folder: Path | None = None, name: str | None = None
    ) -> None:
        super().__init__(model, folder, name)
        self.backend = backend
        self.graph_backend = backend if isinstance(backend, str) else name_of(backend)

    def make_backend(
        self, policy: Policy, temperatures: Sequence[float], options: EngineOptions
    ) -> tuple[str, RoundBackend, int]:
        used = {"device": str(options.device or "cpu") != "cpu", "precision": options.precision != "fp32"}
        used |= {"kernels": options.kernels is not None, "threads": options.threads is not None}
        if any(used.values()):
            names = " and ".join(name for name, is_used in used.items() if is_used)
            raise ValueError(f"a backend of your own has no option {names}; set it in the backend, and leave it out.")
        rounds = CheckedRounds(self.backend, self.model)
        made = ArrayBackend(rounds, self.config, policy, temperatures, options.top_k)
        made.identity = f"{made.identity} {rounds.source}"  # an edited backend does not continue files of the former
        return rounds.name, made, options.batch or GRAPH_BATCH
