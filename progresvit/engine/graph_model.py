"""An export as a RoundModel, so that it is evaluated like the model that it was made from.

Letters: B images, C channels, r the side of the model's input, N tokens, d channels of a round, K classes, s a round
from 0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from progresvit import compute
from progresvit.config import ModelConfig
from progresvit.data.transforms import mean_and_std
from progresvit.engine.onnx_backend import GraphRounds
from progresvit.model.interface import RoundOutput


class GraphModel(nn.Module):
    """The graphs of an export, run in all rounds. It runs on the CPU and has no parameters.

    Args:
        graphs: The graphs.
    """

    def __init__(self, graphs: GraphRounds) -> None:
        super().__init__()
        self.graphs = graphs
        self.config: ModelConfig = graphs.manifest.config
        self.backend, self.precision, self.loaded_from = graphs.backend, graphs.precision, graphs.folder
        self.graphs_sha256 = graphs.manifest.graphs_sha256
        self.exported_weights_sha256 = graphs.manifest.weights_sha256
        """Weights of the model that was exported; see ``io.weights.weights_hash``."""

    def forward(self, images: Tensor) -> tuple[RoundOutput, ...]:
        """Every round, first to last, with no early exit: normalised images (B, C, r, r) -> outputs."""
        outputs: list[RoundOutput] = []
        for s in range(len(self.config.rounds)):
            outputs.append(self.run_round(s, images, outputs[-1].tokens if outputs else None))
        return tuple(outputs)

    def run_round(self, s: int, images: Tensor, previous: Tensor | None = None) -> RoundOutput:
        """Round s. The last round gives no tokens: they are of shape (B, 0, 0)."""
        tokens = None if previous is None else previous.numpy(force=True)
        logits, following = self.graphs.run(s, self._to_bytes(images).numpy(force=True), tokens)
        if following is None:
            return RoundOutput(torch.from_numpy(logits), torch.zeros(len(images), 0, 0))
        return RoundOutput(torch.from_numpy(logits), torch.from_numpy(following))

    def gmacs(self, convention: compute.Convention = "paper") -> list[float]:
        """GMACs spent on an image that exits after each round."""
        return compute.cumulative_gmacs(self.config, convention)

    def _to_bytes(self, images: Tensor) -> Tensor:
        """The exact bytes that ``data.transforms.normalise`` turned into these images: graphs take bytes."""
        mean, std = mean_and_std(self.config, images.device)
        return ((images.float() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
