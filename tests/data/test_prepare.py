"""What is prepared of an image file: JPEG bytes for a GPU, pixels, or the crop."""

import io
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from progresvit.data.crop import EvaluationCrop
from progresvit.data.dataset import Entry, find_images, find_unlabelled
from progresvit.data.decode import ImageError, decode, is_decoded_by_rows, open_header, shrink_on_load
from progresvit.data.prepare import Form, Plan, UnreadImage, prepare
from progresvit.data.samples import samples_folder
from tests.data.files import photo, png_of, rotated, saved
from tests.factories import tiny_config

CONFIG = tiny_config(crop=0.9)
CUT = EvaluationCrop.of(CONFIG)
CROP, PIXELS = Plan(crop=CUT), Plan(crop=CUT, pixels=True)
JPEG = Plan(crop=CUT, pixels=True, jpeg=True)


@pytest.mark.parametrize("size", [(80, 60), (60, 80), (33, 33), (500, 40), (7, 9), (1, 1), (37, 1000)])
def test_the_section_of_the_crop_is_the_crop_up_to_rounding(size):
    image = photo(*size)
    section = CUT(image, CUT.box(image.size))
    difference = np.abs(section.astype(int) - CUT(image))
    assert difference.max() <= 2
    assert (difference > 0).mean() < 0.01


def test_the_box_of_the_crop_is_inside_of_the_image():
    for width, height in [(1, 1), (3, 1000), (1000, 3), (248, 248), (500, 375)]:
        left, top, right, bottom = CUT.box((width, height))
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        assert right - left == pytest.approx(bottom - top, rel=0.05)


