"""The crop kernel against Pillow. Without a GPU it runs in Triton's interpreter, in a fresh process."""

import importlib.util
import io
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from progresvit.data.crop import EvaluationCrop
from tests.data.files import noise, rotated
from tests.factories import tiny_config
from tests.interpreter import interpret, report

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

CONFIG = tiny_config(resolutions=(8, 8), crop=0.9)
BICUBIC = Image.Resampling.BICUBIC


def check_crops(device):
    """Every orientation, planar and interleaved, in one batch of images of different sizes."""
    from progresvit.data.crop_kernel import Placed, crop_placed

    images, boxes, expected, held = [], [], [], []
    for orientation in range(1, 9):
        image = noise(9 + orientation, 12)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(rotated(image, orientation, "PNG"))))
        held.append(torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy()).to(device))
        images.append(Placed.planar(held[-1], orientation))
        boxes.append(EvaluationCrop.of(CONFIG).box(upright.size))
        expected.append(EvaluationCrop.of(CONFIG)(upright))
    held.append(torch.from_numpy(np.asarray(upright).copy()).to(device))
    images.append(Placed.interleaved(held[-1].data_ptr(), upright.size))
    boxes.append(boxes[-1])
    expected.append(expected[-1])
    crops = crop_placed(images, boxes, 8, device=torch.device(device)).cpu().numpy()
    difference = np.abs(crops.astype(int) - np.stack(expected))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.005


def check_random_crops(device):
    """Sections that are cropped first and then resized, mirrored, enlarged and reduced by different factors."""
    from progresvit.data.crop_kernel import Placed, crop_placed

    image = noise(20, 14)
    flat = torch.from_numpy(np.array(image)).to(device)
    sections = [(3, 2, 17, 12), (0, 0, 20, 14), (10, 1, 13, 13), (7, 7, 8, 8)]
    flips = [False, True, True, False]
    images = [Placed.interleaved(flat.data_ptr(), (20, 14))] * len(sections)
    crops = crop_placed(images, sections, 6, device=torch.device(device), clip=True, flip=flips).cpu().numpy()
    for result, section, flip in zip(crops, sections, flips):
        part = image.crop(section)
        resized = part.resize((6, part.height), BICUBIC).resize((6, 6), BICUBIC)  # first the rows, then the columns
        resized = ImageOps.mirror(resized) if flip else resized
        assert np.abs(result.astype(int) - np.asarray(resized).transpose(2, 0, 1)).max() <= 1


def check_nothing(device):
    from progresvit.data.crop_kernel import crop_placed

    assert crop_placed([], [], 8, device=torch.device(device)).shape == (0, 3, 8, 8)


CHECKS = {"crops": check_crops, "random crops": check_random_crops, "nothing": check_nothing}


def run_checks():
    """In the interpreter's process."""
    report({name: partial(check, "cpu") for name, check in CHECKS.items()})


@pytest.fixture(scope="module")
def interpreted():
    return interpret(__name__)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("name", CHECKS)
def test_the_kernel_in_the_interpreter_gives_pillows_bytes(interpreted, name):
    assert interpreted[name] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_the_kernel_on_a_gpu_gives_pillows_bytes(name):
    CHECKS[name]("cuda")
