"""A process that prepares images for :class:`progresvit.data.worker_pool.WorkerPool`. Imports no torch.

It reads tasks from a socket and writes the images into shared memory. It ends when the parent process ends.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from progresvit.data.prepare import Box, Plan, Request, prepare

Reply: TypeAlias = list[tuple[int, int, int, tuple[int, int], int, Box, str | None]]
"""The form of each image, its start and length in the segment, width and height, orientation, box and error."""


def serve_tasks() -> None:
    """Serve tasks until the parent closes the socket: ``python -m progresvit.data.worker SOCKET MEMORY SIZE``."""
    socket, memory, size = map(int, sys.argv[1:])
    shared = np.frombuffer(mmap.mmap(memory, size), np.uint8)
    with Connection(socket) as parent:
        try:
            plan: Plan = parent.recv()
            Image.MAX_IMAGE_PIXELS = plan.pillow_limit
            while True:
                start, length, room, requests = parent.recv()
                parent.send(prepare_into(shared[start : start + length], requests, plan, room))
        except (EOFError, ConnectionError):
            os._exit(0)  # the parent is gone


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


def crop_bytes(plan: Plan) -> int:
    """Size of a crop, which is enough memory for any image."""
    return plan.config.in_channels * plan.config.input_side**2


if __name__ == "__main__":
    serve_tasks()
