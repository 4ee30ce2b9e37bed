"""The only training loop: from a recipe and data to a model folder. A run can be killed and resumed."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import cast

import torch
from torch import nn

from progresvit.data.dataset import describe_others
from progresvit.data.sampler import Draw, seed_all
from progresvit.data.trained_on import save_splits, save_training_list
from progresvit.distributed import Processes
from progresvit.io.lock import FolderLock
from progresvit.io.parse import count_of, printable
from progresvit.model.interface import RoundModel
from progresvit.model.precision import matrix_products
from progresvit.routing.settings import default_setting
from progresvit.training.build import build_model, start_model
from progresvit.training.check_run import check_run_options
from progresvit.training.handover import hand_over
from progresvit.training.logger import RunLogger, start_wandb
from progresvit.training.optim import Schedules, base_rate, warmup_epochs
from progresvit.training.recipe import Recipe
from progresvit.training.run_folder import check_folder, claim_folder, remove_leftovers, run_config, using_folder
from progresvit.training.state import TrainState, checkpoints, load_state, prune, save_model, save_state
from progresvit.training.step import TrainingStep
from progresvit.training.tasks.registry import make_task
from progresvit.training.tasks.task import Splits, Task, TaskData


class Interrupted(Exception):  # noqa: N818  (not an error)
    """The user or the system stopped the run; it is saved."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def train(
    recipe: Recipe,
    *,
    data: str,
    out: Path,
    processes: Processes,
    resume: bool = False,
    overwrite: bool = False,
    task: Task | type[Task] | None = None,
) -> Path:
    """Run a recipe to its end. Returns the folder of the model: ``best`` if the run stopped early, else ``model``.

    Args:
        recipe: What to train and how.
        data: The images: a folder, tars, or a dataset that timm reads.
        out: The folder of the run.
        processes: The processes of the run.
        resume: Continue the run in the folder from its newest checkpoint.
        overwrite: Remove the run in the folder first.
        task: A task, or its class, to use instead of the recipe's.
    """
    seed_all(Draw.START, recipe.seed)
    recipe, method = make_task(recipe, task)
    recipe = check_folder(out, recipe, resume=resume, overwrite=overwrite)
    check_run_options(recipe, method, processes, resumes=resume and bool(checkpoints(out / "checkpoints")))
    with matrix_products(recipe.run.precision), using_folder(out, first=processes.first) as lock:
        return _train_in(out, recipe, method, data, processes, lock, resume=resume, overwrite=overwrite)


def _train_in(
    out: Path,
    recipe: Recipe,
    method: Task,
    data: str,
    processes: Processes,
    lock: FolderLock,
    *,
    resume: bool,
    overwrite: bool,
) -> Path:
    splits = method.find_splits(recipe, data)
    resumes = resume and bool(checkpoints(out / "checkpoints"))
    start = run_config(out) if resumes and recipe.model.is_of_start else None
    model = build_model(recipe, method.class_ids(splits), start, task=method.model_task)
    started = None if resumes else start_model(model, recipe)
    cast(nn.Module, model).to(processes.device)
    method.setup(model, splits, recipe, processes)
    loaded = method.load_data(model, splits, recipe, processes)
    sampler = loaded.train.sampler
    step = TrainingStep(model, method, recipe, processes, steps_per_epoch=sampler.steps_per_epoch)
    if processes.first:
        lock.acquire()
        if lock.is_held:
            remove_leftovers(out)
    claim_folder(out, recipe, data, splits, model.config, processes, resume=resume, overwrite=overwrite)
    state = resume_state(out / "checkpoints", step) if resume else TrainState()
    project = recipe.run.wandb if processes.first else None
    logger = RunLogger(
        out if processes.first else None,
        total_steps=recipe.epochs * sampler.steps_per_epoch,
        first_step=state.step,
        evaluated_step=state.history[-1]["step"] if state.history else 0,
        tracker=None if project is None else start_wandb(project, out, recipe.model_dump(mode="json")),
    )
    logger.say(method.describe(splits))
    if splits.others:
        logger.say(describe_others(splits.others))
    if started:
        logger.say(started)
    schedule, warmup = recipe.schedule, warmup_epochs(recipe.schedule)
    if warmup < schedule.warmup:
        logger.say(
            f"schedule.warmup: using {count_of(warmup, 'epoch')}, not {schedule.warmup}, because there are only "
            f"{schedule.epochs}"
        )
    complete = False
    try:
        with stop_signals() as stop:
            loop = Loop(recipe, out, processes, step, loaded, state, logger, stop, splits, data)
            loop.run()
        complete = True
        return loop.model_to_use
    finally:
        logger.close(failed=not complete)


