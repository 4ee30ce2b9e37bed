"""Pictures in: files, PIL images or bytes, each opened by itself so that a bad one harms no other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from progresvit.config import ModelConfig
from progresvit.data.crop import crop
from progresvit.data.decode import PictureError, decode, upright_rgb

PathLike = str | os.PathLike[str]
Pictures = Any
"""A list of paths, contents of files and PIL images, or a uint8 array or tensor (B, C, R, R)."""


@dataclass(frozen=True)
class Unread:
    """In the place of a picture that could not even be read: why not."""

    reason: str


Picture = Image | PathLike | bytes | Unread


@dataclass(frozen=True)
class Opened:
    """The pictures that could be opened, in their order, and why the others could not."""

    pixels: Any
    """Bytes, (B, C, R, R)."""
    errors: dict[int, str] = field(default_factory=dict)
    """By place among all pictures."""

    @property
    def side(self) -> int:
        return int(self.pixels.shape[-1])


def open_pictures(pictures: Pictures, config: ModelConfig, pool: Executor | None = None) -> Opened:
    """Files and PIL images are cropped as in evaluation; arrays and tensors are taken as they are."""
    if hasattr(pictures, "dtype"):
        return Opened(_checked(pictures, config))
    return _open_all(pictures, config, pool)


def _open_all(pictures: Sequence[Picture], config: ModelConfig, pool: Executor | None) -> Opened:
    def open_one(picture: Picture) -> NDArray[np.uint8] | str:
        try:
            return crop(_read(picture), config)
        except PictureError as error:
            return str(error)

    opened = list(map(open_one, pictures) if pool is None else pool.map(open_one, pictures))
    good = [one for one in opened if not isinstance(one, str)]
    errors = {place: one for place, one in enumerate(opened) if isinstance(one, str)}
    nothing = np.empty((0, config.in_channels, config.input_side, config.input_side), np.uint8)
    return Opened(np.stack(good) if good else nothing, errors)


def _read(picture: Picture) -> Image:
    if isinstance(picture, Unread):
        raise PictureError(picture.reason)
    if isinstance(picture, bytes):
        return decode(picture)
    if isinstance(picture, Image):
        try:
            return upright_rgb(picture)
        except PictureError:
            raise
        except Exception as error:  # a picture opened lazily is decoded only now
            raise PictureError(f"damaged or cut short ({error})") from error
    if not isinstance(picture, str | os.PathLike):
        raise ValueError(f"a picture is a path, the content of a file or a PIL image, not {type(picture).__name__}.")
    if os.fspath(picture).startswith(("http://", "https://")):
        raise PictureError("an address on the web; download it and give the file")
    path = Path(picture)
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        raise PictureError("there is no such file") from None
    except IsADirectoryError:
        raise PictureError("a folder, not a picture") from None
    except OSError as error:
        raise PictureError(f"cannot be read ({error.strerror or error})") from error


def _checked(images: Any, config: ModelConfig) -> Any:
    least, channels = config.resolution, config.in_channels
    square = images.ndim == 4 and images.shape[1] == channels and images.shape[2] == images.shape[3] >= least
    if str(images.dtype).removeprefix("torch.") != "uint8" or not square:
        raise ValueError(
            f"a batch of images is uint8 of shape (B, {channels}, r, r), r at least {least}, not {images.dtype} "
            f"of shape {tuple(images.shape)}; pass paths or PIL images to have them cropped."
        )
    return images
