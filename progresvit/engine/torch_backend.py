"""The rounds under torch: plain folded modules on any device, or fused kernels in CUDA graphs on a GPU.

Letters: B images, C channels, R side of the images, N tokens, d channels of tokens, s a round from 0.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from progresvit.data.transforms import normalise
from progresvit.engine.buffers import Ran, Room, padded_size, power_sizes
from progresvit.engine.fold import FoldedRound, fold
from progresvit.model import ProgResViT
from progresvit.model.precision import PRECISIONS, autocast
from progresvit.routing import Policy
from progresvit.routing.decide import Answers

if TYPE_CHECKING:
    from progresvit.engine.fused import FusedRound


@dataclass(frozen=True)
class Sent:
    """Images on their way to the device."""

    pixels: Tensor
    event: torch.cuda.Event | None = None


@dataclass
class TorchRan:
    """Facts on their way to the host."""

    facts: Tensor
    """(3 + 2k, B) on the host, there once the event has happened."""
    tokens: Tensor | None
    event: torch.cuda.Event | None = None

    def finished(self) -> bool:
        return self.event is None or self.event.query()

    def answers(self) -> Answers:
        if self.event is not None:
            self.event.synchronize()
        (exits, entropy, abstains), named = self.facts[:3].numpy(), self.facts[3:].numpy()
        classes, probabilities = np.split(named.T, 2, axis=1)  # (2k, B) -> (B, k) twice
        return Answers(exits > 0, classes.astype(np.int64), probabilities, entropy, abstains > 0)


class TorchRounds:
    """A model folded, with the decisions made where the logits are."""

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
        self.folded: list[FoldedRound] = list(fold(model).to(device))  # type: ignore[arg-type]
        if device.type == "cuda":
            self._upload = torch.cuda.Stream(device)

    def make_room(self, s: int, capacity: int, side: int) -> Room:
        pixels = torch.zeros(capacity, self.config.in_channels, side, side, dtype=torch.uint8, device=self.device)
        return Room(pixels, self._tokens_before(s, capacity) if s else None)

    def send(self, pixels: Tensor | NDArray[np.uint8]) -> Sent:
        given = pixels if isinstance(pixels, Tensor) else torch.from_numpy(np.ascontiguousarray(pixels))
        if self.device.type != "cuda" or given.is_cuda or not len(given):
            return Sent(given)
        try:
            with torch.cuda.stream(self._upload):  # beside what is being computed
                sent = given.pin_memory().to(self.device, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
        except self.out_of_memory:
            return Sent(given)  # it is copied from the host when its turn comes
        return Sent(sent, event)

    def receive(self, sent: Sent) -> Tensor:
        if sent.event is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(sent.event)
            sent.pixels.record_stream(now)
        return sent.pixels

    def load(self, room: Room, pixels: Tensor) -> None:
        room.pixels[room.fill : room.fill + len(pixels)].copy_(pixels)

    @torch.inference_mode()
    def run(self, s: int, room: Room, first: int, count: int) -> Ran:
        places = slice(first, first + count)
        tokens = None if room.tokens is None else room.tokens[places]
        with autocast(self.device, self.precision):
            output = self.folded[s](normalise(room.pixels[places], self.config), tokens)
        facts = self.facts(s, output.logits)
        tokens = None if self._is_last(s) else output.tokens.float()  # under autocast some come out in half precision
        return TorchRan(facts.cpu(), tokens)

    @torch.inference_mode()
    def move(self, source: Room, first: int, ran: Ran, rows: NDArray[np.int64], target: Room) -> None:
        where = torch.from_numpy(rows)
        if self.device.type == "cuda":
            where = where.pin_memory().to(self.device, non_blocking=True)
        places = slice(target.fill, target.fill + len(rows))
        assert target.tokens is not None
        torch.index_select(source.pixels[first:], 0, where, out=target.pixels[places])
        torch.index_select(ran.tokens, 0, where, out=target.tokens[places])

    def shrink(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def facts(self, s: int, logits: Tensor) -> Tensor:
        """All that the host asks for, in one tensor: (B, K) -> (3 + 2k, B)."""
        decision = self.policy.decide(s, logits)
        classes, probabilities = _answers(logits.float() / self.temperatures[s], self.top_k)  # (k, B) twice
        return torch.stack([decision.exits, decision.entropy, decision.abstains, *classes, *probabilities])

    def _is_last(self, s: int) -> bool:
        return s == len(self.folded) - 1

    def _tokens_before(self, s: int, capacity: int) -> Tensor:
        position = self.folded[s - 1].position
        return torch.zeros(capacity, *position.shape[1:], device=self.device, dtype=self._token_dtype())

    def _token_dtype(self) -> torch.dtype:
        return torch.float32


class FusedRounds(TorchRounds):
    """The same on a GPU, fast: each round in each batch size is one CUDA graph, captured when it is first needed."""

    def __init__(self, *args: Any, largest: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._check_fp8()
        for one in self.folded:
            one.cpu()  # on the GPU their constants live in the fused rounds alone
        self.sizes = power_sizes(largest)
        self._fused: dict[tuple[int, int], FusedRound] = {}
        self._graphs: dict[tuple[int, int], _Captured] = {}
        self._pools = [torch.cuda.graph_pool_handle() for _ in self.folded]  # rounds must not share: tokens are read
        # while the next round runs

    def make_room(self, s: int, capacity: int, side: int) -> Room:
        """A new room takes the place of the old one, whose graphs are of no use any more."""
        torch.cuda.synchronize(self.device)
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] != s}
        self._fused = {key: fused for key, fused in self._fused.items() if key[0] != s or key[1] == side}
        self._pools[s] = torch.cuda.graph_pool_handle()
        return super().make_room(s, capacity, side)

    @torch.inference_mode()
    def run(self, s: int, room: Room, first: int, count: int) -> Ran:
        assert self.sizes is not None
        size = padded_size(count, self.sizes)
        if first:  # graphs look at the first places
            for held in (room.pixels, room.tokens):
                if held is not None:
                    held[:count].copy_(held[first : first + count].clone())
        with torch.cuda.device(self.device):
            captured = self._captured(s, room, size)
            captured.graph.replay()
            facts = torch.empty(captured.facts.shape, pin_memory=True)
            facts.copy_(captured.facts, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return TorchRan(facts[:, :count], captured.tokens, event)

    def move(self, source: Room, first: int, ran: Ran, rows: NDArray[np.int64], target: Room) -> None:
        super().move(source, 0, ran, rows, target)  # they were brought to the first places

    def shrink(self) -> None:
        torch.cuda.synchronize(self.device)  # a graph may be at work
        self._graphs.clear()
        self._pools = [torch.cuda.graph_pool_handle() for _ in self.folded]
        super().shrink()

    def _captured(self, s: int, room: Room, size: int) -> _Captured:
        key = (s, size)
        if key not in self._graphs:
            fused = self._fused_round(s, room.pixels.shape[-1])
            inputs = (room.pixels[:size], None if room.tokens is None else room.tokens[:size])

            def compute() -> tuple[Tensor, Tensor]:
                output = fused(*inputs)
                return self.facts(s, output.logits), output.tokens

            self._graphs[key] = _capture(compute, self._pools[s], room)
        assert self._graphs[key].room is room
        return self._graphs[key]

    def _fused_round(self, s: int, side: int) -> FusedRound:
        from progresvit.engine.fused import FusedRound

        if (s, side) not in self._fused:
            folded = copy.deepcopy(self.folded[s]).to(self.device)
            self._fused[s, side] = FusedRound(
                folded, self.config, side=side, dtype=self._token_dtype(), fp8=self.precision == "fp8"
            )
        return self._fused[s, side]

    def _check_fp8(self) -> None:
        from progresvit.engine.fused import FP8_WIDTH

        widths = [round_.width for round_ in self.config.rounds]
        if self.precision == "fp8" and max(widths) < FP8_WIDTH:
            raise ValueError(
                f"fp8 pays from {FP8_WIDTH} channels on, and the rounds of this model have "
                f"{' and '.join(map(str, widths))}; use bf16."
            )

    def _token_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "fp8" else PRECISIONS[self.precision] or torch.float32


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    facts: Tensor
    tokens: Tensor
    room: Room
    """Whose images it looks at."""


def _capture(compute: Any, pool: Any, room: Room) -> _Captured:
    """Run it once to build its kernels, then record it."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        compute()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the recording takes its memory anew
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # another thread may be uploading
        facts, tokens = compute()
    return _Captured(graph, facts, tokens, room)


def _answers(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The likeliest classes and their probabilities: (B, K) -> (k, B) twice; -1 and NaN where logits are not finite."""
    every = logits.softmax(dim=-1)
    # max is the cheaper one, and takes the first of equals on a CPU, which topk does not
    probabilities, classes = every.max(dim=-1, keepdim=True) if top_k == 1 else every.topk(top_k, dim=-1)
    finite = logits.isfinite().all(dim=-1)
    return classes.mT.where(finite, -1), probabilities.mT.where(finite, torch.nan)
