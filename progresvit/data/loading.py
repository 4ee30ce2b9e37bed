"""What all loaders of images share: worker processes, and the list of unreadable images."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from progresvit.data.dataset import ImageDataset


class Unreadable:
    """Images that could not be decoded, each listed once. More than one in a hundred, or all images, are an error."""

    limit = 0.01

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset
        self.reasons: dict[int, str] = {}

    def add(self, index: int, reason: str) -> None:
        """Add an image; an error if there are too many."""
        self.reasons[index] = reason
        count, total = len(self.reasons), len(self.dataset)
        if count > max(1, self.limit * total) or count == total:  # one bad file does not stop a small dataset
            raise ValueError(
                f"{count} of {total} images cannot be read, more than "
                f"{self.limit:.0%}: {'; '.join(self.lines()[:5])}. Repair or remove them."
            )

    def lines(self) -> list[str]:
        """One line per image: its name and the reason."""
        return [f"{self.dataset.entries[index].name}: {reason}" for index, reason in sorted(self.reasons.items())]


def load_in_workers(
    load: Callable[[Any], Any],
    groups: Iterable[list[Any]],
    *,
    collate: Callable[[list[Any]], Any],
    workers: int,
    pinned: bool = False,
) -> Iterator[Any]:
    """Each group as one result, in order: ``collate`` of what ``load`` returns for its items.

    Args:
        load: Called with an item. It returns errors for users, since the message of an exception in a worker contains
            the worker's traceback.
        groups: The items, such as indices.
        collate: Makes a batch in the worker, so that one tensor is sent and not one for each image.
        workers: Number of processes that load and collate; 0 does it in this process.
        pinned: The results are in page-locked memory, from which copies to a GPU are fast.
    """
    loader = DataLoader(
        _Loaded(load),
        batch_sampler=groups,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=pinned,
        worker_init_fn=_ignore_interrupts,
    )
    return iter(loader)


@dataclass
class _Loaded(Dataset[Any]):
    load: Callable[[Any], Any]

    def __getitem__(self, item: Any) -> Any:
        return self.load(item)


def _ignore_interrupts(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; the parent ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
