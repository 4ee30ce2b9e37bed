"""DynaBERT for a ViT: the same blocks with fewer attention heads and MLP neurons; the tokens keep their width.

Round s runs the leading share of the heads and neurons of every block; heads are rounded up to whole ones (1/4 of 6 is
2). Rounds are alternatives; one of them is chosen before inference. Before training, heads and neurons are reordered by
importance (:func:`reorder`), so that the small rounds have the most important ones. The task ``dynabert`` trains it.

Letters: B images, C image channels, r resolution, N tokens, W channels of the backbone, h heads of the backbone, m MLP
neurons of a block (4W), L blocks, s a round counted from 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor

from progresvit import compute
from progresvit.config import HEAD_WIDTH, MLP_RATIO, BackboneConfig, BaseRound, Number, check_one_resolution
from progresvit.model import slicing
from progresvit.model.backbone import Backbone
from progresvit.model.blocks import Block
from progresvit.model.interface import RoundOutput
from progresvit.model.psg import BlockGates


class DynaBERTRound(BaseRound):
    """A width of attention and MLP."""

    share: Number
    """Share of the heads and of the MLP neurons, above 0 and at most 1."""


class DynaBERTConfig(BackboneConfig):
    """Rounds that differ in their share of heads and neurons."""

    kind: Literal["dynabert"] = "dynabert"
    rounds: tuple[DynaBERTRound, ...]
    """Rounds from narrow to wide; the last runs the whole backbone."""

    routable: ClassVar[bool] = False

    def attention_width(self, round_: DynaBERTRound) -> int:
        """Channels of the round's heads."""
        return HEAD_WIDTH * _part(round_.share, self.heads)

    def hidden(self, round_: DynaBERTRound) -> int:
        """MLP neurons of the round."""
        return _part(round_.share, MLP_RATIO * self.width)

    @model_validator(mode="after")
    def _check_rounds(self) -> Self:
        check_one_resolution(self.rounds)
        shares = [round_.share for round_ in self.rounds]
        if not all(0 < share <= 1 for share in shares):
            raise ValueError(f"a share is above 0 and at most 1, such as 0.25, not {shares}.")
        if any(a >= b for a, b in pairwise(shares)) or shares[-1] != 1:
            raise ValueError(f"the shares rise from round to round and end at 1, the whole backbone, not {shares}.")
        return self


class DynaBERT(Backbone):
    """A ViT that runs at several shares of its heads and neurons."""

    config: DynaBERTConfig

    def __init__(self, config: DynaBERTConfig, *, drop_path: float = 0.0) -> None:
        super().__init__(config, drop_path=drop_path)
        self.attention_widths = tuple(config.attention_width(round_) for round_ in config.rounds)
        self.hidden = tuple(config.hidden(round_) for round_ in config.rounds)

    def run_round(self, s: int, images: Tensor, previous: Tensor | None = None) -> RoundOutput:
        """Round s, counted from 0, from the image alone."""
        return self.run_with_hidden(s, images, previous)[0]

    def run_with_hidden(
        self, s: int, images: Tensor, previous: Tensor | None = None
    ) -> tuple[RoundOutput, tuple[Tensor, ...]]:
        """Round s and its L hidden states: the residual stream (B, N, W) after each block, before the final norm."""
        self.check_round(s, images, previous)
        x = self.embed(images, resolution=self.resolutions[s], width=self.widths[s])  # (B, C, H, H) -> (B, N, W)
        states = []
        for block in self.blocks:
            x = self.run_block(block, x, BlockGates(), attention_width=self.attention_widths[s], hidden=self.hidden[s])
            states.append(x)
        tokens = slicing.layer_norm(x, self.norm)
        return RoundOutput(logits=self.classify(tokens), tokens=tokens), tuple(states)

    def round_macs(self, convention: compute.Convention = "paper") -> Sequence[compute.RoundMacs]:
        """MACs of each round alone."""
        sizes = zip(self.resolutions, self.widths, self.attention_widths, self.hidden)
        return [
            compute.stack_macs(
                self.config, convention, resolution=resolution, width=width, attention_width=attention, hidden=hidden
            )
            for resolution, width, attention, hidden in sizes
        ]


class Importance(NamedTuple):
    """How much the loss depends on each head and neuron of each block."""

    heads: Tensor
    """(L, h)"""
    neurons: Tensor
    """(L, m)"""


def reorder(
    model: DynaBERT, batches: Iterable[tuple[Tensor, Tensor]], *, mean: Callable[[Tensor], Tensor] = lambda x: x
) -> None:
    """Permute heads and neurons in place, the most important first; the whole backbone computes the same function.

    Args:
        model: The model, trained at its full width.
        batches: Images with their classes (B,).
        mean: Averages a tensor over the processes of a run, each of which has its own batches.
    """
    heads_and_neurons = (mean(values) for values in importance(model, batches))
    for block, heads, neurons in zip(model.blocks, *heads_and_neurons):
        orders = (values.argsort(descending=True, stable=True) for values in (heads, neurons))
        permute(cast(Block, block), *orders)


def importance(model: DynaBERT, batches: Iterable[tuple[Tensor, Tensor]]) -> Importance:
    """The sum over batches of |dL/dmask| at mask = 1, L the cross entropy of the whole backbone.

    A mask multiplies the output of a head or neuron, which is the same as multiplying its columns of the layer that
    follows: dL/dmask_j = sum over i, and over j's columns, of W_ij dL/dW_ij, with W of ``attn.proj`` and ``mlp.fc2``.
    The absolute value estimates, to first order, how much the loss changes without the head or neuron.
    """
    blocks = [cast(Block, block) for block in model.blocks]
    weights = [block.attn.proj.weight for block in blocks] + [block.mlp.fc2.weight for block in blocks]
    depth, total = len(blocks), None
    was_training = model.training
    model.eval()
    with torch.enable_grad():
        for images, targets in batches:
            output = model.run_round(len(model.resolutions) - 1, images)
            gradients = torch.autograd.grad(F.cross_entropy(output.logits, targets), weights)
            columns = [(weight.detach() * gradient).sum(dim=0) for weight, gradient in zip(weights, gradients)]
            channels, neurons = torch.stack(columns[:depth]), torch.stack(columns[depth:])  # (L, W), (L, m)
            heads = channels.unflatten(1, (-1, HEAD_WIDTH)).sum(dim=2)  # (L, W) -> (L, h)
            total = Importance(*(now.abs() + before for now, before in zip((heads, neurons), total or (0, 0))))
    model.train(was_training)
    assert total is not None, "no batches"
    return total


@torch.no_grad()
def permute(block: Block, heads: Tensor, neurons: Tensor) -> None:
    """Bring heads (h,) and neurons (m,) of a block into another order."""
    attn, mlp = block.attn, block.mlp
    channels = (heads[:, None] * HEAD_WIDTH + torch.arange(HEAD_WIDTH, device=heads.device)).flatten()  # (h,) -> (W,)
    rows = torch.cat([channels + part * len(channels) for part in range(3)])  # (W,) -> (3W,): queries, keys, values
    for parameter, order in (
        (attn.qkv.weight, rows),
        (attn.qkv.bias, rows),
        (mlp.fc1.weight, neurons),
        (mlp.fc1.bias, neurons),
    ):
        parameter.copy_(parameter[order])
    attn.proj.weight.copy_(attn.proj.weight[:, channels])
    mlp.fc2.weight.copy_(mlp.fc2.weight[:, neurons])


def _part(share: float, count: int) -> int:
    """A share of heads or neurons, rounded up; the inner rounding removes errors of floating point (0.1 * 30)."""
    return math.ceil(round(share * count, 6))
