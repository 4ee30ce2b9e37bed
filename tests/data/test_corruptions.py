import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from progresvit.data.augment.corruptions import CORRUPTIONS, SEVERITIES, corrupt

SURE = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")  # nothing random in them
BLURS = ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur")
GREY = Image.new("RGB", (224, 224), (128, 128, 128))
EVERY = pytest.mark.parametrize("corruption", CORRUPTIONS)


def by_severity(name, constants):
    return pytest.mark.parametrize(("severity", name), list(zip(SEVERITIES, constants)))


def values(image):
    return np.asarray(image, np.float64) / 255


def damage(image, corruption, severity, seed=0):
    return np.abs(values(corrupt(image, corruption, severity, seed)) - values(image)).mean()


def spread(image):
    """Root of the mean squared distance from the centre of light, along y and along x."""
    light = values(image).sum(-1)
    light /= light.sum()
    places = np.indices(light.shape)
    centre = (light * places).sum((1, 2), keepdims=True)
    return np.sqrt((light * (places - centre) ** 2).sum((1, 2)))


@pytest.fixture(scope="module")
def photo():
    path = Path(__file__).parents[2] / "progresvit" / "samples" / "samoyeds.jpg"
    return ImageOps.fit(Image.open(path).convert("RGB"), (224, 224), Image.Resampling.BICUBIC)


def test_the_names_are_imagenet_cs():
    assert " ".join(CORRUPTIONS) == (
        "gaussian_noise shot_noise impulse_noise defocus_blur glass_blur motion_blur zoom_blur snow frost fog "
        "brightness contrast elastic_transform pixelate jpeg_compression"
    )
    assert SEVERITIES == (1, 2, 3, 4, 5)


@EVERY
@pytest.mark.parametrize("size", [(32, 32), (160, 96), (96, 160), (224, 224), (384, 384)])
def test_an_image_of_any_size_keeps_its_form_but_not_its_pixels(photo, corruption, size):
    image = photo.resize(size)
    before = np.array(image)
    for severity in SEVERITIES if size == (224, 224) else (1, 5):
        corrupted = corrupt(image, corruption, severity, seed=3)
        assert (corrupted.size, corrupted.mode, np.asarray(corrupted).dtype) == (size, "RGB", np.uint8)
        assert np.mean(np.asarray(corrupted) != before) > 0.02
        assert np.array_equal(np.asarray(image), before)


@EVERY
def test_equal_seeds_give_equal_images_and_others_only_where_chance_plays(photo, corruption):
    first, again, other = (np.asarray(corrupt(photo, corruption, 3, seed)) for seed in (7, 7, 8))
    assert np.array_equal(first, again)
    assert np.array_equal(first, other) == (corruption in SURE)


@EVERY
def test_global_random_states_are_neither_read_nor_changed(photo, corruption):
    images = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = (random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2], torch.get_rng_state())
        images.append(np.asarray(corrupt(photo, corruption, 2, seed=5)))
        assert random.getstate() == before[0]
        assert np.random.get_state()[1].tolist() == before[1]
        assert np.random.get_state()[2] == before[2]
        assert torch.equal(torch.get_rng_state(), before[3])
    assert np.array_equal(*images)


# Snow and frost trade flakes for paleness and glass blur trades reach for rounds, so their steps need not all grow;
# fog grows finer more than thicker. From first to last they do.
@pytest.mark.parametrize("corruption", [name for name in CORRUPTIONS if name != "elastic_transform"])
def test_damage_grows_with_severity(photo, corruption):
    hurt = [damage(photo, corruption, severity) for severity in SEVERITIES]
    assert hurt[4] > 1.03 * hurt[0]
    if corruption not in ("snow", "frost", "glass_blur", "fog"):
        assert hurt == sorted(hurt)


def test_elastic_damage_grows_within_its_two_kinds(photo):
    """Severities 1 and 2 pull the whole image far, 3 to 5 ruffle it: the published steps are not one scale."""
    hurt = [
        np.mean([damage(photo, "elastic_transform", severity, seed) for seed in range(4)]) for severity in SEVERITIES
    ]
    assert hurt[0] < hurt[1]
    assert hurt[2] < hurt[3] < hurt[4]


