"""Predictions from the class tokens of a frozen model, without its head: nearest neighbours and linear probes.

Letters: B images, M images of the bank, S rounds, d channels, L learning rates, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from progresvit.metrics.knn import knn_votes, vote_logits
from progresvit.model.interface import RoundModel
from progresvit.predict.head import MakeColumns

ROWS = 512
"""Images whose columns are made at a time."""


def class_tokens(
    model: RoundModel, images: Tensor, dtype: torch.dtype | None = None, *, blocks: int = 1
) -> list[Tensor]:
    """The class tokens of each round after its last blocks, after its final norm, in float32.

    (B, C, H, H) -> S times (B, blocks * d)
    """
    with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
        if blocks == 1:
            return [features.class_token.float() for features in cast(Any, model).features(images)]
        return [tokens.float() for tokens in cast(Any, model).class_tokens(images, blocks)]


class Features:
    """Gives the class tokens themselves: a column ``round1``, ``round2``, … for each round.

    Args:
        model: It is in evaluation mode.
        dtype: Precision of autocast; None: float32.
    """

    def __init__(self, model: RoundModel, *, dtype: torch.dtype | None = None) -> None:
        self.model, self.dtype = model, dtype

    def columns(self, images: Tensor, targets: Tensor | None) -> dict[str, Tensor]:
        return {f"round{s}": tokens for s, tokens in enumerate(class_tokens(self.model, images, self.dtype), start=1)}


class KNN:
    """Labelled images, the bank, vote for the classes of others by the similarity of their class tokens.

    The logarithms of the votes take the place of logits, so the entropy of the votes is the score of a round.

    Args:
        bank: Class tokens of each round, S times (M, d). One round is read at a time.
        bank_targets: Classes of the bank, (M,).
        classes: Number of classes.
        k: Number of neighbours.
        temperature: Temperature of the weights exp(similarity / temperature).
        make: Makes the columns from the logits.
    """

    def __init__(
        self,
        bank: Iterable[Tensor],
        bank_targets: Tensor,
        *,
        classes: int,
        k: int,
        temperature: float,
        make: MakeColumns,
    ) -> None:
        self.bank, self.bank_targets, self.make = bank, bank_targets, make
        self.classes, self.k, self.temperature = classes, k, temperature

    def columns(self, images: Iterable[Tensor], targets: Tensor) -> dict[str, Tensor]:
        """The columns of all images at once; ``images`` are their class tokens, S times (N, d)."""
        votes = [
            knn_votes(tokens, bank, self.bank_targets, classes=self.classes, k=self.k, temperature=self.temperature)
            for bank, tokens in zip(self.bank, images)
        ]  # S times (N, K)
        pieces = []
        for rows in torch.arange(len(targets), device=targets.device).split(ROWS):
            logits = [vote_logits(of_round[rows]) for of_round in votes]
            pieces.append(self.make(logits, targets=targets[rows]))
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


class Linear:
    """A linear classifier of each round.

    Args:
        model: It is in evaluation mode.
        probe: Gives the logits of all classifiers from class tokens: S times (B, d) -> S times (L, B, K).
        best: Number of the classifier of each round that predicts.
        blocks: Blocks whose class tokens the probe reads.
        dtype: Precision of autocast; None: float32.
        make: Makes the columns from the logits.
    """

    def __init__(
        self,
        model: RoundModel,
        probe: Callable[[Sequence[Tensor]], list[Tensor]],
        best: Sequence[int],
        *,
        blocks: int = 1,
        dtype: torch.dtype | None = None,
        make: MakeColumns,
    ) -> None:
        self.model, self.probe, self.best, self.blocks = model, probe, best, blocks
        self.dtype, self.make = dtype, make

    def columns(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        rounds = self.probe(class_tokens(self.model, images, self.dtype, blocks=self.blocks))
        logits = [of_round[number] for of_round, number in zip(rounds, self.best)]  # (L, B, K) -> (B, K)
        return self.make(logits, targets=targets)
