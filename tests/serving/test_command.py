"""``progresvit serve`` as a process."""

import io
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing

import httpx
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from progresvit.api import load
from progresvit.data.samples import samples_folder
from progresvit.model.saving import save
from progresvit.serving.front.server import Server
from progresvit.serving.start import make_server
from tests.commands import refused, run, works
from tests.serving.conftest import encode
from tests.waiting import PATIENCE

SAMPLE = samples_folder() / "golden_retriever.jpg"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-model"], "no-such-model"),
        (["nettewoof-tiny", "--threshold", "-1"], "0 (every round runs) or more"),
        (["nettewoof-tiny", "--audit", "2"], "--audit is a share of the images from 0 to 1"),
        (["--host", "192.0.2.1", "--allow-anyone"], "check --host"),  # no machine has this address
        (["--max-memory", "63"], "--max-memory must be at least four times --max-body, 64, not 63"),
        (["--max-memory", "nan"], "--max-memory must be at least four times --max-body, 64, not nan"),
        (["--host", "0.0.0.0"], "for the command in the variable PROGRESVIT_TOKEN, or --allow-anyone"),
    ],
)
def test_a_wrong_option_is_one_line_with_the_remedy(words, message):
    refused(message, "serve", *words)


def test_a_missing_package_is_one_line_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "progresvit.serving.start", None)
    monkeypatch.delitem(sys.modules, "progresvit.serving.start")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "progresvit.serving.front.server", raising=False)
    refused("uvicorn is not installed; run: pip install", "serve")


def test_a_server_for_a_bundled_model_audits_its_certificate():
    server = make_server("nettewoof-tiny", port=0)
    service = server.service
    try:
        assert service.name == "nettewoof-tiny"
        assert service.audit is not None
        assert service.audit.rate == 0.01
        assert len(service.engine.gmacs) == len(load("nettewoof-tiny").config.rounds)
    finally:
        service.close()
        service.engine.close()
    without = make_server("nettewoof-tiny", port=0, audit_rate=0.0)
    assert without.service.audit is None
    without.service.close()
    without.service.engine.close()


def test_the_limit_of_pixels_holds_for_the_engine_and_the_page(served_model, photos, tmp_path, monkeypatch):
    """A photograph has 60 x 48 pixels."""
    folder, made = save(served_model, tmp_path / "tiny"), []
    monkeypatch.setattr(Server, "run_and_report", lambda server, report: made.append(server))
    for words in (("--max-pixels", "1000"), ("--max-pixels", "9999")):
        works("serve", folder, "--threshold", 0.5, "--port", 0, "--device", "cpu", *words)
    image = encode(Image.open(io.BytesIO(photos[0])), "PNG")
    for server, status in zip(made, (422, 200), strict=True):
        client = TestClient(server.config.app, base_url="http://localhost")
        with closing(server.service.engine), closing(server.service), server.listening, client:
            assert client.post("/classify", files={"image": image}).status_code == status
            assert client.post("/page/rounds", content=image).status_code == status
            reduced = client.post("/classify", files={"image": photos[0]})
            assert reduced.status_code == 200  # a JPEG is decoded at a smaller scale
    assert "'--max-pixels'" in run("serve", "--max-pixels", 0).output


def test_a_port_that_is_in_use_is_one_line_with_the_remedy():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(f"port {port} is in use; choose another, or pass --port 0", "serve", "nettewoof-tiny", "--port", port)


@pytest.mark.slow
def test_a_server_that_is_terminated_under_load_answers_what_it_accepted():
    command = [sys.executable, "-m", "progresvit", "serve", "nettewoof-tiny", "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())[0]
            content, statuses, stop = SAMPLE.read_bytes(), [], threading.Event()

            def ask():
                with httpx.Client(base_url=address, timeout=PATIENCE) as client:
                    while not stop.is_set():
                        try:
                            response = client.post("/classify", files={"image": content})
                        except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError) as error:
                            statuses.append(type(error).__name__)
                            return
                        statuses.append(response.status_code)
                        if response.status_code == 503:
                            return

            threads = [threading.Thread(target=ask) for _ in range(6)]
            for thread in threads:
                thread.start()
            while statuses.count(200) < 6:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
            stop.set()
            for thread in threads:
                thread.join()
            assert set(statuses) <= {200, 429, 503, "ConnectError"}, statuses
        finally:
            process.kill()
