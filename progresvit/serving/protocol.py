"""Requests and responses of the Open Inference Protocol, version 2, for one input: image files.

The tensor ``image`` has the datatype BYTES and the shape [N]; its data are N image files in base64.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from progresvit.engine.prediction import Prediction

INPUT = {"name": "image", "datatype": "BYTES", "shape": [-1]}
OUTPUTS = [
    {"name": "label", "datatype": "BYTES", "shape": [-1]},
    {"name": "probs", "datatype": "FP32", "shape": [-1]},
    {"name": "exit_round", "datatype": "INT32", "shape": [-1]},
    {"name": "entropy", "datatype": "FP32", "shape": [-1]},
    {"name": "error", "datatype": "BYTES", "shape": [-1]},
]


CLIENT_CLOSED = 499
"""Status in metrics of a request whose client disconnected; nobody receives it."""


class RequestError(Exception):
    """A request that cannot be answered: the status of the response, and a text for the client."""

    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers or {}


@dataclass(frozen=True)
class InferRequest:
    """Image files, and what the client wants of them."""

    contents: list[bytes]
    id: str | None = None
    outputs: frozenset[str] | None = None
    """Names of the outputs; None for all."""
    threshold: float | None = None
    timeout: float | None = None


def parse_infer(body: bytes, *, most_images: int) -> InferRequest:
    """An infer request, checked."""
    given = _parse_json(body)
    _check(isinstance(given, dict), "the body is a JSON object.")
    identity, inputs = given.get("id"), given.get("inputs")
    _check(identity is None or (isinstance(identity, str) and _is_text(identity)), "id is a string.")
    _check(isinstance(inputs, list) and len(inputs) == 1, "inputs is a list with one tensor, image.")
    parameters = given.get("parameters") or {}
    _check(isinstance(parameters, dict), "parameters is a JSON object.")
    return InferRequest(
        contents=_parse_image_tensor(inputs[0], most_images),
        id=identity,
        outputs=_parse_outputs(given.get("outputs")),
        threshold=parse_number(parameters.get("threshold"), "threshold", allow_zero=True),
        timeout=parse_number(parameters.get("timeout"), "timeout"),
    )


def parse_number(value: Any, name: str, *, allow_zero: bool = False) -> float | None:
    """A number that a client gives; None if there is none."""
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    least = "of 0 or more" if allow_zero else "above 0"
    _check(math.isfinite(number) and (number > 0 or (allow_zero and number == 0)), f"{name} is a number {least}.")
    return number


def infer_response(
    predictions: Sequence[Prediction], request: InferRequest, *, model: str, version: str
) -> dict[str, Any]:
    """The outputs of the model. Where an image could not be opened, ``exit_round`` is 0 and ``error`` says why."""
    columns: list[list[Any]] = [
        [prediction.label if prediction.label is not None else str(prediction.index) for prediction in predictions],
        [_finite(prediction.probability) for prediction in predictions],
        [prediction.exit_round for prediction in predictions],
        [_finite(prediction.entropy) for prediction in predictions],
        [prediction.error or "" for prediction in predictions],
    ]
    outputs = [
        {**output, "shape": [len(predictions)], "data": column}
        for output, column in zip(OUTPUTS, columns, strict=True)
        if (request.outputs is None or output["name"] in request.outputs) and (output["name"] != "error" or any(column))
    ]
    found = {"model_name": model, "model_version": version, "outputs": outputs}
    return found if request.id is None else {**found, "id": request.id}


def prediction_response(prediction: Prediction) -> dict[str, Any]:
    """The answer for one image as a JSON object."""
    return {
        "label": prediction.label,
        "index": prediction.index,
        "probability": _finite(prediction.probability),
        "exit_round": prediction.exit_round,
        "entropy": _finite(prediction.entropy),
        "gmacs": prediction.gmacs,
        "abstained": prediction.abstained,
        "out_of_distribution": prediction.out_of_distribution,
        "top": [
            {"label": candidate.label, "index": candidate.index, "probability": candidate.probability}
            for candidate in prediction.top
        ],
    }


def _parse_json(body: bytes) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    _check(bool(body), "the body is empty.")
    try:
        return json.loads(body, parse_constant=refuse)  # NaN and Infinity are not JSON
    except (ValueError, RecursionError):
        raise RequestError(HTTPStatus.BAD_REQUEST, "the body is not JSON.") from None


def _parse_image_tensor(tensor: Any, most_images: int) -> list[bytes]:
    _check(isinstance(tensor, dict) and tensor.get("name") == "image", "the input is a tensor with the name image.")
    _check(tensor.get("datatype") == "BYTES", "the datatype of image is BYTES.")
    shape, data = tensor.get("shape"), tensor.get("data")
    _check(isinstance(data, list) and bool(data), "data is a list of image files in base64.")
    _check(isinstance(shape, list) and shape == [len(data)], f"the shape of image is [{len(data)}], as long as data.")
    if len(data) > most_images:
        raise RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, f"a request has at most {most_images} images.")
    return [_decode_base64(content) for content in data]


def _decode_base64(content: Any) -> bytes:
    _check(isinstance(content, str), "data is a list of image files in base64.")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(HTTPStatus.BAD_REQUEST, "data is a list of image files in base64.") from None


def _parse_outputs(outputs: Any) -> frozenset[str] | None:
    if outputs is None:
        return None
    names = {str(output["name"]) for output in OUTPUTS}
    asked = [output.get("name") if isinstance(output, dict) else None for output in _as_list(outputs)]
    _check(
        isinstance(outputs, list) and all(isinstance(name, str) and name in names for name in asked),
        f"outputs are among {', '.join(sorted(names))}.",
    )
    return frozenset(asked) or None  # type: ignore[arg-type]  # checked


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_text(text: str) -> bool:
    """JSON can escape halves of characters, which cannot be sent back."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check(is_right: bool, text: str) -> None:
    if not is_right:
        raise RequestError(HTTPStatus.BAD_REQUEST, text)


def _finite(number: float) -> float:
    """JSON has no NaN; 0 stands for it."""
    return number if math.isfinite(number) else 0.0
