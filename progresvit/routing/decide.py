"""The decision after each round: exit, continue, or abstain. Records and running models use the same rule.

An image exits after the first round whose score is below the threshold, else after the last. Scores are entropies, or
the probabilities of a learned router. Logits are numpy arrays or torch tensors; torch is needed for tensors and learned
routers only. Letters: B or N images, S rounds, s a round from 0, T thresholds, K classes, k reported classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from progresvit.io.parse import Section
from progresvit.metrics.arrays import Bools, Float32s, Floats, Ints
from progresvit.routing.scores import OODScore, finite_rows, ood_score, recorded_ood_score, top10_entropy

if TYPE_CHECKING:
    from progresvit.routing.router import Router

Array = Any
"""A numpy array or a torch tensor."""
Threshold = float | tuple[float, ...]
"""One for all rounds, or one for each round but the last."""


def exits(score: Array, threshold: Any) -> Array:
    """The exit rule: an image exits if its score is strictly below the threshold, compared in float64.

    A score that is NaN or infinite never exits.
    """
    return _float64(score) < threshold


def is_withheld(entropy: Array, limit: float) -> Array:
    """The rule of abstention: an answer of this entropy or more is withheld."""
    return _float64(entropy) >= limit


def is_unrecoverable(probability: Array, limit: float) -> Array:
    """Whether to reject an image instead of refining it; a probability that is not finite says nothing."""
    values = _float64(probability)
    return (values >= limit) & (values < math.inf)


def is_out_of_distribution(score: Array, limit: float) -> Array:
    """Whether an image belongs to none of the model's classes: its score is below the limit, or not finite."""
    return ~(_float64(score) >= limit)


def _float64(values: Array) -> Array:
    return values.astype(np.float64, copy=False) if isinstance(values, np.ndarray) else values.double()


def as_scores(scores: ArrayLike) -> Floats:
    """Check scores and convert them to float64; NaN becomes infinity: (N, S)."""
    values = np.asarray(scores, np.float64)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"scores are one row per image and one column per round, not of shape {values.shape}.")
    if (values < 0).any():
        raise ValueError(f"scores are entropies or probabilities, 0 or more, not {values.min():g}.")
    return np.where(np.isnan(values), np.inf, values)


def as_thresholds(thresholds: ArrayLike, rounds: int) -> Floats:
    """Thresholds of each round but the last, from rows or from numbers that are used for every round: (T, S - 1)."""
    try:
        values = np.asarray(thresholds, np.float64)
    except ValueError:
        raise ValueError(
            "thresholds are numbers, or rows of equal length with one for each round but the last."
        ) from None
    if values.ndim == 1:
        values = np.repeat(values[:, None], rounds - 1, axis=1)  # (T,) -> (T, S - 1)
    if values.ndim != 2 or values.shape[1] != rounds - 1:
        raise ValueError(
            f"thresholds per round are one for each round but the last, so {rounds - 1} for {rounds} rounds, "
            f"not {values.shape[-1] if values.ndim else 'a single number'}."
        )
    bad = np.isnan(values) | (values < 0)
    if bad.any():
        raise ValueError(f"a threshold is 0 (every round runs) or more, not {float(values[bad][0])}.")
    return values


def exit_rounds(scores: ArrayLike, threshold: float | Sequence[float]) -> Ints:
    """The round, from 0, after which each image exits: (N, S) -> (N,). The score of the last round is not used."""
    values = as_scores(scores)
    limits = as_thresholds([threshold], values.shape[1])[0]  # (S - 1,)
    exiting = np.ones(values.shape, bool)
    exiting[:, :-1] = exits(values[:, :-1], limits)
    rounds: Ints = exiting.argmax(axis=1)
    return rounds


def at_exit(values: NDArray[Any], rounds: Ints) -> NDArray[Any]:
    """The values of each image in the round after which it exits: (N, S, …), (N,) -> (N, …)."""
    return values[np.arange(len(rounds)), rounds]


@dataclass(frozen=True, kw_only=True)
class Abstention:
    """When to give no answer."""

    entropy: float = math.inf
    """Answers of this top-10 entropy or more are withheld, in any round."""
    unrecoverable: float = math.inf
    """Images to which ``router`` gives this probability or more are not refined, and their answers are withheld."""
    router: Router | None = None
    """A router fitted for the target ``unrecoverable``."""
    hopeless: InitVar[float | None] = None
    """The former name of ``unrecoverable``."""

    def __post_init__(self, hopeless: float | None) -> None:
        if hopeless is not None:
            object.__setattr__(self, "unrecoverable", hopeless)
        for name in ("entropy", "unrecoverable"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"abstaining begins at a threshold of 0 or more, not {name}={value}.")
        if (self.router is None) != (self.unrecoverable == math.inf):
            raise ValueError(
                "rejecting unrecoverable images takes both a router and a threshold: unrecoverable=0.9, router=…."
            )
        if self.router is not None and self.router.origin.target != "unrecoverable":
            raise ValueError(
                f"the router was fitted for {self.router.origin.target!r}; abstaining takes one for 'unrecoverable'."
            )


