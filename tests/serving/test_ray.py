"""Ray: replicas and actors of the rounds on this machine, and what happens when one of them is killed."""

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from progresvit import Engine
from progresvit.data.samples import samples_folder
from progresvit.engine.options import EngineOptions
from progresvit.model.saving import save
from tests.commands import refused
from tests.serving.conftest import encode
from tests.serving.test_app import outputs, tensor
from tests.waiting import PATIENCE, wait_until

ray = pytest.importorskip("ray")

from progresvit.serving.ray_serve import Options, application  # noqa: E402


def processes_of(title):
    """Processes that Ray has named so."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(f"ray::{title}".encode()):
                processes.append(int(path.parent.name))
        except OSError:
            continue
    return processes


def test_options_are_parsed_from_the_command_line():
    options = Options.model_validate({"replicas": "2,4", "max_replicas": "8", "threshold": "0.3"})
    assert (options.replicas, options.max_replicas, options.threshold) == ((2, 4), (8,), 0.3)
    assert Options.model_validate({"threshold": "0.2,0.4"}).threshold == (0.2, 0.4)
    assert Options.model_validate({"threshold": "careful"}).threshold == "careful"
    with pytest.raises(ValueError, match="no-such-setting"):
        application(Options(model="nettewoof-tiny", threshold="no-such-setting"))
    with pytest.raises(ValidationError, match="replica"):
        Options.model_validate({"replica": 3})
    with pytest.raises(ValueError, match="one for each round"):
        application(Options(model="nettewoof-tiny", replicas=(1, 2, 3)))


def test_each_round_is_a_deployment_with_its_own_scale():
    made = application(Options(model="nettewoof-tiny", replicas=(1, 2), max_replicas=(2, 6), cpus=0.5, batch=16))
    first = made._bound_deployment
    second = first.init_args[2]._bound_deployment
    assert (first.name, second.name) == ("Round1", "Round2")
    assert second.init_args[2] is None
    for deployment, least, most in ((first, 1, 2), (second, 2, 6)):
        scaling = deployment._deployment_config.autoscaling_config
        assert (scaling.min_replicas, scaling.max_replicas) == (least, most)
        assert deployment.max_ongoing_requests == 64
        assert deployment.max_queued_requests == 64 * most
        assert deployment.ray_actor_options["num_cpus"] == 0.5


IMAGES = samples_folder()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-folder"], "no-such-folder is not a folder"),
        (["full"], "contains no images"),
        ([IMAGES, "--out", "full"], "name another folder"),
        ([IMAGES, "--actors", "two"], "--actors takes comma-separated whole numbers"),
        ([IMAGES, "--model", "no-such-model"], "no-such-model"),
        ([IMAGES, "--model", "nettewoof-tiny", "--threshold", "no-such-setting"], "no-such-setting"),
        ([IMAGES], "ray is not installed; run: pip install"),
    ],
)
def test_a_wrong_option_of_the_command_is_one_line_with_the_remedy(tmp_path, monkeypatch, words, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(message, "classify-ray", "--out", "x", *words)


@pytest.fixture(scope="module")
def cluster():
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(served_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    save(served_model, path)
    return path


@pytest.fixture(scope="module")
def address(cluster, folder, middle):
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = Options(model=str(folder), threshold=middle, replicas=(2, 2), cpus=0.25, threads=1)
    serve.run(application(options), route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


@pytest.mark.long
def test_replicas_answer_as_the_engine(address, served_model, middle, photos):
    expected = Engine(served_model, middle).classify(photos)
    with httpx.Client(base_url=address, timeout=PATIENCE) as client:
        assert client.get("/v2/health/ready").status_code == 200
        answer = outputs(client.post("/v2/models/tiny/infer", json={"inputs": [tensor(*photos)]}))
        assert answer["label"] == [prediction.label for prediction in expected]
        assert answer["exit_round"] == [prediction.exit_round for prediction in expected]
        assert answer["probs"] == pytest.approx([prediction.probability for prediction in expected], abs=1e-5)
        single = client.post("/classify", files={"image": photos[0]}, params={"threshold": 0}).json()
        assert single["exit_round"] == 2
        assert client.post("/classify", files={"image": photos[0][:200]}).status_code == 422
        assert client.post("/classify", files={"image": b"%PDF-1.4"}).status_code == 415
        assert client.post("/v2/models/other/infer", json={}).status_code == 404
        assert client.get("/metrics").status_code == 404


@pytest.mark.long
@pytest.mark.parametrize("setting", ["careful", "unknown"])
def test_replicas_withhold_answers_and_refuse_what_they_do_not_know(address, careful, setting):
    from ray import serve

    folder, withheld, given = careful
    options = Options(model=str(folder), threshold=setting, cpus=0.25, threads=1)
    serve.run(application(options), name=setting, route_prefix=f"/{setting}")
    try:
        with httpx.Client(base_url=f"{address}/{setting}", timeout=PATIENCE) as client:
            for query in ({}, {"threshold": 0}, {"top_k": 2}):
                answer = client.post("/classify", files={"image": withheld}, params=query).json()
                assert (answer["label"], answer["index"], answer["probability"]) == (None, None, None)
                assert (answer["abstained"], len(answer["top"])) == (True, query.get("top_k", 0))
            body = {"inputs": [tensor(withheld, given)]}
            answer = outputs(client.post("/v2/models/tiny/infer", json=body))
            assert answer["abstained"] == [True, setting == "unknown"]
            assert [not label for label in answer["label"]] == answer["abstained"]
            for query in ({"top_k": 11}, {"treshold": 1}):
                assert client.post("/classify", files={"image": given}, params=query).status_code == 400
            assert client.post("/classify", files={"image": given}, params={"model": "other"}).status_code == 404
    finally:
        serve.delete(setting)


@pytest.mark.long
def test_requests_succeed_with_retries_while_replicas_are_killed(address, photos):
    async def ask(client, number):
        for _ in range(4):
            response = await client.post("/classify", files={"image": photos[number % len(photos)]})
            if response.status_code == 200:
                return True
            await asyncio.sleep(0.2)
        return False

    async def load():
        async with httpx.AsyncClient(base_url=address, timeout=PATIENCE) as client:
            tasks = []
            for number in range(200):
                tasks.append(asyncio.create_task(ask(client, number)))
                await asyncio.sleep(0.05)
                if number in (50, 100):
                    os.kill(processes_of(f"ServeReplica:default:Round{number // 50}")[0], signal.SIGKILL)
            return await asyncio.gather(*tasks)

    succeeded = asyncio.run(load())
    assert np.mean(succeeded) >= 0.99
    wait_until(lambda: len(processes_of("ServeReplica:default:Round")) == 4)


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory, photos):
    path = tmp_path_factory.mktemp("images")
    for number, photo in enumerate(photos):
        (path / f"{number:03}.jpg").write_bytes(photo)
    (path / "_DSC1.jpg").write_bytes(photos[0])  # Ray would leave it out
    (path / ".hidden.jpg").write_bytes(photos[0])
    (path / "bad.jpg").write_bytes(photos[0][:200])
    (path / "notes.txt").write_text("not an image")
    return path


@pytest.mark.long
def test_bulk_predictions_equal_those_of_the_engine(cluster, image_folder, served_model, folder, middle, photos):
    from progresvit.serving.ray_data import classify_dataset

    files = [str(image_folder / f"{number:03}.jpg") for number in range(len(photos))]
    dataset = ray.data.read_binary_files([*files, str(image_folder / "bad.jpg")], include_paths=True)
    rows = classify_dataset(dataset, folder, middle, actors=(1, 2), cpus=0.25, threads=1, batch=16).take_all()
    by_name = {Path(row["path"]).name: row for row in rows}
    assert len(rows) == len(by_name) == len(photos) + 1
    assert by_name["bad.jpg"]["error"]
    assert by_name["bad.jpg"]["exit_round"] == 0
    assert set(rows[0]) == {
        "path", "index", "label", "probability", "exit_round", "entropy", "gmacs", "abstained", "error",
    }  # fmt: skip
    for number, expected in enumerate(Engine(served_model, middle).classify(photos)):
        row = by_name[f"{number:03}.jpg"]
        assert (row["label"], row["exit_round"], row["error"]) == (expected.label, expected.exit_round, None)
        assert row["probability"] == pytest.approx(expected.probability, abs=1e-5)


@pytest.mark.long
def test_arrays_and_other_columns(cluster, folder):
    from progresvit.serving.ray_data import classify_dataset

    pixels = np.random.default_rng(1).integers(0, 256, (9, 40, 50, 3), np.uint8)
    dataset = ray.data.from_items([{"number": n, "image": image} for n, image in enumerate(pixels)])
    rows = classify_dataset(dataset, folder, 0.0, column="image", cpus=0.25, batch=4).take_all()
    assert sorted(row["number"] for row in rows) == list(range(9))
    expected = Engine(str(folder), 0.0).classify([Image.fromarray(image) for image in pixels])
    assert {row["number"]: row["index"] for row in rows} == {n: answer.index for n, answer in enumerate(expected)}
    with pytest.raises(Exception, match="has no column 'bytes'"):
        classify_dataset(dataset, folder, 0.0, cpus=0.25).take_all()


def test_a_round_of_ray_data_on_tables(folder):
    """Without a cluster: odd images, columns of the same name, and the state of images that continue."""
    pa = pytest.importorskip("pyarrow")
    from progresvit.serving.ray_data import STATE, RoundActor, image_of_cell

    pixels = np.random.default_rng(1).integers(0, 256, (40, 50, 4), np.uint8)
    for array, mode in ((pixels, "RGBA"), (pixels[..., :3], "RGB"), (pixels[..., 0], "L"), (pixels[..., :1], "L")):
        assert image_of_cell(array).mode == mode
    for wrong in (None, pixels.astype(np.float32), np.zeros((2, 2, 7), np.uint8), 3):
        assert "not" in image_of_cell(wrong).reason
    first, second = (RoundActor(s, "bytes", folder, 0.0, EngineOptions(batch=4)) for s in range(2))
    content = encode(Image.fromarray(pixels[..., :3]))
    table = first(pa.table({"bytes": [content, b"no image", None], "number": [1, 2, 3]}))
    assert table.column_names[0] == "number"
    assert [cell is not None for cell in table[STATE[0]].to_pylist()] == [True, False, False]
    table = second(table)
    assert table["exit_round"].to_pylist() == [2, 0, 0]
    assert [bool(error) for error in table["error"].to_pylist()] == [False, True, True]
    assert not set(STATE) & set(table.column_names)
    with pytest.raises(ValueError, match="rename it"):
        first(pa.table({"bytes": [content], "label": ["dog"]}))


@pytest.mark.parametrize("setting", ["careful", "unknown"])
def test_a_table_of_ray_data_says_which_answers_are_withheld_and_keeps_the_best_guess(careful, setting):
    pa = pytest.importorskip("pyarrow")
    from progresvit.serving.ray_data import RoundActor

    folder, withheld, given = careful
    table = pa.table({"bytes": [withheld, given]})
    for s in range(2):
        table = RoundActor(s, "bytes", folder, setting, EngineOptions(batch=4))(table)
    expected = Engine(folder, setting).classify([withheld, given])
    assert table["abstained"].to_pylist() == [True, setting == "unknown"]
    assert table["label"].to_pylist() == [answer.label for answer in expected]


@pytest.mark.long
def test_each_image_has_one_row_although_an_actor_is_killed(cluster, folder, middle, photos):
    from progresvit.serving.ray_data import classify_dataset

    rows = 400
    dataset = ray.data.from_items(
        [{"number": n, "bytes": photos[n % len(photos)]} for n in range(rows)], override_num_blocks=40
    )
    numbers, killed = [], []
    # sleeping rows leave time to kill
    slow = dataset.map(lambda row: (time.sleep(0.02), row)[1], num_cpus=0.25)
    for batch in classify_dataset(slow, folder, middle, actors=(2, 2), cpus=0.25, batch=8, threads=1).iter_batches(
        batch_size=1
    ):
        numbers += batch["number"].tolist()
        if len(numbers) == 20:
            killed = processes_of("MapWorker(MapBatches(RoundActor)")[:2]
            for victim in killed:
                os.kill(victim, signal.SIGKILL)
    assert killed
    assert sorted(numbers) == list(range(rows))


@pytest.mark.long
def test_the_command_starts_ray_and_writes_parquet(image_folder, folder, tmp_path):
    import pyarrow.parquet as pq

    out = tmp_path / "predictions"
    command = [
        sys.executable, "-m", "progresvit", "classify-ray", str(image_folder), "--out", str(out),
        "--model", str(folder), "--threshold", "1.0",
    ]  # fmt: skip
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert "42 images in" in done.stdout
    table = pq.read_table(out)
    assert table.num_rows == 42
    assert len(set(table["path"].to_pylist())) == 42
    assert math.isnan(table["probability"].to_pylist()[table["exit_round"].to_pylist().index(0)])
