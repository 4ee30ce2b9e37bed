"""``progresvit export``: one graph per round for onnxruntime or OpenVINO."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from progresvit.cli import options, output
from progresvit.io.parse import parse_limit

if TYPE_CHECKING:
    from progresvit.config import ModelConfig
    from progresvit.engine.export.int8 import Int8Check
    from progresvit.routing import Setting
    from progresvit.table import Table


def export(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)],
    out: Annotated[Path, typer.Option(help="Folder to write: one graph per round, and export.json.")],
    format: Annotated[str, typer.Option(help="onnx or openvino.")] = "onnx",
    threshold: options.Limit = None,
    temperatures: Annotated[str | None, typer.Option(help="Temperature of each round, such as 1.1,0.9.")] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Quantise to int8 and measure the cost on --data.")] = False,
    data: Annotated[str | None, typer.Option(help="Images for --int8, as for evaluate.")] = None,
    split: Annotated[
        str, typer.Option(help="Split of --data; '.' uses all images of top-level class folders.")
    ] = "val",
    workers: options.DecodeProcesses = 2,
) -> None:
    """Export a model as one graph per round with a dynamic batch. Running the export needs no torch."""
    from progresvit.api import as_progresvit, load_with_folder

    if int8 and data is None:
        raise ValueError("--int8 measures its cost in accuracy; give images with --data FOLDER.")
    if data is not None and not int8:
        raise ValueError("--data is only used with --int8; give both.")
    parsed_temperatures = None if temperatures is None else options.parse_numbers(temperatures, "--temperatures")
    any_model, folder = load_with_folder(model)
    loaded = as_progresvit(any_model, "export")
    limit = _find_threshold(threshold, folder)
    check = None if data is None else _find_images(data, split, workers, loaded.config)

    from progresvit.engine.export.export import export as run

    with output.setting_notes():
        manifest = run(
            loaded,
            out,
            format=format,  # type: ignore[arg-type]  # export reports unknown formats
            threshold=limit,
            temperatures=parsed_temperatures,
            int8=check,
            settings_from=folder,
            progress=lambda message: output.echo(message, err=True),
        )
    if manifest.int8 is not None:
        output.show_table(_int8_table(manifest.int8))
    output.echo(f"{out} is ready: {', '.join(name for files in manifest.files for name in files)}, export.json")


def _find_threshold(text: str | None, folder: Path | None) -> float | tuple[float, ...] | Setting | None:
    """The requested threshold, or the default setting of the model folder."""
    from progresvit.routing.settings import default_setting, find_setting

    limit = parse_limit(text)
    if limit is None:
        return default_setting(folder)
    return find_setting(limit, folder) if isinstance(limit, str) else limit


def _find_images(data: str, split: str, workers: int, config: ModelConfig) -> Int8Check:
    from progresvit.engine.export.int8 import Int8Check
    from progresvit.evaluation import DataSource
    from progresvit.evaluation.classes import relabel

    dataset = DataSource(data=data, split=split).find()
    output.report_drawn_split(data, split, images=len(dataset), drawn_from=dataset.drawn_from)
    labels = tuple(relabel(dataset, config))
    return Int8Check(dataset=dataset, labels=labels, data=f"{data} ({split})", workers=workers)


def _int8_table(report: dict[str, Any]) -> Table:
    from progresvit.table import Column, Table, percent

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
    title = f"int8 beside fp32 on {output.count_images(report['images'])}, percent"
    return Table(title, columns, [{column.key: row.get(column.key) for column in columns} for row in rows])
