"""``progresvit info``: rounds, parameters, compute and settings of a model. A ProgResViT is described without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from progresvit import compute
from progresvit.cli import options, output
from progresvit.compute import CONVENTIONS
from progresvit.config import PRESETS, BaseConfig, ModelConfig
from progresvit.io.model_folder import (
    BUNDLED,
    CONFIG_FILE,
    DEFAULT_MODEL,
    bundled_folder,
    find_folder,
    is_foreign,
    is_local,
    may_be_timm_name,
)
from progresvit.io.parse import did_you_mean, dump_json, printable
from progresvit.model.registry import read_config

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from progresvit.table import Table

COMPONENTS = tuple(field.name for field in fields(compute.RoundMacs))
HEADINGS = {"width": "channels"}
"""Headings of the table of rounds that differ from the keys."""
SEGMENTATION_COMPONENTS = {"head": "decoder (every patch)"}
"""Names of components of a segmentation model that differ from the keys."""


def info(
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"Preset. {options.EXPORT_HELP} Without one, {DEFAULT_MODEL} and the list of names.",
            metavar="PRESET|MODEL",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Rounds, parameters and multiply-accumulates of a model, in both conventions, and its settings."""
    from progresvit.engine.export.manifest import is_export

    if model is None:
        report = describe(DEFAULT_MODEL, read_config(bundled_folder()))
    else:
        report = describe(model, find_config(model))
    if model is not None and is_export(model):
        report["settings"] = describe_export_settings(Path(model).expanduser())
        report["export"] = describe_export(Path(model).expanduser(), report["settings"])
    elif model is None or (model not in PRESETS and is_local(model)):
        report["settings"] = describe_model_settings(find_folder(model or DEFAULT_MODEL))
    if as_json:
        typer.echo(dump_json(report))
        return
    _print(report)
    if "export" in report:
        _print_export(report["export"])
    if report.get("settings"):
        output.show_table(_settings_table(report["settings"]))
    if model is None:
        output.echo(f"Bundled models: {', '.join(BUNDLED)}")
        output.echo(f"Presets: {', '.join(PRESETS)}")


def describe(name: str, config: BaseConfig) -> dict[str, Any]:
    """The content of the tables as plain data; MACs are exact integers, GMACs are not rounded."""
    if not isinstance(config, ModelConfig):
        return _describe_other_kind(name, config)
    return {
        "model": name,
        "task": config.task,
        "parameters": compute.parameters(config),
        "config": config.to_dict(),
        "rounds": [
            {
                "round": number,
                "resolution": round_.resolution,
                "heads": round_.heads,
                "width": round_.width,
                "tokens": config.grid(round_) ** 2 + 1,
            }
            for number, round_ in enumerate(config.rounds, start=1)
        ],
        "compute": {convention: _compute(config, convention) for convention in CONVENTIONS},
    }


def _describe_other_kind(name: str, config: BaseConfig) -> dict[str, Any]:
    """The same for a model whose compute only the model itself knows; it has no components."""
    import torch

    from progresvit.model.registry import build

    with torch.device("meta"):
        model = build(config)
    gmacs = "cumulative_gmacs" if config.routable else "alternative_gmacs"
    return {
        "model": name,
        "task": config.task,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "config": config.to_dict(),
        "rounds": [{"round": number, **round_.model_dump()} for number, round_ in enumerate(config.rounds, start=1)],
        "compute": {convention: {gmacs: model.gmacs(convention)} for convention in CONVENTIONS},
    }


def _compute(config: ModelConfig, convention: compute.Convention) -> dict[str, Any]:
    rounds = compute.round_macs(config, convention)
    return {
        "round_macs": [{**asdict(macs), "total": macs.total} for macs in rounds],
        "cumulative_gmacs": compute.cumulative_gmacs(config, convention),
    }


def find_config(source: str) -> BaseConfig:
    """The config of a preset, a model folder, an export, a bundled model, a hub id, or a model of timm."""
    if source in PRESETS:
        return PRESETS[source]
    from progresvit.engine.export.manifest import Manifest, is_export

    if is_export(source):
        return Manifest.read(Path(source).expanduser()).config
    if source.startswith("NCPS/"):
        from progresvit.interop import OFFICIAL_MODELS

        if source in OFFICIAL_MODELS:
            return OFFICIAL_MODELS[source]
    if not is_local(source) and not Path(source).exists() and Path(source).name == source:
        if may_be_timm_name(source):
            from progresvit.api import is_timm_name

            if is_timm_name(source):
                from progresvit.interop.plain import config_from_timm

                return config_from_timm(source)
        nearest = did_you_mean(source, (*BUNDLED, *PRESETS))
        raise ValueError(f"there is no preset, bundled model or model folder {source!r}; {nearest}")
    if Path(source).suffix != ".safetensors":  # torch is not needed
        folder = find_folder(source, files=(CONFIG_FILE,))
        if not is_foreign(folder):
            return read_config(folder)
        from progresvit.interop.official import foreign_config

        config = foreign_config(folder)
        if config is not None:
            return config
    from progresvit.api import load

    return load(source).config  # the rounds follow from the weights


