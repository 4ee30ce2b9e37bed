"""The web page of the server: an image runs through every round, and a slider shows what a threshold gives.

The server sends each round as soon as it is computed. The page itself decides about exits, so the slider makes no
request. It loads nothing from other hosts.

Letters: C image channels, r resolution of a round, g side of its patch grid, h active heads, s a round counted from 0.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
from anyio.to_thread import run_sync
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from numpy.typing import NDArray
from PIL import Image
from starlette.types import Receive, Scope, Send

from progresvit.config import ModelConfig
from progresvit.data.crop import EvaluationCrop
from progresvit.data.prepare import Plan, Prepared
from progresvit.data.prepare import prepare as prepare_image
from progresvit.data.samples import samples_folder
from progresvit.engine.backends import check_task
from progresvit.io.model_folder import BUDGETS_FILE
from progresvit.plots import STYLE
from progresvit.routing.decide import OODRule, Threshold
from progresvit.routing.scores import OOD_SCORES, TOP, ood_score, top10_entropy
from progresvit.routing.settings import default_setting, find_setting, load_budgets, setting_names
from progresvit.serving.front.body import read_body
from progresvit.serving.service import Hold, Limits, is_image

if TYPE_CHECKING:
    from torch import Tensor

    from progresvit.model import ProgResViT

log = logging.getLogger(__name__)

FILES = {"index.html": "text/html", "style.css": "text/css", "page.css": "text/css", "page.js": "text/javascript"}
CREDITS = "CREDITS.md"
"""Authors and licences of the sample images."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
MAX_SECONDS = 120.0
"""Seconds after which a client that does not read its rounds is disconnected, so that others can be served."""
RETRY_SECONDS = 1
CLASSES = 5
"""Number of classes shown for a round."""

_HEAT = ((0.0, "#000004"), (0.25, "#57106E"), (0.5, "#BC3754"), (0.75, "#F98E09"), (1.0, "#FCFFA4"))
"""Matplotlib's inferno at five places; the server does not need matplotlib."""
_FAINT, _STRONG = 0.35, 0.8  # opacity of the colours where attention is lowest and highest


async def prepare_in_thread(content: bytes, plan: Plan) -> Prepared:
    """Decode an image file without limits of time and memory, for a server that only its owner uses."""
    return await run_sync(prepare_image, content, plan)


def page_router(
    model: ProgResViT,
    *,
    name: str,
    folder: Path | None = None,
    threshold: Threshold | None = None,
    abstain: float | None = None,
    ood: OODRule | None = None,
    limits: Limits | None = None,
    max_pixels: int | None = None,
    accepted: Callable[[], AbstractContextManager[Hold | None]] = nullcontext,
    prepare: Callable[[bytes, Plan], Awaitable[Prepared]] = prepare_in_thread,
) -> APIRouter:
    """The routes of the page: ``/`` with its files and the sample images, ``/page/model`` and ``/page/rounds``.

    The page runs one image at a time, on the device of the model; further requests are answered with 429.

    Args:
        model: A classifier in evaluation mode. The page records its blocks, so nothing else may run it meanwhile; an
            engine has folded copies of the weights.
        name: Name of the model on the page.
        folder: The model folder, with its settings and budgets; None for none.
        threshold: Start of the slider; by default the default setting of the folder.
        abstain, ood: Limits from which answers are withheld at the start, if there is a threshold.
        limits: What the server accepts; the page uses the size of a request and the time in which it must be sent.
        max_pixels: The most pixels of an image that are decoded; None for Pillow's limit.
        accepted: A context in which requests are read; it refuses them when the server is full or shuts down.
        prepare: Decodes an image file; ``Service.prepare`` does it in a process with limits.
    """
    config, limits = model.config, limits or Limits()
    check_task(config, "classification", "the page")
    if config.in_channels not in (1, 3):
        raise ValueError(f"the page shows images of 1 or 3 channels and this model takes {config.in_channels}.")
    samples = sorted(path.name for path in samples_folder().glob("*.jpg"))
    kinds = {**FILES, CREDITS: "text/plain", **dict.fromkeys(samples, "image/jpeg")}
    own = Path(__file__).parent
    files = {file: (STYLE if file == STYLE.name else own / file).read_bytes() for file in FILES}
    files |= {file: (samples_folder() / file).read_bytes() for file in (CREDITS, *samples)}
    described = describe_model(model, name=name, folder=folder, threshold=threshold, abstain=abstain, ood=ood)
    facts = json.dumps({**described, "max_bytes": limits.body, "samples": samples}, allow_nan=False)
    plan = Plan(crop=EvaluationCrop.of(config), max_pixels=max_pixels)
    router, busy = APIRouter(include_in_schema=False), threading.Lock()

    @router.get("/")
    def index() -> Response:
        return Response(files["index.html"], media_type=FILES["index.html"], headers=HEADERS)

    @router.get("/page/model")
    def model_facts() -> Response:
        return Response(facts, media_type="application/json", headers=HEADERS)

    @router.get("/page/{file}")
    def static_file(file: str) -> Response:
        if file not in files:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return Response(files[file], media_type=kinds[file], headers=HEADERS)

    @router.post("/page/rounds")
    async def rounds(request: Request) -> Response:
        try:
            with accepted() as hold:
                return await start_rounds(bytes(await read_body(request, limits, hold)))
        except HTTPException as error:
            return JSONResponse({"error": error.detail}, error.status_code, {**HEADERS, **(error.headers or {})})

    async def start_rounds(content: bytes) -> Response:
        if not busy.acquire(blocking=False):
            wait = {"Retry-After": str(RETRY_SECONDS)}
            raise HTTPException(HTTPStatus.TOO_MANY_REQUESTS, "the server is busy with another image.", wait)
        turn = ExitStack()
        turn.callback(busy.release)  # called once, however often turn is closed
        try:
            async with asyncio.timeout(limits.deadline):
                pixels = _opened(content, await prepare(content, plan), config)
        except TimeoutError:
            turn.close()
            late = f"the image was not decoded within {limits.deadline:g} seconds."
            raise HTTPException(HTTPStatus.GATEWAY_TIMEOUT, late) from None
        except BaseException:
            turn.close()
            raise
        return _RoundsResponse(_lines(model, pixels, turn), turn)

    return router


