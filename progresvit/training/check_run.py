"""What a recipe needs and this machine lacks, found before the data is opened: each problem with the key to set."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

import torch

from progresvit.distributed import Processes
from progresvit.interop.start import check_start
from progresvit.model.precision import has_tf32
from progresvit.training.logger import import_wandb
from progresvit.training.recipe import Recipe
from progresvit.training.tasks.task import Task


def check_run_options(recipe: Recipe, task: Task, processes: Processes, *, resumes: bool = False) -> None:
    """Refuse what cannot run on this device, with this task or together, with all problems in one error.

    Args:
        recipe: The recipe of the run.
        task: Its task.
        processes: The processes of the run.
        resumes: The run continues from a checkpoint, so it does not read the weights that it started from.
    """
    with torch.random.fork_rng(devices=[]):  # loading a model draws random numbers, and a run begins with its seed's
        problems = [*_run_problems(recipe, task, processes), *([] if resumes else _start_problems(recipe, task))]
        problems += task.problems()
    if problems:
        raise ValueError(" ".join(problems))


def _run_problems(recipe: Recipe, task: Task, processes: Processes) -> Iterator[str]:
    """Problems of the sections ``run`` and ``data``."""
    run, on_gpu = recipe.run, processes.device.type == "cuda"
    if run.wandb is not None:
        try:
            import_wandb()
        except ValueError as error:
            yield f"{error}, or set run.wandb=null."
    if run.precision == "fp16" and not on_gpu:
        yield "fp16 needs a CUDA device; set run.precision=bf16 or fp32."
    if run.precision == "tf32" and not has_tf32(processes.device):
        yield "tf32 needs an NVIDIA GPU of compute capability 8.0 (A100) or newer; set run.precision=fp32."
    if run.precision == "bf16" and on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        yield f"{torch.cuda.get_device_name()} has no bf16; set run.precision=fp16."
    if run.compile and processes.device.type == "cpu" and (compiler := _missing_compiler()):
        yield f"run.compile needs a C++ compiler on a CPU, and there is no {compiler}; set run.compile=false."
    if recipe.data.decode == "gpu" and not on_gpu:
        yield f"data.decode asks for a GPU, and the run is on {processes.device.type}; set data.decode=cpu."
    if not run.cuda_graphs:
        return
    if not on_gpu:
        yield "run.cuda_graphs needs a GPU; set run.cuda_graphs=false."
    elif processes.count > 1 or recipe.optimizer.accumulate > 1 or run.grad_checkpointing:
        yield (
            "run.cuda_graphs works on one GPU with optimizer.accumulate=1 and run.grad_checkpointing=false; set "
            "run.cuda_graphs=false."
        )
    elif not task.static_graph:
        yield (
            f"run.cuda_graphs replays the same rounds in every step, but the task {recipe.task} draws other rounds "
            "each time; set run.cuda_graphs=false."
        )


def _missing_compiler() -> str | None:
    """The compiler that torch.compile calls on a CPU, if it is missing."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return None if shutil.which(compiler) else compiler


def _start_problems(recipe: Recipe, task: Task) -> Iterator[str]:
    """Why the weights that the run starts from cannot be read."""
    model = recipe.model
    if model.start is None:
        return
    try:
        check_start(model.start)
    except ValueError as error:
        if task.needs_start or model.is_of_start or model.fields.get("frozen", model.kind == "early_exit"):
            yield str(error)
        else:
            quiet = " and model.start_fusion=paper" if model.start_fusion == "quiet" else ""
            remedy = f"Set model.start to another start, or set model.start=null{quiet} to begin with random weights."
            yield f"{error} {remedy}"
