"""Decoding: from the bytes of a file to an upright RGB image."""

from __future__ import annotations

import io
import math
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

_FILTERS = threading.Lock()
"""Warning filters are global to the process, so only one thread at a time may change them."""

JPEGS = ("JPEG", "MPO")
"""Pillow's names; an MPO file is a JPEG with further images."""
SCALES = (1, 2, 4, 8)
"""A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size."""
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
"""How HEIC files begin, after ``ftyp``."""


class ImageError(ValueError):
    """An image that cannot be used, and the reason."""


class TooLargeError(ImageError):
    """An image of more pixels than the limit."""


@contextmanager
def image_errors() -> Iterator[None]:
    """Every problem with an image becomes an :class:`ImageError`."""
    try:
        yield
    except UnidentifiedImageError as error:
        raise ImageError("not an image, or of a format that Pillow does not read") from error
    except ImageError:
        raise
    except Image.DecompressionBombError as error:  # TIFF and WebP have a limit of their own, twice Pillow's
        raise ImageError(f"too large to be opened safely ({error}); convert it to another format") from error
    except MemoryError as error:
        raise ImageError("too large for the memory that is free") from error
    except Exception as error:  # Pillow's plugins raise many kinds of exceptions on damaged files
        raise ImageError(f"damaged or truncated ({error})") from error


def decode(image: bytes | Image.Image, *, reduce: bool = False) -> Image.Image:
    """An upright RGB image: the first frame, with EXIF rotation applied, alpha blended with white, 16 bits scaled to 8.

    Every problem is an :class:`ImageError`.

    Args:
        image: Content of a file, or an image that Pillow has opened.
        reduce: A JPEG above Pillow's limit is decoded at a smaller scale instead of being refused.
    """
    with image_errors():
        if isinstance(image, bytes):
            image = open_header(image, reducible=reduce)
            if reduce:
                shrink_on_load(image, image.size)  # only as far as the limit asks
        return upright_rgb(image)


def open_header(content: bytes, max_pixels: int | None = None, *, reducible: bool = False) -> Image.Image:
    """An image whose header is read and whose pixels are not decoded yet; one that is too large is refused.

    The plug-in for HEIC is registered when the first such file is opened. Use it inside of :func:`image_errors`.

    Args:
        content: Content of the file.
        max_pixels: Largest number of pixels that may be decoded; None: Pillow's limit, ``Image.MAX_IMAGE_PIXELS``.
        reducible: :func:`shrink_on_load` is called with the same limit, so a JPEG counts at its smallest scale.
    """
    try:
        with _FILTERS, warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(io.BytesIO(content))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        image = _open_large(content)
    except UnidentifiedImageError:
        if content[4:8] != b"ftyp" or content[8:12] not in HEIF_BRANDS:
            raise
        image = _open_heic(content)
    limit = max_pixels or Image.MAX_IMAGE_PIXELS or math.inf
    if image.width * image.height > limit:
        size = f"{image.width:,} x {image.height:,} pixels, the limit is {limit:,}"
        if not (reducible and image.format in JPEGS and is_decoded_by_rows(content)):
            raise TooLargeError(f"too large to be opened safely ({size})")
        if _pixels(image.size, SCALES[-1]) > limit:
            raise TooLargeError(f"too large to be opened safely, even at 1/{SCALES[-1]} of its size ({size})")
    return image


def _open_large(content: bytes) -> Image.Image:
    """Open an image above Pillow's limit. The limit is global, so changing it would affect other threads."""
    for factory, accept in [Image.OPEN[name] for name in Image.ID]:
        if accept is None or accept(content[:16]) is True:
            try:
                return factory(io.BytesIO(content), "")
            except (SyntaxError, IndexError, TypeError, struct.error):  # of another format after all
                continue
    raise UnidentifiedImageError


def _open_heic(content: bytes) -> Image.Image:
    try:
        import pillow_heif
    except ImportError:
        from progresvit.io.extras import not_installed

        raise ImageError(f"a HEIC image, and {not_installed('pillow-heif', 'heic')}") from None
    pillow_heif.register_heif_opener()
    return Image.open(io.BytesIO(content))


def is_decoded_by_rows(content: bytes) -> bool:
    """Whether it is a JPEG that is decoded in the memory of its result: sequential, all components in one scan.

    For others, such as progressive ones, the decoder holds the coefficients of the whole image at its full size.
    """
    position, components = 2, None
    while position + 9 < len(content) and content[position] == 0xFF:
        marker, length = content[position + 1], int.from_bytes(content[position + 2 : position + 4], "big")
        if marker in (0xC0, 0xC1):  # start of a sequential frame
            components = content[position + 9]
        elif marker == 0xDA:  # start of a scan
            return content[position + 4] == components
        position += 1 if marker == 0xFF else 2 + length
    return False


def shrink_on_load(image: Image.Image, size: tuple[int, int], max_pixels: int | None = None) -> int:
    """Let a JPEG that is not decoded yet be decoded at 1/2, 1/4 or 1/8 of its size, if that is at least ``size``.

    The decoder leaves out high frequencies of the cosine transform, which saves most of its time. Other formats are
    left as they are. A JPEG of more than ``max_pixels`` (None: Pillow's limit) is decoded at a scale within this limit.
    Returns the divisor; the last row and column may come from fewer pixels.
    """
    if image.format not in JPEGS:
        return 1
    before, limit = image.size, max_pixels or Image.MAX_IMAGE_PIXELS or math.inf
    least = next((divisor for divisor in SCALES if _pixels(before, divisor) <= limit), SCALES[-1])
    width, height = (max(1, min(side, full // least)) for side, full in zip(size, before))
    image.draft(None, (width, height))  # None keeps the mode
    return next(divisor for divisor in SCALES if image.size == tuple(-(-side // divisor) for side in before))


def _pixels(size: tuple[int, int], divisor: int) -> int:
    """Number of pixels at 1/divisor of the size."""
    return -(-size[0] // divisor) * -(-size[1] // divisor)


def upright_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB, rotated as its EXIF data says."""
    image = ImageOps.exif_transpose(image)
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
