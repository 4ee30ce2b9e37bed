"""``progresvit classify``: images in, predictions out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from progresvit.cli import options, output

if TYPE_CHECKING:
    from progresvit.data.dataset import Entry
    from progresvit.engine import Engine, Prediction
    from progresvit.engine.backends import BackendName
    from progresvit.engine.predict_files import Summary
    from progresvit.routing import Setting


def classify(
    images: Annotated[list[str] | None, typer.Argument(help="Image files, folders, tars.")] = None,
    samples: Annotated[bool, typer.Option("--samples", help="Classify the bundled sample images.")] = False,
    model: Annotated[
        str | None, typer.Option(help=f"{options.MODEL_HELP} Or an export folder. imagenet-tiny by default.")
    ] = None,
    threshold: Annotated[str | None, typer.Option(help=options.LIMIT_HELP)] = None,
    budget_gmacs: Annotated[
        float | None,
        typer.Option(help="Average GMACs to spend, looked up in the model's budgets.json."),
    ] = None,
    router: Annotated[Path | None, typer.Option(help=options.ROUTER_HELP)] = None,
    abstain: Annotated[float | None, typer.Option(help="Withhold answers with at least this entropy.")] = None,
    top_k: Annotated[int, typer.Option(help="Number of classes to report, most likely first.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Parquet file for the answers; an interrupted run resumes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per image and line.")] = False,
    backend: Annotated[str | None, typer.Option(help=options.BACKEND_HELP)] = None,
    device: Annotated[str | None, typer.Option(help=options.DEVICE_HELP)] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp8.")] = "fp32",
    batch: Annotated[int | None, typer.Option(help=options.BATCH_HELP)] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the backend.")] = None,
    workers: Annotated[int, typer.Option(help="Threads that decode images.")] = 2,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False,
) -> None:
    """Classify images; confident predictions exit early. Unreadable files are reported and skipped (exit code 1)."""
    if out is not None and (out.suffix != ".parquet" or as_json):
        raise ValueError(f"{out}: answers are written as .parquet; --out and --json exclude each other.")
    found, bad = find_images(_given(images, samples))
    engine = _make_engine(
        model, threshold, budget_gmacs=budget_gmacs, router=router, abstain=abstain, top_k=top_k,
        backend=cast("BackendName | None", backend), device=device, precision=precision, batch=batch, threads=threads,
        workers=workers,
    )  # fmt: skip
    errors = len(bad)
    if out is not None:
        errors += _to_file(engine, found, out, overwrite)
    else:
        errors += _to_terminal(engine, found, as_json, mark_correct=samples)
    for name, reason in bad:
        typer.echo(f"skipped: {name}: {reason}", err=True)
    if errors:
        raise typer.Exit(code=1)


def _given(images: list[str] | None, samples: bool) -> list[str]:
    if samples == bool(images):
        raise ValueError("give image files, folders or tars, or --samples for the bundled sample images.")
    if images:
        return images
    from progresvit.data.samples import samples_folder

    return [str(samples_folder())]


def find_images(given: list[str]) -> tuple[list[Entry], list[tuple[str, str]]]:
    """The images that the arguments name, and the arguments that name none, each with the reason."""
    from progresvit.data.dataset import Entry, find_unlabelled
    from progresvit.engine.images import NO_FILE, ON_THE_WEB

    found: list[Entry] = []
    bad: list[tuple[str, str]] = []
    for argument in given:
        path = Path(argument).expanduser()
        if argument.startswith(("http://", "https://")):
            bad.append((argument, ON_THE_WEB))
        elif path.is_dir() or path.suffix == ".tar":
            try:
                inside = find_unlabelled(path).entries
                found += (
                    inside if len(given) == 1 else [replace(entry, name=f"{argument}/{entry.name}") for entry in inside]
                )
            except ValueError as error:
                bad.append((argument, str(error).removeprefix(f"{path} ").removesuffix(".")))
        elif not path.exists():
            bad.append((argument, NO_FILE))
        else:
            found.append(Entry(str(path), argument))
    return found, bad


def _make_engine(
    model: str | None,
    threshold: str | None,
    *,
    budget_gmacs: float | None,
    top_k: int,
    device: str | None,
    backend: BackendName | None,
    router: Path | None,
    abstain: float | None,
    precision: str,
    batch: int | None,
    threads: int | None,
    workers: int,
) -> Engine:
    from progresvit.engine import Engine
    from progresvit.engine.export.manifest import MANIFEST_FILE

    is_export = model is not None and (Path(model) / MANIFEST_FILE).is_file()
    if device is None and not is_export and backend in (None, "torch"):
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    with output.setting_notes():
        return Engine(
            model, options.parse_limit(threshold), budget_gmacs=budget_gmacs, router=router, abstain=abstain,
            top_k=top_k, backend=backend, device=device, precision=precision, batch=batch, threads=threads,
            workers=workers,
        )  # fmt: skip


def _to_file(engine: Engine, found: list[Entry], out: Path, overwrite: bool) -> int:
    from progresvit.data.dataset import UNLABELLED, ImageDataset
    from progresvit.engine.predict_files import classify_files

    dataset = ImageDataset((), tuple(found), (UNLABELLED,) * len(found))
    with output.progress_bars(wanted=True) as begin:
        progress = begin("classifying") if begin else None
        summary = classify_files(engine, dataset, out, overwrite=overwrite, progress=progress)
    _report(summary, engine)
    typer.echo(f"wrote {out}" + (f"; {summary.errors} unreadable (see column error)" if summary.errors else ""))
    return summary.errors


def _to_terminal(engine: Engine, found: list[Entry], as_json: bool, *, mark_correct: bool) -> int:
    from progresvit.data.dataset import UNLABELLED, ImageDataset
    from progresvit.data.samples import sample_labels
    from progresvit.engine.engine import DEADLINE
    from progresvit.engine.predict_files import predictions, row, summarise
    from progresvit.evaluation.table import Column, Table, decimals, rough_percent

    dataset = ImageDataset((), tuple(found), (UNLABELLED,) * len(found))
    answers: list[Prediction] = []
    for entry, answer in zip(found, predictions(engine, dataset, deadline=DEADLINE)):
        answers.append(answer)
        if as_json:
            typer.echo(json.dumps(_json_row(row(entry.name, answer, engine)), allow_nan=False))
    good = [(entry, answer) for entry, answer in zip(found, answers) if answer.error is None]
    if good and not as_json:
        columns = [
            Column("picture", "image"),
            Column("answer", "answer"),
            Column("probability", "probability %", rough_percent),
            Column("exit_round", "round"),
            Column("entropy", "entropy", decimals),
            Column("gmacs", "GMACs", decimals),
        ]
        if engine.top_k > 1:
            columns.insert(3, Column("others", "next"))
        rows = [
            {**row(entry.name, answer, engine), "answer": _answer(answer), "others": _others(answer)}
            for entry, answer in good
        ]
        if mark_correct and engine.config.class_ids is not None:
            columns.insert(2, Column("correct", "correct"))
            labels = sample_labels()
            known = set(engine.config.class_ids)
            rows = [{**cells, "correct": _correct(cells, labels[cells["picture"]], known)} for cells in rows]
        output.show_table(Table(_count(len(rows)), columns, rows))
        _report(summarise(answers, len(engine.gmacs)), engine)
    for entry, answer in zip(found, answers):
        if answer.error is not None:
            typer.echo(f"skipped: {entry.name}: {answer.error}", err=True)
    return len(answers) - len(good)


def _json_row(row: dict[str, Any]) -> dict[str, Any]:
    """The row without NaN, which JSON cannot hold, and without an empty ``top``."""
    missing = {key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    return {key: value for key, value in row.items() if key not in missing and (key != "top" or value)}


def _others(prediction: Prediction) -> str:
    return ", ".join(f"{c.label or f'class {c.index}'} {c.probability:.1%}" for c in prediction.top[1:])


def _answer(prediction: Prediction) -> str:
    name = prediction.label or f"class {prediction.index}"
    if prediction.out_of_distribution:
        return f"none of its classes ({name}?)"
    return f"none ({name}?)" if prediction.abstained else name


def _correct(cells: dict[str, Any], accepted: list[str], known: set[str]) -> str:
    """Whether the answer is an accepted class; a dash if it is withheld."""
    if cells["abstained"]:
        return "–"
    if not known & set(accepted):
        return "unknown class"
    return "yes" if cells["class_id"] in accepted else "no"


def _count(images: int) -> str:
    return "1 image" if images == 1 else f"{images} images"


def _report(summary: Summary, engine: Engine) -> None:
    classified = sum(summary.exits)
    if not classified:
        return
    rounds = ", ".join(f"{count} after round {s + 1}" for s, count in enumerate(summary.exits))
    saved = 1 - summary.gmacs / engine.gmacs[-1]
    typer.echo(
        f"{_count(classified)}: {rounds}; {summary.gmacs:.3f} GMACs on average instead of {engine.gmacs[-1]:.3f}, "
        f"{saved:.1%} saved"
        + (f"; {summary.abstained} abstained" if summary.abstained else "")
        + (f", {summary.out_of_distribution} of them out-of-distribution" if summary.out_of_distribution else "")
    )
    report_setting(engine.setting, engine.policy.thresholds)


def report_setting(setting: Setting | None, thresholds: Sequence[float]) -> None:
    """Print the calibrated thresholds of an engine, if it has any."""
    if setting is None:
        return
    limits = ", ".join(f"{limit:.4g}" for limit in thresholds)
    spent = setting.expected.get("gmacs")
    average = f" ({spent:.3f} GMACs on average there)" if spent is not None else ""
    typer.echo(f"τ = {limits}, calibrated by the rule {setting.rule} on {setting.n} images{average}")
