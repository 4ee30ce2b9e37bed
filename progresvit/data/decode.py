"""Decoding: from the bytes of a file to an upright RGB image."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

_FILTERS = threading.Lock()
"""Warning filters are global to the process, so only one thread at a time may change them."""


class ImageError(ValueError):
    """An image that cannot be used, and the reason."""


def decode(content: bytes) -> Image.Image:
    """An upright RGB image: EXIF rotation applied, alpha blended with white, 16 bits scaled to 8, the first frame."""
    return load(open_header(content))


def open_header(content: bytes | memoryview) -> Image.Image:
    """An image whose header is read and whose pixels are not decoded yet; one that is too large is refused."""
    with _image_errors(), _FILTERS, warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return Image.open(io.BytesIO(content))


def load(image: Image.Image) -> Image.Image:
    """Decode an image that was opened; returns it upright and in RGB."""
    with _image_errors():
        image.load()
        return upright_rgb(image)


def shrink_on_load(image: Image.Image, size: tuple[int, int]) -> int:
    """Let a JPEG that is not decoded yet be decoded at 1/2, 1/4 or 1/8 of its size, if that is at least ``size``.

    The decoder leaves out high frequencies of the cosine transform, which saves most of its time. Other formats are
    left as they are. Returns the divisor; what does not fill a last pixel is part of it.
    """
    if image.format not in ("JPEG", "MPO"):
        return 1
    before = image.size
    image.draft(None, size)  # None keeps the mode
    return next(divisor for divisor in (1, 2, 4, 8) if image.size == tuple(-(-side // divisor) for side in before))


@contextmanager
def _image_errors() -> Iterator[None]:
    """Every problem with a file becomes an :class:`ImageError`."""
    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"too large to be opened safely ({error})") from error
    except UnidentifiedImageError as error:
        raise ImageError("not an image, or of a format that Pillow does not read") from error
    except ImageError:
        raise
    except MemoryError as error:
        raise ImageError("too large for the memory that is free") from error
    except Exception as error:  # Pillow's plugins raise many kinds of exceptions on damaged files
        raise ImageError(f"damaged or truncated ({error})") from error


def upright_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB, rotated as its EXIF data says."""
    return _to_rgb(ImageOps.exif_transpose(image))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # 16 bits, or 32 that hold 16
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ImageError("its pixels need more than 16 bits")
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ImageError("its pixels are floating-point numbers of unknown range")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
