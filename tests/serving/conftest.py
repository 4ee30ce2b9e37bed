"""A server for a tiny model on a free port, in a thread."""

import asyncio
import io
import threading
from contextlib import closing, contextmanager

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from progresvit import Engine
from progresvit.model import ProgResViT
from progresvit.model.saving import save
from progresvit.routing.decide import OODRule
from progresvit.serving.front.app import make_app
from progresvit.serving.front.server import Server, open_socket
from progresvit.serving.metrics import ServerMetrics
from progresvit.serving.service import Limits, Service
from tests.factories import setting_of, tiny_config
from tests.waiting import PATIENCE

LABELS = tuple(f"class {number}" for number in range(12))


@pytest.fixture(scope="session")
def served_model(randomize):
    torch.manual_seed(0)
    return randomize(ProgResViT(tiny_config(heads=(1, 3), depth=2, labels=LABELS, num_classes=12)))


@pytest.fixture(scope="session")
def photos():
    """JPEG files of patches of colours, of different entropies."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (40, 4, 5, 3), dtype=np.uint8)
    return [encode(Image.fromarray(patches).resize((60, 48), Image.Resampling.NEAREST)) for patches in pixels]


@pytest.fixture(scope="session")
def middle(served_model, photos):
    """A threshold with which half of the photographs exit."""
    engine = Engine(served_model, float("inf"))
    return float(np.median([prediction.entropy for prediction in engine.classify(photos)]))


@pytest.fixture(scope="session")
def careful(served_model, middle, photos, tmp_path_factory):
    """A model folder, a photograph whose answer its setting careful withholds, and one whose answer it gives.

    That is so after whichever round they exit. The setting unknown withholds all answers, as out-of-distribution.
    """
    folder = save(served_model, tmp_path_factory.mktemp("careful") / "tiny")
    answers = [Engine(served_model, threshold).classify(photos) for threshold in (0.0, float("inf"))]
    entropies = np.array([[answer.entropy for answer in one_round] for one_round in answers])
    withheld, given = entropies.min(axis=0).argmax(), entropies.max(axis=0).argmin()
    limit = (entropies.min(axis=0).max() + entropies.max(axis=0).min()) / 2
    assert entropies[:, withheld].min() > limit > entropies[:, given].max()
    common = {"rule": "near-lossless", "threshold": middle}
    (folder / "settings").mkdir()
    setting_of(served_model, abstain=limit, **common).save(folder / "settings" / "careful.json")
    unknown = OODRule(score="energy", limit=1e6, share=0.05)
    setting_of(served_model, ood=unknown, **common).save(folder / "settings" / "unknown.json")
    return folder, photos[withheld], photos[given]


def encode(image, format="JPEG", **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


class Running:
    """A server that runs, its service and a client."""

    def __init__(self, server, service):
        self.server, self.service = server, service
        self.address = server.address
        self.client = httpx.Client(base_url=self.address, timeout=PATIENCE)

    def classify(self, content, name="image.jpg", **options):
        return self.client.post("/classify", files={"image": (name, content)}, **options)

    def infer(self, body, **options):
        return self.client.post("/v2/models/tiny/infer", json=body, **options)

    def metric(self, line):
        """The value behind these characters of a line."""
        (row,) = [row for row in self.client.get("/metrics").text.splitlines() if row.startswith(line + " ")]
        return float(row.rpartition(" ")[2])


@contextmanager
def in_thread(server, listening):
    """Runs a uvicorn server in a thread."""
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


@contextmanager
def running(model, threshold, *, limits=None, token=None, audit=None, page=None, hosts=None, **options):
    with Engine(model, threshold, workers=2, **options) as engine:
        metrics = ServerMetrics(len(engine.gmacs))
        engine.observe(metrics)
        service = Service(engine, "tiny", metrics, limits=limits or Limits(deadline=PATIENCE), audit=audit)
        app = make_app(service, token=token, page=page, hosts=hosts, reset_audit=service.reset_audit)
        server = Server(app, service, open_socket("127.0.0.1", 0))
        with closing(service), in_thread(server, server.listening):
            handle = Running(server, service)
            with handle.client:
                yield handle


@pytest.fixture(scope="module")
def server(served_model, middle):
    limits = Limits(body=2_000_000, images=32, receive=1.0)
    with running(served_model, middle, limits=limits, top_k=3) as handle:
        yield handle
