"""Time and memory of a cold ``progresvit classify`` of one image: torch, and an export in onnxruntime without torch.

    python benchmarks/cold_start.py
    python benchmarks/cold_start.py --model runs/first/model --export exported --runs 10 --out cold_start.json

Each run is a fresh process, from its start to its end. The first one is not counted: it reads the files from the disk
and may compile Python's bytecode. Values are medians: seconds on the clock, seconds of CPU (user and system), and the
peak of resident memory. A further run lists the packages whose modules take longest to import; each has the time of its
own modules only. The clock is right on an idle machine only, so the load is reported too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from progresvit.data.samples import samples_folder  # this process must not import torch: see ``run``

PROGRESVIT = (sys.executable, "-m", "progresvit")
BUSY = 0.5
_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Cost:
    """What one process cost."""

    seconds: float
    cpu_seconds: float
    peak_mib: float


@dataclass(frozen=True)
class Row:
    """Medians of a case, and the seconds of imports by package, slowest first."""

    case: str
    runs: int
    cost: Cost
    imports: dict[str, float]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=Path, default=samples_folder() / "tabby.jpg")
    parser.add_argument("--model", default="imagenet-tiny", help="a model with a calibrated setting")
    parser.add_argument("--export", type=Path, help="an export; by default the model is exported first")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--packages", type=int, default=6, help="number of slow imports to list")
    parser.add_argument("--out", type=Path, help="also write the rows as JSON")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"the machine is busy (load {load:.1f}): seconds on the clock are too long", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        exported = options.export
        if exported is None:
            exported = Path(scratch) / "export"
            run([*PROGRESVIT, "export", options.model, "--out", str(exported)])
        words = ["classify", str(options.image), "--model"]
        rows = [
            measure(case, [*words, str(model)], runs=options.runs)
            for case, model in (("torch", options.model), ("onnxruntime", exported))
        ]
    show(rows, options.packages)
    if options.out is not None:
        values = {**surroundings(), "load": load, "rows": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def measure(case: str, words: Sequence[str], *, runs: int) -> Row:
    """Medians of several runs of a command."""
    costs = [run([*PROGRESVIT, *words])[0] for _ in range(runs + 1)][1:]
    _, errors = run([sys.executable, "-X", "importtime", "-m", "progresvit", *words])
    cost = Cost(
        seconds=statistics.median(cost.seconds for cost in costs),
        cpu_seconds=statistics.median(cost.cpu_seconds for cost in costs),
        peak_mib=statistics.median(cost.peak_mib for cost in costs),
    )
    return Row(case, runs, cost, seconds_by_package(errors))


def run(command: Sequence[str]) -> tuple[Cost, str]:
    """Run a command to its end; returns its cost and what it wrote to stderr.

    Linux counts the memory of this process, from which the command is started, in the peak of the command. So this
    script stays smaller than what it measures.
    """
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{text}")
    unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes there, elsewhere in KiB
    return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / unit), text


def seconds_by_package(log: str) -> dict[str, float]:
    """Seconds of the modules of each package, slowest first, from the log of ``-X importtime``."""
    micros: Counter[str] = Counter()
    for own, name in _IMPORT.findall(log):
        micros[name.partition(".")[0]] += int(own)
    return {name: own / 1e6 for name, own in micros.most_common()}


def show(rows: Sequence[Row], packages: int) -> None:
    """Print a table."""
    table = Table(title="one image, a fresh process")
    for column in ("case", "seconds", "CPU seconds", "peak MiB", "slowest imports, seconds"):
        table.add_column(column, justify="left" if column.startswith(("case", "slowest")) else "right")
    for row in rows:
        slowest = ", ".join(f"{name} {own:.2f}" for name, own in list(row.imports.items())[:packages])
        cost = row.cost
        table.add_row(row.case, f"{cost.seconds:.2f}", f"{cost.cpu_seconds:.2f}", f"{cost.peak_mib:.0f}", slowest)
    Console(width=140).print(table)


def surroundings() -> dict[str, Any]:
    """What the figures depend on beside the code."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {name: metadata.version(name) for name in ("torch", "onnxruntime")}
    cpu = (names or [platform.machine()])[0]
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), **versions}


if __name__ == "__main__":
    main()
