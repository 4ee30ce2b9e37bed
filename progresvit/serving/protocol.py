"""Requests and responses: the Open Inference Protocol, version 2, for image files, and the plain upload.

The pydantic models check requests, and OpenAPI's description of the addresses is derived from them. The description of
a field is also the error that a client gets if the field is wrong; errors never repeat what a client sent.
"""

from __future__ import annotations

import binascii
import codecs
import math
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import HTTPException
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from progresvit.engine.prediction import Prediction

CLIENT_CLOSED = 499
"""Status of a request whose client disconnected. It appears in metrics only."""
MOST_VALUES = 10_000
"""The most values and keys of a JSON body, which also limits its depth."""
OUTPUTS = {
    "label": "BYTES",
    "probs": "FP32",
    "exit_round": "INT32",
    "entropy": "FP32",
    "abstained": "BOOL",
    "error": "BYTES",
}
"""Output tensors of an inference and their datatypes."""


def _decode_base64(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError("base64 must be a string.")
    return binascii.a2b_base64(text, strict_mode=True)


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a Boolean is not a number.")
    return value


def _finite_or_zero(number: float) -> float:
    """JSON has no NaN; 0 stands for it."""
    return number if math.isfinite(number) else 0.0


ImageFile = Annotated[
    bytes, PlainValidator(_decode_base64), WithJsonSchema({"type": "string", "contentEncoding": "base64"})
]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_refuse_bool)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_refuse_bool)]
Count = Annotated[int, Field(ge=1)]
FiniteOrZero = Annotated[float, AfterValidator(_finite_or_zero)]


class Parameters(BaseModel):
    """How the images of a request are answered."""

    model_config = ConfigDict(extra="forbid")

    threshold: NotNegative | None = Field(None, description="threshold must be a number of at least 0.")
    timeout: Positive | None = Field(None, description="timeout must be a number above 0.")


def _without_binary(value: Any) -> Any:
    """Triton's client asks for binary outputs by itself. The protocol allows JSON in any case."""
    if not isinstance(value, dict):
        return value or {}
    return {key: wanted for key, wanted in value.items() if key != "binary_data_output"}


class ClassifyQuery(Parameters):
    """The query of the plain upload."""

    top_k: Count | None = Field(None, description="top_k must be a whole number of at least 1.")
    """Number of classes in ``top``; by default the server's."""
    model: str | None = Field(None, description="model must be a name.")
    """Name of the model; by default the first."""


class ImageTensor(BaseModel):
    """Image files, (N,)."""

    name: Literal["image"] = Field(description="the name of the input must be image.")
    datatype: Literal["BYTES"] = Field(description="the datatype of image must be BYTES.")
    data: list[ImageFile] = Field(min_length=1, description="data must be a list of image files in base64.")
    shape: list[int] = Field(description="the shape of image must be [N], where N is the length of data.")

    @field_validator("shape", mode="before")
    @classmethod
    def _is_the_length_of_the_data(cls, shape: Any, info: ValidationInfo) -> Any:
        if "data" in info.data and shape != [len(info.data["data"])]:
            raise ValueError(f"the data have the shape [{len(info.data['data'])}].")
        return shape


class RequestedOutput(BaseModel):
    """An output tensor that the client wants."""

    name: Literal["label", "probs", "exit_round", "entropy", "abstained", "error"]


class InferRequest(BaseModel):
    """Image files, and what the client wants to know about them."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = Field(None, description="id must be a string.")
    inputs: list[ImageTensor] = Field(
        min_length=1, max_length=1, description="inputs must be a list with one tensor, image."
    )
    parameters: Annotated[Parameters, BeforeValidator(_without_binary)] = Field(
        Parameters(), description="parameters must be a JSON object."
    )
    outputs: list[RequestedOutput] | None = Field(
        None, description=f"outputs must be among {', '.join(sorted(OUTPUTS))}."
    )
    """None or empty for all."""


class ImageForm(BaseModel):
    """A form with one image file."""

    image: bytes


class TensorMetadata(BaseModel):
    """The name, the datatype and the shape of a tensor; -1 is any length."""

    name: str
    datatype: str
    shape: list[int] = [-1]


class ModelMetadata(BaseModel):
    """A model and its tensors."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata] = [TensorMetadata(name="image", datatype="BYTES")]
    outputs: list[TensorMetadata] = [TensorMetadata(name=name, datatype=kind) for name, kind in OUTPUTS.items()]


