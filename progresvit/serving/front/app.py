"""The HTTP application: Open Inference Protocol v2, a plain upload, and metrics.

Errors never repeat what a client sent. No address loads or unloads a model, and the server never fetches an image.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from http import HTTPStatus
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from progresvit import __version__
from progresvit.engine.engine import Engine
from progresvit.engine.prediction import Prediction
from progresvit.serving.front.body import read_body, read_upload
from progresvit.serving.metrics import ServerMetrics, metrics_text
from progresvit.serving.protocol import (
    CLIENT_CLOSED,
    ClassifyQuery,
    ErrorResponse,
    ImageForm,
    InferRequest,
    InferResponse,
    ModelMetadata,
    PredictionResponse,
    explain_error,
    infer_response,
    parse_infer,
)
from progresvit.serving.service import UNSUPPORTED, Hold, Limits

WHEN = {
    HTTPStatus.BAD_REQUEST: "The request is not as described here.",
    HTTPStatus.UNAUTHORIZED: "The server has a token, and the request does not.",
    HTTPStatus.NOT_FOUND: "There is no such model.",
    HTTPStatus.REQUEST_TIMEOUT: "The request was not sent in time.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The request has too many bytes.",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "The image is not of a supported format, or the body of no supported encoding.",
    HTTPStatus.UNPROCESSABLE_ENTITY: "The image is damaged or too large, or there are too many images.",
    HTTPStatus.TOO_MANY_REQUESTS: "The server is full; try again after the seconds of the header Retry-After.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "The server has failed; its log says why.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The server is shutting down.",
    HTTPStatus.GATEWAY_TIMEOUT: "There is no answer within the time limit.",
}
"""Why a request has no answer."""
FAILURES = tuple(WHEN)
T = TypeVar("T")
log = logging.getLogger("progresvit.serving")


class Answering(Protocol):
    """Answers requests: :class:`Service`, or a replica of Ray Serve."""

    name: str
    """Name of the model in addresses and responses."""
    version: str
    engine: Engine
    limits: Limits
    metrics: ServerMetrics
    top_k: int
    """Number of classes in ``top`` of an answer, unless the request asks for another; 1 for an empty ``top``."""

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused because the server ends."""
        ...

    def accepted(self) -> AbstractContextManager[Hold | None]:
        """A context in which a request is read and answered; entering it may refuse the request."""
        ...

    async def classify(
        self, contents: Sequence[bytes], *, threshold: float | None = None, timeout: float | None = None
    ) -> list[Prediction]:
        """A prediction for each image file. Cancelling the task cancels the images."""
        ...


def make_app(
    service: Answering | Sequence[Answering],
    *,
    token: str | None = None,
    page: APIRouter | None = None,
    has_metrics: bool = True,
    hosts: Sequence[str] | None = None,
    reset_audit: Callable[[], None] | None = None,
) -> FastAPI:
    """The application.

    Args:
        service: Answers the requests; one for each model. The first answers requests that name no model.
        token: Requests must have the header ``Authorization: Bearer TOKEN``, except requests for health and the page.
        page: Routes of the page for people.
        has_metrics: Whether the application has the address ``/metrics``.
        hosts: Names by which clients may call the server, except for health; None for any.
        reset_audit: Called for ``POST /audit/reset``, an address that only servers with a token have.
    """
    app = FastAPI(
        title="ProgResViT",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if token is None else None,
        redirect_slashes=False,
    )
    guarded = [] if token is None else [Depends(_token_check(token))]
    listed = list(service) if isinstance(service, Sequence) else [service]
    first, services = listed[0], {item.name: item for item in listed}
    assert len(services) == len(listed), "two models have the same name"
    app.include_router(_health(first))
    for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        app.include_router(_model(services), prefix=prefix, dependencies=guarded)
    app.include_router(_others(services, first, has_metrics), dependencies=guarded)
    if token is not None and reset_audit is not None:
        app.add_api_route("/audit/reset", _resetter(reset_audit), methods=["POST"], dependencies=guarded)
    if page is not None:
        app.include_router(page)
    if hosts is not None:
        app.add_middleware(_CheckHost, hosts=hosts)
    app.add_middleware(_Measure, metrics=first.metrics)
    app.exception_handler(AnyHTTPException)(_on_http_error)
    app.exception_handler(RequestValidationError)(_on_invalid_query)
    return app


