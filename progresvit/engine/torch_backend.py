"""The torch backend: folded modules on any device, or fused kernels in CUDA graphs on a GPU.

Letters: B images, C channels, R side of the images, N tokens, d channels of tokens, s a round from 0.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from progresvit.data.transforms import mean_and_std
from progresvit.engine.buffers import RoundBuffer, RunningRound, padded_size, power_sizes
from progresvit.engine.fold import FoldedRound, fold
from progresvit.model import ProgResViT
from progresvit.model.precision import PRECISIONS, autocast
from progresvit.routing import Policy
from progresvit.routing.decide import Answers

if TYPE_CHECKING:
    from progresvit.engine.fused import FusedRound


@dataclass(frozen=True)
class Upload:
    """Images that are being copied to the device."""

    pixels: Tensor
    event: torch.cuda.Event | None = None


@dataclass
class TorchRunningRound:
    """A running round whose answers are being copied to the host."""

    packed: Tensor
    """The answers, (5 + 2k, B), on the host; complete after the event."""
    tokens: Tensor | None
    event: torch.cuda.Event | None = None

    def finished(self) -> bool:
        return self.event is None or self.event.query()

    def answers(self) -> Answers:
        if self.event is not None:
            self.event.synchronize()
        packed = self.packed.numpy()
        (exits, entropy, abstains, unknown, score), top = packed[:5], packed[5:].T
        classes, probabilities = top[:, : top.shape[1] // 2], top[:, top.shape[1] // 2 :]  # (B, 2k) -> (B, k) twice
        return Answers(
            exits=exits > 0,
            classes=classes.astype(np.int64),
            probabilities=probabilities,
            entropy=entropy,
            abstains=abstains > 0,
            out_of_distribution=unknown > 0,
            ood_score=score,
        )


class TorchBackend:
    """A folded model; decisions are made on its device."""

    identity = "TorchRounds"  # the name that runs of all versions have
    sizes: tuple[int, ...] | None = None
    out_of_memory: tuple[type[Exception], ...] = (torch.OutOfMemoryError,)

    def __init__(
        self,
        model: ProgResViT,
        policy: Policy,
        temperatures: Sequence[float],
        *,
        device: torch.device,
        precision: str,
        top_k: int = 1,
    ) -> None:
        self.config, self.policy, self.temperatures = model.config, policy, tuple(temperatures)
        self.device, self.precision, self.top_k = device, precision, top_k
        self.token_dtype = torch.float32
        self._mean, self._std = mean_and_std(self.config, device)
        self._autocast = nullcontext() if precision == "fp8" else autocast(device, precision)  # fp8: fused kernels only
        self.folded: list[FoldedRound] = list(fold(model).to(device))  # type: ignore[arg-type]
        if device.type == "cuda":
            self._index = torch.cuda.current_device() if device.index is None else device.index
            self._upload = torch.cuda.Stream(device)
            self._compute = torch.cuda.default_stream(device)  # one stream for all threads that compute

    def make_buffers(self, s: int, capacity: int, side: int) -> list[RoundBuffer]:
        pixels = torch.zeros(capacity, self.config.in_channels, side, side, dtype=torch.uint8, device=self.device)
        if s == 0:
            return [RoundBuffer(pixels, None)]
        shape = self.folded[s - 1].position.shape  # (1, N, d)
        return [RoundBuffer(pixels, torch.zeros(capacity, *shape[1:], device=self.device, dtype=self.token_dtype))]

    def send(self, pixels: Tensor | NDArray[np.uint8]) -> Upload:
        if not isinstance(pixels, Tensor):
            pixels = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))
        if self.device.type != "cuda" or not len(pixels):
            return Upload(pixels)
        if pixels.is_cuda:
            now = torch.cuda.current_stream(pixels.device.index)
            return Upload(pixels, None if now == self._compute else now.record_event())
        try:
            with torch.cuda.stream(self._upload):  # concurrent with computation
                sent = pixels.pin_memory().to(self.device, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
        except self.out_of_memory:
            return Upload(pixels)  # it is copied from the host when it is loaded
        return Upload(sent, event)

    def receive(self, sent: Upload) -> Tensor:
        if sent.event is not None:
            now = torch.cuda.current_stream(self._index)
            now.wait_event(sent.event)
            if sent.pixels.device == now.device:
                sent.pixels.record_stream(now)
        return sent.pixels

    def load(self, buffer: RoundBuffer, pixels: Tensor) -> None:
        buffer.pixels[buffer.fill : buffer.fill + len(pixels)].copy_(pixels)

    @torch.inference_mode()
    def run(self, s: int, buffer: RoundBuffer, first: int, count: int) -> RunningRound:
        places = slice(first, first + count)
        tokens = None if buffer.tokens is None else buffer.tokens[places]
        with self._autocast:
            output = self.folded[s]((buffer.pixels[places].float() / 255 - self._mean) / self._std, tokens)
        packed = self.pack_answers(s, output.logits)
        is_last = s == len(self.folded) - 1
        tokens = None if is_last else output.tokens.float()  # autocast gives half precision
        return TorchRunningRound(packed.cpu(), tokens)

    @torch.inference_mode()
    def move(
        self, source: RoundBuffer, first: int, running: RunningRound, rows: NDArray[np.int64], target: RoundBuffer
    ) -> None:
        places = slice(target.fill, target.fill + len(rows))
        assert target.tokens is not None
        if rows[-1] - rows[0] + 1 == len(rows):  # neighbours, as a single image: no indices need to be sent
            start, stop = int(rows[0]), int(rows[-1]) + 1
            target.pixels[places].copy_(source.pixels[first + start : first + stop])
            target.tokens[places].copy_(running.tokens[start:stop])
            return
        where = self._places(rows)
        torch.index_select(source.pixels[first:], 0, where, out=target.pixels[places])
        torch.index_select(running.tokens, 0, where, out=target.tokens[places])

    @torch.inference_mode()
    def keep(self, buffer: RoundBuffer, rows: NDArray[np.int64]) -> None:
        where = self._places(rows)
        for held in (buffer.pixels, buffer.tokens):
            if held is not None:
                held[: len(rows)].copy_(held.index_select(0, where))  # by a copy, since places may overlap

    def driving(self) -> AbstractContextManager[Any]:
        if self.device.type != "cuda" or torch.cuda.current_stream(self._index) == self._compute:
            return nullcontext()
        return torch.cuda.stream(self._compute)

    def shrink(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def pack_answers(self, s: int, logits: Tensor) -> Tensor:
        """Everything that the host needs, in one tensor: (B, K) -> (5 + 2k, B).

        The classes are the ``top_k`` most probable ones; -1, with probability NaN, where logits are not finite.
        """
        decision = self.policy.decide(s, logits)
        flags = (decision.exits, decision.entropy, decision.abstains, decision.out_of_distribution, decision.ood_score)
        scaled = logits.float() / self.temperatures[s]
        every = scaled.softmax(dim=-1)
        # max is cheaper than topk, and on a CPU it takes the first of equal values
        top = every.max(dim=-1, keepdim=True) if self.top_k == 1 else every.topk(self.top_k, dim=-1)  # (B, k) twice
        finite = scaled.isfinite().all(dim=-1)
        classes, probabilities = top.indices.mT.where(finite, -1), top.values.mT.where(finite, torch.nan)  # (k, B)
        return torch.stack([*flags, *classes, *probabilities])

    def _places(self, rows: NDArray[np.int64]) -> Tensor:
        where = torch.from_numpy(rows)
        return where.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else where


class FusedBackend(TorchBackend):
    """Fused kernels on a GPU: a CUDA graph for each round, buffer and batch size, captured on first use."""

    identity = "FusedRounds"

    def __init__(self, *args: Any, largest: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._check_fp8()
        self.token_dtype = torch.bfloat16 if self.precision == "fp8" else PRECISIONS[self.precision] or torch.float32
        for folded in self.folded:
            folded.cpu()  # on the GPU, only the fused rounds keep the constants
        self.sizes = power_sizes(largest)
        self._fused: dict[tuple[int, int], FusedRound] = {}
        self._graphs: dict[int, dict[tuple[RoundBuffer, int], _Captured]] = {}

    def make_buffers(self, s: int, capacity: int, side: int) -> list[RoundBuffer]:
        """Two, so that the GPU runs on one while the host reads which images of the other continue.

        In the last round none continues, so one is enough. New buffers replace the old ones and their graphs.
        """
        torch.cuda.synchronize(self.device)
        self._graphs.pop(s, None)
        self._fused = {key: fused for key, fused in self._fused.items() if key[0] != s or key[1] == side}
        buffers = super().make_buffers(s, capacity, side)
        if s < len(self.folded) - 1:
            buffers += super().make_buffers(s, capacity, side)
        return buffers

    @torch.inference_mode()
    def run(self, s: int, buffer: RoundBuffer, first: int, count: int) -> RunningRound:
        assert self.sizes is not None
        size = padded_size(count, self.sizes)
        if first:  # graphs read the first places
            for held in (buffer.pixels, buffer.tokens):
                if held is not None:
                    held[:count].copy_(held[first : first + count].clone())
        with torch.cuda.device(self._index):
            captured = self._captured(s, buffer, size)
            captured.graph.replay()
            packed = torch.empty(captured.packed.shape, pin_memory=True)
            packed.copy_(captured.packed, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._compute)
        return TorchRunningRound(packed[:, :count], captured.tokens, event)

    def move(
        self, source: RoundBuffer, first: int, running: RunningRound, rows: NDArray[np.int64], target: RoundBuffer
    ) -> None:
        super().move(source, 0, running, rows, target)  # run moved them to the first places

    def pack_answers(self, s: int, logits: Tensor) -> Tensor:
        """Pack the answers in one kernel, if that kernel covers the policy, as it does for most."""
        from progresvit.engine.decision_kernel import can_decide, pack_decisions

        if not can_decide(self.policy, logits.shape[-1], self.top_k):
            return super().pack_answers(s, logits)
        return pack_decisions(self.policy, s, logits, temperature=self.temperatures[s], top_k=self.top_k)

    def shrink(self) -> None:
        torch.cuda.synchronize(self.device)  # a graph may be running
        self._graphs.clear()
        super().shrink()

    def _captured(self, s: int, buffer: RoundBuffer, size: int) -> _Captured:
        graphs = self._graphs.setdefault(s, {})
        if (buffer, size) not in graphs:
            fused = self._fused_round(s, buffer.pixels.shape[-1])
            inputs = (buffer.pixels[:size], None if buffer.tokens is None else buffer.tokens[:size])

            def compute() -> tuple[Tensor, Tensor]:
                output = fused(*inputs)
                return self.pack_answers(s, output.logits), output.tokens

            # one memory pool for a buffer: its tokens are read while the round runs on another, or the next round
            others = (captured.graph for (other, _), captured in graphs.items() if other is buffer)
            first = next(others, None)
            graphs[buffer, size] = _capture(compute, None if first is None else first.pool())
        return graphs[buffer, size]

    def _fused_round(self, s: int, side: int) -> FusedRound:
        from progresvit.engine.fused import FusedRound

        if (s, side) not in self._fused:
            folded = copy.deepcopy(self.folded[s]).to(self.device)
            self._fused[s, side] = FusedRound(
                folded, self.config, side=side, dtype=self.token_dtype, fp8=self.precision == "fp8"
            )
        return self._fused[s, side]

    def _check_fp8(self) -> None:
        from progresvit.engine.fused import FP8_WIDTH

        widths = [round_.width for round_ in self.config.rounds]
        if self.precision == "fp8" and max(widths) < FP8_WIDTH:
            raise ValueError(
                f"fp8 needs {FP8_WIDTH} channels or more, and the rounds of this model have "
                f"{' and '.join(map(str, widths))}; use bf16."
            )


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    packed: Tensor
    tokens: Tensor


def _capture(compute: Any, pool: Any) -> _Captured:
    """Run once to build the kernels, then record the graph."""
    aside = _warm_up_stream(torch.cuda.current_device())
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        compute()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the recording allocates its own memory
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # another thread may be uploading
        packed, tokens = compute()
    return _Captured(graph, packed, tokens)


@cache
def _warm_up_stream(device: int) -> torch.cuda.Stream:
    """One for all graphs of a device: cuBLAS keeps a workspace for every stream on which it has run."""
    return torch.cuda.Stream(device)
