"""Is a progressive model worth it on this data? It is compared with a plain ViT of equal training compute.

Both are trained by one recipe from the same weights. The plain ViT is the last round of the progressive model: its
resolution and width, without gates. A step of the progressive model costs more MACs, so the plain ViT gets more epochs.
Both are evaluated on the same held-out images. Early exits use a near-lossless threshold: each half of the images uses
the one that was chosen on the other half.

Letters: N images, S rounds, T turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from progresvit import api
from progresvit.analysis.routing_figures import curve_thresholds
from progresvit.analysis.sample import load_sample
from progresvit.compute import cumulative_gmacs
from progresvit.config import ModelConfig
from progresvit.distributed import Processes
from progresvit.engine.measurement import Measurement, hardware, rates_in_turns
from progresvit.engine.speed import TimedModel, plain_config
from progresvit.evaluation import DataSource, EvalOptions, Records, evaluate, read_records
from progresvit.evaluation.records import split_by_id
from progresvit.evaluation.source import default_batch
from progresvit.io.files import replace_file
from progresvit.io.parse import dump_json
from progresvit.io.weights import weights_hash
from progresvit.metrics.arrays import Bools, Ints
from progresvit.metrics.interval import Interval, mean_interval, paired_change, share_interval
from progresvit.model import ProgResViT
from progresvit.plots import COLOURS, MARKERS, legend_below, new_panels, render
from progresvit.routing.decide import at_exit, exit_rounds
from progresvit.table import Column, Row, Table, decimals, interval
from progresvit.training.build import build_model
from progresvit.training.check_run import check_run_options
from progresvit.training.loop import train
from progresvit.training.recipe import Recipe, load_recipe
from progresvit.training.run_folder import RECIPE_FILE
from progresvit.training.tasks.registry import make_task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECIPE = "own_images"
PLAIN, PROGRESSIVE = "plain", "progressive"
"""Names of the two models: their run folders and records in the folder of the comparison."""
RESULT, FIGURE = "worth.json", "worth.png"
EQUAL = "equal training compute"
PASSES = 3
"""A training step in forward passes: the backward pass takes two."""
TOLERANCE = 0.05
"""Difference of the training computes from which on it is reported, as a share."""
TURNS, LIKELY_OF_TURNS = 10, 2.262
"""Timings of each model, and Student's 97.5 % quantile for this number."""
SECONDS = {"cpu": 1.0, "cuda": 0.5}
"""Approximate duration of a timing, by the kind of device."""
TIMED = {"cpu": 64, "cuda": 4096}
"""Images of a pass, by the kind of device; held-out images are repeated if there are fewer."""
DRAWN = 512
"""Held-out images among which images are timed, at most."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """One way to answer the held-out images, with 95 % intervals."""

    model: str
    epochs: int
    training_tmacs: float
    """Multiply-accumulates of the training, forward and backward, in 10^12, in the paper's convention."""
    exit_shares: tuple[float, ...]
    top1: Interval
    gmacs: Interval
    """Average over the images, in the paper's convention."""
    images_per_s: Interval | None = None
    """Over the timings; None for what is not timed."""


@dataclass(frozen=True, kw_only=True)
class Worth:
    """The comparison. A change leads from the plain ViT to the progressive model with early exits."""

    answers: Mapping[str, Answers]
    """By name; the plain ViT and the progressive model with early exits first."""
    images: int
    """Held-out images."""
    timed: int
    """Different images that were timed."""
    hardware: str
    top1_change: Interval
    gmacs_change: Interval
    speed: Interval
    """Images/s of the progressive model, as a multiple of the plain ViT's."""
    curve: tuple[tuple[float, float], ...]
    """GMACs and top-1 of the progressive model over all thresholds."""

    def to_json(self) -> str:
        return dump_json({**asdict(self), "compute": self.compute, "verdict": self.verdict}) + "\n"

    @property
    def compute(self) -> str:
        """The training compute of the plain ViT, relative to the progressive model's."""
        plain, progressive = (own.training_tmacs for own in list(self.answers.values())[:2])
        change = plain / progressive - 1
        return EQUAL if abs(change) <= TOLERANCE else f"{1 + change:.0%} of the compute for the plain ViT"

    @property
    def verdict(self) -> str:
        """Which model to use. Where an interval contains no difference, there is no clear difference."""
        top1, speed = self.top1_change, self.speed
        better = int(top1.lowest > 0) - int(top1.highest < 0)
        faster = int(speed.lowest > 1) - int(speed.highest < 1)
        points = f"({100 * top1.lowest:+.1f} to {100 * top1.highest:+.1f} points)"
        equal = f"No clear difference in top-1 on {self.images} images: {100 * top1.mean:+.1f} points {points}"
        rates = f"({speed.lowest:.2f} to {speed.highest:.2f})"
        accuracy = f"{abs(100 * top1.mean):.1f} points {'higher' if better > 0 else 'lower'} top-1 {points}"
        pace = f"{speed.mean:.2f} times the images/s {rates}" if faster else f"no clear difference in images/s {rates}"
        if not better and not faster:
            return (
                f"{equal}, and none in images/s {rates}: use either, but top-1 may differ by up to "
                f"{100 * max(-top1.lowest, top1.highest):.1f} points on other images; more held-out images narrow "
                "this range."
            )
        if not better:  # the choice rests on the speed alone
            use, loss = ("progressive model", -top1.lowest) if faster > 0 else ("plain ViT", top1.highest)
            return (
                f"{equal}, and the progressive model has {pace}: use the {use} for its speed, but its top-1 may be up "
                f"to {100 * loss:.1f} points lower on other images; more held-out images narrow this range."
            )
        if better * faster < 0:
            accurate, fast = ("progressive model", "plain ViT") if better > 0 else ("plain ViT", "progressive model")
            use = f"{accurate} for accuracy and the {fast} for speed"
        else:
            use = "progressive model" if better > 0 else "plain ViT"
        return f"Use the {use}: the progressive model has {accuracy} and {pace}."


