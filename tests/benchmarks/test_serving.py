"""``benchmarks/serving.py`` against a server that answers after a set time and rejects what its queue cannot hold."""

import asyncio
import inspect
import itertools
import json
import socket
import sys
import threading
import time
from contextlib import contextmanager
from statistics import mean

import httpx
import pytest
import serving
import uvicorn
from serving import Reply, Run, arrivals, open_loop, percentiles, running, summary

from tests.waiting import PATIENCE

NEVER_READY = "echo cannot find the weights; exec sleep 60"


def make_stub(delay=0.0, places=1000, busy=False):
    """As many requests as there are places wait or run; ``busy`` blocks the server while it answers."""
    import asyncio
    import time

    from fastapi import FastAPI, Request, Response

    app, count, exited = FastAPI(), {"pending": 0}, {1: 0, 2: 0}

    @app.get("/v2/health/ready")
    def ready():
        return {}

    @app.get("/metrics")
    def metrics():
        ran = {1: sum(exited.values()), 2: exited[2]}
        lines = [f'progresvit_batch_size_sum{{round="{s}"}} {float(n)}' for s, n in ran.items()]
        return Response("\n".join(["# TYPE progresvit_batch_size histogram", *lines]), media_type="text/plain")

    @app.post("/classify")
    async def classify(request: Request):
        await request.body()
        if count["pending"] >= places:
            return Response(status_code=429, headers={"Retry-After": "1"})
        count["pending"] += 1
        if busy:
            time.sleep(delay)
        else:
            await asyncio.sleep(delay)
        count["pending"] -= 1
        s = 1 + sum(exited.values()) % 2
        exited[s] += 1
        return {"exit_round": s}

    classify.__annotations__["request"] = Request
    return app


