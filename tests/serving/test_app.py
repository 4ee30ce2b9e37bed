import asyncio
import base64
import json
import math
import socket
import threading
from contextlib import contextmanager

import httpx
import pytest

from benchmarks import hostile
from progresvit import Engine
from progresvit.serving.audit import Audit
from progresvit.serving.service import Limits
from tests.serving.conftest import running
from tests.waiting import PATIENCE, wait_until


def tensor(*contents):
    data = [base64.b64encode(content).decode() for content in contents]
    return {"name": "image", "datatype": "BYTES", "shape": [len(data)], "data": data}


def outputs(response):
    return {output["name"]: output["data"] for output in response.json()["outputs"]}


def test_health_and_metadata_follow_the_protocol(server):
    assert server.client.get("/v2/health/live").status_code == 200
    assert server.client.get("/v2/health/ready").json() == {"ready": True}
    assert server.client.get("/v2").json()["name"] == "progresvit"
    for address in ("/v2/models/tiny", "/v2/models/tiny/versions/1"):
        metadata = server.client.get(address).json()
        assert metadata["name"] == "tiny"
        assert metadata["versions"] == ["1"]
        assert [part["name"] for part in metadata["inputs"]] == ["image"]
        assert {"label", "probs", "exit_round", "entropy"} <= {part["name"] for part in metadata["outputs"]}
        assert server.client.get(f"{address}/ready").status_code == 200
    assert "/v2/models/{model}/infer" in server.client.get("/openapi.json").json()["paths"]


def test_answers_equal_those_of_the_engine(server, served_model, photos, middle):
    expected = Engine(served_model, middle).classify(photos[:32])
    response = server.infer({"id": "some", "inputs": [tensor(*photos[:32])]})
    assert response.status_code == 200
    assert response.json()["id"] == "some"
    assert response.json()["model_name"] == "tiny"
    answer = outputs(response)
    assert answer["label"] == [prediction.label for prediction in expected]
    assert answer["exit_round"] == [prediction.exit_round for prediction in expected]
    assert answer["probs"] == pytest.approx([prediction.probability for prediction in expected], abs=1e-5)
    assert answer["entropy"] == pytest.approx([prediction.entropy for prediction in expected], abs=1e-5)
    assert "error" not in answer
    assert {1, 2} == set(answer["exit_round"])
    single = server.classify(photos[0]).json()
    assert (single["label"], single["exit_round"]) == (expected[0].label, expected[0].exit_round)


def test_answers_are_equal_to_the_bit_for_equal_batches(server, served_model, photos, middle):
    engine = Engine(served_model, middle)
    for photo in photos:
        answer, (expected,) = server.classify(photo).json(), engine.classify([photo])
        assert (answer["label"], answer["exit_round"]) == (expected.label, expected.exit_round)
        assert (answer["probability"], answer["entropy"]) == (expected.probability, expected.entropy)


def test_only_requested_outputs_are_sent(server, photos):
    response = server.infer({"inputs": [tensor(photos[0])], "outputs": [{"name": "label"}, {"name": "entropy"}]})
    assert list(outputs(response)) == ["label", "entropy"]


def test_a_request_may_have_its_own_threshold(server, served_model, photos):
    for threshold, expected in ((0, 2), (100.0, 1)):
        response = server.infer({"inputs": [tensor(*photos[:8])], "parameters": {"threshold": threshold}})
        assert outputs(response)["exit_round"] == [expected] * 8
        assert server.classify(photos[0], params={"threshold": threshold}).json()["exit_round"] == expected
    last = Engine(served_model, 0.0).classify(photos[:8])
    response = server.infer({"inputs": [tensor(*photos[:8])], "parameters": {"threshold": 0}})
    assert outputs(response)["label"] == [prediction.label for prediction in last]


def test_one_bad_image_fails_alone(server, photos):
    response = server.infer({"inputs": [tensor(*photos[:5], photos[5][:200], b"%PDF-1.4", *photos[6:31])]})
    assert response.status_code == 200
    answer = outputs(response)
    assert [place for place, error in enumerate(answer["error"]) if error] == [5, 6]
    assert [place for place, number in enumerate(answer["exit_round"]) if number == 0] == [5, 6]


