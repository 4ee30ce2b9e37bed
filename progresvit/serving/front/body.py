"""Bodies of requests, read within limits of size, number of parts and time."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from email.message import Message
from email.utils import collapse_rfc2231_value
from http import HTTPStatus

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from progresvit.serving.protocol import CLIENT_CLOSED
from progresvit.serving.service import Hold, Limits

LONGEST_BOUNDARY = 70
"""Characters (RFC 2046)."""
LONGEST_HEADER = 1024
"""Characters of a header with parameters. The time to parse one grows with their square."""
LONGEST_HEADERS, MOST_PARTS = 4096, 9
"""Bytes of the headers of a part, and parts of a form."""
MOST_CHUNKS = 20_000
"""The most chunks of a body, against clients that send single bytes."""
GRACE = 2.0
"""Seconds after which a client must have sent its body at the least rate."""
CLOSE = {"Connection": "close"}


async def read_body(request: Request, limits: Limits, hold: Hold | None = None) -> bytearray:
    """The decompressed body of a request, if it is within the limits; ``hold`` is called with the size of its parts."""
    size = request.headers.get("content-length")
    if size is not None and (not size.isdecimal() or len(size) > 18 or int(size) > limits.body):
        raise _too_large(limits)
    inflate = _decompressor(request.headers.get("content-encoding", "identity"))
    body, chunks, received, held = bytearray(), 0, 0, 0
    start = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(min(limits.receive, GRACE)) as timer:
            async for chunk in request.stream():
                chunks, received = chunks + 1, received + len(chunk)
                timer.reschedule(start + min(limits.receive, GRACE + received / limits.rate))
                if received > limits.body:
                    raise _too_large(limits)
                if inflate is not None and inflate.eof and chunk:
                    raise _badly_compressed()
                body += chunk if inflate is None else inflate.decompress(chunk, limits.body + 1 - len(body))
                if len(body) > limits.body:
                    raise _too_large(limits)
                if chunks > MOST_CHUNKS:
                    raise HTTPException(HTTPStatus.BAD_REQUEST, "the body has too many chunks.", CLOSE)
                if hold is not None:
                    hold(len(body) - held)
                    held = len(body)
    except TimeoutError:
        raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, "the request was not sent in time.", CLOSE) from None
    except zlib.error:
        raise _badly_compressed() from None
    except ClientDisconnect:
        raise HTTPException(CLIENT_CLOSED, "the client disconnected.", CLOSE) from None
    if inflate is not None and (not inflate.eof or inflate.unused_data):
        raise _badly_compressed()
    return body


def read_upload(headers: Headers, body: bytearray, field: str) -> bytes:
    """The file in this field of a multipart form (RFC 7578)."""
    kind, boundary = _parameter(headers.get("content-type", ""), "boundary")
    if kind != "multipart/form-data":
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"the body must be a multipart form with the file {field}.")
    if boundary is not None and len(boundary) > LONGEST_BOUNDARY:
        raise HTTPException(HTTPStatus.BAD_REQUEST, "the boundary of the form is too long.")
    if not boundary:
        raise _unreadable()
    delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
    is_at_start = body.startswith(delimiter[2:])
    end, places = -2 if is_at_start else body.find(delimiter), list[tuple[int, int]]()
    while len(places) <= MOST_PARTS and end != -1:
        start = end + len(delimiter)
        if body.startswith(b"--", start):
            return _only_file(body, places, field)
        end = body.find(delimiter, start)
        places.append((start, end))
    raise _unreadable()


def _only_file(body: bytearray, places: Sequence[tuple[int, int]], field: str) -> bytes:
    """The file of a form whose parts are at these places; it must be in this field."""
    files = [file for start, end in places if (file := _find_file(body, start, end)) is not None]
    if len(files) > 1:
        raise _unreadable()
    for name, start, end in files:
        if name == field:
            return bytes(memoryview(body)[start:end])
    raise HTTPException(HTTPStatus.BAD_REQUEST, f"the form has no file {field}.")


def _find_file(body: bytearray, start: int, end: int) -> tuple[str | None, int, int] | None:
    """The field and the place of a file in a part of a form; None for a part that is no file."""
    middle = body.find(b"\r\n\r\n", start, min(end, start + LONGEST_HEADERS))
    if middle < 0:
        raise _unreadable()
    for line in body[start:middle].decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition" and _parameter(value, "filename")[1] is not None:
            return _parameter(value, "name")[1], middle + 4, end
    return None


def _parameter(header: str, name: str) -> tuple[str, str | None]:
    """The value of a header in lower case, and a parameter of it."""
    if len(header) > LONGEST_HEADER:
        raise _unreadable()
    message = Message()
    try:
        message["Content-Type"] = " ".join(header.split())
        value = message.get_param(name)
        text = None if value is None else collapse_rfc2231_value(value)
    except (ValueError, LookupError):  # an encoding of its own that is unknown or wrong
        raise _unreadable() from None
    return header.partition(";")[0].strip().lower(), text


def _decompressor(encoding: str) -> zlib._Decompress | None:
    if encoding.strip().lower() == "identity":
        return None
    if encoding.strip().lower() in ("gzip", "deflate"):
        return zlib.decompressobj(zlib.MAX_WBITS | 32)  # either header
    raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be sent uncompressed or with gzip.", CLOSE)


def _badly_compressed() -> HTTPException:
    return HTTPException(HTTPStatus.BAD_REQUEST, "the body is not compressed as its headers say.", CLOSE)


def _unreadable() -> HTTPException:
    return HTTPException(HTTPStatus.BAD_REQUEST, "the form cannot be read.")


def _too_large(limits: Limits) -> HTTPException:
    return HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {limits.body / 1e6:g} MB.", CLOSE)
