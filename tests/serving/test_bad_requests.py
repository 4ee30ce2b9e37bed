"""What clients send by mistake or on purpose: each request gets its answer, and the next one is served."""

import gzip
import pickle
import resource
import socket
import struct
import zlib
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from progresvit import Engine
from tests.serving.conftest import encode
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def _goes_on(server, photos):
    yield
    assert server.classify(photos[0]).status_code == 200


def png_chunk(kind, data, crc=None):
    return (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data) if crc is None else crc)
    )


def png(width, height, data=b"", *extra):
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [png_chunk(b"IHDR", header), *extra, png_chunk(b"IDAT", data), png_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def rows(width, height):
    return zlib.compress((b"\0" + b"\x80" * 3 * width) * height)


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
GIF_FRAMES = [Image.fromarray(np.full((8, 8), number % 256, np.uint8)) for number in range(500)]

REFUSED = {
    "empty": (b"", 415),
    "PDF": (b"%PDF-1.4\n" + b"x" * 100, 415),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', 415),
    "HTML": (b"<!doctype html><img src=http://127.0.0.1/>", 415),
    "EPS": (EPS, 415),
    "pickle": (pickle.dumps({"image": 1}), 415),
    "zip": (b"PK\x03\x04" + b"\0" * 100, 415),
    "an address": (b"http://127.0.0.1/image.jpg", 415),
    "a path": (b"file:///etc/passwd", 415),
    "truncated JPEG": (encode(Image.fromarray(noise(64, 64, 3)))[:900], 422),
    "header only": (encode(Image.fromarray(noise(64, 64, 3)))[:20], 422),
    "PNG with a bad CRC": (png(8, 8, rows(8, 8)).replace(b"IDAT", b"IDAt", 1), 422),
    "50,000 x 50,000": (png(50_000, 50_000, zlib.compress(b"\0" * 1000)), 422),
    "giant text": (png(8, 8, rows(8, 8), png_chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * 100_000_000))), 422),
}


@pytest.mark.parametrize("name", REFUSED)
def test_damaged_files_and_files_of_other_kinds_are_refused(server, name):
    content, status = REFUSED[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    response = server.classify(content)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    assert "Traceback" not in response.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


ACCEPTED = {
    "1 x 1": encode(Image.fromarray(noise(1, 1, 3))),
    "1 x 10,000": encode(Image.fromarray(noise(10_000, 1, 3)), "PNG"),
    "CMYK": encode(Image.fromarray(noise(32, 32, 4), "CMYK")),
    "16 bits": encode(Image.fromarray(noise(32, 32).astype(np.uint16) * 256), "PNG"),
    "alpha": encode(Image.fromarray(noise(32, 32, 4), "RGBA"), "PNG"),
    "WebP": encode(Image.fromarray(noise(32, 32, 3)), "WEBP"),
    "BMP": encode(Image.fromarray(noise(32, 32, 3)), "BMP"),
    "TIFF": encode(Image.fromarray(noise(32, 32, 3)), "TIFF"),
    "animated": encode(GIF_FRAMES[0], "GIF", save_all=True, append_images=GIF_FRAMES[1:]),
    "corrupt EXIF": encode(Image.fromarray(noise(32, 32, 3)), exif=b"Exif\0\0II*\0\xff\xff\xff\xff"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ACCEPTED)
def test_unusual_images_are_answered_as_by_the_engine(server, served_model, middle, name):
    (expected,) = Engine(served_model, middle).classify([ACCEPTED[name]])
    response = server.classify(ACCEPTED[name], name="wrong.pdf")
    assert response.status_code == 200, response.text
    assert response.json()["label"] == expected.label


def test_all_exif_orientations_give_the_same_answer(server):
    image = Image.fromarray(noise(6, 6, 3)).resize((48, 48), Image.Resampling.NEAREST)
    turned = {
        1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    answers = set()
    for orientation, turn in turned.items():
        stored = image if turn is None else image.transpose(turn)
        answers.add(server.classify(encode(stored, "PNG", exif=exif(orientation))).json()["label"])
    assert len(answers) == 1


FORM = "the body must be a multipart form with the file image."


@pytest.mark.parametrize(
    ("request_options", "message"),
    [
        ({}, FORM),
        ({"content": b"x"}, FORM),
        ({"files": {"other": b"x"}}, "the form has no file image."),
        ({"data": {"image": "text"}}, FORM),
        ({"files": {"other": (None, b"x")}, "data": {"image": "text"}}, "the form has no file image."),
        ({"content": b"", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}, "the form cannot be read."),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, "the form cannot be read."),
        ({"files": [("image", b"x"), ("image", b"y")]}, "the form cannot be read."),
        (
            {"content": b"x", "headers": {"Content-Type": f"multipart/form-data; boundary={'x' * 71}"}},
            "the boundary of the form is too long.",
        ),
    ],
)
def test_a_form_without_the_file_is_refused(server, request_options, message):
    response = server.client.post("/classify", **request_options)
    assert (response.status_code, response.json()["error"][: len(message)]) == (400, message)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"threshold": "nan"}, "threshold must be a number of at least 0."),
        ({"threshold": "-1"}, "threshold must be a number of at least 0."),
        ({"timeout": "0"}, "timeout must be a number above 0."),
        ({"timeout": "soon"}, "timeout must be a number above 0."),
        ({"top_k": "0"}, "top_k must be a whole number of at least 1."),
        ({"top_k": "-1"}, "top_k must be a whole number of at least 1."),
        ({"top_k": "1.5"}, "top_k must be a whole number of at least 1."),
        ({"top_k": "many"}, "top_k must be a whole number of at least 1."),
        ({"top_k": "9" * 5000}, "top_k must be a whole number of at least 1."),
        ({"top_k": "4"}, "top_k must be at most 3."),
        ({"top_k": "99999999999999999999"}, "top_k must be at most 3."),
        ({"treshold": "0.5"}, "unknown parameter; the parameters are model, threshold, timeout, top_k."),
        ({"<script>": "x"}, "unknown parameter; the parameters are model, threshold, timeout, top_k."),
    ],
)
def test_parameters_are_checked(server, photos, parameters, message):
    response = server.classify(photos[0], params=parameters)
    assert (response.status_code, response.json()) == (400, {"error": message})


