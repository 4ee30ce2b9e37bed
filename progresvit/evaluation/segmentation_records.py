"""Records of a segmentation model: the confusion matrix of every image in every round, and the scores.

Letters: N images, S rounds, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from progresvit import compute
from progresvit.evaluation.records import RoutedRecords
from progresvit.metrics.arrays import Float32s, Floats, Ints
from progresvit.metrics.miou import ClassCounts
from progresvit.routing import TENTHS, Router
from progresvit.routing.calibrate import threshold_for_exit_share
from progresvit.routing.metric import MeanIoU, Metric, SegmentationPoint
from progresvit.routing.settings import Loss

if TYPE_CHECKING:
    from scipy import sparse


@dataclass(frozen=True, kw_only=True)
class SegmentationRecords(RoutedRecords):
    """Records of a segmentation model: the confusion matrix of every image in every round.

    Counts of pixels add up exactly, so the mIoU of any part of the images, of any routed mixture of rounds and of
    several processes follows from them.
    """

    windows: Ints
    """Number of windows of each image, of all its views: (N,)."""
    scores: Float32s
    """(N, S), infinite where logits are not finite."""
    confusion: tuple[sparse.csr_array, ...]
    """Pixels of each image by label and prediction, one matrix per round: (N, K * K) int64, cell label * K +
    prediction."""

    default_loss = "pixel-error"

    @property
    def uncertainty(self) -> Float32s:
        return self.scores

    def check(self) -> None:
        super().check()
        if not self.confusion[0].sum():
            raise ValueError(
                "no pixel of these images has a label; check the masks and the mask values that are left out "
                "(ignore=…)."
            )

    def check_labelled(self) -> None:
        """Every image has a mask."""

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.header.config["num_classes"])

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes; their numbers if they have none."""
        config = self.header.config
        return tuple(config.get("labels") or config.get("class_ids") or map(str, range(self.classes)))

    @cached_property
    def counts(self) -> ClassCounts:
        """Pixels of each class, (N, S, K) each."""
        from scipy import sparse  # slow to import, and records of classification models do without

        cells = np.arange(self.classes**2)
        label, prediction = np.divmod(cells, self.classes)
        correct = label == prediction

        def summed(rows: Ints, column: Ints) -> Ints:
            """Pixels of these cells, each added to the class of its column."""
            shape = (len(cells), self.classes)
            adding = sparse.csr_array((np.ones(len(rows), np.int64), (rows, column)), shape=shape)
            return np.stack([(matrix @ adding).toarray() for matrix in self.confusion], axis=1)  # S x (N, K)

        return ClassCounts(summed(cells[correct], label[correct]), summed(cells, label), summed(cells, prediction))

    @property
    def totals(self) -> ClassCounts:
        """Pixels of each class in all images, by round: (S, K) each."""
        return ClassCounts(*(part.sum(axis=0) for part in self.counts))

    @property
    def pixel_error(self) -> Floats:
        """Share of an image's labelled pixels that are wrong, (N, S); 0 if it has no labelled pixels."""
        pixels = self.counts.labelled.sum(axis=-1)
        wrong = pixels - self.counts.intersection.sum(axis=-1)
        error: Floats = wrong / np.maximum(pixels, 1)
        return error

    def gmacs(self, convention: compute.Convention = "paper") -> Floats:
        """GMACs of each image if it exits after each round, of all its windows: (N, S)."""
        of_window = np.asarray(self.header.gmacs[convention], np.float64)
        spent: Floats = of_window * self.windows[:, None]
        return spent

    def router_scores(self, router: Router) -> Float32s:
        raise ValueError("a router scores the images of classification models; segmentation takes router=None.")

    def highest_score(self, router: Router | None = None) -> float:
        return math.log(self.classes)

    @cached_property
    def metric(self) -> Metric[SegmentationPoint]:
        return MeanIoU(self.counts)

    def losses(self, loss: Loss = "pixel-error") -> Floats:
        """The increase of an image's pixel error over the last round's: (N, S).

        It is 0 where the error decreases, so its mean bounds the increase of the mean pixel error.
        """
        if loss != "pixel-error":
            raise ValueError(f"loss={loss!r} is for classification models; pass loss='pixel-error'.")
        error = self.pixel_error
        return np.maximum(error - error[:, -1:], 0.0)

    def default_thresholds(self) -> list[float]:
        """The thresholds at which 0, 10, ..., 100 % of the images exit early, as far as images can."""
        if self.rounds == 1:
            return [0.0]
        highest = np.isfinite(self.scores[:, :-1]).any(axis=1).mean()
        shares = [share for share in TENTHS if share <= highest]
        return list(dict.fromkeys(threshold_for_exit_share(self.scores, share) for share in shares))

    def confusion_matrix(self, rounds: ArrayLike) -> Ints:
        """Pixels of all images by label and prediction, (K, K), in one round or in the exit round of each image.

        Args:
            rounds: A round counted from 0, or one for each image, (N,).
        """
        exits = np.broadcast_to(np.asarray(rounds), len(self))
        cells = sum(matrix[np.flatnonzero(exits == s)].sum(axis=0) for s, matrix in enumerate(self.confusion))
        return np.asarray(cells, np.int64).reshape(self.classes, self.classes)


def confusion_rows(
    images: ArrayLike, cells: ArrayLike, counts: ArrayLike, *, shape: tuple[int, int]
) -> sparse.csr_array:
    """A round's matrix, (N, K * K), from the row, the cell and the number of pixels of each entry."""
    from scipy import sparse

    numbers, rows, columns = (np.asarray(part, np.int64) for part in (counts, images, cells))
    matrix = sparse.coo_array((numbers, (rows, columns)), shape=shape).tocsr()
    matrix.sum_duplicates()  # and sorts
    return matrix


def confusion_cells(images: Sequence[int], confusion: Ints) -> dict[str, Ints]:
    """The cells of confusion matrices that are not 0, as columns: image, round, cell and number of pixels.

    Args:
        images: The number of each image.
        confusion: Pixels of each image and round by label and prediction, (B, S, K, K).
    """
    flat = confusion.reshape(*confusion.shape[:2], -1)  # (B, S, K * K)
    row, of_round, cell = flat.nonzero()
    return {
        "cell_image": np.array(images, np.int64)[row],
        "cell_round": of_round,
        "cell": cell,
        "cell_count": flat[row, of_round, cell],
    }


def matrices_of_cells(
    columns: Mapping[str, Ints], images: Ints, *, rounds: int, classes: int
) -> tuple[sparse.csr_array, ...]:
    """Each round's matrix from the columns of :func:`confusion_cells`; ``images`` are the numbers of its rows."""
    row_of = np.empty(images.max() + 1, np.int64)
    row_of[images] = np.arange(len(images))
    matrices = []
    for s in range(rounds):
        of_round = columns["cell_round"] == s
        rows, cells = row_of[columns["cell_image"][of_round]], columns["cell"][of_round]
        matrices.append(confusion_rows(rows, cells, columns["cell_count"][of_round], shape=(len(images), classes**2)))
    return tuple(matrices)
