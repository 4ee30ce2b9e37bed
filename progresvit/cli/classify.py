"""``progresvit classify``: images in, predictions out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from progresvit.cli import options, output
from progresvit.io.parse import parse_limit

if TYPE_CHECKING:
    from progresvit.data.dataset import ImageDataset
    from progresvit.engine import Engine, Prediction
    from progresvit.engine.files import Shard
    from progresvit.engine.predict_files import Summary


def classify(
    images: Annotated[list[str] | None, typer.Argument(help="Image files, folders, tars.")] = None,
    samples: Annotated[bool, typer.Option("--samples", help="Classify the bundled sample images.")] = False,
    listed: Annotated[
        str | None, typer.Option("--list", help="Text file with the path of an image in each line; - reads stdin.")
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"{options.EXPORT_HELP} imagenet-tiny by default.")] = None,
    threshold: options.Limit = None,
    budget_gmacs: Annotated[
        float | None,
        typer.Option(help="Average GMACs to spend, looked up in the model's budgets.json."),
    ] = None,
    router: options.RouterFile = None,
    abstain: Annotated[float | None, typer.Option(help="Withhold answers with at least this entropy.")] = None,
    top_k: options.TopK = 1,
    out: Annotated[
        Path | None, typer.Option(help="File for the answers: .parquet, .csv or .jsonl; an interrupted run resumes.")
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            help="Part of the images, for several machines: 2/4 is the second of four and writes "
            "NAME-00002-of-00004.parquet."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per image and line.")] = False,
    backend: options.Backend = None,
    device: options.Device = None,
    precision: options.Precision = "fp32",
    batch: options.Batch = None,
    threads: options.Threads = None,
    decode: options.Decode = "auto",
    workers: options.Workers = None,
    max_pixels: options.MaxPixels = None,
    overwrite: options.OverwriteFile = False,
) -> None:
    """Classify images; confident predictions exit early. Unreadable files are reported and skipped (exit code 1)."""
    if out is not None and (out.suffix not in (".parquet", ".csv", ".jsonl") or as_json):
        raise ValueError(
            f"{out}: answers are written as .parquet, .csv or .jsonl; --out and --json exclude each other."
        )
    if shard is not None and out is None:
        raise ValueError("--shard writes a file for each shard; name it with --out.")
    from progresvit.engine.files import Shard

    part = None if shard is None else Shard.parse(shard)
    dataset, bad = _find(images, samples, listed)
    from progresvit.engine import Engine

    with output.setting_notes():
        engine = Engine(
            model, parse_limit(threshold), budget_gmacs=budget_gmacs, router=router, abstain=abstain, top_k=top_k,
            backend=backend, device=device, precision=precision, batch=batch, threads=threads, decode=decode,
            workers=workers, max_pixels=max_pixels,
        )  # fmt: skip
    errors = len(bad)
    if out is not None:
        errors += _to_file(engine, dataset, out, part, overwrite)
    elif as_json:
        errors += _to_json(engine, dataset)
    else:
        errors += _to_terminal(engine, dataset, mark_correct=samples)
    output.report_skipped(bad)
    if errors:
        raise typer.Exit(code=1)


def _find(
    images: list[str] | None, samples: bool, listed: str | None
) -> tuple[ImageDataset, Sequence[tuple[str, str]]]:
    """The images, and the arguments that name none, each with the reason."""
    from progresvit.data.dataset import find_listed, find_unlabelled, unlabelled
    from progresvit.data.samples import samples_folder

    if sum((bool(images), samples, listed is not None)) != 1:
        raise ValueError(
            "give image files, folders or tars, or --list for a list of paths, or --samples for the bundled sample "
            "images."
        )
    if listed is not None:
        return find_listed(listed), ()
    if samples:
        return find_unlabelled(samples_folder()), ()
    entries, bad = options.find_images(images or [])
    return unlabelled(entries), bad


def _to_file(engine: Engine, dataset: ImageDataset, out: Path, shard: Shard | None, overwrite: bool) -> int:
    from progresvit.engine.predict_files import classify_files

    with output.stoppable(), output.progress_bars() as begin:
        progress = begin("classifying")
        summary = classify_files(engine, dataset, out, shard=shard, overwrite=overwrite, progress=progress)
    _report(summary, engine)
    unread = f"; {summary.errors} unreadable (see column error)" if summary.errors else ""
    output.echo(f"wrote {out if shard is None else shard.path(out)}{unread}")
    output.report_skipped(summary.unreadable, summary.errors, "column error")
    return summary.errors


def _to_json(engine: Engine, dataset: ImageDataset) -> int:
    """Print a line for each answer as soon as it arrives; memory does not grow with the number of images."""
    from progresvit.engine.engine import DEADLINE
    from progresvit.engine.files import json_line
    from progresvit.engine.predict_files import NAMED, predictions, row

    errors = 0
    bad: list[tuple[str, str]] = []
    for entry, answer in zip(dataset.entries, predictions(engine, dataset, deadline=DEADLINE)):
        typer.echo(json_line(row(entry.name, answer, engine)))
        if answer.error is not None:
            errors += 1
            bad += [(entry.name, answer.error)] if len(bad) < NAMED else []
    output.report_skipped(bad, errors, "error in their lines")
    return errors


def _to_terminal(engine: Engine, dataset: ImageDataset, *, mark_correct: bool) -> int:
    from progresvit.data.samples import sample_labels
    from progresvit.engine.engine import DEADLINE
    from progresvit.engine.predict_files import predictions, row, summarise
    from progresvit.table import Column, Table, decimals, rough_percent

    answers: list[Prediction] = []
    with output.stoppable("stopped"), output.progress_bars() as begin:
        update = begin("classifying")
        for answer in predictions(engine, dataset, deadline=DEADLINE):
            answers.append(answer)
            update(len(answers), len(dataset))
    good = [(entry, answer) for entry, answer in zip(dataset.entries, answers) if answer.error is None]
    if good:
        columns = [
            Column("image", "image"),
            Column("answer", "answer"),
            Column("probability", "probability %", rough_percent),
            Column("exit_round", "round"),
            Column("entropy", "entropy", decimals),
            Column("gmacs", "GMACs", decimals),
        ]
        if engine.top_k > 1:
            columns.insert(3, Column("others", "next"))
        rows = []
        for entry, answer in good:
            others = (f"{c.label or f'class {c.index}'} {c.probability:.1%}" for c in answer.top[1:])
            cells = row(entry.name, answer, engine)
            rows.append({**cells, "answer": _answer(answer), "others": ", ".join(others)})
        if mark_correct and engine.config.class_ids is not None:
            columns.insert(2, Column("correct", "correct"))
            labels = sample_labels()
            class_ids = set(engine.config.class_ids)
            rows = [{**cells, "correct": _correct(cells, labels[cells["image"]], class_ids)} for cells in rows]
        output.show_table(Table(output.count_images(len(rows)), columns, rows))
        _report(summarise(answers, len(engine.gmacs)), engine)
    output.report_skipped([(entry.name, a.error) for entry, a in zip(dataset.entries, answers) if a.error is not None])
    return len(answers) - len(good)


def _answer(prediction: Prediction) -> str:
    name = prediction.label or f"class {prediction.index}"
    if prediction.out_of_distribution:
        return f"none of its classes ({name}?)"
    return f"none ({name}?)" if prediction.abstained else name


def _correct(cells: dict[str, Any], accepted: list[str], class_ids: set[str]) -> str:
    """Whether the answer is an accepted class; a dash if it is withheld."""
    if cells["abstained"]:
        return "–"
    if not class_ids & set(accepted):
        return "unknown class"
    return "yes" if cells["class_id"] in accepted else "no"


def _report(summary: Summary, engine: Engine) -> None:
    if not any(summary.exits):
        return
    output.echo(
        output.describe_exits(summary.exits, summary.gmacs, engine.gmacs[-1])
        + (f"; {summary.abstained} abstained" if summary.abstained else "")
        + (f", {summary.out_of_distribution} of them out-of-distribution" if summary.out_of_distribution else "")
    )
    output.report_setting(engine.setting, engine.policy.thresholds if len(engine.gmacs) > 1 else ())