def resume_state(folder: Path, step: TrainingStep) -> TrainState:
    """Restore the newest complete checkpoint; a run without checkpoints starts again."""
    paths, reason = checkpoints(folder), ""
    for path in reversed(paths):
        try:
            state, scaler = load_state(path, trained=step.trained, average=step.ema.module, optimizer=step.optimizer)
        except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
            reason = reason or f"the newest: {error}"
            print(printable(f"{path} is damaged and skipped: {error}"), file=sys.stderr)
            continue
        step.scaler.load_state_dict(scaler)
        if state.loss_sums:
            step.sums = torch.tensor(state.loss_sums, device=step.sums.device)
        step.steps_done += state.step - state.logged_step
        return state
    if paths:
        raise ValueError(
            f"none of the {len(paths)} checkpoints in {folder} can be read ({reason}); "
            "pass overwrite=True to start again."
        )
    return TrainState()


@dataclass
class Loop:
    """A run, from its current step to its end."""

    recipe: Recipe
    out: Path
    """The folder of the run."""
    processes: Processes
    step: TrainingStep
    data: TaskData
    state: TrainState
    """The position of the run."""
    logger: RunLogger
    stop: list[int]
    """Signals received so far, filled by :func:`stop_signals`."""
    splits: Splits
    """The images, which certificates of the model need to know."""
    source: str
    """Where the images come from, as the user gave it."""

    def __post_init__(self) -> None:
        self.sampler = self.data.train.sampler
        self.schedules = Schedules(self.step.optimizer, self.recipe, self.sampler.steps_per_epoch)
        self.clock, self.logged, self.timed_from = time.monotonic(), self.state.logged_step, self.state.step
        self.saved = time.monotonic()

    def run(self) -> None:
        """Train the remaining steps, then save the model."""
        per_epoch, total = self.sampler.steps_per_epoch, self.recipe.epochs * self.sampler.steps_per_epoch
        if self.state.step and self.state.step % per_epoch == 0:
            self._evaluate_if_due(self.state.step // per_epoch - 1)  # the run may have stopped before this evaluation
        for batches in () if self._stops_early() else self.data.train.steps(self.state.step, total):
            self.schedules.set(self.state.step)
            self.step(self.state.step, batches)
            self.state.step += 1
            done, epoch = self.state.step, (self.state.step - 1) // per_epoch
            if done % self.recipe.run.log_every == 0 or done % per_epoch == 0:
                self._log(epoch)
            if done % per_epoch == 0:
                if (epoch + 1) % self.recipe.run.save_every == 0 or epoch == self.recipe.epochs - 1:
                    self._save()  # before the evaluation, which takes time
                self._evaluate_if_due(epoch)
                self.clock = time.monotonic()
                if self._stops_early():
                    break
            elif done % self.recipe.run.log_every == 0:
                due = time.monotonic() - self.saved > self.recipe.run.save_minutes * 60
                if self.processes.any(self.processes.first and due):  # by the clock of the first process
                    self._save()
            if self.processes.any(bool(self.stop)):
                self._save()
                raise Interrupted(
                    f"stopped after step {self.state.step}; everything is saved in {self.out}. "
                    "Continue with the same command and resume=True.",
                    self.stop[0] if self.stop else signal.SIGTERM,
                )
        self._finish()

    def _log(self, epoch: int) -> None:
        """Fetch the losses: the only point where the host waits for the device. Stop if one was not finite."""
        self._stop_if_broken()
        now = time.monotonic()
        values = self.step.task.monitor()
        warning = self.step.task.warning(values, step=self.state.step, steps_per_epoch=self.sampler.steps_per_epoch)
        if warning is not None:
            self.logger.say(f"warning: {warning}")
        self.logger.steps(
            epoch=epoch,
            step=self.state.step,
            values=values,
            losses=(self.step.sums / (self.state.step - self.logged)).tolist(),
            lr=base_rate(self.step.optimizer),
            speed=(self.state.step - self.timed_from) * self.sampler.batch / (now - self.clock),  # images per second
            batch=self.sampler.batch,
        )
        self.state.seconds += now - self.clock
        self.step.sums.zero_()
        self.step.steps_done.zero_()
        self.clock, self.logged, self.timed_from = now, self.state.step, self.state.step

    def _stop_if_broken(self) -> None:
        """End the run if a loss was not finite. The step changed no weights, and no later step is saved."""
        if not self.step.broken.item():
            return
        number = self.logged + int(self.step.steps_done.item()) + 1
        lr = base_rate(self.step.optimizer)
        raise ValueError(
            f"the loss or its gradient was not finite at step {number} (learning rate {lr:.2e}); this step changed no "
            f"weights. Continue from the last checkpoint: resume=True with a lower rate, "
            f"optimizer.lr={self.recipe.optimizer.lr / 2:g}, or with run.precision=fp32."
        )

    def _evaluate_if_due(self, epoch: int) -> None:
        """Evaluate the average at the end of an epoch, and keep it if it is the best so far."""
        last, history = epoch == self.recipe.epochs - 1, self.state.history
        done = bool(history) and history[-1]["step"] == self.state.step
        if done or not ((epoch + 1) % self.recipe.run.evaluate_every == 0 or last):
            return
        model, task = self.step.average()
        metrics = task.validate(model, self.data, processes=self.processes, dtype=self.step.dtype)
        summary = task.summarize(metrics.values)
        self.logger.evaluation(epoch=epoch, step=self.state.step, values=metrics.values, summary=summary)
        history.append({"epoch": epoch, "step": self.state.step, **metrics.values})
        if metrics.primary > (-math.inf if self.state.best is None else self.state.best):
            self.state.best, self.state.best_step = metrics.primary, self.state.step
            if self.processes.first:
                save_model(model, task, self.out / "best")
                self._save_splits(self.out / "best")
                self._hand_over(self.out / "best", model, task)
        self._list_unreadable()

    def _save_splits(self, folder: Path) -> None:
        training, validation = ([entry.name for entry in split.entries] for split in self.splits)
        evaluations = max(len(self.state.history), math.ceil(self.recipe.epochs / self.recipe.run.evaluate_every))
        is_chosen = folder.name == "best" or self.recipe.run.patience is not None
        save_splits(folder, training=training, validation=validation, evaluations=evaluations if is_chosen else None)
        if self.splits.train.drawn_from is not None:
            save_training_list(folder, training)

    def _hand_over(self, folder: Path, model: RoundModel, task: Task) -> None:
        """The default setting and the card of the model that was validated last."""
        recipe, values = self.recipe, self.state.history[-1]
        data = f"{self.source} ({recipe.data.val})"
        hand_over(folder, model, task, values, data=data, precision=recipe.run.precision)

    def _stops_early(self) -> bool:
        """Whether the last ``run.patience`` evaluations were not better. Checkpoints contain all evaluations."""
        patience = self.recipe.run.patience
        later = [evaluation for evaluation in self.state.history if evaluation["step"] > self.state.best_step]
        return patience is not None and len(later) >= patience

    @property
    def model_to_use(self) -> Path:
        """The best model of a run that stopped early, else the last one."""
        return self.out / ("best" if self._stops_early() else "model")

    def _save(self) -> None:
        self._stop_if_broken()
        self.saved = time.monotonic()
        self.state.logged_step, self.state.loss_sums = self.logged, self.step.sums.tolist()
        if self.processes.first:
            folder = self.out / "checkpoints"
            save_state(
                folder,
                trained=self.step.trained,
                average=self.step.ema.module,
                optimizer=self.step.optimizer,
                scaler=self.step.scaler.state_dict(),
                state=self.state,
            )
            prune(folder, keep=self.recipe.run.keep)
        self.processes.wait()

    def _list_unreadable(self) -> None:
        mine = [line for unreadable in self.data.unreadable for line in unreadable.lines()]
        lines = sorted({line for share in self.processes.gather(mine) for line in share})
        if lines and self.processes.first:
            path = self.out / "unreadable.txt"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
            self.logger.say(f"unreadable and skipped: {'; '.join(lines[:3])}{more} ({path} lists them)")

    def _finish(self) -> None:
        if self.processes.first:
            model, task = self.step.average()
            save_model(model, task, self.out / "model")
            for kept in (self.out / "model", self.out / "best"):
                if kept.is_dir():
                    self._save_splits(kept)
            if self.state.history:
                self._hand_over(self.out / "model", model, task)
            self.logger.end_bar()
            summary = f" ({task.summarize(self.state.history[-1])})" if self.state.history else ""
            self.logger.say(f"the model is in {self.out / 'model'}{summary}")
            early = self._stops_early()
            if early:
                self.logger.say(
                    f"stopped early: no better evaluation since step {self.state.best_step}; that model is in "
                    f"{self.out / 'best'}"
                )
            folder = self.model_to_use
            if (setting := default_setting(folder)) is not None:
                limits = setting.threshold if isinstance(setting.threshold, tuple) else (setting.threshold,)
                shown = ", ".join(f"{limit:.4f}" for limit in limits)
                self.logger.say(
                    f"its default threshold is {shown}, {setting.evidence}; progresvit calibrate makes others"
                )
            options = f", with {task.evaluate_options}" if task.evaluate_options else ""
            self.logger.say(f"next: progresvit evaluate {folder}{options}")
        self.processes.wait()


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and Ctrl-C, so that the current step ends and is saved. A second signal stops at once."""
    caught: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
