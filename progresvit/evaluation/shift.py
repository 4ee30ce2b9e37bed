"""Distribution shift: ImageNet's variants from their folders, and corruptions of any dataset.

Every set gets records and a frontier of its own. Letters: N images, S rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from pydantic import Field

from progresvit import table
from progresvit.data.augment.corruption import Corruption, check_corruption, file_name
from progresvit.data.augment.corruptions import CORRUPTIONS, SEVERITIES
from progresvit.distributed import Processes
from progresvit.evaluation.classes import IMAGENET_CLASSES
from progresvit.evaluation.header import Header
from progresvit.evaluation.record_files import read_records
from progresvit.evaluation.records import Records
from progresvit.evaluation.run import evaluate
from progresvit.evaluation.source import DataSource, EvalOptions, intended_header
from progresvit.io.parse import Section, read_json
from progresvit.io.resumable import Progress
from progresvit.metrics.interval import Interval, share_interval
from progresvit.model.interface import RoundModel
from progresvit.routing import Router
from progresvit.table import Column, Row, Table

Suite = Literal["generated", "imagenet-c", "imagenet-v2", "imagenet-a", "imagenet-r", "imagenet-sketch"]

FOLDERS: Mapping[str, tuple[int, bool]] = {
    "imagenet-v2": (IMAGENET_CLASSES, False),
    "imagenet-sketch": (IMAGENET_CLASSES, False),
    "imagenet-a": (200, True),
    "imagenet-r": (200, True),
}
"""Number of classes of each set, and whether predictions are restricted to them."""

ALEXNET_ERRORS = dict(
    zip(
        CORRUPTIONS,
        (0.886428, 0.894468, 0.922640, 0.819880, 0.826268, 0.785948, 0.798360, 0.866816, 0.826572, 0.819324, 0.564592,
         0.853204, 0.646056, 0.717840, 0.606500),
    )
)  # fmt: skip
"""AlexNet's mean error over the severities of each corruption of ImageNet-C (Hendrycks and Dietterich, 2019)."""


SUMMARY = "summary.json"
"""File in the output folder of ``progresvit shift``."""


@dataclass(frozen=True)
class ShiftedSet:
    """One set of a suite."""

    name: str
    source: DataSource
    corruption: str | None = None
    severity: int | None = None
    classes: int | None = None
    """Number of classes that the data must have."""


def plan(
    suite: Suite,
    data: str,
    *,
    split: str = "val",
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
) -> list[ShiftedSet]:
    """The sets of a suite.

    ``generated`` corrupts the split of any dataset; ``imagenet-c`` reads DATA/<corruption>/<severity>/<class>; the
    others read DATA/<class>.
    """
    if suite not in get_args(Suite):
        raise ValueError(f"unknown suite {suite!r}; choose {', '.join(get_args(Suite))}.")
    if suite in FOLDERS:
        classes, restricted = FOLDERS[suite]
        return [ShiftedSet(suite, DataSource(data=data, split=".", restrict_classes=restricted), classes=classes)]
    for what, values in (("corruption", corruptions), ("severity", severities)):
        if len(set(values)) != len(values):
            raise ValueError(f"give each {what} once, not {', '.join(map(str, values))}.")
    sets = []
    for name in corruptions:
        check_corruption(name)
        if suite != "generated" and name not in CORRUPTIONS:
            raise ValueError(f"{suite} has no images of {name}; your own corruption needs suite='generated'.")
        for severity in severities:
            if severity not in SEVERITIES:
                raise ValueError(f"unknown severity {severity}; severities are from 1 to 5.")
            if suite == "generated":
                source = DataSource(data=data, split=split, corruption=Corruption(name, severity))
            else:
                source = DataSource(data=data, split=f"{name}/{severity}")
            needed = None if suite == "generated" else IMAGENET_CLASSES
            sets.append(ShiftedSet(f"{file_name(name)}_{severity}", source, name, severity, needed))
    return sets


def evaluate_sets(
    model: RoundModel,
    sets: Sequence[ShiftedSet],
    out: Path,
    *,
    name: str,
    processes: Processes,
    options: EvalOptions | None = None,
    progress: Callable[[str], Progress] | None = None,
) -> dict[str, Records]:
    """Records of every set in ``out``/records. Records that exist for this model are not evaluated again.

    Args:
        model: The model.
        sets: The sets, as :func:`plan` gives them.
        out: The folder to write to.
        name: The model's name in the headers.
        processes: Processes that share the work, and their device.
        options: Precision, batch size and so on.
        progress: Called with the name of each set; returns the callback for its images.
    """
    options = options or EvalOptions()
    if out.is_file():
        raise ValueError(f"{out} is a file; name a folder.")
    records_of, paths = {}, {shifted.name: out / "records" / f"{shifted.name}.parquet" for shifted in sets}
    for shifted in sets:  # all of them, before hours are spent on the first
        count = len(shifted.source.find().class_ids)
        if shifted.classes not in (None, count):
            raise ValueError(
                f"{shifted.name} has {shifted.classes} classes and {shifted.source.data} {count} class folders; give "
                "the folder that holds all of them."
            )
        path = paths[shifted.name]
        if path.exists() and not options.overwrite:
            records = read_records(path)
            intended = intended_header(model, shifted.source, name, options, processes)
            if records.header.identity() != intended.identity():
                raise ValueError(
                    f"{path} is of another model, data or precision; pass overwrite=True, or name another folder."
                )
            records_of[shifted.name] = records
    for shifted in sets:
        if shifted.name not in records_of:
            callback = progress(shifted.name) if progress else None
            records_of[shifted.name] = evaluate(
                model,
                shifted.source,
                paths[shifted.name],
                name=name,
                processes=processes,
                options=options,
                progress=callback,
            )
    return {shifted.name: records_of[shifted.name] for shifted in sets}


