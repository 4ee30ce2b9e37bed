"""A calibrated threshold as a small JSON file: what it is for, on what evidence, and for which model it holds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from progresvit.io.files import replace_file
from progresvit.routing.frontier import as_thresholds

Rule = Literal["near-lossless", "budget", "exit-share", "guarantee"]
Loss = Literal["labelled", "unlabelled"]


class SettingWarning(UserWarning):
    """A threshold is used for something else than what it was calibrated for."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A threshold and what is known of it."""

    rule: Rule
    threshold: float | tuple[float, ...]
    """For all rounds, or one for each round but the last."""
    rounds: int
    weights: str
    """Hash of the model's weights."""
    preprocessing: str
    """Hash of the preprocessing."""
    precision: str
    n: int
    """Images that it was calibrated on."""
    router: str | None = None
    """Hash of the learned router whose probabilities it is for; None for entropies."""
    epsilon: float | None = None
    """With a guarantee: the share of images that leaving early may harm, ..."""
    delta: float | None = None
    """... the probability that this fails, ..."""
    k: int | None = None
    """... how many of the n images were harmed, ..."""
    loss: Loss | None = None
    """... and what harm means: a right answer lost (labelled), or the last round disagrees (unlabelled)."""
    p_value: float | None = None
    abstain: float | None = None
    """Answers of this top-10 entropy or more are withheld; None if all are given."""
    expected: dict[str, Any] = field(default_factory=dict)
    """What the threshold gave on the calibration images."""
    data: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        as_thresholds([self.threshold], self.rounds)
        if self.abstain is not None and not self.abstain >= 0:
            raise ValueError(f"abstaining begins at an entropy of 0 or more, not at {self.abstain}")

    def caveat(self, *, weights: str, preprocessing: str, precision: str) -> str | None:
        """What to be warned of when it is used with another model than it was calibrated for; None with its own."""
        used = {"weights": weights, "preprocessing": preprocessing, "precision": precision}
        differing = [name for name, value in used.items() if getattr(self, name) != value]
        if not differing:
            return None
        what = "the certificate does not hold here" if self.rule == "guarantee" else "expect other results"
        return (
            f"the threshold was calibrated with other {' and '.join(differing)}: {what}. "
            "Evaluate and calibrate again for this model."
        )

    def check_use(self, rounds: int, router: str | None) -> None:
        """Refuse a model of other rounds, or scores of another kind: the threshold would mean nothing there."""
        if self.rounds != rounds:
            raise ValueError(
                f"the setting is for a model of {self.rounds} rounds and this one has {rounds}; calibrate on its own."
            )
        if self.router != router:
            kind = "entropies" if self.router is None else "the probabilities of a learned router"
            other = ", of another one than was given" if self.router and router else ""
            raise ValueError(
                f"the setting's threshold is for {kind}{other}; give the router that it was calibrated with, or none "
                "if it was none."
            )

    def to_json(self) -> str:
        """What is known of it; the rest is left out."""
        known = {key: value for key, value in asdict(self).items() if value is not None}
        return json.dumps(known, indent=2, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write the JSON."""
        replace_file(Path(path), self.to_json() + "\n")


def load_setting(path: str | Path) -> Setting:
    """A setting that ``progresvit calibrate`` wrote."""
    try:
        return setting_from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ValueError(
            f"there is no setting at {path}; make one with: progresvit calibrate RECORDS --out {path}"
        ) from None
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no setting ({error}); make one with: progresvit calibrate RECORDS --out FILE"
        ) from error


def setting_from_dict(known: Any) -> Setting:
    """From what :meth:`Setting.to_json` holds."""
    if not isinstance(known, dict):
        raise TypeError("no object")
    unknown = sorted(set(known) - {item.name for item in fields(Setting)})
    if unknown:
        raise TypeError(f"unknown key {unknown[0]!r}")
    threshold = known.get("threshold")
    return Setting(**{**known, "threshold": tuple(threshold)} if isinstance(threshold, list) else known)
