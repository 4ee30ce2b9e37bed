"""Multi-crop: its augmentation against Pillow's and torchvision's, its draws, and its order in both modes."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from scipy.stats import ks_2samp
from torchvision import transforms
from torchvision.transforms.functional import adjust_hue, solarize, to_tensor

from progresvit.data.augment import gpu_augment
from progresvit.data.augment.multicrop import MultiCrop, MultiCropOptions
from progresvit.data.dataset import find_images
from progresvit.data.in_memory import in_memory_for_training
from progresvit.data.sampler import EpochSampler
from progresvit.data.samples import samples_folder
from progresvit.data.sources import InMemorySource
from tests.factories import tiny_config

CPU = torch.device("cpu")
CONFIG = tiny_config(num_classes=0)
NOTHING = {"flip": 0.0, "colour_probability": 0.0, "grey": 0.0, "blur": (0.0, 0.0, 0.0), "solarise": 0.0}


@pytest.fixture(scope="module")
def photo():
    return Image.open(samples_folder() / "coffee.jpg").convert("RGB").resize((64, 64))


@pytest.fixture
def pixels(photo):
    return to_tensor(photo)[None]


def in_memory(digits, batch=6, **options):
    stored = in_memory_for_training(find_images(digits, "train"), side=32, device=CPU)
    augment = MultiCrop(CONFIG, MultiCropOptions(local_side=16, **options), device=CPU)
    return InMemorySource(stored, EpochSampler(count=len(stored), batch=batch, seed=3), augment)


# Single operations


@pytest.mark.parametrize("sigma", [0.1, 0.7, 2.0])
def test_blur_is_pillows_gaussian_away_from_the_border(photo, pixels, sigma):
    theirs = to_tensor(photo.filter(ImageFilter.GaussianBlur(sigma)))
    ours = gpu_augment.blur(pixels, torch.tensor([sigma]))[0]
    inside = (slice(None), slice(8, -8), slice(8, -8))
    assert (ours - theirs)[inside].abs().mean() < 0.01  # Pillow approximates the Gaussian by boxes
    plain = gpu_augment.blur(pixels, torch.tensor([0.0]))
    torch.testing.assert_close(plain, pixels)


def test_blur_keeps_a_constant_image_up_to_the_border():
    constant = torch.full((1, 3, 20, 20), 0.4)
    torch.testing.assert_close(gpu_augment.blur(constant, torch.tensor([2.0])), constant)


def test_solarise_equals_torchvisions_and_spares_the_others(photo, pixels):
    ours = gpu_augment.solarise(pixels.repeat(2, 1, 1, 1), torch.tensor([True, False]))
    theirs = to_tensor(solarize(photo, 128))
    torch.testing.assert_close(ours[0], theirs)
    assert torch.equal(ours[1], pixels[0])


@pytest.mark.parametrize("hue", [-0.1, 0.05, 0.3])
def test_hue_alone_turns_as_torchvision_turns_it(pixels, hue):
    factors = torch.tensor([[1.0, 1.0, 1.0, hue]])
    for order in ([0, 1, 2, 3], [3, 0, 1, 2]):
        ours = gpu_augment.change_colour(pixels, factors, torch.tensor([order]))
        torch.testing.assert_close(ours, adjust_hue(pixels, hue), atol=2e-3, rtol=0)


def test_colour_with_hue_is_drawn_and_ordered_as_torchvision_does(pixels):
    strengths, generator = (0.4, 0.4, 0.2, 0.1), torch.Generator().manual_seed(0)
    count = 600
    batch = pixels.expand(count, -1, -1, -1)
    ours = gpu_augment.change_colour(batch, *gpu_augment.sample_colour(count, strengths, generator))
    jitter = transforms.ColorJitter(*strengths)
    theirs = torch.stack([jitter(pixels[0]) for _ in range(count)])
    for channel in range(3):
        left, right = (x[:, channel].mean(dim=(1, 2)).numpy() for x in (ours, theirs))
        assert ks_2samp(left, right).pvalue > 1e-4


# Crops of a batch


def test_a_batch_has_two_global_and_several_local_crops_of_every_image(digits):
    ((batch,),) = in_memory(digits, local_crops=5).steps(0, 1)
    assert batch.global_crops.shape == (2, 6, 3, 32, 32)
    assert batch.local_crops.shape == (5, 6, 3, 16, 16)
    assert not torch.equal(*batch.global_crops)


def test_without_local_crops_their_part_is_empty(digits):
    ((batch,),) = in_memory(digits, local_crops=0).steps(0, 1)
    assert batch.local_crops.shape == (0, 6, 3, 16, 16)


def test_a_whole_crop_without_augmentation_is_the_normalised_image(digits):
    batches = in_memory(digits, global_scale=(1.0, 1.0), **NOTHING)
    whole, targets = batches.stored.images[:6], torch.zeros(6)
    crops = batches.augment(whole, torch.tensor([[32, 32]] * 6), targets, seed=0).global_crops
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CONFIG.mean, CONFIG.std))
    for view in crops:
        torch.testing.assert_close(view, (whole / 255 - mean) / std, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("option", "value", "changes"),
    [
        ("solarise", 1.0, (False, True)),
        ("blur", (1.0, 0.0, 0.0), (True, False)),
        ("blur", (0.0, 1.0, 0.0), (False, True)),
    ],
)
def test_global_crops_have_probabilities_of_their_own(digits, option, value, changes):
    plain, changed = (
        next(iter(in_memory(digits, **{**NOTHING, **options}).steps(0, 1)))[0].global_crops
        for options in ({}, {option: value})
    )
    assert tuple(not torch.equal(a, b) for a, b in zip(plain, changed)) == changes


def test_grey_crops_have_equal_channels(digits, photo):
    batches = in_memory(digits, **{**NOTHING, "grey": 1.0})
    whole = torch.from_numpy(np.array(photo)).permute(2, 0, 1)[None]
    crops = batches.augment(whole, torch.tensor([[64, 64]]), torch.zeros(1), seed=0).local_crops
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CONFIG.mean, CONFIG.std))
    red, green, blue = (crops * std + mean).unbind(2)
    torch.testing.assert_close(red, green)
    torch.testing.assert_close(red, blue)


@pytest.mark.gpu
def test_crops_on_a_gpu_compiled_or_not_are_valid_and_alike(digits):
    device = torch.device("cuda")
    stored = in_memory_for_training(find_images(digits, "train"), side=32, device=device)
    sampler, options = EpochSampler(count=len(stored), batch=6, seed=3), MultiCropOptions(local_side=16)
    made = [
        InMemorySource(stored, sampler, MultiCrop(CONFIG, options, device=device, compiled=compiled))
        for compiled in (False, True)
    ]
    eager, compiled = (next(iter(batches.steps(0, 1)))[0] for batches in made)
    torch.testing.assert_close(eager.global_crops, compiled.global_crops, atol=2e-3, rtol=0)
    torch.testing.assert_close(eager.local_crops, compiled.local_crops, atol=2e-3, rtol=0)
