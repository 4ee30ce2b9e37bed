"""What a results file of one model's routing holds: settings, groups of classes, routers, withheld answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from progresvit.results.format import Gmacs, Measurement, Part, Point, Rounds, Share, check_end, check_rounds, exits_of


class Spread(Part):
    """Of a figure over repeated draws."""

    mean: float
    lowest: float
    highest: float


class HalvesResult(Part):
    """A threshold calibrated on random halves of the pictures, measured on the other halves."""

    number: int
    drop: Spread
    """Top-1 of the full path less that of the routed one."""
    saving: Spread
    wrong: Spread
    """Wrong ones among the answers that are given."""
    broken: int | None
    """For a guarantee: halves on which it did not hold."""


class SettingResult(Part):
    """A calibrated threshold, on the pictures that it was calibrated on and on others."""

    name: str
    point: Point
    epsilon: float | None
    """Of a guarantee: the drop, with probability 1 - delta."""
    delta: float | None
    abstain: float | None
    """Entropy from which an answer is withheld."""
    answered: Share
    top1_of_answered: Share
    halves: HalvesResult | None


class GroupAt(Part):
    """A group of classes at a setting."""

    setting: str
    top1: Share
    gmacs_paper: Gmacs
    exit_shares: tuple[Share, ...]
    answered: Share
    top1_of_answered: Share | None


class GroupResult(Part):
    """A group of classes by itself."""

    name: str
    pictures: int
    top1: tuple[Share, ...]
    """Of each round alone."""
    at: tuple[GroupAt, ...]


class MatchedResult(Part):
    """A router against entropy, the same share of the pictures going on to the last round."""

    router: str
    fitted_on: str
    """In words."""
    fits: int
    """Routers fitted, with seeds of their own; figures are means over them."""
    shares: tuple[Share, ...]
    """That go on."""
    gmacs_paper: tuple[Gmacs, ...]
    entropy_top1: tuple[Share, ...]
    router_top1: tuple[Share, ...]
    lowest: tuple[float, ...]
    """95 % interval of the difference, router less entropy: percentiles of its mean over pictures and fits, both drawn
    anew with replacement a thousand times. Which pictures go on stays as it was."""
    highest: tuple[float, ...]

    @model_validator(mode="after")
    def _agree(self) -> MatchedResult:
        for name in ("gmacs_paper", "entropy_top1", "router_top1", "lowest", "highest"):
            if len(getattr(self, name)) != len(self.shares):
                raise ValueError(f"{name} has {len(getattr(self, name))} figures for {len(self.shares)} shares")
        return self


class RiskCurve(Part):
    """Risk against coverage when unsure answers are withheld."""

    name: str
    coverage: tuple[Share, ...]
    risk: tuple[Share, ...]
    area: float

    @model_validator(mode="after")
    def _agree(self) -> RiskCurve:
        if len(self.risk) != len(self.coverage):
            raise ValueError(f"{len(self.risk)} risks for {len(self.coverage)} coverages")
        return self


class EqualAccuracy(Part):
    """Compute of a rule, its thresholds chosen on other pictures for an allowed drop; means over random splits."""

    rule: str
    splits: int
    """Random ones, of which these are the means."""
    drop: float | None
    top1: Share
    gmacs_paper: Gmacs
    saving: float
    given_up: Share | None
    given_up_wrong: Share | None
    """Of those given up, wrong in every round."""


class RoutingResult(Measurement):
    """When to stop: one model's thresholds, routers and withheld answers."""

    kind: Literal["routing"]
    model: str
    weights: str
    rounds: Rounds
    frontier: tuple[Point, ...] = Field(min_length=1)
    settings: tuple[SettingResult, ...]
    groups: tuple[GroupResult, ...]
    matched: tuple[MatchedResult, ...]
    abstention: tuple[RiskCurve, ...]
    equal_accuracy: tuple[EqualAccuracy, ...]

    @model_validator(mode="after")
    def _agree(self) -> RoutingResult:
        self.rounds.check(self.data.val)
        at = [at for group in self.groups for at in group.at]
        exits = exits_of(*self.frontier, *(one.point for one in self.settings), *at)
        check_rounds(len(self.rounds.bits), exit_shares=exits, groups=[one.top1 for one in self.groups])
        check_end(self.frontier, self.rounds, self.data.val)
        return self
