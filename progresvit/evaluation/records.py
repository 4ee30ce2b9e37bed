"""Records: what a model gives for every image in every round, from which tables and thresholds are computed.

``record_files`` reads and writes them. Records of classification models and of segmentation models
(``segmentation_records``) are :class:`RoutedRecords`; frontiers, settings, tables and figures are written against that.

Letters: N images, S rounds, K classes.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from progresvit import compute
from progresvit.config import BaseConfig
from progresvit.data.dataset import UNLABELLED
from progresvit.evaluation.header import Header
from progresvit.metrics.arrays import Bools, Float32s, Floats, Ints
from progresvit.model.registry import parse_config
from progresvit.routing import HIGHEST, NEAR_LOSSLESS_DROP, PAPER_THRESHOLDS, Router
from progresvit.routing.decide import exit_rounds
from progresvit.routing.frontier import metric_frontier, metric_near_lossless
from progresvit.routing.metric import Metric, OperatingPoint, Top1
from progresvit.routing.settings import Loss

ROUTED = "routed"
"""The name of routed answers in tables; others are named by their round."""


@dataclass(frozen=True, kw_only=True)
class RoutedRecords(ABC):
    """Records, as routing sees them: scores and GMACs of each image after each round, a metric, and losses."""

    header: Header
    ids: NDArray[np.str_]
    """(N,)"""
    image_hash: Ints | None = None
    """Hashes of the pixels, equal for copies of an image: (N,). None if the images are corrupted, and in records of
    earlier versions."""

    default_loss: ClassVar[Loss]
    """The loss that a certificate bounds by default."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    @abstractmethod
    def uncertainty(self) -> Float32s:
        """The entropy of each round, infinite where logits are not finite: (N, S)."""

    @property
    def rounds(self) -> int:
        """Number of rounds of the records."""
        return int(self.uncertainty.shape[1])

    @property
    def broken(self) -> int:
        """Images with a NaN or an infinity among the logits of any round."""
        return int((~np.isfinite(self.uncertainty)).any(axis=1).sum())

    def exit_scores(self, router: Router | None = None) -> Float32s:
        """The scores that thresholds are compared with: uncertainties, or the probabilities of a router. (N, S)"""
        self.header.check_routable()
        return self.uncertainty if router is None else self.router_scores(router)

    @abstractmethod
    def router_scores(self, router: Router) -> Float32s:
        """The probabilities of a learned router: (N, S)."""

    @abstractmethod
    def highest_score(self, router: Router | None = None) -> float:
        """The upper bound of these scores."""

    @abstractmethod
    def gmacs(self, convention: compute.Convention = "paper") -> Sequence[float] | Floats:
        """GMACs of an image that exits after each round: (S,); (N, S) if images differ."""

    def full_gmacs(self, convention: compute.Convention = "paper") -> float:
        """GMACs of all rounds, on average over the images."""
        return float(np.asarray(self.gmacs(convention))[..., -1].mean())

    @property
    @abstractmethod
    def metric(self) -> Metric[Any]:
        """The accuracy of these images."""

    @abstractmethod
    def losses(self, loss: Loss) -> NDArray[Any]:
        """The loss of an exit after each round against the last round: (N, S)."""

    def take(self, rows: NDArray[Any]) -> Self:
        """The images of these rows, by index or by boolean mask."""
        indices = np.arange(len(self))[rows]
        taken: dict[str, Any] = {}
        for field in fields(self):
            values = getattr(self, field.name)
            if isinstance(values, tuple):  # a matrix for each round
                taken[field.name] = tuple(matrix[indices] for matrix in values)
            elif field.name != "header" and values is not None:
                taken[field.name] = values[indices]
        return replace(self, **taken)

    def distinct(self) -> Self:
        """Each image once: of its copies the first. All images if their hashes are unknown."""
        if self.image_hash is None:
            return self
        return self.take(np.sort(np.unique(self.image_hash, return_index=True)[1]))

    def check(self) -> None:
        """Refuse empty records, repeated ids, another number of rounds than the model has, and masks without labels."""
        if not len(self):
            raise ValueError("there are no records: the dataset is empty, or none of its images could be read.")
        if self.rounds != self.header.rounds:
            raise ValueError(f"records of {self.rounds} rounds for a model of {self.header.rounds}.")
        names, counts = np.unique(self.ids, return_counts=True)
        if (counts > 1).any():
            twice = names[counts > 1]
            raise ValueError(f"{len(twice)} ids occur more than once, such as {twice[0]}; each image must occur once.")

    def check_same_sample(self, other: RoutedRecords) -> None:
        """Refuse another sample, unless the names of the images show that it is of other data."""
        mine, theirs = self.header, other.header
        if mine.sample == theirs.sample:
            return
        drawn = [header.sample["of"] for header in (mine, theirs) if header.sample is not None]
        may_be_disjoint = len(drawn) == 2 and drawn[0] == drawn[1]  # two samples of the same images
        if may_be_disjoint or len(np.intersect1d(self.ids, other.ids)):
            raise ValueError(
                f"{mine.model} was evaluated on {mine.describe_sample()} of {mine.data}, and {theirs.model} on "
                f"{theirs.describe_sample()} of {theirs.data}; evaluate both on the same images, with the same limit "
                "and seed."
            )

    @abstractmethod
    def check_labelled(self) -> None:
        """Refuse images without labels."""

    def default_thresholds(self) -> Sequence[float]:
        """The thresholds of a table unless others are asked for."""
        return PAPER_THRESHOLDS if self.rounds > 1 else [0.0]

    @cached_property
    def config(self) -> BaseConfig:
        """The model's config; an error if this version does not know the kind of model."""
        return parse_config(self.header.config)

    def frontier(
        self, thresholds: ArrayLike, router: Router | None = None, convention: compute.Convention = "paper"
    ) -> list[Any]:
        """The operating point at each threshold."""
        return metric_frontier(self.exit_scores(router), self.metric, self.gmacs(convention), thresholds)

    def near_lossless(
        self,
        router: Router | None = None,
        convention: compute.Convention = "paper",
        max_drop: float = NEAR_LOSSLESS_DROP,
    ) -> Any:
        """The operating point of lowest compute whose accuracy stays within ``max_drop`` of the full path."""
        scores = self.exit_scores(router)
        self.check_labelled()
        return metric_near_lossless(scores, self.metric, self.gmacs(convention), max_drop)

    def split(self, share: float, seed: int = 0) -> tuple[Self, Self]:
        """Two disjoint parts. Which part an image is in depends on its id and the seed, not on the order."""
        first = split_by_id(self.ids, share, seed)
        return self.take(first), self.take(~first)


