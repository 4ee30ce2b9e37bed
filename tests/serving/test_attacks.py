"""Attacks that put a careless server out of service: each is refused or bounded, and other clients are answered."""

import gc
import http.client
import json
import os
import random
import signal
import socket
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
from fastapi import HTTPException
from fastapi.testclient import TestClient
from PIL import Image
from starlette.datastructures import Headers

from benchmarks import hostile
from progresvit import Engine
from progresvit.data import isolated
from progresvit.serving.front import app, body
from progresvit.serving.front.body import read_upload
from progresvit.serving.metrics import ServerMetrics
from progresvit.serving.service import Limits, Service
from progresvit.serving.start import MOST_PIXELS, make_server
from tests.serving.conftest import encode, running
from tests.waiting import PATIENCE, wait_until

INFER = "/v2/models/tiny/infer"


@pytest.fixture(scope="module")
def server(served_model):
    with running(served_model, 1.0, max_pixels=1_000_000) as handle:
        yield handle


@contextmanager
def stopped(server, *, slow=False):
    """The processes that decode are stopped: their images wait until the end of the block."""
    decoder = server.service.decoder
    lane = decoder._slow if slow else decoder._quick
    children = [child.process.pid for child in lane._children]
    assert children
    for child in children:
        os.kill(child, signal.SIGSTOP)
    try:
        yield
    finally:
        for child in children:
            with suppress(ProcessLookupError):  # it was ended
                os.kill(child, signal.SIGCONT)


@contextmanager
def sent(server, contents, **parameters):
    """Requests in threads of their own; the responses are in the list after the block."""
    responses = []
    threads = [
        threading.Thread(target=lambda content=content: responses.append(server.classify(content, params=parameters)))
        for content in contents
    ]
    for thread in threads:
        thread.start()
    yield responses
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    "content",
    [
        hostile.disguised_jpeg(20_000, 20_000),
        hostile.jpeg(5_000, 5_000, first=1),
        hostile.jpeg(900, 900, frame=hostile.PROGRESSIVE, scans=9_999),
        hostile.webp(1_500, 1_500),
        b"\xff\xd8\xff" + bytes(1_000_000),
    ],
    ids=["a disguised JPEG", "scans of one component", "a bomb of scans", "a WebP of one colour", "no segment"],
)
def test_images_that_cost_much_more_than_they_weigh_are_refused(server, photos, content):
    response = server.classify(content)
    assert (response.status_code, response.json()) == (
        422,
        {"error": "the image cannot be opened: damaged or too large."},
    )
    assert server.classify(photos[0]).status_code == 200


def test_the_server_allows_25_megapixels():
    server = make_server("nettewoof-tiny", port=0)
    try:
        assert server.service.engine.opener.plan.max_pixels == MOST_PIXELS == 25_000_000
        assert server.service.decoder.most_pixels == MOST_PIXELS
    finally:
        server.service.close()
        server.service.engine.close()
        server.listening.close()


def test_slow_images_do_not_hold_up_others_and_are_bounded(served_model, photos, monkeypatch):
    monkeypatch.setattr(isolated, "QUICK_PIXELS", 100_000)
    large = encode(Image.new("RGB", (900, 900)), "PNG")
    with running(served_model, 1.0, max_pixels=1_000_000) as server:
        assert server.classify(large).status_code == 200  # its process has started
        with stopped(server, slow=True), sent(server, [large] * 4, timeout=PATIENCE) as responses:
            wait_until(lambda: server.service._slow == 4)
            refused = server.classify(large)
            assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
            assert [server.classify(photo).status_code for photo in photos[:8]] == [200] * 8
            (child,) = server.service.decoder._slow._children
            os.kill(child.process.pid, signal.SIGCONT)
        assert [response.status_code for response in responses] == [200] * 4
        wait_until(lambda: not server.service.intake.slow_pixels)
        many = server.infer(hostile.infer([large] * 8))  # in one request, when it is alone
        assert (server.service._later, server.service._slow) == (0, 0)
        assert (many.status_code, "error" in {output["name"] for output in many.json()["outputs"]}) == (200, False)


def test_memory_for_fewer_than_four_requests_is_refused(served_model):
    with Engine(served_model, 1.0) as engine, pytest.raises(ValueError, match="at least four times body, 64000000"):
        Service(engine, "tiny", ServerMetrics(2), limits=Limits(memory=10_000_000))
    with running(served_model, 1.0, limits=Limits(body=200_000_000)) as server:
        assert server.service.intake.memory == 800_000_000


