"""The whole paper at toy size: ``python repro/rehearse.py [FOLDER]``, which ``make rehearse`` runs.

It trains, evaluates and measures every entry of runs/paper.yaml and builds its page, on a CPU in minutes, so that a
missing link shows before a training of 300 epochs. What differs from the real study:

- The images are generated: folders shaped like ImageNet, ADE20K and ImageNet-V2, -A, -R, -Sketch and -C.
- ``toy_study`` shrinks the models (two blocks, few heads, low resolutions), trains for one epoch, and measures few
  images. timm's weights are replaced by random ones of toy models.
- Commands run in forks of one process that has imported the package, because two hundred imports take longer than
  everything else. The tasks are those of dodo.py.

Numbers on the page mean nothing. The page is complete if every table and figure is there: ``gaps`` lists what is not.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import multiprocessing
import os
import runpy
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

sys.path.insert(0, str(Path(__file__).parents[1]))

import progresvit._torchvision  # noqa: F401  (ahead of timm)

# isort: split
import numpy as np
import torch
import yaml
from doit.cmd_base import ModuleTaskLoader
from doit.doit_cmd import DoitMain
from PIL import Image
from timm.data import ImageNetInfo

from progresvit.config import ModelConfig, make_rounds
from progresvit.data.augment.corruptions import CORRUPTIONS
from progresvit.io.yaml_files import read_mapping
from progresvit.model import ProgResViT
from progresvit.model.saving import save
from repro import page
from repro.blocks import NOT_MEASURED
from repro.study import STUDY_FILE, Study, read_study

HERE = Path(__file__).parent
STUDY = "paper"
SIDES = {128: 16, 160: 32, 192: 32, 224: 48, 240: 48, 384: 64, 448: 64, 512: 80, 576: 96}
"""Resolutions of toy models."""
DEPTH, HEADS = 2, 3
"""Blocks of toy models, and the number of heads of which they have one."""
TOYS: dict[str, dict[str, Any]] = {
    "deit_tiny_patch16_224.fb_in1k": {"heads": 3, "resolution": 224},
    "deit_small_patch16_224.fb_in1k": {"heads": 6, "resolution": 224},
    "deit_base_patch16_224.fb_in1k": {"heads": 12, "resolution": 224},
    "deit3_small_patch16_384.fb_in22k_ft_in1k": {"heads": 6, "resolution": 384, "layer_scale": 1e-6},
    "deit3_base_patch16_384.fb_in22k_ft_in1k": {"heads": 12, "resolution": 384, "layer_scale": 1e-6},
}
"""timm's models by name, and the plain ViTs that stand in for them, before they are shrunk."""
ALL = (
    *("data.workers=0", "schedule.epochs=1", "schedule.cooldown=0", "schedule.warmup=0"),
    *("run.compile=false", "run.cuda_graphs=false"),
)
"""Changes to every recipe."""
TASKS = {
    "segmentation": ("optimizer.batch=4", "run.evaluate_every=1"),
    "dino": (
        *(
            "schedule.epochs=2",
            "optimizer.batch=50",
            "run.evaluate_every=1",
            "task_options.local_side=24",
            "task_options.local_crops=2",
        ),
        *("task_options.prototypes=64", "task_options.hidden=32", "task_options.bottleneck=16"),
    ),
    "dynabert": ("optimizer.batch=50", "optimizer.lr=0.02", "ema=0.8", "task_options.importance_batches=1"),
}
"""Changes to the recipes of a task."""
OTHERS = ("optimizer.batch=50", "optimizer.lr=0.02", "ema=0.8", "schedule.epochs=2")
MERGE = {4: 1, 8: 2, 13: 3}
WORDS = {"--images": "40", "--batch": "8", "--seconds": "0.05"}
"""Values of options of commands."""
MORE = {
    "bench": "--seconds 0.05",
    "analyze throughput": "--seconds 0.05",
    "shift {model} --suite imagenet-c": "--severities 3",
}
"""Words that are added to commands that begin like this."""
ALL_SEVERITIES = "mce.md"
"""A table of all severities, which is left out: evaluating them takes longer than everything else."""
COMMON, EACH, MASKS = 5, 60, (12, 6)
"""Numbers of classes that can be learned and of their images, and of images with masks. All other classes have one
training image: so models are right on some held-out images, which the tables of routers need."""
OWN = {"data", "models", "runs", STUDY_FILE}
"""What the folder of a rehearsal holds."""
FEW = "few"
"""Place of the images for the task dino: a linear probe needs several images of each class."""
FEW_CLASSES, FEW_IMAGES = 20, 5


