"""Augmentation of batches and of single images by timm and torchvision: same maths, same distributions."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy.stats import ks_2samp
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision import transforms
from torchvision.transforms.functional import resized_crop, to_tensor

from progresvit.data.augment import gpu_augment

COUNT = 4000


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def same(ours, theirs):
    """A Kolmogorov-Smirnov test at one in ten thousand: it fails on a wrong distribution, not on bad luck."""
    return ks_2samp(np.asarray(ours), np.asarray(theirs)).pvalue > 1e-4


@pytest.mark.parametrize("size", [(224, 224), (300, 500), (90, 600)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.6, 1.0)])
def test_crops_are_drawn_as_timm_draws_them(size, scale, generator):
    height, width = size
    random.seed(0)
    image, ratio = Image.new("L", (width, height)), (3 / 4, 4 / 3)
    theirs = np.array([RandomResizedCropAndInterpolation.get_params(image, scale, ratio) for _ in range(COUNT)])
    sizes = torch.tensor([size] * COUNT)
    ours = gpu_augment.sample_crops(sizes, scale=scale, ratio=ratio, generator=generator).numpy()
    for part in range(4):  # top, left, height, width
        assert same(ours[:, part], theirs[:, part])
    assert same(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3])
    assert (ours[:, 0] + ours[:, 2]).max() <= height
    assert (ours[:, 1] + ours[:, 3]).max() <= width
    assert ours.min() >= 0


@pytest.mark.parametrize("box", [(0, 0, 64, 64), (10, 5, 30, 40), (3, 60, 1, 2), (20, 0, 40, 64)])
@pytest.mark.parametrize("resolution", [24, 64, 100])
def test_a_crop_is_resized_as_pillow_does_it(box, resolution):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    image = Image.fromarray(pixels)
    theirs = to_tensor(resized_crop(image, *box, [resolution, resolution], transforms.InterpolationMode.BICUBIC))
    batch = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
    boxes = torch.tensor([box], dtype=torch.float32)
    ours = gpu_augment.crop_and_resize(batch, boxes, torch.tensor([False]), resolution=resolution)
    assert (ours[0] - theirs).abs().mean() <= 0.5 / 255  # Pillow rounds to bytes, and clips between the directions
    top, left, height, width = box
    cut = batch[:, :, top : top + height, left : left + width].float() / 255
    exact = F.interpolate(cut, size=(resolution, resolution), mode="bicubic", antialias=True, align_corners=False)
    assert torch.allclose(ours, exact.clamp(0, 1), atol=1e-5)
    mirrored = gpu_augment.crop_and_resize(batch, boxes, torch.tensor([True]), resolution=resolution)
    assert torch.equal(mirrored, ours.flip(-1))


PIXELS = {
    "red": lambda images: images[:, 0, 0, 0],
    "green": lambda images: images[:, 1, 3, 4],
    "blue": lambda images: images[:, 2, 7, 7],
    "mean": lambda images: images.mean((1, 2, 3)),
}


def jitter(images, strengths, generator):
    return gpu_augment.change_colour(images, *gpu_augment.sample_colour(len(images), strengths, generator))


@pytest.mark.slow
def test_colour_is_jittered_as_torchvision_jitters_it(generator):
    torch.manual_seed(0)
    pixels = np.random.default_rng(1).integers(0, 256, (8, 8, 3), np.uint8)
    theirs_of, image = transforms.ColorJitter(0.4, 0.3, 0.5), to_tensor(pixels)
    theirs = torch.stack([theirs_of(image) for _ in range(COUNT)])
    ours = jitter(image.expand(COUNT, -1, -1, -1), (0.4, 0.3, 0.5), generator)
    weaker = jitter(image.expand(COUNT, -1, -1, -1), (0.3, 0.3, 0.5), generator)
    for pixel in PIXELS.values():
        assert same(pixel(ours), pixel(theirs))
    assert not same(PIXELS["mean"](weaker), PIXELS["mean"](theirs))  # the test can tell
    # In training torchvision works on Pillow's bytes, cut to whole ones after each change: one level darker on average.
    bytes_ = torch.stack([to_tensor(theirs_of(Image.fromarray(pixels))) for _ in range(COUNT)])
    for pixel in PIXELS.values():
        assert abs(pixel(ours).mean() - pixel(bytes_).mean()) < 3 / 255


def test_no_jitter_changes_nothing(generator):
    images = torch.rand(2, 3, 8, 8)
    assert torch.allclose(jitter(images, (0.0, 0.0, 0.0), generator), images, atol=1e-6)


def test_rectangles_are_erased_as_timm_erases_them(generator):
    random.seed(0)
    torch.manual_seed(0)
    erasing = RandomErasing(0.25, mode="pixel", device="cpu")
    theirs = torch.stack([erasing(torch.full((1, 32, 32), 9.0)) for _ in range(COUNT)])
    boxes = gpu_augment.sample_erasing(COUNT, 32, probability=0.25, generator=generator)
    ours = gpu_augment.erase(torch.full((COUNT, 1, 32, 32), 9.0), boxes, generator)

    def erased(images):
        return images != 9.0

    share = [erased(images).flatten(1).any(dim=1).float().mean() for images in (ours, theirs)]
    assert abs(share[0] - share[1]) < 0.04
    some = [erased(images)[erased(images).flatten(1).any(dim=1)][:, 0] for images in (ours, theirs)]
    for measure in (
        lambda masks: masks.sum(dim=(1, 2)),  # area
        lambda masks: masks.any(dim=2).sum(dim=1),  # height
        lambda masks: masks.any(dim=2).float().argmax(dim=1),  # top
        lambda masks: masks.any(dim=1).float().argmax(dim=1),  # left
    ):
        assert same(measure(some[0]), measure(some[1]))
    noise = ours[erased(ours)]
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