def test_metrics_count_what_happened(served_model, photos, middle):
    with running(served_model, middle) as server:
        exits = outputs(server.infer({"inputs": [tensor(*photos[:20])]}))["exit_round"]
        assert server.classify(b"%PDF-1.4").status_code == 415
        for number in (1, 2):
            assert server.metric(f'progresvit_images_total{{exit_round="{number}"}}') == exits.count(number)
        assert server.metric('progresvit_batch_size_sum{round="1"}') == 20
        assert server.metric('progresvit_batch_size_sum{round="2"}') == exits.count(2)
        assert server.metric('progresvit_queue_duration_seconds_count{round="1"}') == 20
        batches = server.metric('progresvit_batches_total{round="1"}')
        assert server.metric('progresvit_compute_duration_seconds_count{round="1"}') == batches
        assert server.metric('progresvit_compute_duration_seconds_sum{round="1"}') > 0
        assert server.metric('progresvit_requests_total{code="200"}') >= 1
        assert server.metric('progresvit_request_failures_total{reason="unsupported_media_type"}') == 1
        assert server.metric("progresvit_entropy_count") == 20
        assert server.metric("progresvit_pending_requests") == 1  # the one that asks


def test_a_token_protects_all_but_health(served_model, photos):
    with running(served_model, 1.0, token="secret") as server:
        assert server.client.get("/v2/health/ready").status_code == 200
        for value in ("", "Bearer wrong", "secret", "Bearer", "Bearer secret2"):
            headers = {"Authorization": value} if value else {}
            response = server.classify(photos[0], headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert server.client.get("/metrics", headers=headers).status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert server.classify(photos[0], headers=right).status_code == 200
        assert server.client.get("/v2/models/tiny", headers=right).status_code == 200
        assert server.client.get("/v2/models/tiny", headers={"Authorization": "bEARER secret"}).status_code == 200
        assert server.client.get("/openapi.json").status_code == 404


class Held:
    """Keeps round 2 of an engine from running until it is released."""

    def __init__(self, engine):
        self.engine, self.run, self.may_run, self.ran = engine, engine.rounds.run, threading.Event(), []

    def __enter__(self):
        def run(s, buffer, first, count):
            if s:
                self.may_run.wait(PATIENCE)
                self.ran.append(count)
            return self.run(s, buffer, first, count)

        self.engine.rounds.run = run
        return self

    def __exit__(self, *_):
        self.may_run.set()
        self.engine.rounds.run = self.run


@contextmanager
def posted(server, contents):
    """Requests that wait in threads of their own; the responses are in the list after the block."""
    responses = []
    threads = [
        threading.Thread(target=lambda content=content: responses.append(server.classify(content)))
        for content in contents
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.service._pending == len(threads))
    yield responses
    for thread in threads:
        thread.join()


def test_too_many_requests_are_refused_at_once_and_the_others_are_answered(served_model, photos):
    with running(served_model, 0.0, limits=Limits(pending=4)) as server, Held(server.service.engine) as held:
        with posted(server, photos[:4]) as responses:
            refused = server.classify(photos[0])  # while the others wait
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert server.client.get("/v2/health/ready").status_code == 200
            held.may_run.set()
        assert [response.status_code for response in responses] == [200] * 4


def test_a_request_that_takes_too_long_gets_504_and_is_cancelled(served_model, photos):
    with running(served_model, 0.0) as server, Held(server.service.engine) as held:
        assert server.classify(photos[0][:200]).status_code == 422  # a process that decodes has started
        assert server.classify(photos[0], params={"timeout": 2}).status_code == 504
        wait_until(lambda: not server.service.engine.counts.pending)  # while the round still runs
        held.may_run.set()  # the thread of the engine counts between two rounds
        wait_until(lambda: server.service.engine.counts.cancelled == 1)


def test_images_of_a_client_that_disconnects_do_not_start_round_2(served_model, photos):
    with running(served_model, 0.0) as server:
        engine = server.service.engine
        with Held(engine) as held, posted(server, photos[:1]) as first:  # it occupies round 2
            wait_until(lambda: engine.counts.images[0] == 1)

            async def leave():
                async with httpx.AsyncClient(base_url=server.address) as client:
                    tasks = [
                        asyncio.ensure_future(client.post("/classify", files={"image": photos[number]}))
                        for number in range(1, 9)
                    ]
                    while engine.counts.pending < 9:
                        await asyncio.sleep(0.01)
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)

            asyncio.run(leave())
            wait_until(lambda: server.service._pending == 1)
            held.may_run.set()
        assert first[0].status_code == 200
        assert sum(held.ran) == 1
        assert engine.counts.cancelled == 8
        assert [server.classify(photo).status_code for photo in photos[:8]] == [200] * 8  # the next ones


