"""Tables of routed answers, from records: top-1 with intervals, classes, confusions and the most confident errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from progresvit import table
from progresvit.evaluation.answers import ClassResult, RoutedAnswers
from progresvit.table import Column, Row, Table


def accuracy_table(answers: RoutedAnswers) -> Table:
    """Top-1 of each round and routed, with 95 % intervals, and the average GMACs."""
    gmacs, share = answers.records.gmacs(), np.bincount(answers.exit_round, minlength=answers.records.rounds)
    spent = [*gmacs, float(share @ np.asarray(gmacs)) / len(answers.records)]
    rows: list[Row] = []
    for (name, top1), compute in zip(answers.accuracies(), spent):
        rows.append(
            {"answers": name, "images": len(answers.records), "gmacs": compute, **table.interval_cells("top1", top1)}
        )
    columns = [Column("answers", "answers", left=True), Column("images", "images")]
    columns += table.interval_columns("top1", "top-1 (%)", table.percent)
    columns.append(Column("gmacs", "GMACs", table.decimals))
    return Table("Top-1 with 95 % intervals", columns, rows)


def class_accuracy_table(answers: RoutedAnswers) -> Table:
    """A row for each class, lowest top-1 first; classes without images come last, with empty cells."""
    names, rounds = [name for name, _ in answers.correct_by_name()], _exits(answers)
    ids = answers.records.header.config.get("class_ids") if answers.records.header.probe is None else None
    columns = [
        Column("class", "class", left=True),
        Column("class_id", "class id", left=True),
        Column("images", "images"),
    ]
    for name in names:
        columns += table.interval_columns(_key(name), f"{name} top-1 (%)", table.percent)
    columns += [Column(f"exit_{n}", f"exit {n} (%)", table.rough_percent) for n in rounds]
    columns += [Column("gmacs", "GMACs", table.decimals), Column("confused_with", "most confused with", left=True)]
    columns.append(Column("confused", "images"))
    rows: list[Row] = []
    for result in answers.by_class:
        row: Row = {"class": result.name, "class_id": ids[result.number] if ids else "", "images": result.images}
        for name in names:
            row |= table.interval_cells(_key(name), result.share(name))
        row |= {f"exit_{n}": result.exits[n - 1] / result.images for n in rounds} | {"gmacs": result.gmacs}
        pair = result.confusion
        row["confused_with"] = None if pair is None else answers.class_names[pair.prediction]
        rows.append(row | {"confused": None if pair is None else pair.count})
    for number in answers.without_images:
        row = dict.fromkeys((column.key for column in columns), None)
        rows.append(row | {"class": answers.class_names[number], "class_id": ids[number] if ids else "", "images": 0})
    return Table("Top-1, exits and confusions by class", columns, rows)


def class_summary(answers: RoutedAnswers, classes: Sequence[ClassResult], title: str) -> Table:
    """The rows of some classes, as a page shows them: each top-1 in one cell with its interval."""
    names = dict.fromkeys(("round 1", f"round {answers.records.rounds}", answers.name))
    rounds = _exits(answers)
    columns = [Column("class", "class", left=True), Column("images", "images")]
    columns += [Column(name, f"{name} top-1 (%)", table.interval) for name in names]
    columns += [Column(f"exit_{n}", f"exit {n} (%)", table.rough_percent) for n in rounds]
    columns += [Column("gmacs", "GMACs", table.decimals), Column("confusion", "most confused with", left=True)]
    rows: list[Row] = []
    for result in classes:
        pair = result.confusion
        confused = "" if pair is None else f"{answers.class_names[pair.prediction]} ({pair.count})"
        row: Row = {"class": result.name, "images": result.images, "gmacs": result.gmacs, "confusion": confused}
        row |= {name: result.share(name) for name in names}
        rows.append(row | {f"exit_{n}": result.exits[n - 1] / result.images for n in rounds})
    return Table(title, columns, rows)


def exit_table(answers: RoutedAnswers) -> Table:
    """The share of each class that exits after each round, with 95 % intervals; lowest share of round 1 first."""
    rounds = _exits(answers)
    columns = [Column("class", "class", left=True), Column("images", "images")]
    for n in rounds:
        columns += table.interval_columns(f"exit_{n}", f"exit {n} (%)", table.percent)
    rows: list[Row] = []
    for result in sorted(answers.by_class, key=lambda each: (each.exit_share(0).mean, -each.images, each.number)):
        row: Row = {"class": result.name, "images": result.images}
        for n in rounds:
            row |= table.interval_cells(f"exit_{n}", result.exit_share(n - 1))
        rows.append(row)
    return Table("Exits by class", columns, rows)


def confusion_table(answers: RoutedAnswers, most: int | None = None) -> Table:
    """Pairs of classes that were confused, the most frequent first: all of them, or ``most``."""
    columns = [
        Column("class", "class", left=True),
        Column("prediction", "taken for", left=True),
        Column("count", "images"),
        Column("images", "of"),
        Column("share", "share of the class (%)", table.rough_percent),
    ]
    names, pairs = answers.class_names, answers.confusions[:most]
    rows: list[Row] = [
        {
            "class": names[pair.label],
            "prediction": names[pair.prediction],
            "count": pair.count,
            "images": pair.images,
            "share": pair.share,
        }
        for pair in pairs
    ]
    most_frequent = "" if len(pairs) == len(answers.confusions) else f"the {len(pairs)} most frequent of "
    return Table(f"Confused classes: {most_frequent}{len(answers.confusions)} pairs", columns, rows)


def error_table(answers: RoutedAnswers, most: int) -> Table:
    """The most confident wrong answers, and the prediction of each round."""
    records, names = answers.records, answers.class_names
    rounds = range(1, records.rounds + 1)
    columns = [
        Column("image", "image", left=True),
        Column("class", "class", left=True),
        Column("prediction", "answer", left=True),
        Column("probability", "probability (%)", table.rough_percent),
        Column("exit_round", "exit"),
    ]
    for n in rounds:
        columns.append(Column(f"round{n}", f"round {n}", left=True))
        columns.append(Column(f"round{n}_probability", "(%)", table.rough_percent))
    rows: list[Row] = []
    for image in answers.errors[:most].tolist():
        row: Row = {"image": str(records.ids[image]), "class": names[int(records.labels[image])]}
        row |= {"prediction": names[int(answers.prediction[image])], "exit_round": int(answers.exit_round[image]) + 1}
        row["probability"] = _finite(answers.probability[image])
        for s, n in enumerate(rounds):
            row[f"round{n}"] = names[int(records.predictions[image, s])]
            row[f"round{n}_probability"] = _finite(records.top5_probabilities[image, s, 0])
        rows.append(row)
    return Table(f"The {len(rows)} most confident of {len(answers.errors)} wrong answers", columns, rows)


def _exits(answers: RoutedAnswers) -> range:
    """Rounds after which images exit, from 1; none if nothing is routed."""
    return range(1, answers.records.rounds + 1 if answers.threshold is not None else 1)


def _key(answers: str) -> str:
    return f"top1_{answers.replace(' ', '')}"


def _finite(probability: float) -> float | None:
    return float(probability) if np.isfinite(probability) else None
