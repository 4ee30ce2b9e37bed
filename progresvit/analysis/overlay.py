"""A segmentation drawn over its image, with Pillow only: colours of the classes, a title and a legend.

Letters: H and W height and width of the image, K classes.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont

from progresvit.plots import COLOURS

ALPHA = 0.55
"""Weight of the class colours; the rest is the image."""
LEAST_SIDE = 480
"""Smaller images are enlarged, and the page is at least so wide, so that there is space for the text."""
MOST_ENTRIES = 24
"""Entries of the legend; the smallest classes share one."""

_CLASSES = 256  # that a byte can hold
_LIGHTNESS = (0.35, 0.93)  # range in which colours stay distinguishable when they are blended with an image
_PAPER, _TEXT, _FAINT = "#FFFFFF", "#202020", "#707070"

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True)
class ClassShare:
    """A class that occurs in an image."""

    index: int
    name: str
    share: float
    """Share of all pixels of the image."""


def class_shares(labels: NDArray[np.uint8], names: Sequence[str]) -> list[ClassShare]:
    """The classes that occur, largest first. Labels without a name, such as ignored pixels, are left out."""
    counts = np.bincount(labels.ravel(), minlength=_CLASSES)
    order = np.argsort(-counts, kind="stable").tolist()
    present = [index for index in order if counts[index] and index < len(names)]
    return [ClassShare(index, names[index], float(counts[index] / labels.size)) for index in present]


def short_percent(share: float) -> str:
    """A share as a short text: 45 %, 3.1 %, < 0.1 %."""
    if share < 0.001:
        return "< 0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


@lru_cache(maxsize=1)
def palette() -> NDArray[np.uint8]:
    """A colour for each of 256 classes, (256, 3): the figures' colours, then always the farthest from all before."""
    first = [ImageColor.getrgb(colour)[:3] for colour in COLOURS]
    levels = np.linspace(0, 255, 14).round()
    grid = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(-1, 3)
    lightness = _perceived(grid)[:, 0]
    grid = grid[(lightness > _LIGHTNESS[0]) & (lightness < _LIGHTNESS[1])]
    candidates = np.concatenate([np.array(first, np.float64), grid])
    places = _perceived(candidates)
    order = list(range(len(first)))
    distance = np.min([((places - places[index]) ** 2).sum(axis=1) for index in order], axis=0)
    while len(order) < _CLASSES:
        order.append(int(distance.argmax()))
        distance = np.minimum(distance, ((places - places[order[-1]]) ** 2).sum(axis=1))
    return candidates[order].astype(np.uint8)


def _perceived(colours: NDArray[np.float64]) -> NDArray[np.float64]:
    """Oklab coordinates, in which equal distances look equally different: (n, 3) -> (n, 3)."""
    values = colours / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    cones = linear @ np.array(
        [
            [0.41222147, 0.21190350, 0.08830246],
            [0.53633254, 0.68069955, 0.28171884],
            [0.05144599, 0.10739696, 0.62997870],
        ]
    )
    places: NDArray[np.float64] = np.cbrt(cones) @ np.array(
        [
            [0.21045426, 1.97799850, 0.02590404],
            [0.79361779, -2.42859221, 0.78277177],
            [-0.00407205, 0.45059371, -0.80867577],
        ]
    )
    return places


def mask_image(labels: NDArray[np.uint8]) -> Image.Image:
    """The label map (H, W) as an image of mode P: its values are the classes, its palette their colours."""
    mask = Image.fromarray(np.ascontiguousarray(labels))  # (H, W) bytes are mode L
    mask.putpalette(palette().tobytes())
    return mask


def blend(image: Image.Image, labels: NDArray[np.uint8], names: Sequence[str]) -> Image.Image:
    """The colours of the classes over an image of the same size; pixels without a class stay as they are."""
    plain = image.convert("RGB")
    tinted = Image.blend(plain, Image.fromarray(palette()[labels]), ALPHA)
    tinted.paste(plain, mask=Image.fromarray(((labels >= len(names)) * 255).astype(np.uint8)))
    return tinted


