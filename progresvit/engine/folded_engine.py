"""What the engines that run the folded rounds of a model with torch share: segmentation and features.

All images of a batch run the same round, and batches become smaller if memory runs out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from progresvit.engine.batcher import SMALLER_BATCHES, MemoryWarning
from progresvit.model.precision import autocast

if TYPE_CHECKING:
    from progresvit.engine.backends import TorchSource
    from progresvit.engine.fold import FoldedRound
    from progresvit.engine.options import EngineOptions


class FoldedEngine:
    """A folded model on a device.

    Args:
        source: The model.
        fold: Folds its rounds.
        options: Device, precision, batch and workers.
        batches: The largest batch by default, on a GPU and on a CPU.
    """

    def __init__(
        self, source: TorchSource, fold: Callable[[], nn.ModuleList], options: EngineOptions, batches: tuple[int, int]
    ) -> None:
        self._source, self.config = source, source.config
        self.precision, self.workers = options.precision, options.workers or 2
        self.device = source.device(options.device)
        autocast(self.device, self.precision)  # refuses what the device cannot run
        self.batch = options.batch or batches[self.device.type != "cuda"]
        self._rounds: list[FoldedRound] = list(fold().to(self.device))  # type: ignore[arg-type]
        self._has_warned = False

    def run_batch(
        self, run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | None, item: str = "image"
    ) -> tuple[Tensor, ...]:
        """What ``run`` returns for these inputs; in smaller batches if memory runs out.

        Args:
            run: Runs a batch.
            inputs: Its arguments, a row for each item; the first is a tensor.
            item: A row, as errors call it.
        """
        assert inputs[0] is not None
        total = size = len(inputs[0])
        results: list[tuple[Tensor, ...]] = []
        done = 0
        while done < total:
            try:
                results.append(run(*(None if rows is None else rows[done : done + size] for rows in inputs)))
                done += size
                continue
            except torch.OutOfMemoryError:
                if size == 1:
                    text = f"there is not enough memory for a single {item}; free some, or use a smaller model."
                    raise MemoryError(text) from None
            if self.device.type == "cuda":  # only here: the exception holds the tensors of the batch
                torch.cuda.empty_cache()
            size //= 2
            self.batch = min(self.batch, size)
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(SMALLER_BATCHES, MemoryWarning, stacklevel=2)
        return results[0] if len(results) == 1 else tuple(torch.cat(tensors) for tensors in zip(*results))
