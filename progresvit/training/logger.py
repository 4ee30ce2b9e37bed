"""What a run reports: a progress bar, JSON lines, TensorBoard, W&B, and its environment."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from progresvit import __version__
from progresvit.distributed import processor_name
from progresvit.io.extras import not_installed
from progresvit.io.files import replace_file
from progresvit.io.parse import parse_json, printable

LOG_FILE = "log.jsonl"
WANDB_FOLDER = "wandb"
"""Folder in the run's folder, in which wandb keeps its files too."""


class RunLogger:
    """The outputs of a run. Only the first process logs.

    Args:
        folder: The folder of the run; None in the other processes, which log nothing.
        total_steps: Steps of the whole run.
        first_step: Steps done before. Later lines of an existing log are removed.
        evaluated_step: The step of the last evaluation in the checkpoint.
        tracker: A run of Weights & Biases, which also gets the numbers; any object with ``log`` and ``finish``.
    """

    def __init__(
        self, folder: Path | None, *, total_steps: int, first_step: int, evaluated_step: int, tracker: Any = None
    ) -> None:
        self.folder, self.total_steps, self._tracker = folder, total_steps, tracker
        self.console = Console(stderr=True, quiet=folder is None, markup=False, emoji=False)
        if folder is None:
            return
        remove_after(folder / LOG_FILE, first_step, evaluated_step)
        self._file = (folder / LOG_FILE).open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total_steps, completed=first_step)
        self._bar.start()

    def steps(
        self,
        *,
        epoch: int,
        step: int,
        losses: list[float],
        lr: float,
        speed: float,
        batch: int,
        values: Mapping[str, Any],
    ) -> None:
        """Report the mean losses of the steps since the last call, and the task's other ``values``.

        The time left assumes ``speed`` images per second and ``batch`` images per step.
        """
        if self.folder is None:
            return
        rounds = " ".join(f"{loss:.3f}" for loss in losses)
        left = (self.total_steps - step) * batch / speed
        line = f"loss {rounds} lr {lr:.1e} {speed:,.0f} images/s"
        self._bar.update(self._task, completed=step, description=f"epoch {epoch + 1} {line}")
        if not self.console.is_terminal:
            self.console.print(
                f"epoch {epoch + 1} step {step}/{self.total_steps} {line}, {_duration(left)} left", highlight=False
            )
        loss = sum(losses) / len(losses)
        line_values = {"epoch": epoch, "loss": loss, "losses": losses, "lr": lr, "images_per_second": speed}
        self._write("train", step, {**line_values, "seconds_left": left, **values})

    def evaluation(self, *, epoch: int, step: int, values: Mapping[str, Any], summary: str) -> None:
        """Report the metrics of an evaluation, and print the summary."""
        if self.folder is None:
            return
        self.say(f"epoch {epoch + 1}: {summary}")
        self._write("evaluation", step, {"epoch": epoch, **values})

    def say(self, text: str) -> None:
        """Print a line. Names in it cannot control the terminal."""
        self.console.print(printable(text), highlight=False, soft_wrap=True)

    def end_bar(self) -> None:
        """Stop the progress bar; later lines are printed below it."""
        if self.folder is not None:
            self._bar.stop()

    def close(self, *, failed: bool = False) -> None:
        """Close all outputs. ``failed`` tells the tracker that the run is incomplete."""
        self.end_bar()
        if self.folder is not None:
            self._file.close()
            self._board.close()
        if self._tracker is not None:
            self._tracker.finish(exit_code=int(failed))

    def _write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
        self._file.flush()
        numbers = {f"{event}/{name}": number for name, number in _numbers(values)}
        for name, number in numbers.items():
            self._board.add_scalar(name, number, step)
        if self._tracker is not None:
            self._tracker.log(numbers, step=step)


def import_wandb() -> Any:
    """The package, or an error that names the extra."""
    try:
        import wandb
    except ImportError as error:
        raise ValueError(f"run.wandb: {not_installed('wandb', 'wandb')}") from error
    if not hasattr(wandb, "init"):  # it is a folder named wandb in the working directory
        raise ValueError(f"run.wandb: {not_installed('wandb', 'wandb')}")
    return wandb


def start_wandb(project: str, folder: Path, recipe: Mapping[str, Any]) -> Any:
    """A run of the project with ``log`` and ``finish``; a folder that resumes continues its run."""
    wandb = import_wandb()
    id_file = folder / WANDB_FOLDER / "run_id.txt"
    before = id_file.read_text(encoding="utf-8") if id_file.exists() else None
    id_file.parent.mkdir(exist_ok=True)
    try:
        run = wandb.init(
            project=project,
            name=folder.name,
            dir=str(folder),
            config=dict(recipe),
            id=before,
            resume="allow",
            settings=wandb.Settings(console="off"),  # the progress bar is not logged
        )
    except wandb.Error as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"run.wandb: Weights & Biases refused the run ({reason}); run wandb login, set WANDB_MODE=offline, or "
            "remove run.wandb."
        ) from error
    replace_file(id_file, str(run.id))
    return run


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers by name. Numbers in a mapping are ``name/key``, in a list ``name/round 1``."""
    for name, value in values.items():
        if isinstance(value, float):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}/{part}", number) for part, number in value.items() if isinstance(number, float))
        elif isinstance(value, list):
            yield from ((f"{name}/round {number}", part) for number, part in enumerate(value, start=1))


def _duration(seconds: float) -> str:
    """Seconds as 1:05 or 2:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def read_log(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run's log."""
    return [json.loads(line) for line in (folder / LOG_FILE).read_text(encoding="utf-8").splitlines()]


def training_seconds(log: Sequence[Mapping[str, Any]], batch: int) -> float:
    """Seconds of the optimizer steps with compilation, without evaluations and checkpoints."""
    seconds, before = 0.0, 0
    for line in log:
        if line["event"] == "train":
            seconds += (line["step"] - before) * batch / line["images_per_second"]
            before = line["step"]
    return seconds


def remove_after(log: Path, step: int, evaluated_step: int) -> None:
    """Remove lines after the checkpoint from which a run resumes, and lines that a crash cut short.

    A checkpoint is evaluated after it is written, so its evaluation may be removed too.
    """
    if not log.exists():
        return
    kept = []
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            entry = parse_json(line)
            if entry["step"] <= (evaluated_step if entry["event"] == "evaluation" else step):
                kept.append(line)
        except (ValueError, KeyError):
            continue
    replace_file(log, "".join(line + "\n" for line in kept))


def environment(device: torch.device, processes: int) -> dict[str, Any]:
    """Versions, hardware and command: what a result depends on besides the recipe."""
    return {
        "progresvit": __version__,
        "git": git_revision(),
        "command": sys.argv,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "processes": processes,
        "threads": torch.get_num_threads(),
    }


def git_revision() -> str | None:
    """The commit of this code, marked if tracked files have changed; None outside of a git checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    revision = git("rev-parse", "HEAD")
    return f"{revision}, changed" if revision and git("status", "--porcelain", "--untracked-files=no") else revision
