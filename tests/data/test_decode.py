import numpy as np
import pytest
from PIL import Image

from progresvit.data.decode import ImageError, decode
from tests.data.files import noise, rotated, saved


@pytest.mark.parametrize(
    ("image", "format", "expected"),
    [
        (Image.new("L", (5, 4), 100), "PNG", (100, 100, 100)),
        (Image.new("RGB", (1, 1), "red"), "PNG", (255, 0, 0)),
        (Image.fromarray(np.full((4, 4), 40000, np.uint16)), "PNG", (156, 156, 156)),
        (Image.new("RGBA", (4, 4), 0), "PNG", (255, 255, 255)),
        (Image.new("LA", (4, 4), 0), "PNG", (255, 255, 255)),
        (Image.new("RGBA", (4, 4), 0), "GIF", (255, 255, 255)),
    ],
    ids=["grey", "one pixel", "16 bits", "alpha", "grey with alpha", "palette with a clear colour"],
)
def test_images_of_any_mode_become_rgb_on_white(image, format, expected):
    decoded = decode(saved(image, format))
    assert (decoded.mode, decoded.size, decoded.getpixel((0, 0))) == ("RGB", image.size, expected)


def test_cmyk_becomes_colour():
    image = decode(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), quality=95))
    red, green, blue = image.getpixel((4, 4))
    assert red > 200
    assert max(green, blue) < 60


def test_a_rotated_photograph_is_turned_upright():
    assert decode(rotated(Image.new("RGB", (6, 4), "black"), 6)).size == (4, 6)  # turn by 90 degrees


def test_the_first_frame_of_an_animation_is_taken():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    assert decode(saved(frames[0], "GIF", save_all=True, append_images=frames[1:])).getpixel((0, 0))[0] > 200


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n"])
def test_content_that_is_not_an_image_is_refused(content):
    with pytest.raises(ImageError):
        decode(content)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_truncated_image_is_refused(kind):
    whole = saved(noise(64, 64), kind)
    with pytest.raises(ImageError, match=r"damaged|not an image"):
        decode(whole[: len(whole) // 2])


def test_a_decompression_bomb_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ImageError, match="too large"):
        decode(saved(Image.new("L", (40, 40)), "PNG"))
