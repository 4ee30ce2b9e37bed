"""Input images: files, bytes, PIL images or arrays. A bad image does not affect the others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import numpy as np
from PIL.Image import Image, fromarray

from progresvit.config import ModelConfig
from progresvit.data.crop import EvaluationCrop
from progresvit.data.dataset import Entry
from progresvit.data.decode import ImageError, decode
from progresvit.data.decoding_process import IS_SUPPORTED
from progresvit.data.prepare import NO_FILE as NO_FILE
from progresvit.data.prepare import ON_THE_WEB as ON_THE_WEB
from progresvit.data.prepare import Plan, Prepared, Request, UnreadImage, prepare, read_request
from progresvit.data.worker_pool import SLOT, WorkerPool

if TYPE_CHECKING:
    import torch

    from progresvit.data.gpu_decode import GpuDecoder

T = TypeVar("T")
PathLike = str | os.PathLike[str]
Images = Any
"""A list of paths, contents of files, file objects, PIL images and arrays (H, W, 3), or an array (B, H, W, 3); or
squares, a uint8 array or tensor (B, C, R, R)."""
ImageInput = Image | Request
OneImage = PathLike | Image
"""One image by itself; an array or bytes could also be several, so they come in a list."""

FEW_WORKERS = 4
"""Up to this number threads decode as fast as processes; more of them wait for the interpreter lock."""
GROUP = 128
"""Images that processes hand over at a time. An H200 decodes and crops 8,700 images/s by 16 at a time, 12,200 by 64 and
15,100 by 128."""
FEW_IMAGES = 128
"""The first images of a stream are decoded by threads: starting processes takes longer."""


@dataclass(frozen=True)
class OpenedImages:
    """The images that could be opened, in order, and why the others could not."""

    pixels: Any
    """Bytes, (B, C, R, R)."""
    errors: dict[int, str] = field(default_factory=dict)
    """Reasons by position among all images."""


class ImageOpener:
    """Opens images for a model on a device. Files and PIL images get the evaluation crop; arrays are used as they are.

    Args:
        config: The config of the model.
        device: Where the images are needed; None for a backend without devices.
        decode: Where JPEGs are decoded: auto, gpu or cpu.
        workers: Threads or processes that decode; by default one for each core.
        max_pixels: The most pixels of a file that are decoded; by default Pillow's limit.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | None = None,
        decode: str = "auto",
        workers: int | None = None,
        max_pixels: int | None = None,
    ) -> None:
        self.config, self.device, self.side = config, device, config.input_side
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.workers = workers or cores or 1
        self._room = max(SLOT, config.in_channels * self.side**2)  # of an image, as in processes
        if device is not None:
            from progresvit.data.gpu_decode import plan_for

            self.plan = replace(plan_for(config, device, decode), max_pixels=max_pixels)
        elif decode in ("auto", "cpu"):
            self.plan = Plan(crop=EvaluationCrop.of(config), max_pixels=max_pixels)
        else:
            raise ValueError(f"decode is auto or cpu for this backend, not {decode!r}.")

    def open(self, images: Images, pool: Executor | None = None) -> OpenedImages:
        """Open a batch; the threads of the pool decode."""
        if hasattr(images, "dtype") and not is_channels_last(images, self.config):
            return OpenedImages(_checked(images, self.config))
        return self.finish(self.prepare(images, pool), pool)

    def prepare(self, images: Sequence[ImageInput | Prepared], pool: Executor | None = None) -> list[Prepared]:
        """The steps for each image alone: decoding and cropping, unless the GPU does them or they are done."""
        if self.config.in_channels not in (1, 3):
            raise ValueError(
                f"image files have 1 or 3 channels and this model takes {self.config.in_channels}; give it arrays."
            )
        images = [image if isinstance(image, Prepared) else as_input(image) for image in images]
        prepare_one = partial(prepare, plan=self.plan, room=self._room)
        return list(map(prepare_one, images) if pool is None else pool.map(prepare_one, images))

    def open_all(
        self, batches: Iterable[Images], pool: Executor | None = None, *, processes: bool = True
    ) -> Iterator[OpenedImages]:
        """Open a stream of batches; what it gives may be divided differently.

        The first files are decoded by the threads of the pool, the others by processes if there are many workers.
        Processes take further batches before they give results, so a source that waits for answers must not use them.
        """
        opened = 0
        can_start = processes and self.workers > FEW_WORKERS and IS_SUPPORTED
        for are_files, group in groupby(batches, key=_are_files):
            run = iter(group)
            for images in run:
                opened += len(images)
                yield self.open(images, pool)
                if not (can_start and are_files and opened >= FEW_IMAGES):
                    continue
                with WorkerPool(self.plan, self.workers, group=GROUP) as worker_pool:
                    for prepared in worker_pool.prepared(map(_as_requests, run)):
                        yield self.finish(prepared, pool)

    def finish(self, images: Sequence[Prepared], pool: Executor | None = None) -> OpenedImages:
        """The remaining steps, for many images together."""
        if self.plan.pixels and images:
            on_device = self._decoder.crop(images, pool, at_a_time=GROUP)
            return OpenedImages(on_device.pixels, on_device.errors)
        errors = {position: image.error for position, image in enumerate(images) if image.error is not None}
        good = [np.asarray(image.data).reshape(-1, self.side, self.side) for image in images if image.error is None]
        nothing = np.empty((0, self.config.in_channels, self.side, self.side), np.uint8)
        return OpenedImages(np.stack(good) if good else nothing, errors)

    @cached_property
    def _decoder(self) -> GpuDecoder:
        from progresvit.data.gpu_decode import GpuDecoder

        assert self.device is not None
        return GpuDecoder(self.plan, self.device)


