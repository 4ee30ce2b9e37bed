"""Prepares an image file on the CPU: its JPEG bytes for the GPU, decoded pixels, or the finished crop.

The plan divides the work. A GPU that decodes JPEGs gets their bytes; everything that it does not decode (other formats,
progressive and CMYK JPEGs, damaged files) is decoded here. A GPU that crops gets whole images. Otherwise the evaluation
crop is made here. Needs no torch.

Letters: H, W height and width of an image, C channels, r the side of the model's input.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from progresvit.data.crop import Box, EvaluationCrop
from progresvit.data.dataset import ImageDataset
from progresvit.data.dataset import is_web_address as is_web_address
from progresvit.data.decode import (
    JPEGS,
    ImageError,
    TooLargeError,
    decode,
    image_errors,
    is_decoded_by_rows,
    open_header,
    shrink_on_load,
    upright_rgb,
)
from progresvit.data.entries import Entry, read_file

MORE_PIXELS = "; a larger max_pixels=… allows more"
ON_THE_WEB = "a web address; download it and give the file"
NO_FILE = "there is no such file"
SHRINK_MARGIN = 1.5
"""A JPEG is decoded at a smaller scale if that scale is still larger than the crop's by this factor. imagenet-tiny then
predicts the same class for 430 of 431 photographs twice as large as the crop or more; without a margin for 421."""
GPU_SIDES = (16, 16384)
"""Shortest and longest side of the JPEGs that the GPU decodes."""
SHORT_HEADER = 64 * 1024
"""Bytes in which the header of a JPEG ends, unless it has a preview or a large colour profile."""
FEW_READS, SHORT_EXIF = 1000, 8192
"""Reads of a header, and bytes of its EXIF data, that take less than a few milliseconds."""
BLOCK = 8
"""Reading 64 pixels of a JPEG that is decoded at a smaller scale takes about as long as decoding 8."""


@dataclass(frozen=True)
class UnreadImage:
    """Stands for an image whose file could not be read."""

    reason: str


Request = str | os.PathLike[str] | bytes | Entry | UnreadImage
"""An image file: a path, its content, or an entry of a dataset."""


class Form(IntEnum):
    """The kind of data of a prepared image."""

    JPEG = 0
    """The bytes of a file."""
    PIXELS = 1
    """(H, W, 3), upright."""
    CROP = 2
    """(C, r, r)"""
    ERROR = 3
    LATER = 4
    """Nothing: the image has more pixels than the plan's ``quick_pixels``."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An image as far as it is prepared."""

    form: Form
    data: Any = None
    """Bytes or an array, or a tensor of them."""
    size: tuple[int, int] = (0, 0)
    """Width and height, as stored."""
    orientation: int = 1
    """As in EXIF, 1 to 8; the GPU does not rotate JPEGs."""
    box: Box = (0.0, 0.0, 0.0, 0.0)
    """The evaluation crop: left, top, right and bottom, in pixels of the upright image."""
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The part of the work that the CPU does; the device does the rest."""

    crop: EvaluationCrop
    jpeg: bool = False
    """The device decodes JPEGs."""
    pixels: bool = False
    """The device crops and resizes."""
    shrink: bool = True
    """Large JPEGs may be decoded at a smaller scale, and images without room are cropped here. Not for random crops."""
    max_pixels: int | None = None
    """Largest number of pixels to decode: larger JPEGs are decoded at a smaller scale, other images are refused. None:
    Pillow's limit."""
    quick_pixels: int | None = None
    """Images that take more pixels to decode are left as :attr:`Form.LATER`; None: every image is decoded."""
    pillow_limit: int | None = field(default_factory=lambda: Image.MAX_IMAGE_PIXELS)
    """Pillow's limit in this process, which worker processes take over."""


def request_of(dataset: ImageDataset, index: int) -> Request:
    """The place of an image of a dataset, or its content if the dataset overrides ``read``."""
    if type(dataset).read is ImageDataset.read:
        return dataset.entries[index]
    try:
        return dataset.read(index)
    except (OSError, ValueError) as error:
        return UnreadImage(f"cannot be read ({getattr(error, 'strerror', None) or error})")


def read_request(request: Request) -> bytes:
    """The content of a file; every problem is an :class:`ImageError`."""
    if isinstance(request, bytes):
        return request
    if isinstance(request, UnreadImage):
        raise ImageError(request.reason)
    try:
        return request.read() if isinstance(request, Entry) else read_file(request)
    except OSError as error:
        if is_web_address(request.path if isinstance(request, Entry) else request):
            raise ImageError(ON_THE_WEB) from None
        if isinstance(error, FileNotFoundError):
            raise ImageError(NO_FILE) from None
        if isinstance(error, IsADirectoryError):
            raise ImageError("a folder, not an image") from None
        raise ImageError(f"cannot be read ({error.strerror or error})") from error


