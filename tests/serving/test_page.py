"""The web page: its routes, and the page itself in a browser."""

import base64
import io
import json
import os
import socket
import threading
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient
from PIL import Image

from progresvit import api
from progresvit.data.samples import samples_folder
from progresvit.data.transforms import normalise
from progresvit.engine.images import open_images
from progresvit.model import ProgResViT
from progresvit.routing.metric import OperatingPoint
from progresvit.routing.scores import top10_entropy
from progresvit.routing.settings import Budgets
from progresvit.serving.page.router import FILES, page_router
from progresvit.serving.service import Limits
from tests.factories import setting_of, tiny_config
from tests.serving.conftest import encode, in_thread
from tests.serving.test_withheld import served
from tests.waiting import PATIENCE, wait_until

SAMPLE = samples_folder() / "golden_retriever.jpg"


@pytest.fixture
def model(small_model):
    return small_model


def app_of(model, **options):
    app = FastAPI()
    app.include_router(page_router(model, name="small", **options))
    return app


@pytest.fixture
def client(model):
    return TestClient(app_of(model))


def model_folder(model, folder, *, weights=None):
    """Settings and budgets beside a model, as progresvit calibrate writes them."""
    setting = setting_of(model, rule="near-lossless", threshold=0.25, n=100)
    if weights is not None:
        setting = setting.model_copy(update={"weights_sha256": weights})
    shared = ("rounds", "weights_sha256", "preprocessing_sha256", "precision", "n")
    full, first = model.gmacs()[1], model.gmacs()[0]
    points = (
        OperatingPoint(threshold=0.0, top1=0.9, gmacs=full, exit_shares=(0.0, 1.0)),
        OperatingPoint(threshold=1.0, top1=0.8, gmacs=(first + full) / 2, exit_shares=(0.5, 0.5)),
        OperatingPoint(threshold=2.4, top1=0.5, gmacs=first, exit_shares=(1.0, 0.0)),
    )
    (folder / "settings").mkdir()
    setting.save(folder / "settings" / "near-lossless.json")
    measured = {name: getattr(setting, name) for name in shared}
    Budgets(points=points, data="a test set", **measured).save(folder / "budgets.json")
    return folder


def as_file(size=(40, 30), format="PNG", mode="RGB"):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return encode(Image.fromarray(pixels).convert(mode), format)


def lines_of(response):
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def image_of(url):
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_the_page_loads_nothing_from_other_hosts(client):
    for file, kind in FILES.items():
        path = "/" if file == "index.html" else f"/page/{file}"
        response = client.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(kind)
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "http" not in policy
        assert "unsafe" not in policy
        text = response.text.replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text
        assert "https:" not in text
        assert "innerHTML" not in text


def test_the_page_has_the_sample_images_and_their_credits(client):
    names = client.get("/page/model").json()["samples"]
    assert names == sorted(path.name for path in samples_folder().glob("*.jpg"))
    credits = client.get("/page/CREDITS.md")
    assert credits.headers["content-type"].startswith("text/plain")
    for name in names:
        response = client.get(f"/page/{name}")
        assert (response.headers["content-type"], response.headers["x-content-type-options"]) == (
            "image/jpeg", "nosniff",
        )  # fmt: skip
        assert response.content == (samples_folder() / name).read_bytes()
        assert name in credits.text


@pytest.mark.parametrize("file", ["nothing.js", "labels.json", "..%2Fpage.py", "%2Fetc%2Fpasswd"])
def test_only_the_files_of_the_page_are_served(client, file):
    assert client.get(f"/page/{file}").status_code == 404


def test_the_facts_of_a_model_without_a_folder(client, model):
    facts = client.get("/page/model").json()
    assert facts["name"] == "small"
    assert facts["classes"] == 12
    rounds = [(item["round"], item["resolution"], item["width"]) for item in facts["rounds"]]
    assert rounds == [(1, 16, 64), (2, 32, 128)]
    assert [item["gmacs"] for item in facts["rounds"]] == model.gmacs()
    assert facts["threshold"] is None
    assert facts["frontier"] is None
    assert "no budgets.json" in facts["note"]
    assert facts["settings"] == []
    assert np.log(10) < facts["largest_threshold"] < 2.31


