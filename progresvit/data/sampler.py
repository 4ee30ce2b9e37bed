"""The order of the training images. Every draw follows from the seed and the step, so a run resumes at any step.

An optimizer step takes one global batch. It is divided into micro-batches of equal size, which the processes share in
order: one process with two micro-batches per step sees what two processes with one each see.
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
    """The purpose of a draw, so that equal numbers give different draws for different purposes."""

    START = 1
    ORDER = 2
    IMAGE = 3
    BATCH = 4
    STEP = 5
    CORRUPTION = 6


def mix_seed(draw: Draw, *numbers: int) -> int:
    """One seed from several numbers; nearby numbers give unrelated seeds."""
    return int(np.random.SeedSequence((int(draw), *numbers)).generate_state(1, np.uint32)[0])


def seed_all(draw: Draw, *numbers: int) -> int:
    """Seed every random source that transforms, mixup and stochastic depth draw from; returns the seed."""
    seed = mix_seed(draw, *numbers)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


@dataclass(frozen=True, kw_only=True)
class EpochSampler:
    """Which images each step of a training run takes: a random permutation per epoch, cut into batches."""

    count: int
    """Images in the dataset."""
    batch: int
    """Images per optimizer step, over all processes."""
    accumulate: int = 1
    """Micro-batches per step in each process."""
    processes: int = 1
    rank: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch > self.count:
            raise ValueError(
                f"a batch of {self.batch} is larger than the dataset of {self.count} images; add images or "
                f"lower it with optimizer.batch={self.count}."
            )
        if self.batch % (self.processes * self.accumulate):
            raise ValueError(
                f"a batch of {self.batch} cannot be shared by {self.processes} processes with {self.accumulate} "
                f"micro-batches each; use a multiple of {self.processes * self.accumulate}."
            )

    @property
    def micro_batch(self) -> int:
        """Images per micro-batch."""
        return self.batch // (self.processes * self.accumulate)

    @property
    def steps_per_epoch(self) -> int:
        """An incomplete last batch is dropped; the next epoch draws from all images again."""
        return self.count // self.batch

    def micro_batches(self, step: int) -> Iterator[tuple[int, list[int]]]:
        """This process's micro-batches of a step: the number of each, counted over all processes, and its images."""
        epoch, within = divmod(step, self.steps_per_epoch)
        batch = _permutation(self.count, self.seed, epoch)[within * self.batch : (within + 1) * self.batch]
        for turn in range(self.accumulate):
            number = self.rank * self.accumulate + turn
            yield number, batch[number * self.micro_batch : (number + 1) * self.micro_batch].tolist()


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(mix_seed(Draw.ORDER, seed, epoch)))
