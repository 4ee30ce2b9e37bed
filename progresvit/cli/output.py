"""What commands print and write: tables, plots, progress bars, notes."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from progresvit.cli.errors import in_options
from progresvit.io.parse import count_of, printable

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from progresvit.analysis.page import Page
    from progresvit.distributed import Processes
    from progresvit.routing import Setting
    from progresvit.table import Table


def echo(text: str = "", *, err: bool = False) -> None:
    """Print a line. Names and labels in it cannot control the terminal: see :func:`progresvit.io.parse.printable`."""
    typer.echo(printable(text), err=err)


def show_table(table: Table) -> None:
    """Print a table; the console is widened rather than cutting numbers."""
    from rich.console import Console
    from rich.table import Table as RichTable

    heads, *cells = ([printable(cell) for cell in line] for line in (table.cells()[0], *table.cells()[1]))
    rich_table = RichTable(title=printable(table.title), title_justify="left")
    for number, head in enumerate(heads):
        is_text = not cells[0][number][:1].isdigit() and cells[0][number][:1] not in "+-–"
        rich_table.add_column(head, justify="left" if is_text else "right")
    for row in cells:
        rich_table.add_row(*row)
    console = Console(markup=False, emoji=False)  # [red] or :cat: in a label is text
    console.width = max(
        console.width, 4 + sum(3 + max(len(row[n]) for row in [heads, *cells]) for n in range(len(heads)))
    )
    console.print(rich_table)


Output = tuple[Path, str | bytes]
"""A file and its content."""


def make_outputs(paths: Sequence[Path], table: Table, figure: Callable[[], Figure] | None = None) -> list[Output]:
    """Render each file in the format of its suffix. Nothing is written yet, so an error leaves no files."""
    from progresvit.table import FORMATS

    outputs: list[Output] = []
    for path in paths:
        if path.suffix in FORMATS:
            outputs.append((path, FORMATS[path.suffix](table)))
        else:
            from progresvit.plots import render

            assert figure is not None
            outputs.append((path, render(figure(), path.suffix)))
    return outputs


def write_outputs(outputs: Sequence[Output]) -> None:
    """Write each file atomically."""
    from progresvit.io.files import replace_file

    for path, content in outputs:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
        echo(f"wrote {path}")


def publish(
    table: Table, paths: Sequence[Path] | None, figure: Callable[[], Figure] | None = None, *, lines: Sequence[str] = ()
) -> None:
    """Print a table and the lines below it, and write the files. An error while they are rendered prints nothing."""
    outputs = make_outputs(paths or [], table, figure)
    show_table(table)
    for line in lines:
        echo(line)
    write_outputs(outputs)


def check_report_folder(out: Path, files: Sequence[str], *, overwrite: bool) -> list[Path]:
    """Files of an earlier report in a folder; refused unless they may be replaced. Other files stay there."""
    if out.is_file() or out.suffix in (".html", ".htm"):
        kind = "a file" if out.is_file() else "the name of a page"
        raise ValueError(f"{out} is {kind}; name a folder. The page in it is index.html.")
    earlier = [out / name for name in files if (out / name).exists()]
    if earlier and not overwrite:
        raise ValueError(f"{earlier[0]} already exists; use --overwrite to replace it, or name another folder.")
    return earlier


def write_report(page: Page, out: Path, *, earlier: Sequence[Path]) -> None:
    """Write the files of a page into a folder in place of the files of an earlier page, and print what was skipped."""
    outputs = [(out / name, content) for name, content in page.files()]
    write_outputs(outputs)
    for path in set(earlier) - {path for path, _ in outputs}:  # last: an interrupted command loses nothing
        path.unlink()
    report_skipped(list(page.skipped()))


@contextmanager
def progress_bars(*, wanted: bool = True) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Yield a function that starts a named bar, shown if ``wanted``, and returns its ``update(done, total)``."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    label, rate = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[rate]}")
    columns = (label, BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    console = Console(stderr=True)  # standard output may be piped
    with Progress(*columns, console=console, transient=True, disable=not (wanted and console.is_terminal)) as bars:

        def begin(label: str) -> Callable[[int, int], None]:
            for task in bars.task_ids:
                bars.remove_task(task)
            new = bars.add_task(printable(label), total=None, rate="")

            def update(done: int, total: int) -> None:
                speed = bars.tasks[-1].speed  # of the last seconds; what a resumed run finds done does not count
                bars.update(new, completed=done, total=total, rate=format_rate(speed))

            return update

        yield begin


@contextmanager
def stoppable(message: str = "stopped; the same command continues", *, wanted: bool = True) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block, which keeps what is finished, with a line on stderr and the usual exit code.

    A second signal ends whatever the block does to end in order. ``wanted`` is whether this process prints the line.
    """
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()  # only there can handlers be set
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
    try:
        yield
    except KeyboardInterrupt:
        code = 128 + (received[0] if received else signal.SIGINT)
        if wanted:
            echo(message, err=True)
        if len(received) > 1:
            os._exit(code)
        raise typer.Exit(code=code) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def running(device: str | None) -> Iterator[tuple[Processes, Callable[[str], Callable[[int, int], None]]]]:
    """The processes of a run that can be stopped, and the progress bars of the first process."""
    from progresvit.distributed import end_processes, start_processes

    processes = start_processes(device)
    try:
        with stoppable(wanted=processes.first), progress_bars(wanted=processes.first) as begin:
            yield processes, begin
    finally:
        end_processes()


