"""Several models in one server: each has its addresses, its audit and its metrics, and all share the limits."""

import os
import signal

import pytest
import torch

from progresvit import Engine
from progresvit.model import ProgResViT
from progresvit.model.saving import save
from progresvit.serving.service import Limits
from progresvit.serving.start import make_server
from tests.commands import refused
from tests.factories import tiny_config
from tests.serving.test_app import outputs, tensor
from tests.serving.test_attacks import sent, stopped
from tests.serving.test_withheld import served
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def folders(served_model, randomize, tmp_path_factory):
    """A model of 12 classes, and one of 4 classes with larger images."""
    torch.manual_seed(1)
    other = randomize(ProgResViT(tiny_config((24, 48), num_classes=4, labels=tuple("abcd"))))
    parent = tmp_path_factory.mktemp("models")
    return save(served_model, parent / "first"), save(other, parent / "second")


@pytest.fixture(scope="module")
def server(folders):
    with served(*folders, threshold=0.5, limits=Limits(body=1_000_000, memory=4_000_000)) as handle:
        yield handle


def test_each_model_answers_at_its_addresses(server, folders, photos):
    assert server.client.get("/v2/models").json() == {"models": ["first", "second"]}
    for folder in folders:
        name = folder.name
        (expected,) = Engine(folder, 0.5).classify([photos[0]])
        assert server.client.get(f"/v2/models/{name}").json()["name"] == name
        assert server.client.get(f"/v2/models/{name}/ready").json() == {"name": name, "ready": True}
        response = server.client.post(f"/v2/models/{name}/infer", json={"inputs": [tensor(photos[0])]})
        assert (response.json()["model_name"], outputs(response)["label"]) == (name, [expected.label])
        answer = server.classify(photos[0], params={"model": name}).json()
        assert (answer["label"], answer["exit_round"]) == (expected.label, expected.exit_round)
    assert server.classify(photos[0]).json() == server.classify(photos[0], params={"model": "first"}).json()
    assert server.classify(photos[0], params={"model": "second", "top_k": 5}).json() == {
        "error": "top_k must be at most 4."  # its classes
    }
    for response in (
        server.classify(photos[0], params={"model": "third"}),
        server.client.post("/v2/models/third/infer", json={}),
    ):
        assert (response.status_code, response.json()) == (404, {"error": "there is no such model."})
    assert server.client.get("/page/model").json()["name"] == "first"


def test_metrics_have_the_model_and_requests_are_counted_together(folders, photos):
    with served(*folders, threshold=0.5) as server:
        for model in ("first", "second", "second"):
            server.classify(photos[0], params={"model": model, "threshold": 0})
        for model, count in (("first", 1), ("second", 2)):
            assert server.metric(f'progresvit_images_total{{exit_round="2",model="{model}"}}') == count
            assert server.metric(f'progresvit_batch_size_count{{model="{model}",round="1"}}') == count
        assert server.metric('progresvit_requests_total{code="200"}') >= 3
        assert server.metric("progresvit_pending_requests") == 1


def test_the_bound_of_bytes_and_the_processes_are_those_of_the_server(server, photos):
    first, second = server.server.services
    assert first.decoder is second.decoder
    assert first.queue_limit + second.queue_limit <= Limits.pending
    large = photos[0] + bytes(900_000)
    with stopped(server), sent(server, [large] * 2, model="first") as responses:
        wait_until(lambda: first.intake.held > 1_800_000)
        with sent(server, [large] * 2, model="second") as more:  # a third has room beside itself, a fourth has not
            wait_until(lambda: more)
            assert more[0].status_code == 429
            for child in server.service.decoder._quick._children:
                os.kill(child.process.pid, signal.SIGCONT)
    assert [response.status_code for response in (*responses, *more)].count(200) == 3
    wait_until(lambda: not first.intake.held)


def test_a_server_that_ends_answers_what_every_model_has_accepted(folders, photos):
    with served(*folders, threshold=0.5) as server:
        with stopped(server), sent(server, photos[:2], model="second") as responses:
            wait_until(lambda: server.server.services[1]._pending == 2)
            server.server._loop.call_soon_threadsafe(server.server._drain)
            wait_until(lambda: server.client.get("/v2/models/first/ready").status_code == 503)
            assert not server.server.should_exit
            for child in server.service.decoder._quick._children:
                os.kill(child.process.pid, signal.SIGCONT)
        assert [response.status_code for response in responses] == [200, 200]
        wait_until(lambda: server.server.should_exit)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nettewoof-tiny", "nettewoof-tiny"], "two models have the name 'nettewoof-tiny'; pass --name"),
        (["nettewoof-tiny", "imagenet-tiny", "--name", "a", "--name", "a"], "the name 'a'; pass --name"),
        (["nettewoof-tiny", "imagenet-tiny", "--name", "a"], "--name must be as many as models, 2, got 1"),
        (["nettewoof-tiny", "--name", "a/b"], "--name must be of letters, digits, dots, - and _, got 'a/b'"),
        (["nettewoof-tiny", "--name", ".."], "--name must be of letters, digits, dots, - and _, got '..'"),
        (["nettewoof-tiny", "imagenet-tiny", "--threshold", "budget-1.0"], "has no setting 'budget-1.0'"),
    ],
)
def test_names_and_settings_must_fit_every_model(words, message):
    refused(message, "serve", *words)


def test_more_classes_than_any_model_has_are_refused(folders):
    with pytest.raises(ValueError, match="top_k=1001 is more than the classes of any model"):
        make_server(list(folders), names=["a", "b"][: len(folders)], port=0, top_k=1001)


def test_a_list_needs_a_model():
    with pytest.raises(ValueError, match="a server needs a model"):
        make_server([], port=0)
