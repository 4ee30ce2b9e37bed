"""What a results folder holds: one JSON file per measurement, each complete in itself.

A file says what was measured and with what: commands, seed, machine, time, data. Accuracy is kept picture by picture,
as bits, so that two models are compared on the pictures on which they differ. Shares are shares, 0 to 1; seconds are of
the wall clock; GMACs are told in both conventions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

FORMAT = 1

Share = Annotated[float, Field(ge=0, le=1)]
Gmacs = Annotated[float, Field(gt=0)]


class Part(BaseModel):
    """A piece of a results file: no field may be missing, none may be foreign."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Machine(Part):
    """What it ran on."""

    device: str
    """The GPU's name, or the processor's."""
    processes: int = Field(ge=1)
    """Of one training, under torchrun."""
    jobs: int = Field(ge=1)
    """Measurements that shared the machine at a time; seconds are longer for it."""
    python: str
    torch: str


class Data(Part):
    """Which pictures. Runs of one comparison must agree in all of it."""

    name: str
    """As the study calls them."""
    train: int | None
    """Pictures learned from, if the study trained the model."""
    val: int
    """Pictures measured on."""
    classes: int
    names: str
    """Hash of the measured pictures' names, in the order of the bits."""
    learned: str | None
    """Hash of the names of all the pictures of a training run, both splits."""


class Rounds(Part):
    """Each round's cost and, picture by picture, whether it is right."""

    resolutions: tuple[int, ...] = Field(min_length=1)
    heads: tuple[int, ...]
    gmacs_paper: tuple[Gmacs, ...]
    """Of an image that leaves after each round, the rounds before it included."""
    gmacs_executed: tuple[Gmacs, ...]
    right: tuple[int, ...]
    """Pictures that each round has right."""
    bits: tuple[str, ...]
    """The same picture by picture: hexadecimal, the first picture in the highest bit."""

    @model_validator(mode="after")
    def _agree(self) -> Rounds:
        count = len(self.resolutions)
        for name in ("heads", "gmacs_paper", "gmacs_executed", "right", "bits"):
            if len(getattr(self, name)) != count:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {count} rounds")
        for number, (right, bits) in enumerate(zip(self.right, self.bits), start=1):
            if not re.fullmatch("([0-9a-f]{2})+", bits):
                raise ValueError(f"the bits of round {number} are not pairs of hexadecimal digits")
            if int(bits, 16).bit_count() != right:
                raise ValueError(f"round {number} has {right} pictures right, and its bits say otherwise")
        return self

    def correct(self, pictures: int) -> NDArray[np.bool_]:
        """(N, S)"""
        return np.stack([unpack(bits, pictures) for bits in self.bits], axis=1)

    def check(self, pictures: int) -> None:
        """Refuse bits that are not of this many pictures."""
        for number, (right, found) in enumerate(zip(self.right, self.correct(pictures).sum(axis=0)), start=1):
            if right != found:
                raise ValueError(f"round {number} has bits beyond the {pictures} pictures measured on")


class Point(Part):
    """Where a threshold leads."""

    threshold: float | tuple[float, ...]
    """One, or one for each round but the last. JSON has no infinity: one above every entropy does the same."""
    top1: Share
    gmacs_paper: Gmacs
    gmacs_executed: Gmacs
    exit_shares: tuple[Share, ...]


class Measurement(Part):
    """What every file says."""

    format: Literal[1]
    name: str
    """The file's, too."""
    commands: tuple[str, ...]
    """What it was measured from; DATA and RUNS are folders of whoever types them. ``progresvit study STUDY --only
    NAME`` runs them and writes this file."""
    seed: int | None
    """Of the training, or of what was drawn; None if nothing was."""
    seconds: float = Field(ge=0)
    """Of the steps of a training, first step and its compiling included; of everything else otherwise."""
    date: str
    revision: str
    """Git's name for the code."""
    machine: Machine
    data: Data
    precision: str


class RunResult(Measurement):
    """A model that the study trained, and every round of it on every held-back picture."""

    kind: Literal["run"]
    run: str
    """What the study calls it; runs that differ in the seed alone have one name."""
    recipe: dict[str, Any]
    epochs: int
    parameters: int
    rounds: Rounds
    frontier: tuple[Point, ...] = Field(min_length=1)
    """From the cheapest to the full path."""
    near_lossless: Point
    history: tuple[tuple[int, tuple[Share, ...]], ...]
    """Epochs done, and top-1 of each round then."""

    @model_validator(mode="after")
    def _agree(self) -> RunResult:
        if self.name != f"{self.run}-{self.seed}":
            raise ValueError(f"{self.name} should be called {self.run}-{self.seed}, by its run and its seed")
        self.rounds.check(self.data.val)
        check_rounds(len(self.rounds.bits), exit_shares=exits_of(*self.frontier, self.near_lossless))
        check_end(self.frontier, self.rounds, self.data.val)
        return self


class HasExits(Protocol):
    """Anything that tells how many leave after each round."""

    @property
    def exit_shares(self) -> tuple[float, ...]: ...


def exits_of(*points: HasExits) -> list[tuple[float, ...]]:
    """Of each, the shares that leave after each round."""
    return [point.exit_shares for point in points]


def check_end(frontier: Sequence[Point], rounds: Rounds, pictures: int) -> None:
    """Refuse a frontier that does not end at the full path."""
    if abs(frontier[-1].top1 - rounds.right[-1] / pictures) > 1e-9:
        raise ValueError("the frontier does not end with the accuracy of the last round")


def check_rounds(rounds: int, **found: Sequence[Sequence[float]]) -> None:
    """Refuse what has not one figure for each round."""
    for name, rows in found.items():
        for row in rows:
            if len(row) != rounds or not rounds:
                raise ValueError(f"{name} has {len(row)} figures for {rounds} rounds")


def pack(correct: NDArray[np.bool_]) -> str:
    """(N,) -> hexadecimal."""
    return np.packbits(correct).tobytes().hex()


def unpack(bits: str, pictures: int) -> NDArray[np.bool_]:
    """Hexadecimal -> (N,)"""
    if len(bits) != 2 * math.ceil(pictures / 8):
        raise ValueError(f"{len(bits) * 4} bits for {pictures} pictures")
    return np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8), count=pictures).astype(bool)
