"""Images of many calls, opened in groups: a GPU decodes and crops a group in little more time than one image."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from progresvit.data.prepare import Prepared
from progresvit.engine.images import ImageOpener, OpenedImages
from progresvit.engine.jobs import Call

GROUP = 64
"""The most images that are finished together."""


class _Waiting(NamedTuple):
    call: Call
    first: int
    """Position of the first image in the call."""
    images: list[Prepared]


class GroupedOpener:
    """Prepares the images of each call in a thread of the pool, and finishes those that wait together.

    Args:
        opener: Opens the images.
        pool: Its threads prepare images; one of them at a time finishes.
        deliver: Called with a call, the position of its first image, and the opened images.
        fail: Called with a call and the error, if opening fails for another reason than a bad image.
    """

    def __init__(
        self,
        opener: ImageOpener,
        pool: ThreadPoolExecutor,
        deliver: Callable[[Call, int, OpenedImages], None],
        fail: Callable[[Call, BaseException], None],
    ) -> None:
        self.opener, self.pool, self.deliver, self.fail = opener, pool, deliver, fail
        self._waiting: deque[_Waiting] = deque()
        self._lock, self._is_finishing = threading.Lock(), False

    def submit(self, call: Call, first: int, images: Sequence[Any]) -> None:
        """Open these images of a call, in a thread of the pool."""
        self.pool.submit(self._open, call, first, images)

    def _open(self, call: Call, first: int, images: Sequence[Any]) -> None:
        if not call.is_wanted:
            return
        try:
            prepared = self.opener.prepare(images)
        except BaseException as error:
            self.fail(call, error)
            return
        with self._lock:
            self._waiting.append(_Waiting(call, first, prepared))
            if self._is_finishing:
                return  # the thread that finishes takes it
            self._is_finishing = True
        while group := self._next_group():
            self._finish(group)

    def _next_group(self) -> list[_Waiting]:
        """The next waiting images, up to a group. If there are none, this thread stops finishing groups."""
        group: list[_Waiting] = []
        with self._lock:
            while self._waiting and sum(len(waiting.images) for waiting in group) < GROUP:
                waiting = self._waiting.popleft()
                if waiting.call.is_wanted:
                    group.append(waiting)
            self._is_finishing = bool(group)
        return group

    def _finish(self, group: list[_Waiting]) -> None:
        try:
            opened = self.opener.finish([image for waiting in group for image in waiting.images])
        except BaseException as error:
            if len(group) == 1:
                self.fail(group[0].call, error)
            else:
                for waiting in group:  # the others have nothing to do with it
                    self._finish([waiting])
            return
        start = taken = 0
        for call, first, images in group:
            errors = {
                place: opened.errors[start + place] for place in range(len(images)) if start + place in opened.errors
            }
            good = len(images) - len(errors)
            part = OpenedImages(opened.pixels[taken : taken + good], errors)
            start, taken = start + len(images), taken + good
            try:
                self.deliver(call, first, part)
            except BaseException as error:
                self.fail(call, error)