@pytest.mark.slow
@EVERY
def test_damage_hardly_depends_on_the_size_of_the_image(photo, corruption):
    """One smooth image at two sizes: only the corruption differs."""
    smooth = photo.resize((56, 56), Image.Resampling.BOX)
    small, large = (smooth.resize((side, side), Image.Resampling.BICUBIC) for side in (160, 384))
    hurt = [np.mean([damage(image, corruption, 5, seed) for seed in range(6)]) for image in (small, large)]
    tolerance = 1.35 if corruption not in ("pixelate", "jpeg_compression") else 2.5  # blocks of 8 pixels do not scale
    assert 1 / tolerance < hurt[1] / hurt[0] < tolerance


@by_severity("deviation", (0.08, 0.12, 0.18, 0.26, 0.38))
def test_gaussian_noise_has_the_published_deviation(severity, deviation):
    noise = values(corrupt(GREY, "gaussian_noise", severity, 0)) - values(GREY)
    normal = np.random.default_rng(1).normal(0, deviation, 200_000)
    assert noise.std() == pytest.approx(np.clip(128 / 255 + normal, 0, 1).std(), rel=0.02)
    assert abs(noise.mean()) < 0.005


@by_severity("photons", (60, 25, 12, 5, 3))
def test_shot_noise_counts_the_published_photons(severity, photons):
    dark = Image.new("RGB", (224, 224), (51, 51, 51))  # far from white: hardly anything is cut off
    for image in (dark, GREY) if photons >= 25 else (dark,):
        noisy = values(corrupt(image, "shot_noise", severity, 0))
        mean = values(image).mean()
        assert noisy.mean() == pytest.approx(mean, rel=0.02)
        assert noisy.var() == pytest.approx(mean / photons, rel=0.05)


@by_severity("share", (0.03, 0.06, 0.09, 0.17, 0.27))
def test_impulse_noise_strikes_the_published_share_of_values(severity, share):
    noisy = np.asarray(corrupt(GREY, "impulse_noise", severity, 0))
    assert set(np.unique(noisy)) == {0, 128, 255}
    assert np.mean(noisy == 0) == pytest.approx(share / 2, rel=0.06)
    assert np.mean(noisy == 255) == pytest.approx(share / 2, rel=0.06)
    struck = (noisy != 128).mean(-1)
    assert np.mean((struck > 0) & (struck < 1)) > share  # channels are struck one by one


@by_severity("factor", (0.4, 0.3, 0.2, 0.1, 0.05))
def test_contrast_keeps_the_mean_and_scales_the_deviation(photo, severity, factor):
    before, after = values(photo), values(corrupt(photo, "contrast", severity, 0))
    assert after.mean((0, 1)) == pytest.approx(before.mean((0, 1)), abs=0.002)
    assert after.std((0, 1)) == pytest.approx(factor * before.std((0, 1)), abs=0.002)


@by_severity("more", (0.1, 0.2, 0.3, 0.4, 0.5))
def test_brightness_raises_only_the_value_of_hsv(photo, severity, more):
    before, after = values(photo), values(corrupt(photo, "brightness", severity, 0))
    value = before.max(-1)
    assert after.max(-1) == pytest.approx(np.minimum(value + more, 1), abs=0.003)
    saturation, saturation_after = (1 - pixels.min(-1) / pixels.max(-1) for pixels in (before, after))
    assert saturation_after[value > 0.2] == pytest.approx(saturation[value > 0.2], abs=0.02)


def test_black_brightens_to_grey():
    assert corrupt(Image.new("RGB", (4, 4)), "brightness", 2, 0).getpixel((0, 0)) == (51, 51, 51)


@by_severity("share", (0.6, 0.5, 0.4, 0.3, 0.25))
def test_pixelate_leaves_the_published_number_of_blocks(severity, share):
    ramp = np.zeros((96, 160, 3), np.uint8)
    ramp[..., 0], ramp[..., 1] = np.arange(160), 2 * np.arange(96)[:, None]
    blocks = np.asarray(corrupt(Image.fromarray(ramp), "pixelate", severity, 0))
    assert len(np.unique(blocks[..., 0])) == int(160 * share)
    assert len(np.unique(blocks[..., 1])) == int(96 * share)


