"""From the bytes of a file to an upright RGB picture, whatever the camera or the scanner left in it."""

from __future__ import annotations

import io
import threading
import warnings

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

_FILTERS = threading.Lock()
"""Filters of warnings belong to the whole process, so only one thread at a time may change them."""


class PictureError(ValueError):
    """A picture that cannot be used, and why."""


def decode(content: bytes) -> Image.Image:
    """An upright RGB picture: EXIF rotation applied, alpha laid on white, 16 bits scaled to 8, the first frame."""
    try:
        with _FILTERS, warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(content))  # looks at the head of the file alone
        picture.load()
        return upright_rgb(picture)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PictureError(f"too large to be opened safely ({error})") from error
    except UnidentifiedImageError as error:
        raise PictureError("not a picture, or of a format that Pillow does not know") from error
    except PictureError:
        raise
    except Exception as error:  # Pillow's plugins raise nearly anything on damaged files
        raise PictureError(f"damaged or cut short ({error})") from error


def upright_rgb(picture: Image.Image) -> Image.Image:
    """The same picture rotated as its EXIF data asks, in RGB."""
    return _to_rgb(ImageOps.exif_transpose(picture))


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode == "RGB":
        return picture
    if picture.mode.startswith("I"):  # 16 bits, or 32 that hold 16
        values = np.asarray(picture).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise PictureError("its pixels need more than 16 bits")
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise PictureError("its pixels are floating-point numbers of unknown range")
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture).convert("RGB")
    return picture.convert("RGB")