def test_another_model_than_the_servers_is_not_found(server, photos):
    for name in ("other", "", "<script>"):
        response = server.classify(photos[0], params={"model": name})
        assert (response.status_code, response.json()) == (404, {"error": "there is no such model."})
    assert server.classify(photos[0], params={"model": "tiny"}).status_code == 200


def test_a_gzip_body_is_decompressed_and_a_bomb_refused(server):
    def send(body):
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        return server.client.post("/v2/models/tiny/infer", content=body, headers=headers)

    assert send(gzip.compress(b"{}")).json() == {"error": "inputs must be a list with one tensor, image."}
    assert send(b"{}").status_code == 400
    assert send(gzip.compress(b"{}")[:-4]).status_code == 400
    assert send(gzip.compress(b"{}") + b"tail").status_code == 400
    empty = gzip.compress(b"{}", compresslevel=0)
    blocks = b"\0\0\0\xff\xff" * 500_000  # stored blocks without content
    assert send(empty[:10] + blocks + empty[10:]).status_code == 413
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bomb = zlib.compressobj(wbits=31)
    packed = b"".join([*(bomb.compress(b" " * 1_000_000) for _ in range(500)), bomb.flush()])
    assert len(packed) < 1_000_000
    assert send(packed).status_code == 413
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
    unknown = server.client.post("/v2/models/tiny/infer", content=b"{}", headers={"Content-Encoding": "br"})
    assert unknown.status_code == 415


class Raw:
    """A connection on which a test sends what it likes."""

    def __init__(self, server):
        self.socket = socket.create_connection(server.server.listening.getsockname(), timeout=PATIENCE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, text):
        self.socket.sendall(text if isinstance(text, bytes) else text.encode())

    def status(self):
        answer = self.socket.recv(65536)
        return int(answer.split()[1])

    def is_closed(self):
        """Whether the server closes it, after the rest of its answer."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True


HEAD = "POST /classify HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"


def test_an_oversized_body_is_refused_before_it_is_sent(server):
    for size in (2_000_001, 10**17, 10**30):
        with Raw(server) as raw:
            raw.send(f"{HEAD}Content-Length: {size}\r\n\r\n")
            assert raw.status() in (400, 413)
    with Raw(server) as raw:
        raw.send(f"{HEAD}Content-Length: 2000001\r\n\r\n")
        assert raw.status() == 413


def test_many_tiny_chunks_are_refused(server):
    with Raw(server) as raw:
        raw.send(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(100):
                raw.send(b"1\r\nx\r\n" * 1000)
        except ConnectionError:
            pass  # it has been answered
        assert raw.status() in (400, 408, 413)


def test_a_slow_body_gets_408(server):
    with Raw(server) as raw:
        raw.send(f"{HEAD}Content-Length: 1000\r\n\r\nabc")
        assert raw.status() == 408
        assert raw.is_closed()


def test_slow_headers_get_408(server):
    with Raw(server) as raw:
        raw.send("POST /classify HTTP/1.1\r\nHost: x\r\n")
        raw.socket.settimeout(0.1)
        for _ in range(100):
            raw.send("X-A: b\r\n")  # does not extend the time
            with suppress(TimeoutError):
                assert raw.status() == 408
                break
        assert raw.is_closed()


def test_no_connection_is_opened_whatever_a_client_names(server, monkeypatch):
    opened = []
    own = server.client.get("/v2/health/live")  # the client's connection is open
    assert own.status_code == 200
    connect = socket.socket.connect

    def watched(self, address):
        opened.append(address)
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    for address in (b"http://127.0.0.1:9/a.jpg", b"file:///etc/passwd", b"\\\\host\\share\\a.jpg"):
        assert server.classify(address).status_code == 415
    assert opened == []


def test_files_are_never_opened_by_name(server, tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(encode(Image.fromarray(noise(8, 8, 3)), "PNG"))
    assert server.classify(path.read_bytes()).status_code == 200
    assert server.classify(str(path).encode()).status_code == 415
