"""The blocks of a page: under each name, the tables and figures that the study asks for.

``about``, ``claims`` (if there is a claims.yaml) and ``runs``; each comparison by its name; for a routing measurement R
``R.settings``, ``R.routers``, ``R.abstention``, ``R.equal-accuracy`` and ``R.groups``; for a shift measurement S
``S.severities`` and ``S.corruptions``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from progresvit.analysis import results_figures as draw
from progresvit.evaluation.table import Table
from progresvit.report import routing_tables, shift_tables, tables
from progresvit.results.compare import LineUp, line_up
from progresvit.results.format import Measurement
from progresvit.results.format_routing import RoutingResult
from progresvit.results.format_shift import ShiftResult
from progresvit.results.read import Results, check_comparable
from progresvit.results.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOT_MEASURED = "Not measured."


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure that is drawn when it is wanted."""

    name: str
    """Of its file."""
    about: str
    """For those who do not see it."""
    draw: Callable[[], Figure]
    data: str
    """Hash of what it shows."""


@dataclass(frozen=True)
class Block:
    """What stands between two markers."""

    heading: str
    """For a page that is made from nothing."""
    parts: Sequence[str | Picture]

    @property
    def pictures(self) -> list[Picture]:
        return [part for part in self.parts if isinstance(part, Picture)]

    def to_markdown(self, figures: str) -> str:
        """``figures`` is the way from the page to their folder."""
        lines = []
        for part in self.parts:
            if isinstance(part, Picture):
                lines.append(f'<img src="{figures}/{part.name}" width="640" alt="{part.about}">')
            else:
                lines.append(part.strip("\n"))
        return "\n\n".join(lines)


def make_blocks(results: Results, study: Study, claims: str | None) -> dict[str, Block]:
    """All blocks in the order of a page; ``claims`` is their table, if there is one."""
    blocks: dict[str, Block] = {"about": Block("What was measured", _about(results))}
    if claims is not None:
        blocks["claims"] = Block("The paper's claims", [claims])
    made: dict[str, Block] = {}
    for name in study.comparisons:
        _add(made, {name: _comparison(name, line_up(results, study, name))})
    for name in study.routing:
        _add(made, _routing(name, results.routing.get(name)))
    for name in study.shift:
        _add(made, _shift(name, shifted_models(results, study, name), len(study.shift[name].models)))
    _add(made, {"runs": Block("All runs", _runs(results))})
    _add(blocks, made)
    names = [picture.name for block in blocks.values() for picture in block.pictures]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two figures of the page would be called {name}; rename a comparison in study.yaml.")
    return blocks


def shifted_models(results: Results, study: Study, name: str) -> dict[str, ShiftResult]:
    """The models of a shift measurement that were measured, by name."""
    files = {model: study.file_of(name, model) for model in study.shift[name].models}
    found = {model: results.shift[file] for model, file in files.items() if file in results.shift}
    check_comparable(list(found.values()), f"the shift measurement {name}")
    sets = {model: {(one.corruption, one.severity) for one in result.sets} for model, result in found.items()}
    for model, ours in sets.items():
        others = next(iter(sets.values()))
        if ours != others:
            raise ValueError(
                f"the shift measurement {name} compares {next(iter(sets))} and {model}, which are of different "
                f"corruptions: {len(others)} sets and {len(ours)}, {len(ours & others)} of them the same. Measure both "
                "alike."
            )
    return found


def _add(blocks: dict[str, Block], more: dict[str, Block]) -> None:
    for name, block in more.items():
        if name in blocks:
            raise ValueError(f"two blocks of the page are called {name}; rename one of them in study.yaml.")
        blocks[name] = block


def _about(results: Results) -> list[str]:
    everything = [*results.runs.values(), *results.routing.values(), *results.shift.values()]
    sets: dict[tuple[str, int, int], int | None] = {}
    for one in everything:
        which = one.data.name, one.data.val, one.data.classes
        sets[which] = one.data.train or sets.get(which)  # what was only measured does not say
    lines = []
    for (name, val, classes), train in sets.items():
        learned = f"; models learned from {train:,} others" if train is not None else ""
        lines.append(f"- {name}: measured on {val:,} held-back pictures of {classes} classes{learned}.")
    return [
        "\n".join(lines),
        "Top-1 is in percent, GMACs are those of the paper's convention, and a run of several seeds is told by their "
        "mean. Differences are taken picture by picture, with a 95 % interval. It covers the draw of the pictures and "
        "not that of the training seed; how far seeds lie apart is told where there are two or more.",
    ]


def _comparison(name: str, compared: LineUp) -> Block:
    if not compared.rows:
        return Block(compared.title, [NOT_MEASURED])
    parts: list[str | Picture] = _written([tables.accuracy_table(compared)])
    notes = []
    if compared.missing:
        notes.append(f"Not measured: {', '.join(compared.missing)}.")
    if compared.unmeasured_base is not None:
        notes.append(f"Not measured, and so compared with nothing: {compared.unmeasured_base}.")
    parts += [" ".join(notes)] if notes else []
    data = [
        compared.title,
        compared.against and [compared.against.label, [_drawn(one) for one in compared.against.seeds]],
        [[row.label, [_drawn(one) for one in row.seeds]] for row in compared.rows],
    ]
    parts.append(
        Picture(
            name=f"{name}-accuracy.png",
            about=f"{compared.title}: top-1 of each run, and the differences with their 95 % intervals",
            draw=lambda: draw.accuracy_figure(compared),
            data=_hash("accuracy", data),
        )
    )
    parts += _written([tables.leaving_table(compared)])
    parts.append(
        Picture(
            name=f"{name}-frontier.png",
            about=f"{compared.title}: top-1 against average GMACs of each run",
            draw=lambda: draw.comparison_figure(compared),
            data=_hash("frontier", data),
        )
    )
    return Block(compared.title, parts)


