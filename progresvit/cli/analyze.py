"""``progresvit analyze``: figures of what a model does, with their numbers beside them as CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import options, output

FIGURE_HELP = "Figure to write: .png, .svg, .pdf. Its numbers are written beside it as .csv."
OVERWRITE_HELP = "Replace existing output files."

analyze = typer.Typer(help="Draw figures of what a model does; their numbers are beside them.", no_args_is_help=True)


@analyze.command("attention")
def attention(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)],
    image: Annotated[str, typer.Argument(help="Image file; the model sees its evaluation crop.")],
    out: Annotated[Path, typer.Option(help=FIGURE_HELP)],
    device: Annotated[str | None, typer.Option(help=options.DEVICE_HELP)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help=OVERWRITE_HELP)] = False,
) -> None:
    """Draw the attention of the class token in the last block: every head in every round, for one image."""
    from progresvit import api
    from progresvit.analysis.attention import attention_figure, attention_maps, attention_table
    from progresvit.data.decode import ImageError
    from progresvit.distributed import start_processes
    from progresvit.engine.images import read_image

    paths = check_figure(out, sources=[Path(image)], overwrite=overwrite)
    try:
        opened = read_image(image)
    except ImageError as error:
        raise ValueError(f"{image}: {error}.") from error
    chosen = start_processes(device).device
    rounds = attention_maps(api.load(model).to(chosen), opened)
    table = attention_table(rounds)
    output.write_outputs(output.make_outputs(paths, table, lambda: attention_figure(rounds)))


def check_figure(out: Path, *, sources: list[Path], overwrite: bool) -> list[Path]:
    """The figure and the CSV beside it; refuses unknown suffixes, existing files, and files that are read."""
    from progresvit.evaluation.table import PLOTS

    if out.suffix not in PLOTS:
        raise ValueError(f"{out}: the suffix names the format of the figure; use {', '.join(PLOTS)}.")
    paths = [out, out.with_suffix(".csv")]
    for path in paths:
        if path.resolve() in [source.resolve() for source in sources]:
            raise ValueError(f"{path} is an input; write the output to another place.")
        if path.exists() and not overwrite:
            raise ValueError(f"{path} is there already; use --overwrite to replace it, or name another file.")
    return paths