def format_rate(speed: float | None) -> str:
    """Items per second; empty while it is not known."""
    if speed is None:
        return ""
    return f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.2g}/s"


def report_other_files(others: Mapping[str, int]) -> None:
    """Print the number of files that are no images, by suffix, in one line on stderr; nothing if there are none."""
    from progresvit.data.dataset import describe_others

    if line := describe_others(others):
        echo(line, err=True)


def count_images(images: int) -> str:
    """The number of images, with the noun in singular or plural."""
    return count_of(images, "image")


def describe_exits(exits: Sequence[int], gmacs: float, full_gmacs: float) -> str:
    """How many images exit after each round, and their average GMACs beside the GMACs of all rounds."""
    rounds = ", ".join(f"{count} after round {s}" for s, count in enumerate(exits, start=1))
    return (
        f"{count_images(sum(exits))}: {rounds}; {gmacs:.3f} GMACs on average instead of {full_gmacs:.3f}, "
        f"{1 - gmacs / full_gmacs:.1%} saved"
    )


def report_setting(setting: Setting | None, thresholds: Sequence[float]) -> None:
    """Print the calibrated thresholds of an engine, if it has any, and what its setting withholds."""
    if setting is None:
        return
    limits = ", ".join(f"{limit:.4g}" for limit in thresholds)
    spent = setting.expected.get("gmacs")
    average = f" ({spent:.3f} GMACs on average there)" if spent is not None else ""
    if not thresholds:
        pass  # one round
    elif setting.is_certified or setting.chosen_on is not None:
        echo(f"τ = {limits}, {setting.evidence}{average}")
    else:
        echo(f"τ = {limits}, calibrated by the rule {setting.rule} on {count_of(setting.n, 'image')}{average}")
    if setting.withheld:
        echo(f"withheld: {setting.withheld}")


def round_accuracies(correct: NDArray[np.bool_]) -> str:
    """Top-1 of each round with its 95 % interval: correct or not, (N, S)."""
    from progresvit.metrics.interval import share_interval

    intervals = [share_interval(int(count), len(correct)) for count in correct.sum(axis=0)]
    return ", ".join(f"round {s} {interval.as_percent()}" for s, interval in enumerate(intervals, start=1))


def report_skipped(bad: Sequence[tuple[str, str]], total: int | None = None, where: str = "") -> None:
    """List unreadable images, by name and reason, on stderr; ``where`` says where the others of ``total`` are."""
    for name, reason in bad:
        echo(f"skipped: {name}: {in_options(reason)}", err=True)
    if total is not None and total > len(bad):
        echo(f"… and {total - len(bad)} more, see {where}", err=True)


@contextmanager
def setting_notes() -> Iterator[None]:
    """Print warnings about a setting as notes on stderr."""
    from progresvit.routing import SettingWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SettingWarning)
        yield
    for warning in caught:
        if issubclass(warning.category, SettingWarning):
            echo(f"note: {in_options(str(warning.message))}", err=True)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def report_drawn_split(data: str, split: str, *, images: int, drawn_from: int | None) -> None:
    """Print a note if the split was drawn from a dataset without split folders."""
    if drawn_from is None:
        return
    share = "the training share" if split == "train" else "a fifth of each class, selected by file name"
    echo(
        f"note: {data} has neither train/ nor val/; using {images} of its {count_images(drawn_from)}, {share}, the "
        "same split as in training (--split . uses all images)",
        err=True,
    )
