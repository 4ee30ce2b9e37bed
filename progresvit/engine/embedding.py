"""The engine for features: a vector for each image, with a model and one of its rounds.

All images run the same rounds, so a batch stays together. A thread decodes the next batches meanwhile.

Letters: B images, C channels, R side of the images, N tokens, d channels of the round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from progresvit.data.prefetch import Prefetcher
from progresvit.data.transforms import normalise
from progresvit.engine.backends import TorchSource, open_source
from progresvit.engine.fold import fold_features
from progresvit.engine.folded_engine import FoldedEngine
from progresvit.engine.images import ImageOpener, Images, OneImage, OpenedImages, PathLike, is_one_image, is_single
from progresvit.engine.options import EngineOptions, TorchKeywords
from progresvit.io.parse import did_you_mean
from progresvit.model.precision import autocast

if TYPE_CHECKING:
    from progresvit.model import ProgResViT

Pool = Literal["class", "mean"]
POOLS: tuple[Pool, ...] = get_args(Pool)


@dataclass(frozen=True, kw_only=True, eq=False)
class Embedding:
    """The features of an image."""

    features: NDArray[np.float32] | None
    """(d,); None if the image could not be opened."""
    error: str | None = None
    """Why the image could not be opened; then there are no features."""


class EmbeddingEngine(FoldedEngine):
    """Computes features of images. The model is folded when the engine is made; later changes to it have no effect.

    Args:
        model: A model with or without a head, the folder or hub id of one, or the name of a bundled model. None for the
            bundled model ``imagenet-tiny``.
        round: The round whose features are returned, from 1; by default the last. The rounds before it run as well.
        pool: class for the class token, mean for the mean of the patch tokens; both after the final norm.
        options: How the engine runs, as :class:`EngineOptions`.
        keywords: The same by keyword: ``device``, ``precision``, ``batch``, ``workers``; see :class:`EngineOptions`.
    """

    def __init__(
        self,
        model: ProgResViT | PathLike | None = None,
        *,
        round: int | None = None,
        pool: Pool = "class",
        options: EngineOptions | None = None,
        **keywords: Unpack[TorchKeywords],
    ) -> None:
        options = EngineOptions.merge(options, keywords)
        options.check_only(("device", "precision", "batch", "workers"), "EmbeddingEngine")
        if pool not in POOLS:
            raise ValueError(f"unknown pool {pool!r}; {did_you_mean(pool, POOLS)}")
        source = open_source(model, task=None)
        if not isinstance(source, TorchSource):
            raise ValueError(
                f"{source.folder} is an export, which gives answers and no features; give the model's folder."
            )
        last = len(source.config.rounds)
        if round is not None and not 1 <= round <= last:
            raise ValueError(f"there is no round {round}; the rounds of this model are 1 to {last}.")
        self.round, self.pool = round or last, pool
        self.width = source.config.rounds[self.round - 1].width
        """Number of features of an image, d."""
        fold = partial(fold_features, source.model, self.round, patches=pool == "mean")
        super().__init__(source, fold, options, batches=(512, 64))

    def __repr__(self) -> str:
        return (
            f"<EmbeddingEngine {self._source.name}: torch on {self.device}, {self.precision}, round {self.round}, "
            f"pool {self.pool}>"
        )

    @overload
    def embed(self, images: OneImage) -> Embedding: ...

    @overload
    def embed(self, images: Images) -> list[Embedding]: ...

    def embed(self, images: Images) -> Embedding | list[Embedding]:
        """The features of each image, in order; for one path or one PIL image its features alone.

        Args:
            images: One path or PIL image, or a list of paths, contents of image files (bytes) or PIL images, which get
                the evaluation crop; or a uint8 array or tensor (B, C, r, r) of square images, which are used as they
                are, r at least the resolution of the last round. An image that cannot be opened gives a result with the
                reason (``error``).
        """
        if is_one_image(images):
            return self.embed([images])[0]
        if is_single(images):
            raise ValueError("embed takes a list of images; put this one into brackets: embed([image]).")
        images = images if hasattr(images, "__len__") else list(images)
        size = self.batch  # self.batch may shrink meanwhile
        return list(self.stream(images[first : first + size] for first in range(0, len(images), size)))

    def stream(self, batches: Iterable[Images], *, ahead: int = 2) -> Iterator[Embedding]:
        """Features for a stream of batches, image by image and in order.

        Args:
            batches: Each as ``embed`` takes it. A batch larger than the largest batch runs
                in pieces. A thread iterates over them; do not use the iterator meanwhile.
            ahead: Number of batches that are read and decoded ahead.
        """
        opener = ImageOpener(self.config, workers=self.workers)
        with ThreadPoolExecutor(self.workers) as threads:

            def prepare(images: Images) -> OpenedImages:
                if is_single(images):
                    raise ValueError("stream takes batches, which are lists of images; use embed for one list.")
                return opener.open(images, threads)

            with Prefetcher(map(prepare, batches), ahead) as coming:
                for opened in coming:
                    yield from self._embeddings(opened)

    def identity(self) -> dict[str, Any]:
        """Everything that determines its features, in plain data."""
        return {
            "weights": self._source.weights_sha256,
            "config": self.config.to_dict(),
            "preprocessing": self._source.preprocessing_sha256,
            "round": self.round,
            "pool": self.pool,
            "precision": self.precision,
        }

    def _embeddings(self, opened: OpenedImages) -> Iterator[Embedding]:
        """An embedding for each image of a batch, in order."""
        pixels = opened.pixels
        if not isinstance(pixels, Tensor):
            pixels = torch.from_numpy(np.ascontiguousarray(pixels))
        features, done = np.empty((len(pixels), self.width), np.float32), 0
        while done < len(pixels):
            batch = pixels[done : done + self.batch]  # self.batch may shrink
            features[done : done + len(batch)] = self.run_batch(self._run, batch)[0].numpy()
            done += len(batch)
        good = iter(features)
        for position in range(len(features) + len(opened.errors)):
            error = opened.errors.get(position)
            yield Embedding(features=next(good) if error is None else None, error=error)

    @torch.inference_mode()
    def _run(self, pixels: Tensor) -> tuple[Tensor]:
        """(B, C, R, R) bytes -> (B, d) on the host"""
        images = normalise(pixels.to(self.device), self.config)
        tokens: Tensor | None = None
        for folded in self._rounds:
            with autocast(self.device, self.precision):
                tokens = folded(images, tokens).tokens.float()  # autocast gives half precision
        assert tokens is not None
        features = tokens[:, 0] if self.pool == "class" else tokens[:, 1:].mean(dim=1)  # (B, N, d) -> (B, d)
        return (features.cpu(),)