class OODRule(Section):
    """When an image counts as out-of-distribution; its answer is withheld."""

    score: OODScore
    limit: float = Field(allow_inf_nan=False)
    """Images with a score below it in the round after which they exit are out-of-distribution."""
    share: float = Field(gt=0, lt=1)
    """The share of in-distribution images that is rejected by mistake; the limit was calibrated for it."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision for each image after a round: all (B,), arrays or tensors as the logits are."""

    exits: Array
    abstains: Array
    """Exits without an answer; never true where ``exits`` is false."""
    entropy: Array
    out_of_distribution: Array
    """Exits and belongs to none of the classes; these abstain too."""
    ood_score: Array
    """NaN without an ``OODRule``."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Thresholds, the scores that they are compared with, and when to abstain."""

    thresholds: tuple[float, ...]
    """One for each round but the last."""
    router: Router | None = None
    """Its probabilities are compared with the thresholds; without one, top-10 entropies are."""
    abstention: Abstention = Abstention()
    ood: OODRule | None = None

    @classmethod
    def make(
        cls,
        rounds: int,
        threshold: float | Sequence[float],
        *,
        router: Router | None = None,
        abstain: float | Abstention | None = None,
        ood: OODRule | None = None,
    ) -> Policy:
        """A policy for a model with this number of rounds; a single threshold is used for all rounds."""
        limits = as_thresholds([threshold], rounds)[0]
        abstention = Abstention() if abstain is None else abstain
        if not isinstance(abstention, Abstention):
            abstention = Abstention(entropy=float(abstention))
        policy = cls(thresholds=tuple(limits.tolist()), router=router, abstention=abstention, ood=ood)
        for own in policy.routers:
            if own.rounds != rounds:
                raise ValueError(f"a router for {own.rounds} rounds cannot serve a model of {rounds}; fit another.")
        return policy

    @property
    def routers(self) -> list[Router]:
        """The learned routers of the policy."""
        return [router for router in (self.router, self.abstention.router) if router is not None]

    def decide(self, s: int, logits: Array) -> Decision:
        """Decide for each image after round s: (B, K) -> (B,) each. In the last round all images exit."""
        if isinstance(logits, np.ndarray) and self.routers:
            return self._decide_in_torch(s, logits)
        entropy = top10_entropy(logits)
        withheld = is_withheld(entropy, self.abstention.entropy)
        if s == len(self.thresholds):
            exiting, abstaining = withheld | True, withheld
        else:
            exiting = exits(entropy if self.router is None else self.router.score(s, logits), self.thresholds[s])
            abstaining = exiting & withheld
            if self.abstention.router is not None:
                probability = self.abstention.router.score(s, logits)
                rejected = ~exiting & is_unrecoverable(probability, self.abstention.unrecoverable)
                exiting, abstaining = exiting | rejected, abstaining | rejected
        if self.ood is None:
            unknown, score = exiting & False, entropy * math.nan
        else:
            score = ood_score(self.ood.score, logits)
            unknown = exiting & is_out_of_distribution(score, self.ood.limit)
        return Decision(
            exits=exiting,
            abstains=abstaining | unknown,
            entropy=entropy,
            out_of_distribution=unknown,
            ood_score=score,
        )

    def _decide_in_torch(self, s: int, logits: NDArray[Any]) -> Decision:
        """Decide with torch, in which learned routers run, and convert the decision to arrays."""
        try:
            import torch
        except ImportError as error:
            raise ValueError(
                "a learned router needs torch, which is not installed; run: pip install torch, or route by entropy: "
                "a policy without routers."
            ) from error
        decision = self.decide(s, torch.tensor(logits, device=self.routers[0].seen.device))
        return Decision(**{field.name: getattr(decision, field.name).cpu().numpy() for field in fields(decision)})


class Answers(NamedTuple):
    """The answers of a round on the host: all (B,), except the classes and their probabilities."""

    exits: Bools
    classes: Ints
    """(B, k), the most probable first; -1 where logits are not finite."""
    probabilities: Float32s
    """(B, k); NaN where logits are not finite."""
    entropy: Float32s
    """Top-10 entropy."""
    abstains: Bools
    """Exits without an answer; never true where ``exits`` is false."""
    out_of_distribution: Bools
    """Exits and belongs to none of the classes; these abstain too."""
    ood_score: Float32s
    """NaN without an ``OODRule``."""

    @property
    def index(self) -> Ints:  # type: ignore[override]  # replaces tuple.index, which has no use here
        """The most probable class: (B,)."""
        return self.classes[:, 0]

    @property
    def probability(self) -> Float32s:
        """Its probability: (B,)."""
        return self.probabilities[:, 0]