def draw_overlay(image: Image.Image, labels: NDArray[np.uint8], names: Sequence[str], title: str) -> Image.Image:
    """The image with its segmentation, the title above and the classes that occur below.

    Args:
        image: The image.
        labels: The class of every pixel, (H, W).
        names: The name of each class, K of them. Pixels with a label of K or more are not coloured.
        title: A line of text.
    """
    if labels.shape != (image.height, image.width):
        raise ValueError(
            f"the image is {image.width} x {image.height} and the labels are {labels.shape[1]} x {labels.shape[0]}; "
            "give labels of the image's size."
        )
    times = math.ceil(LEAST_SIDE / max(image.size))
    enlarged = image.resize((image.width * times, image.height * times), Image.Resampling.BICUBIC)
    tinted_image = blend(enlarged, labels.repeat(times, axis=0).repeat(times, axis=1), names)
    width = max(LEAST_SIDE, tinted_image.width)
    size = max(14, round(0.022 * width))  # of the font
    line, margin, font = round(1.5 * size), size // 2, ImageFont.load_default(size)
    lines = _wrap(title, font, width - 2 * margin)
    legend = _Legend(class_shares(labels, names), font, size, width - 2 * margin)
    head, foot = len(lines) * line + margin, len(legend.rows) * line + 2 * margin
    page = Image.new("RGB", (width, head + tinted_image.height + foot), _PAPER)
    page.paste(tinted_image, ((width - tinted_image.width) // 2, head))
    draw = ImageDraw.Draw(page)
    for number, text in enumerate(lines):
        draw.text((margin, margin // 2 + (number + 0.5) * line), text, _TEXT, font, anchor="lm")
    legend.draw(draw, margin, head + tinted_image.height + margin)
    return page


class _Legend:
    """A swatch, name and share for each class, in columns of equal width, row by row."""

    def __init__(self, shares: list[ClassShare], font: Font, size: int, width: int) -> None:
        self.font, self.size = font, size
        shown = shares if len(shares) <= MOST_ENTRIES else shares[: MOST_ENTRIES - 1]
        rest = shares[len(shown) :]
        most = width - 7 * size  # swatch, share and the space between
        entries: list[tuple[int | None, str, str]] = [
            (item.index, _shorten(item.name, font, most), short_percent(item.share)) for item in shown
        ]
        if rest:
            entries.append((None, f"{len(rest)} others", short_percent(sum(item.share for item in rest))))
        widest = max((self._length(name) + font.getlength(share) for _, name, share in entries), default=0)
        self.column = math.ceil(widest + 2.5 * size)
        columns = max(1, (width + size) // self.column)
        self.rows = [entries[first : first + columns] for first in range(0, len(entries), columns)]

    def draw(self, draw: ImageDraw.ImageDraw, left: int, top: int) -> None:
        """Draw it below a point."""
        size = self.size
        for row, entries in enumerate(self.rows):
            middle = top + (row + 0.5) * round(1.5 * size)
            for column, (index, name, share) in enumerate(entries):
                x = left + column * self.column
                if index is not None:
                    box = (x, middle - 0.45 * size, x + 0.9 * size, middle + 0.45 * size)
                    draw.rectangle(box, tuple(palette()[index].tolist()), _FAINT, max(1, size // 14))
                text = x + 1.3 * size
                draw.text((text, middle), name, _TEXT, self.font, anchor="lm")
                draw.text((text + self._length(name), middle), share, _FAINT, self.font, anchor="lm")

    def _length(self, name: str) -> float:
        """Width of the entry, with the space before the share."""
        return float(self.font.getlength(name) + 0.5 * self.size)


def _wrap(text: str, font: Font, width: float) -> list[str]:
    """The text in lines that fit the width; words stay whole."""
    lines: list[str] = []
    for word in _printable(text).split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _shorten(name: str, font: Font, width: float) -> str:
    """A name that fits; the end of a longer one is cut off."""
    name = _printable(name)
    if font.getlength(name) <= width:
        return name
    while name and font.getlength(f"{name}...") > width:
        name = name[:-1]
    return f"{name}..."


def _printable(text: str) -> str:
    """Text in the letters of Pillow's font: accents are removed, and letters that it lacks become question marks."""
    plain = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return "".join(letter if letter.isascii() or letter == "·" else "?" for letter in plain)
