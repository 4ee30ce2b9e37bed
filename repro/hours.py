"""What the study of the whole paper takes: GPU-hours and disk, from MACs of its recipes and three measured speeds.

The speeds are those of docs/train.md on one H200. A training is scaled from the one that is nearest to it by the
multiply-accumulates of a step. Low resolutions and small batches run at fewer MACs a second than this assumes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from progresvit.config import ModelTask
from repro.equal import PASSES, dino_gmacs, step_gmacs
from repro.study import Entry, Study, entries_of, read_study

STUDY = "paper"
IMAGES = {"data": 1_281_167, "masks": 20_210}
"""Training images of ImageNet-1K and of ADE20K."""
MEASURED, MEASURED_DINO = {"tf32": 2299, "bf16": 4075}, 438
"""Images a second of ``192_240`` by precision (compiled; bf16 from JPEG files, tf32 from synthetic images), and of
``dino_192_240`` with ten crops in bf16."""
PROBE_EPOCHS = 100
"""Default of progresvit evaluate --task linear."""
COPIES = 5
"""Copies of the weights on disk after a training: the model, and in its checkpoint weights, EMA and two moments."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What a part of the study takes."""

    trained: tuple[str, ...]
    """Runs that it trains, with those that its runs start from."""
    gpu_hours: float
    gigabytes: float


@cache
def effort(*names: str) -> Effort:
    """What the entries, comparisons or frontiers of these names take; all of the study without names."""
    study = read_study(STUDY)
    entries = {entry.name: entry for entry in entries_of(study)}
    wanted = {entry.name for entry in entries.values() if not names or entry.key in _keys(study, names)}
    while more := {name for one in wanted for name in _needs(entries[one])} - wanted:
        wanted |= more
    runs = [entries[name].key for name in entries if name in wanted and entries[name].kind == "run"]
    trained = tuple(run for run in runs if study.runs[run].of is None)
    return Effort(
        trained=trained,
        gpu_hours=sum(run_hours(study, run) for run in runs),
        gigabytes=sum(COPIES * 4 * _network(study, run)[1] / 1e9 for run in trained),
    )


def _keys(study: Study, names: tuple[str, ...]) -> set[str]:
    """The keys of entries that a name of the study stands for."""
    plans = {name: {*plan.rows.values(), *filter(None, [plan.against])} for name, plan in study.comparisons.items()}
    plans |= {name: set(plan.rows.values()) for name, plan in study.frontiers.items()}
    plans["segmentation"] = set(study.segmented)
    return {key for name in names for key in plans.get(name, {name})}


def _needs(entry: Entry) -> set[str]:
    return {*entry.uses, *entry.reads, *filter(None, [entry.start])}


def run_hours(study: Study, run: str) -> float:
    """Hours of one H200 for a training or a linear probe. k-NN and the evaluation of a head take minutes."""
    plan, recipe = study.runs[run], _recipe(study, run)
    gmacs, _, routed = _network(study, run)
    images = IMAGES[study.place_of(run)]
    if plan.of is not None:
        return images * PROBE_EPOCHS * gmacs[-1] / _rate("tf32") / 3600 if plan.task == "linear" else 0.0
    epochs: int = recipe["schedule"]["epochs"] + recipe["schedule"]["cooldown"]
    if recipe["task"] == "dino":
        return images * epochs * dino_gmacs(recipe) / _dino_rate(study) / 3600
    step = step_gmacs(gmacs, recipe, routed=routed)
    if recipe["model"]["kind"] == "early_exit":  # a frozen backbone runs forward alone
        step = gmacs[-1]
    if recipe["distillation"] is not None:
        step += _teacher_gmacs(str(recipe["distillation"]["teacher"]))
    return images * epochs * step / _rate(recipe["run"]["precision"]) / 3600


def _rate(precision: str) -> float:
    """GMACs a second of a supervised training."""
    from progresvit.compute import cumulative_gmacs
    from progresvit.config import PRESETS

    return MEASURED[precision] * PASSES * cumulative_gmacs(PRESETS["progresvit_small_192_240"])[-1]


def _dino_rate(study: Study) -> float:
    """GMACs a second of a training by DINO."""
    return MEASURED_DINO * dino_gmacs(_recipe(study, "dino"))


def _recipe(study: Study, run: str) -> dict[str, Any]:
    recipe: dict[str, Any] = yaml.safe_load(study.load_recipe_of(run).to_yaml())
    return {"task": None, "distillation": None} | recipe


@cache
def _network_of(name: str, run: str) -> tuple[tuple[float, ...], int, bool]:
    import torch

    from progresvit.model.registry import build

    recipe = read_study(name).load_recipe_of(run)
    task: ModelTask = "segmentation" if recipe.task == "segmentation" else "classification"
    classes = 150 if task == "segmentation" else 1000
    with torch.device("meta"):
        model = build(recipe.model.config(num_classes=classes, class_ids=None, labels=None, task=task))
    return tuple(model.gmacs()), sum(weights.numel() for weights in model.parameters()), model.config.routable


def _network(study: Study, run: str) -> tuple[tuple[float, ...], int, bool]:
    """GMACs of each round, parameters, and whether the rounds follow each other; as trained, without merging."""
    return _network_of(STUDY, study.runs[run].of or run)


def _teacher_gmacs(name: str) -> float:
    """GMACs of a plain ViT of timm: size and resolution are in its name, as in deit3_base_patch16_384."""
    from progresvit.compute import cumulative_gmacs
    from progresvit.config import ModelConfig, make_rounds

    parts = name.partition(".")[0].split("_")
    heads = {"tiny": 3, "small": 6, "base": 12}[parts[1]]
    return cumulative_gmacs(ModelConfig(rounds=make_rounds([int(parts[-1])], [heads]), heads=heads, psg=False))[-1]
