"""Images of every kind: the right answer, or an error for that image alone."""

import asyncio
import io
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from progresvit.engine import Engine
from progresvit.model import ProgResViT
from tests.data.test_prepare import saved


@pytest.fixture
def engine(small_config, randomize):
    return Engine(randomize(ProgResViT(small_config)), 0.5)


@pytest.fixture
def photo():
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return small.resize((80, 60), Image.Resampling.BICUBIC)


def alike(one, other):
    """The same but for the last digits, which depend on how many images are computed at a time."""
    near = pytest.approx(other.probability, abs=1e-5, nan_ok=True) == one.probability
    return near and (one.index, one.exit_round, one.error) == (other.index, other.exit_round, other.error)


def test_bad_images_have_their_reason_and_harm_no_other(engine, photo, tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60 * 80)
    good = saved(photo, "PNG")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "text.jpg").write_text("no image")
    cases = [
        (good, None),
        (saved(photo, "JPEG")[:-300], "damaged or truncated"),
        (good[:-100], "damaged or truncated"),
        (saved(photo.resize((120, 90)), "PNG"), "too large to be opened safely"),
        (saved(photo.resize((800, 600)), "PNG"), "too large to be opened safely"),
        (b"", "not an image"),
        (tmp_path / "empty.jpg", "not an image"),
        (str(tmp_path / "text.jpg"), "not an image"),
        (tmp_path / "none.jpg", "there is no such file"),
        (tmp_path / "folder", "a folder"),
        ("https://example.org/cat.jpg", "download it"),
        ("a\0b", "cannot be opened"),
        (Image.new("RGB", (0, 10)), "no pixels"),
        (Image.new("RGB", (1, 4000)), "too long and thin"),
    ]
    images = [one for case, _ in cases for one in (case, photo)]
    found = engine.classify(images)
    (expected,) = engine.classify([photo])
    assert expected.error is None
    assert all(alike(one, expected) for one in found[1::2])
    for one, (_, reason) in zip(found[::2], cases):
        if reason is None:
            assert alike(one, expected)
        else:
            assert reason in one.error
            assert (one.index, one.label, one.exit_round, one.gmacs, one.abstained) == (-1, None, 0, 0.0, True)
    assert all(map(alike, engine.stream([images]), found))
    assert engine.classify([b"", b""])[1].error


def test_cameras_and_scanners_get_the_answer_of_the_plain_image(engine, photo):
    (expected,) = engine.classify([photo])
    turned = photo.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter to the right for viewing
    assert engine.classify([saved(turned, "PNG", exif=exif)]) == [expected]
    rotated_photo = Image.open(io.BytesIO(saved(turned, "PNG", exif=exif)))
    assert engine.classify([rotated_photo]) == [expected]
    frames = [photo.quantize(), Image.new("P", photo.size)]
    animated = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert engine.classify([animated]) == engine.classify([frames[0].convert("RGB")])
    clear = photo.convert("RGBA")
    clear.putalpha(0)
    assert engine.classify([saved(clear, "PNG")]) == engine.classify([Image.new("RGB", photo.size, "white")])
    cmyk = photo.convert("CMYK")
    assert engine.classify([saved(cmyk, "TIFF")]) == engine.classify([cmyk.convert("RGB")])
    grey = np.asarray(photo.convert("L"))
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    assert engine.classify([saved(deep, "PNG")]) == engine.classify([Image.fromarray(grey).convert("RGB")])


def test_decoding_threads_leave_the_warning_filters_alone(engine, photo):
    before = list(warnings.filters)
    engine.classify([saved(photo, "PNG")] * 300)
    assert list(warnings.filters) == before


def test_one_open_file_may_be_given_many_times(engine, photo, tmp_path):
    photo.save(tmp_path / "a.jpg")
    for _ in range(5):
        found = engine.classify([Image.open(tmp_path / "a.jpg")] * 8)
        assert [one.error for one in found] == [None] * 8


def test_one_path_or_pil_image_gives_one_prediction(engine, photo, tmp_path):
    photo.save(tmp_path / "a.png")
    (expected,) = engine.classify([photo])
    for image in (photo, tmp_path / "a.png", str(tmp_path / "a.png")):
        assert engine.classify(image) == expected
        assert asyncio.run(engine.aclassify(image)) == expected
    assert asyncio.run(engine.aclassify([photo])) == [expected]
    assert engine.classify("missing.jpg").error is not None


