"""Small runs on a CPU, for the tests of training."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from progresvit.distributed import Processes
from progresvit.training import loop
from progresvit.training.build import build_model, start_model
from progresvit.training.logger import read_log
from progresvit.training.recipe import make_recipe
from progresvit.training.state import checkpoints
from progresvit.training.step import TrainingStep
from progresvit.training.tasks.registry import make_task

ALONE = Processes(rank=0, count=1, device=torch.device("cpu"))


def recipe(**sections):
    values = {
        "model": {"resolutions": [16, 32], "heads": [1, 2], "depth": 2, "patch_size": 8, "drop_path": 0.1},
        "data": {"mode": "in_memory", "workers": 0},
        "augment": {"crop_scale": [0.5, 1.0], "colour": [0.2, 0.2, 0.2], "erasing": 0.25},
        "mixing": {"mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1},
        "optimizer": {"lr": 2e-3, "lr_batch": 16, "batch": 16},
        "schedule": {"epochs": 3, "cooldown": 1, "warmup": 1},
        "ema": 0.9,
        "run": {"log_every": 1},
    }
    return merge_sections(values, sections)


def merge_sections(values, sections):
    """A recipe whose sections are changed key by key."""
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return make_recipe(values, origin="test")


def run(wanted, data, out, **options):
    return loop.train(wanted, data=str(data), out=out, processes=ALONE, **options)


def losses(out):
    return [(line["step"], line["losses"], line["lr"]) for line in read_log(out) if line["event"] == "train"]


def evaluations(out):
    return [line for line in read_log(out) if line["event"] == "evaluation"]


def ready(wanted, data, task=None):
    """Everything that a run has before its first step, without a folder."""
    torch.manual_seed(0)
    wanted, task = make_task(wanted, task)
    splits = task.find_splits(wanted, str(data))
    model = build_model(wanted, task.class_ids(splits))
    start_model(model, wanted)
    task.setup(model, splits, wanted, ALONE)
    loaded = task.load_data(model, splits, wanted, ALONE)
    step = TrainingStep(model, task, wanted, ALONE, steps_per_epoch=loaded.train.sampler.steps_per_epoch)
    return SimpleNamespace(recipe=wanted, task=task, model=model, data=loaded, step=step)


def take_steps(run, count, first=0):
    """Steps without schedules, so at the full rate."""
    for number, batches in enumerate(run.data.train.steps(first, first + count), start=first):
        run.step(number, batches)


class KilledError(Exception):
    """Instead of a process that dies."""


def run_until_killed(step, wanted, data, out, **options):
    """A run that dies in this step, counted from 0."""
    call = TrainingStep.__call__

    def dies(self, number, batches):
        if number == step:
            raise KilledError
        call(self, number, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStep, "__call__", dies)
        with pytest.raises(KilledError):
            run(wanted, data, out, **options)


def assert_resumes_to_the_bit(wanted, data, folder, *files, killed_at=7, **options):
    """A run that is killed and resumed equals an unbroken one. Returns the last checkpoint of the unbroken run."""
    run(wanted, data, folder / "whole", **options)
    run_until_killed(killed_at, wanted, data, folder / "broken", **options)
    run(wanted, data, folder / "broken", resume=True, **options)
    return assert_equal_runs(folder / "whole", folder / "broken", *files)[0]


def assert_close_losses(left, right, tolerance):
    """Two runs have almost the same losses in every step."""
    for (_, ours, _), (_, theirs, _) in zip(losses(left), losses(right), strict=True):
        assert ours == pytest.approx(theirs, abs=tolerance)


def assert_equal_runs(whole, broken, *files):
    """Two runs have equal logs, and equal tensors to the bit in these files of their last checkpoints.

    Returns the two checkpoints.
    """
    assert losses(whole) == losses(broken)
    assert evaluations(whole) == evaluations(broken)
    left, right = (checkpoints(out / "checkpoints")[-1] for out in (whole, broken))
    assert left.name == right.name
    for file in files:
        ours, theirs = (load_file(folder / f"{file}.safetensors") for folder in (left, right))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), file
    return left, right
