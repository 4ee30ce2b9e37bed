"""Segmentations drawn over images: colours, label maps, legends and their text."""

import numpy as np
import pytest
from PIL import Image, ImageColor, ImageFont

from progresvit.analysis import overlay
from progresvit.analysis.overlay import blend, class_shares, draw_overlay, mask_image, palette, short_percent
from progresvit.plots import COLOURS

NAMES = ("sky", "road", "tree")


def made(width, height, classes=3, seed=0):
    """An image and labels in tiles."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    tiles = rng.integers(0, classes, (4, 4), dtype=np.uint8)
    labels = tiles.repeat(-(-height // 4), axis=0).repeat(-(-width // 4), axis=1)[:height, :width]
    return image, labels


def test_every_class_has_its_own_colour_and_the_figures_colours_come_first():
    colours = palette()
    assert colours.shape == (256, 3)
    assert len({tuple(colour) for colour in colours.tolist()}) == 256
    assert [tuple(colour) for colour in colours[: len(COLOURS)].tolist()] == [ImageColor.getrgb(c) for c in COLOURS]
    apart = np.abs(colours[:40, None].astype(int) - colours[None, :40]).sum(axis=-1) + 1000 * np.eye(40, dtype=int)
    assert apart.min() > 60


def test_a_mask_holds_the_classes_as_its_values(tmp_path):
    labels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for values in (labels, labels.T):
        mask_image(values).save(tmp_path / "mask.png")
        read = Image.open(tmp_path / "mask.png")
        assert read.mode == "P"
        assert np.array_equal(np.array(read), values)
        assert np.array_equal(np.array(read.convert("RGB")), palette()[values])


def test_shares_are_of_all_pixels_and_largest_first():
    labels = np.array([[2, 2, 2, 0], [2, 255, 0, 1]], np.uint8)
    shares = class_shares(labels, NAMES)
    assert [(share.index, share.name, share.share) for share in shares] == [
        (2, "tree", 0.5),
        (0, "sky", 0.25),
        (1, "road", 0.125),
    ]
    assert [short_percent(share) for share in (1, 0.453, 0.0996, 0.0312, 0.0009)] == [
        "100 %",
        "45 %",
        "10 %",
        "3.1 %",
        "< 0.1 %",
    ]


def test_colours_are_blended_and_pixels_without_a_class_stay_as_they_are():
    image, labels = made(40, 24)
    labels[0] = 255
    labels[1] = 3  # the first without a name
    blended, plain = np.array(blend(image, labels, NAMES)).astype(int), np.array(image).astype(int)
    assert np.array_equal(blended[:2], plain[:2])
    expected = 0.45 * plain + 0.55 * palette()[labels]
    assert np.abs(blended - expected)[2:].max() <= 1


@pytest.mark.parametrize("size", [(16, 16), (60, 80), (480, 360), (1500, 1000), (20, 500), (900, 16)])
def test_an_overlay_has_the_image_a_title_and_a_legend_at_any_size(size):
    image, labels = made(*size)
    page = draw_overlay(image, labels, NAMES, "round 1 of 2 · score 0.12 · 3.1 GMACs")
    times = 1 if max(size) >= 480 else -(-480 // max(size))
    width, height = max(480, size[0] * times), size[1] * times
    assert page.width == width
    assert page.height > height + 40
    pixels = np.array(page)
    left, picture = (width - size[0] * times) // 2, picture_of(image, labels, times)
    places = slice(left, left + size[0] * times)
    top = next(y for y in range(page.height) if np.array_equal(pixels[y : y + height, places], picture))
    dark = (pixels < 80).all(axis=-1)
    assert dark[:top].any()  # the title
    assert dark[top + height :].any()  # the legend
    for index in np.unique(labels):
        assert (pixels[top + height :] == palette()[index]).all(axis=-1).any()
    assert (pixels[[0, -1]] == 255).all()  # nothing is cut off
    assert (pixels[:top, -1] == 255).all()
    assert (pixels[top + height :, -1] == 255).all()


def picture_of(image, labels, times):
    enlarged = image.resize((image.width * times, image.height * times), Image.Resampling.BICUBIC)
    return np.array(blend(enlarged, labels.repeat(times, axis=0).repeat(times, axis=1), NAMES))


def drawn_text(monkeypatch, *arguments):
    """The texts of an overlay."""
    texts = []
    text = overlay.ImageDraw.ImageDraw.text

    def recorded(self, xy, value, *rest, **more):
        texts.append(value)
        return text(self, xy, value, *rest, **more)

    monkeypatch.setattr(overlay.ImageDraw.ImageDraw, "text", recorded)
    page = draw_overlay(*arguments)
    return texts, page


def test_the_legend_names_the_classes_that_occur(monkeypatch):
    image, labels = made(100, 100)
    labels[:] = 0
    labels[:30] = 2
    assert drawn_text(monkeypatch, image, labels, NAMES, "a title")[0] == ["a title", "sky", "70 %", "tree", "30 %"]


def test_a_legend_of_many_classes_ends_with_the_rest(monkeypatch):
    labels = np.arange(150, dtype=np.uint8).repeat(64).reshape(100, 96)
    names = tuple(f"class {number}" for number in range(150))
    texts, page = drawn_text(monkeypatch, Image.new("RGB", (96, 100)), labels, names, "a title")
    assert len(texts) == 1 + 2 * overlay.MOST_ENTRIES
    assert texts[-2:] == ["127 others", "85 %"]
    assert page.height < 2 * 500


def test_long_and_foreign_names_fit_into_the_picture(monkeypatch):
    image, labels = made(100, 100)
    names = ("a very long name " * 20, "Gebäude", "木 tree")
    texts, page = drawn_text(monkeypatch, image, labels, names, "a long title " * 20)
    font = ImageFont.load_default(14)
    assert all(font.getlength(text) <= page.width for text in texts)
    assert any(text.startswith("a very long") and text.endswith("...") for text in texts)
    assert {"Gebaude", "? tree"} <= set(texts)
    assert sum("title" in text for text in texts) > 1  # in several lines


def test_an_image_without_any_class_has_no_legend():
    image, labels = made(500, 100)
    labels[:] = 255
    page = draw_overlay(image, labels, NAMES, "nothing here")
    assert (np.array(page)[-10:] == 255).all()


def test_labels_of_another_size_are_refused():
    image, labels = made(50, 40)
    with pytest.raises(ValueError, match="the image is 50 x 40 and the labels are 40 x 50"):
        draw_overlay(image, np.ascontiguousarray(labels.T), NAMES, "a title")


def test_grey_images_are_drawn_too():
    image, labels = made(50, 40)
    assert draw_overlay(image.convert("L"), labels, NAMES, "grey").mode == "RGB"
