"""What a run tells: a live bar for the person, JSON lines and TensorBoard for later, its surroundings once."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from progresvit import __version__
from progresvit.distributed import processor_name
from progresvit.io.files import replace_file

LOG_FILE = "log.jsonl"


class Journal:
    """Written by the first process alone; the others hold a silent one (``folder`` None)."""

    def __init__(self, folder: Path | None, *, total_steps: int, first_step: int, evaluated_step: int) -> None:
        self.folder = folder
        self.console = Console(stderr=True, quiet=folder is None)
        if folder is None:
            return
        forget_after(folder / LOG_FILE, first_step, evaluated_step)
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

    def steps(self, *, epoch: int, step: int, losses: list[float], lr: float, speed: float) -> None:
        """The mean losses of the steps since the last call."""
        if self.folder is None:
            return
        rounds = " ".join(f"{loss:.3f}" for loss in losses)
        line = f"loss {rounds} lr {lr:.1e} {speed:,.0f} images/s"
        self._bar.update(self._task, completed=step, description=f"epoch {epoch + 1} {line}")
        if not self.console.is_terminal:
            self.console.print(f"epoch {epoch + 1} step {step} {line}", highlight=False)
        loss = sum(losses) / len(losses)
        self._write(
            "train", step, {"epoch": epoch, "loss": loss, "losses": losses, "lr": lr, "images_per_second": speed}
        )

    def evaluation(self, *, epoch: int, step: int, result: Mapping[str, Any]) -> None:
        """Accuracy of every round and of the near-lossless point."""
        if self.folder is None:
            return
        point = result["near_lossless"]
        rounds = " ".join(f"{top1:.2%}" for top1 in result["top1"])
        self.console.print(
            f"epoch {epoch + 1}: top-1 of the rounds {rounds}; near-lossless {point['top1']:.2%} at "
            f"{point['gmacs']:.3f} of {result['full_gmacs']:.3f} GMACs ({result['convention']}), "
            f"threshold {point['threshold']:.4f}",
            soft_wrap=True,
            highlight=False,
        )
        self._write("evaluation", step, {"epoch": epoch, **result})

    def say(self, text: str) -> None:
        """A line for the person."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def end_bar(self) -> None:
        """Nothing is left to be done; what is said from here on stands below the bar."""
        if self.folder is not None:
            self._bar.stop()

    def close(self) -> None:
        self.end_bar()
        if self.folder is not None:
            self._file.close()
            self._board.close()

    def _write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, float):
                self._board.add_scalar(f"{event}/{name}", value, step)
            elif isinstance(value, Mapping):
                for part, number in value.items():
                    if isinstance(number, float):
                        self._board.add_scalar(f"{event}/{name}/{part}", number, step)
            elif isinstance(value, list):
                for number, part in enumerate(value, start=1):
                    self._board.add_scalar(f"{event}/{name}/round {number}", part, step)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run's log."""
    return [json.loads(line) for line in (folder / LOG_FILE).read_text(encoding="utf-8").splitlines()]


def training_seconds(log: Sequence[Mapping[str, Any]], batch: int) -> float:
    """Of the optimizer's steps, the first with its compiling; evaluations and checkpoints come on top."""
    seconds, before = 0.0, 0
    for line in log:
        if line["event"] == "train":
            seconds += (line["step"] - before) * batch / line["images_per_second"]
            before = line["step"]
    return seconds


def forget_after(log: Path, step: int, evaluated_step: int) -> None:
    """Drop what a run wrote after the checkpoint that it goes on from; a line cut short by a crash goes too.

    The evaluation of a checkpoint comes after it, so it may be one of those things.
    """
    if not log.exists():
        return
    kept = []
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            told = json.loads(line)
            if told["step"] <= (evaluated_step if told["event"] == "evaluation" else step):
                kept.append(line)
        except (ValueError, KeyError):
            continue
    replace_file(log, "".join(line + "\n" for line in kept))


def surroundings(device: torch.device, processes: int) -> dict[str, Any]:
    """What a result depends on beside the recipe."""
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
    }


def git_revision() -> str | None:
    """Of the code that runs, with a mark if it was changed since; None where it does not run from a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    revision = git("rev-parse", "HEAD")
    return f"{revision}, changed" if revision and git("status", "--porcelain", "--untracked-files=no") else revision