@dataclass(frozen=True, kw_only=True)
class Records(RoutedRecords):
    """Records of a classification model: the predictions of every round."""

    labels: Ints
    """(N,), -1 where there is none."""
    top5_labels: Ints
    """(N, S, 5), -1 where there are fewer classes or the logits are not finite."""
    top5_probabilities: Float32s
    """(N, S, 5), NaN there."""
    top10_entropy: Float32s
    """(N, S), infinite where logits are not finite."""
    entropy: Float32s
    """Entropy of all classes: (N, S)."""
    statistics: Float32s
    """(N, S, 23)"""
    log_probability: Float32s | None = None
    """(N, S), natural logarithm of the label's probability, NaN where logits are not finite. None without labels and in
    records of version 0.1.0."""
    logits: Float32s | None = None
    """(N, S, K), if they were kept."""

    default_loss = "labelled"

    @property
    def uncertainty(self) -> Float32s:
        return self.top10_entropy

    @property
    def labelled(self) -> bool:
        return bool((self.labels != UNLABELLED).all())

    @property
    def predictions(self) -> Ints:
        """(N, S)"""
        return self.top5_labels[..., 0]

    @property
    def correct(self) -> Bools:
        """Whether each round is right: (N, S)."""
        right: Bools = self.predictions == self.need_labels()[:, None]
        return right

    @property
    def correct5(self) -> Bools:
        """Whether the label is among the five likeliest classes of each round: (N, S)."""
        right: Bools = (self.top5_labels == self.need_labels()[:, None, None]).any(axis=-1)
        return right

    def check(self) -> None:
        super().check()
        probe = self.header.probe or {}
        classes = len(probe["classes"]) if "classes" in probe else int(self.header.config["num_classes"])
        outside = np.flatnonzero((self.labels < UNLABELLED) | (self.labels >= classes))
        if len(outside):
            first = outside[0]
            raise ValueError(
                f"{len(outside)} of {len(self)} labels are not among the {classes} classes, such as "
                f"{self.labels[first]} of {self.ids[first]}; every round would count as wrong and an early exit as "
                f"harmless. Classes are numbered from 0 to {classes - 1}; leave out images of others."
            )

    def need_labels(self) -> Ints:
        """The labels, or an error if some are missing."""
        missing = int((self.labels == UNLABELLED).sum())
        if missing:
            raise ValueError(
                f"{missing} of {len(self)} images in these records have no label; evaluate on labelled images "
                "(<split>/<class>/<image>), or choose a rule that needs none: a budget, an exit share, or a "
                "certificate by disagreement (unlabelled=True in progresvit calibrate, loss='unlabelled' in Python)."
            )
        return self.labels

    def check_labelled(self) -> None:
        self.need_labels()

    def gmacs(self, convention: compute.Convention = "paper") -> list[float]:
        """GMACs of an image that exits after each round: (S,)."""
        return list(self.header.gmacs[convention])

    def scores(self, router: Router | None = None) -> Float32s:
        """The former name of :meth:`exit_scores`."""
        return self.exit_scores(router)

    def router_scores(self, router: Router) -> Float32s:
        return router.scores(self.statistics)

    def highest_score(self, router: Router | None = None) -> float:
        return HIGHEST if router is None else 1.0

    @cached_property
    def metric(self) -> Metric[OperatingPoint]:
        return Top1(self.correct, self.correct5) if self.labelled else Top1(None)

    def answer_rounds(
        self, threshold: float | Sequence[float] | None = None, router: Router | None = None
    ) -> dict[str, Ints]:
        """The round, from 0, that answers for each image, (N,), by name: each round alone, then routed.

        The threshold is near-lossless by default.
        """
        scores = self.exit_scores(router)
        if threshold is None:
            threshold = self.near_lossless_threshold(router)
        rounds = {f"round {s + 1}": np.full(len(self), s) for s in range(self.rounds)}
        return {**rounds, ROUTED: exit_rounds(scores, threshold)}

    def losses(self, loss: Loss = "labelled") -> Bools:
        """Whether an exit after each round is harmful: (N, S).

        ``labelled`` counts errors that the last round does not make, ``unlabelled`` disagreement with it.
        """
        if loss == "unlabelled":
            harms: Bools = self.predictions != self.predictions[:, -1:]
            return harms
        if loss == "labelled":
            return ~self.correct & self.correct[:, -1:]
        raise ValueError(f"loss={loss!r} is for segmentation models; pass loss='labelled' or loss='unlabelled'.")

    def near_lossless_threshold(self, router: Router | None = None) -> float:
        """The threshold at which routed predictions are reported by default."""
        return float(self.near_lossless(router).threshold)


def split_by_id(ids: NDArray[Any], share: float, seed: int) -> Bools:
    """Which images are in the first of two parts, by their ids and the seed and not by their order: (N,)."""
    if not 0 < share < 1:
        raise ValueError(f"the share of a split is between 0 and 1, not {share:g}.")
    digests = [hashlib.sha256(f"{seed}\n{name}".encode()).digest()[:8] for name in ids.tolist()]
    first: Bools = np.frombuffer(b"".join(digests), ">u8") < share * 2**64
    if first.all() or not first.any():
        raise ValueError(f"{len(ids)} images are too few to split; evaluate on more.")
    return first
