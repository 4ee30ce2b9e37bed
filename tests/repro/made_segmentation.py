"""Results of made-up segmentation models: round 1 is wrong at more pixels, and more so in hard images."""

import numpy as np
import yaml

from tests.repro.made import MEASUREMENT, write_result

SEEDS = (1, 2, 3)
LABELS = ("road", "tree", "car")
PIXELS = 1000
STUDY = {
    "title": "Made-up segmentation",
    "data": "Made-up scenes",
    "recipe": "camvid",
    "runs": {run: {"seeds": list(SEEDS)} for run in ("ours", "wide", "plain")},
    "segmentation": {
        "title": "Scenes",
        "ours": "ours",
        "rows": {"ProgResViT": "ours", "ThinkingViT": "wide", "plain ViT": "plain"},
        "margin": 0.5,
        "max_drop": 1.0,
    },
}
RUNS = {"ours": ((1.0, 5.0), (0.3, 0.1)), "wide": ((2.0, 5.0), (0.4, 0.12)), "plain": ((5.0,), (0.11,))}
"""GMACs of a window, and the error rate of each round."""


def images(errors, count, seed, split):
    """Counts of pixels of images whose difficulty their scores tell roughly."""
    random = np.random.default_rng((seed, count))
    hard = np.random.default_rng(count).random(count)
    labelled = np.random.default_rng(count + 1).multinomial(PIXELS, (0.6, 0.3, 0.1), count)  # (N, K)
    intersection, predicted = [], []
    for error in errors:
        lost = random.binomial(
            labelled, np.clip(2 * error * hard, 0, 1)[:, None]
        )  # (N, K), predicted as the next class
        intersection.append(labelled - lost)
        predicted.append(labelled - lost + np.roll(lost, 1, axis=1))
    windows = 1 + np.arange(count) % 2
    scores = [0.5 * hard + 0.1 * random.random(count) for _ in errors[:-1]]
    return {
        "split": split,
        "images": count,
        "names": f"names of {count}",
        "windows": windows,
        "scores": scores,
        "labelled": labelled.ravel(),
        "intersection": [part.ravel() for part in intersection],
        "predicted": [part.ravel() for part in predicted],
    }


def result(run, seed):
    gmacs, errors = RUNS[run]
    data = {"name": STUDY["data"], "train": 100, "val": 60, "classes": 3, "names": "names of 60", "learned": "all"}
    return MEASUREMENT | {
        "kind": "segmentation",
        "name": f"{run}-{seed}",
        "commands": [f"progresvit train camvid --data DATA --out RUNS/{run}-{seed}"],
        "seed": seed,
        "data": data,
        "run": run,
        "recipe": {},
        "epochs": 10,
        "parameters": 5_000_000,
        "labels": list(LABELS),
        "resolutions": [384] * len(gmacs),
        "heads": [3] * len(gmacs),
        "gmacs_paper": list(gmacs),
        "gmacs_executed": list(gmacs),
        "val": images(errors, 40, seed, "val"),
        "test": images(errors, 60, seed, "test"),
        "history": [],
    }


def write_segmentation(folder):
    folder.mkdir(parents=True)
    (folder / "study.yaml").write_text(yaml.safe_dump(STUDY, sort_keys=False, allow_unicode=True))
    for run in RUNS:
        for seed in SEEDS:
            write_result(folder, result(run, seed))
    return folder
