"""Images of many calls that are opened in groups."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from progresvit.engine.images import OpenedImages
from progresvit.engine.jobs import TOGETHER, Call, CallOpener
from tests.waiting import PATIENCE, wait_until


class FakeOpener:
    """Images are numbers; negative ones cannot be opened. Finishing waits until it is released."""

    def __init__(self):
        self.groups, self.may_finish, self.plan = [], threading.Event(), SimpleNamespace(pixels=True)

    def prepare(self, images):
        if "wrong" in images:
            raise ValueError("no image")
        return list(images)

    def finish(self, images):
        self.groups.append(len(images))
        assert self.may_finish.wait(PATIENCE)
        if 999 in images:
            raise MemoryError("no memory")
        errors = {place: "bad" for place, image in enumerate(images) if image < 0}
        return OpenedImages(np.array([image for image in images if image >= 0]).reshape(-1, 1), errors)


@pytest.fixture
def made():
    opener, opened, failed = FakeOpener(), [], []
    with ThreadPoolExecutor(4) as pool:

        def deliver(call, first, images):
            opened.append((call, first, images.pixels[:, 0].tolist(), images.errors))

        yield CallOpener(opener, pool, deliver, lambda *what: failed.append(what)), opener, opened, failed


def wait_for_first(opener):
    wait_until(lambda: opener.groups)


def test_images_that_come_while_a_group_is_finished_are_the_next_group(made):
    grouped, opener, opened, _ = made
    calls = [Call(1) for _ in range(40)]
    grouped.submit(calls[0], 0, [0])
    wait_for_first(opener)
    for number, call in enumerate(calls[1:], 1):
        grouped.submit(call, 0, [number])
    wait_until(lambda: len(grouped._waiting) == 39)
    opener.may_finish.set()
    grouped.pool.shutdown()
    assert opener.groups == [1, 39]
    assert sorted((calls.index(call), pixels) for call, _, pixels, _ in opened) == [(n, [n]) for n in range(40)]


def test_groups_are_bounded_and_bad_images_stay_with_their_call(made):
    grouped, opener, opened, _ = made
    calls = [Call(30) for _ in range(5)]
    grouped.submit(calls[0], 0, [1])
    wait_for_first(opener)
    for call in calls[1:]:
        grouped.submit(call, 7, [5, -1, 6, *range(27)])
    wait_until(lambda: len(grouped._waiting) == 4)
    opener.may_finish.set()
    grouped.pool.shutdown()
    assert opener.groups == [1, 90, 30]  # the group is full with the call that reaches the limit
    assert TOGETHER <= 90
    for call, first, pixels, errors in opened[1:]:
        assert call in calls[1:]
        assert (first, pixels, errors) == (7, [5, 6, *range(27)], {1: "bad"})


def test_errors_concern_their_call_only_and_cancelled_calls_are_left_out(made):
    grouped, opener, opened, failed = made
    first, wrong, memory, cancelled, last = (Call(1) for _ in range(5))
    grouped.submit(first, 0, [1])
    wait_for_first(opener)
    grouped.submit(memory, 0, [999])
    grouped.submit(cancelled, 0, [3])
    grouped.submit(last, 0, [4])
    grouped.submit(wrong, 0, ["wrong"])
    while len(grouped._waiting) < 3 or not failed:
        threading.Event().wait(0.001)
    cancelled.is_wanted = False
    opener.may_finish.set()
    grouped.pool.shutdown()
    assert [(call, type(error)) for call, error in failed] == [(wrong, ValueError), (memory, MemoryError)]
    assert [call for call, *_ in opened] == [first, last]
    assert not grouped._is_finishing
