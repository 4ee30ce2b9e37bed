"""The only loop: a recipe, data and a folder in, a model folder out. It can be killed at any moment and goes on."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from progresvit import checkpoint
from progresvit.data.sampler import Draw, seed_all
from progresvit.data.split import save_training_list
from progresvit.distributed import Processes
from progresvit.training.build import Fed, build_model, build_objective, data_rows, describe_splits, feed, find_splits
from progresvit.training.folder import check_folder, claim_folder
from progresvit.training.journal import Journal
from progresvit.training.recipe import Recipe
from progresvit.training.state import Progress, checkpoints, load_state, prune, save_state
from progresvit.training.step import TrainingStep
from progresvit.training.validation import validate


class Interrupted(Exception):  # noqa: N818  (nothing went wrong)
    """The user or the system asked to stop; the run is saved."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def train(
    recipe: Recipe, *, data: str, out: Path, processes: Processes, resume: bool = False, overwrite: bool = False
) -> Path:
    """Run a recipe to its end, or on to its end; returns the model folder."""
    check_folder(out, recipe, resume=resume, overwrite=overwrite)
    seed_all(Draw.START, recipe.seed)
    pictures, held_out = find_splits(recipe, data)
    model = build_model(recipe, pictures).to(processes.device)
    rows = data_rows(recipe, model, pictures)
    step = TrainingStep(model, build_objective(recipe, model, processes, rows), recipe, processes, rows)
    fed = feed(recipe, pictures, held_out, model, processes)
    claim_folder(out, recipe, data, (pictures, held_out), processes, resume=resume, overwrite=overwrite)
    progress = go_on(out / "checkpoints", step) if resume else Progress()
    order = fed.train.sampler
    journal = Journal(
        out if processes.first else None,
        total_steps=recipe.epochs * order.steps_per_epoch,
        first_step=progress.step,
        evaluated_step=progress.history[-1]["step"] if progress.history else 0,
    )
    journal.say(describe_splits(pictures, held_out))
    try:
        with stop_signals() as stop:
            Run(recipe, out, processes, step, fed, progress, journal, stop).go()
    finally:
        journal.close()
    if processes.first and pictures.drawn_from is not None:
        for folder in (out / "model", out / "best"):
            save_training_list(folder, (entry.name for entry in pictures.entries))
    return out / "model"


def go_on(folder: Path, step: TrainingStep) -> Progress:
    """Put back the newest checkpoint that is whole; from the start if there is none at all."""
    found = checkpoints(folder)
    for path in reversed(found):
        try:
            progress, scaler = load_state(path, model=step.model, ema=step.ema.module, optimizer=step.optimizer)
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            print(f"{path} is damaged and passed over: {error}", file=sys.stderr)
            continue
        step.scaler.load_state_dict(scaler)
        if progress.loss_sums:
            step.sums.copy_(torch.tensor(progress.loss_sums))
        step.steps_done += progress.step - progress.logged_step
        return progress
    if found:
        raise ValueError(f"none of the {len(found)} checkpoints in {folder} can be read; start anew with --overwrite.")
    return Progress()


