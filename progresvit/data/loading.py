"""What all loaders of images share: the list of unreadable images, and workers that leave Ctrl-C to their parent."""

from __future__ import annotations

import signal

from progresvit.data.dataset import ImageDataset


class Unreadable:
    """Images that could not be decoded, each listed once. More than one in a hundred of the dataset is an error."""

    limit = 0.01

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset
        self.reasons: dict[int, str] = {}

    def add(self, index: int, reason: str) -> None:
        """Add an image; an error if there are too many."""
        self.reasons[index] = reason
        if len(self.reasons) > max(1, self.limit * len(self.dataset)):  # one bad file does not stop a small dataset
            raise ValueError(
                f"{len(self.reasons)} of {len(self.dataset)} images cannot be read, more than "
                f"{self.limit:.0%}: {'; '.join(self.lines()[:5])}. Repair or remove them."
            )

    def lines(self) -> list[str]:
        """One line per image: its name and the reason."""
        return [f"{self.dataset.entries[index].name}: {reason}" for index, reason in sorted(self.reasons.items())]


def ignore_interrupts(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; the parent ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
