"""Fine-tune bundled models on 3 classes of 20 images and test them on other images of these classes.

    python repro/own_images.py --pets FOLDER --start NAME_OR_FOLDER ... [--draws 0 1 2] [--out repro/own_images.json]

FOLDER holds the images of the Oxford-IIIT Pet dataset (37 breeds, CC BY-SA 4.0), such as ``Abyssinian_1.jpg``. A draw
is a seed: it selects 3 of the breeds and 20 images of each. Each start is fine-tuned on these images with the recipe
``own_images`` and tested on all other images of the 3 breeds. The commands come from docs/own_images.md: train,
which holds out 4 of the 20 images, evaluate, and calibrate with ``--exit-share 0.5`` on the images held out.

A start is a bundled model or a model folder; the last part of its path names it in the results. The features of the
bundled models come from ImageNet, whose classes contain many of the breeds: this transfer is easier than one to images
that resemble nothing in ImageNet.

A finished draw of a start is not repeated. A start with other weights, or a recipe with other values, is measured anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import progresvit
from progresvit.cli import app
from progresvit.evaluation import read_records
from progresvit.io.files import replace_file
from progresvit.io.weights import weights_hash
from progresvit.routing import load_setting
from progresvit.routing.frontier import operating_point
from progresvit.training.recipe import load_recipe
from repro.own_images_table import EXIT_SHARE, RESULTS, Result, table

CLASSES, IMAGES = 3, 20


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing in the results, then print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pets", type=Path, required=True, help="folder of the images of Oxford-IIIT Pets")
    parser.add_argument("--start", nargs="+", required=True, help="bundled models or model folders")
    parser.add_argument("--draws", nargs="+", type=int, default=[0, 1, 2], help="seeds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="results file, to which missing results are added")
    parser.add_argument("--work", type=Path, help="folder of the images and runs; by default a temporary one")
    parser.add_argument("--recipe", default="own_images", help="another recipe, by name or path")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to the recipe")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    breeds = find_breeds(options.pets)
    results: list[Result] = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else []
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        for start in options.start:
            for draw in options.draws:
                wanted = describe(start, draw, options.recipe, options.set)
                if any(wanted.items() <= result.items() for result in results):
                    continue
                measured = measure(start, wanted, breeds, work, options)
                same = ("start", "draw")
                results = [result for result in results if any(result[key] != wanted[key] for key in same)]
                results.append({**wanted, **measured})
                replace_file(options.out, json.dumps(results, indent=1) + "\n")
                print(table(results[-1:]))
    print(table(results))


def find_breeds(pets: Path) -> dict[str, list[Path]]:
    """The images of each breed, by name: ``Abyssinian_1.jpg``."""
    breeds: dict[str, list[Path]] = {}
    for path in sorted(pets.glob("*.jpg")):
        if name := re.fullmatch(r"(.+)_\d+", path.stem):
            breeds.setdefault(name[1], []).append(path)
    large = {breed: paths for breed, paths in breeds.items() if len(paths) > IMAGES}
    if len(large) < CLASSES:
        raise ValueError(
            f"{pets} has {len(large)} breeds with more than {IMAGES} images, such as Abyssinian_1.jpg; "
            "give the folder images of Oxford-IIIT Pets."
        )
    return large


def describe(start: str, draw: int, recipe: str, changes: Sequence[str]) -> Result:
    """What sets a result apart. The start's weights and the recipe are named by the first digits of their hashes."""
    text = load_recipe(recipe, [*changes, "model.start=start"]).to_yaml()
    return {
        "start": Path(start).name,
        "weights": weights_hash(progresvit.load(start))[:12],
        "recipe": hashlib.sha256(text.encode()).hexdigest()[:12],
        "draw": draw,
    }


def measure(
    start: str, wanted: Result, breeds: dict[str, list[Path]], work: Path, options: argparse.Namespace
) -> Result:
    """Fine-tune a start on a draw and test it."""
    images, test, classes = make_folders(work / f"draw{wanted['draw']}", breeds, wanted["draw"])
    out = work / "-".join(str(value) for value in wanted.values())
    changes = [part for change in (*options.set, f"model.start={start}") for part in ("--set", change)]
    device = ("--device", options.device)
    began = time.perf_counter()
    command("train", options.recipe, "--data", images, "--out", out, "--overwrite", *device, *changes)
    seconds = time.perf_counter() - began
    model, held_out, others = out / "model", out / "held_out.parquet", out / "others.parquet"
    setting = out / "threshold.json"
    evaluate = ("evaluate", model, *device, "--workers", "0", "--overwrite")
    command(*evaluate, "--data", images, "--out", held_out)
    command(*evaluate, "--data", test, "--split", ".", "--out", others)
    command("calibrate", held_out, "--exit-share", EXIT_SHARE, "--out", setting)
    records = read_records(others)
    point = operating_point(records.scores(), records.correct, records.gmacs(), load_setting(setting).threshold)
    return {
        "classes": classes,
        "seconds": round(seconds),
        "threads": torch.get_num_threads(),
        "images": len(records),
        "top1": [float(share) for share in records.correct.mean(axis=0)],
        "routed": {"top1": point.top1, "gmacs": point.gmacs, "exit_shares": list(point.exit_shares)},
        "gmacs": [float(value) for value in records.gmacs()],
    }


def make_folders(folder: Path, breeds: dict[str, list[Path]], draw: int) -> tuple[Path, Path, list[str]]:
    """Links to the images of a draw: for training, for the test, and the names of the classes."""
    dice = random.Random(draw)
    classes = sorted(dice.sample(sorted(breeds), CLASSES))
    images, test = folder / "images", folder / "test"
    for breed in classes:
        drawn = set(dice.sample(breeds[breed], IMAGES))
        for path in breeds[breed]:
            link = (images if path in drawn else test) / breed / path.name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                os.symlink(path.resolve(), link)
    return images, test, classes


def command(*arguments: object) -> None:
    """Run a ``progresvit`` command in this process."""
    if code := app([str(argument) for argument in arguments], standalone_mode=False):
        raise SystemExit(code)


if __name__ == "__main__":
    main()
