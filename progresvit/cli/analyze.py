"""``progresvit analyze``: figures of what a model does, with their numbers beside them as CSV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from progresvit.cli import options, output
from progresvit.cli.errors import Commands, in_options
from progresvit.io.parse import parse_limit

if TYPE_CHECKING:
    from progresvit.analysis.diagnostics import Given
    from progresvit.model.interface import RoundModel

analyze = typer.Typer(
    help="Draw figures of what a model does; their numbers are beside them.", cls=Commands, no_args_is_help=True
)

Model = Annotated[str, typer.Argument(help=options.MODEL_HELP)]
Out = Annotated[Path, typer.Option(help="Figure: .png, .svg, .pdf. Its numbers are written beside it as .csv.")]
Data = Annotated[str, typer.Option(help="Labelled images: a folder or tars with <split>/<class>/<image>; hfds/NAME.")]
Split = Annotated[str, typer.Option(help="Split; '.' uses all images of top-level class folders.")]
Images = Annotated[int, typer.Option(help="Number of images, taken evenly from the classes.")]
Strengths = Annotated[str | None, typer.Option(help="Comma-separated strengths; 0 changes nothing.")]
Workers = Annotated[int, typer.Option(help=options.DECODE_HELP)]
Device = Annotated[str | None, typer.Option(help=options.DEVICE_HELP)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing output files.")]
IMAGES = 300


@analyze.command("all")
def all_figures(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the report, index.html, and its figures and tables.")],
    split: Split = "val",
    images: Images = IMAGES,
    workers: Workers = 2,
    device: Device = None,
    overwrite: Overwrite = False,
) -> None:
    """Write one HTML report with every figure. What a model or a machine cannot show is skipped with a note."""
    from progresvit.analysis.report import FILES, make_report

    earlier = output.check_report_folder(out, FILES, overwrite=overwrite)
    with output.progress_bars(wanted=True) as begin:
        assert begin is not None
        given = _open_given(model, device, (data, split, images, workers), begin("reading images"))
        report = make_report(given, data=data, progress=begin)
    _report_images(given, data, split)
    output.write_report(report, out, earlier=earlier)


@analyze.command("attention")
def attention(
    model: Model,
    image: Annotated[str, typer.Argument(help="Image file; the model sees its evaluation crop.")],
    out: Out,
    device: Device = None,
    overwrite: Overwrite = False,
) -> None:
    """Draw the attention of the class token in the last block: every head in every round, for one image."""
    from progresvit.analysis.attention import attention_figure, attention_maps, attention_table
    from progresvit.data.decode import ImageError
    from progresvit.engine.images import read_image

    paths = check_figure(out, sources=[Path(image)], overwrite=overwrite)
    try:
        opened = read_image(image)
    except ImageError as error:
        raise ValueError(f"{image}: {error}.") from error
    rounds = attention_maps(_open(model, device)[0], opened)
    table = attention_table(rounds)
    output.write_outputs(output.make_outputs(paths, table, lambda: attention_figure(rounds)))


@analyze.command("gates")
def gates(model: Model, out: Out, overwrite: Overwrite = False) -> None:
    """Draw all multipliers of PSG: rounds, branches, blocks and channels, on one colour scale."""
    from progresvit.analysis.gates import round_gates

    _write_of_model("gates", model, out, overwrite, round_gates)


@analyze.command("gate-distributions")
def gate_distributions(
    model: Model,
    out: Out,
    blocks: Annotated[
        str | None, typer.Option(help="Comma-separated blocks, from 1; first, middle and last by default.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Draw the distributions of PSG's multipliers over the channels of chosen blocks, by branch and round."""
    from progresvit.analysis.gate_distributions import gate_distributions as run

    chosen = None if blocks is None else options.parse_integers(blocks, "--blocks")
    _write_of_model("gate-distributions", model, out, overwrite, lambda loaded: run(loaded, chosen))


@analyze.command("gate-depth")
def gate_depth(model: Model, out: Out, overwrite: Overwrite = False) -> None:
    """Draw the mean and spread of PSG's multipliers over the blocks, and how much they differ between rounds."""
    from progresvit.analysis.gate_depth import gate_depth as run

    _write_of_model("gate-depth", model, out, overwrite, run)


@analyze.command("similarity")
def similarity(
    model: Model,
    data: Data,
    out: Out,
    split: Split = "val",
    images: Images = IMAGES,
    workers: Workers = 2,
    device: Device = None,
    overwrite: Overwrite = False,
) -> None:
    """Draw the similarity of every block output to that of the last block of the last round."""
    from progresvit.analysis.similarity import similarity as measure

    def run(given: Given, progress: Any) -> Any:
        return measure(given.model, given.sample, progress=progress)

    _write("similarity", model, out, overwrite, device, (data, split, images, workers), run)


