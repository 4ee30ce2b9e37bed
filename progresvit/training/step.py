"""One optimizer step: losses of the rounds, gradients, update, moving average. The host never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from progresvit.data.sampler import Draw, seed_all
from progresvit.distributed import Processes
from progresvit.model.interface import RoundModel, capability
from progresvit.model.precision import PRECISIONS
from progresvit.training.optim import freeze, make_optimizer
from progresvit.training.recipe import Recipe
from progresvit.training.tasks.task import Task


class RoundLosses(nn.Module):
    """Model and task as one module, which is compiled, wrapped by DDP, optimized, averaged and saved."""

    def __init__(self, model: RoundModel, task: Task) -> None:
        super().__init__()
        self.model, self.task = cast(nn.Module, model), task

    def forward(self, batch: Any) -> Tensor:
        """(S,)"""
        return self.task.losses(self.task.outputs(cast(RoundModel, self.model), batch), batch)


class TrainingStep:
    """The trained modules of a run, their average and optimizer, and how one step changes them.

    A loss or gradient that is not finite sets a flag on the device, and from then on the optimizer skips its steps. So
    the weights are safe although the host does not wait for every loss.

    Args:
        model: The model, on the device.
        task: The task, set up for this model.
        recipe: The recipe of the run.
        processes: The processes of the run.
        steps_per_epoch: Steps of one epoch, to unfreeze parameters and to tell the task its progress.
    """

    def __init__(
        self, model: RoundModel, task: Task, recipe: Recipe, processes: Processes, *, steps_per_epoch: int
    ) -> None:
        self.model, self.task, self.recipe, self.processes = model, task.to(processes.device), recipe, processes
        self.steps_per_epoch = steps_per_epoch
        self.dtype = PRECISIONS[recipe.run.precision]
        if recipe.run.grad_checkpointing:
            capability(model, "set_grad_checkpointing", "run.grad_checkpointing", "run.grad_checkpointing=false")(True)
        self.trained = RoundLosses(model, task)
        self.frozen = freeze(self.trained, recipe.optimizer)
        later = {id(parameter) for parameter, _ in self.frozen}
        if later and all(id(parameter) in later for parameter in self.trained.parameters() if parameter.requires_grad):
            raise ValueError("optimizer.freeze_epochs leaves no parameter to train in the first epoch; freeze fewer.")
        self.ema = ModelEmaV3(self.trained, decay=recipe.ema, use_warmup=recipe.ema_warmup)
        self.optimizer = make_optimizer(self.trained, recipe)
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=recipe.run.precision == "fp16")
        losses: nn.Module = self.trained
        if recipe.run.compile == "blocks":
            compile_blocks(model)
        elif recipe.run.compile:
            losses = torch.compile(losses, fullgraph=True, dynamic=False)  # type: ignore[assignment]
        if processes.count > 1:
            losses = DistributedDataParallel(
                losses,
                device_ids=[processes.device.index or 0] if processes.device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                find_unused_parameters=not task.uses_all_parameters,
            )
        self.losses = losses
        self.record = recipe.run.cuda_graphs
        """Whether the next batch records the CUDA graph."""
        self.sums = torch.zeros((), device=processes.device)
        """Sum of the losses since the last log; the first step gives it the shape (S,)."""
        self.broken = torch.zeros((), device=processes.device)
        """1 after a loss or a gradient that was not finite, else 0."""
        self.steps_done = torch.zeros((), device=processes.device)
        """Steps since the last log, up to the first that was not finite."""

    def __call__(self, step: int, batches: Sequence[Any]) -> None:
        """Take step number ``step``; ``batches`` are this process's micro-batches."""
        self.optimizer.zero_grad(set_to_none=True)
        step_losses = torch.zeros((), device=self.processes.device)
        seed_all(Draw.STEP, self.recipe.seed, step)
        self.task.before_step(step)
        for turn, batch in enumerate(batches):
            draw = (Draw.STEP, self.recipe.seed, step, self.processes.rank * len(batches) + turn)
            seed_all(*draw)
            last = turn == len(batches) - 1
            is_ddp = isinstance(self.losses, DistributedDataParallel)
            with self.losses.no_sync() if is_ddp and not last else nullcontext():  # type: ignore[operator]
                with torch.autocast(self.processes.device.type, self.dtype, enabled=self.dtype is not None):
                    with torch.no_grad():
                        prepared = self.task.prepare(batch)
                    if self.record:
                        self._record(prepared)
                        seed_all(*draw)  # recording draws random numbers too
                    losses = self.losses(prepared)  # (S,)
                self.scaler.scale(losses.mean() / len(batches)).backward()
            step_losses = step_losses + losses.detach() / len(batches)
        self._update(step, self.processes.mean(step_losses))
        with torch.no_grad():
            self.task.after_step(self.model, step, self.recipe.epochs * self.steps_per_epoch)
        self.ema.update(self.trained, step + 1 if self.recipe.ema_warmup else None)

    def average(self) -> tuple[RoundModel, Task]:
        """The exported moving average of the model, and the moving average of the task."""
        task: Task = self.ema.module.task
        return task.export(self.ema.module.model), task

    def _record(self, batch: Any) -> None:
        """Record the forward and backward pass of the rounds on a batch, to replay them from now on."""
        device = self.processes.device.type
        with torch.autocast(device, self.dtype, enabled=self.dtype is not None, cache_enabled=False):
            self.losses = torch.cuda.make_graphed_callables(  # type: ignore[assignment]
                self.losses, (batch,), allow_unused_input=not self.task.uses_all_parameters
            )
        self.record = False

    def _update(self, step: int, step_losses: Tensor) -> None:
        """Sum the losses and change the weights, unless a loss or a gradient is not finite."""
        for parameter, epochs in self.frozen:
            if step < epochs * self.steps_per_epoch:
                parameter.grad = None
        if self.sums.ndim and self.sums.shape != step_losses.shape:
            raise ValueError(
                f"the task returned {len(step_losses)} losses after {len(self.sums)}; return one for each round in "
                "every step, 0 for a round that did not run."
            )
        finite = step_losses.isfinite().all()
        gradients = [parameter.grad for parameter in self.trained.parameters() if parameter.grad is not None]
        if not self.scaler.is_enabled():  # a loss scaler handles gradients that overflow occasionally
            finite &= torch.stack(torch._foreach_norm(gradients)).isfinite().all()
        self.broken = torch.maximum(self.broken, (~finite).float())
        self.steps_done += 1 - self.broken
        self.sums = self.sums + torch.where(self.broken > 0, 0, step_losses)
        if self.scaler.is_enabled():
            torch._foreach_mul_(
                gradients, torch.where(self.broken > 0, torch.nan, 1.0)
            )  # the scaler then skips the step
            if self.recipe.optimizer.clip is not None:
                self.scaler.unscale_(self.optimizer)
                self._clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            if self.recipe.optimizer.clip is not None:
                self._clip()
            self.optimizer.found_inf = self.broken  # type: ignore[attr-defined]
            self.optimizer.step()

    def _clip(self) -> None:
        """Scale the gradients to the largest norm: all together, or each parameter's alone."""
        largest = self.recipe.optimizer.clip
        assert largest is not None
        if not self.recipe.optimizer.clip_each:
            nn.utils.clip_grad_norm_(self.trained.parameters(), largest)
            return
        gradients = [parameter.grad for parameter in self.trained.parameters() if parameter.grad is not None]
        factors = torch._foreach_norm(gradients)  # becomes min(1, largest / norm)
        torch._foreach_add_(factors, 1e-6)
        torch._foreach_reciprocal_(factors)
        torch._foreach_mul_(factors, largest)
        torch._foreach_clamp_max_(factors, 1.0)
        torch._foreach_mul_(gradients, factors)


def compile_blocks(model: RoundModel) -> None:
    """Compile one block per width and use it for all blocks: seconds instead of minutes for the whole model."""
    blocks = capability(model, "blocks", "run.compile=blocks", "run.compile=true")
    versions = 2 * len(model.config.rounds) * len(blocks)  # stochastic depth makes the blocks different
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, versions)
    for block in blocks:
        block.compile(fullgraph=True, dynamic=False)
