"""Images on a GPU: nvJPEG decodes JPEGs, and one kernel crops and resizes a whole batch.

Files that nvJPEG does not decode are decoded on the CPU, image by image, and cropped with the others.

Letters: B images, r side of the crop.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data.crop import Box, EvaluationCrop
from progresvit.data.prepare import Form, Plan, Prepared, prepare

if TYPE_CHECKING:
    from progresvit.data.crop_kernel import Placed

DecodeMode = Literal["auto", "gpu", "cpu"]
"""Where JPEGs are decoded: auto is the GPU if it can decode them."""

BoxesOf = Callable[[Mapping[int, tuple[int, int]]], list[Box]]
"""From the width and height of images, by position, to their boxes in the same order."""


def plan_for(config: BaseConfig, device: torch.device, mode: str = "auto", *, shrink: bool = True) -> Plan:
    """The part of the work that the CPU does for the images of a model on this device.

    Args:
        config: The model's config.
        device: Where the images are needed.
        mode: auto, gpu or cpu; with gpu, a GPU that cannot decode is an error.
        shrink: Whether large images may be decoded at a smaller scale.
    """
    if mode not in ("auto", "gpu", "cpu"):
        raise ValueError(f"decode must be auto, gpu or cpu, got {mode!r}.")
    missing = _missing_for_crops(config, device)
    if mode == "gpu":
        missing = missing or _missing_for_jpegs()
        if missing:
            raise ValueError(f"decode=gpu is not possible here: {missing}; use decode=auto or decode=cpu.")
    crops = missing is None
    jpegs = crops and mode != "cpu" and _missing_for_jpegs() is None
    return Plan(crop=EvaluationCrop.of(config), pixels=crops, jpeg=jpegs, shrink=shrink)


def _missing_for_crops(config: BaseConfig, device: torch.device) -> str | None:
    """Why the kernel cannot crop; None if it can."""
    if device.type != "cuda":
        return f"the model runs on {device.type}"
    if config.in_channels != 3:
        return f"the model takes images of {config.in_channels} channels"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def _missing_for_jpegs() -> str | None:
    """Why nvJPEG cannot be used; None if it can."""
    import progresvit._torchvision  # noqa: F401

    has = hasattr(torch.ops.image, "decode_jpegs_cuda")
    return None if has else "this build of torchvision has no nvJPEG"


@dataclass(frozen=True)
class DeviceImages:
    """The readable images of a group, on the device."""

    pixels: Tensor
    """(B, 3, r, r) bytes."""
    errors: dict[int, str]
    """Why the other images are unreadable, by their position in the group."""


class GpuDecoder:
    """Turns prepared images into batches on a GPU, on its own stream. For one thread at a time.

    The caller's current stream waits for the batch.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()

    def crop(
        self, images: Sequence[Prepared], pool: Executor | None = None, *, at_a_time: int | None = None
    ) -> DeviceImages:
        """The evaluation crop of each image; the threads of the pool decode the files on which nvJPEG fails.

        If memory runs out, fewer images are decoded at a time.
        """
        size = min(len(images), at_a_time or len(images))
        parts: list[DeviceImages] = []
        done = 0
        while done < len(images):
            group = images[done : done + size]
            try:
                parts.append(self.render(group, None, side=self.plan.crop.side, pool=pool))
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                size //= 2
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
                continue
            done += len(group)
        return _joined(parts)

    def render(
        self,
        images: Sequence[Prepared],
        boxes_of: BoxesOf | None,
        *,
        side: int,
        clip: bool = False,
        flip: Sequence[bool] | None = None,
        pool: Executor | None = None,
    ) -> DeviceImages:
        """A section of each image, resized: (B, 3, side, side).

        Args:
            images: The images.
            boxes_of: Returns the section of each image, from its width and height; None: the evaluation crop.
            side: Side of the result.
            clip: Crop first, then resize, as random crops are made.
            flip: Whether each image is mirrored.
            pool: Threads that decode the files on which nvJPEG fails.
        """
        from progresvit.data.crop_kernel import crop_placed

        with self._lock, nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            decoded = self._decode_jpegs(images, pool)
            uploaded = self._upload(decoded)  # memory that the kernel reads
            placed = _place(decoded, uploaded)
            positions = sorted(placed)
            boxes = [decoded[position].box for position in positions]
            if boxes_of is not None:
                boxes = boxes_of({position: placed[position].upright().size for position in positions})
            flips = None if flip is None else [flip[position] for position in positions]
            in_order = [placed[position] for position in positions]
            pixels = crop_placed(in_order, boxes, side, device=self.device, clip=clip, flip=flips)
            if self._stream is not None:
                # nvJPEG writes on its own stream, so memory that it gets next must not be read here any more
                self._stream.synchronize()
        if self._stream is not None:
            pixels.record_stream(torch.cuda.current_stream(self.device))
        errors = [(position, image.error) for position, image in enumerate(decoded) if image.form == Form.ERROR]
        return DeviceImages(pixels, {position: reason or "cannot be decoded" for position, reason in errors})

    def _decode_jpegs(self, images: Sequence[Prepared], pool: Executor | None) -> list[Prepared]:
        """Decode JPEGs to tensors (3, H, W) on the device; the CPU prepares the files on which nvJPEG fails."""
        result = list(images)
        jpegs = [position for position, image in enumerate(images) if image.form == Form.JPEG]
        if not jpegs:
            return result
        contents = [images[position].data for position in jpegs]
        for position, tensor in zip(jpegs, _decode_or_none(contents, self.device), strict=True):
            if tensor is not None:
                result[position] = replace(images[position], data=tensor)
        failed = [position for position in jpegs if result[position] is images[position]]
        again = partial(prepare, plan=replace(self.plan, jpeg=False))
        files = [images[position].data.tobytes() for position in failed]
        for position, image in zip(failed, (map if pool is None else pool.map)(again, files)):
            result[position] = image
        return result

    def _upload(self, images: Sequence[Prepared]) -> dict[int, Tensor]:
        """Pixels and crops on the device, by position, in one copy."""
        here = [position for position, image in enumerate(images) if image.form in (Form.PIXELS, Form.CROP)]
        if not here:
            return {}
        flat = [np.asarray(images[position].data).reshape(-1) for position in here]
        ends = np.cumsum([len(values) for values in flat]).tolist()
        staged = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        np.concatenate(flat, out=staged.numpy())
        sent = staged.to(self.device, non_blocking=True)
        return {position: sent[end - len(values) : end] for position, values, end in zip(here, flat, ends)}


