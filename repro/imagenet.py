"""ImageNet's own images: imagenet-tiny and DeiT-Tiny on validation images and on ImageNetV2.

    python repro/imagenet.py --val IMAGENET_VAL --v2 ImageNetV2/data --weights deit_tiny_patch16_224.safetensors \\
        --runs runs/imagenet

IMAGENET_VAL has a folder for each class (n01440764, or 000 to 999); the results file is of five of the fifty images of
each class. ImageNetV2/data is the release: datasets/imagenetv2-*.json and cache/imagenet2candidates_mturk, as far as
the images are there. The weights are those of timm's ``deit_tiny_patch16_224``.

The script runs ``progresvit evaluate`` on the validation images and on b-33, of which classes may be missing, and
``progresvit shift --suite imagenet-v2`` on the sets that have all classes. Records that are there are kept, so the same
command continues. It then writes imagenet.json, from which docs/results.md is built. Letters: N images, S rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

sys.path.insert(0, str(Path(__file__).parents[1]))

import progresvit
from progresvit.cli import app
from progresvit.data.split import halves_by_name
from progresvit.evaluation import Records, read_records
from progresvit.interop import start_from
from progresvit.io.files import replace_file
from progresvit.io.model_folder import bundled_folder
from progresvit.routing import load_setting, operating_point
from repro.formats import Part, pack, unpack
from scripts.collect_photos import v2_jobs, v2_subset

RESULTS = Path(__file__).with_suffix(".json")
OURS, PLAIN = "imagenet-tiny", "deit-tiny"
VAL = "val"
V2_SETS = ("a-44", "b-33", "c-12")
SET_NAMES = {
    VAL: "ImageNet validation",
    "b-33": "ImageNetV2 matched-frequency (b-33)",
    "a-44": "ImageNetV2 threshold-0.7 (a-44)",
    "c-12": "ImageNetV2 top-images (c-12)",
}


class RoutedAt(Part):
    """A setting of the bundled model on images that did not calibrate it."""

    setting: str
    images: int
    top1: float
    gmacs_paper: float


class SetResult(Part):
    """A model on a set of images."""

    data: str
    """A key of SET_NAMES."""
    model: str
    weights: str
    command: str
    images: int
    complete: int
    """Images of the whole set, of which these may be a part."""
    trained_on: int
    """Of these images; 0 for DeiT-Tiny, whose training images are ImageNet's."""
    gmacs_paper: tuple[float, ...]
    bits: tuple[str, ...]
    """Right or wrong of each round, as in the results of runs; images in the order of their names."""
    untouched: str | None
    """Images that the model was not trained on, as bits; None: all."""
    at: tuple[RoutedAt, ...]
    device: str
    date: str

    def correct(self) -> NDArray[np.bool_]:
        """(N, S)"""
        return np.stack([unpack(bits, self.images) for bits in self.bits], axis=1)

    def not_trained_on(self) -> NDArray[np.bool_]:
        """(N,)"""
        return np.ones(self.images, bool) if self.untouched is None else unpack(self.untouched, self.images)


def main(arguments: list[str] | None = None) -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--val", type=Path, required=True, help="ImageNet's validation images, a folder for each class")
    parser.add_argument("--v2", type=Path, required=True, help="the release of ImageNetV2")
    parser.add_argument("--weights", type=Path, required=True, help="weights of timm's deit_tiny_patch16_224")
    parser.add_argument("--runs", type=Path, required=True, help="folder for links, records and the model of DeiT-Tiny")
    parser.add_argument("--workers", type=int, default=2, help="processes that decode images")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    folders = {VAL: given.val, **{name: link_v2(given.v2, name, given.runs / "v2" / name) for name in V2_SETS}}
    models = {OURS: OURS, PLAIN: str(plain_folder(given.weights, given.runs / "models" / PLAIN))}
    trained_on = {job.source.name for job in v2_jobs(given.v2, Path(), side=0) if job.target.parts[0] == "train"}
    results = []
    for data, folder in folders.items():
        complete = 50_000 if data == VAL else len(v2_subset(given.v2, data))
        for name, model in models.items():
            records, command = evaluate_set(data, folder, name, model, given.runs, given.workers)
            seen = trained_on if name == OURS else set[str]()
            results.append(measure_set(data, name, records, command, complete=complete, trained_on=seen))
    replace_file(given.out, json.dumps([one.model_dump(mode="json") for one in results], indent=1) + "\n")
    print(f"wrote {given.out}")


