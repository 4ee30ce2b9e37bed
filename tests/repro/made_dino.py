"""A results folder of the study dino: made-up models of two rounds and of one, probed by k-NN and by a linear layer."""

import numpy as np
import yaml

from progresvit.routing import near_lossless
from repro.study import entries_of, load_study, reader_commands
from tests.repro.made import MEASUREMENT, RUNS, data, measured, point, points, rounds, write_result

SKILLS = {"progressive": (0.9, 1.5), "plain": (1.3,), "random": (-1.2, -1.0), "random-plain": (-1.0,)}
SKILLS |= {"supervised-scratch": (0.5, 1.0), "supervised-dino": (0.9, 1.4)}
RUNS |= {
    f"dino {name}": ((96, 128), (2, 3), (0.1, 0.45), skill) if len(skill) > 1 else ((128,), (3,), (0.37,), skill)
    for name, skill in SKILLS.items()
}
BANK = {"split": "train", "images": 1000, "names": "b" * 8}
SETTINGS = {"knn": {"k": 20, "temperature": 0.07, **BANK}, "linear": {"epochs": 20, **BANK}}
CHOSEN = {"learning_rates": [0.1, 0.3]}


def curves(rounds, epochs):
    """Of a training whose teacher does not collapse."""
    times = np.linspace(0.5, epochs, 40)
    columns = {
        "losses": 8 - 3 * times / epochs,
        "teacher_entropy": 5 - 3 * times / epochs,
        "mean_entropy": 6 - 0.5 * times / epochs,
        "centre_entropy": 7 - times / epochs,
    }
    values = {key: [[value + 0.1 * s for s in range(rounds)] for value in column] for key, column in columns.items()}
    return {"epochs": times.tolist(), **values}


def dino_result(study, entry, images):
    """As the measurement of this entry would be."""
    run, recipe = study.runs[entry.key], study.load_recipe_of(entry.key)
    model, task = f"dino {run.of or entry.key}", run.task
    scores, right = measured(model, images, 10 * entry.seed + (task == "linear"))
    scores = np.minimum(scores, 2.3)
    of_rounds = rounds(model, right)
    if right.shape[1] > 1:
        of_rounds["entropy"] = list(scores[:, :-1].T)
    known = yaml.safe_load(recipe.to_yaml()) | {"seed": entry.seed}
    result = MEASUREMENT | {
        "kind": "run",
        "name": entry.name,
        "run": entry.key,
        "seed": entry.seed,
        "commands": reader_commands(study, entry),
        "data": data(images) | {"name": study.data, "train": 5000 if recipe.task == "dino" else 1000},
        "recipe": known,
        "epochs": recipe.epochs,
        "parameters": 5_400_000,
        "rounds": of_rounds,
        "frontier": points(scores, right, model),
        "near_lossless": point(near_lossless(scores, right, RUNS[model][2]), model),
        "history": [],
    }
    if task is not None:
        chosen = CHOSEN if task == "linear" else None
        result["probe"] = {"task": task, "words": run.evaluate, "settings": SETTINGS[task], "chosen": chosen}
    if recipe.task == "dino" and run.of is None:
        result["curves"] = curves(right.shape[1], recipe.epochs)
    return result


def write_dino(folder, images=200, seeds=(1, 2), without=()):
    """Results of the study dino; runs ``without`` are not measured."""
    study = load_study("dino")
    folder.mkdir(parents=True)
    (folder / "study.yaml").write_text(study.to_yaml())
    for entry in entries_of(study):
        if entry.seed in seeds and entry.key not in without:
            write_result(folder, dino_result(study, entry, images))
    return folder
