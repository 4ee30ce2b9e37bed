"""A results folder of a frontier: routed models, alternatives and models of one round, trained with equal compute."""

import numpy as np
import yaml

from repro.frontier import points_of
from repro.store import read_results
from tests.repro.made import MEASUREMENT, RUNS, data, measured, run_result, write_result

SEEDS = (1, 2, 3)
RUNS |= {
    "plain160": ((160,), (3,), (0.617,), (1.2,)),
    "distilled": ((224, 224), None, (0.561, 1.26), (0.9, 1.4)),  # alternatives
}
TRAININGS = {  # epochs, task, its options
    "full": (40, "supervised", {}),
    "width": (34, "supervised", {}),
    "widths": (68, "subnetworks", {}),
    "distilled": (28, "dynabert", {}),
    "plain": (49, "supervised", {}),
    "plain160": (100, "supervised", {}),
}
ALTERNATIVES = ("widths", "distilled")
FRONTIER = {
    "title": "A study of frontiers",
    "data": "Made-up images",
    "recipe": "digits",
    "runs": {run: {"seeds": list(SEEDS)} for run in TRAININGS},
    "frontiers": {
        "all": {
            "title": "All",
            "ours": "full",
            "rows": {
                "ours, 160→224": "full",
                "width only": "width",
                "HydraViT": "widths",
                "DynaBERT": "distilled",
                "plain, 224": "plain",
                "plain, 160": "plain160",
            },
            "margin": 1,
            "families": {"plain": ["plain160", "plain"]},
        }
    },
}


def entropies(run, images, seed):
    """(N, S - 1), not above ln 10."""
    return np.minimum(measured(run, images, seed)[0][:, :-1], 2.3)


def frontier_result(run, seed, images):
    result = run_result(run, seed, images)
    epochs, task, options = TRAININGS[run]
    result |= {"epochs": epochs, "recipe": {"seed": seed, "task": task, "task_options": options}}
    if run in ALTERNATIVES:
        return result | {"frontier": [], "near_lossless": None}
    if len(RUNS[run][0]) > 1:
        result["rounds"]["entropy"] = list(entropies(run, images, seed).T)
    return result


def cost_result(folder, images):
    """Of every point of the first seed; ours also in the engine."""
    points = []
    for result in read_results(folder).runs.values():
        for point in points_of(result) if result.seed == SEEDS[0] else []:
            speed = 9000 / (0.2 + point.gmacs)
            of_point = {"run": result.run, "point": point.name, "gmacs_paper": point.gmacs, "images_per_s": speed}
            of_point |= {"spread": 0.01, "latency_ms": 3 + point.gmacs, "joules": 300 / speed}
            if result.run == "full":
                of_point |= {"engine_images_per_s": 2 * speed, "engine_latency_ms": 1.5, "engine_joules": 150 / speed}
            points.append(of_point)
    of_file = {"kind": "cost", "name": "cost", "commands": ["python …"], "seed": None, "data": data(images)}
    return MEASUREMENT | of_file | {"batch": 256, "runtime": "compiled, bf16", "points": points}


def write_frontier(folder, images=200, seeds=SEEDS, cost=True):
    folder.mkdir(parents=True)
    (folder / "study.yaml").write_text(yaml.safe_dump(FRONTIER, sort_keys=False, allow_unicode=True))
    for run in TRAININGS:
        for seed in seeds:
            write_result(folder, frontier_result(run, seed, images))
    if cost:
        write_result(folder, cost_result(folder, images))
    return folder