def prepare(request: Request | Image.Image | Prepared, plan: Plan, room: int | None = None) -> Prepared:
    """Prepare an image. A PIL image gets the evaluation crop whatever the plan is; a prepared image stays as it is.

    Args:
        request: The image.
        plan: What to do.
        room: Largest number of bytes of the result; a crop always fits. None: any.
    """
    if isinstance(request, Prepared):
        return request
    try:
        if isinstance(request, Image.Image):
            return _cropped(decode(request), plan.crop)
        return _prepare(read_request(request), plan, room)
    except TooLargeError as error:
        return Prepared(Form.ERROR, error=f"{error}{MORE_PIXELS}")
    except ImageError as error:
        return Prepared(Form.ERROR, error=str(error))
    except Exception as error:  # any problem concerns this image only
        return Prepared(Form.ERROR, error=f"cannot be opened ({type(error).__name__}: {error})")


def prepare_for_gpu(content: bytes, plan: Plan, room: int | None = None) -> Prepared | None:
    """Prepare a JPEG that the device decodes, from its first bytes; None for other images, and for longer headers."""
    if not (plan.jpeg and content.startswith(b"\xff\xd8\xff")):
        return None
    with suppress(Exception):  # reported when the whole file is prepared
        head = content[:SHORT_HEADER]
        image = open_header(head, plan.max_pixels, most_reads=FEW_READS)
        is_simple = "mp" not in image.info and len(image.info.get("exif", b"")) <= SHORT_EXIF
        if image.format == "JPEG" and is_simple and is_decoded_by_rows(image, head):
            return _as_jpeg(image, content, plan, room)
    return None


def _as_jpeg(image: Image.Image, content: bytes, plan: Plan, room: int | None) -> Prepared | None:
    """The bytes of a JPEG that the device decodes; None for other images."""
    is_small = image.width * image.height <= (plan.max_pixels or Image.MAX_IMAGE_PIXELS or math.inf)
    if not (plan.jpeg and is_small and (room is None or len(content) <= room) and is_for_gpu(image, content)):
        return None
    orientation = _orientation(image)
    box = plan.crop.box(upright_size(image.size, orientation))
    return Prepared(Form.JPEG, np.frombuffer(content, np.uint8), image.size, orientation, box)


def _orientation(image: Image.Image) -> int:
    """As in EXIF, from 1 to 8; unknown values count as upright."""
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    return orientation if orientation in range(1, 9) else 1


def _prepare(content: bytes, plan: Plan, room: int | None) -> Prepared:
    with image_errors():
        image = open_header(content, plan.max_pixels, reducible=True)
        size, orientation, divisor, work = image.size, 1, 1, math.prod(image.size)
        if image.format in JPEGS:
            if as_jpeg := _as_jpeg(image, content, plan, room):
                return as_jpeg
            orientation, has_rows = _orientation(image), is_decoded_by_rows(image, content)
            needed = size
            if plan.shrink:
                (width, height), _ = plan.crop.place(size)
                needed = (math.ceil(SHRINK_MARGIN * width), math.ceil(SHRINK_MARGIN * height))
            divisor = shrink_on_load(image, needed, plan.max_pixels)
            if has_rows:
                work = math.prod(image.size) + work // BLOCK
        if plan.quick_pixels is not None and work > plan.quick_pixels:
            return Prepared(Form.LATER, size=size)
        rgb, section = upright_rgb(image), None
    if divisor > 1:
        left, top, right, bottom = plan.crop.box(upright_size(size, orientation))
        section = (left / divisor, top / divisor, right / divisor, bottom / divisor)  # the last pixel may be a part
    if plan.pixels and (whole := _with_pixels(rgb, section, plan, room)) is not None:
        return whole
    return _cropped(rgb, plan.crop, section)


def _with_pixels(rgb: Image.Image, section: Box | None, plan: Plan, room: int | None) -> Prepared | None:
    """The pixels of a decoded image; None if there is no room for them.

    ``section`` is what the crop keeps of an image that was decoded at a smaller scale.
    """
    if not plan.shrink and room is not None:  # reduced by the smallest factor with which it fits
        factor = 1
        while 3 * -(-rgb.width // factor) * -(-rgb.height // factor) > room:
            factor += 1
        rgb = rgb if factor == 1 else rgb.reduce(factor)
    if room is not None and 3 * rgb.width * rgb.height > room:
        return None
    return Prepared(Form.PIXELS, np.asarray(rgb), rgb.size, box=section or plan.crop.box(rgb.size))


def _cropped(rgb: Image.Image, crop: EvaluationCrop, section: Box | None = None) -> Prepared:
    """The evaluation crop of a decoded image."""
    r = crop.side
    return Prepared(Form.CROP, crop(rgb, section), (r, r), box=(0, 0, r, r))


def upright_size(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """Width and height of an image as it is seen."""
    return size if orientation < 5 else (size[1], size[0])


def is_for_gpu(image: Image.Image, content: bytes) -> bool:
    """Whether the GPU decodes this file as the CPU does: a whole baseline JPEG, grey or in YCbCr."""
    least, most = GPU_SIDES
    return (
        image.format == "JPEG"
        and image.mode in ("L", "RGB")
        and not image.info.get("progressive")
        and image.info.get("adobe_transform", 1) == 1
        and least <= min(image.size)
        and max(image.size) <= most
        and content.rstrip(b"\0\r\n").endswith(b"\xff\xd9")  # not truncated
    )