def test_the_frontier_and_the_default_threshold_come_from_the_model_folder(model, tmp_path):
    facts = TestClient(app_of(model, folder=model_folder(model, tmp_path))).get("/page/model").json()
    assert facts["threshold"] == 0.25
    nothing = {"entropy": None, "ood": None}
    assert facts["settings"] == [{"name": "near-lossless", "threshold": 0.25, "withheld": nothing}]
    assert facts["withheld"] == nothing
    points = [(point["threshold"], point["top1"]) for point in facts["frontier"]["points"]]
    assert points == [(0, 0.9), (1, 0.8), (2.4, 0.5)]
    assert facts["frontier"]["data"] == "a test set"
    assert facts["note"] == ""


def test_a_setting_that_was_edited_is_left_out(model, tmp_path, caplog):
    folder = model_folder(model, tmp_path)
    path = folder / "settings" / "near-lossless.json"
    edited = path.read_text().replace('"near-lossless"', '"guarantee"')
    (folder / "settings" / "edited.json").write_text(edited)
    facts = TestClient(app_of(model, folder=folder)).get("/page/model").json()
    assert [setting["name"] for setting in facts["settings"]] == ["near-lossless"]
    assert "edited.json is not a valid setting" in caplog.text


def test_another_threshold_can_be_given(model, tmp_path):
    app = app_of(model, folder=model_folder(model, tmp_path), threshold=0.7)
    assert TestClient(app).get("/page/model").json()["threshold"] == 0.7


def test_figures_of_other_weights_are_left_out(model, tmp_path):
    facts = TestClient(app_of(model, folder=model_folder(model, tmp_path, weights="0" * 64))).get("/page/model").json()
    assert facts["frontier"] is None
    assert "other weights" in facts["note"]
    assert facts["settings"] == []


def test_the_bundled_model_has_a_frontier():
    model, folder = api.load_with_folder("nettewoof-tiny")
    facts = TestClient(app_of(model, folder=folder)).get("/page/model").json()
    assert facts["threshold"] == pytest.approx(0.2649, abs=1e-4)
    assert len(facts["frontier"]["points"]) > 100


@torch.no_grad()
def test_rounds_are_those_of_the_model_on_the_crop_of_the_engine(client, model):
    lines = lines_of(client.post("/page/rounds", content=SAMPLE.read_bytes()))
    pixels = open_images([SAMPLE.read_bytes()], model.config).pixels
    outputs = model(normalise(torch.from_numpy(pixels), model.config))
    assert [line["round"] for line in lines] == [1, 2]
    for line, output, round_, gmacs in zip(lines, outputs, model.config.rounds, model.gmacs()):
        probabilities = output.logits[0].softmax(dim=-1)
        assert line["entropy"] == pytest.approx(float(top10_entropy(output.logits)[0]), abs=1e-6)
        assert line["gmacs"] == gmacs
        assert (line["resolution"], line["width"]) == (round_.resolution, round_.width)
        assert [item["index"] for item in line["top"]] == probabilities.topk(5).indices.tolist()
        assert line["top"][0]["probability"] == pytest.approx(float(probabilities.max()), abs=1e-6)
        assert line["top"][0]["label"] == f"class {line['top'][0]['index']}"
        assert image_of(line["view"]).size == (round_.resolution, round_.resolution)
        assert image_of(line["attention"]).size == (round_.resolution, round_.resolution)


def test_the_view_of_the_last_round_is_the_crop(client, model):
    line = lines_of(client.post("/page/rounds", content=SAMPLE.read_bytes()))[-1]
    pixels = open_images([SAMPLE.read_bytes()], model.config).pixels[0].transpose(1, 2, 0)  # (C, r, r) -> (r, r, C)
    assert np.array_equal(np.asarray(image_of(line["view"])), pixels)


@pytest.mark.parametrize(
    ("format", "mode"), [("JPEG", "L"), ("GIF", "P"), ("BMP", "RGB"), ("TIFF", "CMYK"), ("WEBP", "RGBA")]
)
def test_common_formats_are_opened(client, format, mode):
    assert len(lines_of(client.post("/page/rounds", content=as_file(format=format, mode=mode)))) == 2


@pytest.mark.parametrize("channels", [1, 3])
def test_one_and_three_rounds_and_grey_models_run(randomize, channels):
    for sides, heads in (([16], [1]), ([16, 24, 32], [1, 2, 3])):
        extra = {"in_channels": channels, "mean": (0.5,) * channels, "std": (0.5,) * channels}
        config = tiny_config(sides, heads, num_classes=4, **extra)
        client = TestClient(app_of(randomize(ProgResViT(config))))
        lines = lines_of(client.post("/page/rounds", content=as_file()))
        assert [line["resolution"] for line in lines] == sides
        assert len(lines[0]["top"]) == 4