@analyze.command("trajectories")
def trajectories(
    model: Model,
    data: Data,
    out: Out,
    classes: Annotated[
        str | None, typer.Option(help="Comma-separated classes, by name or folder name; five by default.")
    ] = None,
    split: Split = "val",
    images: Images = IMAGES,
    workers: Workers = 2,
    device: Device = None,
    overwrite: Overwrite = False,
) -> None:
    """Draw the paths of class-mean class tokens through the blocks of all rounds, by their principal components."""
    from progresvit.analysis.trajectories import trajectories as measure

    names = None if classes is None else [name.strip() for name in classes.split(",")]

    def run(given: Given, progress: Any) -> Any:
        return measure(given.model, given.sample, names, progress=progress)

    _write("trajectories", model, out, overwrite, device, (data, split, images, workers), run, classes=names)


@analyze.command("low-pass")
def low_pass(
    model: Model,
    data: Data,
    out: Out,
    strengths: Strengths = None,
    split: Split = "val",
    images: Images = IMAGES,
    workers: Workers = 2,
    device: Device = None,
    overwrite: Overwrite = False,
) -> None:
    """Blur the input of round 1 alone and draw the accuracy of the last round."""
    from progresvit.analysis.low_pass import STRENGTHS
    from progresvit.analysis.low_pass import low_pass as measure

    chosen = STRENGTHS if strengths is None else options.parse_numbers(strengths, "--strengths")

    def run(given: Given, progress: Any) -> Any:
        return measure(given.model, given.sample, chosen, progress=progress)

    _write("low-pass", model, out, overwrite, device, (data, split, images, workers), run)


@analyze.command("noise-replacement")
def noise_replacement(
    model: Model,
    data: Data,
    out: Out,
    strengths: Strengths = None,
    split: Split = "val",
    images: Images = IMAGES,
    workers: Workers = 2,
    device: Device = None,
    overwrite: Overwrite = False,
) -> None:
    """Replace round 1's last block output by noise and draw accuracy and confidence of the last round."""
    from progresvit.analysis.noise_replacement import STRENGTHS
    from progresvit.analysis.noise_replacement import noise_replacement as measure

    chosen = STRENGTHS if strengths is None else options.parse_numbers(strengths, "--strengths")

    def run(given: Given, progress: Any) -> Any:
        return measure(given.model, given.sample, chosen, progress=progress)

    _write("noise-replacement", model, out, overwrite, device, (data, split, images, workers), run)


@analyze.command("token-swap")
def token_swap(
    model: Model,
    data: Data,
    out: Out,
    strength: Annotated[float, typer.Option(help="Share of the other tokens: 0 changes nothing, 1 replaces.")] = 1.0,
    split: Split = "val",
    images: Images = IMAGES,
    workers: Workers = 2,
    device: Device = None,
    overwrite: Overwrite = False,
) -> None:
    """Replace round 1's tokens by those of other images, or shuffle them, and draw the accuracy of the last round."""
    from progresvit.analysis.token_swap import token_swap as measure

    def run(given: Given, progress: Any) -> Any:
        return measure(given.model, given.sample, strength, progress=progress)

    _write("token-swap", model, out, overwrite, device, (data, split, images, workers), run)


@analyze.command("exits")
def exits(
    model: Model,
    data: Data,
    out: Out,
    threshold: Annotated[
        str | None,
        typer.Option(help=f"{options.LIMIT_HELP} By default near-lossless, of the model or of these images."),
    ] = None,
    split: Split = "val",
    images: Images = IMAGES,
    workers: Workers = 2,
    device: Device = None,
    overwrite: Overwrite = False,
) -> None:
    """Draw images that exit early and late, exit shares by class, and what later rounds repair and break."""
    from progresvit.analysis.diagnostics import exit_threshold
    from progresvit.analysis.exits import exits as measure
    from progresvit.analysis.exits import repair_table

    def run(given: Given, progress: Any) -> Any:
        chosen = exit_threshold(given, parse_limit(threshold))
        return measure(given.model, given.sample, chosen, progress=progress)

    found = _write("exits", model, out, overwrite, device, (data, split, images, workers), run)
    output.show_table(repair_table(found))