def toy_study(study: Study, values: Mapping[str, Any], starts: Mapping[str, Path]) -> dict[str, Any]:
    """The content of a study file at toy size. ``values`` are of the real one, ``starts`` the folders of ``TOYS``."""
    toy = copy.deepcopy(dict(values))
    for name, run in study.runs.items():
        changed = toy["runs"][name]
        if run.of is None:
            changed["set"] = [*run.set, *toy_recipe(study, name, starts)]
            if study.load_recipe_of(name).task == "dino":
                changed["data"] = FEW
        elif run.merge is not None:
            changed["merge"] = [MERGE[merge] for merge in run.merge]
        elif run.task == "linear":
            changed["evaluate"] = [*run.evaluate, "--epochs", "1", "--blocks", str(DEPTH)]
    toy["places"][FEW] = "a few classes"
    for routing in toy["routing"].values():
        routing["learned_images"] = 1000
    for command in toy["commands"].values():
        command["rows"] = {label: str(starts.get(model, model)) for label, model in command.get("rows", {}).items()}
        command["words"] = _toy_words(command["words"])
        command["tables"] = [table for table in command.get("tables", ()) if table != ALL_SEVERITIES]
    return toy


def toy_recipe(study: Study, run: str, starts: Mapping[str, Path]) -> list[str]:
    """Changes that make a run's recipe a matter of seconds."""
    recipe = study.load_recipe_of(run)
    model, changes = recipe.model, [*ALL, *TASKS.get(recipe.task, OTHERS)]
    if model.fields:
        rounds = [_toy_round(round_) for round_ in model.fields["rounds"]]
        rounds = [round_ for number, round_ in enumerate(rounds) if round_ not in rounds[:number]]  # alternatives
        fields = {**model.fields, "heads": _toy_heads(model.fields["heads"]), "depth": DEPTH, "rounds": rounds}
        changes.append(f"model.fields={_flow(fields)}")
        per_step = recipe.task_options.get("per_step")
        if isinstance(per_step, int):
            changes.append(f"task_options.per_step={min(per_step, len(rounds))}")
    else:
        config = model.config(num_classes=2, class_ids=None, labels=None)
        changes += [
            "model.preset=null",
            f"model.resolutions={[SIDES[round_.resolution] for round_ in config.rounds]}",
            f"model.heads={[_toy_heads(round_.heads) for round_ in config.rounds]}",
            f"model.depth={DEPTH}",
        ]
    if model.input_resolution is not None:
        changes.append(f"model.input_resolution={SIDES[model.input_resolution]}")
    if model.start is not None and model.start in starts:
        changes.append(f"model.start={starts[model.start]}")
    if recipe.run.precision == "tf32":
        changes.append("run.precision=fp32")  # a CPU has no other
    if recipe.distillation is not None:
        changes.append(f"distillation.teacher={starts[str(recipe.distillation.teacher)]}")
    return changes


def _toy_heads(heads: int) -> int:
    return math.ceil(heads / HEADS)


def _toy_round(round_: Mapping[str, Any]) -> dict[str, Any]:
    toy = {**round_, "resolution": SIDES[round_["resolution"]]}
    if "heads" in toy:
        toy["heads"] = _toy_heads(toy["heads"])
    if "blocks" in toy:
        toy["blocks"] = math.ceil(toy["blocks"] * DEPTH / 12)
    return toy


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()


def _toy_words(text: str) -> str:
    words = text.split()
    for number, word in enumerate(words[:-1]):
        if word in WORDS:
            words[number + 1] = WORDS[word]
    for beginning, more in MORE.items():
        if text.startswith(beginning) and more.split()[0] not in words:
            words += more.split()
    return " ".join(words)


def write_toys(folder: Path) -> dict[str, Path]:
    """Random weights of a toy plain ViT in place of each model of timm; its folder by the name of that model."""
    torch.manual_seed(0)
    names = tuple(ImageNetInfo().label_names())
    folders = {}
    for name, about in TOYS.items():
        heads = _toy_heads(about["heads"])
        config = ModelConfig(
            rounds=make_rounds([SIDES[about["resolution"]]], [heads]),
            heads=heads,
            depth=DEPTH,
            psg=False,
            layer_scale=about.get("layer_scale"),
            class_ids=names,
        )
        folders[name] = folder / name
        save(ProgResViT(config), folders[name])
    return folders


