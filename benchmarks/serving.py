"""Load test of ``progresvit serve``: capacity, latency under load, overload, drain, memory, aborts, latency by exit.

    python benchmarks/serving.py capacity --model imagenet-tiny          # callers that wait for answers, more and more
    python benchmarks/serving.py load --share 0.8 --seconds 60           # or --rate 50: Poisson arrivals
    python benchmarks/serving.py overload --share 2 --out overload.json  # the excess must get 429
    python benchmarks/serving.py drain                                   # SIGTERM in the middle of a load
    python benchmarks/serving.py soak --seconds 3600 --most 1000000      # memory of the server
    python benchmarks/serving.py aborts                                  # clients disconnect; the next wave must work
    python benchmarks/serving.py exits -- --threads 2                    # options after -- go to progresvit serve

It needs the extra ``serve``. It starts a server and ends it, or uses the one at ``--address``, a loopback address.
Images are sent as they are, one in each ``POST /classify``. Arrival times are drawn before the load starts and do not
depend on answers. Latency counts from the intended arrival; lateness is the time from there until the request was sent.
If its p99 is not small beside the latency, this script or ``--connections`` limits the load. ``--share`` is a share of
the capacity, which is measured first unless ``--capacity`` gives it, with client and server on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import multiprocessing
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import httpx
import numpy as np

from progresvit.data.dataset import find_unlabelled
from progresvit.data.samples import samples_folder
from progresvit.engine.measurement import hardware
from progresvit.io.files import replace_file

READY = "/v2/health/ready"
SHARES = {"load": 0.8, "overload": 2.0, "drain": 0.8, "soak": 0.8, "aborts": 1.0, "exits": 0.5}
"""Share of the capacity at which requests arrive, unless ``--share`` or ``--rate`` is given."""
KEEP_ALIVE_S = 2
"""Idle connections are closed after this time: before the server does it, as uvicorn does after 5 seconds."""
STEP_S, TIMEOUT_S, START_S, DRAIN_S, END_S = 3.0, 30.0, 120.0, 60.0, 10.0
"""Seconds for each number of callers, an answer, the start, a drain, and from SIGTERM to SIGKILL."""
HELD_IMAGES, MEMORY_SAMPLES = 1000, 100
STEAL = 7
Process = subprocess.Popen[bytes]
Upload = tuple[bytes, dict[str, str]]  # body and headers of an image
Result = dict[str, Any]


@dataclass(slots=True)
class Reply:
    """One request: when it was due, sent and answered (``time.perf_counter``), and the answer."""

    due: float
    sent: float | None = None
    done: float = 0.0
    status: int = 0  # without an answer
    error: str | None = None
    exit_round: int | None = None
    has_retry_after: bool = False


@dataclass
class Run:
    """What every mode uses. The process is the server, if it was started here."""

    client: httpx.AsyncClient
    uploads: list[Upload]
    process: Process | None
    options: argparse.Namespace


def loopback(address: str) -> str:
    """The address, if it is one of this machine."""
    url = httpx.URL(address)
    with suppress(ValueError):
        if url.scheme == "http" and (url.host == "localhost" or ipaddress.ip_address(url.host).is_loopback):
            return address
    raise argparse.ArgumentTypeError(f"{address} is not a loopback address; use one such as http://127.0.0.1:8000.")


def wait_until_ready(process: Process, output: IO[bytes], address: str, seconds: float) -> None:
    """Exit with the last output of the server if it is not ready in this time."""
    client, end = httpx.Client(timeout=1, trust_env=False), time.perf_counter() + seconds
    while process.poll() is None and time.perf_counter() < end:
        with suppress(httpx.HTTPError):
            if client.get(address + READY).status_code == 200:
                return
        time.sleep(0.05)
    output.seek(0)
    lines = output.read().decode(errors="replace").splitlines()[-20:]
    state = f"was not ready after {seconds:g} s" if process.poll() is None else f"ended with {process.returncode}"
    raise SystemExit("\n".join([f"the server {state}; its last output:", *lines]))


@contextmanager
def running(command: list[str], address: str, seconds: float = START_S) -> Iterator[Process]:
    """A server that the command starts, from when it is ready; it is ended in all cases."""
    with tempfile.TemporaryFile("a+b") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(process, output, address, seconds)
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
            process.wait()


def server_command(options: argparse.Namespace, port: int) -> list[str]:
    """Starts the server on this port."""
    device = ["--device", options.device] if options.device else []
    return [sys.executable, "-m", "progresvit", "serve", options.model, "--port", str(port), *device, *options.serve]


def find_uploads(folder: Path | None) -> list[Upload]:
    """The images of a folder as multipart bodies; the sample images of the package by default."""
    uploads = []
    for entry in list(find_unlabelled(folder or samples_folder()).entries)[:HELD_IMAGES]:
        files = {"image": (Path(entry.name).name, entry.read())}
        request = httpx.Request("POST", "http://127.0.0.1", files=files)
        uploads.append((request.read(), {"Content-Type": request.headers["Content-Type"]}))
    return uploads


def arrivals(rate: float, seconds: float, most: int, seed: int) -> list[float]:
    """Times of a Poisson process, in seconds after its start; it ends with the time or the count."""
    generator, times, now = random.Random(seed), list[float](), 0.0
    while len(times) < most and (now := now + generator.expovariate(rate)) < seconds:
        times.append(now)
    return times


async def ask(run: Run, number: int, due: float, leave: float | None = None) -> Reply:
    """Send an image; the client disconnects after ``leave`` seconds."""
    reply, (body, headers) = Reply(due), run.uploads[number % len(run.uploads)]

    async def note(event: str, _: Any) -> None:
        if event == "http11.send_request_headers.started":
            reply.sent = time.perf_counter()

    try:
        async with asyncio.timeout(TIMEOUT_S if leave is None else leave):
            answer = await run.client.post("/classify", content=body, headers=headers, extensions={"trace": note})
        reply.status, reply.has_retry_after = answer.status_code, "Retry-After" in answer.headers
        reply.exit_round = answer.json()["exit_round"] if answer.status_code == 200 else None
    except (httpx.HTTPError, TimeoutError) as error:
        reply.error = type(error).__name__
    reply.done = time.perf_counter()
    return reply


async def open_loop(run: Run, times: Sequence[float], leave: Callable[[], float] | None = None) -> list[Reply]:
    """Send requests at these times after now, whether or not earlier ones are answered."""
    start, tasks = time.perf_counter(), []
    async with asyncio.TaskGroup() as group:
        for number, moment in enumerate(times):
            await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
            tasks.append(group.create_task(ask(run, number, start + moment, leave() if leave else None)))
    return [task.result() for task in tasks]


async def closed_loop(run: Run, callers: int, seconds: float) -> list[Reply]:
    """Each caller sends its next request after the answer; after a failure it waits for 50 ms."""
    end, replies, left = time.perf_counter() + seconds, list[Reply](), iter(range(run.options.most))

    async def call() -> None:
        while time.perf_counter() < end and (number := next(left, None)) is not None:
            replies.append(await ask(run, number, time.perf_counter()))
            if replies[-1].status != 200:
                await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(call())
    return replies


def percentiles(seconds: Sequence[float], name: str = "", points: Sequence[int] = (50, 95, 99)) -> Result:
    """Percentiles in milliseconds; None without values."""
    values = (1000 * np.percentile(seconds, points)).tolist() if len(seconds) else [None] * len(points)
    return {f"{name}p{point}_ms": value for point, value in zip(points, values)}


def summary(name: str, replies: Sequence[Reply]) -> Result:
    """One row: rates, latencies of accepted and of rejected requests apart, lateness, and the number of each status."""
    if not replies:
        raise SystemExit(f"{name}: no request was sent; raise --seconds, --rate or --most.")
    accepted, rejected = [[reply for reply in replies if reply.status == status] for status in (200, 429)]
    took = max(reply.done for reply in replies) - min(reply.due for reply in replies)
    return {
        "load": name, "requests": len(replies), "seconds": took, "ok_per_s": len(accepted) / took,
        **percentiles([reply.done - reply.due for reply in accepted]),
        "percent_429": 100 * len(rejected) / len(replies),
        **percentiles([reply.done - reply.due for reply in rejected], "429_", (50, 99)),
        **percentiles([reply.sent - reply.due for reply in replies if reply.sent], "late_", (50, 99)),
        "answers": dict(Counter(str(reply.status or reply.error) for reply in replies)),
    }  # fmt: skip


def problems(replies: Sequence[Reply], allowed: Sequence[int] = (200,)) -> list[str]:
    """One line for each status, or reason of no answer, that is not allowed."""
    bad = Counter(reply.status or reply.error for reply in replies if reply.status not in allowed)
    found = [f"{count} of {len(replies)} requests: {reason}" for reason, count in bad.items()]
    lacking = sum(reply.status == 429 and not reply.has_retry_after for reply in replies)
    return found + [f"{lacking} answers with 429 have no Retry-After"] * bool(lacking)


def call_in_process(options: argparse.Namespace, address: str, callers: int) -> list[Reply]:
    """A closed loop in a process of its own."""

    async def call() -> list[Reply]:
        async with open_client(options, address) as client:
            return await closed_loop(Run(client, find_uploads(options.images), None, options), callers, STEP_S)

    return asyncio.run(call())


async def call_from_processes(run: Run, callers: int) -> list[Reply]:
    """A closed loop of this many callers, divided among the processes of the options."""
    count = min(run.options.processes, callers)
    if count == 1:
        return await closed_loop(run, callers, STEP_S)
    shares = [callers // count + (number < callers % count) for number in range(count)]
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(time.sleep, [0.5] * count))  # all of them have started
        work = partial(call_in_process, run.options, str(run.client.base_url))
        parts = await asyncio.get_running_loop().run_in_executor(None, lambda: list(pool.map(work, shares)))
    start = max(min(reply.due for reply in part) for part in parts)  # when all of them send
    end = min(max(reply.done for reply in part) for part in parts)
    return [reply for part in parts for reply in part if start <= reply.due and reply.done <= end]


async def find_capacity(run: Run) -> Result:
    """Callers are doubled until the rate has twice grown by less than 5 %, or requests are rejected."""
    rows, best, flat, callers = list[Result](), 0.0, 0, run.options.callers
    while callers <= run.options.connections and flat < 2 and not (rows and rows[-1]["percent_429"]):
        rows.append(summary(f"{callers} callers", await call_from_processes(run, callers)))
        rate = rows[-1]["ok_per_s"]
        flat = 0 if rate > 1.05 * best else flat + 1
        best, callers = max(best, rate), 2 * callers
    if not best:
        raise SystemExit(f"the server answered no request with 200: {rows[-1]['answers']}")
    return {"rows": rows, "capacity_per_s": best}


async def make_arrivals(run: Run) -> list[float]:
    """Arrival times at the rate that the options ask for; the options then hold this rate."""
    options = run.options
    if options.rate is None:
        options.capacity = options.capacity or (await find_capacity(run))["capacity_per_s"]
        options.rate = (options.share or SHARES[options.mode]) * options.capacity
    return arrivals(options.rate, options.seconds, options.most, options.seed)


async def load(run: Run) -> Result:
    """Poisson arrivals; in an overload some must get 429, and ``exits`` tells apart where images exit."""
    mode, replies = run.options.mode, await open_loop(run, await make_arrivals(run))
    rows, failures = [summary(mode, replies)], problems(replies, (200, 429))
    if mode == "overload" and not any(reply.status == 429 for reply in replies):
        failures.append("no request got 429; raise --share or --seconds")
    if mode == "exits":
        for s in sorted({reply.exit_round for reply in replies if reply.exit_round}):
            rows.append(summary(f"exit round {s}", [reply for reply in replies if reply.exit_round == s]))
    return {"rows": rows, "failures": failures}


async def watch_drain(run: Run, process: Process, signalled: float) -> Result:
    """Seconds from SIGTERM until ready answered 503, and until the process ended; None if it did not happen."""
    turned = None
    while process.poll() is None and time.perf_counter() - signalled < DRAIN_S:
        with suppress(httpx.HTTPError):
            status = (await run.client.get(READY, headers={"Connection": "close"}, timeout=1)).status_code
            turned = time.perf_counter() - signalled if status == 503 and turned is None else turned
        await asyncio.sleep(0.01)
    return {"ready_503_s": turned, "ended_s": None if process.poll() is None else time.perf_counter() - signalled}


async def drain(run: Run) -> Result:
    """SIGTERM in the middle of a load: requests that were sent before it must be answered."""
    assert run.process
    sending = asyncio.create_task(open_loop(run, await make_arrivals(run)))
    await asyncio.sleep(run.options.seconds / 2)
    signalled = time.perf_counter()
    run.process.terminate()
    found, replies = await watch_drain(run, run.process, signalled), await sending
    before = [reply for reply in replies if reply.sent is not None and reply.sent < signalled]
    rows = [summary("before SIGTERM", before), summary("all", replies)]
    found["last_answer_s"] = max((reply.done - signalled for reply in before), default=0.0)
    failures = problems(before, (200, 429, 503))  # 503: SIGTERM came while the request was read
    failures += [f"{name} is missing" for name in ("ready_503_s", "ended_s") if found[name] is None]
    return {"rows": rows, **found, "failures": failures}


async def soak(run: Run) -> Result:
    """Memory of the server under load; what it needs for its first requests is in the first half."""
    assert run.process
    statm, samples = Path(f"/proc/{run.process.pid}/statm"), list[float]()
    sending = asyncio.create_task(open_loop(run, await make_arrivals(run)))
    while not sending.done():
        samples.append(int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6)
        await asyncio.wait([sending], timeout=run.options.seconds / MEMORY_SAMPLES)
    replies, growth = await sending, samples[-1] - samples[len(samples) // 2]
    facts = {"rows": [summary("soak", replies)], "failures": problems(replies, (200, 429))}
    return facts | {"memory_mb": samples, "last_mb": samples[-1], "growth_from_midpoint_mb": growth}


async def images_by_round(run: Run) -> Counter[int]:
    """Images that each round has run, as the server counts them; audited ones are among them."""
    text, counts = (await run.client.get("/metrics")).text, Counter[int]()
    for s, count in re.findall(r'^progresvit_batch_size_sum\{round="(\d+)"\} (\S+)', text, re.MULTILINE):
        counts[int(s)] += int(float(count))
    return counts


async def aborts(run: Run) -> Result:
    """Clients disconnect within twice the idle latency; then two callers that wait for answers must get 200 only."""
    generator, times = random.Random(run.options.seed), await make_arrivals(run)
    idle = await closed_loop(run, 1, STEP_S)
    longest = 2 * float(np.median([reply.done - reply.due for reply in idle]))
    before = await images_by_round(run)
    first = await open_loop(run, times, lambda: generator.uniform(0, longest))
    await asyncio.sleep(STEP_S)  # images that the server still computes are counted by then
    after = await images_by_round(run)
    answered = {s: sum((reply.exit_round or 0) >= s for reply in first) for s in after}
    second = await closed_loop(run, 2, run.options.seconds)
    return {
        "rows": [summary("disconnecting", first), summary("next wave", second)],
        "disconnected": sum(reply.error == "TimeoutError" for reply in first),
        "images_of_disconnected_by_round": {s: after[s] - before[s] - answered[s] for s in sorted(after)},
        "failures": problems(second),
    }


MODES = dict.fromkeys(SHARES, load) | {"capacity": find_capacity, "drain": drain, "soak": soak, "aborts": aborts}


def open_client(options: argparse.Namespace, address: str) -> httpx.AsyncClient:
    """A client with as many connections as the options allow."""
    size = options.connections
    limits = httpx.Limits(max_connections=size, max_keepalive_connections=size, keepalive_expiry=KEEP_ALIVE_S)
    return httpx.AsyncClient(base_url=address, limits=limits, timeout=None, trust_env=False)


async def measure(options: argparse.Namespace, address: str, process: Process | None = None) -> Result:
    """Run the mode."""
    async with open_client(options, address) as client:
        return await MODES[options.mode](Run(client, find_uploads(options.images), process, options))


def show(report: Result) -> str:
    """A table with a column for each row of the report, and a line for everything else."""

    def text(value: Any) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    cells = [[name, *(text(row[name]) for row in report["rows"])] for name in report["rows"][0]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    return "\n".join(lines + [f"{name}: {text(report[name])}" for name in report if name not in ("rows", "memory_mb")])


def cpu_times() -> np.ndarray:
    """Time of all cores by kind since the start of the machine, in ticks; ``STEAL`` is what a virtual machine lost."""
    return np.array(Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9], np.int64)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options of this script, and options of the server after ``--``."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--model", default="imagenet-tiny", help="model of the server that is started")
    parser.add_argument("--address", type=loopback, help="of a running server, such as http://127.0.0.1:8000")
    parser.add_argument("--device", help="device of the server; cpu in the report unless given")
    parser.add_argument("--images", type=Path, help="folder or tar; the sample images of the package by default")
    parser.add_argument("--share", type=float, help="requests a second, as a share of the capacity")
    parser.add_argument("--rate", type=float, help="requests a second")
    parser.add_argument("--capacity", type=float, help="requests a second; measured unless given")
    parser.add_argument("--seconds", type=float, default=30, help="duration of the arrivals")
    parser.add_argument("--most", type=int, default=100_000, help="maximum number of requests of a load")
    parser.add_argument("--connections", type=int, default=512, help="maximum number, also of callers")
    parser.add_argument("--callers", type=int, default=1, help="with which finding the capacity begins")
    parser.add_argument("--processes", type=int, default=1, help="of the callers that find the capacity")
    parser.add_argument("--seed", type=int, default=0, help="of the arrival times")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(own)
    options.serve = arguments[len(own) + 1 :]
    if options.address and (options.mode in ("drain", "soak") or options.serve):
        parser.error("drain, soak and options after -- are for a server that this script starts; leave out --address.")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; 1 if a requirement is not met."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    address, command = options.address or f"http://127.0.0.1:{port}", server_command(options, port)
    before = cpu_times()
    with nullcontext() if options.address else running(command, address) as process:
        result = asyncio.run(measure(options, address, process))
    spent = cpu_times() - before
    report = {
        "command": f"python benchmarks/serving.py {shlex.join(arguments)}",
        "server": options.address or shlex.join(command),
        "hardware": hardware(options.device or "cpu"),
        "steal_percent": 100 * spent[STEAL] / max(1, spent.sum()),
    }
    report |= {"rate_per_s": options.rate, "capacity_per_s": options.capacity, **result}
    print(show(report))
    if options.out:
        replace_file(options.out, json.dumps(report, indent=2) + "\n")
    return int(bool(report.get("failures")))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the server, too
    sys.exit(main())