def pool(parts: Mapping[str, Records]) -> Records:
    """Several sets as one; an image counts once per set."""
    first = next(iter(parts.values()))
    columns: dict[str, Any] = {}
    for field in fields(Records):
        if field.name not in ("header", "ids") and getattr(first, field.name) is not None:
            columns[field.name] = np.concatenate([getattr(records, field.name) for records in parts.values()])
    ids = np.array([f"{name}/{id_}" for name, records in parts.items() for id_ in records.ids.tolist()])
    return replace(first, ids=ids, header=replace(first.header, corruption=None, corruption_sha256=None), **columns)


def by_severity(sets: Sequence[ShiftedSet], records_of: Mapping[str, Records]) -> dict[str, Records]:
    """All corruptions of each severity pooled, for one frontier per severity."""
    severities = sorted({shifted.severity for shifted in sets if shifted.severity is not None})
    return {
        f"severity {severity}": pool(
            {shifted.name: records_of[shifted.name] for shifted in sets if shifted.severity == severity}
        )
        for severity in severities
    }


def shift_table(
    sets: Sequence[ShiftedSet],
    records_of: Mapping[str, Records],
    threshold: float | Sequence[float] | None = None,
    router: Router | None = None,
) -> Table:
    """Top-1 of each round on each set, then the mean; with a threshold, routed top-1 and GMACs too."""
    rows: list[Row] = []
    rounds = next(iter(records_of.values())).rounds
    for shifted in sets:
        records = records_of[shifted.name]
        row: Row = {"set": shifted.name, "images": len(records)}
        row |= {f"top1_round_{s + 1}": float(share) for s, share in enumerate(records.correct.mean(axis=0))}
        if threshold is not None:
            (point,) = records.frontier([threshold], router)
            row |= {"top1_routed": point.top1, "gmacs_paper": point.gmacs}
        rows.append(row)
    if len(rows) > 1:
        means = {key: float(np.mean([row[key] for row in rows])) for key in rows[0] if key not in ("set", "images")}
        rows.append({"set": "mean", "images": sum(row["images"] for row in rows), **means})
    columns = [
        Column("set", "set"),
        Column("images", "images"),
        *(Column(f"top1_round_{s + 1}", f"round {s + 1} top-1 (%)", table.percent) for s in range(rounds)),
    ]
    if threshold is not None:
        columns += [
            Column("top1_routed", f"routed top-1 (%) at τ = {table.threshold(threshold)}", table.percent),
            Column("gmacs_paper", "GMACs (paper)", table.decimals),
        ]
    return Table("Accuracy under distribution shift", columns, rows)


class ShiftedAnswers(Section):
    """Accuracy and compute on a suite, mean over its sets."""

    top1: float = Field(ge=0, le=1)
    gmacs: float = Field(gt=0)
    """Average per image, in the paper's convention."""

    def interval(self, images: int) -> Interval:
        """The 95 % interval of top-1 over the images of a single set."""
        return share_interval(round(self.top1 * images), images)


class ShiftSubject(Section):
    """A model and the images of a suite."""

    model: str
    suite: Suite
    sets: tuple[str, ...] = Field(min_length=1)
    """Names of the sets: one, or several of corruptions."""
    names_sha256: str
    """Names of the images of the first set, in order."""


class ShiftSummary(ShiftSubject):
    """A model on a suite, as figures need it: the file ``summary.json`` of ``progresvit shift``."""

    images: int = Field(ge=1)
    """Readable images of each set."""
    full: ShiftedAnswers
    """After all rounds."""
    routed: ShiftedAnswers | None = None
    threshold: float | tuple[float, ...] = 0.0
    """Threshold of the routed answers."""


def shift_subject(sets: Sequence[ShiftedSet], header: Header) -> ShiftSubject:
    """What is evaluated on the sets of a suite; ``header`` is of the first set."""
    suite = sets[0].name if sets[0].corruption is None else "generated" if sets[0].source.corruption else "imagenet-c"
    return ShiftSubject(
        model=header.model,
        suite=suite,
        sets=tuple(shifted.name for shifted in sets),
        names_sha256=header.names_sha256,
    )


