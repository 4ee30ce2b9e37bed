"""The decision after each round: answer, look again, or give no answer. Records and running models use the same one.

Policies and records need no torch; only logits on a device do, and learned routers.

Letters: B or N images, S rounds, s a round from 0, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from progresvit.routing.frontier import as_scores, as_thresholds, exit_rounds

if TYPE_CHECKING:
    from torch import Tensor

    from progresvit.routing.router import Router


@dataclass(frozen=True, kw_only=True)
class Abstention:
    """When to give no answer."""

    entropy: float = float("inf")
    """Answers whose top-10 entropy is at least this are withheld, in whatever round they come."""
    hopeless: float = float("inf")
    """Images that ``router`` gives at least this probability of being hopeless are not refined, and withheld."""
    router: Router | None = None
    """A router with the target ``hopeless``."""

    def __post_init__(self) -> None:
        for name in ("entropy", "hopeless"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"abstaining begins at a threshold of 0 or more, not {name}={value}.")
        if (self.router is None) != (self.hopeless == float("inf")):
            raise ValueError("stopping at hopeless images takes both a router and a threshold: hopeless=0.9, router=….")
        if self.router is not None and self.router.origin.target != "hopeless":
            raise ValueError(
                f"the router was fitted for {self.router.origin.target!r}; abstaining takes one for 'hopeless'."
            )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What happens to each image after a round; all (B,) and on the device of the logits."""

    leaves: Tensor
    abstains: Tensor
    """Leaves without an answer; never true where ``leaves`` is not."""
    entropy: Tensor


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Thresholds, what they are compared with, and when to abstain."""

    thresholds: tuple[float, ...]
    """One for each round but the last."""
    router: Router | None = None
    """Its probabilities are compared with the thresholds; without one, top-10 entropies are."""
    abstention: Abstention = Abstention()

    @classmethod
    def make(
        cls,
        rounds: int,
        threshold: float | Sequence[float],
        *,
        router: Router | None = None,
        abstain: float | Abstention | None = None,
    ) -> Policy:
        """A policy for a model of so many rounds; one threshold serves all rounds."""
        limits = as_thresholds([threshold], rounds)[0]
        abstention = Abstention() if abstain is None else abstain
        if not isinstance(abstention, Abstention):
            abstention = Abstention(entropy=float(abstention))
        for one in (router, abstention.router):
            if one is not None and one.rounds != rounds:
                raise ValueError(f"a router for {one.rounds} rounds cannot serve a model of {rounds}; fit another.")
        return cls(thresholds=tuple(limits.tolist()), router=router, abstention=abstention)

    def decide(self, s: int, logits: Tensor) -> Decision:
        """After round s: (B, K) -> a decision for each image. In the last round all leave."""
        import torch

        from progresvit.routing.scores import top10_entropy

        entropy = top10_entropy(logits)
        unsure = entropy >= self.abstention.entropy
        if s == len(self.thresholds):
            return Decision(leaves=torch.ones_like(unsure), abstains=unsure, entropy=entropy)
        score = entropy if self.router is None else self.router.score(s, logits)
        leaves = score.double() < self.thresholds[s]  # in float64: the threshold must not be rounded
        hopeless = torch.zeros_like(leaves)
        if self.abstention.router is not None:
            chance = self.abstention.router.score(s, logits)
            hopeless = ~leaves & chance.isfinite() & (chance.double() >= self.abstention.hopeless)
        return Decision(leaves=leaves | hopeless, abstains=hopeless | (leaves & unsure), entropy=entropy)


@dataclass(frozen=True, kw_only=True)
class Routed:
    """What a policy does with recorded images; all (N,)."""

    rounds: NDArray[np.int64]
    """The round, from 0, after which the image left."""
    abstained: NDArray[np.bool_]


def route_records(policy: Policy, entropy: ArrayLike, statistics: ArrayLike | None = None) -> Routed:
    """The same decisions from records: ``entropy`` (N, S), ``statistics`` (N, S, 23) where a router is used."""
    unsure = as_scores(entropy)
    scores = unsure if policy.router is None else policy.router.scores(_needed(statistics))
    giving_up = policy.abstention.router
    chances = None if giving_up is None else giving_up.scores(_needed(statistics))
    rounds, given_up = leave_or_give_up(scores, chances, policy.thresholds, policy.abstention.hopeless)
    answers = unsure[np.arange(len(rounds)), rounds]
    return Routed(rounds=rounds, abstained=given_up | (answers >= policy.abstention.entropy))


def leave_or_give_up(
    scores: ArrayLike, chances: ArrayLike | None, threshold: float | Sequence[float], hopeless: float
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The round, from 0, in which each image leaves, and whether it was given up: (N, S) twice -> (N,) twice.

    ``chances`` are those of being hopeless; one that is not finite is no chance, nothing is known of the image.
    """
    rounds = exit_rounds(scores, threshold)
    if chances is None:
        return rounds, np.zeros(len(rounds), bool)
    values = as_scores(chances)
    reached = np.isfinite(values) & (values >= hopeless)
    reached[:, -1] = True
    first = reached.argmax(axis=1)
    return np.minimum(rounds, first), first < rounds


def _needed(statistics: ArrayLike | None) -> ArrayLike:
    if statistics is None:
        raise ValueError("a learned router needs the statistics of the records.")
    return statistics
