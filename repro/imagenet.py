"""ImageNet's own images: imagenet-tiny and DeiT-Tiny on validation images and on ImageNetV2.

    python repro/imagenet.py --val IMAGENET_VAL --v2 ImageNetV2/data --weights deit_tiny_patch16_224.safetensors \\
        --runs runs/imagenet

IMAGENET_VAL has a folder for each class (n01440764, or 000 to 999); the results file is of five of the fifty images of
each class. ImageNetV2/data is the release: datasets/imagenetv2-*.json and cache/imagenet2candidates_mturk, as far as
the images are there. The weights belong to timm's ``deit_tiny_patch16_224``.

The script runs ``progresvit evaluate`` on the validation images and on b-33, of which classes may be missing, and
``progresvit shift --suite imagenet-v2`` on the sets that have all classes. Records that are there are kept, so the same
command continues. It then writes imagenet.json, from which docs/results.md is built. Letters: N images.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import progresvit
from progresvit.cli import app
from progresvit.data.dataset import find_images
from progresvit.data.split import halves_by_name
from progresvit.evaluation import Records, read_records
from progresvit.interop import start_from
from progresvit.io.files import replace_file
from progresvit.io.model_folder import bundled_folder
from progresvit.io.weights import weights_hash
from progresvit.routing import load_setting
from progresvit.routing.decide import exit_rounds
from repro.imagenet_tables import MATCHED, OURS, PLAIN, RESULTS, THRESHOLD, TOP, VAL, RoutedAt, SetResult
from repro.measure.records import hash_names
from scripts.collect_photos import v2_jobs, v2_subset

V2_SETS = (THRESHOLD, MATCHED, TOP)


def main(arguments: list[str] | None = None) -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--val", type=Path, required=True, help="ImageNet's validation images, a folder for each class")
    parser.add_argument("--v2", type=Path, required=True, help="the release of ImageNetV2")
    parser.add_argument("--weights", type=Path, required=True, help="weights of timm's deit_tiny_patch16_224")
    parser.add_argument("--runs", type=Path, required=True, help="folder for links, records and the model of DeiT-Tiny")
    parser.add_argument("--workers", type=int, default=2, help="processes that decode images")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    for path in (options.val, options.v2 / "datasets", options.v2 / "cache", options.weights):
        if not path.exists():
            parser.error(f"{path} does not exist; see --help for what is needed")
    folders = {VAL: options.val, **{name: link_v2(options.v2, name, options.runs / "v2" / name) for name in V2_SETS}}
    models = {OURS: OURS, PLAIN: str(plain_folder(options.weights, options.runs / "models" / PLAIN))}
    used = {job.source.name for job in v2_jobs(options.v2, Path(), side=0) if job.target.parts[0] in ("train", "val")}
    results = []
    for data, folder in folders.items():
        complete = 50_000 if data == VAL else len(v2_subset(options.v2, data))
        for name, model in models.items():
            records, command = evaluate_set(data, folder, name, model, options.runs, options.workers)
            results.append(measure_set(data, name, records, command, complete=complete, used=used))
    replace_file(options.out, json.dumps([result.model_dump(mode="json") for result in results], indent=1) + "\n")
    print(f"wrote {options.out}")


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
    check_records(records, model, folder, path)
    return records, shown


def check_records(records: Records, model: str, folder: Path, path: Path) -> None:
    """Refuse records of another model or of other images."""
    if records.header.weights_sha256 != weights_hash(progresvit.load(model)):
        raise ValueError(f"{path} is of other weights than {model}; delete it to evaluate again.")
    names = {Path(entry.name).name for entry in find_images(folder, ".").entries}
    evaluated = {Path(name).name for name in records.ids.tolist()}  # without unreadable ones
    if not evaluated <= names or records.header.images != len(names):
        raise ValueError(f"{path} is of other images than {folder}; delete it to evaluate again.")


def measure_set(data: str, model: str, records: Records, command: str, *, complete: int, used: set[str]) -> SetResult:
    """A model on a set. ``used`` are the names of images that trained imagenet-tiny or selected its training."""
    records = records.take(np.argsort(records.ids, kind="stable"))
    names = records.ids.tolist()
    held_out = np.array([Path(name).name not in used for name in names])
    if data == VAL:
        held_out[halves_by_name(names)[0]] = False  # calibrated the settings
    return SetResult(
        data=data,
        model=model,
        weights=records.header.weights_sha256,
        command=command,
        images=len(records),
        names=hash_names(names),
        classes=len(np.unique(records.labels)),
        complete=complete,
        held_out=held_out,
        gmacs_paper=tuple(records.gmacs()),
        bits=tuple(records.correct.T),
        at=tuple(routed_at(records)) if records.rounds > 1 else (),
        device=records.header.device,
        date=records.header.date,
    )


def routed_at(records: Records) -> list[RoutedAt]:
    """The settings of the bundled model that withhold no answers."""
    rows = []
    for path in sorted((bundled_folder(OURS) / "settings").glob("*.json")):
        setting = load_setting(path)
        if setting.abstain is None:
            after = exit_rounds(records.scores(), setting.threshold)  # (N,)
            right = records.correct[np.arange(len(records)), after]
            exits = tuple(after == s for s in range(records.rounds - 1))
            rows.append(RoutedAt(setting=path.stem, bits=right, exits=exits))
    return rows


if __name__ == "__main__":
    main()
