"""Small runs on a CPU, for the tests of training."""

import torch

from progresvit.distributed import Processes
from progresvit.training import loop
from progresvit.training.journal import read_log
from progresvit.training.recipe import make_recipe

ALONE = Processes(rank=0, count=1, device=torch.device("cpu"))


def recipe(**sections):
    values = {
        "model": {"resolutions": [16, 32], "heads": [1, 2], "depth": 2, "patch_size": 8, "drop_path": 0.1},
        "data": {"mode": "resident", "workers": 0},
        "augment": {"crop_scale": [0.5, 1.0], "colour": [0.2, 0.2, 0.2], "erasing": 0.25},
        "mixing": {"mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1},
        "optimizer": {"lr": 2e-3, "lr_batch": 16, "batch": 16},
        "schedule": {"epochs": 3, "cooldown": 1, "warmup": 1},
        "ema": 0.9,
        "run": {"log_every": 1},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return make_recipe(values, origin="test")


def run(wanted, data, out, **options):
    return loop.train(wanted, data=str(data), out=out, processes=ALONE, **options)


def losses(out):
    return [(line["step"], line["losses"], line["lr"]) for line in read_log(out) if line["event"] == "train"]
