"""Images that cost a careless decoder gigabytes and minutes, and files that are no images."""

import fcntl
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import hostile
from progresvit.data import isolated
from progresvit.data.crop import EvaluationCrop
from progresvit.data.decode import ImageError, decode, open_header
from progresvit.data.entries import read_file
from progresvit.data.isolated import IsolatedDecoder
from progresvit.data.prepare import Form, Plan, prepare, prepare_for_gpu
from tests.data.files import photo, saved
from tests.waiting import PATIENCE, wait_until

PLAN = Plan(crop=EvaluationCrop(64, 0.875, 3), max_pixels=25_000_000)


@pytest.fixture(scope="module")
def decoder():
    made = IsolatedDecoder(PLAN, workers=2, most_bytes=4_000_000)
    yield made
    made.close()


@pytest.fixture
def content():
    return saved(photo(300, 200))


def test_images_are_equal_to_those_of_this_process(decoder):
    for image in (photo(300, 200), photo(64, 64), photo(40, 1000)):
        for kind in ("JPEG", "PNG", "WEBP"):
            content = saved(image, kind)
            expected, made = prepare(content, PLAN), decoder.submit(content).result()
            assert np.array_equal(made.data.reshape(expected.data.shape), expected.data)
            assert (made.form, made.size, made.box) == (expected.form, expected.size, expected.box)


def test_another_plan_is_for_one_image(decoder, content):
    other = replace(PLAN, crop=EvaluationCrop(32, 0.875, 1))
    assert decoder.submit(content, other).result().data.size == 32 * 32
    assert decoder.submit(content).result().data.size == 3 * 64 * 64


def test_a_progressive_jpeg_is_not_taken_for_a_sequential_one(decoder):
    disguised = hostile.disguised_jpeg(20_000, 20_000)
    assert len(disguised) < 400
    for made in (prepare(disguised, PLAN), decoder.submit(disguised).result()):
        assert "too large to be opened safely (20,000 x 20,000 pixels" in made.error
    assert decoder.submit(hostile.jpeg(20_000, 20_000)).result().form is Form.LATER  # sequential: read at 1/8
    components = hostile.jpeg(20_000, 20_000, first=1)  # sequential, with a scan for each component
    assert "too large to be opened safely" in prepare(components, PLAN).error


def test_scans_are_limited():
    many = hostile.jpeg(5000, 5000, frame=hostile.PROGRESSIVE, scans=150)
    assert prepare(many, PLAN).error == "a JPEG of more than 100 scans; save it again"
    assert prepare(hostile.jpeg(640, 480, frame=hostile.PROGRESSIVE, scans=99), PLAN).error is None
    assert prepare(hostile.hidden_scans(64, 48), PLAN).error == "a JPEG of more than 100 scans; save it again"
    few = hostile.jpeg(640, 480, frame=hostile.PROGRESSIVE, scans=2)
    comments = few[:-2] + b"\xff\xfe\0\2" * 1100 + b"\xff\xd9"
    with pytest.raises(ImageError, match="more than 100 scans"):
        open_header(comments)


def test_headers_that_take_long_to_read_are_refused():
    endless = b"\xff\xd8\xff" + bytes(15_000_000)  # Pillow looks for the next segment byte by byte
    assert "its header has too many parts; save it again" in prepare(endless, PLAN).error
    segments = hostile.jpeg(64, 64)[:2] + b"\xff\xfe\0\2" * 20_000 + hostile.jpeg(64, 64)[2:]
    assert "too many parts" in prepare(segments, PLAN).error


def test_large_images_are_slow_and_small_ones_are_not(decoder):
    large = hostile.webp(2500, 2000)
    quick = decoder.submit(large).result()
    assert (quick.form, quick.size, quick.data) == (Form.LATER, (2500, 2000), None)
    assert decoder.submit_slow(large).result().form is Form.CROP
    assert decoder.submit(hostile.webp(2000, 1900)).result().form is Form.CROP
    camera = saved(photo(4000, 3000))
    assert decoder.submit(camera).result().form is Form.CROP  # decoded at 1/8
    progressive = saved(photo(4000, 3000), progressive=True)
    assert decoder.submit(progressive).result().form is Form.LATER


def test_a_process_that_exceeds_its_time_is_replaced(content, monkeypatch):
    monkeypatch.setattr(isolated, "QUICK_SECONDS", 0.03)
    monkeypatch.setattr(isolated, "SLOW_SECONDS", 0.03)
    limited = IsolatedDecoder(PLAN, workers=1, most_bytes=1_000_000)
    try:
        before = limited.submit(content).result()
        assert limited.submit(hostile.webp(2000, 1990)).result().form is Form.LATER
        assert limited.submit_slow(hostile.webp(5000, 4990)).result().error == isolated.TOO_SLOW
        assert np.array_equal(limited.submit(content).result().data, before.data)
    finally:
        limited.close()


