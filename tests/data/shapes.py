"""Small datasets: coloured rectangles and ellipses with masks, digits as photographs, and a set with damaged files."""

import shutil

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("ground", "red", "blue")
COLOURS = ((110, 110, 110), (220, 50, 40), (40, 60, 220))
IGNORED = 255
SIZES = ((48, 48), (72, 48), (48, 60), (96, 64))
"""Width and height."""


def draw_shape(number, size, seed=0):
    """An image with its mask. Even numbers are red, odd ones blue."""
    rng = np.random.default_rng((seed, number))
    width, height = size
    mask = Image.new("L", size, 0)
    w, h = (int(length * rng.uniform(0.4, 0.7)) for length in size)
    left, top = rng.integers(0, width - w), rng.integers(0, height - h)
    pen = ImageDraw.Draw(mask)
    draw = pen.rectangle if number % 4 < 2 else pen.ellipse
    draw((left, top, left + w, top + h), fill=1 + number % 2)
    labels = np.array(mask)
    pixels = np.array(COLOURS)[labels] + rng.normal(0, 12, (height, width, 3))
    labels[:, -1] = IGNORED
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), Image.fromarray(labels)


def save_shapes(root, *, train=24, val=8, sizes=SIZES):
    """The dataset as a folder, with the labels at its top."""
    for split, count in (("train", train), ("val", val)):
        for number in range(count):
            image, mask = draw_shape(number, sizes[number % len(sizes)], seed=len(split))
            save_pair(root, f"{split}/{number:02}", image, mask)
    (root / "labels.txt").write_text("\n".join(CLASSES))
    return root


def save_pair(root, name, image, mask):
    for folder, content in (("images", image), ("annotations", mask)):
        path = root / folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        content.save(path)


def save_photos(root, digits):
    """The digits as JPEGs of different shapes, and some as PNGs."""
    for number, path in enumerate(sorted(digits.glob("train/*/*.png"))):
        target = root / path.relative_to(digits)
        target.parent.mkdir(parents=True, exist_ok=True)
        image = Image.open(path).convert("RGB").resize((50 + number % 5, 36 + number % 7))
        image.save(target) if number % 6 == 0 else image.save(target.with_suffix(".jpg"), quality=95)
    return root


def save_damaged(root, digits):
    """Two hundred images in each split, one of them unreadable."""
    for split in ("train", "val"):
        for digit in range(4):
            folder = root / split / str(digit)
            folder.mkdir(parents=True)
            for number in range(50):
                shutil.copy(digits / "train" / str(digit) / f"{number % 12}.png", folder / f"{number}.png")
    (root / "train" / "2" / "7.png").write_bytes(b"not an image")
    (root / "val" / "2" / "7.png").write_bytes(b"")
    return root