def test_large_jpegs_are_decoded_at_a_smaller_scale_that_is_enough():
    with Image.open(samples_folder() / "tabby.jpg") as sample:
        content = saved(sample.resize((1000, 700)), quality=95)
    image = open_header(content)
    shrink_on_load(image, (50, 35))
    assert image.size == (125, 88)
    same = open_header(saved(photo(1000, 700), "PNG"))
    shrink_on_load(same, (50, 35))
    assert same.size == (1000, 700)
    made = prepare(content, CROP)
    assert made.form == Form.CROP
    assert np.abs(made.data.astype(int) - CUT(decode(content))).mean() < 3
    assert np.array_equal(prepare(saved(photo(), quality=95), CROP).data, CUT(decode(saved(photo(), quality=95))))
    assert prepare(content, PIXELS).size == (125, 88)  # the crop is made at a scale of 50 x 35
    assert prepare(saved(photo(100, 100)), PIXELS).size == (100, 100)  # 50 x 50 would be enough, but not with a margin
    assert prepare(content, Plan(crop=CUT, pixels=True, shrink=False)).size == (1000, 700)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_rotated_files_are_upright_or_say_how_they_are_stored(orientation):
    content = rotated(photo(), orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert np.array_equal(prepare(content, PIXELS).data, np.asarray(upright))
    for_gpu = prepare(content, JPEG)
    assert (for_gpu.form, for_gpu.size, for_gpu.orientation) == (Form.JPEG, (80, 60), orientation)
    assert for_gpu.data.tobytes() == content


def test_the_gpu_gets_whole_baseline_jpegs_only():
    image = photo()
    whole = saved(image, quality=90)
    assert prepare(whole, JPEG).form == Form.JPEG
    assert prepare(whole + b"\0\0\n", JPEG).form == Form.JPEG
    assert prepare(saved(photo(mode="L")), JPEG).form == Form.JPEG
    others = {
        "progressive": saved(image, progressive=True),
        "CMYK": saved(photo(mode="CMYK")),
        "PNG": saved(image, "PNG"),
        "WebP named .jpg": saved(image, "WEBP"),
        "GIF": saved(image, "GIF", save_all=True, append_images=[photo(mode="RGB").rotate(90)]),
        "small": saved(photo(15, 40)),
        "16 bits": saved(Image.fromarray(np.full((40, 50), 40000, np.uint16)), "PNG"),
    }
    for name, content in others.items():
        made = prepare(content, JPEG)
        assert made.form == Form.PIXELS, name
        assert np.array_equal(made.data, np.asarray(decode(content))), name
    assert "truncated" in prepare(whole[: len(whole) // 2], JPEG).error


def test_what_does_not_fit_is_cropped_or_reduced():
    content = saved(photo(300, 200), "PNG")
    assert prepare(content, PIXELS, 300 * 200 * 3).form == Form.PIXELS
    assert prepare(content, PIXELS, 300 * 200 * 3 - 1).form == Form.CROP
    assert prepare(saved(photo(300, 200)), JPEG, 100).form == Form.CROP
    reduced = prepare(content, Plan(crop=CUT, pixels=True, shrink=False), 20_000)
    assert (reduced.form, reduced.size) == (Form.PIXELS, (75, 50))


def test_every_problem_has_its_reason(tmp_path):
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "größe ‐ 1.jpg").write_bytes(saved(photo()))
    for request, reason in [
        (tmp_path / "none.jpg", "there is no such file"),
        (tmp_path, "a folder"),
        (tmp_path / "empty.jpg", "not an image"),
        (Entry(str(tmp_path / "none.jpg"), "none.jpg"), "there is no such file"),
        (UnreadImage("the disk is gone"), "the disk is gone"),
        (b"no image", "not an image"),
        ("a\0b", "cannot be opened"),
    ]:
        made = prepare(request, JPEG)
        assert made.form == Form.ERROR
        assert reason in made.error
    assert prepare(tmp_path / "größe ‐ 1.jpg", JPEG).form == Form.JPEG


def test_a_header_of_50000_by_50000_pixels_is_refused_without_decoding():
    content = png_of(50_000, 50_000, depth=8, colour_type=2, rows=b"\0" * 100)
    for plan in (CROP, JPEG):
        assert "too large to be opened safely" in prepare(content, plan).error


def test_a_decoder_without_memory_is_the_images_problem(monkeypatch):
    def no_memory(self):
        raise MemoryError

    content = saved(photo(), "PNG")
    monkeypatch.setattr(Image.Image, "load", no_memory)
    assert "too large for the memory" in prepare(content, CROP).error


def test_a_jpeg_above_the_limit_is_decoded_at_a_smaller_scale():
    content = saved(photo(800, 600))
    whole, small = prepare(content, PIXELS), prepare(content, replace(PIXELS, shrink=False, max_pixels=50_000))
    assert whole.error is None
    assert small.size == (200, 150)  # 1/4 has 30,000 pixels, 1/2 has 120,000
    assert (
        "even at 1/8 of its size (800 x 600 pixels, the limit is 1,000)"
        in prepare(content, replace(CROP, max_pixels=1_000)).error
    )


def test_a_jpeg_that_needs_memory_for_all_its_coefficients_counts_in_full():
    progressive = saved(photo(800, 600), progressive=True)
    sequential = saved(photo(800, 600))
    assert is_decoded_by_rows(open_header(sequential), sequential)
    assert not is_decoded_by_rows(open_header(progressive), progressive)
    error = prepare(progressive, replace(CROP, max_pixels=50_000)).error
    assert error.endswith("a larger max_pixels=… allows more")
    assert prepare(progressive, replace(CROP, max_pixels=480_000)).error is None


def test_a_higher_limit_than_pillows_is_for_other_formats_too(monkeypatch):
    content = saved(photo(200, 100), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5_000)
    assert "max_pixels=…" in prepare(content, PIXELS).error
    assert prepare(content, replace(PIXELS, max_pixels=20_000)).data.shape == (100, 200, 3)


@pytest.mark.parametrize("kind", ["TIFF", "WEBP"])
def test_formats_with_a_limit_of_their_own_say_that_the_image_is_too_large(monkeypatch, kind):
    content = saved(photo(200, 100), kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5_000)
    assert prepare(content, replace(PIXELS, max_pixels=20_000)).error.endswith("convert it to another format")


def test_a_photo_of_108_megapixels_is_read_at_a_reduced_scale():
    content = saved(Image.new("L", (12_000, 9_000), 90))
    made = prepare(content, CROP)
    assert made.error is None
    assert set(made.data.ravel()) == {90}
    reduced = decode(content, reduce=True)
    assert reduced.size == (6_000, 4_500)
    with pytest.raises(ImageError, match="12,000 x 9,000 pixels"):
        decode(content)


def test_a_heic_file_without_its_plug_in_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.setattr(metadata, "requires", lambda name: ["pillow-heif>=1; extra == 'heic'"])
    error = prepare(b"\0\0\0\x18ftypheic" + bytes(40), CROP).error
    assert error == "a HEIC image, and pillow-heif is not installed; run: pip install 'pillow-heif>=1'"


def test_the_plug_in_for_heic_is_registered_when_it_is_needed(tmp_path, monkeypatch):
    pillow_heif = pytest.importorskip("pillow_heif")
    monkeypatch.setattr(Image, "ID", list(Image.ID))
    monkeypatch.setattr(Image, "OPEN", dict(Image.OPEN))
    image = Image.new("RGB", (300, 200), (200, 60, 20))
    for split in ("train", "val"):
        (tmp_path / split / "red").mkdir(parents=True)
        pillow_heif.from_pillow(image).save(tmp_path / split / "red" / "a.heic", quality=-1)
    assert "HEIF" not in Image.ID
    for entries in (find_unlabelled(tmp_path).entries, find_images(tmp_path, "val").entries):
        made = prepare(entries[0], CROP)
        assert made.error is None
        assert np.abs(made.data.reshape(3, -1).T.astype(int) - (200, 60, 20)).max() < 6
    assert "HEIF" in Image.ID


def test_web_addresses_are_refused_with_the_remedy_wherever_they_stand():
    for address in ("https://a.org/b.jpg", Path("https://a.org/b.jpg"), Entry("s3://a/b.jpg", "b.jpg"), "HTTP://a/b"):
        assert prepare(address, CROP).error == "a web address; download it and give the file"
