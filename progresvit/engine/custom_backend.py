"""Backends of your own: any library runs the rounds of a model on numpy arrays.

Letters: B images, C channels, R side of the images, N tokens, d channels of tokens, K classes, s a round from 0.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from progresvit.engine.array_backend import GRAPH_BATCH, ArrayBackend
from progresvit.engine.backends import TorchSource
from progresvit.engine.buffers import ArrayRounds, RoundBackend
from progresvit.engine.export.manifest import tokens_shape
from progresvit.engine.options import EngineOptions
from progresvit.io.imports import import_named, name_of, source_hash

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
        given: Any = find_backend(backend) if isinstance(backend, str) else backend
        self.name = backend if isinstance(backend, str) else name_of(backend)
        self.source, self.config = source_hash(given), model.config
        if callable(given) and (isinstance(given, type) or not hasattr(given, "run")):
            try:
                inspect.signature(given).bind(model)
            except TypeError:
                raise ValueError(f"{self.name} is made with the model; define it as __init__(self, model).") from None
            try:
                given = given(copy.deepcopy(model).eval())
            except TypeError as error:
                raise ValueError(
                    f"{self.name} cannot be made with the model ({error}); define it as __init__(self, model)."
                ) from error
        if not callable(getattr(given, "run", None)):
            raise ValueError(f"{self.name} is not a backend: it has no method run(s, pixels, tokens); add it.")
        self._rounds: ArrayRounds = given

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
        found = None if value is None else np.asarray(value, np.float32)
        if found is None or found.shape != shape:
            got = None if found is None else found.shape
            raise ValueError(f"{what} of round {s} of {self.name} must have the shape {shape}, not {got}; correct run.")
        return found


def find_backend(where: str) -> Any:
    """What an import string names: rounds, or what makes them."""

    def accepts(value: object) -> bool:
        return callable(value) or hasattr(value, "run")

    return import_named(where, what="backend", kind="backend", accepts=accepts)


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
        given = {"device": str(options.device or "cpu") != "cpu", "precision": options.precision != "fp32"}
        given |= {"kernels": options.kernels is not None, "threads": options.threads is not None}
        if any(given.values()):
            names = " and ".join(name for name, is_given in given.items() if is_given)
            raise ValueError(f"a backend of your own has no option {names}; set it in the backend, and leave it out.")
        rounds = CheckedRounds(self.backend, self.model)
        made = ArrayBackend(rounds, self.config, policy, temperatures, options.top_k)
        made.identity = f"{made.identity} {rounds.source}"  # an edited backend does not continue files of the former
        return rounds.name, made, options.batch or GRAPH_BATCH
