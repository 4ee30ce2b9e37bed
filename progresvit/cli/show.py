"""What several commands show alike: tables, progress, thresholds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

    from progresvit.evaluation.records import Header
    from progresvit.evaluation.table import Table
    from progresvit.routing import Router

ROUTER_HELP = "Compare thresholds with this router's probabilities instead of entropies."
THRESHOLD_HELP = "τ of the routed answers, or a setting's file; by default the near-lossless one."
LIMIT_HELP = "τ, one for each round but the last, a setting's file, or its name in the model; models may have one."
BACKEND_HELP = "torch, onnxruntime or openvino."
OUT_HELP = "A file to write, once for each: .csv, .json, .md for the table, .png, .svg, .pdf for the plot."
TABLE_HELP = "A file to write the table to, once for each: .csv, .json, .md."


def show_table(table: Table) -> None:
    """On the screen; numbers are never cut."""
    from rich.console import Console
    from rich.table import Table as RichTable

    heads, cells = table.cells()
    look = RichTable(title=table.title, title_justify="left")
    for number, head in enumerate(heads):
        is_word = not cells[0][number][:1].isdigit() and cells[0][number][:1] not in "+-–"
        look.add_column(head, justify="left" if is_word else "right")
    for row in cells:
        look.add_row(*row)
    console = Console()
    console.width = max(
        console.width, 4 + sum(3 + max(len(row[n]) for row in [heads, *cells]) for n in range(len(heads)))
    )
    console.print(look, markup=False)


Output = tuple[Path, str | bytes]
"""A file and what goes into it."""


def make_outputs(paths: Sequence[Path], table: Table, figure: Callable[[], Figure] | None = None) -> list[Output]:
    """Each file in the format of its suffix. Nothing is written yet, so an error leaves no files."""
    from progresvit.evaluation.table import FORMATS

    outputs: list[Output] = []
    for path in paths:
        if path.suffix in FORMATS:
            outputs.append((path, FORMATS[path.suffix](table)))
        else:
            from progresvit.analysis.style import render

            assert figure is not None
            outputs.append((path, render(figure(), path.suffix)))
    return outputs


def write_outputs(outputs: Sequence[Output]) -> None:
    """All of them, each in one step."""
    from progresvit.io.files import replace_file

    for path, content in outputs:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
        typer.echo(f"wrote {path}")


@contextmanager
def progress_bars(*, wanted: bool) -> Iterator[Callable[[str], Callable[[int, int], None]] | None]:
    """Gives a function that begins a named bar, which is then told how many are done of how many.

    There is no such function for a process that does not talk.
    """
    if not wanted:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bars:

        def begin(label: str) -> Callable[[int, int], None]:
            for task in bars.task_ids:
                bars.remove_task(task)
            new = bars.add_task(label, total=None)
            return lambda done, total: bars.update(new, completed=done, total=total)

        yield begin


def parse_numbers(text: str, option: str) -> list[float]:
    """Numbers with commas between them."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes numbers with commas, such as 0,0.1,0.5, not {text!r}.") from None


def parse_limit(text: str | None) -> str | float | tuple[float, ...] | None:
    """A number, or one per round with commas; whatever else is the file or the name of a setting, as it is."""
    if text is None:
        return None
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        return text
    return numbers[0] if len(numbers) == 1 else numbers


def parse_integers(text: str, option: str) -> list[int]:
    """Whole numbers with commas between them."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes whole numbers with commas, such as 1,3,5, not {text!r}.") from None


def parse_threshold(text: str | None, header: Header, router: Router | None = None) -> float | tuple[float, ...] | None:
    """A number, one per round with commas, or the path of a setting, for the model that the header speaks of.

    A setting for other rounds or another router is refused; one for other weights is told.
    """
    if text is None:
        return None
    rounds = len(header.config["rounds"])
    if Path(text).suffix == ".json":
        from progresvit.routing import load_setting
        from progresvit.routing.router import router_hash

        setting = load_setting(text)
        setting.check_use(rounds, None if router is None else router_hash(router))
        caveat = setting.caveat(
            weights=header.weights, preprocessing=header.preprocessing_hash, precision=header.precision
        )
        if caveat:
            typer.echo(f"note: {caveat}", err=True)
        return setting.threshold
    numbers = parse_numbers(text, "--threshold")
    from progresvit.routing.decide import as_thresholds

    threshold = numbers[0] if len(numbers) == 1 else tuple(numbers)
    as_thresholds([threshold], rounds)
    return threshold


def open_settings(
    paths: Sequence[Path], header: Header, router: Router | None = None
) -> dict[str, float | tuple[float, ...]]:
    """The thresholds of settings' files by short names, checked and told of as :func:`parse_threshold` does."""
    found: dict[str, float | tuple[float, ...]] = {}
    for name, path in zip(short_names(paths) if paths else [], paths):
        if path.suffix != ".json":
            raise ValueError(f"{path}: a setting is a .json file, as progresvit calibrate --out writes it.")
        threshold = parse_threshold(str(path), header, router)
        assert threshold is not None
        found[name] = threshold
    return found


@contextmanager
def setting_notes() -> Iterator[None]:
    """Warnings about a setting become notes for the person."""
    from progresvit.routing import SettingWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SettingWarning)
        yield
    for warning in caught:
        if issubclass(warning.category, SettingWarning):
            typer.echo(f"note: {warning.message}", err=True)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def tell_drawn(data: str, split: str, *, pictures: int, drawn_from: int | None) -> None:
    """If a split is no folder but drawn from a set without splits, say so."""
    if drawn_from is None:
        return
    share = "those that training would learn from" if split == "train" else "a fifth of each class, drawn by name"
    typer.echo(
        f"note: {data} has neither train/ nor val/; these are {pictures} of its {drawn_from} pictures, {share}, as "
        "training on them draws it (--split . takes all)",
        err=True,
    )


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest endings of the paths that tell them apart."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.with_suffix("").parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"{paths[0]} is given twice, or differs from another in its suffix alone.")


def open_router(path: Path | None, header: Header, ids: ArrayLike | None = None) -> Router | None:
    """The router of a file, if one is asked for; told if it was fitted on other weights or on images among ``ids``."""
    if path is None:
        return None
    from progresvit.routing import load_router

    router = load_router(path)
    if router.origin.model not in (None, header.weights):
        typer.echo(f"note: {path} was fitted on another model's records; expect it to do worse here.", err=True)
    seen = 0 if ids is None else router.count_seen(ids)
    if seen:
        typer.echo(
            f"note: {path} was fitted on {seen} of these images, which flatters it; judge it on others.", err=True
        )
    return router
