"""Bodies of requests, read within limits of size, number of parts and time."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from http import HTTPStatus

from fastapi import HTTPException
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from progresvit.serving.protocol import CLIENT_CLOSED
from progresvit.serving.service import Limits

LONGEST_BOUNDARY = 70
"""Characters (RFC 2046)."""
MOST_CHUNKS = 20_000
"""The most chunks of a body, against clients that send single bytes."""
CLOSE = {"Connection": "close"}


async def read_body(request: Request, limits: Limits) -> bytes:
    """The decompressed body of a request, if it is within the limits."""
    size = request.headers.get("content-length")
    if size is not None and (not size.isdecimal() or len(size) > 18 or int(size) > limits.body):
        raise _too_large(limits)
    inflate = _decompressor(request.headers.get("content-encoding", "identity"))
    body, chunks, received = bytearray(), 0, 0
    try:
        async with asyncio.timeout(limits.receive):
            async for chunk in request.stream():
                chunks, received = chunks + 1, received + len(chunk)
                if received > limits.body:
                    raise _too_large(limits)
                if inflate is not None and inflate.eof and chunk:
                    raise _badly_compressed()
                body += chunk if inflate is None else inflate.decompress(chunk, limits.body + 1 - len(body))
                if len(body) > limits.body:
                    raise _too_large(limits)
                if chunks > MOST_CHUNKS:
                    raise HTTPException(HTTPStatus.BAD_REQUEST, "the body has too many chunks.", CLOSE)
    except TimeoutError:
        raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, "the request was not sent in time.", CLOSE) from None
    except zlib.error:
        raise _badly_compressed() from None
    except ClientDisconnect:
        raise HTTPException(CLIENT_CLOSED, "the client disconnected.", CLOSE) from None
    if inflate is not None and (not inflate.eof or inflate.unused_data):
        raise _badly_compressed()
    return bytes(body)


async def read_upload(headers: Headers, body: bytes, field: str) -> bytes:
    """The file in this field of a multipart form."""
    kind, _, options = headers.get("content-type", "").partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"the body must be a multipart form with the file {field}.")
    if len(options) > LONGEST_BOUNDARY + 40:
        raise HTTPException(HTTPStatus.BAD_REQUEST, "the boundary of the form is too long.")

    async def stream() -> AsyncIterator[bytes]:
        yield body

    try:
        form = await MultiPartParser(headers, stream(), max_files=1, max_fields=8, max_part_size=len(body)).parse()  # type: ignore[arg-type]
    except (MultiPartException, KeyError, ValueError):
        raise HTTPException(HTTPStatus.BAD_REQUEST, "the form cannot be read.") from None
    try:
        upload = form.get(field)
        if not isinstance(upload, UploadFile):
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"the form has no file {field}.")
        return await upload.read()
    finally:
        await form.close()


def _decompressor(encoding: str) -> zlib._Decompress | None:
    if encoding.strip().lower() == "identity":
        return None
    if encoding.strip().lower() in ("gzip", "deflate"):
        return zlib.decompressobj(zlib.MAX_WBITS | 32)  # either header
    raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be sent uncompressed or with gzip.", CLOSE)


def _badly_compressed() -> HTTPException:
    return HTTPException(HTTPStatus.BAD_REQUEST, "the body is not compressed as its headers say.", CLOSE)


def _too_large(limits: Limits) -> HTTPException:
    return HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {limits.body / 1e6:g} MB.", CLOSE)