def test_a_process_that_does_not_answer_is_replaced(content, monkeypatch):
    monkeypatch.setattr(isolated, "LONGEST", 0.2)
    limited = IsolatedDecoder(PLAN, workers=1, most_bytes=1_000_000)
    try:
        (child,) = limited._quick._children
        os.kill(child.process.pid, signal.SIGSTOP)
        assert limited.submit(content).result().form is Form.LATER
        monkeypatch.setattr(isolated, "LONGEST", 60.0)
        assert limited.submit(content).result().form is Form.CROP
    finally:
        limited.close()


def test_memory_is_limited(monkeypatch):
    monkeypatch.setattr(isolated, "BYTES_PER_PIXEL", 1)
    monkeypatch.setattr(isolated, "SPARE_BYTES", 16_000_000)
    limited = IsolatedDecoder(PLAN, workers=1, most_bytes=1_000_000)
    try:
        made = limited.submit_slow(hostile.webp(5000, 4990)).result()
        assert made.error is not None
        assert limited.submit_slow(hostile.webp(50, 50)).result().error is None
    finally:
        limited.close()


def test_a_crash_is_the_error_of_its_image(content):
    limited = IsolatedDecoder(PLAN, workers=1, most_bytes=1_000_000)
    try:
        for number in (signal.SIGSEGV, signal.SIGKILL):
            (child,) = limited._quick._children
            os.kill(child.process.pid, signal.SIGSTOP)
            future = limited.submit(content)
            file = child.connection.fileno()
            wait_until(lambda: struct.unpack("i", fcntl.ioctl(file, termios.TIOCOUTQ, bytes(4)))[0])  # noqa: B023
            os.kill(child.process.pid, number)
            os.kill(child.process.pid, signal.SIGCONT)
            assert "the process that decoded it was ended by" in future.result().error
            assert limited.submit(content).result().error is None
        (child,) = limited._quick._children
        child.process.kill()  # while it is idle
        child.process.wait()
        assert limited.submit(content).result().error is None
    finally:
        limited.close()


def test_a_cancelled_image_lets_go_of_its_content(content):
    limited = IsolatedDecoder(PLAN, workers=1, most_bytes=1_000_000)
    try:
        (child,) = limited._quick._children
        os.kill(child.process.pid, signal.SIGSTOP)
        first, waiting = limited.submit(content), content + b" "
        before = sys.getrefcount(waiting)
        second = limited.submit(waiting)
        assert sys.getrefcount(waiting) > before
        assert second.cancel()
        assert sys.getrefcount(waiting) == before
        os.kill(child.process.pid, signal.SIGCONT)
        assert first.result().error is None
    finally:
        limited.close()


def test_closing_ends_what_runs(content):
    limited = IsolatedDecoder(PLAN, workers=1, most_bytes=1_000_000)
    (child,) = limited._quick._children
    os.kill(child.process.pid, signal.SIGSTOP)
    future, waiting = limited.submit(content), limited.submit(content)
    wait_until(future.running)
    limited.close()
    assert child.process.poll() is not None
    assert future.result().error is not None
    assert waiting.cancelled()
    with pytest.raises(RuntimeError):
        limited.submit(content)


def test_libraries_of_a_process_print_nothing(capfd):
    tiff = bytearray(saved(photo(64, 48), "TIFF", compression="tiff_lzw"))
    tiff[20:600] = bytes(580)  # libtiff complains about the strips
    limited = IsolatedDecoder(PLAN, workers=1, most_bytes=1_000_000)
    try:
        limited.submit(bytes(tiff)).result()
        limited.submit(saved(photo(64, 48), "TIFF", compression="tiff_lzw")[:-700]).result()
    finally:
        limited.close()
    assert capfd.readouterr() == ("", "")


def test_limits_reach_the_process():
    limited = IsolatedDecoder(PLAN, workers=1, most_bytes=1_000_000)
    try:
        assert limited.submit_slow(hostile.webp(50, 50)).result().error is None
        (child,) = limited._slow._children
        limits = Path(f"/proc/{child.process.pid}/limits").read_text()
        (memory,) = re.findall(r"Max data size\s+(\d+)", limits)
        assert limited._slow.limits.memory < int(memory) < limited._slow.limits.memory + 400_000_000
        assert re.search(r"Max core file size\s+0 ", limits)
        assert os.getpriority(os.PRIO_PROCESS, child.process.pid) >= min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    finally:
        limited.close()


