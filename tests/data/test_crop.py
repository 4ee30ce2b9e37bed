"""The evaluation crop against timm's transform, byte for byte."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from timm.data import create_transform

from progresvit.config import preset
from progresvit.data import evaluation_transform
from progresvit.data.crop import crop
from progresvit.data.decode import ImageError
from tests.data.files import noise
from tests.factories import tiny_config

SIDES = (1, 2, 7, 31, 32, 33, 35, 36, 37, 64, 101, 240)
CROPS = (1.0, 0.999, 0.95, 0.9, 0.875, 0.7, 0.5, 0.31, 0.07)


def square(side, share):
    return tiny_config(input_resolution=side, crop=share)


def timm_transform(config, **options):
    side = (config.in_channels, config.input_side, config.input_side)
    settings = {"interpolation": "bicubic", "crop_pct": config.crop, "mean": config.mean, "std": config.std}
    return create_transform(input_size=side, is_training=False, **settings, **options)


def assert_same(image, config):
    expected = timm_transform(config, normalize=False)(image).numpy()
    pixels = crop(image, config)
    assert pixels.dtype == np.uint8
    assert pixels.shape == expected.shape
    assert np.array_equal(pixels, expected), (image.size, config.crop, config.input_side)
    assert pixels.flags.c_contiguous


@pytest.mark.slow
@pytest.mark.parametrize("share", CROPS)
def test_the_crop_is_timms_byte_for_byte(share):
    for width, height in itertools.product(SIDES, SIDES):
        assert_same(noise(width, height), square(33, share))


@pytest.mark.parametrize("side", [32, 35, 48])
def test_the_crop_for_other_sides_is_timms(side):
    for share, (width, height) in itertools.product(CROPS, [(33, 50), (50, 33), (3, 2), (211, 97), (side, side)]):
        assert_same(noise(width, height), square(side, share))


@pytest.mark.parametrize("name", ["progresvit_small_192_240", "progresvit_small_160_384", "progresvit_tiny_160_224"])
def test_the_crop_of_the_presets_is_timms(name):
    for width, height in [(500, 375), (375, 500), (640, 427), (60, 80), (267, 267), (1999, 31)]:
        assert_same(noise(width, height), preset(name))


def test_a_grey_image_keeps_its_one_channel():
    config = preset("progresvit_tiny_160_224", in_channels=1, mean=(0.5,), std=(0.5,))
    assert_same(noise(300, 200, bands=1), config)
    assert crop(noise(300, 200, bands=1), config).shape == (1, 224, 224)


def test_the_normalised_crop_is_timms_bit_for_bit():
    config = preset("progresvit_tiny_160_224")
    transform = pickle.loads(pickle.dumps(evaluation_transform(config)))  # it is sent to worker processes
    for size in [(500, 375), (60, 80), (224, 224)]:
        assert torch.equal(transform(noise(*size)), timm_transform(config)(noise(*size)))


def test_an_image_that_is_too_thin_to_be_resized_is_refused():
    with pytest.raises(ImageError, match="too long and thin"):
        crop(noise(60_000, 1), preset("progresvit_tiny_160_224"))
