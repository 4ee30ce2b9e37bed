"""Pictures in: files, PIL images or bytes, each opened by itself so that a bad one harms no other."""

from __future__ import annotations

import contextlib
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
from progresvit.data.decode import ImageError, decode, upright_rgb

PathLike = str | os.PathLike[str]
Pictures = Any
"""A list of paths, contents of files and PIL images, or a uint8 array or tensor (B, C, R, R)."""


ON_THE_WEB = "an address on the web; download it and give the file"
NO_FILE = "there is no such file"


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
    if config.in_channels not in (1, 3):
        raise ValueError(f"pictures have 1 or 3 channels and this model takes {config.in_channels}; give it arrays.")
    for picture in pictures:
        if not isinstance(picture, Image | str | os.PathLike | bytes | Unread):
            raise ValueError(
                f"a picture is a path, the content of a file or a PIL image, not {type(picture).__name__}."
            )
    for picture in {id(one): one for one in pictures if isinstance(one, Image)}.values():
        with contextlib.suppress(Exception):  # it will be told below; threads must not decode one picture twice
            picture.load()

    def open_one(picture: Picture) -> NDArray[np.uint8] | str:
        try:
            upright = _read(picture)
            return crop(upright if config.in_channels == 3 else upright.convert("L"), config)
        except ImageError as error:
            return str(error)
        except Exception as error:  # whatever it is, it concerns this picture alone
            return f"cannot be opened ({type(error).__name__}: {error})"

    opened = list(map(open_one, pictures) if pool is None else pool.map(open_one, pictures))
    good = [one for one in opened if not isinstance(one, str)]
    errors = {place: one for place, one in enumerate(opened) if isinstance(one, str)}
    nothing = np.empty((0, config.in_channels, config.input_side, config.input_side), np.uint8)
    return Opened(np.stack(good) if good else nothing, errors)


def _read(picture: Picture) -> Image:
    if isinstance(picture, Unread):
        raise ImageError(picture.reason)
    if isinstance(picture, bytes):
        return decode(picture)
    if isinstance(picture, Image):
        try:
            return upright_rgb(picture)
        except ImageError:
            raise
        except Exception as error:  # a picture opened lazily is decoded only now
            raise ImageError(f"damaged or cut short ({error})") from error
    if os.fspath(picture).startswith(("http://", "https://")):
        raise ImageError(ON_THE_WEB)
    path = Path(picture)
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        raise ImageError(NO_FILE) from None
    except IsADirectoryError:
        raise ImageError("a folder, not a picture") from None
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
