"""``progresvit classify``: pictures in, answers out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from progresvit.cli import show

if TYPE_CHECKING:
    from progresvit.data.dataset import Entry
    from progresvit.engine import Engine, Prediction
    from progresvit.engine.backends import BackendName
    from progresvit.engine.predict_files import Summary


def classify(
    pictures: Annotated[list[str] | None, typer.Argument(help="Pictures, folders of pictures, tars.")] = None,
    samples: Annotated[bool, typer.Option("--samples", help="The pictures that come along.")] = False,
    model: Annotated[
        str | None, typer.Option(help="A model folder, a hub id, or an export's folder; by default the one that ships.")
    ] = None,
    threshold: Annotated[str | None, typer.Option(help=show.LIMIT_HELP)] = None,
    budget_gmacs: Annotated[
        float | None, typer.Option(help="Instead: average GMACs to spend, by the model's budgets.json.")
    ] = None,
    router: Annotated[Path | None, typer.Option(help=show.ROUTER_HELP)] = None,
    abstain: Annotated[float | None, typer.Option(help="Withhold answers of this entropy or more.")] = None,
    top_k: Annotated[int, typer.Option(help="Name so many classes, the likeliest first.")] = 1,
    out: Annotated[Path | None, typer.Option(help="A parquet file for the answers; a stopped run goes on.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each picture, a line each.")] = False,
    backend: Annotated[str | None, typer.Option(help=show.BACKEND_HELP)] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp8.")] = "fp32",
    batch: Annotated[int | None, typer.Option(help="Pictures at a time.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of the backend, on a CPU.")] = None,
    workers: Annotated[int, typer.Option(help="Threads that decode pictures.")] = 2,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace answers that are there already.")] = False,
) -> None:
    """Classify pictures, easy ones early and hard ones late. What cannot be read is told, and the exit code is 1."""
    if out is not None and (out.suffix != ".parquet" or as_json):
        raise ValueError(f"{out}: answers are written as .parquet, and not together with --json.")
    found, bad = _find(_given(pictures, samples))
    engine = _make_engine(
        model, threshold, budget_gmacs=budget_gmacs, router=router, abstain=abstain, top_k=top_k,
        backend=cast("BackendName | None", backend), device=device, precision=precision, batch=batch, threads=threads,
        workers=workers,
    )  # fmt: skip
    errors = len(bad)
    if out is not None:
        errors += _in_bulk(engine, found, out, overwrite)
    else:
        errors += _at_once(engine, found, as_json)
    for name, reason in bad:
        typer.echo(f"left out: {name}: {reason}", err=True)
    if errors:
        raise typer.Exit(code=1)


def _given(pictures: list[str] | None, samples: bool) -> list[str]:
    if samples == bool(pictures):
        raise ValueError("give either pictures, folders or tars, or --samples for the pictures that come along.")
    if pictures:
        return pictures
    from progresvit.data.samples import samples_folder

    return [str(samples_folder())]


def _find(given: list[str]) -> tuple[list[Entry], list[tuple[str, str]]]:
    """The pictures that are meant, and what is meant by nothing."""
    from progresvit.data.dataset import Entry, find_unlabelled
    from progresvit.engine.images import NO_FILE, ON_THE_WEB

    found: list[Entry] = []
    bad: list[tuple[str, str]] = []
    for one in given:
        path = Path(one).expanduser()
        if one.startswith(("http://", "https://")):
            bad.append((one, ON_THE_WEB))
        elif path.is_dir() or path.suffix == ".tar":
            try:
                inside = find_unlabelled(path).entries
                found += inside if len(given) == 1 else [replace(entry, name=f"{one}/{entry.name}") for entry in inside]
            except ValueError as error:
                bad.append((one, str(error).removeprefix(f"{path} ").removesuffix(".")))
        elif not path.exists():
            bad.append((one, NO_FILE))
        else:
            found.append(Entry(str(path), one))
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
    with show.setting_notes():
        return Engine(
            model, show.parse_limit(threshold), budget_gmacs=budget_gmacs, router=router, abstain=abstain, top_k=top_k,
            backend=backend, device=device, precision=precision, batch=batch, threads=threads, workers=workers,
        )  # fmt: skip


def _in_bulk(engine: Engine, found: list[Entry], out: Path, overwrite: bool) -> int:
    from progresvit.data.dataset import UNLABELLED, ImageDataset
    from progresvit.engine.predict_files import classify_files

    pictures = ImageDataset((), tuple(found), (UNLABELLED,) * len(found))
    with show.progress_bars(wanted=True) as begin:
        progress = begin("classifying") if begin else None
        summary = classify_files(engine, pictures, out, overwrite=overwrite, progress=progress)
    _tell(summary, engine)
    typer.echo(f"wrote {out}" + (f"; {summary.errors} could not be read (column error)" if summary.errors else ""))
    return summary.errors


def _at_once(engine: Engine, found: list[Entry], as_json: bool) -> int:
    from progresvit.data.dataset import UNLABELLED, ImageDataset
    from progresvit.engine.engine import DEADLINE
    from progresvit.engine.predict_files import predictions, row, summarise
    from progresvit.evaluation.table import Column, Table, decimals, rough_percent

    pictures = ImageDataset((), tuple(found), (UNLABELLED,) * len(found))
    answers: list[Prediction] = []
    for entry, answer in zip(found, predictions(engine, pictures, deadline=DEADLINE)):
        answers.append(answer)
        if as_json:
            typer.echo(json.dumps(_known(row(entry.name, answer, engine)), allow_nan=False))
    good = [(entry, answer) for entry, answer in zip(found, answers) if answer.error is None]
    if good and not as_json:
        columns = [
            Column("picture", "picture"),
            Column("answer", "answer"),
            Column("probability", "probability %", rough_percent),
            Column("exit_round", "round"),
            Column("entropy", "entropy", decimals),
            Column("gmacs", "GMACs", decimals),
        ]
        if engine.top_k > 1:
            columns.insert(3, Column("others", "then"))
        rows = [{**row(entry.name, one, engine), "answer": _answer(one), "others": _others(one)} for entry, one in good]
        show.show_table(Table(_count(len(rows)), columns, rows))
        _tell(summarise(answers, len(engine.gmacs)), engine)
    for entry, answer in zip(found, answers):
        if answer.error is not None:
            typer.echo(f"left out: {entry.name}: {answer.error}", err=True)
    return len(answers) - len(good)


def _known(row: dict[str, Any]) -> dict[str, Any]:
    """What JSON can say: no NaN, and the likeliest classes only where several were asked for."""
    missing = {key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    return {key: value for key, value in row.items() if key not in missing and (key != "top" or value)}


def _others(prediction: Prediction) -> str:
    return ", ".join(f"{one.label or f'class {one.index}'} {one.probability:.1%}" for one in prediction.top[1:])


def _answer(prediction: Prediction) -> str:
    name = prediction.label or f"class {prediction.index}"
    return f"none ({name}?)" if prediction.abstained else name


def _count(pictures: int) -> str:
    return "1 picture" if pictures == 1 else f"{pictures} pictures"


def _tell(summary: Summary, engine: Engine) -> None:
    looked_at = sum(summary.exits)
    if not looked_at:
        return
    rounds = ", ".join(f"{count} after round {s + 1}" for s, count in enumerate(summary.exits))
    saved = 1 - summary.gmacs / engine.gmacs[-1]
    typer.echo(
        f"{_count(looked_at)}: {rounds}; {summary.gmacs:.3f} GMACs on average instead of {engine.gmacs[-1]:.3f}, "
        f"{saved:.1%} saved" + (f"; {summary.abstained} without an answer" if summary.abstained else "")
    )
    if engine.setting is not None:
        limits = ", ".join(f"{limit:.4g}" for limit in engine.policy.thresholds)
        spent = engine.setting.expected.get("gmacs")
        there = f", which spent {spent:.3f} GMACs on average" if spent is not None else ""
        rule = engine.setting.rule
        typer.echo(f"τ = {limits}, calibrated by the rule {rule} on {engine.setting.n} pictures{there}")
