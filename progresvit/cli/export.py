"""``progresvit export``: a model in, one graph per round out, for onnxruntime or OpenVINO."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from progresvit.cli import show

if TYPE_CHECKING:
    from progresvit.config import ModelConfig
    from progresvit.engine.export.int8 import Int8Check
    from progresvit.evaluation.table import Table
    from progresvit.routing import Setting


def export(
    model: Annotated[str, typer.Argument(help="A model folder, shipped, or a hub id.")],
    out: Annotated[Path, typer.Option(help="The folder to write: a graph for each round, and export.json.")],
    format: Annotated[str, typer.Option(help="onnx or openvino.")] = "onnx",
    threshold: Annotated[str | None, typer.Option(help=show.LIMIT_HELP)] = None,
    temperatures: Annotated[str | None, typer.Option(help="Temperatures to keep, one for each round: 1.1,0.9")] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Quantise, and measure on --data what it costs.")] = False,
    data: Annotated[str | None, typer.Option(help="For --int8: pictures as evaluate takes them.")] = None,
    split: Annotated[str, typer.Option(help="Their split; '.' for all pictures of class folders at the top.")] = "val",
    workers: Annotated[int, typer.Option(help="Processes that decode pictures; 0 for none.")] = 2,
) -> None:
    """Write a model as one graph per round with a dynamic batch. Whoever runs them needs no torch."""
    from progresvit.api import load_with_folder

    if int8 and data is None:
        raise ValueError("int8 costs accuracy, and how much must be measured; give pictures with --data FOLDER.")
    if data is not None and not int8:
        raise ValueError("--data is what --int8 is measured on; give both.")
    heat = None if temperatures is None else show.parse_numbers(temperatures, "--temperatures")
    loaded, folder = load_with_folder(model)
    limit = _find_threshold(threshold, folder)
    check = None if data is None else _find_pictures(data, split, workers, loaded.config)

    from progresvit.engine.export.export import export as run

    with show.setting_notes():
        manifest = run(
            loaded,
            out,
            format=format,  # type: ignore[arg-type]  # export says which there are
            threshold=limit,
            temperatures=heat,
            int8=check,
            progress=lambda what: typer.echo(what, err=True),
        )
    if manifest.int8 is not None:
        show.show_table(_int8_table(manifest.int8))
    typer.echo(f"{out} is ready: {', '.join(name for files in manifest.files for name in files)}, export.json")


def _find_threshold(text: str | None, folder: Path | None) -> float | tuple[float, ...] | Setting | None:
    """What was asked for, or what the model brings along: an export is then used as the model would be."""
    from progresvit.routing.settings import default_setting, find_setting

    limit = show.parse_limit(text)
    if limit is None:
        return default_setting(folder)
    return find_setting(limit, folder) if isinstance(limit, str) else limit


def _find_pictures(data: str, split: str, workers: int, config: ModelConfig) -> Int8Check:
    from progresvit.engine.export.int8 import Int8Check
    from progresvit.evaluation import DataSource
    from progresvit.evaluation.classes import relabel

    pictures = DataSource(data=data, split=split).find()
    show.tell_drawn(data, split, pictures=len(pictures), drawn_from=pictures.drawn_from)
    labels = tuple(relabel(pictures, config))
    return Int8Check(dataset=pictures, labels=labels, data=f"{data} ({split})", workers=workers)


def _int8_table(report: dict[str, Any]) -> Table:
    from progresvit.evaluation.table import Column, Table, percent

    rows = [{"what": f"round {s + 1}", **row} for s, row in enumerate(report["rounds"])]
    if "routed" in report:
        rows.append({"what": "routed", **report["routed"]})
    columns = [
        Column("what", ""),
        Column("top1_fp32", "top-1 fp32", percent),
        Column("top1_int8", "top-1 int8", percent),
        Column("same_answer", "same answer", percent),
        Column("same_exit", "same exit", percent),
    ]
    title = f"int8 beside fp32 on {report['images']} images, percent"
    return Table(title, columns, [{column.key: row.get(column.key) for column in columns} for row in rows])
