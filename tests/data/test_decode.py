import io

import numpy as np
import pytest
from PIL import Image

from progresvit.data.decode import ImageError, decode


def encoded(image, **options):
    file = io.BytesIO()
    image.save(file, **{"format": "PNG", **options})
    return file.getvalue()


def test_grey_becomes_colour():
    image = decode(encoded(Image.new("L", (5, 4), 100)))
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (5, 4), (100, 100, 100))


def test_one_pixel_is_an_image():
    assert decode(encoded(Image.new("RGB", (1, 1), "red"))).getpixel((0, 0)) == (255, 0, 0)


def test_cmyk_becomes_colour():
    image = decode(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), format="JPEG", quality=95))
    red, green, blue = image.getpixel((4, 4))
    assert red > 200
    assert max(green, blue) < 60


def test_sixteen_bits_are_scaled_to_eight():
    deep = Image.fromarray(np.full((4, 4), 40000, np.uint16))
    assert decode(encoded(deep)).getpixel((0, 0)) == (156, 156, 156)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_lies_on_white(mode):
    clear = Image.new(mode, (4, 4), 0)
    assert decode(encoded(clear)).getpixel((0, 0)) == (255, 255, 255)


def test_a_palette_with_a_clear_colour_lies_on_white():
    assert decode(encoded(Image.new("RGBA", (4, 4), 0), format="GIF")).getpixel((0, 0)) == (255, 255, 255)


def test_a_rotated_photograph_is_turned_upright():
    image = Image.new("RGB", (6, 4), "black")
    exif = image.getexif()
    exif[274] = 6  # turn by 90 degrees
    assert decode(encoded(image, format="JPEG", exif=exif)).size == (4, 6)


def test_of_an_animation_the_first_frame_is_taken():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    assert decode(encoded(frames[0], format="GIF", save_all=True, append_images=frames[1:])).getpixel((0, 0))[0] > 200


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_image_is_refused(content):
    with pytest.raises(ImageError):
        decode(content)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_truncated_image_is_refused(kind):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    whole = encoded(noise, format=kind)
    with pytest.raises(ImageError, match=r"damaged|not an image"):
        decode(whole[: len(whole) // 2])


def test_a_decompression_bomb_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ImageError, match="too large"):
        decode(encoded(Image.new("L", (40, 40))))
