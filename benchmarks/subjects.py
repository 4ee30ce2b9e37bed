"""What the inference benchmark measures: the engine, one of its rounds, and what they are compared with.

Each is made of a case and has ``inputs``, ``images``, ``build``, ``run``, ``one`` and ``facts``; see
``progresvit.engine.measurement``. Letters: B images, C channels, R side of the images, s a round from 0.
"""

from __future__ import annotations

import progresvit._torchvision  # noqa: F401  (ahead of timm)

# isort: split
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from progresvit import Engine, ModelConfig, compute, plain_vit
from progresvit.config import MLP_RATIO, preset
from progresvit.data.transforms import normalise
from progresvit.engine.fold import fold
from progresvit.engine.speed import TimedModel, find_model, load_images
from progresvit.model import ProgResViT
from progresvit.model.precision import PRECISIONS

if TYPE_CHECKING:
    from measure import Case

DEIT_BATCHES = 2
MIX = 32
"""Batches over which the share of compiled rounds is kept."""


class RoutedCase(TimedModel):
    """The engine, or the model round by round as the authors' release runs it; also a plain ViT in the engine."""

    def __init__(self, case: Case) -> None:
        engine = {} if case.subject == "eager" else {"backend": case.backend, "threads": case.threads}
        super().__init__(
            case.model if case.subject != "plain" else plain_model(case),
            eager=case.subject == "eager",
            device=case.device,
            precision=case.precision,
            batch=case.batch,
            continuing=case.continuing or 0.0,
            count=case.images,
            **engine,
        )

    def facts(self) -> dict[str, Any]:
        """Exits, and GMACs per image as executed."""
        shares = self.exit_shares()
        gmacs = compute.average_gmacs(self.config, shares, "executed")
        short = not self.eager and self.runner.batch < self.batch
        return {
            "exit_shares": shares,
            "share_continuing": 1 - shares[0] if len(shares) > 1 else None,
            "gmacs": gmacs if self.eager else gmacs - shares[-1] * unread_gmacs(self.config),
            "threshold": list(self.thresholds),
            "note": f"memory running out; {self.runner.batch} images at a time" if short else None,
        }


class RoundAlone:
    """One of the engine's rounds on full batches, with the decision."""

    def __init__(self, case: Case) -> None:
        assert case.round is not None
        self.case, self.s, self.model = case, case.round - 1, find_model(case.model)
        self.inputs = one_batch(case, self.model.config)
        self.images = len(self.inputs)

    def build(self) -> None:
        """Fill the buffers as the engine does when every image continues until this round."""
        case, batch = self.case, self.images
        limits = [0.0] * (len(self.model.config.rounds) - 1)
        engine = Engine(self.model, limits, device=case.device, precision=case.precision, batch=batch)
        self.rounds, side = engine.rounds, self.inputs.shape[-1]
        self.buffer = self.rounds.make_buffers(0, batch, side)[0]
        self.rounds.load(self.buffer, self.rounds.receive(self.rounds.send(self.inputs)))
        for s in range(self.s):
            running = self.rounds.run(s, self.buffer, 0, batch)
            running.answers()
            following = self.rounds.make_buffers(s + 1, batch, side)[0]
            self.rounds.move(self.buffer, 0, running, np.arange(batch), following)
            self.buffer = following

    def run(self, passes: int) -> None:
        for _ in range(passes):
            self.rounds.run(self.s, self.buffer, 0, self.images)

    def one(self, number: int) -> None:
        self.rounds.run(self.s, self.buffer, 0, self.images).answers()

    def facts(self) -> dict[str, Any]:
        return {"gmacs": folded_gmacs(self.model.config)[self.s]}