def write_images(folder: Path) -> dict[str, Path]:
    """Generated images in the layouts of the paper's datasets: where each place of the study is."""
    wnids = ImageNetInfo().label_names()
    draw = np.random.default_rng(0)
    files = [_image(folder / "images" / f"{number}.jpg", draw) for number in range(50)]
    common = {name: draw.integers(0, 256, 3) for name in wnids[:COMMON]}
    for split in ("train", "val"):
        for number, (name, colour) in enumerate(common.items()):
            for image in range(EACH):
                _image(folder / "imagenet" / split / name / f"{split}_{number}_{image:02}.jpg", draw, colour=colour)
    shifts = folder / "shifts"
    layouts = {
        folder / "imagenet" / "train": wnids[COMMON:],
        shifts / "imagenet-v2": [str(number) for number in range(len(wnids))],
        shifts / "imagenet-sketch": wnids,
        shifts / "imagenet-a": wnids[::5],
        shifts / "imagenet-r": wnids[1::5],
        **{shifts / "imagenet-c" / name / "3": wnids for name in CORRUPTIONS},
    }
    layouts |= {folder / FEW / split: wnids[:FEW_CLASSES] * FEW_IMAGES for split in ("train", "val")}
    for place, classes in layouts.items():
        for number, name in enumerate(classes):
            (place / name).mkdir(parents=True, exist_ok=True)
            os.link(files[draw.integers(len(files))], place / name / f"{place.name}_{number:04}.jpg")
    masks = folder / "ADEChallengeData2016"
    for split, count in zip(("training", "validation"), MASKS):
        for number in range(count):
            name = f"ADE_{split}_{number:04}"
            _image(masks / "images" / split / f"{name}.jpg", draw, side=96)
            squares = (np.arange(64).reshape(8, 8) + 64 * number) % 151  # every class is in some image
            labels = np.kron(squares, np.ones((12, 12))).astype(np.uint8)
            (masks / "annotations" / split).mkdir(parents=True, exist_ok=True)
            Image.fromarray(labels).save(masks / "annotations" / split / f"{name}.png")
    lines = [f"{number}\t0.1\t1\t1\tclass {number}" for number in range(1, 151)]
    (masks / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tName", *lines]) + "\n")
    return {"data": folder / "imagenet", "masks": masks, "shifts": shifts, FEW: folder / FEW}


def _image(path: Path, draw: np.random.Generator, side: int = 72, colour: Any = None) -> Path:
    """A smooth random image, around a colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = draw.integers(0, 256, (4, 4, 3))
    if colour is not None:
        pixels = (pixels + 2 * colour) // 3
    Image.fromarray(pixels.astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC).save(path)
    return path


class Fork:
    """What dodo.py needs of a process, for a command in a fork of the server."""

    def __init__(self, words: Sequence[str], *, stdout: BinaryIO, **_: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=_interpret, args=(list(words[1:]), stdout.name))
        self.process.start()

    def wait(self) -> int:
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode

    def terminate(self) -> None:
        self.process.terminate()


def _interpret(words: list[str], log: str) -> None:
    """Run what ``python WORDS`` runs: -m MODULE or a file."""
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    fork = multiprocessing.get_context("fork")  # for measurements in a process of their own: nothing is imported again
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


PRELOADED = ["progresvit.cli", "progresvit.training.loop", "progresvit.analysis.report", "repro.measure.entries"]


def run_study(folder: Path, jobs: int, names: Sequence[str]) -> int:
    """Exit code of doit."""
    places = write_images(folder / "data")
    starts = write_toys(folder / "models")
    file = HERE / "runs" / f"{STUDY}.yaml"
    values = read_mapping(file, "study", "runs: and comparisons:")
    (folder / STUDY_FILE).write_text(yaml.safe_dump(toy_study(read_study(STUDY), values, starts), sort_keys=False))
    variables = {"study": folder / STUDY_FILE, "runs": folder / "runs", **places, "workers": 0, "device": "cpu"}
    sys.argv = ["doit", *(f"{name}={value}" for name, value in variables.items())]
    spec = importlib.util.spec_from_file_location("dodo", HERE / "dodo.py")
    assert spec is not None
    assert spec.loader is not None
    dodo = importlib.util.module_from_spec(spec)
    sys.modules["dodo"] = dodo
    spec.loader.exec_module(dodo)
    dodo.start = Fork  # type: ignore[attr-defined]
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    streams = sys.stdout, sys.stderr
    code: int = DoitMain(ModuleTaskLoader(vars(dodo))).run(["run", "-n", str(jobs), *names])
    sys.stdout, sys.stderr = streams  # doit's threads may leave their own behind
    return code


def gaps(results: Path, text: str) -> Iterable[str]:
    """What is missing on a page: what was not measured, figures that are not there, and tables without a number."""
    if NOT_MEASURED[:-1] in text:
        yield from (line for line in text.splitlines() if line.startswith(NOT_MEASURED[:-1]))
    figures = [part.partition('"')[0] for part in text.split('<img src="')[1:]]
    yield from (f"{figure} is missing" for figure in figures if not (results / figure).is_file())
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and not any(cell in ("nan", "inf", "None") for cell in cells):
            continue
        if cells:
            yield f"no number: {line}"


def main(arguments: list[str] | None = None) -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/rehearsal"))
    parser.add_argument("names", nargs="*", help="parts of the study, as doit takes them; all by default")
    parser.add_argument("--resume", action="store_true", help="keep what is in the folder, which is emptied otherwise")
    parser.add_argument("-n", type=int, default=2, help="commands at a time")
    options = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    folder = options.folder.resolve()
    content = list(folder.iterdir()) if folder.exists() else []
    names = {path.name for path in content}
    if names and (STUDY_FILE not in names or names - OWN):
        parser.error(f"{folder} holds other files than those of a rehearsal; name a new folder")
    for earlier in content:
        if earlier.name != "runs" or not options.resume:
            shutil.rmtree(earlier) if earlier.is_dir() else earlier.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    if code := run_study(folder, options.n, options.names):
        sys.exit(code)
    results = folder / "runs" / "results"
    page.main([str(results)])
    missing = list(gaps(results, (results / "results.md").read_text(encoding="utf-8")))
    if missing:
        sys.exit("error: the page is not complete:\n" + "\n".join(missing))


if __name__ == "__main__":
    main()