@contextmanager
def stub(**options):
    """The stub in a thread; yields its address."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # client and server are threads of one process
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(make_stub(**options), log_level="error"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            sys.setswitchinterval(interval)


@pytest.fixture(autouse=True)
def _small_uploads(monkeypatch):
    body, headers = serving.find_uploads(None)[0]
    monkeypatch.setattr(serving, "find_uploads", lambda folder: [(body[:1000], headers)])
    monkeypatch.setattr(serving, "STEP_S", 0.1)


def send(address, times):
    """The replies to an open loop."""

    async def run():
        options = serving.parse(["load"])
        async with httpx.AsyncClient(base_url=address, trust_env=False, timeout=None) as client:
            return await open_loop(Run(client, serving.find_uploads(None), None, options), times)

    return asyncio.run(run())


def measure(mode, *arguments, address=None):
    """The exit code of the script."""
    where = [] if address is None else ["--address", address]
    return serving.main([mode, *where, *map(str, arguments)])


def test_arrivals_are_a_reproducible_poisson_process():
    times = arrivals(200.0, 100.0, 10**6, seed=1)
    assert times == arrivals(200.0, 100.0, 10**6, seed=1) != arrivals(200.0, 100.0, 10**6, seed=2)
    assert len(times) == pytest.approx(20_000, rel=0.03)
    gaps = [late - early for early, late in itertools.pairwise(times)]
    assert min(gaps) > 0
    assert mean(gap**2 for gap in gaps) == pytest.approx(2 / 200**2, rel=0.1)  # exponential: twice the squared mean


def test_time_and_count_bound_the_arrivals():
    assert arrivals(200.0, 100.0, 50, seed=1) == arrivals(200.0, 100.0, 10**6, seed=1)[:50]
    assert max(arrivals(200.0, 2.0, 10**6, seed=1)) < 2


def test_percentiles_are_those_of_the_values_in_milliseconds():
    values = [number / 1000 for number in range(101)]
    assert percentiles(values) == pytest.approx({"p50_ms": 50, "p95_ms": 95, "p99_ms": 99})
    assert percentiles([], "late_", (50,)) == {"late_p50_ms": None}


def test_a_summary_counts_rejected_and_unanswered_requests_apart():
    replies = [Reply(due=0.0, sent=0.001, done=1.0, status=200), Reply(due=1.0, sent=1.001, done=1.01, status=429)]
    row = summary("load", [*replies, Reply(due=1.0, done=2.0, error="ConnectError"), Reply(1.0, 1.001, 1.5, 500)])
    assert row["answers"] == {"200": 1, "429": 1, "ConnectError": 1, "500": 1}
    assert (row["p50_ms"], row["429_p50_ms"], row["late_p50_ms"]) == pytest.approx((1000, 10, 1))
    assert (row["ok_per_s"], row["percent_429"]) == (0.5, 25)
    assert serving.problems(replies, (200, 429)) == ["1 answers with 429 have no Retry-After"]


def test_requests_are_sent_without_waiting_for_answers():
    with stub(delay=0.2) as address:
        start = time.perf_counter()
        replies = send(address, [0.01 * number for number in range(20)])
        assert time.perf_counter() - start < 3  # one after the other they would take 4 s
    assert all(reply.status == 200 and reply.done - reply.due >= 0.2 for reply in replies)
    assert summary("load", replies)["late_p50_ms"] < 1000


def test_latencies_count_from_the_intended_arrival():
    with stub(delay=0.05, busy=True) as address:  # 20 requests a second, of which ten arrive at once
        latencies = sorted(reply.done - reply.due for reply in send(address, [0.0] * 10))
    assert latencies[-1] >= 10 * 0.05
    assert latencies[0] >= 0.05


def test_a_load_generator_that_is_late_tells_it(monkeypatch):
    with stub() as address:
        whole = serving.ask

        async def slow(*arguments):
            time.sleep(0.05)
            return await whole(*arguments)

        monkeypatch.setattr(serving, "ask", slow)
        replies = send(address, [0.0] * 5)
    assert summary("load", replies)["late_p99_ms"] > 150
    assert all(reply.done - reply.due >= reply.sent - reply.due > 0.05 for reply in replies)


def test_the_excess_of_an_overload_is_rejected_and_the_report_is_written(tmp_path, capsys):
    out = tmp_path / "overload.json"
    with stub(delay=0.1, places=2) as address:  # 20 a second
        assert measure("overload", "--rate", 100, "--seconds", 0.6, "--out", out, address=address) == 0
        assert measure("overload", "--rate", 5, "--seconds", 1, "--most", 1, address=address) == 1
    assert "no request got 429" in capsys.readouterr().out
    report = json.loads(out.read_text())
    (row,) = report["rows"]
    assert set(row["answers"]) == {"200", "429"}
    assert 20 < row["percent_429"] < 90
    assert row["p50_ms"] >= 100
    assert row["p50_ms"] > row["429_p50_ms"]
    assert report["hardware"]
    assert report["command"].startswith("python benchmarks/serving.py overload --address http://127.0.0.1")


def test_the_capacity_is_found_and_loads_are_shares_of_it(tmp_path):
    out = tmp_path / "capacity.json"
    with stub(delay=0.05, places=2) as address:
        measure("capacity", "--out", out, address=address)
        report = json.loads(out.read_text())
        assert 8 < report["capacity_per_s"] <= 40
        assert [row["load"] for row in report["rows"]] == ["1 callers", "2 callers", "4 callers"]
        assert report["rows"][-1]["percent_429"] > 0
        assert measure("load", "--most", 3, "--out", out, address=address) == 0
        report = json.loads(out.read_text())
        assert report["rate_per_s"] == pytest.approx(0.8 * report["capacity_per_s"])


def test_latencies_are_told_by_exit(tmp_path):
    out = tmp_path / "exits.json"
    with stub(delay=0.01) as address:
        assert measure("exits", "--capacity", 80, "--seconds", 0.5, "--most", 10, "--out", out, address=address) == 0
    report = json.loads(out.read_text())
    assert report["rate_per_s"] == 40
    assert [(row["load"], row["requests"]) for row in report["rows"]] == [
        ("exits", 10), ("exit round 1", 5), ("exit round 2", 5),
    ]  # fmt: skip


def test_clients_that_disconnect_do_not_harm_the_next(tmp_path):
    out = tmp_path / "aborts.json"
    with stub(delay=0.05) as address:
        assert measure("aborts", "--rate", 60, "--seconds", 0.5, "--out", out, address=address) == 0
    report = json.loads(out.read_text())
    first, second = report["rows"]
    assert report["disconnected"] == first["answers"]["TimeoutError"] > 0
    assert list(second["answers"]) == ["200"]
    images = report["images_of_disconnected_by_round"]
    assert set(images) == {"1", "2"}
    assert 0 < images["1"] <= report["disconnected"]  # the stub does not stop for a client that disconnects


@pytest.mark.parametrize("mode", ["drain", "soak"])
def test_a_server_that_is_started_is_measured_and_ended(mode, tmp_path, monkeypatch):
    source = f"import uvicorn\n{inspect.getsource(make_stub)}\nuvicorn.run(make_stub(0.1), port=PORT)"
    ports = []

    def command(options, port):
        ports.append(port)
        return [sys.executable, "-c", source.replace("PORT", str(port))]

    monkeypatch.setattr(serving, "server_command", command)
    out = tmp_path / "report.json"
    failed = measure(mode, "--rate", 50, "--seconds", 0.6, "--out", out)
    report = json.loads(out.read_text())
    assert list(report["rows"][0]["answers"]) == ["200"]
    if mode == "drain":
        assert failed  # uvicorn closes its socket and does not answer 503
        assert report["failures"] == ["ready_503_s is missing"]
        assert report["ended_s"] > 0
        assert report["last_answer_s"] > 0
        assert report["rows"][1]["answers"]["ConnectError"] > 0
    else:
        assert not failed
        assert report["last_mb"] > 10
        assert len(report["memory_mb"]) > 10
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{ports[0]}", trust_env=False)


@pytest.mark.parametrize("address", ["http://10.0.0.1:80", "http://example.com", "https://127.0.0.1", "127.0.0.1:80"])
def test_other_addresses_than_loopback_are_refused(address, capsys):
    with pytest.raises(SystemExit):
        measure("load", address=address)
    assert "is not a loopback address" in capsys.readouterr().err


def test_loopback_addresses_are_accepted():
    for address in ("http://127.0.0.1:8000", "http://[::1]:8000", "http://localhost:8000"):
        assert serving.loopback(address) == address


@pytest.mark.parametrize(
    ("source", "state"),
    [(NEVER_READY, "was not ready after 2 s"), (NEVER_READY.replace("exec sleep 60", "exit 3"), "ended with 3")],
    ids=["silent", "ended"],
)
def test_a_server_that_never_becomes_ready_is_ended_and_its_last_output_shown(source, state):
    command, seconds = ["sh", "-c", source], 2 if "sleep" in source else PATIENCE
    with (
        pytest.raises(SystemExit, match=rf"(?s){state}.*cannot find the weights"),
        running(command, "http://127.0.0.1:9", seconds),
    ):
        pass


def test_options_after_two_dashes_go_to_the_server():
    options = serving.parse(["load", "--model", "m", "--device", "cpu", "--", "--threads", "2"])
    assert serving.server_command(options, 5)[1:] == [
        "-m", "progresvit", "serve", "m", "--port", "5", "--device", "cpu", "--threads", "2",
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        serving.parse(["drain", "--address", "http://127.0.0.1:8000"])
