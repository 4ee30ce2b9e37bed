"""Processes that prepare images: in order, each as in this process, and a file that kills one fails alone."""

import os
import select
import signal
import subprocess
import sys

import numpy as np
import pytest

from progresvit.data.prepare import Form, prepare
from progresvit.data.worker_pool import WorkerPool
from tests.data.files import photo, saved
from tests.data.test_prepare import CROP, JPEG, PIXELS
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow


class Killer:
    """Kills the process that receives it."""

    def __reduce__(self):
        return signal.raise_signal, (signal.SIGKILL,)


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """Bytes and paths of 30 images of all kinds, one unreadable."""
    folder = tmp_path_factory.mktemp("files")
    requests = []
    for number in range(30):
        format = ("JPEG", "PNG", "WEBP")[number % 3]
        content = saved(photo(40 + 7 * number, 50), format)
        path = folder / f"{number}.bin"
        path.write_bytes(content if number != 11 else content[:-200])
        requests.append(path if number % 2 else path.read_bytes())
    return requests


def all_of(pool, batches):
    """The results, copied, with the sizes of the groups."""
    results, sizes = [], []
    for group in pool.prepared(batches):
        for image in group:
            results.append((image.form, None if image.data is None else image.data.copy(), image.size, image.error))
        sizes.append(len(group))
    return results, sizes


@pytest.mark.parametrize("plan", [CROP, PIXELS, JPEG], ids=["crop", "pixels", "jpeg"])
def test_processes_give_what_this_process_gives_in_order(contents, plan):
    with WorkerPool(plan, 2, group=16) as pool:
        results, sizes = all_of(pool, [contents[:20], contents[20:], [], contents[:1]])
        assert sizes == [16, 4, 10, 1]  # no group has images of two batches
        for request, (form, data, size, error) in zip([*contents, contents[0]], results):
            expected = prepare(request, plan)
            assert (form, size, error) == (expected.form, expected.size, expected.error)
            assert error is not None or np.array_equal(data, expected.data.ravel())
        assert all_of(pool, [])[0] == []
        assert len(all_of(pool, [contents])[0]) == 30  # a pool can be used again


def test_a_file_that_kills_a_process_fails_alone(contents):
    requests = [*contents[:5], Killer(), *contents[5:12], Killer()]
    with WorkerPool(CROP, 2) as pool:
        results, _ = all_of(pool, [requests, contents])
    assert len(results) == len(requests) + len(contents)
    for request, (form, data, _, error) in zip([*requests, *contents], results):
        if isinstance(request, Killer):
            assert form == Form.ERROR
            assert "ended by the system (out of memory?)" in error
        elif error is None:
            assert np.array_equal(data, prepare(request, CROP).data.ravel())
    assert sum(error is not None for *_, error in results) == 4  # and the truncated file, twice


def test_processes_end_with_the_one_that_started_them():
    code = """
import os, sys, time
from progresvit.data.worker_pool import WorkerPool
from tests.data.test_worker_pool import CROP, photo, saved
pool = WorkerPool(CROP, 2)
groups = pool.prepared([[saved(photo())] * 40])
next(groups)
print(*[worker.process.pid for worker in pool._running], flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == -signal.SIGKILL, done.stderr
    numbers = [int(number) for number in done.stdout.split()]
    assert len(numbers) == 2
    for number in numbers:
        try:
            pidfd = os.pidfd_open(number)
        except ProcessLookupError:
            continue
        with os.fdopen(pidfd):
            assert select.select([pidfd], [], [], 30)[0], "the process outlived its parent"


def test_leaving_early_ends_the_processes(contents):
    with WorkerPool(CROP, 2) as pool:
        next(pool.prepared([contents] * 100))
        processes = [worker.process for worker in pool._running]
    assert all(process.poll() is not None for process in processes)


def test_a_script_needs_no_guard_and_workers_import_no_torch(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from progresvit.data.worker_pool import WorkerPool\n"
        "from tests.data.test_worker_pool import CROP, photo, saved\n"
        "with WorkerPool(CROP, 1) as pool:\n"
        "    print(sum(map(len, pool.prepared([[saved(photo())] * 20]))))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.stdout == "20\n", done.stderr
    code = "import sys, progresvit.data.worker_pool; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "timm", "torchvision"} & set(loaded)


def test_a_pool_of_no_workers_is_refused():
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        WorkerPool(CROP, 0)
