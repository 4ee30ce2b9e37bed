"""Models of the task dino on a page: top-1 of probes of their features, and how their training went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from progresvit.plots import COLOURS, LINES, blank_figure
from repro.compare import ComparedRun, gather
from repro.formats import FULL, Results, RunResult, TrainingCurves
from repro.study import ProbeTask, Study
from repro.tables import over_seeds, schedule, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {
    "losses": "loss",
    "teacher_entropy": "entropy of the teacher, per image",
    "mean_entropy": "entropy of its mean over images",
    "centre_entropy": "entropy of the centre",
}
"""Fields of ``TrainingCurves`` and titles of their panels."""
PROTOTYPES = 65536
"""Default number of prototypes of the task dino."""

Probed = Mapping[str, Mapping[ProbeTask, ComparedRun]]
"""Runs by the run that trained the models, then by the probe."""
Styles = Mapping[tuple[str, int], Mapping[str, Any]]
"""Styles of lines, by run and round, from 0."""


def probed_runs(results: Results, study: Study) -> Probed:
    """The measured runs whose features were evaluated, in the order of the study."""
    probed: dict[str, dict[ProbeTask, ComparedRun]] = {}
    for name, run in study.runs.items():
        compared = gather(results, name)
        if run.task is not None and compared.seeds:
            of_model = probed.setdefault(run.of or name, {})
            if run.task in of_model:
                raise ValueError(f"{of_model[run.task].run} and {name} are both {run.task} of one run; take one out.")
            of_model[run.task] = compared
    return probed


def probes_table(probed: Probed) -> str:
    """A row for each trained run: top-1 of each probe in round 1 and in the full path, mean over seeds."""
    tasks: tuple[ProbeTask, ...] = ("knn", "linear")
    rows, heads = [], ["<", "<rounds", "epochs"]
    for task in tasks:
        firsts = [of_model[task] for of_model in probed.values() if task in of_model]
        name = probe_name(firsts[0].first) if firsts else task
        heads += [f"{name}, round 1, top-1 (%)", f"{name}, full path, top-1 (%)"]
    for name, of_model in probed.items():
        one = next(iter(of_model.values()))
        cells = [
            over_seeds(of_model[task], place) if task in of_model and (place == FULL or one.rounds > 1) else None
            for task in tasks
            for place in (0, FULL)
        ]
        rows.append([f"`{name}`", schedule(one), str(one.first.epochs), *cells])
    several = any(len(run.seeds) > 1 for of_model in probed.values() for run in of_model.values())
    return table(f"Top-1 of the features{', mean ± standard deviation over seeds' if several else ''}", heads, rows)


def probe_name(result: RunResult) -> str:
    """The name of a probe, such as 20-NN."""
    assert result.probe is not None
    return f"{result.probe.settings['k']}-NN" if result.probe.task == "knn" else result.probe.task


def runs_with_curves(results: Results, names: Sequence[str]) -> list[RunResult]:
    """Every seed of these runs whose training has curves over several epochs."""
    runs = [run for name in names for run in gather(results, name).seeds]
    return [run for run in runs if run.curves is not None and run.epochs > 1]


def information(runs: Sequence[RunResult]) -> tuple[float, ...]:
    """Nats about the image in the teacher's output at the end of training, for each round: the lowest over seeds."""
    ends = [
        [mean - each for each, mean in zip(result.curves.teacher_entropy[-1], result.curves.mean_entropy[-1])]
        for result in runs
        if result.curves is not None
    ]
    return tuple(min(of_round) for of_round in zip(*ends))


def curves_figure(runs: Sequence[RunResult]) -> Figure:
    """Four panels against epochs: a colour for each run and round, a line for each seed; dotted the highest entropy."""
    figure = blank_figure(height=6.4)
    panels: list[Axes] = list(figure.subplots(2, 2, sharex=True).flat)
    least = min(min(information([result])) for result in runs)
    figure.suptitle(f"DINO: outputs end with {least:.1f} nats or more about the image", fontsize=11)
    styles = _styles(runs)
    for axes, (field, title) in zip(panels, PANELS.items()):
        axes.set_title(title, fontsize=11)
        axes.set_ylabel("nats", fontsize=11)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        for result in runs:
            _draw(axes, result, field, styles)
        if field != "losses":
            for count in sorted({result.recipe["task_options"].get("prototypes", PROTOTYPES) for result in runs}):
                axes.axhline(math.log(count), color="0.4", linestyle=":", linewidth=1.2, label=f"ln {count:,}")
            axes.set_ylim(bottom=0)
    for axes in panels[2:]:
        axes.set_xlabel("epochs", fontsize=11)
    _legend(figure, styles)
    return figure


def _styles(runs: Sequence[RunResult]) -> Styles:
    keys = dict.fromkeys((result.run, s) for result in runs for s in range(len(result.rounds.resolutions)))
    return {
        key: {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number % len(LINES)], "linewidth": 1.4}
        for number, key in enumerate(keys)
    }


def _draw(axes: Axes, result: RunResult, field: str, styles: Styles) -> None:
    curves = result.curves
    assert isinstance(curves, TrainingCurves)
    for s, values in enumerate(zip(*getattr(curves, field))):
        label = f"{_label(styles, result.run, s)}, seed {result.seed}"
        axes.plot(curves.epochs, values, label=label, **styles[result.run, s])


def _legend(figure: Figure, styles: Styles) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=_label(styles, *key), **style) for key, style in styles.items()]
    handles.append(Line2D([], [], label="uniform output", color="0.4", linestyle=":", linewidth=1.2))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 2), fontsize=10, frameon=False)


def _label(styles: Styles, run: str, s: int) -> str:
    return f"{run}, round {s + 1}" if (run, 1) in styles else run