def link_v2(release: Path, name: str, out: Path) -> Path:
    """A folder of links to the images of a subset that are there, by class."""
    files = {path.stem: path for path in (release / "cache" / "imagenet2candidates_mturk").iterdir()}
    for image, wnid in v2_subset(release, name).items():
        if image in files:
            link = out / wnid / files[image].name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                os.symlink(files[image].resolve(), link)
    return out


def plain_folder(weights: Path, out: Path) -> Path:
    """DeiT-Tiny as a model folder."""
    classes = progresvit.load(OURS).config
    config = progresvit.ModelConfig(
        heads=3,
        rounds=progresvit.make_rounds([224], [3]),
        psg=False,
        num_classes=1000,
        class_ids=classes.class_ids,
        labels=classes.labels,
    )
    model = progresvit.ProgResViT(config).eval()
    start_from(model, str(weights))
    return progresvit.save(model, out)


def evaluate_set(data: str, folder: Path, name: str, model: str, runs: Path, workers: int) -> tuple[Records, str]:
    """Records of a model on a set, and the command for readers. Sets with all classes are a suite of ``shift``."""
    decoding = ("--workers", str(workers))
    if data == VAL or sum(1 for _ in folder.iterdir()) < progresvit.load(model).config.num_classes:
        path = runs / "records" / f"{data}-{name}.parquet"
        words = ("evaluate", model, "--data", str(folder), "--split", ".", "--out", str(path))
        shown = f"progresvit evaluate {name} --data {data} --split . --out {path.name}"
    else:
        out = runs / "shift" / f"{data}-{name}"
        path = out / "records" / "imagenet-v2.parquet"
        words = ("shift", model, "--suite", "imagenet-v2", "--data", str(folder), "--out", str(out))
        shown = f"progresvit shift {name} --suite imagenet-v2 --data {data} --out {out.name}"
    if not path.exists() and (code := app([*words, *decoding], standalone_mode=False)):
        raise SystemExit(code)
    records = read_records(path)
    check_model(records, model, path)
    return records, shown


def check_model(records: Records, model: str, path: Path) -> None:
    """Refuse records of another model."""
    from progresvit.io.weights import weights_hash

    if records.header.weights != weights_hash(progresvit.load(model)):
        raise ValueError(f"{path} is of other weights than {model}; delete it to evaluate again.")


def measure_set(
    data: str, model: str, records: Records, command: str, *, complete: int, trained_on: set[str]
) -> SetResult:
    """A model on a set."""
    records = records.take(np.argsort(records.ids, kind="stable"))
    untouched = np.array([Path(name).name not in trained_on for name in records.ids.tolist()])
    test = np.array(halves_by_name(records.ids.tolist())[1]) if data == VAL else np.flatnonzero(untouched)
    return SetResult(
        data=data,
        model=model,
        weights=records.header.weights,
        command=command,
        images=len(records),
        complete=complete,
        trained_on=int((~untouched).sum()),
        gmacs_paper=tuple(records.gmacs()),
        bits=tuple(pack(column) for column in records.correct.T),
        untouched=None if untouched.all() else pack(untouched),
        at=tuple(routed_at(records.take(test))) if model == OURS else (),
        device=records.header.device,
        date=records.header.date,
    )


def routed_at(records: Records) -> list[RoutedAt]:
    """The settings of the bundled model that withhold no answers."""
    rows = []
    for path in sorted((bundled_folder(OURS) / "settings").glob("*.json")):
        setting = load_setting(path)
        if setting.abstain is None:
            point = operating_point(records.scores(), records.correct, records.gmacs(), setting.threshold)
            assert point.top1 is not None
            rows.append(RoutedAt(setting=path.stem, images=len(records), top1=point.top1, gmacs_paper=point.gmacs))
    return rows


def read_sets(path: Path = RESULTS) -> dict[tuple[str, str], SetResult]:
    """The results by set and model; refused if the models of a set were measured on different numbers of images."""
    results = TypeAdapter(list[SetResult]).validate_json(path.read_text(encoding="utf-8"))
    sets = {(result.data, result.model): result for result in results}
    for result in results:
        other: Mapping[tuple[str, str], SetResult] = sets
        if result.images != other[result.data, OURS].images:
            raise ValueError(
                f"{path}: {result.model} was measured on {result.images} images of {result.data} and {OURS} on "
                f"{other[result.data, OURS].images}; measure both again."
            )
    return sets


if __name__ == "__main__":
    main()