@by_severity("quality", (25, 18, 15, 10, 7))
def test_jpeg_is_pillows_own_round_trip(photo, severity, quality):
    file = io.BytesIO()
    photo.save(file, "JPEG", quality=quality)
    assert np.array_equal(np.asarray(corrupt(photo, "jpeg_compression", severity, 0)), np.asarray(Image.open(file)))


@pytest.mark.parametrize("corruption", [*BLURS, "contrast", "elastic_transform", "pixelate"])
@pytest.mark.parametrize("size", [(224, 224), (32, 48)])
def test_a_uniform_image_stays_as_it_is(corruption, size):
    image = Image.new("RGB", size, (128, 77, 201))
    for severity in SEVERITIES:
        assert np.array_equal(np.asarray(corrupt(image, corruption, severity, 0)), np.asarray(image))


@by_severity("radius", (3, 4, 6, 8, 10))
def test_defocus_makes_a_disk_of_the_published_radius(severity, radius):
    edge = np.zeros((224, 224, 3), np.uint8)
    edge[:, 112:] = 255
    row = np.asarray(corrupt(Image.fromarray(edge), "defocus_blur", severity, 0))[112, :, 0]
    reached = np.flatnonzero((row > 2) & (row < 253))
    assert reached.size == pytest.approx(2 * radius, abs=2)