@analyze.command("memory")
def memory(
    model: Model,
    out: Out,
    batches: Annotated[str | None, typer.Option(help="Comma-separated batch sizes; 1 to 512 by default.")] = None,
    precision: Annotated[str, typer.Option(help=options.PRECISION_HELP)] = "bf16",
    overwrite: Overwrite = False,
) -> None:
    """Draw peak GPU memory against the batch size: the engine, and the model run round by round."""
    from progresvit.analysis.memory import BATCHES, memory_figure, memory_table
    from progresvit.analysis.memory import memory as measure

    chosen = BATCHES if batches is None else options.parse_integers(batches, "--batches")
    paths = check_figure(out, sources=[], overwrite=overwrite)
    found = measure(model, chosen, precision=precision)
    output.write_outputs(output.make_outputs(paths, memory_table(found), lambda: memory_figure(found)))


@analyze.command("throughput")
def throughput(
    model: Model,
    data: Data,
    out: Out,
    batch: Annotated[int | None, typer.Option(help="Images per batch; 512 on a GPU, else 64.", min=1)] = None,
    precision: Annotated[str | None, typer.Option(help="bf16 (default on a GPU), fp32 or fp16.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Approximate duration of the timing of a point; 2 on a GPU, else 8.", min=0)
    ] = None,
    split: Split = "val",
    images: Images = IMAGES,
    workers: Workers = 2,
    device: Device = None,
    overwrite: Overwrite = False,
) -> None:
    """Draw the accuracy against the images per second of the engine, from few to all images that continue."""
    from progresvit.analysis.throughput import throughput as measure

    def run(given: Given, progress: Any) -> Any:
        return measure(given.model, given.sample, precision=precision, batch=batch, seconds=seconds, progress=progress)

    _write("throughput", model, out, overwrite, device, (data, split, images, workers), run)


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
            raise ValueError(f"{path} is there already; use --overwrite to replace it, or name another file.")
    return paths


def _open(model: str, device: str | None) -> tuple[RoundModel, Path | None]:
    """The model on the device, and its folder."""
    from progresvit import api
    from progresvit.distributed import start_processes

    loaded, folder = api.load_with_folder(model)
    return loaded.to(start_processes(device).device), folder


def _open_given(
    model: str,
    device: str | None,
    source: tuple[str, str, int, int],
    progress: Callable[[int, int], None],
    classes: list[str] | None = None,
) -> Given:
    """The model and a sample of images; ``source`` is what the options --data, --split, --images, --workers say."""
    from progresvit.analysis.diagnostics import Given
    from progresvit.analysis.sample import load_sample
    from progresvit.evaluation.run import DataSource

    data, split, images, workers = source
    loaded, folder = _open(model, device)
    found = DataSource(data=data, split=split)
    sample = load_sample(loaded.config, found, images=images, classes=classes, workers=workers, progress=progress)
    return Given(model=loaded, name=model, folder=folder, sample=sample)


def _report_images(given: Given, data: str, split: str) -> None:
    """Notes about a split that was drawn, and about images that cannot be read."""
    if given.sample.drawn is not None:
        images, drawn_from = given.sample.drawn
        output.report_drawn_split(data, split, images=images, drawn_from=drawn_from)
    for line in given.sample.unreadable:
        typer.echo(f"skipped: {in_options(line)}", err=True)


def _write_of_model(name: str, model: str, out: Path, overwrite: bool, run: Callable[[RoundModel], Any]) -> None:
    """Write the figure and the table of what ``run`` finds in a model."""
    from progresvit.analysis.diagnostics import DIAGNOSTICS

    paths, diagnostic = check_figure(out, sources=[], overwrite=overwrite), DIAGNOSTICS[name]
    found = run(_open(model, "cpu")[0])
    output.write_outputs(output.make_outputs(paths, diagnostic.table(found), lambda: diagnostic.figure(found)))


def _write(
    name: str,
    model: str,
    out: Path,
    overwrite: bool,
    device: str | None,
    source: tuple[str, str, int, int],
    run: Callable[[Given, Any], Any],
    classes: list[str] | None = None,
) -> Any:
    """Write the figure and the table of what ``run`` finds in a model on a sample of images, and return it."""
    from progresvit.analysis.diagnostics import DIAGNOSTICS

    paths, diagnostic = check_figure(out, sources=[Path(source[0])], overwrite=overwrite), DIAGNOSTICS[name]
    with output.progress_bars(wanted=True) as begin:
        assert begin is not None
        given = _open_given(model, device, source, begin("reading images"), classes)
        found = run(given, begin(name))
    _report_images(given, *source[:2])
    output.write_outputs(output.make_outputs(paths, diagnostic.table(found), lambda: diagnostic.figure(found)))
    return found