def describe_export(folder: Path, settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What an export adds to its model: format, precision, threshold, settings, and the measured cost of int8."""
    from progresvit.engine.export.manifest import Manifest

    manifest = Manifest.read(folder)
    keys = ("kind", "precision", "threshold", "setting_name", "temperatures", "weights", "preprocessing", "int8")
    values = manifest.by_key()
    notes = {setting["name"]: setting["note"] for setting in settings}
    return {**{key: values[key] for key in keys}, "settings": notes}


def describe_export_settings(folder: Path) -> list[dict[str, Any]]:
    """The settings of an export."""
    from progresvit.engine.export.manifest import Manifest
    from progresvit.engine.onnx_backend import choose_backend

    manifest = Manifest.read(folder)
    return _describe_settings(
        folder,
        manifest.default_name,
        manifest.weights_sha256,
        preprocessing_sha256=manifest.preprocessing_sha256,
        precision=manifest.precision,
        backend=choose_backend(None, manifest.kind),
        graphs_sha256=manifest.graphs_sha256,
    )


def describe_model_settings(folder: Path) -> list[dict[str, Any]]:
    """The settings of a model folder; the notes are for an engine in float32."""
    from progresvit.routing.settings import DEFAULT, setting_names

    if not setting_names(folder):
        return []
    from progresvit.data.crop import preprocessing_hash

    config, weights_sha256 = options.config_and_hash(folder)
    preprocessing = preprocessing_hash(config)
    if config.task == "segmentation":
        from progresvit.data.segmentation.windows import WindowOptions, windows_hash

        preprocessing = windows_hash(config, WindowOptions())
    return _describe_settings(folder, DEFAULT, weights_sha256, preprocessing_sha256=preprocessing, precision="fp32")


def _describe_settings(
    folder: Path, default: str | None, weights_sha256: str | None, **used: str | None
) -> list[dict[str, Any]]:
    """The settings of a folder, each with what differs from its calibration; ``used`` is for ``Setting.caveat``.

    Without a hash of the weights, they are not compared.
    """
    from progresvit.routing.settings import find_setting, setting_names

    described: list[dict[str, Any]] = []
    for name in setting_names(folder):
        row: dict[str, Any] = {"name": name, "default": name == default}
        try:
            with output.setting_notes():
                setting = find_setting(name, folder)
        except ValueError as error:
            described.append({**row, "note": str(error)})
            continue
        about = {key: getattr(setting, key) for key in ("rule", "threshold", "n", "chosen_on", "data", "date")}
        others = weights_sha256 not in (None, setting.weights_sha256)
        note = "the setting is for other weights." if others else setting.caveat(**used)  # type: ignore[arg-type]
        withheld = setting.withheld or None
        described.append({**row, **about, "certified": setting.is_certified, "withheld": withheld, "note": note})
    return described


def _settings_table(settings: Sequence[Mapping[str, Any]]) -> Table:
    from progresvit.table import Column, Table, threshold

    columns = [
        Column("name", "setting"),
        Column("rule", "rule"),
        Column("threshold", "τ", threshold),
        Column("images", "images"),
        Column("date", "date"),
        Column("note", "note"),
    ]
    rows = []
    for setting in settings:
        rule = "certified" if setting.get("certified") else setting.get("rule")
        images = f"{setting['n']} validation" if setting.get("chosen_on") else setting.get("n")
        withheld = f"withholds: {limits}." if (limits := setting.get("withheld")) else ""
        note = " ".join(text for text in ("default" if setting["default"] else "", withheld, setting["note"]) if text)
        rows.append({**setting, "rule": rule, "images": images, "date": setting.get("date", "")[:16], "note": note})
    return Table("Settings", columns, [{column.key: row.get(column.key) for column in columns} for row in rows])


def _print_export(report: dict[str, Any]) -> None:
    output.echo(f"Export: {report['kind']}, {report['precision']}")
    named = f" ({report['setting_name']})" if report["setting_name"] else ""
    output.echo(f"Threshold: {'none' if report['threshold'] is None else report['threshold']}{named}")


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(emoji=False)
    console.width = max(console.width, 24 + 10 * len(report["rounds"]))  # do not cut numbers
    task = f"  {report['task']}, {report['config']['num_classes']} classes" if _segments(report) else ""
    console.print(f"[bold]{escape(printable(report['model']))}[/bold]  {report['parameters']:,} parameters{task}")
    console.print(_rounds_table(report))
    for convention in CONVENTIONS:
        console.print(_compute_table(report, convention))


def _segments(report: dict[str, Any]) -> bool:
    return bool(report["task"] == "segmentation")


def _rounds_table(report: dict[str, Any]) -> RichTable:
    from rich.markup import escape
    from rich.table import Table

    keys = list(report["rounds"][0])
    table = Table(*(HEADINGS.get(key, key) for key in keys), title="Rounds", title_justify="left")
    for row in report["rounds"]:
        table.add_row(*(escape(printable(str(row[key]))) for key in keys))
    return table


def _compute_table(report: dict[str, Any], convention: str) -> RichTable:
    from rich.table import Table

    figures = report["compute"][convention]
    rounds, cumulative = figures.get("round_macs"), figures.get("cumulative_gmacs")
    totals = figures["alternative_gmacs"] if cumulative is None else cumulative
    of_window, names = (" of a window", SEGMENTATION_COMPONENTS) if _segments(report) else ("", {})
    table = Table(title=f"GMACs{of_window}, {convention} convention", title_justify="left")
    table.add_column("component")
    for number in range(1, len(totals) + 1):
        table.add_column(f"round {number}", justify="right")
    if rounds is not None:
        for component in COMPONENTS:
            name = names.get(component, component.replace("_", " "))
            table.add_row(name, *(_gmacs(macs[component]) for macs in rounds))
        table.add_section()
        table.add_row("this round", *(f"{macs['total'] / 1e9:.3f}" for macs in rounds))
    name = "each round alone" if cumulative is None else "cumulative"
    table.add_row(name, *(f"[bold]{gmacs:.3f}[/bold]" for gmacs in totals))
    return table


def _gmacs(macs: int) -> str:
    """Three decimals, or as many as show the first digit of a small component."""
    if macs == 0:
        return "-"
    return f"{macs / 1e9:.3f}" if macs >= 5e5 else f"{macs / 1e9:.1g}"
