"""Attacks on ``progresvit serve``: during each of them another client is answered, and memory stays bounded.

    python benchmarks/attacks.py                                # every attack for 8 seconds, on a server that it starts
    python benchmarks/attacks.py waiting slow --seconds 20      # some of them
    python benchmarks/attacks.py --out attacks.json -- --threads 1    # options after -- go to progresvit serve

It needs the extra ``serve`` and Linux. The server listens on the loopback interface, starts anew for each attack, and
is ended. An attack sends a bounded number of requests, all of which are made here (hostile.py). Meanwhile a neighbour
sends a sample image and asks for the server's health, each on a connection of its own, ten times a second at most. The
table has the slowest answer of each, and how many of its requests were refused or failed. Memory is the sum of the
resident memory of the server and its processes, sampled ten times a second; memory that processes share counts once
(PSS).
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import hostile
from serving import READY, running

from progresvit.data.samples import samples_folder
from progresvit.engine.measurement import hardware
from progresvit.io.files import replace_file

MOST_REQUESTS = 20_000
"""Of an attack."""
CALLERS, SLOW_CALLERS = 8, 100
MOST_SECONDS, MOST_BYTES = 2.0, 1_500_000_000
"""What the neighbour may wait, and what the server may hold."""
PAUSE_S = 0.1
TIMEOUT_S = 120.0
JSON = {"Content-Type": "application/json"}

Request = tuple[str, bytes, dict[str, str]]
"""Address, body and headers."""


def upload(content: bytes, query: str = "") -> Request:
    """A form with this image."""
    return (f"/classify{query}", *hostile.multipart(content))


def infer(body: bytes, headers: dict[str, str] | None = None) -> Request:
    """A request in JSON."""
    return "/v2/models/{name}/infer", body, headers or JSON


def padded(content: bytes, size: int = 15_000_000) -> bytes:
    """An image file with bytes behind its end."""
    return content + bytes(size - len(content))


def pixels() -> list[Request]:
    """More pixels than the limit, in files that a parser takes for others."""
    files = [hostile.disguised_jpeg(20_000, 20_000), hostile.jpeg(20_000, 20_000, first=1), hostile.webp(9_400, 9_400)]
    return [upload(content) for content in (*files, hostile.jpeg(40_000, 40_000))]


def scans() -> list[Request]:
    """JPEGs of many scans, each over the whole image."""
    sizes = ((5_000, 5_000), (9_400, 9_400), (1_900, 2_000))
    return [
        upload(hostile.jpeg(*size, frame=hostile.PROGRESSIVE, scans=count)) for size in sizes for count in (99, 9_999)
    ]


def waiting() -> list[Request]:
    """Long files of large images, which their client gives up soon."""
    content = padded(hostile.png(5_000, 5_000))
    return [upload(content, f"?timeout={timeout}") for timeout in (0.2, 0.5, 1.0)]


def large() -> list[Request]:
    """As many pixels as are allowed, in a few bytes."""
    return [upload(hostile.webp(5_000, 5_000)), upload(hostile.webp(2_000, 2_000)), upload(hostile.webp(9_400, 9_400))]


def many() -> list[Request]:
    """Requests of many images that take long for their size."""
    scans = hostile.jpeg(1_900, 2_000, frame=hostile.PROGRESSIVE, scans=99)
    return [infer(json.dumps(hostile.infer([image] * 64)).encode()) for image in (scans, hostile.webp(5_000, 5_000))]


def parsing() -> list[Request]:
    """JSON that takes long to parse, compressed to a few kilobytes, and headers that do."""
    bodies = (hostile.many_values(3_500_000), hostile.nested(7_000_000), b"[" * 15_000_000, b'{"":' * 3_900_000)
    zipped = [infer(*hostile.zipped(body)) for body in bodies]
    form = (
        b"--x\r\nContent-Disposition: form-data\r\n" + b"a:b\r\n" * 2_000_000,
        {"Content-Type": "multipart/form-data; boundary=x"},
    )
    delimiters = (b"--x\r\n\r\n\r\n" * 1_500_000, form[1])
    junk = upload(b"\xff\xd8\xff" + bytes(15_000_000))
    return [*zipped, ("/classify", *form), ("/classify", *delimiters), junk]


def formats() -> list[Request]:
    """Files of other formats, by the names and first bytes of images."""
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n{} loop\n"
    tiff = hostile.broken_tiff()
    return [upload(eps), upload(tiff), upload(b"BM" + eps), upload(b"GIF89a" + eps), upload(b"\x89PNG\r\n\x1a\n" + eps)]


ATTACKS: dict[str, tuple[str, Callable[[], list[Request]] | None]] = {
    "pixels": ("1", pixels),
    "scans": ("2", scans),
    "waiting": ("3", waiting),
    "large": ("4", large),
    "many": ("2 to 4", many),
    "parsing": ("5", parsing),
    "formats": ("6", formats),
    "slow": ("7", None),
}


@dataclass
class Neighbour:
    """Another client, who sends an image and asks for the server's health."""

    port: int
    stop: threading.Event = field(default_factory=threading.Event)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"image": [], "health": []})
    others: Counter[str] = field(default_factory=Counter)

    def ask(self, kind: str, address: str, body: bytes | None, headers: dict[str, str]) -> None:
        while not self.stop.is_set():
            start = time.perf_counter()
            status = send(self.port, address, body, headers)
            self.seconds[kind].append(time.perf_counter() - start)
            if status != "200":
                self.others[f"{kind}: {status}"] += 1
            self.stop.wait(PAUSE_S)