def _health(service: Answering) -> APIRouter:
    router = APIRouter()

    @router.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @router.get("/v2/health/ready", responses=_answers(HTTPStatus.SERVICE_UNAVAILABLE))
    async def ready(response: Response) -> dict[str, bool]:
        response.status_code = _ready_status(service)
        return {"ready": not service.is_draining}

    return router


def _find(services: Mapping[str, Answering], name: str) -> Answering:
    if name not in services:
        raise HTTPException(HTTPStatus.NOT_FOUND, "there is no such model.")
    return services[name]


def _model(services: Mapping[str, Answering]) -> APIRouter:
    """The addresses of a model, with or without its version."""

    async def check_model(model: str, version: str | None = None) -> None:
        if version not in (None, _find(services, model).version):
            raise HTTPException(HTTPStatus.NOT_FOUND, "there is no such model.")

    router = APIRouter(dependencies=[Depends(check_model)], responses=_answers(HTTPStatus.NOT_FOUND))

    @router.get("", responses=_answers())
    async def metadata(model: str) -> ModelMetadata:
        service = services[model]
        platform = f"progresvit_{service.engine.backend}"
        return ModelMetadata(name=service.name, versions=[service.version], platform=platform)

    @router.get("/ready", responses=_answers(HTTPStatus.SERVICE_UNAVAILABLE))
    async def ready(model: str, response: Response) -> dict[str, str | bool]:
        response.status_code = _ready_status(services[model])
        return {"name": model, "ready": not services[model].is_draining}

    @router.post(
        "/infer",
        openapi_extra=_body("application/json", InferRequest),
        response_model_exclude_none=True,
        responses=_answers(*FAILURES),
    )
    async def infer(model: str, request: Request) -> InferResponse:
        service = services[model]
        with service.accepted() as hold:
            body = await read_body(request, service.limits, hold)
            inference = await asyncio.to_thread(parse_infer, body, most_images=service.limits.images)
            del body
            answers = service.classify(inference.inputs[0].data, **dict(inference.parameters))
            predictions = await _unless_disconnected(request.receive, answers)
        if len(predictions) == 1:
            _check_opened(predictions[0])
        return infer_response(predictions, inference, model=service.name, version=service.version)

    return router


def _others(services: Mapping[str, Answering], first: Answering, has_metrics: bool) -> APIRouter:
    """Metadata of the server, the upload of one image, and metrics."""
    router = APIRouter()

    @router.get("/v2", responses=_answers())
    async def server() -> dict[str, str | list[str]]:
        return {"name": "progresvit", "version": __version__, "extensions": []}

    @router.get("/v2/models", responses=_answers())
    async def models() -> dict[str, list[str]]:
        """The names of the models, the first one first."""
        return {"models": list(services)}

    @router.post("/classify", openapi_extra=_body("multipart/form-data", ImageForm), responses=_answers(*FAILURES))
    async def classify(request: Request, query: Annotated[ClassifyQuery, Query()]) -> PredictionResponse:
        """One image, as the file ``image`` of a form."""
        service = first if query.model is None else _find(services, query.model)
        top_k = query.top_k
        if top_k is None:
            top_k = service.top_k if service.top_k > 1 else 0
        elif top_k > service.engine.top_k:
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"top_k must be at most {service.engine.top_k}.")
        with service.accepted() as hold:
            content = read_upload(request.headers, await read_body(request, service.limits, hold), "image")
            answers = service.classify([content], threshold=query.threshold, timeout=query.timeout)
            (prediction,) = await _unless_disconnected(request.receive, answers)
        _check_opened(prediction)
        return PredictionResponse.of(prediction, top_k)

    if has_metrics:

        @router.get("/metrics", responses=_answers())
        async def metrics() -> Response:
            text = metrics_text({name: service.metrics for name, service in services.items()})
            return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def _resetter(reset: Callable[[], None]) -> Callable[[], Coroutine[Any, Any, dict[str, bool]]]:
    async def reset_audit() -> dict[str, bool]:
        """Forget the evidence of the audit, and end an alarm."""
        reset()
        return {"reset": True}

    return reset_audit


