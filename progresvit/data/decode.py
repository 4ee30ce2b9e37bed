"""Decoding: from the bytes of a file to an upright RGB image."""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

FORMATS = (
    "JPEG", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000", "QOI", "DDS", "PCX", "PSD",
    "SGI", "TGA",
)  # fmt: skip
"""The formats that are read, by Pillow's names, and HEIC beside them. Others are refused whatever the name of the file
says: EPS, for example, runs a PostScript interpreter. TGA files have no signature, so TGA is tried last."""
JPEGS = ("JPEG", "MPO")
"""Pillow's names; an MPO file is a JPEG with further images."""
STRIP = 2**20
"""Pixels of a strip of an image with transparency."""
SCALES = (1, 2, 4, 8)
"""A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size."""
MOST_SCANS = 100
"""The most scans of a JPEG; encoders write about 10. Each costs time for the whole image, and may be a few bytes."""
MOST_SEGMENTS = 10 * MOST_SCANS
"""The most segments of a JPEG after its first scan: scans, and the tables between them."""
MOST_READS = 50_000
"""Reads of a header. Pillow reads a few bytes at a time, and looks for the next segment of a JPEG byte by byte."""
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
"""How HEIC files begin, after ``ftyp``."""

_SEGMENT = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
"""Start of a segment with a length, or the end of the image. 00 follows FF in data, D0 to D7 stand alone, and libjpeg
skips others below C0 without a length where it looks for a restart."""
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9


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
        rgb = upright_rgb(image)
        return rgb.copy() if rgb is image else rgb  # the caller may change it


def open_header(
    content: bytes, max_pixels: int | None = None, *, reducible: bool = False, most_reads: int = MOST_READS
) -> Image.Image:
    """An image whose header is read and whose pixels are not decoded yet; one that is too large is refused.

    The plug-in for HEIC is registered when the first such file is opened. Use it inside of :func:`image_errors`.

    Args:
        content: Content of the file.
        max_pixels: Largest number of pixels that may be decoded; None: Pillow's limit, ``Image.MAX_IMAGE_PIXELS``.
        reducible: :func:`shrink_on_load` is called with the same limit, so a JPEG counts at its smallest scale.
        most_reads: The most reads of the header.
    """
    image = identify(content, most_reads)
    limit = max_pixels or Image.MAX_IMAGE_PIXELS or math.inf
    if image.width * image.height > limit:
        size = f"{image.width:,} x {image.height:,} pixels, the limit is {limit:,}"
        if not (reducible and image.format in JPEGS and is_decoded_by_rows(image, content)):
            raise TooLargeError(f"too large to be opened safely ({size})")
        if _pixels(image.size, SCALES[-1]) > limit:
            raise TooLargeError(f"too large to be opened safely, even at 1/{SCALES[-1]} of its size ({size})")
    if image.format in JPEGS:
        _check_scans(image, content)
    return image


def identify(content: bytes, most_reads: int = MOST_READS) -> Image.Image:
    """Open an image of one of :data:`FORMATS`.

    ``Image.open`` does the same, and warns of large images. The filters of warnings are global to the process, and so
    is its limit; :func:`open_header` has a limit of its own.
    """
    for factory in _factories(content):
        file = _Header(content)
        file.most_reads = most_reads
        try:
            image = factory(file, "")
        except (SyntaxError, IndexError, TypeError, struct.error):  # of another format after all
            continue
        file.most_reads = math.inf
        return image
    if _is_heic(content):
        return _open_heic(content)
    raise UnidentifiedImageError


def _factories(content: bytes, *, signed: bool = False) -> Iterator[Callable[..., Image.Image]]:
    """What may open this content, by its signature; without ``signed``, the formats that have none too."""
    prefix = content[:16]
    for name in FORMATS:
        if name not in Image.OPEN:
            Image.init()
        if name not in Image.OPEN:  # a build of Pillow without it
            continue
        factory, accept = Image.OPEN[name]
        fits = not signed
        if accept is not None:
            try:
                fits = accept(prefix) is True
            except (IndexError, struct.error):  # a very short file
                fits = False
        if fits:
            yield factory


def _is_heic(content: bytes) -> bool:
    return content[4:8] == b"ftyp" and content[8:12] in HEIF_BRANDS


def has_signature(head: bytes) -> bool:
    """Whether a file that begins like this may be an image; 1 MiB tells it of formats without a signature."""
    if _is_heic(head) or any(_factories(head, signed=True)):
        return True
    try:
        identify(head)
    except (UnidentifiedImageError, OSError):
        return False
    return True


def _open_heic(content: bytes) -> Image.Image:
    try:
        import pillow_heif
    except ImportError:
        from progresvit.io.extras import not_installed

        raise ImageError(f"a HEIC image, and {not_installed('pillow-heif', 'heic')}") from None
    pillow_heif.register_heif_opener()
    return Image.open(io.BytesIO(content), formats=["HEIF"])


class _Header(io.BytesIO):
    """A file of which a header is read. It remembers what was read last."""

    last = b""
    reads, most_reads = 0, float(MOST_READS)

    def read(self, size: int | None = -1) -> bytes:
        self.reads += 1
        if self.reads > self.most_reads:
            raise ImageError("its header has too many parts; save it again")
        self.last = super().read(size)
        return self.last


def _first_scan(image: Image.Image, content: bytes) -> tuple[int, bool]:
    """Where the data of the first scan of a JPEG begin, and whether the image is decoded row by row.

    Pillow has read the header and nothing else. The last it reads are the components of the first scan.
    """
    if image.format != "JPEG":  # an MPO file, of which Pillow has read more
        image = JpegImageFile(_Header(content))
    assert isinstance(image, JpegImageFile)
    assert isinstance(image.fp, _Header)
    start, scan = image.fp.tell(), image.fp.last
    is_scan = content[start - len(scan) - 4 : start] == struct.pack(">BBH", 0xFF, _START_OF_SCAN, len(scan) + 2) + scan
    has_all = is_scan and scan[:1] == bytes([image.layers])
    return start, has_all and "progressive" not in image.info


def is_decoded_by_rows(image: Image.Image, content: bytes) -> bool:
    """Whether a JPEG with this content, of which only the header is read, is decoded in the memory of its result.

    It is sequential, with all components in one scan. For others, such as progressive ones, the decoder holds the
    coefficients of the whole image at its full size.
    """
    return _first_scan(image, content)[1]


def _check_scans(image: Image.Image, content: bytes) -> None:
    """Refuse a JPEG of too many scans. One that is decoded row by row has one scan; the decoder refuses a second."""
    position, by_rows = _first_scan(image, content)
    if by_rows:
        return
    scans, segments = 1, 0
    while (segment := _SEGMENT.search(content, position)) and content[segment.end() - 1] != _END_OF_IMAGE:
        segments += 1
        scans += content[segment.end() - 1] == _START_OF_SCAN
        if scans > MOST_SCANS or segments > MOST_SEGMENTS:
            raise ImageError(f"a JPEG of more than {MOST_SCANS} scans; save it again")
        position = segment.end() + int.from_bytes(content[segment.end() : segment.end() + 2], "big")


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
    image.load()
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)  # which copies an image that is upright
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
        return _on_white(image)
    return image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """An image with transparency on white; strip by strip, since it takes four times the memory."""
    rgb = Image.new("RGB", image.size)
    rows = max(1, STRIP // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, "white")
        rgb.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return rgb
