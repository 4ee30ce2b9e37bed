"""Makes the copy of Oxford-IIIT Pets that repro/runs/pets.yaml was measured on.

    python scripts/resize_pets.py SOURCE OUT

Photographs become squares of 384 pixels as WebP, trimaps PNGs of the same size with the nearest values. SOURCE is the
release, or a folder with ``original/`` instead of ``images/``.
"""

from __future__ import annotations

import argparse
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from PIL import Image

LISTS = ("trainval", "test")


def resize(name: str, *, images: Path, trimaps: Path, out: Path, side: int, quality: int) -> None:
    """One photograph and its trimap."""
    with Image.open(images / f"{name}.jpg", formats=("JPEG", "PNG", "GIF")) as photo:
        square = photo.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
    square.save(out / "original" / f"{name}.webp", quality=quality)
    with Image.open(trimaps / f"{name}.png", formats=("PNG",)) as trimap:
        trimap.resize((side, side), Image.Resampling.NEAREST).save(out / "annotations" / "trimaps" / f"{name}.png")


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--side", type=int, default=384)
    parser.add_argument("--quality", type=int, default=70)
    options = parser.parse_args()
    source, out = options.source, options.out
    (out / "original").mkdir(parents=True)
    (out / "annotations" / "trimaps").mkdir(parents=True)
    names = []
    for name in LISTS:
        shutil.copy(source / "annotations" / f"{name}.txt", out / "annotations")
        lines = (source / "annotations" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        names += [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
    images = source / "images" if (source / "images").is_dir() else source / "original"
    work = partial(
        resize,
        images=images,
        trimaps=source / "annotations" / "trimaps",
        out=out,
        side=options.side,
        quality=options.quality,
    )
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(work, names, chunksize=16):
            pass
    print(f"wrote {len(names)} images and trimaps to {out}")


if __name__ == "__main__":
    main()