def _ready_status(service: Answering) -> HTTPStatus:
    return HTTPStatus.SERVICE_UNAVAILABLE if service.is_draining else HTTPStatus.OK


def _answers(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """The answers of an address besides the usual one, for OpenAPI."""
    return {
        status.value: {"model": ErrorResponse, "description": WHEN[status]}
        for status in sorted({HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, *statuses})
    }


def _body(kind: str, model: type[BaseModel]) -> dict[str, Any]:
    """The body of a request for OpenAPI; the routes read it themselves, within limits."""
    schema = model.model_json_schema()

    def inline(part: Any) -> Any:
        """Replace references by what they name: OpenAPI would resolve them from the top of its own document."""
        if isinstance(part, list):
            return [inline(item) for item in part]
        if not isinstance(part, dict):
            return part
        if reference := part.get("$ref"):
            part = {**schema["$defs"][reference.rpartition("/")[2]], **part}
        return {key: inline(value) for key, value in part.items() if key not in ("$ref", "$defs")}

    return {"requestBody": {"required": True, "content": {kind: {"schema": inline(schema)}}}}


class _CheckHost:
    """Refuses requests to other hosts, and from pages of other hosts.

    A page of another site can give its name the address of this server, and can send forms anywhere.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app, self.hosts = app, {host.lower().strip("[]") for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith("/v2/health/"):
            headers = Headers(scope=scope)
            origin = headers.get("origin")  # browsers send it with every POST
            names = {_host_name(headers.get("host", ""))}
            names |= set() if origin is None else {_host_name(origin.partition("://")[2])}
            if not names <= self.hosts:
                message = "the server does not answer to this host name; the owner can add it to its hosts."
                await JSONResponse({"error": message}, HTTPStatus.BAD_REQUEST)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _host_name(host: str) -> str:
    """A host without its port."""
    return (host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]).lower()


class _Measure:
    """Counts and times requests, and hides unexpected errors from clients."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        self.metrics.pending.inc()
        try:
            await self.app(scope, receive, send_and_note)
        except Exception:
            log.exception("a request failed")
            if not status:
                response = JSONResponse({"error": "internal error."}, HTTPStatus.INTERNAL_SERVER_ERROR)
                await response(scope, receive, send_and_note)
        finally:
            self.metrics.pending.dec()
            status = status or CLIENT_CLOSED  # cancelled before it had a status
            self.metrics.requests.labels(str(status)).inc()
            self.metrics.duration.observe(time.monotonic() - started)
            if status >= HTTPStatus.BAD_REQUEST:
                reason = "client_closed" if status == CLIENT_CLOSED else HTTPStatus(status).name.lower()
                self.metrics.failures.labels(reason).inc()


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled if the client disconnects first."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(CLIENT_CLOSED, "the client disconnected.")
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()


def _token_check(token: str) -> Callable[[Request], Coroutine[Any, Any, None]]:
    async def check(request: Request) -> None:  # not a plain function: FastAPI would run it in a thread
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(value.strip().encode(), token.encode()):
            raise HTTPException(HTTPStatus.UNAUTHORIZED, "a valid token is needed.", {"WWW-Authenticate": "Bearer"})

    return check


def _check_opened(prediction: Prediction) -> None:
    if prediction.error == UNSUPPORTED:
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the image is not of a supported format.")
    if prediction.error is not None:
        raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, "the image cannot be opened: damaged or too large.")


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, AnyHTTPException)
    cause: BaseException | None = error
    while cause is not None:  # its frames hold the images, in cycles that only the garbage collector would find
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__context__
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _on_invalid_query(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return JSONResponse({"error": explain_error(ClassifyQuery, first["loc"], first["type"])}, HTTPStatus.BAD_REQUEST)
