"""Collect the training images of the bundled models from public sets into one folder, <split>/<wnid>/<image>.

    python scripts/collect_photos.py --out photos \\
        --v2 ImageNetV2/data --samples imagenet-sample-images --dogs Stanford_Dogs/images/Images \\
        --tiny tiny-imagenet-200 --folder nettewoof

=========  =====================================================================================================
--v2       the release of ImageNetV2: datasets/imagenetv2-*.json and cache/imagenet2candidates_mturk
--samples  one training image per class of ImageNet, <wnid>_<name>.JPEG
--dogs     Stanford Dogs, <wnid>-<breed>/*.jpg
--tiny     Tiny-ImageNet, train/<wnid>/images/*.JPEG
--folder   a folder with train/<wnid>/, and maybe val/<wnid>/, such as Imagenette and Imagewoof together
=========  =====================================================================================================

``train`` has every image that may be trained on. With --v2, ``val`` has two images of each class of ImageNetV2, drawn
by name, for selecting a checkpoint, and ``b33`` has the matched-frequency images of ImageNetV2 as they are, for tests;
no image of ``b33`` is in ``train`` or ``val``. Without --v2, ``val`` is that of --folder. Files named ILSVRC2012_val_*
are left out of ``train``, so that ImageNet's validation images stay unseen. Large images are scaled to the area of a
square of --side pixels and saved as WebP. Run it again to continue.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageOps

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
"""Formats of photographs; others may run programs."""
HELD_OUT = 2
"""Images of each class of ImageNetV2 in ``val``."""
TEST = "b-33"
TRAIN = ("a-44", "c-12")
"""Subsets of ImageNetV2: threshold-0.7 and top-images. They share images with each other and with b-33."""
VALIDATION_PREFIX = "ILSVRC2012_val_"


class Job(NamedTuple):
    """An image to copy; scaled down unless ``side`` is None."""

    source: Path
    target: Path
    side: int | None


def main(arguments: list[str] | None = None) -> None:
    """From the command line."""
    options = _parse(arguments)
    jobs = list(_jobs(options))
    if not jobs:
        raise SystemExit("error: no image was found; give at least one of --v2, --samples, --dogs, --tiny, --folder.")
    for folder in {job.target.parent for job in jobs}:
        folder.mkdir(parents=True, exist_ok=True)
    bad = []
    with Pool(options.processes) as pool:
        copies = pool.imap_unordered(partial(_copy, quality=options.quality), jobs, chunksize=32)
        for done, error in enumerate(copies, start=1):
            if error:
                bad.append(error)
            if done % 2000 == 0 or done == len(jobs):
                print(f"{done:,} of {len(jobs):,} images", flush=True)
    for split in ("train", "val", "b33"):
        count = sum(1 for _ in (options.out / split).glob("*/*"))
        if count:
            print(f"{split}: {count:,} images of {sum(1 for _ in (options.out / split).iterdir())} classes")
    for line in bad:
        print(f"skipped: {line}")


def _jobs(given: argparse.Namespace) -> Iterator[Job]:
    train = given.out / "train"
    if given.v2:
        yield from v2_jobs(given.v2, given.out, given.side)
    for path in sorted(given.samples.glob("n*.JPEG")) if given.samples else ():
        wnid = path.name.split("_")[0]
        yield Job(path, train / wnid / f"sample_{wnid}.webp", given.side)
    for path in sorted(given.dogs.glob("n*/*.jpg")) if given.dogs else ():
        yield Job(path, train / path.parent.name.split("-")[0] / f"dogs_{path.stem}.webp", given.side)
    for path in sorted(given.tiny.glob("train/n*/images/*.JPEG")) if given.tiny else ():
        if int(path.stem.split("_")[1]) < given.tiny_images:
            yield Job(path, train / path.parents[1].name / f"tiny_{path.name}", None)
    if given.folder:
        for path in sorted(given.folder.glob("train/n*/*")):
            if not path.name.startswith(VALIDATION_PREFIX):
                yield Job(path, train / path.parent.name / path.name, None)
        for path in sorted(given.folder.glob("val/n*/*")) if not given.v2 else ():
            yield Job(path, given.out / "val" / path.parent.name / path.name, None)


def v2_jobs(release: Path, out: Path, side: int) -> Iterator[Job]:
    """ImageNetV2: b-33 as it is, and of the other images two of each class for ``val``, the rest for ``train``."""
    files = {path.stem: path for path in (release / "cache" / "imagenet2candidates_mturk").iterdir()}
    test = v2_subset(release, TEST)
    for image, wnid in test.items():
        if image in files:
            yield Job(files[image], out / "b33" / wnid / files[image].name, None)
    others: dict[str, list[str]] = {}
    for image, wnid in {**v2_subset(release, TRAIN[0]), **v2_subset(release, TRAIN[1])}.items():
        if image in files and image not in test:
            others.setdefault(wnid, []).append(image)
    for wnid, images in others.items():
        ranked = sorted(images, key=lambda image: hashlib.sha256(image.encode()).hexdigest())
        for number, image in enumerate(ranked):
            split = "val" if number < HELD_OUT else "train"
            yield Job(files[image], out / split / wnid / f"v2_{image}.webp", side)


def v2_subset(release: Path, name: str) -> dict[str, str]:
    """The images of a subset and their classes."""
    listed = json.loads((release / "datasets" / f"imagenetv2-{name}.json").read_text())["image_filenames"]
    return dict(listed)


def _copy(job: Job, quality: int) -> str | None:
    """Copy or scale one image; returns why it could not be read."""
    if job.target.exists():
        return None
    part = job.target.with_name(job.target.name + ".part")
    try:
        if job.side is None:
            shutil.copyfile(job.source, part)
        else:
            with Image.open(job.source, formats=FORMATS) as image:
                _scaled(image, job.side).save(part, "WEBP", quality=quality, method=2)
    except OSError as error:
        return f"{job.source}: {error}"
    os.replace(part, job.target)
    return None


def _scaled(image: Image.Image, side: int) -> Image.Image:
    """The image upright and in its shape, with the area of a square of that side unless it is smaller."""
    scale = side / (image.width * image.height) ** 0.5
    if image.format == "JPEG" and scale < 0.5:
        image.draft("RGB", (round(2 * scale * image.width), round(2 * scale * image.height)))
    rgb = ImageOps.exif_transpose(image).convert("RGB")
    scale = side / (rgb.width * rgb.height) ** 0.5
    if scale >= 1:
        return rgb
    size = (max(1, round(scale * rgb.width)), max(1, round(scale * rgb.height)))
    return rgb.resize(size, Image.Resampling.LANCZOS)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("v2", "samples", "dogs", "tiny", "folder"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--tiny-images", type=int, default=500, help="images of each class of Tiny-ImageNet")
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--quality", type=int, default=85, help="of the WebP files")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    for name in ("v2", "samples", "dogs", "tiny", "folder"):
        if getattr(given, name) is not None and not getattr(given, name).is_dir():
            parser.error(f"--{name}: {getattr(given, name)} is not a folder")
    return given


if __name__ == "__main__":
    main()
