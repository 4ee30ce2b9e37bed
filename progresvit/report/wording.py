"""How a page writes its figures: percent, points, intervals, schedules, and names as keys."""

from __future__ import annotations

import re
from collections.abc import Sequence

from progresvit.results.compare import Difference
from progresvit.results.format import Rounds

MINUS = "\N{MINUS SIGN}"


def percent(share: float, digits: int = 1) -> str:
    """A share as percent, without the sign."""
    return f"{round(100 * share, digits) + 0.0:.{digits}f}".replace("-", MINUS)


def signed(share: float, digits: int = 1) -> str:
    """A difference of shares in points, with its sign; nought has none."""
    value = round(100 * share, digits)
    return f"{value:+.{digits}f}".replace("-", MINUS) if value else f"{0:.{digits}f}"


def with_interval(difference: Difference, digits: int = 1) -> str:
    """In points, with the ends of the 95 % interval."""
    mean, lowest, highest = (
        signed(value, digits) for value in (difference.mean, difference.lowest, difference.highest)
    )
    return f"{mean} ({lowest} to {highest})"


def from_to(ends: tuple[float, float], digits: int = 1) -> str:
    """Two shares as percent."""
    return f"{percent(ends[0], digits)} to {percent(ends[1], digits)}"


def gmacs(value: float) -> str:
    """Three decimals, as the paper gives them; of a micro model, three digits that count."""
    return f"{value:.3f}" if value >= 0.01 or not value else f"{value:.3g}"


def shares(values: Sequence[float]) -> str:
    """Of several rounds, in percent."""
    return " / ".join(percent(value) for value in values)


def schedule(rounds: Rounds) -> str:
    """Such as 160→224, 2→3 heads."""
    resolutions, heads = ("→".join(map(str, values)) for values in (rounds.resolutions, rounds.heads))
    return f"{resolutions}, {heads} heads"


def key(name: str) -> str:
    """A name as part of a fact's: small letters, digits, dots and underscores, and hyphens for the rest."""
    return re.sub(r"[^\w.]+", "-", name.lower()).strip("-")
