"""One optimizer step: losses of all rounds, gradients, update, moving average. The host never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from timm.data import Mixup
from timm.data.mixup import mixup_target
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from progresvit.data.loader import Batch
from progresvit.data.sampler import Draw, seed_all
from progresvit.distributed import Processes
from progresvit.model import ProgResViT, RoundOutput
from progresvit.model.precision import PRECISIONS
from progresvit.training.recipe import Optimizer, Recipe, Schedule


class Objective(Protocol):
    """What a method adds to the loop: targets for a batch, and a loss for each round."""

    def targets(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]: ...

    def losses(self, outputs: Sequence[RoundOutput], *targets: Tensor) -> Tensor: ...


class RoundLosses(nn.Module):
    """All rounds and their losses as one module: what is compiled, and what DDP wraps."""

    def __init__(self, model: ProgResViT, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, images: Tensor, *targets: Tensor) -> Tensor:
        """(S,)"""
        return self.objective.losses(self.model(images), *targets)


def learning_rate(optimizer: Optimizer) -> float:
    """Grows with the batch: lr · batch / lr_batch."""
    return optimizer.lr * optimizer.batch / optimizer.lr_batch


def make_optimizer(model: nn.Module, wanted: Optimizer) -> torch.optim.Optimizer:
    """AdamW, no decay on vectors, biases, position embedding and class token."""
    optimizer: torch.optim.Optimizer = create_optimizer_v2(
        model,
        opt="adamw",
        lr=learning_rate(wanted),
        weight_decay=wanted.weight_decay,
        betas=wanted.betas,
        eps=wanted.eps,
        fused=True,
    )
    return optimizer


def make_schedule(optimizer: torch.optim.Optimizer, wanted: Schedule) -> CosineLRScheduler:
    """Warm-up, cosine and cooldown; ``step(epoch)`` sets the rate of that epoch."""
    return CosineLRScheduler(
        optimizer,
        t_initial=wanted.epochs,
        lr_min=wanted.min_lr,
        warmup_t=wanted.warmup,
        warmup_lr_init=wanted.warmup_lr,
        cycle_limit=1,
    )


class TrainingStep:
    """Model, average and optimizer of a run, and how one step changes them.

    A loss or gradient that is not finite raises a flag on the device, and from then on the optimizer leaves the weights
    alone: the host need not wait for every loss to be sure that none of them did harm.
    """

    def __init__(
        self,
        model: ProgResViT,
        objective: Objective,
        recipe: Recipe,
        processes: Processes,
        rows: Sequence[int] | None = None,
    ) -> None:
        self.model, self.objective, self.recipe, self.processes = model, objective, recipe, processes
        self.rows = rows
        """Rows of the head that the data's classes have, where it has more."""
        self.dtype = PRECISIONS[recipe.run.precision]
        if recipe.run.precision == "fp16" and processes.device.type != "cuda":
            raise ValueError("fp16 needs a CUDA device; set run.precision=bf16 or fp32.")
        model.set_grad_checkpointing(recipe.run.grad_checkpointing)
        self.ema = ModelEmaV3(model, decay=recipe.ema, use_warmup=recipe.ema_warmup)
        self.optimizer = make_optimizer(model, recipe.optimizer)
        self.schedule = make_schedule(self.optimizer, recipe.schedule)
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=recipe.run.precision == "fp16")
        self.mixup = make_mixup(recipe, model.config.num_classes if rows is None else len(rows), processes.count)
        losses: nn.Module = RoundLosses(model, objective)
        if recipe.run.compile == "blocks":
            compile_blocks(model)
        elif recipe.run.compile:
            losses = torch.compile(losses, fullgraph=True, dynamic=False)  # type: ignore[assignment]
        if processes.count > 1:
            losses = DistributedDataParallel(losses, device_ids=_device_ids(processes), gradient_as_bucket_view=True)
        self.losses = losses
        self.record = recipe.run.cuda_graphs
        """Whether the rounds are still to be recorded; that needs a batch."""
        if self.record:
            _check_recording(recipe, processes)
        rounds = len(model.config.rounds)
        self.sums = torch.zeros(rounds, device=processes.device)
        self.broken = torch.zeros((), device=processes.device)
        """Up once a loss or a gradient was not finite."""
        self.steps_done = torch.zeros((), device=processes.device)
        """Steps before that."""

    def __call__(self, step: int, batches: Sequence[Batch]) -> None:
        """Take the step; ``batches`` are this process's micro-batches."""
        self.optimizer.zero_grad(set_to_none=True)
        step_losses = torch.zeros_like(self.sums)
        for turn, (images, targets) in enumerate(batches):
            draw = (Draw.STEP, self.recipe.seed, step, self.processes.rank * len(batches) + turn)
            seed_all(*draw)
            images, labels = self.mixup(images, targets)
            last = turn == len(batches) - 1
            with self._synced(last):
                with torch.autocast(images.device.type, self.dtype, enabled=self.dtype is not None):
                    compared = self.objective.targets(images, labels)
                    if self.record:
                        self._record(images, *compared)
                        seed_all(*draw)  # recording drew too, and the step must not depend on when that was
                    losses = self.losses(images, *compared)  # (S,)
                self.scaler.scale(losses.mean() / len(batches)).backward()
            step_losses += losses.detach() / len(batches)
        self._update(self.processes.mean(step_losses))
        self.ema.update(self.model, step + 1 if self.recipe.ema_warmup else None)

    def answering(self) -> ProgResViT:
        """The average as it answers: with the rows of the data's classes alone."""
        average: ProgResViT = self.ema.module
        return average if self.rows is None else average.keep_classes(self.rows)

    def _record(self, *batch: Tensor) -> None:
        """Record forward and backward of the rounds on a batch; from then on they are replayed."""
        with torch.autocast(batch[0].device.type, self.dtype, enabled=self.dtype is not None, cache_enabled=False):
            self.losses = torch.cuda.make_graphed_callables(self.losses, batch)  # type: ignore[assignment]
        self.record = False

    def _update(self, step_losses: Tensor) -> None:
        finite = step_losses.isfinite().all()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        if not self.scaler.is_enabled():  # with a scaler, gradients overflow now and then, and it handles that
            finite &= torch.stack(torch._foreach_norm(gradients)).isfinite().all()
        self.broken = torch.maximum(self.broken, (~finite).float())
        self.steps_done += 1 - self.broken
        self.sums += torch.where(self.broken > 0, 0, step_losses)
        if self.scaler.is_enabled():
            torch._foreach_mul_(gradients, torch.where(self.broken > 0, torch.nan, 1.0))  # so it skips the step
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.found_inf = self.broken  # type: ignore[attr-defined]
            self.optimizer.step()

    def _synced(self, last: bool) -> Any:
        """Gradients are shared among processes once, with the last micro-batch."""
        ddp = isinstance(self.losses, DistributedDataParallel)
        return self.losses.no_sync() if ddp and not last else nullcontext()  # type: ignore[operator]


