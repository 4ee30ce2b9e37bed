"""``Task``: what a training method adds to the loop.

The loop, the step and the checkpoint use only this class. A new method is a new task, never a new loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from progresvit.config import BaseConfig, ModelTask
from progresvit.data.crop import preprocessing_hash
from progresvit.data.dataset import ImageDataset
from progresvit.data.in_memory import in_memory_for_training
from progresvit.data.loading import Unreadable
from progresvit.data.sampler import EpochSampler
from progresvit.data.sources import BatchSource, InMemorySource
from progresvit.distributed import Processes
from progresvit.io.parse import Section, count_of
from progresvit.model.interface import RoundModel
from progresvit.training.recipe import Recipe


class Splits(NamedTuple):
    """The images of a run."""

    train: ImageDataset
    val: ImageDataset

    @property
    def others(self) -> Counter[str]:
        """Number of files that are not images, by suffix."""
        others = Counter(self.train.others)
        if self.train.drawn_from is None:
            others.update(self.val.others)
        return others


@dataclass
class TaskData:
    """The batches of a run. A task may return a subclass with more, such as images for a k-NN classifier."""

    train: BatchSource
    val: Callable[[], Iterator[Any]]
    """Returns this process's share of the validation batches."""
    unreadable: list[Unreadable]
    """Files that could not be read so far."""


def make_sampler(count: int, recipe: Recipe, processes: Processes) -> EpochSampler:
    """The order of ``count`` training images, as the recipe and the processes divide them."""
    return EpochSampler(
        count=count,
        batch=recipe.optimizer.batch,
        accumulate=recipe.optimizer.accumulate,
        processes=processes.count,
        rank=processes.rank,
        seed=recipe.seed,
    )


def source_in_memory(
    images: ImageDataset, config: BaseConfig, recipe: Recipe, processes: Processes, augment: Callable[..., Any]
) -> InMemorySource:
    """Training batches of images that are decoded once and stored on the device (mode in_memory)."""
    stored = in_memory_for_training(
        images,
        side=recipe.data.in_memory_side or config.input_side,
        device=processes.device,
        cache=recipe.data.in_memory_cache,
    )
    return InMemorySource(stored, make_sampler(len(stored), recipe, processes), augment)


@dataclass(frozen=True)
class Metrics:
    """The result of a validation."""

    primary: float
    """Selects the best model; higher is better."""
    values: Mapping[str, Any]
    """The values for the log and the history: numbers, lists with one number per round, flat mappings."""


