"""Optimizer, schedules and frozen parameters of a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler, PolyLRScheduler
from torch import nn

from progresvit.io.parse import did_you_mean
from progresvit.training.recipe import Optimizer, Recipe, Schedule


def base_rate(optimizer: torch.optim.Optimizer) -> float:
    """The current learning rate, without the factors of ``lr_scale``."""
    group = optimizer.param_groups[0]
    return float(group["lr"] / group.get("lr_scale", 1))


def make_optimizer(trained: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW or SGD for all parameters of ``trained`` that require a gradient.

    The learning rate grows with the batch: lr · batch / lr_batch. Vectors, biases and the parameters in a submodule's
    ``no_weight_decay`` (position embedding, class token) are not decayed. The optimizers are fused: they skip a step if
    ``found_inf`` is set on the device.
    """
    options, end = recipe.optimizer, recipe.schedule.weight_decay_end
    not_decayed = {
        f"{prefix}.{name}"
        for prefix, module in trained.named_children()
        if hasattr(module, "no_weight_decay")
        for name in module.no_weight_decay()  # type: ignore[operator]
    }
    groups = param_groups_weight_decay(
        trained, weight_decay=options.weight_decay or end or 0.0, no_weight_decay_list=not_decayed
    )
    groups = _scale_rates(groups, trained, options.lr_scale)
    if not groups:
        raise ValueError("optimizer.freeze: no parameter is left to train; freeze fewer parameters.")
    for group in groups:
        group["decays"] = group["weight_decay"] > 0
        group["weight_decay"] = options.weight_decay if group["decays"] else 0.0
    arguments: dict[str, Any] = {"lr": options.lr * options.batch / options.lr_batch, "fused": True}
    if options.name == "adamw":
        arguments |= {"opt": "adamw", "betas": options.betas, "eps": options.eps}
    else:
        arguments |= {"opt": "momentum", "momentum": options.momentum}  # timm's "sgd" has Nesterov's momentum
    optimizer: torch.optim.Optimizer = create_optimizer_v2(groups, **arguments)
    if options.name == "sgd" and options.momentum:
        for parameter in (parameter for group in groups for parameter in group["params"]):
            # if the first step is skipped, torch would start from uninitialised memory
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _scale_rates(groups: list[dict[str, Any]], trained: nn.Module, scales: Mapping[str, float]) -> list[dict[str, Any]]:
    """Split the groups by the factor of their learning rate, which timm's schedules read from ``lr_scale``."""
    factor: dict[nn.Parameter, float] = {}
    for pattern, scale in scales.items():
        for parameter in find_parameters(trained, pattern, key="optimizer.lr_scale"):
            factor[parameter] = scale
    split = []
    for group in groups:
        factors = {factor.get(parameter, 1.0) for parameter in group["params"]}
        for scale in sorted(factors, key=lambda scale: (scale != 1, scale)):  # the same order after a resume
            parameters = [parameter for parameter in group["params"] if factor.get(parameter, 1.0) == scale]
            split.append({**group, "params": parameters} | ({} if scale == 1 else {"lr_scale": scale}))
    return split


def warmup_epochs(schedule: Schedule) -> int:
    """Number of warm-up epochs; half of the epochs if the whole run would be warm-up."""
    return schedule.warmup if schedule.warmup < schedule.epochs else schedule.epochs // 2


class Schedules:
    """Sets the learning rate and the weight decay of every step."""

    def __init__(self, optimizer: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int) -> None:
        schedule = recipe.schedule
        self.optimizer, self.start, self.end = optimizer, recipe.optimizer.weight_decay, schedule.weight_decay_end
        self.steps_per_epoch, self.by_step = steps_per_epoch, schedule.by == "step"
        warmup = warmup_epochs(schedule)
        unit = steps_per_epoch if self.by_step else 1
        self.length = schedule.epochs * unit
        options = {
            "t_initial": self.length - (warmup * unit if schedule.warmup_prefix else 0),
            "lr_min": schedule.min_lr,
            "warmup_t": warmup * unit,
            "warmup_lr_init": schedule.warmup_lr,
            "warmup_prefix": schedule.warmup_prefix,
            "cycle_limit": 1,
        }
        self.rates = (
            CosineLRScheduler(optimizer, **options)
            if schedule.name == "cosine"
            else PolyLRScheduler(optimizer, power=schedule.power, **options)
        )

    def set(self, step: int) -> None:
        """Prepare the optimizer for a step, counted from 0."""
        time = step if self.by_step else step // self.steps_per_epoch
        self.rates.step(time)
        if self.end is None:
            return
        done = min(time / self.length, 1.0)
        decay = self.end + 0.5 * (self.start - self.end) * (1 + math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            if group["decays"]:
                group["weight_decay"] = decay


def freeze(trained: nn.Module, options: Optimizer) -> list[tuple[nn.Parameter, int]]:
    """Freeze the parameters that are never trained. Returns the parameters that train later, with their first epoch.

    The last matching pattern decides. A pattern that begins with ``!`` unfreezes parameters of earlier patterns.
    """
    never: dict[int, nn.Parameter] = {}
    for pattern in options.freeze:
        for parameter in find_parameters(trained, pattern.removeprefix("!"), key="optimizer.freeze"):
            never.pop(id(parameter), None) if pattern.startswith("!") else never.setdefault(id(parameter), parameter)
    for parameter in never.values():
        parameter.requires_grad_(False)
    return [
        (parameter, epochs)
        for pattern, epochs in options.freeze_epochs.items()
        for parameter in find_parameters(trained, pattern, key="optimizer.freeze_epochs")
    ]


def find_parameters(trained: nn.Module, pattern: str, *, key: str) -> list[nn.Parameter]:
    """Parameters whose name matches: the model's as in its files, and the task's, which begin with ``task.``."""
    names = {name.removeprefix("model."): parameter for name, parameter in trained.named_parameters()}
    parameters = [parameter for name, parameter in names.items() if fnmatchcase(name, pattern)]
    if not parameters:
        parts = [name.split(".") for name in names]
        groups = {".".join(part[:length]) + ".*" for part in parts for length in range(1, len(part))}
        hint = did_you_mean(pattern, sorted(groups | set(names)))
        if not hint.startswith("did you mean"):
            hint = did_you_mean(pattern, sorted({part[0] + (".*" if len(part) > 1 else "") for part in parts}))
        raise ValueError(f"{key}: no parameter matches {pattern!r}; {hint}")
    return parameters
