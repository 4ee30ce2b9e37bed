"""Hooks on the blocks of a backbone: their inputs and outputs, and another output.

Letters: B images, N tokens (the class token and the patches), M tokens that are left after merging, d channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    """A call of a block."""

    block: Block
    x: Tensor
    options: dict[str, Any]
    output: Any

    @property
    def tokens(self) -> Tensor:
        """The tokens that the block returns, (B, N, d); merged ones are unmerged."""
        return unmerge(*self.output) if isinstance(self.output, tuple) else self.output


@contextmanager
def recorded_calls(blocks: nn.ModuleList) -> Iterator[list[BlockCall]]:
    """Yields a list to which every call of a block is appended."""
    calls: list[BlockCall] = []

    def record(block: Any, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        calls.append(BlockCall(block, args[0], options, output))

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(record, with_kwargs=True))
        yield calls


@contextmanager
def replaced_output(block: nn.Module, replace: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Other tokens in place of the tokens that a block returns: (B, M, d) -> (B, M, d)."""

    def change(block: Any, args: tuple[Any, ...], output: Any) -> Any:
        return (replace(output[0]), *output[1:]) if isinstance(output, tuple) else replace(output)

    with block.register_forward_hook(change):
        yield