def test_a_request_of_many_images_leaves_room_for_others(served_model, photos):
    with running(served_model, 1.0, limits=Limits(pending=8)) as server:
        responses = []
        with stopped(server):
            many = threading.Thread(target=lambda: responses.append(server.infer(hostile.infer(photos[:32]))))
            many.start()
            wait_until(lambda: server.service._pending == 5)
            with sent(server, photos[:3]) as others:
                wait_until(lambda: server.service._pending == 8)
                assert server.classify(photos[0]).status_code == 429
                for child in server.service.decoder._quick._children:
                    os.kill(child.process.pid, signal.SIGCONT)
        many.join()
        assert [response.status_code for response in others] == [200] * 3
        (label,) = [output["data"] for output in responses[0].json()["outputs"] if output["name"] == "label"]
        assert len(label) == 32
        assert "error" not in {output["name"] for output in responses[0].json()["outputs"]}
        assert not server.service._turns
        assert server.service._pending == 0


def test_a_queue_of_one_image_answers_a_request_of_many(served_model, photos):
    with running(served_model, 1.0, limits=Limits(pending=1)) as server:
        outputs = {output["name"] for output in server.infer(hostile.infer(photos[:3])).json()["outputs"]}
        assert "label" in outputs
        assert "error" not in outputs


def test_requests_of_single_images_leave_room_for_requests_of_many(served_model, photos):
    with running(served_model, 1.0, limits=Limits(pending=8)) as server, ThreadPoolExecutor(1) as pool:
        with stopped(server), sent(server, photos[:4]):
            wait_until(lambda: server.service._pending == 4)
            many = pool.submit(server.infer, hostile.infer(photos[4:7]))
            wait_until(lambda: server.service._pending == 7)
            for child in server.service.decoder._quick._children:
                os.kill(child.process.pid, signal.SIGCONT)
        assert many.result().status_code == 200
        assert server.service._later == 0


def test_turns_of_a_request_that_is_given_up_go_to_others(served_model, photos):
    with running(served_model, 1.0, limits=Limits(pending=4)) as server:
        with stopped(server), ThreadPoolExecutor(2) as pool:
            given_up = pool.submit(server.infer, {**hostile.infer(photos[:8]), "parameters": {"timeout": 1}})
            wait_until(lambda: server.service._pending == 3)
            patient = pool.submit(server.infer, hostile.infer(photos[8:16]))
            assert given_up.result().status_code == 504
            for child in server.service.decoder._quick._children:
                os.kill(child.process.pid, signal.SIGCONT)
            assert patient.result().status_code == 200
        assert server.service._pending == 0


def test_requests_are_refused_when_too_many_bytes_are_held(served_model, photos):
    with running(served_model, 1.0, limits=Limits(body=1_000_000, memory=4_000_000)) as server:
        large = photos[0] + bytes(900_000)
        with stopped(server):
            with sent(server, [large] * 2) as responses:
                wait_until(lambda: server.service.intake.held > 1_800_000)
                with sent(server, [large] * 2) as more:  # a third has room beside itself, and a fourth has not
                    wait_until(lambda: more)
                    assert more[0].status_code == 429
                    small = threading.Thread(target=server.classify, args=(photos[1],))
                    small.start()
                    wait_until(lambda: server.service._pending == 4)  # a small one has room
                    for child in server.service.decoder._quick._children:
                        os.kill(child.process.pid, signal.SIGCONT)
            small.join()
        assert [response.status_code for response in (*responses, *more)].count(200) == 3
        wait_until(lambda: not server.service.intake.held)


def test_an_image_that_was_given_up_is_counted_until_its_process_is_done(served_model, photos):
    with running(served_model, 1.0) as server:
        content = photos[0] + bytes(1_000_000)
        assert server.classify(photos[0]).status_code == 200
        with stopped(server):
            with sent(server, [content] * 4, timeout=1) as responses:
                pass
            assert [response.status_code for response in responses] == [504] * 4
            # two are in processes; the others had not begun and are gone
            wait_until(lambda: server.service.intake.held == 2 * len(content))
        wait_until(lambda: not server.service.intake.held)
        assert server.classify(photos[0]).status_code == 200


def post(server, address, content, headers):
    """The status of an answer; nothing of the request lives on in the client."""
    with closing(http.client.HTTPConnection(*server.server.listening.getsockname(), timeout=PATIENCE)) as connection:
        connection.request("POST", address, content, headers)
        return connection.getresponse().status