class Run:
    """A run from where it stands to its end."""

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        processes: Processes,
        step: TrainingStep,
        fed: Fed,
        progress: Progress,
        journal: Journal,
        stop: list[int],
    ) -> None:
        self.recipe, self.out, self.processes, self.step, self.fed = recipe, out, processes, step, fed
        self.progress, self.journal, self.stop = progress, journal, stop
        self.order = fed.train.sampler
        self.clock, self.seen, self.timed_from = time.monotonic(), progress.logged_step, progress.step
        self.saved = time.monotonic()

    def go(self) -> None:
        """All steps that are left, then the model."""
        per_epoch, total = self.order.steps_per_epoch, self.recipe.epochs * self.order.steps_per_epoch
        self.step.schedule.step(self.progress.step // per_epoch)
        if self.progress.step and self.progress.step % per_epoch == 0:
            self._evaluate_if_due(self.progress.step // per_epoch - 1)  # it may have died between saving and evaluating
        for batches in self.fed.train.steps(self.progress.step, total):
            self.step(self.progress.step, batches)
            self.progress.step += 1
            done, epoch = self.progress.step, (self.progress.step - 1) // per_epoch
            if done % self.recipe.run.log_every == 0 or done % per_epoch == 0:
                self._log(epoch)
            if done % per_epoch == 0:
                self._end_epoch(epoch)
            elif done % self.recipe.run.log_every == 0 and self._save_is_late():
                self._save()
            if self.processes.any(bool(self.stop)):
                self._interrupted()
        self._finish()

    def _log(self, epoch: int) -> None:
        """Fetch the losses, the only point at which the host waits for the device; stop if one was not finite."""
        self._stop_if_broken()
        lr = self.step.optimizer.param_groups[0]["lr"]
        steps = self.progress.step - self.seen
        now = time.monotonic()
        losses = (self.step.sums / steps).tolist()
        self.journal.steps(
            epoch=epoch,
            step=self.progress.step,
            losses=losses,
            lr=lr,
            speed=self._speed(now),
        )
        self.progress.seconds += now - self.clock
        self.step.sums.zero_()
        self.step.steps_done.zero_()
        self.clock, self.seen, self.timed_from = now, self.progress.step, self.progress.step

    def _speed(self, now: float) -> float:
        """Images a second since the last word, or since the run went on."""
        return (self.progress.step - self.timed_from) * self.order.batch / (now - self.clock)

    def _save_is_late(self) -> bool:
        """The first process has the clock."""
        late = self.processes.first and time.monotonic() - self.saved > self.recipe.run.save_minutes * 60
        return self.processes.any(late)

    def _stop_if_broken(self) -> None:
        """A loss that was not finite ends the run; nothing of it was applied, and nothing after it is saved."""
        if not self.step.broken.item():
            return
        number = self.seen + int(self.step.steps_done.item()) + 1
        lr = self.step.optimizer.param_groups[0]["lr"]
        raise ValueError(
            f"the loss or its gradient was not finite at step {number} (learning rate {lr:.2e}); the weights were left "
            f"as they were before it. Go on from the last checkpoint with a lower rate: --resume --set "
            f"optimizer.lr={self.recipe.optimizer.lr / 2:g}, or with run.precision=fp32."
        )

    def _end_epoch(self, epoch: int) -> None:
        last = epoch == self.recipe.epochs - 1
        self.step.schedule.step(epoch + 1)
        if (epoch + 1) % self.recipe.run.save_every == 0 or last:
            self._save()  # ahead of evaluating, which takes its time
        self._evaluate_if_due(epoch)
        self.clock = time.monotonic()

    def _evaluate_if_due(self, epoch: int) -> None:
        last, history = epoch == self.recipe.epochs - 1, self.progress.history
        done = bool(history) and history[-1]["step"] == self.progress.step
        if not done and ((epoch + 1) % self.recipe.run.evaluate_every == 0 or last):
            self._evaluate(epoch)

    def _evaluate(self, epoch: int) -> None:
        answering = self.step.answering()
        result = validate(answering, self.fed.val(), processes=self.processes, dtype=self.step.dtype)
        self.journal.evaluation(epoch=epoch, step=self.progress.step, result=result)
        self.progress.history.append({"epoch": epoch, "step": self.progress.step, **result})
        if result["top1"][-1] > self.progress.best_top1:
            self.progress.best_top1, self.progress.best_step = result["top1"][-1], self.progress.step
            if self.processes.first:
                checkpoint.save(answering, self.out / "best")
        self._list_unreadable()

    def _save(self) -> None:
        self._stop_if_broken()
        self.saved = time.monotonic()
        self.progress.logged_step, self.progress.loss_sums = self.seen, self.step.sums.tolist()
        if self.processes.first:
            folder = self.out / "checkpoints"
            save_state(
                folder,
                model=self.step.model,
                ema=self.step.ema.module,
                optimizer=self.step.optimizer,
                scaler=self.step.scaler.state_dict(),
                progress=self.progress,
            )
            prune(folder, keep=self.recipe.run.keep)
        self.processes.wait()

    def _list_unreadable(self) -> None:
        mine = [line for unreadable in self.fed.unreadable for line in unreadable.lines()]
        lines = sorted({line for share in self.processes.gather(mine) for line in share})
        if lines and self.processes.first:
            (self.out / "unreadable.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
            self.journal.say(f"{len(lines)} unreadable pictures were skipped; {self.out / 'unreadable.txt'} lists them")

    def _interrupted(self) -> None:
        self._save()
        raise Interrupted(
            f"stopped after step {self.progress.step}; everything is saved in {self.out}. "
            f"Go on with the same command and --resume.",
            self.stop[0] if self.stop else signal.SIGTERM,
        )

    def _finish(self) -> None:
        if self.processes.first:
            checkpoint.save(self.step.answering(), self.out / "model")
            self.journal.end_bar()
            result = self.progress.history[-1] if self.progress.history else {}
            rounds = ", ".join(f"{top1:.2%}" for top1 in result.get("top1", []))
            self.journal.say(f"the model is in {self.out / 'model'} (top-1 of the rounds: {rounds})")
            self.journal.say(f"look at it with: progresvit info {self.out / 'model'}")
        self.processes.wait()


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and Ctrl-C instead of dying of them, so that a step ends and is saved."""
    caught: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt  # asked twice: now
        caught.append(number)

    before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
