"""Hooks on the blocks of a backbone: what they are called with, what they return, and another return value.

Letters: B images, N tokens (the class token and the patches), M tokens that are left after merging, d channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from progresvit.model.blocks import Block
from progresvit.model.interface import RoundModel
from progresvit.model.token_merging import unmerge


@contextmanager
def evaluation_mode(model: RoundModel | nn.Module) -> Iterator[None]:
    """Switch stochastic depth off inside the block; the mode is restored afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class BlockCall(NamedTuple):
    """What a block was called with."""

    block: Block
    x: Tensor
    options: dict[str, Any]


@contextmanager
def recorded_calls(blocks: nn.ModuleList) -> Iterator[list[BlockCall]]:
    """Yields a list to which every call of a block is appended."""
    calls: list[BlockCall] = []

    def record(block: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        calls.append(BlockCall(block, args[0], options))

    handles = [block.register_forward_pre_hook(record, with_kwargs=True) for block in blocks]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded_outputs(blocks: nn.ModuleList) -> Iterator[list[Tensor]]:
    """Yields a list to which the tokens that a block returns are appended, (B, N, d); merged ones are unmerged."""
    outputs: list[Tensor] = []

    def record(block: Any, args: tuple[Any, ...], output: Any) -> None:
        outputs.append(unmerge(*output) if isinstance(output, tuple) else output)

    handles = [block.register_forward_hook(record) for block in blocks]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replaced_output(block: nn.Module, replace: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Other tokens than those that a block returns: (B, M, d) -> (B, M, d)."""

    def change(block: Any, args: tuple[Any, ...], output: Any) -> Any:
        return (replace(output[0]), *output[1:]) if isinstance(output, tuple) else replace(output)

    handle = block.register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()