def test_exits_do_not_wait_for_images_that_continue(served_model, photos, middle):
    engine = Engine(served_model, middle)
    exits = [prediction.exit_round for prediction in engine.classify(photos)]
    late, early = photos[exits.index(2)], photos[exits.index(1)]
    with running(served_model, middle) as server, Held(server.service.engine) as held:
        response = server.infer({"inputs": [tensor(early)]})
        assert outputs(response)["exit_round"] == [1]
        with posted(server, [late]) as responses:
            wait_until(lambda: server.service.engine.counts.images[0] == 2)
            assert not responses
            held.may_run.set()
        assert responses[0].json()["exit_round"] == 2


def test_a_draining_server_is_not_ready_and_answers_what_it_accepted(served_model, photos):
    with running(served_model, 0.0) as server, Held(server.service.engine) as held:
        with posted(server, photos[:4]) as responses:
            server.server._loop.call_soon_threadsafe(server.server._drain)  # as on SIGTERM
            wait_until(lambda: server.service.is_draining)
            assert server.client.get("/v2/health/ready").status_code == 503
            assert server.client.get("/v2/health/live").status_code == 200
            assert server.classify(photos[5]).status_code == 503
            held.may_run.set()
        assert [response.status_code for response in responses] == [200] * 4
        wait_until(lambda: server.server.should_exit)


def test_exits_are_audited_and_every_round_runs_while_there_is_an_alarm(served_model, photos):
    audit = Audit(limit=0.05, rate=1.0, seed=0)
    with running(served_model, float("inf"), audit=audit) as server:
        last = Engine(served_model, 0.0).classify(photos)
        first = Engine(served_model, float("inf")).classify(photos)
        assert sum(a.index != b.index for a, b in zip(first, last)) > 8  # else there is no alarm
        for _ in range(150):  # copies of an image count once
            server.classify(photos[0])
        wait_until(lambda: audit.images == 1)
        assert not audit.alarm
        for photo in photos:
            if server.classify(photo).json()["exit_round"] == 2:
                break
        assert audit.alarm
        wait_until(lambda: not server.service._audits)
        assert audit.disagreements >= 2
        assert server.metric("progresvit_audit_alarm") == 1
        assert server.metric("progresvit_audit_disagreements_total") == audit.disagreements
        assert server.metric('progresvit_audit_bound{side="lower"}') > 0.05
        assert server.classify(photos[0]).json()["label"] == last[0].label
        for photo in photos:  # during an alarm the other images are audited too
            server.classify(photo)
        wait_until(lambda: audit.images == len(photos))
        assert audit.disagreements == sum(a.index != b.index for a, b in zip(first, last))
        for _ in range(5000):
            audit.record(False)
        assert not audit.alarm
        assert server.classify(photos[0]).json()["exit_round"] == 1


def test_only_who_has_the_token_ends_an_alarm(served_model, photos):
    audit = Audit(limit=0.05, rate=1.0, seed=0)
    with running(served_model, float("inf"), audit=audit, token="secret") as server:
        for _ in range(50):
            audit.record(True)
        right = {"Authorization": "Bearer secret"}
        assert server.classify(photos[0], headers=right).json()["exit_round"] == 2
        assert server.client.post("/audit/reset").status_code == 401
        assert audit.alarm
        assert server.client.post("/audit/reset", headers=right).json() == {"reset": True}
        assert server.classify(photos[0], headers=right).json()["exit_round"] == 1
        (line,) = [
            row
            for row in server.client.get("/metrics", headers=right).text.splitlines()
            if row.startswith("progresvit_audit_alarm ")
        ]
        assert line.endswith(" 0.0")
    with running(served_model, 1.0, audit=audit) as server:
        assert server.client.post("/audit/reset").status_code == 404


def test_what_tritons_client_sends_by_itself_is_no_error(server, photos):
    body = {**hostile.infer([photos[0]]), "parameters": {"binary_data_output": True}}
    assert server.infer(body).json() == server.infer(hostile.infer([photos[0]])).json()


def with_tensor(**changes):
    return {"inputs": [{**tensor(b"x"), **changes}]}


