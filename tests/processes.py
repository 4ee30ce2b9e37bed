"""Commands in two processes under torchrun. They start once, which takes seconds, and run several commands in turn."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parent.parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run_together(*commands, constants=None):
    """Run commands, given by their arguments, up to the first that fails. Returns the finished torchrun.

    ``constants`` sets values of modules in both processes, such as {"progresvit.evaluation.parts.CHUNK": 7}.
    """
    words = json.dumps([[str(argument) for argument in command] for command in commands])
    return subprocess.run(
        [*TORCHRUN, "-m", "tests.processes", words, json.dumps(constants or {})],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def run_commands(commands, constants):
    """Run the commands in this process: one of two under torchrun, or the only one, which runs one command."""
    from progresvit.cli import app

    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)
    for number, arguments in enumerate(commands):
        if number:  # the first joins by itself; its keys remain in the store, so the others need keys of their own
            rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            keys = dist.PrefixStore(f"command {number}", store)
            dist.init_process_group("gloo", store=keys, rank=rank, world_size=count)
        try:
            app(arguments)
        except SystemExit as end:
            if end.code:
                raise
        assert not dist.is_initialized()  # a command ends what it began


if __name__ == "__main__":
    run_commands(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