def _place(decoded: Sequence[Prepared], uploaded: Mapping[int, Tensor]) -> dict[int, Placed]:
    """Where the readable images are in the device's memory, by position."""
    from progresvit.data.crop_kernel import Placed

    placed: dict[int, Placed] = {}
    for position, image in enumerate(decoded):
        if image.form == Form.JPEG:
            placed[position] = Placed.planar(image.data, image.orientation)
        elif image.form == Form.CROP:
            width, height = image.size
            placed[position] = Placed.planar(uploaded[position].view(3, height, width))
        elif image.form == Form.PIXELS:
            placed[position] = Placed.interleaved(uploaded[position].data_ptr(), image.size)
    return placed


def _joined(parts: Sequence[DeviceImages]) -> DeviceImages:
    """Several groups of images as one group."""
    if len(parts) == 1:
        return parts[0]
    errors: dict[int, str] = {}
    before = 0
    for part in parts:
        errors.update({before + position: reason for position, reason in part.errors.items()})
        before += len(part.pixels) + len(part.errors)
    return DeviceImages(torch.cat([part.pixels for part in parts]), errors)


def _decode_or_none(contents: Sequence[Any], device: torch.device) -> list[Tensor | None]:
    """Decode JPEGs; None where nvJPEG fails. It fails on a whole batch, which is then divided in two."""
    try:
        return list(_nvjpeg(contents, device))
    except RuntimeError:  # out of memory is one
        if len(contents) == 1:
            return [None]
        half = len(contents) // 2
        return [*_decode_or_none(contents[:half], device), *_decode_or_none(contents[half:], device)]


def _nvjpeg(contents: Sequence[Any], device: torch.device) -> list[Tensor]:
    """Decode JPEGs to RGB, (3, H, W) each."""
    from torchvision.io import ImageReadMode, decode_jpeg

    inputs = [torch.from_numpy(np.require(content, requirements="W")) for content in contents]
    decoded: list[Tensor] = decode_jpeg(inputs, mode=ImageReadMode.RGB, device=device)
    return decoded
