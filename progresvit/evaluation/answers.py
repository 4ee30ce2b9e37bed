"""Routed answers of records: which are wrong, which classes are confused, and the results of each class.

Letters: N images, S rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from progresvit.data.dataset import UNLABELLED
from progresvit.evaluation.header import Header
from progresvit.evaluation.records import ROUTED, Records
from progresvit.metrics.arrays import Bools, Float32s, Ints
from progresvit.metrics.interval import Interval, share_interval
from progresvit.routing import Router
from progresvit.routing.decide import Threshold, at_exit, exit_rounds

NOT_FINITE = -1
"""The prediction of a round whose logits are not finite."""


@dataclass(frozen=True, kw_only=True)
class RoutedAnswers:
    """The answer to each image: by the round after which it exits, or by the last round if nothing is routed."""

    records: Records
    threshold: Threshold | None
    """None if the model has one round, or rounds that are alternatives."""
    near_lossless: bool
    """Whether the threshold was chosen on these images."""
    exit_round: Ints
    """The round, from 0, after which each image exits: (N,)."""

    @property
    def name(self) -> str:
        """The name of these answers in tables."""
        return f"round {self.records.rounds}" if self.threshold is None else ROUTED

    @cached_property
    def prediction(self) -> Ints:
        """(N,)"""
        return at_exit(self.records.predictions, self.exit_round)

    @cached_property
    def probability(self) -> Float32s:
        """Probability of the prediction, (N,); NaN where logits are not finite."""
        return at_exit(self.records.top5_probabilities[..., 0], self.exit_round)

    @cached_property
    def correct(self) -> Bools:
        """(N,)"""
        return at_exit(self.records.correct, self.exit_round)

    @cached_property
    def class_names(self) -> dict[int, str]:
        """Names by class number, with a name for predictions that are not finite."""
        return {NOT_FINITE: "none (not finite)", **dict(enumerate(class_names(self.records.header)))}

    @cached_property
    def by_class(self) -> list[ClassResult]:
        """Results of the classes that have images, lowest top-1 first, then most images first."""
        return sorted(_class_results(self), key=lambda result: (result.top1.mean, -result.images, result.number))

    @cached_property
    def without_images(self) -> list[int]:
        """Classes that predictions choose among and that no image has."""
        restricted = self.records.header.classes
        candidates = range(len(self.class_names) - 1) if restricted is None else restricted
        return sorted(set(candidates) - set(self.records.labels.tolist()))

    @cached_property
    def confusions(self) -> list[Confusion]:
        """Pairs of classes, the most frequent first."""
        labels = self.records.labels
        images = Counter(labels.tolist())
        pairs = Counter(zip(labels[~self.correct].tolist(), self.prediction[~self.correct].tolist()))
        confusions = [Confusion(label, other, count, images[label]) for (label, other), count in pairs.items()]
        return sorted(confusions, key=lambda pair: (-pair.count, -pair.share, pair.label, pair.prediction))

    @cached_property
    def errors(self) -> Ints:
        """Rows of the wrong answers, the most confident first; those that are not finite last."""
        wrong = np.flatnonzero(~self.correct)
        rows: Ints = wrong[np.argsort(-self.probability[wrong], kind="stable")]
        return rows

    def accuracies(self) -> Iterator[tuple[str, Interval]]:
        """Top-1 of each round, then of routing."""
        for name, right in self.correct_by_name():
            yield name, share_interval(int(right.sum()), len(right))

    def correct_by_name(self) -> Iterator[tuple[str, Bools]]:
        """Whether answers are correct, (N,), with their name: of each round, then of routing."""
        for s in range(self.records.rounds):
            yield f"round {s + 1}", self.records.correct[:, s]
        if self.threshold is not None:
            yield ROUTED, self.correct


@dataclass(frozen=True)
class Confusion:
    """Images of a class that were taken for another."""

    label: int
    prediction: int
    count: int
    images: int
    """Images of the class."""

    @property
    def share(self) -> float:
        return self.count / self.images


@dataclass(frozen=True, kw_only=True)
class ClassResult:
    """Images of a class and how they were answered."""

    number: int
    name: str
    images: int
    correct: dict[str, int]
    """Images with a correct answer, in each round and routed."""
    answers: str
    """The name of the answers that the report is about."""
    exits: tuple[int, ...]
    """Images that exit after each round."""
    gmacs: float
    """Average GMACs in the paper's convention."""
    confusion: Confusion | None
    """The most frequent one."""

    def share(self, answers: str) -> Interval:
        """Top-1 of a round or of routing."""
        return share_interval(self.correct[answers], self.images)

    @property
    def top1(self) -> Interval:
        return self.share(self.answers)

    def exit_share(self, s: int) -> Interval:
        """Images that exit after round s, from 0."""
        return share_interval(self.exits[s], self.images)


def route(records: Records, threshold: Threshold | None = None, router: Router | None = None) -> RoutedAnswers:
    """Route the images of records.

    Args:
        records: Records of labelled images.
        threshold: By default the near-lossless one of these images.
        router: Compare the threshold with its probabilities instead of entropies.
    """
    missing = int((records.labels == UNLABELLED).sum())
    if missing:
        raise ValueError(
            f"{missing} of {len(records)} images in these records have no label, so answers cannot be called right or "
            "wrong; evaluate on labelled images (<split>/<class>/<image>), and leave out unlabelled=True."
        )
    if not records.header.routable or records.rounds == 1:
        last = np.full(len(records), records.rounds - 1)
        return RoutedAnswers(records=records, threshold=None, near_lossless=False, exit_round=last)
    limit = records.near_lossless_threshold(router) if threshold is None else threshold
    exits = exit_rounds(records.exit_scores(router), limit)
    return RoutedAnswers(records=records, threshold=limit, near_lossless=threshold is None, exit_round=exits)


def class_names(header: Header) -> list[str]:
    """Names of all classes. A name of several classes gets the number of each; a class without a name is its number."""
    config = header.config
    labels = config.get("labels") or config.get("class_ids")
    if header.probe is not None:
        labels = header.probe["classes"]
    names = list(labels or (f"class {number}" for number in range(config["num_classes"])))
    counts = Counter(names)
    return [f"{name} ({number})" if counts[name] > 1 else name for number, name in enumerate(names)]


def _class_results(answers: RoutedAnswers) -> Iterator[ClassResult]:
    records, names = answers.records, answers.class_names
    labels, gmacs, correct = records.labels, np.asarray(records.gmacs()), list(answers.correct_by_name())
    frequent: dict[int, Confusion] = {}
    for pair in answers.confusions:
        frequent.setdefault(pair.label, pair)
    for number in np.unique(labels).tolist():
        rows = labels == number
        exits = np.bincount(answers.exit_round[rows], minlength=records.rounds)
        yield ClassResult(
            number=number,
            name=names[number],
            images=int(rows.sum()),
            correct={name: int(right[rows].sum()) for name, right in correct},
            answers=answers.name,
            exits=tuple(exits.tolist()),
            gmacs=float(exits @ gmacs) / int(rows.sum()),
            confusion=frequent.get(number),
        )