def summarize(
    sets: Sequence[ShiftedSet],
    records_of: Mapping[str, Records],
    threshold: float | Sequence[float] | None = None,
    router: Router | None = None,
) -> ShiftSummary:
    """The summary of a model on the sets of a suite; with a threshold and several rounds, of its routed answers too."""
    records = [records_of[shifted.name] for shifted in sets]
    header = records[0].header
    about: dict[str, Any] = {}
    if threshold is not None and header.rounds > 1:
        points = [of_set.frontier([threshold], router)[0] for of_set in records]
        about["routed"] = ShiftedAnswers(
            top1=float(np.mean([point.top1 for point in points])),
            gmacs=float(np.mean([point.gmacs for point in points])),
        )
        about["threshold"] = tuple(threshold) if isinstance(threshold, Sequence) else threshold
    return ShiftSummary(
        **dict(shift_subject(sets, header)),
        images=len(records[0]),
        full=ShiftedAnswers(
            top1=float(np.mean([of_set.correct[:, -1].mean() for of_set in records])), gmacs=records[0].full_gmacs()
        ),
        **about,
    )


def read_summary(folder: Path) -> ShiftSummary:
    """The summary in an output folder of ``progresvit shift``."""
    remedy = "give an output folder of progresvit shift, or run its command again, which keeps the records."
    return read_json(ShiftSummary, folder / SUMMARY, what="summary of progresvit shift", remedy=remedy)


def check_beside(results: Sequence[ShiftSubject]) -> None:
    """Refuse the same model and suite twice, and results on different images of a suite."""
    seen: dict[str, ShiftSubject] = {}
    for result in results:
        if sum((other.model, other.suite) == (result.model, result.suite) for other in results) > 1:
            raise ValueError(f"{result.model} on {result.suite} is given twice; name each output folder once.")
        first = seen.setdefault(result.suite, result)
        counts = {
            summary.images for summary in (first, result) if isinstance(summary, ShiftSummary)
        }  # known after a run
        if (first.sets, first.names_sha256) != (result.sets, result.names_sha256) or len(counts) > 1:
            raise ValueError(
                f"{first.model} and {result.model} were evaluated on different images of {result.suite}; evaluate both "
                "on the same data."
            )


def mean_corruption_error(errors: Mapping[str, Sequence[float]]) -> float:
    """mCE: the mean over corruptions of the error over all severities, relative to AlexNet's, in percent.

    ``errors`` are shares by corruption, one for each severity, of all 15. Defined for ImageNet-C only.
    """
    missing = [name for name in CORRUPTIONS if len(errors.get(name, ())) != len(SEVERITIES)]
    if missing:
        raise ValueError(
            f"mCE takes 15 corruptions at 5 severities; {missing[0]} and {len(missing) - 1} more are incomplete."
        )
    ratios = [np.mean(errors[name]) / ALEXNET_ERRORS[name] for name in CORRUPTIONS]
    return float(100 * np.mean(ratios))


def mce_table(
    sets: Sequence[ShiftedSet],
    records_of: Mapping[str, Records],
    threshold: float | Sequence[float] | None = None,
    router: Router | None = None,
) -> Table | None:
    """mCE of the last round, and at the threshold if given; None unless the sets are the whole of ImageNet-C."""
    if len(sets) != len(CORRUPTIONS) * len(SEVERITIES) or any(shifted.classes != IMAGENET_CLASSES for shifted in sets):
        return None
    answers = "every round" if next(iter(records_of.values())).header.routable else "last round"
    rows = [{"answers": answers, "mce": mean_corruption_error(imagenet_c_errors(sets, records_of))}]
    if threshold is not None:
        errors = imagenet_c_errors(sets, records_of, threshold, router)
        rows.append({"answers": f"routed, τ = {table.threshold(threshold)}", "mce": mean_corruption_error(errors)})
    columns = [Column("answers", "answers"), Column("mce", "mCE", table.decimals)]
    return Table("Mean corruption error on ImageNet-C, relative to AlexNet", columns, rows)


def imagenet_c_errors(
    sets: Sequence[ShiftedSet],
    records_of: Mapping[str, Records],
    threshold: float | Sequence[float] | None = None,
    router: Router | None = None,
) -> dict[str, list[float]]:
    """Errors by corruption, of the last round or at a threshold, for mCE."""
    errors: dict[str, list[float]] = {}
    for shifted in sets:
        records = records_of[shifted.name]
        top1 = float(records.correct[:, -1].mean())
        if threshold is not None:
            (point,) = records.frontier([threshold], router)
            top1 = point.top1
        assert shifted.corruption is not None
        errors.setdefault(shifted.corruption, []).append(1 - top1)
    return errors