@pytest.mark.parametrize("corruption", ["defocus_blur", "glass_blur", "motion_blur"])
def test_a_point_spreads_twice_as_far_in_an_image_twice_as_large(corruption):
    def reach(side, width):
        pixels = np.zeros((side, side, 3), np.uint8)
        pixels[side // 2 - width : side // 2 + width, side // 2 - width : side // 2 + width] = 255
        image = Image.fromarray(pixels)
        before = (spread(image) ** 2).sum()
        after = [(spread(corrupt(image, corruption, 5, seed)) ** 2).sum() for seed in range(3)]
        return np.sqrt(np.mean(after) - before)

    assert reach(448, 16) == pytest.approx(2 * reach(224, 8), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(("corruption", "tolerance"), [("snow", 0.06), ("fog", 0.01), ("frost", 0.08)])
def test_weather_is_twice_as_coarse_in_an_image_twice_as_large(corruption, tolerance):
    def likeness(side):
        """Correlation of pixels a 56th of the side apart, down and across."""
        correlations, step = [], side // 56
        for seed in range(12):
            layer = values(corrupt(Image.new("RGB", (side, side), (40, 40, 40)), corruption, 4, seed)).mean(-1)
            layer -= layer.mean()
            correlations.append([(layer[step:] * layer[:-step]).mean(), (layer[:, step:] * layer[:, :-step]).mean()])
            correlations[-1] /= layer.var()
        return np.mean(correlations, 0)

    assert likeness(448) == pytest.approx(likeness(224), abs=tolerance)


@pytest.mark.parametrize(("severity", "pulled", "ruffled"), [(2, 24.8, 3.6), (5, 2.46, 1.98)])
@pytest.mark.parametrize("side", [160, 384])
def test_elastic_transform_moves_pixels_as_far_in_all_sizes(severity, pulled, ruffled, side):
    """A ramp tells where each pixel came from; a plane through it, what was pulled, and the rest, what was ruffled."""
    inner = (slice(side // 4, -side // 4),) * 2
    places = np.stack(np.mgrid[:side, :side], -1) / (side - 1)  # (H, W, 2) from 0 to 1
    ramp = np.dstack((places, np.zeros((side, side))))
    image, here = Image.fromarray((255 * ramp).round().astype(np.uint8)), places[inner].reshape(-1, 2)
    plane = np.column_stack((here, np.ones(len(here))))
    moved = []
    for seed in range(16):
        came = values(corrupt(image, "elastic_transform", severity, seed))[(*inner, slice(2))].reshape(-1, 2)
        fitted = plane @ np.linalg.lstsq(plane, came, rcond=None)[0]
        moved.append((((fitted - here) ** 2).mean(), ((came - fitted) ** 2).mean()))
    assert 224 * np.sqrt(np.mean(moved, 0)) == pytest.approx((pulled, ruffled), rel=0.15)


def test_motion_blur_has_a_direction(photo):
    """The blurred image changes least along the motion, and that way lies within 45 degrees of level."""
    for seed in range(4):
        change_y, change_x = np.gradient(values(corrupt(photo, "motion_blur", 5, seed)).mean(-1))
        (small, large), directions = np.linalg.eigh(
            [[(a * b).mean() for b in (change_y, change_x)] for a in (change_y, change_x)]
        )
        assert large > 3 * small
        down, right = directions[:, 0]
        assert abs(np.degrees(np.arctan(down / right))) < 50


def test_glass_blur_moves_light_about_but_loses_none():
    pixels = np.zeros((224, 224, 3), np.uint8)
    pixels[64:160, 64:160] = 255
    square = Image.fromarray(pixels)
    assert values(corrupt(square, "glass_blur", 5, 0)).mean() == pytest.approx(values(square).mean(), rel=0.002)


def test_zoom_blur_keeps_the_centre_and_smears_the_border(photo):
    change = np.abs(values(corrupt(photo, "zoom_blur", 5, 0)) - values(photo)).mean(-1)
    assert change[104:120, 104:120].mean() < 0.5 * change[:16].mean()


@pytest.mark.parametrize("corruption", ["snow", "frost"])
def test_snow_and_frost_brighten_a_dark_image_in_places(corruption):
    night = Image.new("RGB", (224, 224), (20, 20, 20))
    layer = values(corrupt(night, corruption, 3, 0)).mean(-1)
    assert layer.min() > 20 / 255
    assert np.percentile(layer, 98) > np.percentile(layer, 20) + 0.3


def test_snow_falls_in_streaks_more_steep_than_level():
    night = Image.new("RGB", (224, 224), (20, 20, 20))
    layers = [values(corrupt(night, "snow", 3, seed)).mean(-1) for seed in range(8)]
    down, across = (np.abs(np.diff(layers, axis=axis)).mean() for axis in (1, 2))
    assert down < 0.8 * across


def test_frost_is_bluish():
    red, green, blue = values(corrupt(GREY, "frost", 3, 0)).mean((0, 1))
    assert red < green < blue


def test_fog_is_smooth_and_grey_and_flattens_the_image(photo):
    for severity in SEVERITIES:
        fog = values(corrupt(Image.new("RGB", (224, 224), (255, 255, 255)), "fog", severity, 0))
        assert np.ptp(fog, axis=-1).max() == 0
        assert fog.std() > 0.05
        assert np.abs(np.diff(fog, axis=0)).mean() < 0.05 * fog.std()
    before, after = values(photo), values(corrupt(photo, "fog", 1, 0))
    fine = [np.abs(np.diff(pixels, axis=1)).mean() for pixels in (before, after)]
    assert fine[1] == pytest.approx(fine[0] / (1 + 1.5), rel=0.15)  # the image keeps one part in 1 + strength


@pytest.mark.parametrize(
    ("mode", "corruption", "severity", "remedy"),
    [
        ("RGB", "fogg", 1, "unknown corruption 'fogg'; did you mean 'fog'"),
        ("RGB", "?", 1, "unknown corruption '\\?'; choose one of gaussian_noise, "),
        ("RGB", "fog", 0, "unknown severity 0; use one of 1"),
        ("RGB", "fog", 6, "unknown severity 6; use one of 1"),
        ("L", "fog", 1, r"mode L .*use image.convert\('RGB'\)"),
        ("RGBA", "fog", 1, r"mode RGBA .*use image.convert\('RGB'\)"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(mode, corruption, severity, remedy):
    with pytest.raises(ValueError, match=remedy):
        corrupt(Image.new(mode, (8, 8)), corruption, severity, 0)