def compile_blocks(model: ProgResViT) -> None:
    """Compile the block once for each width, for all of them: ready in seconds where the whole takes minutes."""
    versions = 2 * len(model.config.rounds) * model.config.depth  # stochastic depth makes each block one of its own
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, versions)
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False)


def _check_recording(recipe: Recipe, processes: Processes) -> None:
    plain = recipe.optimizer.accumulate == 1 and not recipe.run.grad_checkpointing
    if processes.device.type != "cuda" or processes.count > 1 or not plain:
        raise ValueError(
            "run.cuda_graphs works on one GPU, without accumulating (optimizer.accumulate=1) and without "
            "run.grad_checkpointing; set it to false."
        )


def make_mixup(recipe: Recipe, classes: int, processes: int = 1) -> Any:
    """timm's mixup and cutmix with smoothing, or smoothing alone."""
    wanted = recipe.mixing
    if not wanted.mixup and not wanted.cutmix:
        return lambda images, targets: (images, mixup_target(targets, classes, smoothing=wanted.smoothing))
    micro = recipe.optimizer.batch // (recipe.optimizer.accumulate * processes)
    if micro % 2:
        raise ValueError(
            f"mixup needs an even batch in each process and turn, not {micro}; change optimizer.batch or "
            "optimizer.accumulate, or set mixing.mixup=0 and mixing.cutmix=0."
        )
    return Mixup(
        mixup_alpha=wanted.mixup,
        cutmix_alpha=wanted.cutmix,
        prob=wanted.probability,
        switch_prob=wanted.switch,
        label_smoothing=wanted.smoothing,
        num_classes=classes,
    )


def _device_ids(processes: Processes) -> list[int] | None:
    return [processes.device.index or 0] if processes.device.type == "cuda" else None
