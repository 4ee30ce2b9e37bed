"""Crafted files and requests that cost a careless server far more than they cost their sender; made, never stored."""

from __future__ import annotations

import base64
import gzip
import io
import struct

from PIL import Image

SEQUENTIAL, PROGRESSIVE = 0xC0, 0xC2


def _segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def _scan(components: int, first: int, last: int) -> bytes:
    """The header of a scan over these coefficients, and 8 bytes of data; the decoder takes the missing data for 0."""
    parts = b"".join(bytes((number + 1, 0)) for number in range(components))
    return _segment(0xDA, bytes((components,)) + parts + bytes((first, last, 0))) + bytes(8)


def jpeg(
    width: int, height: int, *, frame: int = SEQUENTIAL, components: int = 3, first: int | None = None, scans: int = 1
) -> bytes:
    """A grey JPEG of any size in a few bytes.

    Args:
        width, height: In pixels.
        frame: The kind of the frame: SEQUENTIAL or PROGRESSIVE.
        components: Components of the image.
        first: Components of the first scan; by default all of them.
        scans: Number of scans.
    """
    table = bytes(range(1, 2)) + bytes(15)  # one code, of one bit
    parts = b"".join(bytes((number + 1, 0x11, 0)) for number in range(components))
    last = {SEQUENTIAL: 63, PROGRESSIVE: 0}[frame]
    further = _scan(1, 1, 63) if frame == PROGRESSIVE else _scan(1, 0, 63)
    return b"".join(
        (
            b"\xff\xd8",
            _segment(0xDB, b"\0" + bytes([1]) * 64),
            _segment(frame, struct.pack(">BHHB", 8, height, width, components) + parts),
            _segment(0xC4, b"\0" + table + b"\0"),
            _segment(0xC4, b"\x10" + table + b"\0"),
            _scan(first or components, 0, last),
            further * (scans - 1),
            b"\xff\xd9",
        )
    )


def hidden_scans(width: int, height: int, regions: int = 1) -> bytes:
    """A JPEG of 3,600 scans for each region, which a parser skips if it reads a length after a reserved marker.

    The decoder looks for a restart there, and skips the marker alone.
    """
    start, scan, _ = jpeg(width, height, frame=PROGRESSIVE, components=1).partition(_scan(1, 0, 0))
    hidden = _scan(1, 1, 63) * 3_600
    region = b"\xff\x02\xff\xff" + hidden + bytes(0xFFFF - 2 - len(hidden))
    return start + _segment(0xDD, b"\0\1") + scan + region * regions + b"\xff\xd9"


def disguised_jpeg(width: int, height: int) -> bytes:
    """A progressive JPEG that a parser takes for a sequential one if it reads a length after a restart marker."""
    real = jpeg(width, height, frame=PROGRESSIVE)[2:]
    decoy = jpeg(width, height)[2:]
    return b"\xff\xd8\xff\xd0" + struct.pack(">H", len(real) + 2) + real + decoy


def webp(width: int, height: int) -> bytes:
    """A WebP of one colour; 16,383 pixels a side need about 40 bytes when they are written by hand."""
    file = io.BytesIO()
    Image.new("RGBA", (width, height), (1, 2, 3, 4)).save(file, "WEBP", lossless=True)
    return file.getvalue()


def png(width: int, height: int) -> bytes:
    """A PNG of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def broken_tiff(width: int = 640, height: int = 480) -> bytes:
    """A TIFF whose pixels cannot be decompressed; libtiff prints what it thinks of them."""
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "TIFF", compression="tiff_lzw")
    content = bytearray(file.getvalue())
    content[20:600] = bytes(580)
    return bytes(content)


def multipart(content: bytes, boundary: str = "x") -> tuple[bytes, dict[str, str]]:
    """The body and the headers of an upload."""
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n'.encode()
    body = head + content + f"\r\n--{boundary}--\r\n".encode()
    return body, {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def many_values(count: int) -> bytes:
    """A JSON request with this number of empty images."""
    return b'{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [' + b'"",' * count + b'""]}]}'


def nested(depth: int) -> bytes:
    """A JSON request with lists in lists."""
    return b'{"inputs": ' + b"[" * depth + b"]" * depth + b"}"


def zipped(body: bytes) -> tuple[bytes, dict[str, str]]:
    """The body compressed, and its headers."""
    return gzip.compress(body), {"Content-Type": "application/json", "Content-Encoding": "gzip"}


def infer(contents: list[bytes]) -> dict[str, object]:
    """The JSON of a request with these images."""
    data = [base64.b64encode(content).decode() for content in contents]
    return {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [len(data)], "data": data}]}