def test_what_a_refused_request_sent_is_free_at_once(served_model, photos):
    """Not when the garbage collector finds a cycle of an error, its frames and its task."""
    with running(served_model, 1.0) as server:
        content = photos[0] + bytes(8_000_000)
        upload = hostile.multipart(content)
        infer = json.dumps({**hostile.infer([content]), "parameters": {"timeout": 0.5}}), {}
        assert server.classify(photos[0]).status_code == 200
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            with stopped(server):
                for _ in range(3):
                    assert post(server, "/classify?timeout=0.5", *upload) == 504
                assert post(server, INFER, *infer) == 504
            wait_until(lambda: not server.service.intake.held)
            wait_until(lambda: tracemalloc.get_traced_memory()[0] < 4_000_000)
        finally:
            tracemalloc.stop()
            gc.enable()


def test_a_server_that_ends_does_not_wait_for_a_decoder(served_model):
    with running(served_model, 1.0, max_pixels=1_000_000) as server, stopped(server):
        future = server.service.decoder.submit(encode(Image.new("RGB", (90, 90)), "PNG"))
        wait_until(future.running)
        children = list(server.service.decoder._quick._children)
        server.service.close()
        assert all(child.process.poll() is not None for child in children)
        assert future.result().error is not None
        server.service.decoder._quick._children.clear()


# Bodies


def open_slowly(server, count):
    """Connections that announce a body and do not send it."""
    stack = ExitStack()
    head = b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\nx"
    for _ in range(count):
        connection = stack.enter_context(
            socket.create_connection(server.server.listening.getsockname(), timeout=PATIENCE)
        )
        connection.sendall(head)
    return stack


def test_slow_bodies_do_not_keep_others_out(served_model, photos, monkeypatch):
    monkeypatch.setattr(body, "GRACE", 60.0)
    with running(served_model, 1.0, limits=Limits(receive=60)) as server, open_slowly(server, 150):
        wait_until(lambda: server.service.intake.requests == 150)
        assert server.classify(photos[0]).status_code == 200
        monkeypatch.setattr(body, "GRACE", 0.05)
        with open_slowly(server, 1):
            wait_until(lambda: 'progresvit_requests_total{code="408"}' in server.client.get("/metrics").text)