def test_limits_hold_whatever_the_parent_inherited(monkeypatch):
    """A process cannot raise a hard limit, and inherits signals that are ignored."""
    code = (
        "import resource, signal; signal.signal(signal.SIGPROF, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_DATA, 2 * (2_000_000_000,));"
        "from progresvit.data.isolated import IsolatedDecoder; from tests.data.test_isolated import PLAN, hostile;"
        "decoder = IsolatedDecoder(PLAN, workers=1, most_bytes=1_000_000);"
        "assert decoder.submit_slow(hostile.webp(50, 50)).result().error is None;"
        "(child,) = decoder._slow._children;"
        "status = open(f'/proc/{child.process.pid}/status').read();"
        "print(int(status.partition('SigIgn:')[2].split()[0], 16) >> (signal.SIGPROF - 1) & 1); decoder.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


# JPEGs for a device that decodes them


JPEG = replace(PLAN, jpeg=True, pixels=True)


def test_a_jpeg_for_the_device_is_recognised_by_its_first_bytes():
    for content in (saved(photo(300, 200)), saved(photo(3000, 2000)), saved(photo(300, 200).convert("L"))):
        quick, whole = prepare_for_gpu(content, JPEG), prepare(content, JPEG)
        assert quick.form is whole.form is Form.JPEG
        assert (quick.size, quick.orientation, quick.box) == (whole.size, whole.orientation, whole.box)
        assert np.array_equal(quick.data, whole.data)
    assert prepare_for_gpu(saved(photo(300, 200)), PLAN) is None


@pytest.mark.parametrize(
    "content",
    [
        hostile.jpeg(640, 480, frame=hostile.PROGRESSIVE),
        hostile.jpeg(640, 480, first=1),
        hostile.disguised_jpeg(640, 480),
        saved(photo(300, 200), "PNG"),
        saved(photo(300, 200))[:-100],
        b"\xff\xd8\xff" + bytes(100_000),
        b"",
    ],
)
def test_other_files_are_left_to_the_processes(content):
    assert prepare_for_gpu(content, JPEG) is None


# Files by name


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"


def test_formats_that_run_programs_are_refused_whatever_their_name_says(tmp_path, monkeypatch):
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: pytest.fail("a program was started"))
    path = tmp_path / "photo.jpg"
    path.write_bytes(EPS)
    assert "not an image, or of a format that Pillow does not read" in prepare(path, PLAN).error
    with pytest.raises(ImageError):
        decode(EPS)


def test_icons_are_refused_because_their_header_hides_their_size():
    assert "not an image" in prepare(saved(photo(48, 48), "ICO"), PLAN).error


def test_files_that_cannot_be_images_are_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("progresvit.data.entries.TRUSTED_BYTES", 2_000_000)
    path = tmp_path / "sparse.jpg"
    with path.open("wb") as file:
        file.truncate(3 * 2**30)
    assert prepare(path, PLAN).error == "a file of 3.0 GiB; the limit is 1 GiB"
    with path.open("r+b") as file:
        file.truncate(2**29)
    assert "not an image" in prepare(path, PLAN).error
    image = tmp_path / "image.png"
    image.write_bytes(saved(photo(64, 48), "PNG") + bytes(3_000_000))
    assert prepare(image, PLAN).error is None
    tga = tmp_path / "image.tga"
    tga.write_bytes(saved(photo(1000, 800), "TGA"))
    assert prepare(tga, PLAN).error is None


def test_pipes_and_devices_are_refused(tmp_path):
    pipe = tmp_path / "pipe.jpg"
    os.mkfifo(pipe)
    for path in (pipe, "/dev/zero", "/dev/null"):
        assert prepare(path, PLAN).error == "not a file but a pipe or a device"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s.jpg"))
        assert "cannot be read" in prepare(tmp_path / "s.jpg", PLAN).error
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)


def test_opening_takes_no_lock_and_leaves_the_filters_of_warnings_alone(monkeypatch):
    """A thread that opens images while another one is in the middle of it."""
    import warnings

    content = saved(photo(300, 200))
    monkeypatch.setattr(warnings, "catch_warnings", lambda *_, **__: pytest.fail("filters are global"))
    inside, release, opened, was_released = threading.Event(), threading.Event(), [], []
    original = Image.OPEN["JPEG"]

    def slow(*arguments):
        if threading.current_thread().name == "slow":
            inside.set()
            was_released.append(release.wait(PATIENCE))
        return original[0](*arguments)

    monkeypatch.setitem(Image.OPEN, "JPEG", (slow, original[1]))
    thread = threading.Thread(target=lambda: opened.append(open_header(content)), name="slow")
    thread.start()
    assert inside.wait(PATIENCE)
    assert open_header(content).size == (300, 200)
    release.set()
    thread.join()
    assert opened[0].size == (300, 200)
    assert was_released == [True]  # this thread did not wait for the other one
