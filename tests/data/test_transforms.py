import numpy as np
import pytest
import torch
from PIL import Image

from progresvit.config import preset
from progresvit.data import evaluation_transform
from progresvit.data.augment.corruption import Corruption
from progresvit.data.crop import preprocessing_hash
from progresvit.data.transforms import NamedTransform, normalise


def test_a_crop_normalised_later_is_the_crop_normalised_at_once():
    config = preset("progresvit_tiny_160_224")
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (250, 300, 3), dtype=np.uint8))
    later = normalise(NamedTransform(config)(image, "x")[None], config)[0]
    assert torch.equal(later, evaluation_transform(config)(image))


def test_a_corruption_follows_from_the_images_name():
    config = preset("progresvit_tiny_160_224")
    image = Image.new("RGB", (300, 300), (90, 120, 200))
    noisy = NamedTransform(config, Corruption("gaussian_noise", 2))
    first, again, other = noisy(image, "a"), noisy(image, "a"), noisy(image, "b")
    assert first.dtype == torch.uint8
    assert first.shape == (3, 224, 224)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, NamedTransform(config, Corruption("gaussian_noise", 3))(image, "a"))
    with pytest.raises(ValueError, match="RGB images"):
        NamedTransform(config.replace(in_channels=1, mean=(0.5,), std=(0.5,)), Corruption("fog", 1))


def test_the_preprocessing_hash_changes_with_what_decides_the_pixels_and_with_nothing_else():
    config = preset("progresvit_tiny_160_224")
    same = config.replace(num_classes=7, labels=None)
    assert preprocessing_hash(config) == preprocessing_hash(same)
    for change in ({"crop": 1.0}, {"mean": (0.5, 0.5, 0.5)}, {"std": (0.5, 0.5, 0.5)}, {"input_resolution": 256}):
        assert preprocessing_hash(config.replace(**change)) != preprocessing_hash(config), change


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "a severity from 1 to 5, such as fog/3") for text in ("fog", "fog/0", "fog/6", "fog/x")),
        ("rain/1", "unknown corruption 'rain'; .* Your own is my_module:my_corruption/3"),
        ("", "unknown corruption ''"),
    ],
)
def test_an_unknown_corruption_is_refused(text, message):
    assert Corruption.parse("fog/3") == Corruption("fog", 3)
    with pytest.raises(ValueError, match=message):
        Corruption.parse(text)


def darken(image, severity, rng):
    return image / severity


def test_a_function_of_your_own_is_a_corruption_by_its_name():
    image = Image.new("RGB", (40, 40), (90, 120, 200))
    corruption = Corruption.of(darken, 2)
    assert corruption == Corruption(f"{__name__}:darken", 2)
    assert len(corruption.source) == 64
    assert np.asarray(corruption(image, "a"))[0, 0].tolist() == [45, 60, 100]
    refused = {"at the top of a module": lambda image, severity, rng: image, "define it as corrupt": normalise}
    for reason, function in refused.items():
        with pytest.raises(ValueError, match=reason):
            Corruption.of(function, 1)
