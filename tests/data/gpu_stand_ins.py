"""Stand-ins for nvJPEG and the crop kernel, so that what is around them runs on a CPU."""

import ctypes
import io

import numpy as np
import torch
from PIL import Image, ImageOps

TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_with_pillow(contents, device):
    """As nvJPEG: RGB as stored, without rotation; an error for the whole batch if one is damaged."""
    tensors = []
    for content in contents:
        try:
            image = Image.open(io.BytesIO(np.asarray(content).tobytes())).convert("RGB")
        except OSError as error:
            raise RuntimeError("nvJPEG failed") from error
        tensors.append(torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous())
    return tensors


def crop_with_pillow(images, boxes, side, *, device, clip=False, flip=None):
    results = []
    for number, (image, box) in enumerate(zip(images, boxes)):
        width, height = image.size
        memory = np.frombuffer((ctypes.c_uint8 * (3 * width * height)).from_address(image.address), np.uint8)
        dx, dy, dc = image.step
        stored = np.lib.stride_tricks.as_strided(memory, (height, width, 3), (dy, dx, dc))
        upright = Image.fromarray(np.ascontiguousarray(stored))
        if image.orientation in TURNS:
            upright = upright.transpose(TURNS[image.orientation])
        if clip:
            upright, box = upright.crop(box), None
        resized = upright.resize((side, side), Image.Resampling.BICUBIC, box=box)
        results.append(np.asarray(ImageOps.mirror(resized) if flip is not None and flip[number] else resized))
    if not results:
        return torch.empty(0, 3, side, side, dtype=torch.uint8)
    return torch.from_numpy(np.stack(results)).permute(0, 3, 1, 2).contiguous()


def install(monkeypatch):
    """Let the CPU pass for a GPU that decodes."""
    from progresvit.data import crop_kernel, gpu_decode

    monkeypatch.setattr(gpu_decode, "_nvjpeg", decode_with_pillow)
    monkeypatch.setattr(crop_kernel, "crop_placed", crop_with_pillow)
    monkeypatch.setattr(gpu_decode, "_missing_for_crops", lambda config, device: None)
    monkeypatch.setattr(gpu_decode, "_missing_for_jpegs", lambda: None)
