"""Models under distribution shift, beside each other: top-1 and average GMACs of all rounds and of routed answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from progresvit import table
from progresvit.evaluation.shift import ShiftSummary, Suite, check_beside
from progresvit.plots import COLOURS, MARKERS, beside, draw_share, legend_below, new_panels, percent_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUITES: dict[Suite, str] = {
    "imagenet-v2": "ImageNet-V2",
    "imagenet-a": "ImageNet-A",
    "imagenet-r": "ImageNet-R",
    "imagenet-sketch": "ImageNet-Sketch",
    "imagenet-c": "ImageNet-C",
    "generated": "generated\ncorruptions",
}
"""Labels of the rows, in their order."""
STEP = 0.16
"""Distance of the marks of a row, which are one apart."""


def shift_figure(results: Sequence[ShiftSummary]) -> Figure:
    """A row for each suite; in it, marks for all rounds (filled) and for routed answers (open) of each model.

    Bars are 95 % intervals over images (Wilson). A mean over several corruptions has none, since its sets are copies of
    the same images. A model has no mark in suites on which it was not evaluated.

    Args:
        results: Summaries that ``progresvit shift`` wrote, of any models and suites; models keep this order.
    """
    check_beside(results)
    suites = [suite for suite in SUITES if any(result.suite == suite for result in results)]
    models = list(dict.fromkeys(result.model for result in results))
    names = _short_names(models)
    answers = [(model, False) for model in models]
    answers += [(model, True) for model in models if any(_is_routed(result, model) for result in results)]
    answers.sort(key=lambda answer: models.index(answer[0]))
    figure, (top1, gmacs) = new_panels(
        title=_title(results),
        xs=["top-1 accuracy (%)", "average GMACs per image\n(paper convention)"],
        y=["", ""],
        height=1.9 + len(suites) * max(0.5, STEP * len(answers)),
    )
    entries: dict[str, dict[str, Any]] = {}
    for number, (model, routed) in enumerate(answers):
        place = models.index(model)
        look: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
        look |= {"linestyle": "none", "markerfacecolor": "white" if routed else look["color"]}
        entries[f"{names[model]}, {_routing(results, model)}" if routed else names[model]] = look
        for result in results:
            if result.model != model or (routed and result.routed is None):
                continue
            row = suites.index(result.suite) + beside(number, len(answers), STEP)
            point = result.routed if routed and result.routed is not None else result.full
            if len(result.sets) == 1:
                draw_share(top1, row, point.interval(result.images), **look)
            else:
                top1.plot([100 * point.top1], [row], markersize=5, **look)
            gmacs.plot([point.gmacs], [row], markersize=5, **look)
    top1.set_yticks(range(len(suites)), [SUITES[suite] for suite in suites], fontsize=10)
    gmacs.set_yticks(range(len(suites)), [])
    for axes in (top1, gmacs):
        axes.set_ylim(len(suites) - 0.5, -0.5)
    gmacs.set_xlim(0, 1.08 * max(result.full.gmacs for result in results))
    legend_below(figure, entries)
    return figure


def _is_routed(result: ShiftSummary, model: str) -> bool:
    return result.model == model and result.routed is not None


def _routing(results: Sequence[ShiftSummary], model: str) -> str:
    """How a model is routed; without the threshold if it differs between suites."""
    thresholds = {table.threshold(result.threshold) for result in results if _is_routed(result, model)}
    return f"routed at τ = {thresholds.pop()}" if len(thresholds) == 1 else "routed"


def _short_names(models: Sequence[str]) -> dict[str, str]:
    """The last part of each path, or the whole path if two models have the same. A run's model has the run's name."""
    last = {model: model.rstrip("/").removesuffix("/model").rsplit("/", 1)[-1] for model in models}
    return last if len(set(last.values())) == len(models) else {model: model for model in models}


def _title(results: Sequence[ShiftSummary]) -> str:
    """What routing costs and saves; the accuracy of the first model if no answers are routed."""
    routed = [(result.full, result.routed) for result in results if result.routed is not None]
    if not routed:
        first = [result.full.top1 for result in results if result.model == results[0].model]
        return f"{_short_names([results[0].model])[results[0].model]}: top-1 of {percent_range(first)} under shift"
    changes = [100 * (exits.top1 - full.top1) + 0.0 for full, exits in routed]
    saved = percent_range([1 - exits.gmacs / full.gmacs for full, exits in routed])
    ends = " to ".join(dict.fromkeys(f"{change:+.2f}" for change in (min(changes), max(changes))))
    return f"Under shift, routing changes top-1 by {ends} points and saves {saved} of the GMACs"