@pytest.mark.parametrize("content", [b"", b"hello", b"<svg></svg>", as_file(format="EPS"), as_file(format="PPM")])
def test_a_file_of_another_format_gives_415(client, content):
    response = client.post("/page/rounds", content=content)
    assert response.status_code == 415
    assert "not an image" in response.json()["error"]


def test_a_damaged_image_gives_422_and_the_next_one_runs(client):
    damaged = as_file(size=(200, 200), format="PNG")[:3000]
    response = client.post("/page/rounds", content=damaged)
    assert response.status_code == 422
    assert "Pillow" not in response.text
    assert len(lines_of(client.post("/page/rounds", content=as_file()))) == 2


def test_an_image_of_too_many_pixels_gives_422(client, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert client.post("/page/rounds", content=as_file()).status_code == 422


def test_a_file_of_too_many_bytes_gives_413(model):
    client = TestClient(app_of(model, limits=Limits(body=1_000_000)))
    response = client.post("/page/rounds", content=bytes(1_000_001))
    assert response.status_code == 413
    assert "at most 1 MB" in response.json()["error"]
    assert client.get("/page/model").json()["max_bytes"] == 1_000_000


def test_a_round_that_fails_is_reported_and_the_next_image_runs(client, model, monkeypatch):
    def fail(*args):
        raise RuntimeError("out of memory at 0x1234")

    with monkeypatch.context() as patch:
        patch.setattr(model, "run_round", fail)
        (line,) = lines_of(client.post("/page/rounds", content=as_file()))
    assert line == {"error": "the server could not compute round 1."}
    assert len(lines_of(client.post("/page/rounds", content=as_file()))) == 2


def test_logits_that_are_not_finite_are_null(client, model):
    with torch.no_grad():
        model.head.bias.fill_(float("nan"))
    line = lines_of(client.post("/page/rounds", content=as_file()))[0]
    assert line["entropy"] is None
    assert line["top"] == []


def test_a_model_that_the_page_cannot_show_is_refused(small_config):
    with pytest.raises(ValueError, match="no head"):
        page_router(ProgResViT(small_config.replace(num_classes=0)), name="x")
    config = small_config.replace(in_channels=4, mean=(0.5,) * 4, std=(0.5,) * 4)
    with pytest.raises(ValueError, match="1 or 3 channels"):
        page_router(ProgResViT(config), name="x")


@contextmanager
def serving(app):
    """A server on a free port of the loopback; yields its address."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        with in_thread(uvicorn.Server(uvicorn.Config(app, log_level="warning")), listening):
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def held_back(model, monkeypatch):
    """The second round does not begin until the event is set."""
    run_round, event = model.run_round, threading.Event()

    def run(s, images, previous=None):
        assert s == 0 or event.wait(timeout=PATIENCE)
        return run_round(s, images, previous)

    monkeypatch.setattr(model, "run_round", run)
    return event


def test_a_round_is_sent_before_the_next_is_computed(model, held_back):
    post = {"method": "POST", "url": "/page/rounds", "content": as_file()}
    with serving(app_of(model)) as address, httpx.Client(base_url=address, timeout=PATIENCE) as client:
        with client.stream(**post) as response:
            lines = response.iter_lines()
            assert json.loads(next(lines))["round"] == 1
            busy = client.post("/page/rounds", content=as_file())
            assert busy.status_code == 429
            assert busy.headers["retry-after"] == "1"
            held_back.set()
            assert json.loads(next(lines))["round"] == 2
        assert len(lines_of(client.request(**post))) == 2


def test_images_are_refused_while_the_server_shuts_down(model):
    @contextmanager
    def refuse():
        raise HTTPException(503, "the server is shutting down.")
        yield

    response = TestClient(app_of(model, accepted=refuse)).post("/page/rounds", content=as_file())
    assert response.status_code == 503
    assert response.json() == {"error": "the server is shutting down."}


def test_a_client_that_disconnects_does_not_block_the_next(model, held_back):
    with serving(app_of(model)) as address, httpx.Client(base_url=address, timeout=PATIENCE) as client:
        with client.stream("POST", "/page/rounds", content=as_file()) as response:
            next(response.iter_lines())
        held_back.set()
        wait_until(lambda: client.post("/page/rounds", content=as_file()).status_code != 429)


@contextmanager
def opened(browser, address, **options):
    """The page, ready for an image; it must make no request to another host and report no error."""
    context = browser.new_context(viewport={"width": 1280, "height": 860}, **options)
    page, hosts, problems = context.new_page(), set(), []
    page.on("request", lambda request: hosts.add("/".join(request.url.split("/")[:3])))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    yield page
    context.close()
    assert {host for host in hosts if not host.startswith(("data:", "blob:"))} == {address}
    assert [problem for problem in problems if not problem.startswith("Failed to load resource")] == []


def badges(page):
    return page.locator("#rounds .badge").all_inner_texts()


def screenshot(page, name):
    """For people who work on the page: PAGE_SCREENSHOTS is a folder."""
    if folder := os.environ.get("PAGE_SCREENSHOTS"):
        page.wait_for_timeout(500)  # transitions
        page.screenshot(path=f"{folder}/page_{name}.png", full_page=True)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_slider_decides_which_rounds_are_needed(browser, scheme):
    model, folder = api.load_with_folder("nettewoof-tiny")
    app = FastAPI()
    app.include_router(page_router(model, name="nettewoof-tiny", folder=folder))
    with serving(app) as address, opened(browser, address, color_scheme=scheme) as page:
        assert page.locator("#facts").inner_text() == "nettewoof-tiny · 20 classes · 2 rounds"
        assert badges(page) == ["Waiting", "Waiting"]
        page.set_input_files("#file", samples_folder() / "samoyeds.jpg")
        page.wait_for_selector("#rounds li:nth-child(2) .view:not([hidden])")
        assert badges(page) == ["Continues", "Last round"]
        assert page.locator("#answer").inner_text() == "Samoyed"
        assert page.locator("#image-saved").inner_text() == "0 %"
        assert page.locator("#average-top1").inner_text() == "95.7 %"
        screenshot(page, f"{scheme}_continues")
        page.locator("#slider").fill("1000")
        assert badges(page) == ["Exits here", "Not needed"]
        assert page.locator("#image-saved").inner_text() == "82 %"
        assert page.locator("#image-gmacs").inner_text() == "0.286"
        assert page.locator("#average-gmacs").inner_text() == "0.286"
        assert page.locator("#average-top1").inner_text() == "90.9 %"
        screenshot(page, f"{scheme}_exits")
        page.locator("#settings button", has_text="near-lossless").click()
        assert badges(page) == ["Continues", "Last round"]
        page.locator("#slider").press("Home")
        assert page.locator("#tau").inner_text() == "τ = 0.000"
        assert badges(page) == ["Continues", "Last round"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_setting_that_withholds_has_a_button_and_hides_the_answer(browser, scheme):
    model, folder = api.load_with_folder("imagenet-tiny")
    app = FastAPI()
    app.include_router(page_router(model, name="imagenet-tiny", folder=folder))
    with serving(app) as address, opened(browser, address, color_scheme=scheme) as page:
        careful = page.locator("#settings button", has_text="careful")
        near_lossless = page.locator("#settings button", has_text="near-lossless")
        assert (careful.inner_text(), careful.get_attribute("aria-pressed")) == ("careful", "false")
        page.get_by_role("button", name="tabby").click()
        page.wait_for_selector("#rounds li:nth-child(2) .view:not([hidden])")
        assert page.locator("#answer").inner_text() == "tabby"
        assert not page.locator("#withheld").is_visible()
        careful.click()
        assert careful.get_attribute("aria-pressed") == "true"
        assert near_lossless.get_attribute("aria-pressed") == "false"
        assert page.locator("#answer").inner_text() == "None (tabby?)"
        assert "entropy 1.007 is not below 0.970" in page.locator("#status").inner_text()
        assert badges(page) == ["Continues", "Last round, withheld"]
        screenshot(page, f"{scheme}_withheld")
        page.locator("#slider").press("Home")  # another threshold keeps the limits
        assert page.locator("#answer").inner_text() == "None (tabby?)"
        near_lossless.click()
        assert page.locator("#answer").inner_text() == "tabby"
        careful.click()
        page.get_by_role("button", name="goldfish").click()
        page.get_by_text("Probability").wait_for()
        assert page.locator("#answer").inner_text() == "goldfish"
        page.set_viewport_size({"width": 390, "height": 844})
        screenshot(page, f"{scheme}_narrow")
        page.get_by_role("button", name="tabby").click()
        page.get_by_text("Withheld after").wait_for()
        screenshot(page, f"{scheme}_narrow_withheld")


@pytest.mark.slow
def test_the_page_of_a_server_that_withholds_begins_with_its_limits(browser):
    with (
        served("nettewoof-tiny", threshold="careful") as server,
        opened(browser, server.address) as page,
    ):
        assert page.locator("#settings button[aria-pressed=true]").inner_text() == "careful"
        assert "images that score as none of the classes (energy below" in page.locator("#withheld").inner_text()
        answers = {"coffee": "None of its classes (French horn?)", "golden_retriever": "golden retriever"}
        for sample, text in answers.items():
            page.get_by_role("button", name=sample.replace("_", " ")).click()
            page.wait_for_selector(f"#preview[alt*={sample}]")
            page.wait_for_selector("#rounds li:nth-child(2) .view:not([hidden])")
            assert page.locator("#answer").inner_text() == text
            answer = server.classify((samples_folder() / f"{sample}.jpg").read_bytes()).json()
            assert answer["abstained"] == text.startswith("None")
            assert answer["label"] == (None if answer["abstained"] else text)


@pytest.mark.slow
def test_a_round_is_shown_while_the_next_one_runs(browser, model, held_back):
    with serving(app_of(model)) as address, opened(browser, address) as page:
        page.set_input_files("#file", SAMPLE)
        page.wait_for_selector("#rounds li:nth-child(1) .view:not([hidden])")
        assert badges(page)[1] == "Running …"
        assert "no budgets.json" in page.locator("#frontier-note").inner_text()
        assert not page.locator("#curve").is_visible()
        screenshot(page, "running")
        held_back.set()
        page.wait_for_selector("#rounds li:nth-child(2) .view:not([hidden])")


@pytest.mark.slow
def test_errors_are_shown_in_words_and_the_keyboard_reaches_everything(browser, model):
    app = app_of(model, limits=Limits(body=1_000_000))
    with serving(app) as address, opened(browser, address) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.id") == "file"
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.textContent") == "credits"
        for _ in range(page.locator("#samples button").count()):
            page.keyboard.press("Tab")
            assert page.evaluate("() => document.activeElement.parentNode.id") == "samples"
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.id") == "slider"
        big = {"name": "big.png", "mimeType": "image/png", "buffer": bytes(1_000_001)}
        page.set_input_files("#file", big)
        page.get_by_role("alert").get_by_text("larger than 1 MB").wait_for()
        page.set_input_files("#file", {"name": "text.png", "mimeType": "image/png", "buffer": b"no image"})
        page.get_by_role("alert").get_by_text("not an image").wait_for()
        assert badges(page) == ["Not computed", "Not computed"]
        screenshot(page, "error")
        page.set_input_files("#file", SAMPLE)
        page.wait_for_selector("#rounds li:nth-child(2) .view:not([hidden])")
        assert not page.get_by_role("alert").is_visible()


@pytest.mark.slow
def test_the_page_waits_while_the_server_is_busy(browser, model, held_back):
    with (
        serving(app_of(model)) as address,
        httpx.stream("POST", f"{address}/page/rounds", content=as_file(), timeout=PATIENCE) as response,
        opened(browser, address) as page,
    ):
        next(response.iter_lines())
        page.set_input_files("#file", SAMPLE)
        page.get_by_text("The server is busy").wait_for()
        held_back.set()
        page.wait_for_selector("#rounds li:nth-child(2) .view:not([hidden])")


@pytest.mark.slow
def test_an_image_can_be_dropped(browser, model):
    drop = """() => {
        const transfer = new DataTransfer();
        const canvas = Object.assign(document.createElement("canvas"), { width: 40, height: 40 });
        canvas.toBlob((blob) => {
            transfer.items.add(new File([blob], "dropped.png", { type: "image/png" }));
            window.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer }));
        });
    }"""
    with serving(app_of(model)) as address, opened(browser, address) as page:
        page.evaluate(drop)
        page.wait_for_selector("#rounds li:nth-child(2) .view:not([hidden])")
