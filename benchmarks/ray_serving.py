"""Ray Serve while replicas are killed: the share of requests that succeed, with retries.

    python benchmarks/ray_serving.py --model nettewoof-tiny --rate 4 --seconds 300 --every 30

It starts Ray on this machine with two replicas for each round, sends images at random times (a Poisson process), and
kills a replica with SIGKILL at equal intervals, of each round in turn. A client tries again after 0.5 s, at most three
times. It needs the extra ``ray``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from serving import arrivals, find_uploads, percentiles

from progresvit.engine.measurement import hardware
from progresvit.io.files import replace_file
from progresvit.serving.ray_serve import Options, application

RETRIES, PAUSE_S, TIMEOUT_S = 3, 0.5, 30.0
CPUS = 64
"""Number of CPUs given to Ray; replicas share the real ones."""


def replicas(s: int) -> list[int]:
    """Processes of the replicas of round s, from 1, as Ray names them."""
    title, pids = f"ray::ServeReplica:default:Round{s}".encode(), []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(title):
                pids.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return pids


async def ask(client: httpx.AsyncClient, upload: tuple[bytes, dict[str, str]]) -> dict[str, Any]:
    """Send an image, and again if that fails."""
    start, answers = time.perf_counter(), list[str]()
    for attempt in range(RETRIES + 1):
        await asyncio.sleep(PAUSE_S if attempt else 0)
        try:
            response = await client.post("/classify", content=upload[0], headers=upload[1])
            answers.append(str(response.status_code))
        except httpx.HTTPError as error:
            answers.append(type(error).__name__)
        if answers[-1] == "200":
            break
    return {"answers": answers, "seconds": time.perf_counter() - start}


async def kill(every: float, rounds: int, end: float) -> list[int]:
    """Kill a replica of each round in turn; the rounds of those that were killed."""
    killed: list[int] = []
    for s in itertools.cycle(range(1, rounds + 1)):
        if time.perf_counter() + every >= end:
            break
        await asyncio.sleep(every)
        for pid in replicas(s)[:1]:  # none, if all are starting again
            os.kill(pid, signal.SIGKILL)
            killed.append(s)
            print(f"killed a replica of round {s}", flush=True)
    return killed


async def load(options: argparse.Namespace, address: str, rounds: int) -> dict[str, Any]:
    """Requests at random times while replicas are killed."""
    uploads, start, tasks = find_uploads(options.images), time.perf_counter(), []
    async with httpx.AsyncClient(base_url=address, timeout=TIMEOUT_S, trust_env=False) as client:
        killing = asyncio.create_task(kill(options.every, rounds, start + options.seconds))
        for number, moment in enumerate(arrivals(options.rate, options.seconds, options.most, seed=0)):
            await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(client, uploads[number % len(uploads)])))
        replies = await asyncio.gather(*tasks)
        killed = await killing
    good = [reply for reply in replies if reply["answers"][-1] == "200"]
    return {
        "requests": len(replies),
        "killed_rounds": killed,
        "success_percent": 100 * len(good) / max(1, len(replies)),
        "retried": sum(len(reply["answers"]) > 1 for reply in replies),
        "answers": dict(Counter(answer for reply in replies for answer in reply["answers"])),
        **percentiles([reply["seconds"] for reply in good]),
    }


def main() -> int:
    """Measure, print and write; 1 if fewer than 99 % succeed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nettewoof-tiny")
    parser.add_argument("--replicas", default="2", help="of each round, such as 2,4")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=300.0, help="duration of the arrivals")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two kills")
    parser.add_argument("--most", type=int, default=100_000, help="maximum number of requests")
    parser.add_argument("--images", type=Path, help="folder; the sample images of the package by default")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    made = application(Options(model=options.model, replicas=options.replicas, threads=1, cpus=1))
    ray.init(num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": 8000})
    serve.run(made)
    try:
        rounds = sum(bool(replicas(s)) for s in range(1, 10))
        result = asyncio.run(load(options, "http://127.0.0.1:8000", rounds))
    finally:
        serve.shutdown()
        ray.shutdown()
    report = {
        "command": f"python benchmarks/ray_serving.py {' '.join(sys.argv[1:])}",
        "ray": ray.__version__,
        "hardware": hardware("cpu"),
        **result,
    }
    print(json.dumps(report, indent=2))
    if options.out:
        replace_file(options.out, json.dumps(report, indent=2) + "\n")
    return int(result["success_percent"] < 99)


if __name__ == "__main__":
    sys.exit(main())
