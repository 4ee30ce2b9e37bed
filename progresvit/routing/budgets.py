"""A threshold for any budget, without records: a small table beside the model of what thresholds spent on real images.

``progresvit calibrate RECORDS --budgets --out MODEL/budgets.json`` writes it. Letters: N images, S rounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from progresvit.io.files import replace_file
from progresvit.io.model_folder import BUDGETS_FILE
from progresvit.routing.arrays import HIGHEST
from progresvit.routing.calibrate import ROUNDING, threshold_for_budget
from progresvit.routing.frontier import OperatingPoint, frontier
from progresvit.routing.settings import Setting

STEPS = 200
"""Budgets are this fine: a two-hundredth of the way from the first round alone to all rounds."""
REMEDY = f"make it with: progresvit calibrate RECORDS --budgets --out MODEL/{BUDGETS_FILE}"


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """What thresholds spend, from the first round alone to all rounds, and for which model that holds."""

    rounds: int
    weights: str
    """Hash of the model's weights."""
    preprocessing: str
    """Hash of the preprocessing."""
    precision: str
    n: int
    """Images on which it was seen."""
    points: tuple[OperatingPoint, ...]
    """Dearest first, GMACs in the paper's convention."""
    data: str = ""
    date: str = ""

    def setting(self, gmacs: float) -> Setting:
        """The threshold that spends the most within an average of so many GMACs."""
        dearest, cheapest = self.points[0], self.points[-1]
        if not cheapest.gmacs - ROUNDING <= gmacs <= dearest.gmacs + ROUNDING:
            raise ValueError(
                f"a budget of {gmacs:g} GMACs is out of reach: this model spends {cheapest.gmacs:.3f} with the first "
                f"round alone and {dearest.gmacs:.3f} with all; choose one in between."
            )
        point = next((one for one in self.points if one.gmacs <= gmacs + 1e-9), cheapest)
        known = {"gmacs": point.gmacs, "full_gmacs": dearest.gmacs, "saving": 1 - point.gmacs / dearest.gmacs}
        accuracy = {"top1": point.top1} if point.top1 is not None else {}
        return Setting(
            rule="budget",
            threshold=point.threshold,
            rounds=self.rounds,
            weights=self.weights,
            preprocessing=self.preprocessing,
            precision=self.precision,
            n=self.n,
            expected={**known, **accuracy, "exit_shares": list(point.exit_shares), "convention": "paper"},
            data=self.data,
            date=self.date,
        )

    def save(self, path: str | Path) -> None:
        """Write the JSON, a line for each point."""
        known = asdict(self)
        points = ",\n".join(
            "    " + json.dumps({key: value for key, value in point.items() if value is not None}, allow_nan=False)
            for point in known.pop("points")
        )
        head = json.dumps(known, indent=2, allow_nan=False).removesuffix("\n}")
        replace_file(Path(path), f'{head},\n  "points": [\n{points}\n  ]\n}}\n')


def spread_points(scores: ArrayLike, correct: ArrayLike | None, gmacs: Sequence[float]) -> tuple[OperatingPoint, ...]:
    """Operating points at evenly spread budgets, dearest first; (N, S) and (N, S), GMACs cumulative."""
    wanted = np.linspace(gmacs[-1], gmacs[0], STEPS + 1)
    thresholds = [threshold_for_budget(scores, gmacs, float(budget)) for budget in wanted[:-1]]
    always = max(math.nextafter(HIGHEST, math.inf), threshold_for_budget(scores, gmacs, gmacs[0]))  # every image leaves
    return tuple(frontier(scores, correct, gmacs, sorted({*thresholds, always})))


def load_budgets(path: str | Path) -> Budgets:
    """What ``progresvit calibrate --budgets`` wrote."""
    try:
        known = json.loads(Path(path).read_text(encoding="utf-8"))
        rows = [{"top1": None, **row, "exit_shares": tuple(row["exit_shares"])} for row in known.pop("points")]
        return Budgets(**known, points=tuple(OperatingPoint(**row) for row in rows))
    except FileNotFoundError:
        raise ValueError(f"there is no {path}, which tells what thresholds spend; {REMEDY}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of budgets ({error}); {REMEDY}") from error


def budget_setting(folder: Path | None, gmacs: float) -> Setting:
    """The threshold for a budget, from the table in a model's folder."""
    if folder is None:
        raise ValueError(
            f"a budget needs the {BUDGETS_FILE} of a model's folder, which exports and models in memory have not; give "
            "the folder, or a threshold."
        )
    return load_budgets(folder / BUDGETS_FILE).setting(gmacs)
