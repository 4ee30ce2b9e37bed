"""Image files: in memory, in folders and in tars."""

import io
import struct
import tarfile
import zlib

import numpy as np
from PIL import Image


def noise(width, height, bands=3):
    rng = np.random.default_rng(width * 1000 + height)
    shape = (height, width) if bands == 1 else (height, width, bands)
    return Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))


def photo(width=80, height=60, mode="RGB"):
    """Smooth noise, which a JPEG keeps."""
    rng = np.random.default_rng(width * 1000 + height)
    small = Image.fromarray(rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def saved(image, format="JPEG", **options):
    """The bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def rotated(image, orientation, format="JPEG"):
    """The bytes of a file that viewers rotate."""
    exif = image.getexif()
    exif[274] = orientation
    return saved(image, format, exif=exif)


def png_of(width, height, depth, colour_type, rows):
    """A PNG, written by hand: the header may promise more than there is."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def save_image(path, *, size=(4, 4), colour="red", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **options)


def save_files(folder, names, content=b""):
    """Files of the same content, which need not be images."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def pack(folder):
    """A tar beside a folder, with the same files."""
    path = folder.with_name(f"{folder.name}.tar")
    with tarfile.open(path, "w") as tar:
        tar.add(folder, arcname=".")
    return path


def names(dataset):
    return [entry.name for entry in dataset.entries]