def test_a_client_must_keep_up_the_least_rate(served_model, monkeypatch):
    monkeypatch.setattr(body, "GRACE", 0.3)
    with (
        running(served_model, 1.0, limits=Limits(rate=100_000.0, receive=60)) as server,
        socket.create_connection(server.server.listening.getsockname(), timeout=PATIENCE) as connection,
    ):
        connection.sendall(b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        connection.sendall(bytes(50_000))  # worth half a second
        assert connection.recv(4096).split()[1] == b"408"


BODIES = {
    "many values": (hostile.many_values(3_000_000), "the body has too many values."),
    "lists in lists": (hostile.nested(1_000_000), "the body has too many values."),
    "objects in objects": (b'{"":' * 1_000_000, "the body has too many values."),
    "a deep list": (hostile.nested(4_000), "the body is not JSON."),
}


@pytest.mark.parametrize("name", BODIES)
def test_json_that_takes_long_to_parse_is_refused(server, name):
    content, message = BODIES[name]
    zipped, headers = hostile.zipped(content)
    assert len(zipped) < 20_000
    response = server.client.post(INFER, content=zipped, headers=headers)
    assert (response.status_code, response.json()) == (400, {"error": message})


def test_the_loop_goes_on_while_json_is_parsed(server, photos, monkeypatch):
    parsing, release, original, was_released = threading.Event(), threading.Event(), app.parse_infer, []

    def parse(*arguments, **keywords):
        parsing.set()
        was_released.append(release.wait(PATIENCE))
        return original(*arguments, **keywords)

    monkeypatch.setattr(app, "parse_infer", parse)
    request = hostile.infer([photos[0]])
    thread = threading.Thread(target=server.infer, args=(request,))
    thread.start()
    try:
        assert parsing.wait(PATIENCE)
        assert server.client.get("/v2/health/live").status_code == 200
        assert server.classify(photos[0]).status_code == 200
    finally:
        release.set()
        thread.join()
    assert was_released == [True]  # the others did not wait for it


@pytest.mark.parametrize(
    "kind", ['multipart/form-data; boundary="' + ";" * 60_000, "boundary*=punycode''" + "b" * 60_000]
)
def test_a_long_header_is_refused_before_it_is_parsed(server, monkeypatch, kind):
    monkeypatch.setattr(body, "Message", lambda: pytest.fail("its parser takes seconds"))
    response = server.client.post("/classify", content=b"x", headers={"Content-Type": kind})
    assert (response.status_code, response.json()) == (400, {"error": "the form cannot be read."})


def form(*parts, boundary="x", end="--\r\n", before=b""):
    lines = [f"--{boundary}\r\n{head}\r\n\r\n".encode() + content + b"\r\n" for head, content in parts]
    return before + b"".join(lines) + f"--{boundary}{end}".encode()


FILE = 'Content-Disposition: form-data; name="image"; filename="a.jpg"'


@pytest.mark.parametrize(
    ("kind", "content", "expected"),
    [
        ("boundary=x", form((FILE, b"some\r\n--bytes")), b"some\r\n--bytes"),
        ('boundary="x"', form((FILE, b"a")), b"a"),
        ("charset=utf-8; boundary=x", form((FILE + "\r\nContent-Type: image/jpeg", b"a")), b"a"),
        ("boundary=x", form(('Content-Disposition: form-data; name="other"', b"b"), (FILE, b"a")), b"a"),
        ("boundary=x", form((FILE, b"")), b""),
        ("boundary=x", form((FILE, b"a"), before=b"a preamble\r\n", end="--"), b"a"),
        ("boundary=x", form((FILE.lower(), b"a")), b"a"),
        ("boundary=x", form(("content-disposition:form-data;filename=é;name=image", b"a")), b"a"),
        ("boundary=x", form(("Content-Disposition: form-data; name=image; filename*=idna''x", b"a")), "cannot be read"),
        ("boundary=x", form(("Content-Disposition: form-data; name*=utf-8''a%00b; filename=a", b"a")), "no file"),
        (
            "boundary=x",
            form(("Content-Disposition: form-data; filename=a; name*=undefined''x", b"a")),
            "cannot be read",
        ),
        ("boundary*=idna''x", form((FILE, b"a")), "cannot be read"),
        ("boundary*" + "1" * 5_000 + "=x", form((FILE, b"a")), "cannot be read"),
        ("boundary=x", form((FILE, b"a"), end="\r\n"), "cannot be read"),
        ("boundary=x", form((FILE, b"a"), (FILE, b"b")), "cannot be read"),
        ("boundary=x", form(*[("a: b", b"")] * 9, (FILE, b"a")), "cannot be read"),
        ("boundary=x", form((FILE + "\r\na: " + "b" * 5_000, b"a")), "cannot be read"),
        ("boundary=x", b"--x\r\n" + FILE.encode() + b"\r\n--x--", "cannot be read"),
        ("boundary=y", form((FILE, b"a")), "cannot be read"),
        ("boundary=", form((FILE, b"a")), "cannot be read"),
        ("", form((FILE, b"a")), "cannot be read"),
        ("boundary=x", form(('Content-Disposition: form-data; name="image"', b"a")), "no file image"),
        ("boundary=x", b"--x" * 1_000_000, "no file image"),
        ("boundary=x", b"\r\n--x" * 1_000_000, "cannot be read"),
    ],
)
def test_forms_are_read_as_the_standard_says(kind, content, expected):
    headers = Headers({"content-type": f"multipart/form-data; {kind}"})
    if isinstance(expected, bytes):
        assert read_upload(headers, bytearray(content), "image") == expected
    else:
        with pytest.raises(HTTPException) as error:
            read_upload(headers, bytearray(content), "image")
        assert (error.value.status_code, expected in error.value.detail) == (400, True)


# Who may call


def test_other_names_of_the_host_are_refused(served_model, photos):
    """Else a page of another site could have its own name point to this machine, and use the server."""
    with running(served_model, 1.0, hosts=("localhost", "127.0.0.1", "::1")) as server:
        for host, status in {
            "localhost": 200, "LOCALHOST:8000": 200, "127.0.0.1:1": 200, "[::1]:8000": 200, "[::1]": 200,
            "evil.example": 400, "evil.example:8000": 400, "localhost.evil.example": 400, "[::2]": 400, "": 400,
        }.items():  # fmt: skip
            response = server.classify(photos[0], headers={"Host": host})
            assert response.status_code == status, host
            assert server.client.get("/v2/health/ready", headers={"Host": host}).status_code == 200
        for origin, status in {
            "http://localhost:8000": 200, "http://[::1]": 200, "https://evil.example": 400, "null": 400,
        }.items():  # fmt: skip
            assert server.classify(photos[0], headers={"Origin": origin}).status_code == status, origin
        response = server.classify(photos[0], headers={"Host": "evil.example"})
    assert "hosts" in response.json()["error"]


def test_a_server_for_this_machine_has_its_names():
    for arguments, host, status in (
        ({}, "localhost", 200),
        ({}, "other", 400),
        ({"hosts": ["other"]}, "other", 200),
        ({"host": "0.0.0.0", "token": "a"}, "other", 401),
        ({"host": "0.0.0.0", "allow_anyone": True}, "other", 200),
    ):
        server = make_server("nettewoof-tiny", port=0, **arguments)
        try:
            client = TestClient(server.config.app, base_url=f"http://{host}")
            assert client.get("/v2").status_code == status
        finally:
            server.service.close()
            server.service.engine.close()
            server.listening.close()


def test_other_machines_need_a_token_unless_anyone_may_call():
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(ValueError, match="anyone could use the server: pass a token"):
            make_server("nettewoof-tiny", host=host, port=0)


def test_the_description_has_every_answer(server):
    paths = server.client.get("/openapi.json").json()["paths"]
    every = {"200", "400", "401", "404", "408", "413", "415", "422", "429", "500", "503", "504"}
    for address in ("/classify", "/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"):
        assert set(paths[address]["post"]["responses"]) == every
    assert set(paths["/v2/health/ready"]["get"]["responses"]) >= {"200", "503"}


# Damaged images


def damaged(count, seed=0):
    """Images of all supported formats with bytes changed, cut, repeated or exchanged between files."""
    chance = random.Random(seed)
    pixels = Image.effect_noise((70, 50), 60).convert("RGB")
    whole = [
        encode(pixels.convert(mode), kind, **options)
        for kind, mode, options in (
            ("JPEG", "RGB", {}), ("JPEG", "RGB", {"progressive": True}), ("JPEG", "L", {}), ("JPEG", "CMYK", {}),
            ("PNG", "RGB", {}), ("PNG", "P", {}), ("PNG", "RGBA", {}), ("GIF", "P", {}), ("WEBP", "RGB", {}),
            ("WEBP", "RGBA", {"lossless": True}), ("BMP", "RGB", {}), ("TIFF", "RGB", {"compression": "tiff_lzw"}),
            ("TIFF", "RGB", {"compression": "jpeg"}), ("TIFF", "L", {}),
        )
    ]  # fmt: skip
    for _ in range(count):
        content = bytearray(chance.choice(whole))
        for _ in range(chance.choice((1, 1, 2, 8, 64))):
            place = chance.randrange(len(content)) if chance.random() < 0.5 else chance.randrange(min(64, len(content)))
            kind = chance.randrange(4)
            if kind == 0:
                content[place] = chance.randrange(256)
            elif kind == 1:
                content[place] ^= 1 << chance.randrange(8)
            elif kind == 2:
                length = chance.randrange(1, 40)
                content[place:place] = content[place : place + length]
            else:
                other = chance.choice(whole)
                start = chance.randrange(len(other))
                content[place : place + 20] = other[start : start + 20]
        if chance.random() < 0.2:
            del content[chance.randrange(10, max(11, len(content))) :]
        yield bytes(content)


@pytest.mark.long
def test_two_thousand_damaged_images_harm_nothing(served_model, photos):
    contents = list(damaged(2000))
    assert len(set(contents)) > 1900
    with running(served_model, 1.0, max_pixels=25_000_000) as server, Engine(served_model, 1.0) as engine:
        expected = [engine.classify([photo])[0] for photo in photos]
        statuses = {}
        for number, content in enumerate(contents):
            status = server.classify(content).status_code
            statuses[status] = statuses.get(status, 0) + 1
            if number % 50 == 0:
                neighbour = server.classify(photos[number // 50 % len(photos)])
                assert neighbour.status_code == 200
                answer = expected[number // 50 % len(photos)]
                assert (neighbour.json()["index"], neighbour.json()["entropy"]) == (answer.index, answer.entropy)
        assert set(statuses) <= {200, 415, 422}, statuses
        assert min(statuses.get(200, 0), statuses.get(422, 0)) > 100, statuses
        for first in range(0, len(contents), 100):
            group = contents[first : first + 100]
            mixed = [image for pair in zip(group, (photos * 3)[:100]) for image in pair]
            predictions = engine.classify(mixed)
            assert all(prediction.error or prediction.label for prediction in predictions)
            neighbours = [prediction.index for prediction in predictions[1::2]]
            assert neighbours == [answer.index for answer in (expected * 3)[:100]]
