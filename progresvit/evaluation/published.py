"""Published results of other methods, from a YAML file: top-1 and GMACs of each, with the source that reports them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, model_validator

from progresvit.io.parse import Section, did_you_mean, parse
from progresvit.io.yaml_files import read_mapping
from progresvit.routing import Top1
from progresvit.routing.metric import Metric

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
    known = sorted({name for one in series for name in one.comparisons})
    if comparison not in known:
        raise ValueError(f"{path} has no comparison {comparison!r}; {did_you_mean(comparison, known)}")
    return tuple(one for one in series if comparison in one.comparisons)


def check_comparable(published: Sequence[PublishedSeries], metric: Metric[Any]) -> None:
    """Refuse published top-1 accuracies beside another metric."""
    if published and not isinstance(metric, Top1):
        raise ValueError("published results are top-1 accuracies, and these records are of a segmentation model.")
