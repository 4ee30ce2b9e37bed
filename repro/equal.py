"""What the trainings of compared runs must have in common: images, epochs or compute, and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from progresvit.compute import cumulative_gmacs
from repro.formats import RunResult, SegmentationResult, check_comparable
from repro.study import Equal

COMPUTE_TOLERANCE = 0.08
"""Share by which the training compute of a run may differ from the run that it is compared with."""
PASSES = 3
"""A training step in forward passes: the backward pass takes two."""
PER_STEP = 1
"""Rounds that a step of the task ``subnetworks`` trains unless its options say otherwise."""


Trained = RunResult | SegmentationResult
"""A model that a study trained."""


def training_pmacs(result: Trained) -> float:
    """Multiply-accumulates of a training, in 10^15: those of a step's rounds, forward and backward, for every image.

    Rounds that follow each other all run in a step. Of alternatives, the task ``subnetworks`` runs some, and others run
    all. The frozen teacher of the task ``dynabert`` runs forward once, at full width, and the teacher of the task
    ``dino`` on the global crops; other teachers are not counted. What a run starts from and a probe of its features are
    not counted either.
    """
    if result.data.train is None:
        raise ValueError(f"{result.name} does not say on how many images it was trained; measure it again.")
    if isinstance(result, SegmentationResult):  # on crops of a window
        return PASSES * result.gmacs_paper[-1] * result.epochs * result.data.train / 1e6
    rounds, routed = result.rounds, result.near_lossless is not None
    if result.recipe.get("task") == "dino":
        spent = dino_gmacs(result.recipe)
    else:
        spent = step_gmacs(rounds.gmacs_paper, result.recipe, routed=routed, trained=rounds.trained_gmacs)
    return spent * result.epochs * result.data.train / 1e6  # GMACs to PMACs


def step_gmacs(
    gmacs: Sequence[float], recipe: Mapping[str, Any], *, routed: bool, trained: float | None = None
) -> float:
    """GMACs of an image in a training step of another task than ``dino``.

    Args:
        gmacs: Of each round; earlier ones are included if the rounds follow each other, which is ``routed``.
        recipe: Of the training.
        routed: Whether rounds follow each other.
        trained: GMACs of the forward pass, if the model was trained with more tokens than it is evaluated with.
    """
    task = recipe.get("task")
    trained = trained or (gmacs[-1] if routed or len(gmacs) == 1 else sum(gmacs))
    if task == "subnetworks" and not routed:
        per_step = (recipe.get("task_options") or {}).get("per_step", PER_STEP)
        trained *= 1 if per_step == "all" else per_step / len(gmacs)
    forward_only = gmacs[-1] if task == "dynabert" else 0.0
    return PASSES * trained + forward_only


def dino_gmacs(recipe: Mapping[str, Any]) -> float:
    """GMACs of an image in a training of the task ``dino``, by its recipe; every crop runs every round.

    The student runs forward and backward on all crops, the teacher forward on the global ones. The projection heads,
    which see one token of each crop, are not counted.
    """
    from progresvit.data.augment.multicrop import GLOBAL_CROPS  # these import torch, which other pages do not need
    from progresvit.training.recipe import Model
    from progresvit.training.tasks.dino import DINOOptions
    from progresvit.training.tasks.dino_loss import local_resolutions

    model, wanted = Model.model_validate({**recipe["model"], "merge": None}), DINOOptions(**recipe["task_options"])
    if model.is_of_start:
        raise ValueError("the recipe takes the rounds of its start; name them in model.resolutions and model.heads.")
    config = model.config(num_classes=0, class_ids=None, labels=None)
    sides = local_resolutions(config, wanted.local_side)
    rounds = tuple(round_.model_copy(update={"resolution": side}) for round_, side in zip(config.rounds, sides))
    of_global, of_local = (cumulative_gmacs(config_)[-1] for config_ in (config, config.replace(rounds=rounds)))
    trained = GLOBAL_CROPS * of_global + wanted.local_crops * of_local
    return PASSES * trained + GLOBAL_CROPS * of_global


def check_equal(results: Sequence[RunResult], equal: Equal | None, what: str) -> None:
    """Refuse runs of different images, precisions or probes, and of other epochs or training compute than the first.

    With ``equal`` None, trainings may differ in length.
    """
    check_comparable(results, what)
    for other in results[1:]:
        first = results[0]
        predictions = [_prediction(result) for result in (first, other)]
        if predictions[0] != predictions[1]:
            raise ValueError(
                f"{what} compares {first.name} and {other.name}, which predict by {' and '.join(predictions)}. "
                "Evaluate both in the same way, or take one of them out."
            )
        if equal == "epochs" and other.epochs != first.epochs:
            raise ValueError(
                f"{what} compares runs of equal epochs, and {first.name} was trained for {first.epochs} and "
                f"{other.name} for {other.epochs}. Train both for the same epochs, or compare at equal: compute."
            )
        if equal == "compute":
            check_compute(first, other, what)


def check_compute(first: Trained, other: Trained, what: str) -> None:
    """Refuse two runs of different training compute."""
    ours, theirs = training_pmacs(first), training_pmacs(other)
    if abs(theirs / ours - 1) > COMPUTE_TOLERANCE:
        raise ValueError(
            f"{what} compares runs of equal training compute, and {first.name} took {ours:.4g} PMACs and {other.name} "
            f"{theirs:.4g}, which differs by more than {COMPUTE_TOLERANCE:.0%}. Train {other.name} for about "
            f"{other.epochs * ours / theirs:.1f} epochs instead of {other.epochs}, or take it out."
        )


def _prediction(result: RunResult) -> str:
    """What predicts, with its settings. What a probe chose on held-out images may differ."""
    if result.probe is None:
        return "the head"
    return f"{result.probe.task} ({', '.join(f'{key} {value}' for key, value in result.probe.settings.items())})"


def check_seeds(results: Sequence[Trained], what: str) -> None:
    """Refuse runs that do not have the same seeds. A run without any is not among the results and is not asked for."""
    holders = {result.seed: result for result in reversed(results)}
    measured: dict[str, set[int | None]] = {}
    for result in results:
        measured.setdefault(result.run, set()).add(result.seed)
    for run, seeds in measured.items():
        for seed in sorted(holders.keys() - seeds, key=str):
            raise ValueError(
                f"{what} pairs runs by seed, and {run} lacks seed {seed}, which {holders[seed].run} has. Measure "
                f"{run}-{seed}, or take seed {seed} out of the study and of its results ({holders[seed].name}.json)."
            )
