"""Input images: files, bytes, PIL images or arrays. A bad image does not affect the others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from progresvit.config import ModelConfig
from progresvit.data.crop import crop
from progresvit.data.decode import ImageError, decode, upright_rgb

T = TypeVar("T")
PathLike = str | os.PathLike[str]
Images = Any
"""A list of paths, contents of files and PIL images, or a uint8 array or tensor (B, C, R, R)."""


ON_THE_WEB = "a web address; download it and give the file"
NO_FILE = "there is no such file"


@dataclass(frozen=True)
class UnreadImage:
    """Stands for an image whose file could not be read."""

    reason: str


ImageInput = Image | PathLike | bytes | UnreadImage


@dataclass(frozen=True)
class OpenedImages:
    """The images that could be opened, in order, and why the others could not."""

    pixels: Any
    """Bytes, (B, C, R, R)."""
    errors: dict[int, str] = field(default_factory=dict)
    """By position among all images."""

    @property
    def side(self) -> int:
        return int(self.pixels.shape[-1])


def open_images(images: Images, config: ModelConfig, pool: Executor | None = None) -> OpenedImages:
    """Files and PIL images get the evaluation crop; arrays and tensors are used as they are."""
    if hasattr(images, "dtype"):
        return OpenedImages(_checked(images, config))
    return _open_all(images, config, pool)


def _open_all(images: Sequence[ImageInput], config: ModelConfig, pool: Executor | None) -> OpenedImages:
    if config.in_channels not in (1, 3):
        raise ValueError(f"image files have 1 or 3 channels and this model takes {config.in_channels}; give it arrays.")
    for image in images:
        check_input(image)
    for image in {id(image): image for image in images}.values():
        load_early(image)

    def cropped(upright: Image) -> NDArray[np.uint8]:
        return crop(upright if config.in_channels == 3 else upright.convert("L"), config)

    def open_one(image: ImageInput) -> NDArray[np.uint8] | str:
        return open_image(image, cropped)

    results = list(map(open_one, images) if pool is None else pool.map(open_one, images))
    good = [result for result in results if not isinstance(result, str)]
    errors = {position: result for position, result in enumerate(results) if isinstance(result, str)}
    nothing = np.empty((0, config.in_channels, config.input_side, config.input_side), np.uint8)
    return OpenedImages(np.stack(good) if good else nothing, errors)


def check_input(image: object) -> None:
    """Refuse what is no image of any kind."""
    if not isinstance(image, Image | str | os.PathLike | bytes | UnreadImage):
        raise ValueError(f"an image is a path, the content of a file or a PIL image, not {type(image).__name__}.")


def load_early(image: ImageInput) -> None:
    """Decode a PIL image that was opened lazily, before threads share it: two must not decode the same one."""
    if isinstance(image, Image):
        with contextlib.suppress(Exception):  # reported by open_image
            image.load()


def open_image(image: ImageInput, prepare: Callable[[Image], T]) -> T | str:
    """What ``prepare`` makes of the upright RGB image, or why it cannot be opened."""
    try:
        return prepare(read_image(image))
    except ImageError as error:
        return str(error)
    except Exception as error:  # any problem concerns this image only
        return f"cannot be opened ({type(error).__name__}: {error})"


def read_image(image: ImageInput) -> Image:
    """The upright RGB image; an :class:`ImageError` says why it cannot be read."""
    if isinstance(image, UnreadImage):
        raise ImageError(image.reason)
    if isinstance(image, bytes):
        return decode(image)
    if isinstance(image, Image):
        try:
            return upright_rgb(image)
        except ImageError:
            raise
        except Exception as error:  # an image that was opened lazily is decoded only now
            raise ImageError(f"damaged or truncated ({error})") from error
    if os.fspath(image).startswith(("http://", "https://")):
        raise ImageError(ON_THE_WEB)
    path = Path(image)
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        raise ImageError(NO_FILE) from None
    except IsADirectoryError:
        raise ImageError("a folder, not an image") from None
    except OSError as error:
        raise ImageError(f"cannot be read ({error.strerror or error})") from error


def _checked(images: Any, config: ModelConfig) -> Any:
    least, channels = config.resolution, config.in_channels
    square = images.ndim == 4 and images.shape[1] == channels and images.shape[2] == images.shape[3] >= least
    if str(images.dtype).removeprefix("torch.") != "uint8" or not square:
        raise ValueError(
            f"a batch of images is uint8 of shape (B, {channels}, r, r), r at least {least}, not {images.dtype} "
            f"of shape {tuple(images.shape)}; pass paths or PIL images to have them cropped."
        )
    return images
