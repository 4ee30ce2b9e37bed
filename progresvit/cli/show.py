"""What several commands show alike: tables, progress, thresholds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from progresvit.evaluation.records import Records
    from progresvit.evaluation.table import Table
    from progresvit.routing import Router

ROUTER_HELP = "Compare thresholds with this router's probabilities instead of entropies."
THRESHOLD_HELP = "τ of the routed answers, or a setting's file; by default the near-lossless one."
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


def save_outputs(paths: Sequence[Path], table: Table, figure: Callable[[], Figure] | None = None) -> None:
    """Each file in the format of its suffix."""
    from progresvit.evaluation.table import FORMATS

    for path in paths:
        if path.suffix in FORMATS:
            table.save(path)
        else:
            from progresvit.analysis.style import save_figure

            assert figure is not None
            save_figure(figure(), path)
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


def parse_threshold(text: str | None, rounds: int, router: Router | None = None) -> float | tuple[float, ...] | None:
    """A number, one per round with commas, or the path of a setting for such rounds and such a router."""
    if text is None:
        return None
    if Path(text).suffix == ".json":
        from progresvit.routing import load_setting
        from progresvit.routing.router import router_hash

        setting = load_setting(text)
        setting.check_use(rounds, None if router is None else router_hash(router))
        return setting.threshold
    numbers = parse_numbers(text, "--threshold")
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def open_router(path: Path | None, records: Records) -> Router | None:
    """The router of a file, if one is asked for; told if it was fitted on other weights or on these very images."""
    if path is None:
        return None
    from progresvit.routing import load_router

    router = load_router(path)
    if router.origin.model not in (None, records.header.weights):
        typer.echo(f"note: {path} was fitted on another model's records; expect it to do worse here.", err=True)
    if router.origin.records == records.ids_hash:
        typer.echo(
            f"note: {path} was fitted on these very images, which flatters it; use others to judge it.", err=True
        )
    return router