def send(port: int, address: str, body: bytes | None, headers: dict[str, str]) -> str:
    """Send a request on a new connection; the status of the answer, or the error."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # it may have been answered before it was sent
            connection.request("GET" if body is None else "POST", address, body, headers)
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def send_requests(
    port: int, requests: list[Request], stop: threading.Event, counts: Counter[str]
) -> list[threading.Thread]:
    """Callers that send the requests in turn, each the next one after an answer."""
    left, lock = iter(zip(range(MOST_REQUESTS), cycle(requests))), threading.Lock()

    def call() -> None:
        while not stop.is_set():
            with lock:
                _, request = next(left, (0, None))
            if request is None:
                return
            counts[send(port, *request)] += 1

    return [threading.Thread(target=call, daemon=True) for _ in range(CALLERS)]


def send_slowly(port: int, stop: threading.Event, counts: Counter[str]) -> list[threading.Thread]:
    """Callers that send 100 bytes a second of a body that they announce."""

    def call() -> None:
        while not stop.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n")
                counts["connections"] += 1
                while not stop.wait(1.0):
                    connection.sendall(bytes(100))

    return [threading.Thread(target=call, daemon=True) for _ in range(SLOW_CALLERS)]


def samples() -> Iterator[bytes]:
    """The sample images of the package."""
    return (path.read_bytes() for path in sorted(samples_folder().glob("*.jpg")))


def memory_of(process: int) -> int:
    """Bytes that a process and its children hold; shared pages are divided among those that share them."""
    held = 0
    with suppress(OSError):
        text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
        held = 1024 * int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1])  # type: ignore[index]
        for task in Path(f"/proc/{process}/task").iterdir():
            held += sum(memory_of(int(child)) for child in (task / "children").read_text(encoding="ascii").split())
    return held


def attack(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row of the table."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    stop, counts = threading.Event(), Counter[str]()
    command = [sys.executable, "-m", "progresvit", "serve", options.model, "--port", str(port), *options.serve]
    make = ATTACKS[name][1]
    requests = [(address.format(name=Path(options.model).name), *rest) for address, *rest in make()] if make else []
    with running(command, f"http://127.0.0.1:{port}") as process:
        send(port, *upload(next(samples())))
        neighbour, before, most = Neighbour(port), memory_of(process.pid), 0
        asking = [
            threading.Thread(target=neighbour.ask, args=("image", *upload(next(samples()))), daemon=True),
            threading.Thread(target=neighbour.ask, args=("health", READY, None, {}), daemon=True),
        ]
        attacking = send_requests(port, requests, stop, counts) if make else send_slowly(port, stop, counts)
        for thread in (*asking, *attacking):
            thread.start()
        end = time.perf_counter() + options.seconds
        while time.perf_counter() < end:
            most = max(most, memory_of(process.pid))
            time.sleep(PAUSE_S)
        stop.set()
        neighbour.stop.set()
        for thread in asking:
            thread.join(TIMEOUT_S)
        ended = time.perf_counter()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(TIMEOUT_S)
        ended = time.perf_counter() - ended
    return {
        "attack": name, "point": ATTACKS[name][0], "requests": sum(counts.values()), "answers": dict(counts),
        "neighbour_answers": len(neighbour.seconds["image"]), "neighbour_others": dict(neighbour.others),
        "image_s": max(neighbour.seconds["image"], default=math.inf),
        "health_s": max(neighbour.seconds["health"], default=math.inf),
        "before_mb": before / 1e6, "most_mb": most / 1e6, "sigterm_s": ended,
    }  # fmt: skip


def main(words: list[str] | None = None) -> None:
    """Print a row for each attack; exit with the requirements that are not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"{', '.join(ATTACKS)}; all by default")
    parser.add_argument("--model", default="nettewoof-tiny")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    words = sys.argv[1:] if words is None else words
    own, options_of_server = (
        (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    )
    options = parser.parse_args(own)
    options.serve = options_of_server
    if unknown := [name for name in options.attacks if name not in ATTACKS]:
        parser.error(f"unknown attacks: {', '.join(unknown)}; there are {', '.join(ATTACKS)}.")
    if not 0 < options.seconds <= 600:
        parser.error(f"--seconds must be above 0 and at most 600, got {options.seconds:g}.")
    rows, failures = [], []
    heads = ("requests", "image s", "health s", "others", "most MB", "SIGTERM s")
    print(f"{'attack':10}", *(f"{head:>9}" for head in heads), " answers")
    for name in options.attacks or ATTACKS:
        row = attack(name, options)
        rows.append(row)
        others = sum(row["neighbour_others"].values())
        print(
            f"{name:10} {row['requests']:9} {row['image_s']:9.2f} {row['health_s']:9.2f} {others:9} "
            f"{row['most_mb']:9.0f} {row['sigterm_s']:9.2f}  {row['answers']} {row['neighbour_others'] or ''}",
            flush=True,
        )
        if max(row["image_s"], row["health_s"]) > MOST_SECONDS or others:
            failures.append(f"{name}: the neighbour waited or was not answered")
        if row["most_mb"] * 1e6 > MOST_BYTES:
            failures.append(f"{name}: more than {MOST_BYTES / 1e9:g} GB")
    if options.out is not None:
        result = {"hardware": hardware("cpu"), "model": options.model, "seconds": options.seconds, "rows": rows}
        replace_file(options.out, json.dumps(result, indent=1) + "\n")
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