def open_images(images: Images, config: ModelConfig, pool: Executor | None = None) -> OpenedImages:
    """Open a batch on the CPU: files and PIL images get the evaluation crop, arrays and tensors stay as they are."""
    return ImageOpener(config, workers=1).open(images, pool)


def _as_requests(images: Sequence[Request]) -> list[Request]:
    """Images that processes can receive; a path may be of a class that they do not know."""
    checked: list[Any] = [as_input(image) for image in images]
    return [os.fspath(image) if isinstance(image, os.PathLike) else image for image in checked]


def _are_files(images: Images) -> bool:
    """Whether processes can open these images."""
    return not hasattr(images, "dtype") and not any(
        isinstance(image, Image) or hasattr(image, "dtype") for image in images
    )


def is_one_image(images: object) -> TypeGuard[OneImage]:
    """Whether this is a path or a PIL image, which a call answers with one result instead of a list."""
    return isinstance(images, str | os.PathLike | Image)


def is_single(images: object) -> bool:
    """Whether this is one image instead of several; an array with three dimensions is one."""
    kinds = (str, os.PathLike, bytes, bytearray, memoryview, Image)
    return isinstance(images, kinds) or hasattr(images, "read") or getattr(images, "ndim", 4) in (2, 3)


def as_input(image: object) -> ImageInput:
    """The image as threads and processes take it: file objects are read and arrays copied. Refuses everything else.

    A PIL image that was opened lazily is decoded, since two threads must not decode the same one.
    """
    if isinstance(image, Image):
        with contextlib.suppress(Exception):  # reported when it is opened
            image.load()
        return image
    if isinstance(image, str | os.PathLike | bytes | Entry | UnreadImage):
        return image
    if isinstance(image, bytearray | memoryview):
        return bytes(image)
    if isinstance(image, np.ndarray) or hasattr(image, "dtype"):
        return _from_array(image)
    if not hasattr(image, "read"):
        raise ValueError(
            "an image is a path, the content of a file, a file object, an array (H, W, 3) or a PIL image, not "
            f"{type(image).__name__}."
        )
    try:
        content = image.read()
    except OSError as error:
        return UnreadImage(f"cannot be read ({error.strerror or error})")
    if not isinstance(content, bytes):
        raise ValueError('a file object gives bytes; open the file with mode "rb".')
    return content


def _from_array(image: Any) -> Image:
    """A PIL image with a copy of these pixels."""
    shape = tuple(image.shape)
    is_image = len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4))
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or not is_image or 0 in shape:
        kind = "a tensor" if not isinstance(image, np.ndarray) else "an array"
        raise ValueError(
            f"one image as an array is numpy uint8 of shape (H, W, 3) or (H, W), not {kind} of {image.dtype} "
            f"of shape {shape}{_conversion(image)}."
        )
    pixels = image[..., 0] if image.ndim == 3 and shape[2] == 1 else image  # (H, W, 1) -> (H, W)
    return fromarray(np.ascontiguousarray(pixels)).copy()  # PIL may share the memory


def _conversion(image: Any) -> str:
    """How a wrong array becomes an image, if that can be known."""
    if not isinstance(image, np.ndarray):
        return "; image.cpu().numpy() makes it an array"
    if np.issubdtype(image.dtype, np.floating):
        return "; (255 * image).round().astype('uint8') converts values from 0 to 1"
    if image.ndim == 3 and image.shape[0] in (1, 3, 4):
        return "; image.transpose(1, 2, 0) puts the channels last"
    return ""


def is_channels_last(images: Any, config: ModelConfig) -> bool:
    """Whether it is an array (B, H, W, 3) of images to be cropped, not (B, C, R, R) of squares."""
    return (
        isinstance(images, np.ndarray)
        and images.dtype == np.uint8
        and images.ndim == 4
        and images.shape[3] in (1, 3, 4)
        and (images.shape[1] != config.in_channels or images.shape[2] != images.shape[3])
    )


def open_image(image: ImageInput, prepare: Callable[[Image], T]) -> T | str:
    """The result of ``prepare`` for the upright RGB image, or why it cannot be opened."""
    try:
        return prepare(read_image(image))
    except ImageError as error:
        return str(error)
    except Exception as error:  # any problem concerns this image only
        return f"cannot be opened ({type(error).__name__}: {error})"


def read_image(image: ImageInput) -> Image:
    """The upright RGB image; an :class:`ImageError` says why it cannot be read."""
    return decode(image if isinstance(image, Image) else read_request(image))


def _checked(images: Any, config: ModelConfig) -> Any:
    least, channels = config.resolution, config.in_channels
    square = images.ndim == 4 and images.shape[1] == channels and images.shape[2] == images.shape[3] >= least
    if str(images.dtype).removeprefix("torch.") != "uint8" or not square:
        raise ValueError(
            f"a batch of images is uint8 of shape (B, {channels}, r, r), r at least {least}, not {images.dtype} "
            f"of shape {tuple(images.shape)}; for the crop, pass a numpy array (B, H, W, 3), paths or PIL images."
        )
    return images
