"""Files on their way into an engine: threads for a few, processes for many, and the same answers from both."""

import threading

import numpy as np
import pytest
import torch
from PIL import Image

from progresvit.data.prepare import UnreadImage
from progresvit.engine import Engine, images
from progresvit.engine.images import ImageOpener
from progresvit.model import ProgResViT
from tests.data import gpu_stand_ins
from tests.data.files import photo, rotated, saved
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow


@pytest.fixture
def processes(monkeypatch):
    """Processes decode after the first four images."""
    monkeypatch.setattr(images, "FEW_WORKERS", 0)
    monkeypatch.setattr(images, "FEW_IMAGES", 4)


@pytest.fixture
def model(small_config, randomize):
    return randomize(ProgResViT(small_config))


@pytest.fixture
def files(tmp_path):
    """Files of many kinds, good and bad, with names of many kinds."""
    content = saved(photo(60, 50))
    kinds = {
        "a.jpg": content, "ß – ü.jpg": saved(photo(50, 60)), "truncated.jpg": content[:-200], "empty.jpg": b"",
        "one.png": saved(photo(1, 1), "PNG"), "cmyk.jpg": saved(photo(mode="CMYK")), "wrong.png": content,
        "animated.gif": saved(photo(), "GIF", save_all=True, append_images=[photo().rotate(90)]),
        "16 bits.png": saved(Image.fromarray(np.full((40, 50), 40000, np.uint16)), "PNG"),
        "text.jpg": b"no image", **{f"{turn}.jpg": rotated(photo(), turn) for turn in range(1, 9)},
    }  # fmt: skip
    for name, data in kinds.items():
        (tmp_path / name).write_bytes(data)
    return [*sorted(tmp_path.iterdir()), tmp_path / "missing.jpg", tmp_path]


def facts(predictions):
    return [(one.index, one.exit_round, one.error) for one in predictions]


def test_processes_give_the_answers_of_threads_in_order_and_bad_files_fail_alone(model, files, processes):
    expected = [facts(Engine(model, 0.5).classify([path]))[0] for path in files]
    batches = [files[first : first + 3] for first in range(0, len(files), 3)]
    engine = Engine(model, 0.5, workers=2)
    assert facts(engine.stream([*batches, *batches], deadline=None)) == expected * 2
    assert {error is None for *_, error in expected} == {True, False}


def test_arrays_and_pil_images_may_stand_between_files(model, files, processes):
    arrays = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    batches = [files[:6], arrays, files[6:9], [photo(), files[0]], files[9:12]]
    expected = [fact for batch in batches for fact in facts(Engine(model, 0.5).classify(batch))]
    assert facts(Engine(model, 0.5, workers=2).stream(batches, deadline=None)) == expected


def test_a_stream_that_waits_for_answers_gets_them(model, files, processes):
    """With a deadline no process holds results back until it has more files."""
    engine, answered = Engine(model, 0.5, workers=2), threading.Semaphore(4)

    def closed_loop():
        for path in [*files, *files]:
            assert answered.acquire(timeout=PATIENCE), "no answers came"
            yield [path]

    count = 0
    for _ in engine.stream(closed_loop()):
        answered.release()
        count += 1
    assert count == 2 * len(files)


def test_a_stream_that_is_left_early_leaves_no_processes(model, files, processes, monkeypatch):
    started = []
    start = images.WorkerPool._start
    monkeypatch.setattr(images.WorkerPool, "_start", lambda self: (started.append(start(self)), started[-1])[1])
    stream = Engine(model, 0.5, workers=2).stream([files] * 50, deadline=None)
    for _ in range(3 * len(files)):
        next(stream)
    stream.close()
    assert started
    for worker in started:
        assert worker.process.wait(timeout=PATIENCE) is not None


def test_what_is_no_image_is_refused_and_any_kind_of_path_is_taken(model, files, processes):
    class Somewhere:
        def __init__(self, path):
            self.path = path

        def __fspath__(self):
            return str(self.path)

    engine = Engine(model, 0.5, workers=2)
    batches = [files[:6], [Somewhere(files[0])], files[:3]]
    assert len(list(engine.stream(batches, deadline=None))) == 10
    with pytest.raises(ValueError, match="not int"):
        list(engine.stream([files[:6], [3], files[:3]], deadline=None))


def test_a_gpu_decoder_that_runs_out_of_memory_decodes_fewer_at_a_time(small_config, monkeypatch):
    pytest.importorskip("triton")
    gpu_stand_ins.install(monkeypatch)
    from progresvit.data import crop_kernel

    sizes, crop = [], crop_kernel.crop_placed

    def narrow(placed, *given, **options):
        sizes.append(len(placed))
        if len(placed) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return crop(placed, *given, **options)

    monkeypatch.setattr(crop_kernel, "crop_placed", narrow)
    opener = ImageOpener(small_config, device=torch.device("cpu"), workers=1)
    contents = [saved(photo(40 + number, 50)) for number in range(9)]
    opened = opener.open([*contents[:4], UnreadImage("torn"), *contents[4:]])
    assert opened.errors == {4: "torn"}
    monkeypatch.setattr(crop_kernel, "crop_placed", crop)
    assert torch.equal(opened.pixels, opener.open(contents).pixels)
    assert max(sizes) == 9
    assert sizes[-1] <= 3


@pytest.mark.gpu
def test_an_engine_on_a_gpu_decodes_there_and_gives_the_answers_of_the_cpu(model, files):
    model = model.cuda()
    expected = facts(Engine(model, 0.5, decode="cpu").classify(files))
    found = facts(Engine(model, 0.5, decode="gpu").classify(files))
    assert [error for *_, error in found] == [error for *_, error in expected]
    assert sum(one[0] == other[0] for one, other in zip(found, expected)) >= len(files) - 3  # random weights


def test_a_caller_may_reuse_its_array_after_submit(model):
    engine = Engine(model, 0.5)
    batches = torch.randint(0, 256, (3, 2, 3, 32, 32), dtype=torch.uint8)
    expected = [facts(engine.classify(batch)) for batch in batches]
    for kind in (torch.clone, lambda batch: batch.numpy().copy()):
        held, futures = kind(batches[0]), []
        for batch in batches:
            held[:] = kind(batch)
            futures.append(engine.submit(held))
        assert [facts(future.result(60)) for future in futures] == expected


def test_a_callback_in_a_decoding_thread_does_not_wait_for_the_engine(model):
    """The last image of a future cannot be opened, so its callback runs where files are decoded."""
    engine, errors, done = Engine(model, 0.5, workers=1, pending=2), [], threading.Event()

    def submit_more(future):
        for call in (lambda: engine.submit([b"", b""]), lambda: engine.classify([b""])):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))
        done.set()

    first = engine.submit([b""])
    other = engine.submit([saved(photo())])
    first.add_done_callback(submit_more)
    assert done.wait(PATIENCE)
    assert other.result(60)[0].error is None
    engine.close()


def test_closing_an_engine_ends_its_streams_with_an_error(model, files):
    engine = Engine(model, 0.5)
    stream = engine.stream([files] * 100)
    next(stream)
    engine.close()
    with pytest.raises(RuntimeError, match="closed while this stream was open; make a new one"):
        list(stream)