def compare(
    recipe: Recipe,
    *,
    data: str,
    out: Path,
    processes: Processes,
    resume: bool = False,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> Worth:
    """Train, evaluate and time both models, and write everything into a folder.

    Args:
        recipe: How to train a ProgResViT of two or more rounds; the plain ViT is derived from it.
        data: Images with a folder for each class, with or without splits.
        out: The folder of the comparison: both runs, their records, ``worth.json`` and ``worth.png``.
        processes: A single process, and its device.
        resume: Continue the comparison in the folder.
        overwrite: Replace the comparison in the folder.
        say: Prints a line about what begins.
    """
    if processes.count > 1:
        raise ValueError("a comparison is timed in one process; start it without torchrun.")
    if recipe.run.patience is not None:
        raise ValueError("run.patience ends a training early, so that computes differ; set run.patience=null.")
    if recipe.task != "supervised" or recipe.optimizer.freeze:
        raise ValueError(
            "the computes of the trainings are known for task=supervised and optimizer.freeze=[] only; leave both out."
        )
    _, task = make_task(recipe)
    check_run_options(recipe, task, processes)
    _check_folder(out, resume=resume, overwrite=overwrite)
    splits = task.find_splits(recipe, data)
    names = np.array([entry.name for entry in splits.val.entries])
    split_by_id(names, 0.5, seed=0)  # too few images are an error before anything is trained
    config = build_model(recipe, task.class_ids(splits)).config
    if not isinstance(config, ModelConfig) or len(config.rounds) < 2:
        raise ValueError("a comparison needs a ProgResViT of two or more rounds; set model.start to such a model.")
    if config.num_classes != len(splits.val.class_ids):
        raise ValueError(
            f"the data has {len(splits.val.class_ids)} classes and the model {config.num_classes}; leave out "
            "model.num_classes."
        )
    recipes = {PLAIN: plain_recipe(recipe, config), PROGRESSIVE: recipe}
    for name in recipes if resume else ():
        _check_continued(out / name / RECIPE_FILE, recipe)
    for name in (RESULT, FIGURE) if overwrite else ():
        (out / name).unlink(missing_ok=True)
    for name, own in recipes.items():
        train(own, data=data, out=out / name, processes=processes, resume=resume, overwrite=overwrite)
    say(f"evaluating and timing both models on {len(names):,} held-out images")
    source = DataSource(data=data, split=recipe.data.val)
    records = {
        name: _evaluate(out, name, source, processes, workers=recipe.data.workers, overwrite=overwrite)
        for name in recipes
    }
    worth = _compare(recipes, records, out, source, processes, trained_on=len(splits.train))
    replace_file(out / RESULT, worth.to_json())
    replace_file(out / FIGURE, render(worth_figure(worth), ".png"))
    return worth


def plain_recipe(recipe: Recipe, config: ModelConfig) -> Recipe:
    """The recipe of the plain ViT: the last round of ``config`` alone, without gates, in epochs of equal compute."""
    last = config.rounds[-1].model_dump(mode="json")
    changes = {"fields": {**recipe.model.fields, "rounds": [last]}, "psg": False, "merge": None}
    model = recipe.model.model_copy(update={**changes, "input_resolution": config.input_side})
    ratio = cumulative_gmacs(config)[-1] / cumulative_gmacs(plain_config(config))[-1]
    epochs = max(1, round(recipe.epochs * ratio) - recipe.schedule.cooldown)
    schedule = recipe.schedule.model_copy(update={"epochs": epochs})
    return recipe.model_copy(update={"model": model, "schedule": schedule})


def _check_continued(path: Path, recipe: Recipe) -> None:
    """Refuse changes that a single run may make when it resumes, but by which the two models would differ."""
    if not path.is_file():
        return
    former = load_recipe(str(path))
    for key, before, now in (
        ("optimizer.lr", former.optimizer.lr, recipe.optimizer.lr),
        ("run.precision", former.run.precision, recipe.run.precision),
    ):
        if before != now:
            raise ValueError(
                f"{path.parent} was trained with another {key}, {before}, so the models would differ by more than "
                "their rounds; continue with that value, or start both again with overwrite=True."
            )


def _check_folder(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse a folder with other files, and a comparison that is neither continued nor replaced."""
    if resume and overwrite:
        raise ValueError("resume=True continues a comparison and overwrite=True replaces it; pass only one of them.")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder.")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not any((out / name).is_dir() for name in (PLAIN, PROGRESSIVE)):
        raise ValueError(f"{out} holds other files and no comparison; name a new folder.")
    if not resume and not overwrite:
        raise ValueError(
            f"{out} already holds a comparison; pass resume=True to continue it, overwrite=True to replace it, or name "
            "another folder."
        )


def _evaluate(
    out: Path,
    name: str,
    source: DataSource,
    processes: Processes,
    *,
    workers: int,
    overwrite: bool,
) -> Records:
    """The records of a model on the held-out images; existing records are reused if the weights agree."""
    path, folder = out / f"{name}.parquet", out / name / "model"
    model = api.load(folder)
    if path.exists() and not overwrite:
        records = read_records(path)
        if records.header.weights_sha256 == weights_hash(model):
            return records
    options = EvalOptions(batch=default_batch(processes.device), workers=workers, overwrite=overwrite or path.exists())
    return evaluate(model, source, path, name=str(folder), processes=processes, options=options)


def cross_fitted_rounds(records: Records) -> Ints:
    """The round, from 0, after which each image exits: (N,). Its threshold is near-lossless on the other half."""
    first, scores = split_by_id(records.ids, 0.5, seed=0), records.exit_scores()
    rounds = np.zeros(len(records), np.int64)
    for half in (first, ~first):
        rounds[~half] = exit_rounds(scores[~half], records.take(half).near_lossless().threshold)
    return rounds


def _compare(
    recipes: Mapping[str, Recipe],
    records: Mapping[str, Records],
    out: Path,
    source: DataSource,
    processes: Processes,
    *,
    trained_on: int,
) -> Worth:
    plain, progressive = records[PLAIN], records[PROGRESSIVE]
    assert np.array_equal(plain.ids, progressive.ids)  # the same files were readable
    routed = cross_fitted_rounds(progressive)
    rates, timed = _time(out, source, np.bincount(routed, minlength=progressive.rounds), processes)

    def answers(name: str, rounds: Ints, rate: Any = None) -> Answers:
        own, recipe = records[name], recipes[name]
        correct, spent = at_exit(own.correct, rounds), np.asarray(own.gmacs())[rounds]
        return Answers(
            model=name,
            epochs=recipe.epochs,
            training_tmacs=PASSES * own.full_gmacs() * recipe.epochs * trained_on / 1e3,
            exit_shares=tuple((np.bincount(rounds, minlength=own.rounds) / len(own)).tolist()),
            top1=share_interval(int(correct.sum()), len(own)),
            gmacs=mean_interval(spent),
            images_per_s=None if rate is None else mean_interval(rate, LIKELY_OF_TURNS),
        )

    def all_at(s: int) -> Ints:
        return np.full(len(progressive), s)

    before: Bools = plain.correct[:, 0]
    ratio = mean_interval(np.log(rates[:, 1] / rates[:, 0]), LIKELY_OF_TURNS)
    return Worth(
        answers={
            "plain ViT": answers(PLAIN, all_at(0), rates[:, 0]),
            "progressive, early exits": answers(PROGRESSIVE, routed, rates[:, 1]),
            **{f"progressive, round {s + 1}": answers(PROGRESSIVE, all_at(s)) for s in range(progressive.rounds)},
        },
        images=len(plain),
        timed=timed,
        hardware=hardware(str(processes.device)),
        top1_change=paired_change(at_exit(progressive.correct, routed), before),
        gmacs_change=mean_interval(np.asarray(progressive.gmacs())[routed] - plain.full_gmacs()),
        speed=Interval(mean=math.exp(ratio.mean), lowest=math.exp(ratio.lowest), highest=math.exp(ratio.highest)),
        curve=tuple(
            (point.gmacs, point.top1) for point in progressive.frontier(curve_thresholds(progressive.exit_scores()))
        ),
    )


def _time(out: Path, source: DataSource, exits: Ints, processes: Processes) -> tuple[Any, int]:
    """Images/s of the plain and of the progressive model in turns, (T, 2), and the number of different images.

    The thresholds let the same shares continue as among all held-out images.
    """
    reached = np.cumsum(exits[::-1])[::-1]  # images that run each round: (S,)
    continuing = [float(later / max(1, here)) for here, later in pairwise(reached)]
    device = processes.device
    models = [api.as_progresvit(api.load(out / name / "model"), "the engine") for name in (PLAIN, PROGRESSIVE)]
    sample = load_sample(models[0].config, source, images=min(TIMED[device.type], DRAWN), workers=0)
    copies = math.ceil(TIMED[device.type] / len(sample))
    inputs = sample.pixels.to(device).repeat(copies, 1, 1, 1)  # (N, C, H, H) -> (copies * N, C, H, H)

    def subject(model: ProgResViT) -> TimedModel:
        return TimedModel(
            model,
            eager=False,
            device=str(device),
            precision="fp32",
            batch=None,
            continuing=continuing if len(model.config.rounds) > 1 else 1.0,
            inputs=inputs,
        )

    seconds = SECONDS[device.type]
    measurements = [
        Measurement(partial(subject, model), device=str(device), threads=None, seconds=seconds) for model in models
    ]
    return rates_in_turns(measurements, turns=TURNS, seconds=seconds), len(sample)


def worth_table(worth: Worth) -> Table:
    """A row for each way to answer the held-out images."""
    columns = [
        Column("name", "model"),
        Column("epochs", "epochs"),
        Column("training_tmacs", "training TMACs", lambda value: f"{value:.4g}"),
        Column("top1", "top-1 (%)", interval),
        Column("gmacs", "GMACs", decimals),
        Column("exits", "exit after round (%)"),
        Column("images_per_s", "images/s", _rate),
    ]
    rows: list[Row] = [
        {
            "name": name,
            "epochs": own.epochs,
            "training_tmacs": own.training_tmacs,
            "top1": own.top1,
            "gmacs": own.gmacs.mean,
            "exits": " / ".join(f"{100 * share:.0f}" for share in own.exit_shares),
            "images_per_s": own.images_per_s,
        }
        for name, own in worth.answers.items()
    ]
    title = f"{worth.images} held-out images; images/s on {worth.hardware}; with 95 % intervals"
    return Table(title, columns, rows)


def worth_lines(worth: Worth) -> list[str]:
    """The changes from the plain ViT to the progressive model, and which to use."""
    top1, gmacs, speed = worth.top1_change, worth.gmacs_change, worth.speed
    lines = [
        f"from the plain ViT to early exits: top-1 {100 * top1.mean:+.1f} points ({100 * top1.lowest:+.1f} to "
        f"{100 * top1.highest:+.1f}), GMACs {gmacs.mean:+.3f} ({gmacs.lowest:+.3f} to {gmacs.highest:+.3f}), "
        f"images/s × {speed.mean:.2f} ({speed.lowest:.2f} to {speed.highest:.2f})",
        "Intervals are over images and timings. One training of each was compared; another seed gives other models.",
    ]
    if worth.compute != EQUAL:
        lines.append(f"The trainings are not equal ({worth.compute}), because epochs are whole; train for more epochs.")
    return [*lines, worth.verdict]


def _rate(value: Interval) -> str:
    digits = 0 if value.mean >= 100 else 1
    return f"{value.mean:,.{digits}f} ({value.lowest:,.{digits}f} to {value.highest:,.{digits}f})"


def worth_figure(worth: Worth) -> Figure:
    """Top-1 against GMACs and against images/s, with 95 % intervals."""
    figure, panels = new_panels(
        title=f"Plain and progressive, at {worth.compute}",
        conditions=f"{worth.images} held-out images; {worth.hardware}",
        xs=["GMACs per image (paper convention)", "images per second"],
        y="top-1 accuracy (%)",
    )
    entries: dict[str, dict[str, Any]] = {}
    spent, top1 = np.array(worth.curve).T
    panels[0].plot(spent, 100 * top1, color="0.6", linewidth=1)
    for number, (name, own) in enumerate(worth.answers.items()):
        entries[name] = {"color": COLOURS[number % 7], "marker": MARKERS[number % 7], "linestyle": "none"}
        for axes, x in zip(panels, (own.gmacs, own.images_per_s)):
            if x is not None:
                (across, up) = ([[v.mean - v.lowest], [v.highest - v.mean]] for v in (x, own.top1))
                axes.errorbar(
                    [x.mean], [100 * own.top1.mean], xerr=across, yerr=100 * np.array(up), capsize=3, **entries[name]
                )
    entries["progressive, all thresholds"] = {"color": "0.6", "linewidth": 1}
    legend_below(figure, entries, columns=2)
    return figure
