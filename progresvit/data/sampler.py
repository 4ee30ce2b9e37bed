"""Which picture comes when. Every draw follows from the seed and the step, so a run can go on from any step.

One optimizer step takes a global batch. It is cut into micro-batches of equal size; the processes share them out in
order, so one process with two micro-batches a step sees what two processes with one each see.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch


class Draw(IntEnum):
    """What a draw is for: equal numbers must not give equal draws to different things."""

    START = 1
    ORDER = 2
    PICTURE = 3
    BATCH = 4
    STEP = 5
    CORRUPTION = 6


def mix_seed(draw: Draw, *numbers: int) -> int:
    """One seed from several numbers; nearby numbers give unrelated seeds."""
    return int(np.random.SeedSequence((int(draw), *numbers)).generate_state(1, np.uint32)[0])


def seed_all(draw: Draw, *numbers: int) -> None:
    """Seed every random source that transforms, mixup and stochastic depth draw from."""
    seed = mix_seed(draw, *numbers)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of a training run."""

    count: int
    """Pictures in the set."""
    batch: int
    """Pictures of one optimizer step, over all processes."""
    accumulate: int = 1
    """Micro-batches of a step in each process."""
    processes: int = 1
    rank: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch > self.count:
            raise ValueError(
                f"a batch of {self.batch} is larger than the set of {self.count} pictures; add pictures or lower it: "
                f"--set optimizer.batch={self.count}."
            )
        if self.batch % (self.processes * self.accumulate):
            raise ValueError(
                f"a batch of {self.batch} cannot be shared by {self.processes} processes with {self.accumulate} "
                f"micro-batches each; use a multiple of {self.processes * self.accumulate}."
            )

    @property
    def micro_batch(self) -> int:
        return self.batch // (self.processes * self.accumulate)

    @property
    def steps_per_epoch(self) -> int:
        """What is left over of an epoch is not used; the next epoch draws again from all."""
        return self.count // self.batch

    def micro_batches(self, step: int) -> Iterator[tuple[int, list[int]]]:
        """This process's share of a step: numbers of micro-batches, counted over all processes, and their pictures."""
        epoch, within = divmod(step, self.steps_per_epoch)
        batch = _permutation(self.count, self.seed, epoch)[within * self.batch : (within + 1) * self.batch]
        for turn in range(self.accumulate):
            number = self.rank * self.accumulate + turn
            yield number, batch[number * self.micro_batch : (number + 1) * self.micro_batch].tolist()


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(mix_seed(Draw.ORDER, seed, epoch)))
