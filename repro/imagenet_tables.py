"""ImageNet's own images on the page: imagenet-tiny beside DeiT-Tiny, from the results of imagenet.py.

Letters: N images, S rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import RootModel

from progresvit.io.parse import read_json
from progresvit.metrics.interval import Interval
from progresvit.metrics.interval import share_interval as wilson
from repro.compare import Difference, paired_difference
from repro.formats import Flags, Part, flags_of
from repro.outcomes import verdict_of
from repro.tables import gmacs, interval, share_interval, table

RESULTS = Path(__file__).with_name("imagenet.json")
OURS, PLAIN = "imagenet-tiny", "deit-tiny"
VAL, MATCHED, THRESHOLD, TOP = "val", "b-33", "a-44", "c-12"
SET_NAMES = {
    VAL: "ImageNet validation",
    MATCHED: "ImageNetV2 matched-frequency (b-33)",
    THRESHOLD: "ImageNetV2 threshold-0.7 (a-44)",
    TOP: "ImageNetV2 top-images (c-12)",
}
EVERY_ROUND, ROUND_1 = "every round", "round 1"
MARGIN = 0.5
"""Points of top-1 within which two models are called equivalent."""


class RoutedAt(Part):
    """A setting of the bundled model."""

    setting: str
    bits: Flags
    """Right or wrong of the routed answers, image by image."""
    exits: tuple[Flags, ...]
    """Images that exit after each round but the last."""


class SetResult(Part):
    """A model on a set of images, in the order of their names."""

    data: str
    """A key of SET_NAMES."""
    model: str
    weights: str
    command: str
    images: int
    names: str
    """Hash of the images' names."""
    classes: int
    """Number of classes with at least one image."""
    complete: int
    """Images of the whole set, of which these may be a part."""
    held_out: Flags
    """Images that neither trained, selected nor calibrated imagenet-tiny; the same for every model."""
    gmacs_paper: tuple[float, ...]
    bits: tuple[Flags, ...]
    """Right or wrong of each round, image by image."""
    at: tuple[RoutedAt, ...]
    """Empty for a model of one round."""
    device: str
    date: str

    def points(self) -> dict[str, tuple[NDArray[np.bool_], NDArray[np.float64]]]:
        """Points by name: which images are right, (N,), and the GMACs of each, (N,)."""
        right = [flags_of(bits, self.images) for bits in self.bits]
        alone = {EVERY_ROUND: (right[-1], np.full(self.images, self.gmacs_paper[-1]))}
        if len(right) > 1:
            alone[ROUND_1] = right[0], np.full(self.images, self.gmacs_paper[0])
        routed = {}
        for routed_at in self.at:
            exits = [flags_of(bits, self.images) for bits in routed_at.exits]
            rounds = np.stack([*exits, np.ones(self.images, bool)]).argmax(axis=0)  # (S, N) -> (N,)
            spent = np.array(self.gmacs_paper)[rounds]
            routed[routed_at.setting] = flags_of(routed_at.bits, self.images), spent
        return {EVERY_ROUND: alone.pop(EVERY_ROUND), **routed, **alone}


class SetResults(RootModel[tuple[SetResult, ...]]):
    """The file: every model on every set."""


@dataclass(frozen=True, kw_only=True)
class SetRow:
    """A model on a set at a point."""

    data: str
    model: str
    point: str
    images: int
    complete: int
    gmacs: float
    top1: Interval
    """Share with its 95 % interval over images (Wilson)."""
    difference: Difference | None
    """Difference to DeiT-Tiny on the same images; None for DeiT-Tiny."""

    @property
    def verdict(self) -> str | None:
        """Verdict on the difference."""
        return None if self.difference is None else verdict_of(self.difference, MARGIN)


class ImageNet:
    """The results of imagenet.py for a page.

    Refused if a set lacks a model, if its models were measured on different images, or if a model has other weights on
    another set.
    """

    def __init__(self, path: Path = RESULTS) -> None:
        remedy = "run repro/imagenet.py again."
        results = read_json(SetResults, path, what="results file of repro/imagenet.py", remedy=remedy).root
        self.sets = {(result.data, result.model): result for result in results}
        for data, model in ((data, model) for data in SET_NAMES for model in (OURS, PLAIN)):
            if (data, model) not in self.sets:
                raise ValueError(f"{path} has no results of {model} on {data}; {remedy}")
            if self.sets[data, model].weights != self.sets[VAL, model].weights:
                raise ValueError(f"{path}: the results of {model} on {VAL} and {data} are of other weights; {remedy}")
        for data in SET_NAMES:
            ours, plain = self.sets[data, OURS], self.sets[data, PLAIN]
            if ours.names != plain.names or not np.array_equal(ours.held_out, plain.held_out):
                raise ValueError(f"{path}: {OURS} and {PLAIN} were measured on different images of {data}; {remedy}")

    def rows(self, data: str, *, held_out: bool = True) -> list[SetRow]:
        """Every point of both models on a set, or on its images that did not make ours."""
        ours, plain = self.sets[data, OURS], self.sets[data, PLAIN]
        kept = flags_of(ours.held_out, ours.images) if held_out else np.ones(ours.images, bool)
        ((base, _),) = plain.points().values()
        rows = []
        for result in (plain, ours):
            for point, (right, spent) in result.points().items():
                rows.append(
                    SetRow(
                        data=data,
                        model=result.model,
                        point=point,
                        images=int(kept.sum()),
                        complete=result.complete,
                        gmacs=float(spent[kept].mean()),
                        top1=wilson(int(right[kept].sum()), int(kept.sum())),
                        difference=None if result is plain else _paired(right[kept], base[kept]),
                    )
                )
        return rows

    def row(self, data: str, point: str, model: str = OURS, *, held_out: bool = True) -> SetRow:
        """The row of a model at a point."""
        for row in self.rows(data, held_out=held_out):
            if (row.model, row.point) == (model, point):
                return row
        raise ValueError(f"{data} has no results of {model} at {point}.")

    def change(self, data: str, point: str) -> Difference:
        """Top-1 of a point of ours minus top-1 of every round, on images that were not used to make it."""
        ours = self.sets[data, OURS]
        kept, points = flags_of(ours.held_out, ours.images), ours.points()
        return _paired(points[point][0][kept], points[EVERY_ROUND][0][kept])

    def table(self, *sets: str, held_out: bool = True) -> str:
        """A table of some sets. Models are not compared on images that were used to make ours."""
        rows = [row for data in sets for row in self.rows(data, held_out=held_out)]
        cells = [
            [
                SET_NAMES[row.data],
                f"{row.images:,} of {row.complete:,}",
                "DeiT-Tiny" if row.model == PLAIN else row.model,
                None if row.model == PLAIN else row.point,
                gmacs(row.gmacs),
                share_interval(row.top1),
                interval(row.difference, 2) if row.difference and held_out else None,
                row.verdict if held_out else None,
            ]
            for row in rows
        ]
        heads = ["<set", "images", "<model", "<setting", "GMACs", "top-1 (%)", "minus DeiT-Tiny (points)", "<verdict"]
        which = "images that neither trained nor calibrated imagenet-tiny" if held_out else "all images"
        return table(f"ImageNet's own images: {which}; 95 % intervals over images", heads, cells)

    def commands(self) -> str:
        """Commands of every set and model."""
        return "\n".join(result.command for result in self.sets.values())


def _paired(ours: NDArray[np.bool_], theirs: NDArray[np.bool_]) -> Difference:
    return paired_difference(ours.astype(np.float64), theirs.astype(np.float64))
