"""The processes that torchrun started; without torchrun, a single process."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Processes:
    """This process and the others of the run."""

    rank: int
    count: int
    device: torch.device
    control: Any = None
    """A CPU process group, so that control messages do not wait for a GPU."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Processes:
        return self  # a process group cannot be copied

    @property
    def first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The average over processes, in place."""
        if self.count > 1:
            dist.all_reduce(values)
            values /= self.count
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        if self.count == 1:
            return flag
        value = torch.tensor(int(flag))
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.control)
        return bool(value.item())

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in order of rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.control)
        return values

    def wait(self) -> None:
        """Wait until every process has reached this call."""
        if self.count > 1:
            dist.barrier(group=self.control)


def choose_device(
    device: str | torch.device | None = None, kinds: Sequence[str] = ("cpu", "cuda", "mps")
) -> torch.device:
    """The requested device, which must be of one of these kinds; by default the GPU if there is one.

    An unknown device, or one that this machine does not have, is an error with the remedy.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        selected = torch.device(device)
    except RuntimeError:  # torch does not know the name
        selected = None
    if selected is None or selected.type not in kinds:
        raise ValueError(f"unknown device {str(device)!r}; use {', '.join(kinds[:-1])} or {kinds[-1]}.")
    remedy = "use device='cpu'"
    if selected.type == "cuda":
        if not torch.cuda.is_available():
            built = "" if torch.version.cuda else " (this torch is built without CUDA)"
            raise ValueError(f"there is no CUDA device here; {remedy}{built}.")
        count = torch.cuda.device_count()
        if (selected.index or 0) >= count:
            raise ValueError(f"there is no device {selected} here; there are {count}, the first is cuda:0.")
    if selected.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"there is no MPS device here, which Apple's GPUs are; {remedy}.")
    return selected


def start_processes(device: str | None = None) -> Processes:
    """Join the processes that torchrun started; ``device`` is cpu or cuda, by default cuda if available."""
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; use cpu or cuda (CUDA_VISIBLE_DEVICES chooses which).")
    kind = choose_device(device).type
    count = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    selected = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(selected)
    if count > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    control = dist.new_group(backend="gloo") if count > 1 else None
    return Processes(rank=rank, count=count, device=selected, control=control)


def set_threads(threads: int | None, *, workers: int, device: torch.device) -> int:
    """Set the number of torch's threads in this process, and return it.

    By default, on a CPU, worker processes and torch share the cores: torch has as many threads as cores are left, at
    least one. If ``OMP_NUM_THREADS`` is set, it decides.

    Args:
        threads: The number; None: the default.
        workers: Processes that decode images meanwhile, with one thread each.
        device: The device of the model.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    elif device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - workers))
    return torch.get_num_threads()


def end_processes() -> None:
    """Destroy the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def processor_name() -> str:
    """The name of the CPU, as far as the system reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
