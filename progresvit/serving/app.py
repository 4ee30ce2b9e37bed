"""The HTTP application: Open Inference Protocol v2, a plain upload, and metrics.

Errors have a generic text. There are no addresses to load or unload models, and images are never fetched.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from progresvit import __version__
from progresvit.engine.prediction import Prediction
from progresvit.serving.body import read_body, read_upload
from progresvit.serving.metrics import Metrics
from progresvit.serving.protocol import (
    CLIENT_CLOSED,
    INPUT,
    OUTPUTS,
    RequestError,
    infer_response,
    parse_infer,
    parse_number,
    prediction_response,
)
from progresvit.serving.service import UNSUPPORTED, Limits

T = TypeVar("T")
log = logging.getLogger("progresvit.serving")


class Answering(Protocol):
    """What answers the requests: :class:`Service`, or replicas of it."""

    name: str
    """Of the model, in addresses and responses."""
    version: str
    limits: Limits
    metrics: Metrics

    @property
    def backend(self) -> str: ...

    @property
    def is_ready(self) -> bool: ...

    def accepted(self) -> AbstractContextManager[None]:
        """Within it a request is read and answered; entering may refuse it."""
        ...

    async def classify(
        self, contents: Sequence[bytes], *, threshold: float | None = None, timeout: float | None = None
    ) -> list[Prediction]:
        """A prediction for each image file. Cancelling the task cancels the images."""
        ...


def make_app(
    service: Answering, *, token: str | None = None, page: APIRouter | None = None, has_metrics: bool = True
) -> FastAPI:
    """The application.

    Args:
        service: Answers the requests.
        token: Requests must have the header ``Authorization: Bearer TOKEN``, except those for health and for the page.
        page: The routes of the page for people.
        has_metrics: With ``/metrics``.
    """
    app = FastAPI(
        title="ProgResViT",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if token is None else None,
        redirect_slashes=False,
    )
    app.add_middleware(_Measure, metrics=service.metrics)
    app.include_router(_health(service))
    guarded = [] if token is None else [Depends(_token_check(token))]
    app.include_router(_protocol(service), dependencies=guarded)
    app.include_router(_plain(service), dependencies=guarded)
    if has_metrics:
        app.include_router(_metrics(service.metrics), dependencies=guarded)
    if page is not None:
        app.include_router(page)
    app.exception_handler(RequestError)(_on_request_error)
    app.exception_handler(RequestValidationError)(_on_invalid)
    app.exception_handler(HTTPException)(_on_http_error)
    return app


def _health(service: Answering) -> APIRouter:
    router = APIRouter()

    @router.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @router.get("/v2/health/ready")
    async def ready() -> JSONResponse:
        return JSONResponse({"ready": service.is_ready}, HTTPStatus.OK if service.is_ready else 503)

    return router


def _protocol(service: Answering) -> APIRouter:
    router = APIRouter()

    def check_model(model: str, version: str | None) -> None:
        if model != service.name or version not in (None, service.version):
            raise RequestError(HTTPStatus.NOT_FOUND, "there is no such model.")

    @router.get("/v2")
    async def server() -> dict[str, Any]:
        return {"name": "progresvit", "version": __version__, "extensions": []}

    @router.get("/v2/models/{model}")
    @router.get("/v2/models/{model}/versions/{version}")
    async def metadata(model: str, version: str | None = None) -> dict[str, Any]:
        check_model(model, version)
        return {
            "name": service.name,
            "versions": [service.version],
            "platform": f"progresvit_{service.backend}",
            "inputs": [INPUT],
            "outputs": OUTPUTS,
        }

    @router.get("/v2/models/{model}/ready")
    @router.get("/v2/models/{model}/versions/{version}/ready")
    async def ready(model: str, version: str | None = None) -> JSONResponse:
        check_model(model, version)
        return JSONResponse({"name": service.name, "ready": service.is_ready}, 200 if service.is_ready else 503)

    @router.post("/v2/models/{model}/infer", openapi_extra=_JSON_BODY)
    @router.post("/v2/models/{model}/versions/{version}/infer", openapi_extra=_JSON_BODY)
    async def infer(request: Request, model: str, version: str | None = None) -> dict[str, Any]:
        check_model(model, version)
        with service.accepted():
            wanted = parse_infer(await read_body(request, service.limits), most_images=service.limits.images)
            predictions = await _unless_disconnected(
                request.receive, service.classify(wanted.contents, threshold=wanted.threshold, timeout=wanted.timeout)
            )
        if len(predictions) == 1:
            _check_opened(predictions[0].error)
        return infer_response(predictions, wanted, model=service.name, version=service.version)

    return router


def _plain(service: Answering) -> APIRouter:
    router = APIRouter()

    @router.post("/classify", openapi_extra=_FORM_BODY)
    async def classify(request: Request, threshold: str | None = None, timeout: str | None = None) -> dict[str, Any]:
        """One image, as the file ``image`` of a form."""
        limits = {
            "threshold": parse_number(threshold, "threshold", allow_zero=True),
            "timeout": parse_number(timeout, "timeout"),
        }
        with service.accepted():
            content = await read_upload(request.headers, await read_body(request, service.limits), "image")
            (prediction,) = await _unless_disconnected(request.receive, service.classify([content], **limits))
        _check_opened(prediction.error)
        return prediction_response(prediction)

    return router


def _metrics(metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    async def text() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


class _Measure:
    """Counts and times requests, and hides unexpected errors from clients."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        self.metrics.pending.inc()
        try:
            await self.app(scope, receive, watched)
        except Exception:
            log.exception("a request failed")
            if not status:
                response = JSONResponse({"error": "internal error."}, HTTPStatus.INTERNAL_SERVER_ERROR)
                await response(scope, receive, watched)
        finally:
            self.metrics.pending.dec()
            status = status or CLIENT_CLOSED  # it was cancelled
            self.metrics.requests.labels(str(status)).inc()
            self.metrics.duration.observe(time.monotonic() - started)
            if status >= HTTPStatus.BAD_REQUEST:
                self.metrics.failures.labels(_reason(status)).inc()


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result; if the client disconnects first, the work is cancelled."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestError(CLIENT_CLOSED, "the client disconnected.")
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()