class CompiledRounds:
    """The folded rounds under torch.compile on full batches: the speed of compiling if moving images were free."""

    def __init__(self, case: Case) -> None:
        assert case.continuing is not None
        self.case, self.model = case, find_model(case.model)
        self.config = self.model.config
        self.turns = [round(MIX * case.continuing**s) for s in range(len(self.config.rounds))]
        self.inputs = one_batch(case, self.config)
        self.images = MIX * len(self.inputs)

    @torch.inference_mode()
    def build(self) -> None:
        dtype = PRECISIONS[self.case.precision] or torch.float32
        self.rounds: list[tuple[Callable[..., Any], Tensor | None]] = []
        tokens = None
        for folded in fold(self.model).to(self.case.device, dtype):

            def work(pixels: Tensor, tokens: Tensor | None, folded: Any = folded) -> Any:
                return folded(normalise(pixels, self.config).to(dtype), tokens)

            self.rounds.append((torch.compile(work, fullgraph=True, dynamic=False), tokens))
            tokens = work(self.inputs, tokens).tokens.clone()

    @torch.inference_mode()
    def run(self, passes: int) -> None:
        for _ in range(passes):
            for turns, (work, tokens) in zip(self.turns, self.rounds):
                for _ in range(turns):
                    work(self.inputs, tokens)

    def facts(self) -> dict[str, Any]:
        gmacs = sum(turns * gmacs for turns, gmacs in zip(self.turns, folded_gmacs(self.config))) / MIX
        return {"gmacs": gmacs, "share_continuing": self.turns[1] / MIX, "note": "moving images not included"}


class PlainViT:
    """timm's DeiT with random weights on normalised images; compiled on a GPU."""

    def __init__(self, case: Case) -> None:
        self.case, self.images = case, case.batch
        self.dtype = PRECISIONS[case.precision] or torch.float32
        shape = (DEIT_BATCHES, case.batch, 3, case.resolution, case.resolution)
        self.inputs = torch.randn(shape, dtype=self.dtype, device=case.device)
        self.turn = 0

    def build(self) -> None:
        import timm

        model = timm.create_model(self.case.model, img_size=self.case.resolution).eval()
        self.heads = model.blocks[0].attn.num_heads
        self.model = model.to(self.case.device, self.dtype)
        if self.case.on_gpu:
            # the engine replays CUDA graphs; for latency DeiT gets one too
            mode = "reduce-overhead" if self.case.measure == "latency" else "default"
            self.model = torch.compile(self.model, fullgraph=True, dynamic=False, mode=mode)

    @torch.inference_mode()
    def run(self, passes: int) -> None:
        for _ in range(passes):
            self.turn = (self.turn + 1) % DEIT_BATCHES
            self.model(self.inputs[self.turn])

    @torch.inference_mode()
    def one(self, number: int) -> None:
        self.model(self.inputs[number % DEIT_BATCHES]).argmax(dim=-1).tolist()

    def facts(self) -> dict[str, Any]:
        return {"gmacs": deit_gmacs(self.case.resolution, self.heads)}


SUBJECTS: dict[str, Callable[[Case], Any]] = {
    "engine": RoutedCase,
    "plain": RoutedCase,
    "eager": RoutedCase,
    "round": RoundAlone,
    "compiled": CompiledRounds,
    "deit": PlainViT,
}


def plain_model(case: Case) -> ProgResViT:
    """A plain ViT of the size of the case's model, as a model of one round; random weights."""
    assert case.resolution is not None
    torch.manual_seed(0)
    return ProgResViT(plain_vit(resolution=case.resolution, heads=preset(case.model).heads, num_classes=1000)).eval()


def one_batch(case: Case, config: ModelConfig) -> Tensor:
    """Random bytes (B, C, R, R)."""
    return load_images(None, config, device=case.device, batch=case.batch, count=case.batch)


def folded_gmacs(config: ModelConfig) -> list[float]:
    """GMACs of each round as the engine runs it."""
    each = [macs.total / 1e9 for macs in compute.round_macs(config, "executed")]
    return [*each[:-1], each[-1] - unread_gmacs(config)]


def unread_gmacs(config: ModelConfig) -> float:
    """What folding omits: in the last block of the last round, all of the patches except their keys and values."""
    last = config.rounds[-1]
    patches, d = config.grid(last) ** 2, last.width
    layers = (2 + 2 * MLP_RATIO) * d * d  # query, projection, MLP
    attention = 2 * (patches + 1) * d
    return patches * (layers + attention) / 1e9


def deit_gmacs(resolution: int, heads: int) -> float:
    """GMACs per image of a plain ViT."""
    return compute.cumulative_gmacs(plain_vit(resolution=resolution, heads=heads), "executed")[-1]
