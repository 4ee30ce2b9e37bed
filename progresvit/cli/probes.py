"""Options and report of ``progresvit evaluate`` on a model's features: k-NN and the linear probe."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from progresvit.cli import options, output
from progresvit.io.parse import count_of

if TYPE_CHECKING:
    from progresvit.evaluation import Records

KNN, LINEAR = "knn", "linear"
HEADS = ("classification", "segmentation")
FOR_KNN = ("k", "temperature")
FOR_LINEAR = ("epochs", "learning_rates", "blocks", "in_memory")
FOR_BOTH = ("crop", "bank_split")
FOR_HEADS = ("unlabelled", "restrict_classes")
NOT_FOR_PROBES = "for predictions of the model's head, and knn and linear choose among the labelled classes of the data"


def parse_probe(context: typer.Context, model_task: str) -> tuple[Callable[..., Records], int | None] | None:
    """The evaluation of features that ``--task`` names and its default batch; None if the head predicts.

    Options of other tasks are refused.
    """
    from progresvit.evaluation import evaluate_knn, evaluate_linear
    from progresvit.evaluation.linear_probe import BATCH
    from progresvit.io.parse import did_you_mean

    values = context.params
    task = values["task"]
    if task in (KNN, LINEAR):
        options.refuse_options(context, FOR_HEADS, NOT_FOR_PROBES)
    if task == KNN:
        options.refuse_options(context, FOR_LINEAR, "for --task linear, and this is --task knn")
        return _with(evaluate_knn, {name: values[name] for name in (*FOR_KNN, *FOR_BOTH)}), None
    if task == LINEAR:
        options.refuse_options(context, FOR_KNN, "for --task knn, and this is --task linear")
        settings = {name: values[name] for name in (*FOR_LINEAR, *FOR_BOTH)}
        if (rates := values["learning_rates"]) is not None:
            settings["learning_rates"] = options.parse_numbers(rates, "--learning-rates")
        return _with(evaluate_linear, settings), BATCH
    if task not in (None, *HEADS):
        raise ValueError(f"unknown task {task!r}; {did_you_mean(task, (*HEADS, KNN, LINEAR))}")
    if task not in (None, model_task):
        raise ValueError(f"--task {task} does not fit the model, whose task is {model_task}; leave it out.")
    options.refuse_options(context, FOR_KNN, "for --task knn")
    options.refuse_options(context, FOR_LINEAR, "for --task linear")
    options.refuse_options(context, FOR_BOTH, "for --task knn and --task linear")
    return None


def _with(function: Callable[..., Records], settings: dict[str, Any]) -> Callable[..., Records]:
    """The function with the settings that are not None."""
    return partial(function, **{name: value for name, value in settings.items() if value is not None})


def report_accuracy(records: Records) -> None:
    """Print the learning rates, the accuracy of each round, and of routing at the near-lossless threshold."""
    from progresvit.routing import near_lossless

    header = records.header
    assert header.probe is not None
    if header.probe_result is not None:
        _report_learning_rates(header.probe, header.probe_result)
    shares = output.round_accuracies(records.correct)
    output.echo(f"{_describe(header.probe)}, top-1 of {output.count_images(len(records))}: {shares} (95% intervals)")
    if header.routable and records.rounds > 1:
        point = near_lossless(records.scores(), records.correct, records.gmacs())
        assert point.top1 is not None
        output.echo(
            f"near-lossless threshold {point.threshold:.4g}: top-1 {_with_interval(point.top1, len(records))} at "
            f"{point.gmacs:.3f} GMACs on average, of {records.gmacs()[-1]:.3f}"
        )


def _describe(probe: Any) -> str:
    """Such as ``k-NN (k 20, temperature 0.07, 13,000 images of train)``."""
    images = f"{count_of(probe['images'], 'image', ',')} of {probe['split']}"
    if probe["task"] == KNN:
        return f"k-NN (k {probe['k']}, temperature {probe['temperature']:g}, {images})"
    blocks = count_of(probe.get("blocks", 1), "block")
    return f"linear probe ({blocks}, {count_of(probe['epochs'], 'epoch')}, {images})"


def _with_interval(share: float, images: int) -> str:
    """A share of the images and its 95 % interval."""
    from progresvit.metrics.interval import share_interval

    return share_interval(round(share * images), images).as_percent()


def _report_learning_rates(probe: Any, result: Any) -> None:
    """Print the held-out accuracy of every learning rate, and a note if the best is the first or the last."""
    rates, images = probe["learning_rates"], probe["held_out"]
    for s, (accuracy, best) in enumerate(zip(result["held_out_top1"], result["learning_rates"]), start=1):
        shares = ", ".join(f"{rate:g} {_with_interval(share, images)}" for rate, share in zip(rates, accuracy))
        output.echo(f"round {s}, top-1 of {images} held-out images by learning rate: {shares}; using {best:g}")
        if len(rates) > 1 and best in (min(rates), max(rates)):
            end = "lowest" if best == min(rates) else "highest"
            output.echo(
                f"note: {best:g} is the {end} learning rate that was tried; try more of them with --learning-rates.",
                err=True,
            )
