"""The engine for segmentation: the class of every pixel of an image, with a model and a threshold.

An image is cut into windows (data/segmentation/windows.py). All of them run the first round. If the score of the image
is below the threshold, it exits; else all of them run the next one. Windows of many images share batches
(window_batcher.py), so an image costs only the rounds that it runs, in time as well.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from progresvit import compute
from progresvit.data.decode import ImageError
from progresvit.data.segmentation.images import EvaluationImage, evaluation_image, size_problem
from progresvit.data.segmentation.windows import WindowOptions, windows_hash
from progresvit.engine.backends import TorchSource, open_source
from progresvit.engine.fold import fold
from progresvit.engine.folded_engine import FoldedEngine
from progresvit.engine.images import ImageInput, OneImage, PathLike, as_input, is_one_image, is_single, open_image
from progresvit.engine.options import EngineOptions, TorchKeywords
from progresvit.engine.thresholds import ThresholdLike, check_setting, find_threshold
from progresvit.engine.window_batcher import WindowBatcher, WindowExit
from progresvit.model import RoundOutput
from progresvit.model.precision import autocast
from progresvit.routing.decide import as_thresholds
from progresvit.routing.settings import Setting

if TYPE_CHECKING:
    from progresvit.model import ProgResViT

DEFAULT_WINDOWS = WindowOptions()
"""Windows at one scale that overlap only at the border."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segmentation:
    """The answer of the round after which the image exited."""

    labels: NDArray[np.uint8] | None
    """The class of every pixel at the size of the upright image, (H, W); None if the image could not be opened."""
    exit_round: int
    """From 1; 0 if the image could not be opened."""
    score: float
    """Mean entropy of its most uncertain patches in that round, which was compared with the threshold."""
    gmacs: float
    """Compute spent on all windows, in the paper's convention."""
    windows: int
    """Number of windows."""
    error: str | None = None
    """Why the image could not be opened; then there is no answer."""

    @classmethod
    def failed(cls, error: str) -> Segmentation:
        """For an image that could not be opened."""
        return cls(labels=None, exit_round=0, score=math.nan, gmacs=0.0, windows=0, error=error)


class SegmentationEngine(FoldedEngine):
    """Segments images in rounds. The model is folded when the engine is made; later changes to it have no effect.

    Args:
        model: A segmentation model, or the folder or hub id of one.
        threshold: A number (0 runs every round), one for each round but the last, a ``Setting``, or the path or name of
            one (in the model folder, ``settings/NAME.json``). A setting for other weights is refused; one for other
            windows or another precision warns. By default the near-lossless setting of the model folder; without one
            every round runs, with a warning.
        windows: How images are divided into windows.
        options: How the engine runs, as :class:`EngineOptions`; ``batch`` is the most windows in a batch.
        keywords: The same by keyword: ``device``, ``precision``, ``batch``, ``workers``; see :class:`EngineOptions`.
    """

    def __init__(
        self,
        model: ProgResViT | PathLike,
        threshold: ThresholdLike | None = None,
        *,
        windows: WindowOptions = DEFAULT_WINDOWS,
        options: EngineOptions | None = None,
        **keywords: Unpack[TorchKeywords],
    ) -> None:
        options = EngineOptions.merge(options, keywords)
        options.check_only(("device", "precision", "batch", "workers"), "SegmentationEngine")
        source = open_source(model, task="segmentation")
        assert isinstance(source, TorchSource)  # exports classify
        config = source.config
        if config.in_channels != 3:
            raise ValueError(f"images have 3 channels and this model takes {config.in_channels}; train one for RGB.")
        self.windows = windows
        limit = find_threshold(threshold, source)
        self.setting = limit if isinstance(limit, Setting) else None
        """The setting of the threshold, if it was calibrated."""
        if isinstance(limit, Setting):
            own_sha256 = windows_hash(config, windows)
            check_setting(limit, source, precision=options.precision, preprocessing_sha256=own_sha256)
            limit = limit.threshold
        self.thresholds: tuple[float, ...] = tuple(as_thresholds([limit], len(config.rounds))[0].tolist())
        """One for each round but the last."""
        self.gmacs = compute.cumulative_gmacs(config)
        """GMACs of one window up to each round."""
        super().__init__(source, partial(fold, source.model), options, batches=(64, 16))

    def __repr__(self) -> str:
        thresholds = ", ".join(f"{threshold:.4g}" for threshold in self.thresholds)
        rule = "" if self.setting is None else f" ({'certified' if self.setting.is_certified else self.setting.rule})"
        return (
            f"<SegmentationEngine {self._source.name}: torch on {self.device}, {self.precision}, "
            f"threshold {thresholds or 'none'}{rule}>"
        )

    @overload
    def segment(self, images: OneImage) -> Segmentation: ...  # type: ignore[overload-overlap]  # a str is iterable

    @overload
    def segment(self, images: Iterable[ImageInput]) -> list[Segmentation]: ...

    def segment(self, images: Any) -> Segmentation | list[Segmentation]:
        """A segmentation of each image, in order; for one path or one PIL image its segmentation alone.

        Args:
            images: One path or PIL image, or several paths, contents of image files (bytes) or PIL images. They have
                any sizes. An image that cannot be opened, is smaller than a patch, or is too long and thin gives a
                result with the reason (``error``).
        """
        return self.segment([images])[0] if is_one_image(images) else list(self.stream(images))

    def stream(self, images: Iterable[ImageInput]) -> Iterator[Segmentation]:
        """Segmentations of a stream of images, one by one and in order; see :meth:`segment`.

        Images are taken from the stream when they are needed, a few ahead. Windows wait until a batch is full, so a
        result may come several images later than its image.
        """
        if is_single(images):
            raise ValueError("the engine takes several images; put this one into brackets: segment([image]).")
        batcher = WindowBatcher(self, self.thresholds)
        with ThreadPoolExecutor(self.workers) as pool:
            for opened in self._open_ahead(images, pool):
                batcher.feed(opened)
                yield from map(self._result, batcher.ready())
            batcher.flush()
            yield from map(self._result, batcher.ready())

    def run_round(self, s: int, windows: Tensor, tokens: Tensor | None) -> RoundOutput:
        """A round of normalised windows (V, C, r, r), with the tokens of the previous round (V, N, d)."""
        return RoundOutput(*self.run_batch(partial(self._run, s), windows, tokens, item="window"))

    def _run(self, s: int, windows: Tensor, tokens: Tensor | None) -> RoundOutput:
        with autocast(self.device, self.precision):
            logits, new = self._rounds[s](windows, tokens)
        return RoundOutput(logits, new.float())  # autocast gives half precision

    def _open_ahead(self, images: Iterable[ImageInput], pool: ThreadPoolExecutor) -> Iterator[EvaluationImage | str]:
        """Images in order; the threads decode the next ones."""
        coming: deque[Future[EvaluationImage | str]] = deque()
        for image in images:
            coming.append(pool.submit(open_image, as_input(image), self._prepare))
            if len(coming) > 2 * self.workers:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()

    def _prepare(self, image: Image.Image) -> EvaluationImage:
        problem = size_problem(image.height, image.width, self.config, self.windows)
        if problem is not None:
            raise ImageError(problem)
        return evaluation_image(image, None, self.config, self.windows, "the image")

    def _result(self, result: WindowExit | str) -> Segmentation:
        if isinstance(result, str):
            return Segmentation.failed(result)
        return Segmentation(
            labels=result.map.labels.numpy(),
            exit_round=result.s + 1,
            score=float(result.map.score),
            gmacs=self.gmacs[result.s] * result.windows,
            windows=result.windows,
        )
