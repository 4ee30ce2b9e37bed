"""Linear probe: linear classifiers on frozen features, one for each round and learning rate, trained together.

All of them see the same batches, so one pass over the images trains every learning rate. SGD with momentum 0.9, without
weight decay; learning rates are for a batch of 256, scale with the batch, and decay to 0 along a cosine.

Letters: N images, B images of a batch, S rounds, L learning rates, d channels, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from progresvit.data.sampler import EpochSampler

LEARNING_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Learning rates that are tried by default, for a batch of 256."""
BATCH = 256
BLOCKS, CROP = 4, 0.875
"""Blocks whose class tokens a classifier reads, and the evaluation crop: those of DINO's probe of a ViT-S."""
MOMENTUM = 0.9
INITIAL_DEVIATION = 0.01
_MOMENTUM_KEY = "momentum/"


class LinearProbe(nn.Module):
    """Linear classifiers and their optimizer.

    Args:
        widths: Channels of the features of each round.
        classes: Number of classes.
        learning_rates: One classifier of each round is trained with each of them.
        steps: Steps of the whole training.
        batch: Images per step.
        seed: Seed of the first weights. All learning rates start from the same.
    """

    def __init__(
        self,
        widths: Sequence[int],
        classes: int,
        *,
        learning_rates: Sequence[float],
        steps: int,
        batch: int,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_learning_rates(learning_rates)
        self.steps, self.step = steps, 0
        self.rates = [rate * batch / BATCH for rate in learning_rates]
        generator = torch.Generator().manual_seed(seed)
        self.classifiers = nn.ModuleList()
        for width in widths:
            start = torch.empty(classes, width).normal_(std=INITIAL_DEVIATION, generator=generator)
            linears = [nn.Linear(width, classes) for _ in learning_rates]
            for linear in linears:
                linear.weight.data.copy_(start)
                linear.bias.data.zero_()
            self.classifiers.append(nn.ModuleList(linears))
        self._optimizer: torch.optim.SGD | None = None

    @property
    def optimizer(self) -> torch.optim.SGD:
        """Made at the first use, when the classifiers are on their device; a group for each learning rate."""
        if self._optimizer is None:
            by_rate = zip(*(cast(nn.ModuleList, of_round) for of_round in self.classifiers))  # S x L -> L x S
            groups = [{"params": [p for linear in linears for p in linear.parameters()]} for linears in by_rate]
            self._optimizer = torch.optim.SGD(groups, lr=0.0, momentum=MOMENTUM)
        return self._optimizer

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Logits of all classifiers, round by round: S times (B, d) -> S times (L, B, K)."""
        return [
            torch.stack([linear(tokens) for linear in cast(nn.ModuleList, of_round)])  # L times (B, K) -> (L, B, K)
            for tokens, of_round in zip(features, self.classifiers)
        ]

    def train_step(
        self, features: Sequence[Tensor], targets: Tensor, mean: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """One step of every classifier: S times (B, d), (B,).

        ``mean`` averages a gradient over processes in place, each of which has an equal share of the batch.
        """
        decay = (1 + math.cos(math.pi * self.step / self.steps)) / 2
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = rate * decay
        self.optimizer.zero_grad()
        losses = [F.cross_entropy(logits, targets) for of_round in self(features) for logits in of_round]
        torch.stack(losses).sum().backward()  # each classifier has a loss of its own
        if mean is not None:
            for parameter in self.parameters():
                assert parameter.grad is not None
                mean(parameter.grad)
        self.optimizer.step()
        self.step += 1

    def tensors(self) -> dict[str, Tensor]:
        """Weights and momenta, for a checkpoint; with the number of the step they are all that it needs."""
        parameters = dict(self.named_parameters())
        momenta = {
            _MOMENTUM_KEY + name: self.optimizer.state[parameter]["momentum_buffer"]
            for name, parameter in parameters.items()
        }
        return {**{name: parameter.detach() for name, parameter in parameters.items()}, **momenta}

    def restore(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Continue from a checkpoint."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(tensors[name])
                self.optimizer.state[parameter]["momentum_buffer"] = tensors[_MOMENTUM_KEY + name].to(parameter.device)
        self.step = step


def train_linear_probe(
    features: Sequence[Tensor],
    targets: Tensor,
    *,
    classes: int,
    learning_rates: Sequence[float] = LEARNING_RATES,
    epochs: int = 100,
    batch: int = BATCH,
    seed: int = 0,
) -> LinearProbe:
    """Classifiers of features that do not change from epoch to epoch, S times (N, d), and classes (N,).

    An incomplete last batch of an epoch is left out; each epoch has another order.
    """
    sampler = EpochSampler(count=len(targets), batch=min(batch, len(targets)), seed=seed)
    steps = epochs * sampler.steps_per_epoch
    probe = LinearProbe(
        [tokens.shape[1] for tokens in features],
        classes,
        learning_rates=learning_rates,
        steps=steps,
        batch=sampler.batch,
        seed=seed,
    ).to(targets.device)
    for step in range(steps):
        for _, indices in sampler.micro_batches(step):
            probe.train_step([tokens[indices] for tokens in features], targets[indices])
    return probe


@torch.no_grad()
def count_correct(probe: LinearProbe, features: Sequence[Tensor], targets: Tensor) -> Tensor:
    """How many images each classifier predicts correctly: S times (B, d), (B,) -> (S, L).

    Logits that are not finite, of a learning rate that is too high, are wrong.
    """
    logits = torch.stack(probe(features))  # S times (L, B, K) -> (S, L, B, K)
    right = (logits.argmax(dim=-1) == targets) & logits.isfinite().all(dim=-1)
    return right.sum(dim=-1)  # (S, L, B) -> (S, L)


def check_learning_rates(learning_rates: Sequence[float]) -> None:
    """Refuse learning rates that are not positive numbers, or that occur twice."""
    if not learning_rates or not all(0 < rate < math.inf for rate in learning_rates):
        raise ValueError(f"learning rates are numbers above 0, such as 0.01,0.1, not {list(learning_rates)}.")
    if len(set(learning_rates)) < len(learning_rates):
        raise ValueError(f"a learning rate is given twice: {list(learning_rates)}; leave one of them out.")