def with_thresholds(policy: Policy, s: int, answers: Answers, thresholds: Floats) -> Answers:
    """The answers after round s, not the last, with a threshold for each image, (B,); NaN uses the policy's.

    The policy routes by entropy: see ``check_own_threshold``.
    """
    own = ~np.isnan(thresholds)
    if not own.any():
        return answers
    exiting = np.where(own, exits(answers.entropy, thresholds), answers.exits)
    unknown = np.zeros(len(own), bool)
    if policy.ood is not None:
        unknown = exiting & is_out_of_distribution(answers.ood_score, policy.ood.limit)
    abstaining = (exiting & is_withheld(answers.entropy, policy.abstention.entropy)) | unknown
    return answers._replace(exits=exiting, abstains=abstaining, out_of_distribution=unknown)


def check_own_threshold(policy: Policy, threshold: float) -> None:
    """Refuse a threshold for single images if it is not a threshold, or if a learned router decides."""
    if not threshold >= 0:
        raise ValueError(f"a threshold is 0 (every round runs) or more, not {threshold}.")
    if policy.routers:
        raise ValueError("a learned router decides which images exit; a threshold of its own needs routing by entropy.")


def decide(policy: Policy, s: int, logits: NDArray[Any], temperature: float = 1.0, top_k: int = 1) -> Answers:
    """The decision and the answers after round s, for arrays: (B, K) -> answers.

    The temperature divides the logits for the reported probabilities only.
    """
    logits = np.asarray(logits)
    decision = policy.decide(s, logits)
    values, finite = finite_rows(logits)
    values = values / np.float32(temperature)
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    probabilities = powers / powers.sum(axis=-1, keepdims=True)  # (B, K)
    classes = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top_k]  # of equals, the first comes first
    kept = np.take_along_axis(probabilities, classes, axis=-1)  # (B, K) -> (B, k)
    return Answers(
        exits=decision.exits,
        classes=np.where(finite[:, None], classes, -1),
        probabilities=np.where(finite[:, None], kept, np.float32(np.nan)),
        entropy=decision.entropy,
        abstains=decision.abstains,
        out_of_distribution=decision.out_of_distribution,
        ood_score=decision.ood_score,
    )


@dataclass(frozen=True, kw_only=True)
class Routed:
    """The decisions of a policy for recorded images; all (N,)."""

    rounds: Ints
    """The round, from 0, after which the image exits."""
    abstained: Bools
    out_of_distribution: Bools
    """Images that belong to none of the classes; they are also in ``abstained``."""


def route_records(policy: Policy, entropy: ArrayLike, statistics: ArrayLike | None = None) -> Routed:
    """The decisions for records: ``entropy`` (N, S), and ``statistics`` (N, S, 23) for a router or an OODRule."""
    if (policy.routers or policy.ood) and statistics is None:
        what = "a learned router" if policy.routers else "an out-of-distribution score"
        raise ValueError(f"{what} needs statistics; pass statistics=records.statistics.")
    entropies, rejecting = as_scores(entropy), policy.abstention.router
    scores = entropies if policy.router is None else policy.router.scores(statistics)  # type: ignore[arg-type]
    chances = None if rejecting is None else rejecting.scores(statistics)  # type: ignore[arg-type]
    rounds, rejected = exit_or_reject(scores, chances, policy.thresholds, policy.abstention.unrecoverable)
    unknown = np.zeros(len(rounds), bool)
    if policy.ood is not None:
        exit_statistics = at_exit(np.asarray(statistics), rounds)  # (N, S, 23) -> (N, 23)
        unknown = is_out_of_distribution(recorded_ood_score(policy.ood.score, exit_statistics), policy.ood.limit)
    withheld = is_withheld(at_exit(entropies, rounds), policy.abstention.entropy)
    return Routed(rounds=rounds, abstained=rejected | withheld | unknown, out_of_distribution=unknown)


def exit_or_reject(
    scores: ArrayLike, chances: ArrayLike | None, threshold: float | Sequence[float], unrecoverable: float
) -> tuple[Ints, Bools]:
    """The round, from 0, after which each image exits, and whether it was rejected: (N, S) twice -> (N,) twice.

    ``chances`` are the probabilities of being unrecoverable, compared with the limit ``unrecoverable``.
    """
    rounds = exit_rounds(scores, threshold)
    if chances is None:
        return rounds, np.zeros(len(rounds), bool)
    reached = is_unrecoverable(as_scores(chances), unrecoverable)
    reached[:, -1] = True
    first = reached.argmax(axis=1)
    return np.minimum(rounds, first), first < rounds
