"""Measure how well a bundled model tells images of classes that it does not know. Writes JSON.

    python scripts/measure_ood.py imagenet-tiny --images IMAGENET_VAL --out imagenet-tiny-ood.json
    python scripts/measure_ood.py nettewoof-tiny --images IMAGENET_VAL --known NETTEWOOF --out nettewoof-tiny-ood.json

IMAGENET_VAL has a folder for each of ImageNet's classes, named by its class id (n01440764) or its number (0 to 999).

A model of all 1000 classes loses 100 rows of its head: images of the 900 others are known, images of these 100 unknown.
For a model of fewer classes, images of its classes (--known, split val) are known and images of 100 other classes
unknown. The 100 classes are those whose ids have the smallest SHA-256. Half of the known images, drawn by name,
calibrate the near-lossless threshold and the limit of the score; figures are of the other half.

Without 100 rows of its head a model of 1000 classes does not know these classes, but it was trained on images of them,
so its figures are probably better than those for classes that it has never seen.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from kept_records import evaluate_once

import progresvit
from progresvit import evaluation
from progresvit.data.dataset import ImageDataset, find_images
from progresvit.data.split import halves_by_name
from progresvit.evaluation import DataSource, Records
from progresvit.evaluation.classes import IMAGENET_CLASSES, ImageNetInfo
from progresvit.evaluation.ood import OOD_SHARE, rejected_share
from progresvit.io.files import replace_file
from progresvit.io.weights import weights_hash
from progresvit.routing.scores import DEFAULT_OOD_SCORE, OOD_SCORES

UNKNOWN_CLASSES = 100


@dataclass(frozen=True, kw_only=True)
class ClassesSource(DataSource):
    """The images of some classes. Folders may be named by ImageNet's class numbers."""

    class_ids: tuple[str, ...]
    limit: int | None = None
    """Images per class; those whose names have the smallest SHA-256."""
    numbered: tuple[str, ...] = field(default=(), repr=False)
    """Class ids by number, for folders that are named by numbers."""

    def find(self) -> ImageDataset:
        whole = find_images(self.data, self.split)
        ids = [self._class_id(name) for name in whole.class_ids]
        missing = sorted(set(self.class_ids) - set(ids))
        if missing:
            raise ValueError(
                f"{self.data} has no images of {len(missing)} classes, such as {missing[0]}; "
                "give one folder for each class (n01440764, or for ImageNet 0 to 999)."
            )
        order = sorted(range(len(whole)), key=lambda index: _sha256(whole.entries[index].name))
        taken = dict.fromkeys(self.class_ids, 0)
        rows = []
        for index in order:
            class_id = ids[whole.targets[index]]
            if class_id in taken and (self.limit is None or taken[class_id] < self.limit):
                taken[class_id] += 1
                rows.append(index)
        rows.sort()
        targets = tuple(self.class_ids.index(ids[whole.targets[index]]) for index in rows)
        return ImageDataset(self.class_ids, tuple(whole.entries[index] for index in rows), targets)

    def _class_id(self, name: str) -> str:
        return self.numbered[int(name)] if name.isdecimal() and int(name) < len(self.numbered) else name


def draw_classes(class_ids: Sequence[str], count: int = UNKNOWN_CLASSES) -> list[str]:
    """The classes whose ids have the smallest SHA-256."""
    if count >= len(class_ids):
        raise ValueError(f"{count} of {len(class_ids)} classes cannot be drawn; some must be left.")
    return sorted(class_ids, key=_sha256)[:count]


def measure(known: Records, unknown: Records, score: str) -> dict[str, Any]:
    """All scores, and the calibrated limit of one, on the half of the known images that does not calibrate it."""
    calibration, test = (known.take(np.array(half)) for half in halves_by_name(known.ids.tolist()))
    setting = evaluation.calibrate_near_lossless(calibration)
    setting = evaluation.with_ood(calibration, setting, OOD_SHARE, score=cast(Any, score))
    assert setting.ood is not None
    results = evaluation.measure_ood(test, unknown, setting.threshold)
    return {
        "calibration_images": len(calibration),
        "known_images": len(test),
        "unknown_images": len(unknown),
        "threshold": setting.threshold,
        "known_top1": float(test.correct[:, -1].mean()),
        "scores": [
            {key: value for key, value in asdict(result).items() if key not in ("known", "unknown")}
            for result in results
        ],
        "calibrated": {
            **setting.ood.model_dump(),
            "known_rejected": rejected_share(test, setting),
            "unknown_rejected": rejected_share(unknown, setting),
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """From the command line."""
    options = _parse(arguments)
    model = progresvit.load(options.model)
    weights = weights_hash(model)
    imagenet = tuple(ImageNetInfo().label_names())
    own = model.config.class_ids or (imagenet if model.config.num_classes == IMAGENET_CLASSES else None)
    if own is None:
        raise ValueError(f"{options.model} has no class_ids in its config.json, so its classes are unknown; add them.")
    images: dict[str, Any]
    images = {"data": options.images, "split": options.split, "numbered": imagenet, "limit": options.limit}
    if model.config.num_classes == IMAGENET_CLASSES:
        removed = draw_classes(own, options.classes)
        kept = tuple(class_id for class_id in own if class_id not in removed)
        model = cast(Any, model).keep_classes([own.index(class_id) for class_id in kept])
        model.config = model.config.replace(class_ids=kept)
        known = ClassesSource(class_ids=kept, **images)
    else:
        if options.known is None:
            raise ValueError(f"{options.model} knows {len(own)} classes only; give images of them with --known.")
        removed = draw_classes([class_id for class_id in imagenet if class_id not in own], options.classes)
        known = ClassesSource(data=options.known, split="val", class_ids=tuple(own), limit=options.limit)
    unknown = ClassesSource(class_ids=tuple(removed), unlabelled=True, **images)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.records or Path(scratch)
        records = [
            evaluate_once(model, source, folder / f"{name}.parquet", workers=options.workers, device=options.device)
            for name, source in (("known", known), ("unknown", unknown))
        ]
    figures = {
        "weights": weights,
        "known_classes": model.config.num_classes,
        "unknown_classes": sorted(removed),
        **measure(*records, options.score),
    }
    replace_file(options.out, json.dumps(figures, indent=2, allow_nan=False) + "\n")
    print(f"wrote {options.out}")


def _sha256(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name or folder of the model")
    parser.add_argument("--images", required=True, help="folder or tars with <class>/<image>, all ImageNet classes")
    parser.add_argument("--split", default=".", help="split of --images; '.' if the class folders are at the top")
    parser.add_argument("--known", help="images of the model's own classes, val/<class>/<image>; not for 1000 classes")
    parser.add_argument("--classes", type=int, default=UNKNOWN_CLASSES, help="number of unknown classes")
    parser.add_argument("--limit", type=int, help="images per class, for a quick test")
    parser.add_argument("--score", choices=OOD_SCORES, default=DEFAULT_OOD_SCORE, help="score of the calibrated limit")
    parser.add_argument("--records", type=Path, help="folder that keeps the records")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