def _token_check(token: str) -> Callable[[Request], Coroutine[Any, Any, None]]:
    async def check(request: Request) -> None:  # not a plain function: FastAPI would run it in a thread
        given = request.headers.get("authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise RequestError(HTTPStatus.UNAUTHORIZED, "a valid token is needed.", {"WWW-Authenticate": "Bearer"})

    return check


def _check_opened(error: str | None) -> None:
    if error == UNSUPPORTED:
        raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the image is not of a supported format.")
    if error is not None:
        raise RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, "the image cannot be opened: damaged or too large.")


async def _on_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse({"error": error.reason}, error.status, error.headers)


async def _on_invalid(_: Request, __: Exception) -> Response:
    return JSONResponse({"error": "a parameter of the request is invalid."}, HTTPStatus.BAD_REQUEST)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": HTTPStatus(error.status_code).phrase}, error.status_code, error.headers)


def _reason(status: int) -> str:
    """A word for the metric."""
    return "client_closed" if status == CLIENT_CLOSED else HTTPStatus(status).name.lower()


def _body(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema}}}}


_JSON_BODY = _body(
    "application/json",
    {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": {
                "type": "object",
                "properties": {
                    "threshold": {"type": "number", "minimum": 0},
                    "timeout": {"type": "number", "exclusiveMinimum": 0},
                },
            },
            "inputs": {
                "type": "array",
                "minItems": 1,
                "maxItems": 1,
                "items": {
                    "type": "object",
                    "required": ["name", "datatype", "shape", "data"],
                    "properties": {
                        "name": {"const": "image"},
                        "datatype": {"const": "BYTES"},
                        "shape": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 1},
                        "data": {"type": "array", "items": {"type": "string", "contentEncoding": "base64"}},
                    },
                },
            },
        },
    },
)
_FORM_BODY = _body(
    "multipart/form-data",
    {"type": "object", "required": ["image"], "properties": {"image": {"type": "string", "format": "binary"}}},
)