class _RoundsResponse(StreamingResponse):
    """Sends lines while a worker thread computes them; the turn ends in any case."""

    def __init__(self, lines: Iterator[str], turn: ExitStack) -> None:
        super().__init__(lines, media_type="application/x-ndjson", headers=HEADERS)
        self.turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with anyio.move_on_after(MAX_SECONDS):
                await super().__call__(scope, receive, send)
        finally:
            self.turn.close()


def describe_model(
    model: ProgResViT,
    *,
    name: str,
    folder: Path | None = None,
    threshold: Threshold | None = None,
    abstain: float | None = None,
    ood: OODRule | None = None,
) -> dict[str, Any]:
    """The facts of a model that the page shows, from ``/page/model``."""
    from progresvit.data.crop import preprocessing_hash
    from progresvit.io.weights import weights_hash

    config, weights_sha256 = model.config, weights_hash(model)
    default = default_setting(folder)
    if threshold is None and default is not None and default.router_sha256 is None:
        threshold, abstain, ood = default.threshold, default.abstain, default.ood
    frontier, note = None, f"The model has no {BUDGETS_FILE}, so averages over many images are not known."
    if folder is not None and (folder / BUDGETS_FILE).is_file():
        budgets = load_budgets(folder / BUDGETS_FILE)
        if (budgets.weights_sha256, budgets.preprocessing_sha256) == (weights_sha256, preprocessing_hash(config)):
            points = [
                {"threshold": point.threshold, "gmacs": point.gmacs, "top1": point.top1}
                for point in budgets.points
                if isinstance(point.threshold, float)
            ]
            frontier, note = {"points": points, "n": budgets.n, "data": budgets.data}, ""
        else:
            note = f"The {BUDGETS_FILE} of the model was measured with other weights or another preprocessing."
    settings = []
    for setting_name in setting_names(folder):
        try:
            settings.append((setting_name, find_setting(setting_name, folder)))
        except ValueError as error:  # edited, for example; a server may run with another one
            log.warning("the page leaves out a setting: %s", error)
    return {
        "name": name,
        "classes": config.num_classes,
        "rounds": [
            {"round": s + 1, "resolution": round_.resolution, "width": round_.width, "gmacs": gmacs}
            for s, (round_, gmacs) in enumerate(zip(config.rounds, model.gmacs()))
        ],
        "threshold": threshold[0] if isinstance(threshold, tuple) else threshold,
        "largest_threshold": math.nextafter(math.log(max(2, min(TOP, config.num_classes))), math.inf),
        "withheld": _withheld(abstain, ood),
        "settings": [
            {
                "name": setting_name,
                "threshold": setting.threshold,
                "withheld": _withheld(setting.abstain, setting.ood),
            }
            for setting_name, setting in settings
            if (setting.weights_sha256, setting.router_sha256) == (weights_sha256, None)
            and isinstance(setting.threshold, float)
        ],
        "frontier": frontier,
        "note": note,
    }


