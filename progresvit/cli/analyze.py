"""``progresvit analyze``: figures of what a model does, with their numbers beside them as CSV.

There is a command for each entry of ``analysis/registry.py``, and one for the report of all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from progresvit.analysis.registry import DIAGNOSTICS, IMAGES, Diagnostic, Needs, Subject
from progresvit.cli import options, output
from progresvit.cli.errors import Commands, in_options
from progresvit.io.parse import parse_limit

if TYPE_CHECKING:
    from PIL.Image import Image

    from progresvit.io.resumable import Progress

analyze = typer.Typer(
    help="Draw figures of what a model does; their numbers are beside them.", cls=Commands, no_args_is_help=True
)

_Model = Annotated[str, typer.Argument(help=options.MODEL_HELP)]
_Image = Annotated[str, typer.Argument(help="Image file; the model sees its evaluation crop.")]
_Data = Annotated[str, typer.Option(help="Labelled images: a folder or tars with <split>/<class>/<image>; hfds/NAME.")]
_Out = Annotated[Path, typer.Option(help="Figure: .png, .svg, .pdf. Its numbers are written beside it as .csv.")]
_Split = Annotated[str, typer.Option(help="Split; '.' uses all images of top-level class folders.")]
_Images = Annotated[int, typer.Option(help="Number of images, taken evenly from the classes.")]
_Workers = Annotated[int, typer.Option(help=options.DECODE_HELP)]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing output files.")]


@analyze.command("all")
def all_figures(
    model: _Model,
    data: _Data,
    out: Annotated[Path, typer.Option(help="Folder for the report, index.html, and its figures and tables.")],
    split: _Split = "val",
    images: _Images = IMAGES,
    workers: _Workers = 2,
    device: options.Device = None,
    overwrite: _Overwrite = False,
) -> None:
    """Write one HTML report with every figure. What a model or a machine cannot show is skipped with a note."""
    from progresvit.analysis.report import FILES, make_report

    earlier = output.check_report_folder(out, FILES, overwrite=overwrite)
    with output.progress_bars() as begin:
        values = {"model": model, "data": data, "split": split, "images": images, "workers": workers, "device": device}
        subject = _open_subject("images", values, begin)
        report = make_report(subject, data=data, progress=begin)
    _report_images(subject, data, split)
    output.write_report(report, out, earlier=earlier)


def _command(diagnostic: Diagnostic) -> Callable[..., None]:
    """The command of a figure: it measures, and writes the figure and the table."""

    def command(**values: Any) -> None:
        own = {name: _parse(diagnostic, name, values[name]) for name in diagnostic.options if values[name] is not None}
        sources = [Path(values[name]) for name in ("image", "data") if name in values]
        paths = check_figure(values["out"], sources=sources, overwrite=values["overwrite"])
        with output.progress_bars() as begin:
            subject = _open_subject(diagnostic.needs, values, begin, own.get("classes"))
            numbers = diagnostic.run(subject, begin(diagnostic.name), **own)
        if diagnostic.needs == "images":
            _report_images(subject, values["data"], values["split"])
        tables = diagnostic.tables(numbers)
        output.write_outputs(output.make_outputs(paths, tables[diagnostic.name], lambda: diagnostic.figure(numbers)))
        if diagnostic.printed is not None:
            output.show_table(tables[f"{diagnostic.name}-{diagnostic.printed}"])

    signature = _signature(diagnostic)  # typer reads both
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    command.__doc__ = diagnostic.help
    return command


def _signature(diagnostic: Diagnostic) -> inspect.Signature:
    """The arguments and options of a command: the model, what the figure needs, its own options, and the output."""
    own = {}
    for name, option in diagnostic.options.items():
        kind: Any = option.type if option.default is not None else option.type | None
        own[name] = (Annotated[kind, typer.Option(help=option.help, min=option.least)], option.default)
    required, device = inspect.Parameter.empty, {"device": (options.Device, None)}
    sample = {"split": (_Split, "val"), "images": (_Images, IMAGES), "workers": (_Workers, 2)}
    around: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "model": ({}, {}),
        "gpu": ({}, {}),
        "image": ({"image": (_Image, required)}, device),
        "images": ({"data": (_Data, required)}, sample | device),
    }
    before, after = around[diagnostic.needs]
    parameters = {"model": (_Model, required), **before, "out": (_Out, required), **own, **after}
    parameters["overwrite"] = (_Overwrite, False)
    return inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for name, (annotation, default) in parameters.items()
        ]
    )


def _parse(diagnostic: Diagnostic, name: str, value: Any) -> Any:
    """The value of a figure's own option."""
    match diagnostic.options[name].parse:
        case "numbers":
            return options.parse_numbers(value, f"--{name}")
        case "integers":
            return options.parse_integers(value, f"--{name}")
        case "names":
            return [part.strip() for part in value.split(",")]
        case "threshold":
            return parse_limit(value)
    return value


def check_figure(out: Path, *, sources: list[Path], overwrite: bool) -> list[Path]:
    """The figure and the CSV beside it; refuses unknown suffixes, existing files, and files that are read."""
    from progresvit.table import PLOTS

    if out.suffix not in PLOTS:
        raise ValueError(f"{out}: the suffix names the format of the figure; use {', '.join(PLOTS)}.")
    paths = [out, out.with_suffix(".csv")]
    for path in paths:
        if path.resolve() in [source.resolve() for source in sources]:
            raise ValueError(f"{path} is an input; write the output to another place.")
        if path.exists() and not overwrite:
            raise ValueError(f"{path} already exists; use --overwrite to replace it, or name another file.")
    return paths


def _open_subject(
    needs: Needs, values: Mapping[str, Any], begin: Callable[[str], Progress], classes: Sequence[str] | None = None
) -> Subject:
    """What a figure is made of: the model on its device, and an image or a sample of ``classes`` if it needs one."""
    from progresvit import api
    from progresvit.distributed import start_processes

    name = values["model"]
    if needs == "gpu":  # the processes that measure open the model
        return Subject(name=name)
    image = _read_image(values["image"]) if needs == "image" else None
    model, folder = api.load_with_folder(name)
    model = model.to(start_processes("cpu" if needs == "model" else values["device"]).device)
    subject = Subject(name=name, model=model, folder=folder)
    if image is not None:
        from progresvit.analysis.attention import evaluation_input

        return replace(subject, image=evaluation_input(image, model.config))
    if needs == "model":
        return subject
    from progresvit.analysis.sample import load_sample
    from progresvit.evaluation.source import DataSource

    sample = load_sample(
        model.config,
        DataSource(data=values["data"], split=values["split"]),
        images=values["images"],
        classes=classes,
        workers=values["workers"],
        progress=begin("reading images"),
    )
    return replace(subject, sample=sample)


def _read_image(path: str) -> Image:
    from progresvit.data.decode import ImageError
    from progresvit.engine.images import read_image

    try:
        return read_image(path)
    except ImageError as error:
        raise ValueError(f"{path}: {error}.") from error


def _report_images(subject: Subject, data: str, split: str) -> None:
    """Notes about a split that was drawn, and about images that cannot be read."""
    assert subject.sample is not None
    if subject.sample.drawn is not None:
        images, drawn_from = subject.sample.drawn
        output.report_drawn_split(data, split, images=images, drawn_from=drawn_from)
    for line in subject.sample.unreadable:
        output.echo(f"skipped: {in_options(line)}", err=True)


for _name, _diagnostic in DIAGNOSTICS.items():
    analyze.command(_name)(_command(_diagnostic))
