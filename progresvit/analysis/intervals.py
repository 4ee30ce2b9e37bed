"""Estimates with their 95 % intervals in tables: three columns, and three cells of a row."""

from __future__ import annotations

from collections.abc import Callable

from progresvit.metrics.interval import Interval
from progresvit.table import Column, Row


def interval_columns(key: str, head: str, show: Callable[[float], str]) -> tuple[Column, Column, Column]:
    """The columns of an estimate and of the ends of its interval."""
    return Column(key, head, show), Column(f"{key}_low", "95 % from", show), Column(f"{key}_high", "to", show)


def interval_cells(key: str, interval: Interval | None) -> Row:
    """The cells below :func:`interval_columns`; they are empty without an interval."""
    values = (None, None, None) if interval is None else (interval.mean, interval.lowest, interval.highest)
    return dict(zip((key, f"{key}_low", f"{key}_high"), values))