class Frozen:
    """A module that is neither trained nor averaged nor saved, such as a pretrained teacher.

    It is not a submodule of its task, and copies of the task share it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, *arguments: Any) -> Any:
        return self.module(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Frozen:
        return self


class Task(nn.Module, ABC):
    """A training method: its modules, batches, losses and metrics.

    The order of calls: ``find_splits``, ``class_ids``, ``setup``, ``load_data``; in every step ``before_step``, for
    each micro-batch ``prepare``, ``outputs`` and ``losses``, then ``after_step``; with every log ``monitor``; at an
    evaluation ``export`` and ``validate``, on a copy of the task that holds the moving average.

    Parameters and buffers of the task are treated like the model's: parameters that require a gradient are optimized,
    the state is averaged, saved in every checkpoint and restored on resuming. State must therefore be tensors, and
    random numbers must follow from the step (the loop seeds every random source before each micro-batch). Modules that
    must not be saved are wrapped in :class:`Frozen`. A model reference must not be stored: methods receive the model.

    A batch is any nesting of named tuples, tuples, lists and dicts whose leaves are tensors, so that it passes through
    ``torch.compile``, DDP and CUDA graphs. If ``static_graph`` is false, a leaf may be a Python number, and
    ``torch.compile`` compiles each of its values. ``outputs`` reads ``batch.images`` unless it is overridden.
    """

    Options: ClassVar[type[Section]] = Section
    """Validates the task's options."""
    options_key: ClassVar[str] = "task_options"
    """The section of the recipe that holds the options."""
    sections: ClassVar[tuple[str, ...]] = ()
    """Further sections that this task reads, of those that not all tasks read (``registry.TASK_SECTIONS``)."""
    model_task: ClassVar[ModelTask] = "classification"
    """What the model's head predicts."""
    evaluate_options: ClassVar[str] = ""
    """Options of the command ``progresvit evaluate`` for its models, such as ``task=knn``, printed when a run ends."""
    uses_all_parameters: bool = True
    """False if some trained parameters may have no gradient in a step; DDP must know this."""
    needs_start: ClassVar[bool] = False
    """Whether a run must start from trained weights."""
    static_graph: bool = True
    """False if different modules run in different steps, so that no CUDA graph can be recorded."""

    def __init__(self, options: Section | None = None) -> None:
        super().__init__()
        self.options: Any = self.Options() if options is None else options

    def problems(self) -> Iterator[str]:
        """What the options need and this machine lacks, each with the key to set; asked before the data is opened."""
        return iter(())

    @abstractmethod
    def find_splits(self, recipe: Recipe, source: str) -> Splits:
        """The images to train on and to validate on; ``source`` is ``data`` of the run."""

    def class_ids(self, splits: Splits) -> tuple[str, ...]:
        """Classes of the model's head, in order; empty for a model without a head."""
        return splits.train.class_ids

    def setup(self, model: RoundModel, splits: Splits, recipe: Recipe, processes: Processes) -> None:
        """Create the modules, and everything that depends on the model or the data."""

    @abstractmethod
    def load_data(self, model: RoundModel, splits: Splits, recipe: Recipe, processes: Processes) -> TaskData:
        """Training and validation batches on the device."""

    def describe(self, splits: Splits) -> str:
        """One line about the data, printed when the run starts."""
        return (
            f"training on {count_of(len(splits.train), 'image', ',')}; "
            f"{count_of(len(splits.val), 'validation image', ',')}"
        )

    def before_step(self, step: int) -> None:
        """Called before the micro-batches of a step, with equal random numbers in all processes."""

    def prepare(self, batch: Any) -> Any:
        """Prepare a batch for ``losses``, without gradients and outside of the compiled part."""
        return batch

    def outputs(self, model: RoundModel, batch: Any) -> Any:
        """Run the model; by default all rounds on ``batch.images``."""
        return model(batch.images)

    @abstractmethod
    def losses(self, outputs: Any, batch: Any) -> Tensor:
        """One loss per round: (S,), the same S in every step. The loop minimises their mean."""

    def after_step(self, model: RoundModel, step: int, total_steps: int) -> None:
        """Called without gradients after step number ``step``, counted from 0, has changed the weights."""

    def monitor(self) -> Mapping[str, Any]:
        """Further numbers for the log, such as lists with one number per round; called with every log."""
        return {}

    def warning(self, values: Mapping[str, Any], *, step: int, steps_per_epoch: int) -> str | None:
        """A line to print if the ``values`` of ``monitor`` show that the training fails."""
        return None

    def export(self, model: RoundModel) -> RoundModel:
        """The model that is validated and saved."""
        return model

    @abstractmethod
    def validate(
        self, model: RoundModel, data: TaskData, *, processes: Processes, dtype: torch.dtype | None
    ) -> Metrics:
        """Measure the exported model. Each process runs its share of the images, and all return the same metrics."""

    def preprocessing_sha256(self, model: RoundModel) -> str:
        """The hash of how ``validate`` prepares images, for the setting that the training leaves."""
        return preprocessing_hash(model.config)

    def summarize(self, values: Mapping[str, Any]) -> str:
        """One line about ``Metrics.values``, for the terminal."""
        return ", ".join(f"{name} {value:.4g}" for name, value in values.items() if isinstance(value, float))

    def no_weight_decay(self) -> set[str]:
        """Parameters of the task that are not decayed, besides vectors and biases."""
        return set()
