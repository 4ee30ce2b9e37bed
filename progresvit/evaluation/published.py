"""Published results of other methods, from a YAML file: top-1 and GMACs of each, with the source that reports them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, model_validator

from progresvit.evaluation.header import Header
from progresvit.evaluation.records import RoutedRecords
from progresvit.io.parse import Section, did_you_mean, parse
from progresvit.io.yaml_files import read_mapping
from progresvit.routing import Top1

IMAGES = 50_000
"""Images of ImageNet's validation set, on which published results are measured."""
_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class PublishedPoint(Section):
    """One published result."""

    label: _Text
    """What tells it from the other points of its method, such as ``τ = 0.5``."""
    top1: float = Field(gt=0, le=100)
    """ImageNet top-1 accuracy in percent."""
    gmacs: float = Field(gt=0)
    """Average GMACs per image, as the source counts them."""


class PublishedSeries(Section):
    """Points of a method that one source reports."""

    method: _Text
    source: _Text
    """Paper with authors, year, arXiv id and table, or the README of a repository."""
    comparisons: tuple[_Text, ...] = Field(min_length=1)
    """The plots in which the method is shown, such as ``early-exit``."""
    one_model: bool = False
    """Whether the points are operating points of one trained model; they are connected by a line."""
    backbone: str | None = None
    resolution: _Text | int | None = None
    """Side of the images in pixels."""
    params_millions: float | None = Field(None, gt=0)
    points: tuple[PublishedPoint, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _check_source(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("source"):
            raise ValueError(
                f"{values.get('method', 'a method')} has no source; name the paper (authors, year, arXiv id, table) or "
                "the README that reports these numbers."
            )
        return values


class _File(Section):
    series: tuple[PublishedSeries, ...] = Field(min_length=1)


def read_published(path: str | Path, comparison: str | None = None) -> tuple[PublishedSeries, ...]:
    """The published results in a YAML file; with ``comparison``, the methods of that plot only."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"there are no published results at {path}; give a YAML file such as repro/published.yaml.")
    series = parse(_File, read_mapping(path, "file of published results", "series:"), origin=str(path)).series
    if comparison is None:
        return series
    comparisons = sorted({name for method in series for name in method.comparisons})
    if comparison not in comparisons:
        raise ValueError(f"{path} has no comparison {comparison!r}; {did_you_mean(comparison, comparisons)}")
    return tuple(method for method in series if comparison in method.comparisons)


def check_comparable(models: Mapping[str, RoutedRecords], published: Sequence[PublishedSeries]) -> None:
    """Refuse different samples of the same images, and published results beside anything but ImageNet's classes."""
    first = next(iter(models.values()))
    for records in models.values():
        first.check_same_sample(records)
    if published and not isinstance(first.metric, Top1):
        raise ValueError("published results are top-1 accuracies, and these records are of a segmentation model.")
    for name, records in models.items() if published else ():
        if classes := _other_classes(records.header):
            raise ValueError(
                f"published results are of ImageNet's 1000 classes, and {name} was evaluated on {classes}; leave the "
                "published results out, or give records of a model of ImageNet's classes on its validation images."
            )


def _other_classes(header: Header) -> str | None:
    """The classes of records, if they are not ImageNet's."""
    from progresvit.evaluation.classes import IMAGENET_CLASSES, imagenet_ids  # imports timm

    ids = header.config.get("class_ids") if header.probe is None else header.probe.get("classes")
    count = len(header.classes or ids or ()) or header.config["num_classes"]
    if count != IMAGENET_CLASSES:
        return f"{count} classes"
    foreign = {name for name in ids or () if re.fullmatch(r"n\d{8}", name)} - set(imagenet_ids())
    return f"other classes, such as {min(foreign)}" if foreign else None


def describe_images(models: Mapping[str, RoutedRecords]) -> str:
    """The images of the records, if they are not the whole validation set that published results are measured on."""
    described = {
        f"{header.images:,} images{'' if header.corruption is None else f' ({header.corruption})'}": None
        for header in (records.header for records in models.values())
        if header.images != IMAGES or header.corruption is not None
    }
    return f"measured on {', '.join(described)}, published on {IMAGES:,}" if described else ""
