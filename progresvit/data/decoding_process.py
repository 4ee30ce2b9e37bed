"""A process that prepares images: started by a parent, it reads tasks from a socket and fills shared memory.

It needs no ``if __name__ == "__main__"`` in the user's script, imports no torch, and ends when the parent ends in any
way. The system may limit what it uses, for images from strangers (isolated.py).
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import progresvit
from progresvit.data.crop import Box
from progresvit.data.prepare import Form, Plan, Prepared, Request, prepare

IS_SUPPORTED = os.name == "posix"
if IS_SUPPORTED:
    import resource

Process: TypeAlias = subprocess.Popen[bytes]
Reply: TypeAlias = list[tuple[int, int, int, tuple[int, int], int, Box, str | None]]
"""The form of each image, its start and length in the segment, width and height, orientation, box and error."""


def cause(code: int) -> str:
    """The meaning of an exit status."""
    if code == -signal.SIGKILL:
        return "the system (out of memory?)"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def shared_file(size: int) -> int:
    """A file of this size in memory, without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("progresvit")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


@dataclass(frozen=True)
class ProcessLimits:
    """What a process may use; the system enforces it."""

    seconds: float
    """CPU time of a task. A process that exceeds it is ended by the signal SIGPROF."""
    memory: int
    """Bytes that it may allocate after its start; allocating more fails."""
    nice: int = 0
    """By how much it gives way to other processes."""


def start_process(memory: int, size: int, limits: ProcessLimits | None = None) -> tuple[Process, Connection]:
    """Start a process that serves tasks, and connect to it.

    Args:
        memory, size: The file with the shared memory, and its size.
        limits: What it may use; None for no limits.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        handed = (theirs.fileno(), memory)
        home = str(Path(progresvit.__file__).parents[1])
        paths = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "progresvit.data.decoding_process", *map(str, handed), str(size)],
            pass_fds=handed,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},  # the threads would be idle
            process_group=0,  # Ctrl-C reaches every process of a terminal's group; the parent ends the workers
        )
    connection = Connection(ours.detach())
    connection.send(limits)
    return process, connection


def serve_tasks() -> None:
    """Serve tasks until the parent closes the socket.

    ``python -m progresvit.data.decoding_process SOCKET MEMORY SIZE``, with the descriptors that the parent handed over.
    """
    handed_socket, memory, size = map(int, sys.argv[1:])
    shared = np.frombuffer(mmap.mmap(memory, size), np.uint8)
    _silence_libraries()
    with Connection(handed_socket) as parent:
        try:
            limits: ProcessLimits | None = parent.recv()
            if limits is not None:
                _limit_process(limits)
            while True:
                plan, start, length, room, requests = parent.recv()
                Image.MAX_IMAGE_PIXELS = plan.pillow_limit
                _limit_task(limits)
                reply = prepare_into(shared[start : start + length], requests, plan, room)
                _limit_task(None)
                parent.send(reply)
        except (EOFError, ConnectionError):
            os._exit(0)  # the parent is gone


def _silence_libraries() -> None:
    """Only Python's own errors are printed: libtiff writes what a file contains to the terminal."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    warnings.simplefilter("ignore")


def _limit_process(limits: ProcessLimits) -> None:
    Image.init()  # importing its modules is not a part of the first task
    os.nice(limits.nice)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wanted, (_, hard) = _allocated() + limits.memory, resource.getrlimit(resource.RLIMIT_DATA)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent may ignore or block it, and a child inherits that
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})


def _allocated() -> int:
    """Bytes of private memory that the system has promised to this process."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:  # not Linux
        return 0
    return 1024 * int(status.partition("VmData:")[2].split()[0])


def _limit_task(limits: ProcessLimits | None) -> None:
    if IS_SUPPORTED:
        signal.setitimer(signal.ITIMER_PROF, 0.0 if limits is None else limits.seconds)


def as_prepared(reply: Reply, segment: NDArray[np.uint8]) -> list[Prepared]:
    """The images of a reply, whose data lie in this segment."""
    return [
        Prepared(Form(form), segment[start : start + length] if length else None, size, orientation, box, error)
        for form, start, length, size, orientation, box, error in reply
    ]


def prepare_into(segment: NDArray[np.uint8], requests: Sequence[Request], plan: Plan, room: int) -> Reply:
    """Prepare images one after another in the segment, each of at most ``room`` bytes."""
    reply: Reply = []
    start = 0
    for request in requests:
        image = prepare(request, plan, room)
        length = 0
        if image.data is not None:
            length = image.data.size
            segment[start : start + length].reshape(image.data.shape)[...] = image.data
        reply.append((int(image.form), start, length, image.size, image.orientation, image.box, image.error))
        start += length
    return reply


if __name__ == "__main__":
    serve_tasks()