WRONG = {
    "the body is empty.": [b""],
    "the body is not JSON.": [
        b"{", b"[" * 9_000, {**with_tensor(), "id": "\ud800"},  # half of a character
    ],
    "the body has too many values.": [b"[" * 100_000],
    "the body must be a JSON object.": [[], b"3"],
    "inputs must be a list with one tensor, image.": [
        {}, b'{"inputs": NaN}', {"inputs": []}, {"inputs": [tensor(b"x"), tensor(b"x")]},
    ],
    "the name of the input must be image.": [with_tensor(name="other")],
    "the datatype of image must be BYTES.": [with_tensor(datatype="FP32")],
    "the shape of image must be [N], where N is the length of data.": [
        with_tensor(shape=[2]), with_tensor(shape=[-1]), with_tensor(shape=[2**63]), with_tensor(shape=[1, 1]),
    ],
    "data must be a list of image files in base64.": [
        with_tensor(data=[]), with_tensor(data=[1]), with_tensor(data="abc"),
        with_tensor(data=["file:///etc/passwd"]), with_tensor(data=["http://127.0.0.1/image.jpg"]),
    ],
    "threshold must be a number of at least 0.": [
        {**with_tensor(), "parameters": {"threshold": wrong}} for wrong in (-1, "low", math.nan)
    ],
    "timeout must be a number above 0.": [{**with_tensor(), "parameters": {"timeout": 0}}],
    "parameters must be a JSON object.": [{**with_tensor(), "parameters": 3}],
    "unknown parameter; the parameters are id, inputs, outputs, parameters.": [
        {**with_tensor(), "paramters": {"threshold": 0.5}},
    ],
    "unknown parameter; the parameters are threshold, timeout.": [
        {**with_tensor(), "parameters": {"treshold": 0.5}}, {**with_tensor(), "parameters": {"top_k": 1}},
    ],
    "outputs must be among abstained, entropy, error, exit_round, label, probs.": [
        {**with_tensor(), "outputs": wrong} for wrong in ([{"name": "logits"}], [{"name": []}], "label")
    ],
    "id must be a string.": [{**with_tensor(), "id": 3}, b'\xef\xbb\xbf{"id": 3, "inputs": []}'],
}  # fmt: skip


@pytest.mark.parametrize(("message", "bodies"), WRONG.items(), ids=WRONG)
def test_the_wrong_field_of_a_request_is_named(server, message, bodies):
    for body in bodies:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = server.client.post("/v2/models/tiny/infer", content=content)
        assert (response.status_code, response.json()) == (400, {"error": message}), body


def test_a_request_of_too_many_images_is_refused(server, photos):
    assert server.infer({"inputs": [tensor(*[photos[0]] * 33)]}).status_code == 422


@pytest.mark.parametrize("name", ["other", "..%2F", "%252e%252e", "tiny%00", "TINY"])
def test_other_models_are_not_found(server, photos, name):
    assert server.client.post(f"/v2/models/{name}/infer", json={"inputs": [tensor(photos[0])]}).status_code == 404
    assert server.client.get(f"/v2/models/{name}").status_code == 404
    assert server.client.get("/v2/models/tiny/versions/2").status_code == 404


def test_images_of_a_request_that_is_refused_in_part_are_cancelled(served_model, photos):
    with running(served_model, 0.0, pending=3) as server, Held(server.service.engine) as held:
        assert server.infer({"inputs": [tensor(*photos[:5])]}).status_code == 429
        wait_until(lambda: not server.service.engine.counts.pending)  # while the round still runs
        held.may_run.set()  # the thread of the engine counts between two rounds
        wait_until(lambda: server.service.engine.counts.cancelled == 3)


def test_a_request_whose_body_still_arrives_is_answered_before_the_end(served_model, photos):
    with running(served_model, 0.0) as server:
        body = json.dumps({"inputs": [tensor(photos[0])]}).encode()
        with socket.create_connection(server.server.listening.getsockname(), timeout=PATIENCE) as connection:
            connection.sendall(
                b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:50]
            )
            wait_until(lambda: server.service.intake.requests)
            server.server._loop.call_soon_threadsafe(server.server._drain)
            wait_until(lambda: server.service.is_draining)
            assert server.client.get("/v2/health/ready").status_code == 503
            assert not server.server.should_exit
            connection.sendall(body[50:])
            assert connection.recv(65536).split()[1] == b"200"