class OutputTensor(TensorMetadata):
    """One value for each image."""

    data: list[str] | list[bool] | list[int] | list[float]


class InferResponse(BaseModel):
    """The answers for the images of a request."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: str | None = None


class CandidateResponse(BaseModel):
    """One of the most probable classes."""

    model_config = ConfigDict(from_attributes=True)

    label: str | None
    index: int
    probability: float


class PredictionResponse(BaseModel):
    """The answer for one image: the fields of :class:`Prediction`.

    A withheld answer (``abstained``) has no label, index and probability; the best guesses are in ``top``.
    """

    label: str | None
    index: int | None
    probability: FiniteOrZero | None
    exit_round: int
    entropy: FiniteOrZero
    gmacs: float
    abstained: bool
    out_of_distribution: bool
    top: list[CandidateResponse]

    @classmethod
    def of(cls, prediction: Prediction, top_k: int) -> PredictionResponse:
        """The answer with ``top_k`` classes in ``top``."""
        values = {name: getattr(prediction, name) for name in cls.model_fields}
        if prediction.abstained:
            values |= {"label": None, "index": None, "probability": None}
        return cls.model_validate({**values, "top": prediction.top[:top_k]}, from_attributes=True)


class ErrorResponse(BaseModel):
    """Why a request has no answer."""

    error: str


def parse_infer(body: bytes | bytearray, *, most_images: int) -> InferRequest:
    """The checked request in a JSON body. It may take a second, in which other threads run."""
    if sum(body.count(mark) for mark in b",[{:") > MOST_VALUES:  # base64 has none of them
        raise HTTPException(HTTPStatus.BAD_REQUEST, "the body has too many values.")
    try:
        request = InferRequest.model_validate_json(body.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        first = error.errors(include_input=False, include_context=False, include_url=False)[0]
        text = explain_error(InferRequest, first["loc"], first["type"])
        if first["type"] == "json_invalid":
            text = "the body is not JSON." if body else "the body is empty."
        raise HTTPException(HTTPStatus.BAD_REQUEST, text) from None
    if len(request.inputs[0].data) > most_images:
        raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, f"a request has at most {most_images} images.")
    return request


def explain_error(model: type[BaseModel], place: Iterable[str | int], kind: str) -> str:
    """The description of the field at this place of a request, or of the nearest field around it.

    If the field is unknown (``kind`` is "extra_forbidden"), the text names the fields of that object.
    """
    text = "the body must be a JSON object."
    nested: dict[str, type[BaseModel]] = {"inputs": ImageTensor, "parameters": Parameters}
    for name in map(str, place):
        if name in model.model_fields:
            text = model.model_fields[name].description or text
            model = nested.get(name, model)
    if kind == "extra_forbidden":
        return f"unknown parameter; the parameters are {', '.join(sorted(model.model_fields))}."
    return text


def infer_response(
    predictions: Sequence[Prediction], request: InferRequest, *, model: str, version: str
) -> InferResponse:
    """The outputs of the model. If an image could not be opened, its ``exit_round`` is 0 and ``error`` says why.

    A withheld answer (``abstained``) has an empty label and the probability 0.
    """
    columns: dict[str, list[Any]] = {
        "label": [
            "" if answer.abstained else str(answer.index) if answer.label is None else answer.label
            for answer in predictions
        ],
        "probs": [0.0 if answer.abstained else _finite_or_zero(answer.probability) for answer in predictions],
        "exit_round": [prediction.exit_round for prediction in predictions],
        "entropy": [_finite_or_zero(prediction.entropy) for prediction in predictions],
        "abstained": [prediction.abstained for prediction in predictions],
        "error": [prediction.error or "" for prediction in predictions],
    }
    names = [output.name for output in request.outputs or ()] or OUTPUTS
    return InferResponse(
        model_name=model,
        model_version=version,
        outputs=[
            OutputTensor(name=name, datatype=OUTPUTS[name], shape=[len(column)], data=column)
            for name, column in columns.items()
            if name in names and (name != "error" or any(column))
        ],
        id=request.id,
    )