def test_anything_that_can_be_walked_through_will_do(engine, photo):
    expected = engine.classify([photo] * 3)
    assert engine.classify(photo for _ in range(3)) == expected
    with pytest.raises(ValueError, match="put this one into brackets"):
        engine.classify(saved(photo, "PNG"))
    pixels = np.zeros((2, 3, 32, 32), np.uint8)
    assert engine.classify(pixels[:, ::-1]) == engine.classify(pixels)


def test_a_grey_model_takes_images_and_another_number_of_channels_arrays_alone(small_config, randomize, photo):
    grey = ProgResViT(small_config.replace(in_channels=1, mean=(0.5,), std=(0.5,)))
    (found,) = Engine(randomize(grey), 0.5).classify([photo])
    assert found.error is None
    two = ProgResViT(small_config.replace(in_channels=2, mean=(0.5,) * 2, std=(0.5,) * 2))
    with pytest.raises(ValueError, match="takes 2; give it arrays"):
        Engine(randomize(two), 0.5).classify([photo])


def test_arrays_files_and_buffers_give_the_answer_of_the_image(engine, photo, tmp_path):
    (expected,) = engine.classify([photo])
    content, pixels = saved(photo, "PNG"), np.asarray(photo)
    (tmp_path / "a.png").write_bytes(content)
    with open(tmp_path / "a.png", "rb") as file:
        images = [pixels, io.BytesIO(content), bytearray(content), memoryview(content), file]
        found = engine.classify(images)
    assert all(alike(one, expected) for one in found)
    batch = np.stack([pixels] * 3)
    assert all(alike(one, expected) for one in [*engine.classify(batch), *engine.stream([batch])])
    future = engine.submit(batch)
    batch[:] = 0  # submit has a copy
    assert all(alike(one, expected) for one in future.result())
    grey = np.asarray(photo.convert("L"))
    assert engine.classify([grey, grey[..., None]])[0].probability == pytest.approx(
        engine.classify([photo.convert("L")])[0].probability, abs=1e-5
    )


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([np.zeros((3, 40, 40), np.uint8)], r"of shape \(3, 40, 40\); image.transpose\(1, 2, 0\) puts"),
        ([np.zeros((40, 50, 3), np.float32)], r"an array of float32 of shape \(40, 50, 3\); \(255 \* image\)"),
        ([np.full((40, 50), np.nan)], r"an array of float64 of shape \(40, 50\); \(255 \* image\)"),
        ([np.zeros((40, 50, 3), np.int64)], r"an array of int64 of shape \(40, 50, 3\)\.$"),
        ([torch.zeros(40, 50, 3, dtype=torch.uint8)], r"a tensor of torch.uint8 of shape \(40, 50, 3\); image.cpu\(\)"),
        ([np.zeros((0, 50, 3), np.uint8)], r"of shape \(0, 50, 3\)"),
        (np.zeros((40, 50, 3), np.uint8), r"put this one of shape \(40, 50, 3\) into brackets"),
        (np.zeros((2, 3, 40, 50), np.uint8), r"not uint8 of shape \(2, 3, 40, 50\)"),
        (np.zeros((2, 40, 50, 3), np.float32), r"not float32 of shape \(2, 40, 50, 3\)"),
        (io.BytesIO(b"content"), "into brackets"),
        ([io.StringIO("text")], 'mode "rb"'),
        ([7], "not int"),
        ([Image.new("RGB", (40, 40)), None], "not NoneType"),
        (None, "classify takes a list of images, not NoneType"),
    ],
)
def test_other_values_than_images_are_refused_with_their_shape(engine, images, message):
    with pytest.raises(ValueError, match=message):
        engine.classify(images)


def test_the_limit_of_pixels_is_an_option_of_the_engine(small_config, randomize, photo):
    model = randomize(ProgResViT(small_config))
    contents = [saved(photo.resize((800, 600)), "JPEG"), saved(photo, "PNG")]
    large, small = Engine(model, 0.5, max_pixels=4_799).classify(contents)
    assert "even at 1/8" in large.error
    assert "(80 x 60 pixels, the limit is 4,799); a larger max_pixels=… allows more" in small.error
    assert [one.error for one in Engine(model, 0.5, max_pixels=7_500).classify(contents)] == [None, None]
    few, more = (Engine(model, 0.5, max_pixels=limit).identity() for limit in (4_799, 7_500))
    assert {key for key in few if few[key] != more[key]} == {"max_pixels"}  # no run continues the other's files
    assert "max_pixels" not in Engine(model, 0.5).identity()
