"""A thread that prepares the next batches while the current one is computed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

JOIN = 1.0
"""Seconds to wait for the thread at the end; the source may block it for longer."""


class Prefetcher(Generic[T]):
    """The items of a source, up to ``depth`` ahead. Use it in a ``with`` block, and iterate or :meth:`poll`.

    ``arrived`` is called in the thread after each item, after the last one, and after an error.
    """

    END = object()

    def __init__(self, source: Iterable[T], depth: int = 2, *, arrived: Callable[[], object] | None = None) -> None:
        if depth < 1:
            raise ValueError(f"ahead must be at least 1 batch, got {depth}.")
        self._arrived = arrived
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(source,), daemon=True, name="progresvit-prefetch")

    def __enter__(self) -> Prefetcher[T]:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=JOIN)

    def __iter__(self) -> Iterator[T]:
        """All items; errors of the source are raised here."""
        while (item := self._queue.get()) is not self.END:
            if isinstance(item, Raised):
                raise item.error
            yield item

    def poll(self) -> T | object:
        """The next item, ``END`` after the last, ``Raised`` for an error of the source, or None: there is none yet."""
        try:
            return self._queue.get_nowait()  # type: ignore[no-any-return]
        except queue.Empty:
            return None

    def _work(self, source: Iterable[T]) -> None:
        try:
            for item in source:
                if not self._put(item):
                    return
            self._put(self.END)
        except BaseException as error:  # raised again in the thread that iterates
            self._put(Raised(error))

    def _put(self, item: Any) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                if self._arrived is not None:
                    self._arrived()
                return True
            except queue.Full:
                continue
        return False


class Raised:
    """An error of the source."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
