"""Routing speed: the frontier of 1,000 thresholds, thresholds per round and the certificate from 50,000 records.

    python benchmarks/routing.py
    python benchmarks/routing.py --images 1000000 --thresholds 10000

Records are made up; times are medians of five runs on one core of the CPU. The aim is under a second for each.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from progresvit.cli.output import show_table
from progresvit.routing import (
    certified_threshold,
    certified_thresholds,
    fit_router,
    frontier,
    near_lossless,
    per_round_frontier,
)
from progresvit.table import Column, Table, decimals

GMACS = {2: [0.912, 6.267], 3: [0.188, 1.735, 7.097], 4: [0.335, 0.641, 0.947, 1.253]}


def made(images: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Entropies and hits of a model whose later rounds are surer and better: (N, S) each."""
    rng = np.random.default_rng(0)
    hard = rng.beta(0.6, 1.2, (images, 1))
    entropy = math.log(10) * np.clip(hard * np.linspace(1, 0.7, rounds) + rng.normal(0, 0.05, (images, rounds)), 0, 1)
    correct = rng.random((images, rounds)) > hard * np.linspace(0.5, 0.3, rounds)
    return entropy.astype(np.float32), correct


def median_seconds(work: Callable[[], object], runs: int = 5) -> float:
    """After one run to warm up."""
    work()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Time each and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--thresholds", type=int, default=1_000)
    parser.add_argument("--out", type=Path, help="also write the rows as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    two, three, four = (made(options.images, rounds) for rounds in GMACS)
    thresholds = np.linspace(0, math.log(10), options.thresholds)
    vectors = np.random.default_rng(1).uniform(0, math.log(10), (options.thresholds, 2))
    lost2, lost3 = (~correct & correct[:, -1:] for _, correct in (two, three))
    numbers = np.random.default_rng(2).normal(size=(options.images, 2, 23)).astype(np.float32)
    works: dict[str, Callable[[], object]] = {
        f"frontier, {options.thresholds:,} thresholds, 2 rounds": lambda: frontier(*two, GMACS[2], thresholds),
        f"frontier, {options.thresholds:,} thresholds, 3 rounds": lambda: frontier(*three, GMACS[3], thresholds),
        f"frontier, {options.thresholds:,} pairs of thresholds, 3 rounds": lambda: frontier(*three, GMACS[3], vectors),
        "best thresholds per round, 3 rounds": lambda: per_round_frontier(*three, GMACS[3]),
        "best thresholds per round, 4 rounds": lambda: per_round_frontier(*four, GMACS[4]),
        "near-lossless point, 2 rounds": lambda: near_lossless(*two, GMACS[2]),
        "certificate, 2 rounds": lambda: certified_threshold(two[0][:, 0], lost2[:, 0], 0.005, 0.05),
        "certificate, 3 rounds (path and walk)": lambda: certified_thresholds(three[0], lost3, GMACS[3], 0.005, 0.05),
        "fitting a learned router, 6 epochs, 2 rounds": lambda: fit_router(numbers, two[1]),
    }
    rows = [{"what": what, "seconds": median_seconds(work)} for what, work in works.items()]
    columns = (Column("what", "what"), Column("seconds", "seconds", decimals))
    show_table(Table(f"{options.images:,} records, one core", columns, rows))
    if options.out:
        options.out.write_text(json.dumps({"images": options.images, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