def _withheld(abstain: float | None, ood: OODRule | None) -> dict[str, Any]:
    """From which entropy answers are withheld, and below which score of an image; None for no limit."""
    return {
        "entropy": abstain if abstain is not None and math.isfinite(abstain) else None,
        "ood": None if ood is None else {"score": ood.score, "limit": ood.limit},
    }


def _opened(content: bytes, prepared: Prepared, config: ModelConfig) -> NDArray[np.uint8]:
    """The evaluation crop of a prepared image file, (C, r, r); an HTTPException if it cannot be opened."""
    if not is_image(content):
        supported = "the file is not an image of a supported format; use JPEG, PNG, WebP, GIF, BMP or TIFF."
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, supported)
    if prepared.error is not None:
        raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, "the image cannot be opened: damaged or too large.")
    pixels: NDArray[np.uint8] = prepared.data.reshape(config.in_channels, config.input_side, config.input_side)
    return pixels


def _lines(model: ProgResViT, pixels: NDArray[np.uint8], turn: ExitStack) -> Iterator[str]:
    """A line of JSON for each round, or with an error if a round fails. The turn ends before the last line."""
    previous, last = None, len(model.config.rounds) - 1
    for s in range(last + 1):
        try:
            line, previous = run_one_round(model, s, pixels, previous)
        except Exception:  # too late for another status
            log.exception("round %d of an image of the page failed", s + 1)
            turn.close()
            yield json.dumps({"error": f"the server could not compute round {s + 1}."}) + "\n"
            return
        if s == last:
            turn.close()
        yield json.dumps(line, allow_nan=False) + "\n"


def run_one_round(
    model: ProgResViT, s: int, pixels: NDArray[np.uint8], previous: Tensor | None
) -> tuple[dict[str, Any], Tensor]:
    """Run round s: the values that the page shows, and the tokens for the next round."""
    import torch

    from progresvit.analysis.attention import class_attention, visible_image
    from progresvit.analysis.hooks import recorded_calls
    from progresvit.data.transforms import normalise
    from progresvit.model.backbone import resize

    config, round_ = model.config, model.config.rounds[s]
    with torch.inference_mode(), recorded_calls(model.blocks) as calls:
        images = normalise(torch.from_numpy(pixels)[None].to(model.cls_token.device), config)  # (1, C, H, H)
        output = model.run_round(s, images.to(model.cls_token), previous)
        attention = class_attention(calls[-1])[:, 1:].mean(dim=0)  # (h, 1 + g * g) -> (g * g,)
        view = visible_image(resize(images, round_.resolution)[0], config)  # (r, r, C)
        entropy = float(top10_entropy(output.logits)[0])
        scores = {name: float(ood_score(name, output.logits)[0]) for name in OOD_SCORES}
        top = output.logits[0].float().softmax(dim=-1).topk(min(CLASSES, config.num_classes))
    finite = math.isfinite(entropy)
    g = config.grid(round_)
    labels = config.labels or [f"class {index}" for index in range(config.num_classes)]
    shown = Image.fromarray((view * 255).round().astype(np.uint8).squeeze())  # (r, r, C), from 0 to 1
    return {
        "round": s + 1,
        "resolution": round_.resolution,
        "width": round_.width,
        "gmacs": model.gmacs()[s],
        "entropy": entropy if finite else None,
        "scores": scores if finite else None,
        "top": [
            {"index": index, "label": labels[index], "probability": probability}
            for index, probability in zip(top.indices.tolist(), top.values.tolist())
            if finite
        ],
        "view": _data_url(shown),
        "attention": _data_url(attention_overlay(shown, attention.cpu().numpy().reshape(g, g))),
    }, output.tokens


def attention_overlay(image: Image.Image, attention: NDArray[np.float32]) -> Image.Image:
    """Draw attention to the patches, (g, g), as colours over the grey image, on a square-root scale."""
    strength = np.sqrt(attention / max(float(attention.max()), 1e-12)).astype(np.float32)
    smooth = Image.fromarray(strength).resize(image.size, Image.Resampling.BICUBIC)
    values = np.asarray(smooth).clip(0, 1)[..., None]  # (g, g) -> (r, r, 1)
    places = [place for place, _ in _HEAT]
    channels = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for _, colour in _HEAT]).T  # (3, 5)
    colours = np.concatenate([np.interp(values, places, channel) for channel in channels], axis=-1)  # (r, r, 3)
    opacity = _FAINT + (_STRONG - _FAINT) * values
    grey = np.asarray(image.convert("L").convert("RGB"))
    return Image.fromarray((opacity * colours + (1 - opacity) * grey).round().astype(np.uint8))


def _data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
