"""What a results file of a model under corruption holds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from progresvit.results.format import Gmacs, Measurement, Part, Point, Share, check_rounds, exits_of


class ShiftedAt(Part):
    """A setting, calibrated on clean pictures, under shift."""

    setting: str
    top1: Share
    gmacs_paper: Gmacs
    exit_shares: tuple[Share, ...]


class ShiftedSet(Part):
    """One corruption at one severity; severity 0 and no corruption are the clean pictures."""

    corruption: str | None
    severity: int
    pictures: int
    top1: tuple[Share, ...]
    """Of each round alone."""
    at: tuple[ShiftedAt, ...]


class SeverityFrontier(Part):
    """All corruptions of a severity together."""

    severity: int
    pictures: int
    frontier: tuple[Point, ...] = Field(min_length=1)


class ShiftResult(Measurement):
    """A model under corruption."""

    kind: Literal["shift"]
    model: str
    weights: str
    gmacs_paper: tuple[Gmacs, ...]
    sets: tuple[ShiftedSet, ...]
    severities: tuple[SeverityFrontier, ...]

    @model_validator(mode="after")
    def _agree(self) -> ShiftResult:
        points = [point for one in self.severities for point in one.frontier]
        exits = exits_of(*points, *(at for one in self.sets for at in one.at))
        check_rounds(len(self.gmacs_paper), exit_shares=exits, sets=[one.top1 for one in self.sets])
        return self