def _matched(result: RoutingResult) -> list[str | Picture]:
    """The first router's table, which is the paper's, and the others folded."""
    made = [routing_tables.matched_table(one) for one in result.matched]
    return [*_written(made[:1]), *(_fold(one.title, one) for one in made[1:])]


def _routing(name: str, result: RoutingResult | None) -> dict[str, Block]:
    headings = {
        "settings": "Thresholds",
        "routers": "Learned routers",
        "abstention": "Withheld answers",
        "equal-accuracy": "Compute at equal accuracy",
        "groups": "Groups of classes",
    }
    if result is None:
        return {f"{name}.{part}": Block(heading, [NOT_MEASURED]) for part, heading in headings.items()}
    data = _drawn(result)

    def picture(part: str, about: str, make: Callable[[], Figure]) -> Picture:
        return Picture(name=f"{name}-{part}.png", about=about, draw=make, data=_hash(part, data))

    matched = [(routing_tables.matched_title(one), one) for one in result.matched]
    content: dict[str, list[str | Picture]] = {
        "settings": [
            *_written([routing_tables.settings_table(result)]),
            picture(
                "settings", "Top-1 against average GMACs with thresholds", lambda: draw.routing_frontier_figure(result)
            ),
            *_written([routing_tables.halves_table(result)]),
        ],
        "routers": _matched(result),
        "abstention": _written([routing_tables.withheld_table(result), routing_tables.risk_table(result)]),
        "equal-accuracy": _written([routing_tables.equal_accuracy_table(result)]),
        "groups": _written([routing_tables.groups_table(result)]),
    }
    if matched:
        made = picture("routers", "What routers gain over entropy", lambda: draw.gains_figure(matched))
        content["routers"].insert(0, made)
    if result.abstention:
        made = picture("abstention", "Risk against coverage", lambda: draw.risk_figure(result.abstention))
        content["abstention"].append(made)
    if result.groups:
        made = picture("groups", "Share of each group that leaves early", lambda: draw.groups_figure(result))
        content["groups"].append(made)
    return {f"{name}.{part}": Block(headings[part], parts or [NOT_MEASURED]) for part, parts in content.items()}


def _shift(name: str, models: dict[str, ShiftResult], asked: int) -> dict[str, Block]:
    severities, corruptions = f"{name}.severities", f"{name}.corruptions"
    headings = {severities: "Under corruption", corruptions: "Corruption by corruption"}
    if not models:
        return {block: Block(heading, [NOT_MEASURED]) for block, heading in headings.items()}
    parts = _written(shift_tables.severity_tables(models))
    if len(models) < asked:
        parts.append(f"Measured of these models: {', '.join(models)}; {asked - len(models)} not measured.")
    if len(models) > 1:
        parts.append(
            Picture(
                name=f"{name}-accuracy.png",
                about="Top-1 of several models by severity",
                draw=lambda: draw.shifted_accuracy_figure(models),
                data=_hash("shifted accuracy", {model: _drawn(one) for model, one in models.items()}),
            )
        )
    plain = {model: one for model, one in models.items() if len(one.gmacs_paper) == 1}
    parts += [_severity_picture(model, one, asked, plain) for model, one in models.items() if model not in plain]
    folded = [_fold(table.title, table) for table in shift_tables.corruption_tables(models)]
    return {severities: Block(headings[severities], parts), corruptions: Block(headings[corruptions], folded)}


def _severity_picture(model: str, result: ShiftResult, asked: int, plain: dict[str, ShiftResult]) -> Picture:
    title = f"Frontiers under corruption: {model}" if asked > 1 else "Frontiers under corruption"
    return Picture(
        name=f"{result.name}-severities.png",
        about=f"Top-1 against average GMACs of {model} by severity; stars: a threshold calibrated on clean pictures",
        draw=lambda: draw.severity_figure(result, title=title, beside=plain),
        data=_hash(title, [_drawn(result), {name: _drawn(one) for name, one in plain.items()}]),
    )


def _runs(results: Results) -> list[str | Picture]:
    found: list[Measurement] = [*results.runs.values(), *results.routing.values(), *results.shift.values()]
    parts = _written([tables.runs_table(found)])
    for one in found:
        commands = "\n".join(one.commands)
        machine = f"progresvit at {one.revision}, torch {one.machine.torch}, Python {one.machine.python}"
        summary = f"<details><summary>Commands of <code>{one.name}</code></summary>"
        parts.append(f"{summary}\n\n```\n{commands}\n```\n\n{machine}.\n\n</details>")
    return parts


def _fold(title: str, table: Table) -> str:
    body = table.to_markdown().removeprefix(f"{table.title}\n\n").strip("\n")
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def _written(made: Sequence[Table | None]) -> list[str | Picture]:
    return [table.to_markdown() for table in made if table is not None]


def _drawn(result: Measurement) -> Any:
    """What a figure may show of a measurement: all but how and when it was made."""
    hidden = set(Measurement.model_fields) - {"name", "seed", "data"}
    return result.model_dump(mode="json", exclude=hidden)


def _hash(figure: str, data: Any) -> str:
    return hashlib.sha256(json.dumps([figure, data], sort_keys=True).encode()).hexdigest()
