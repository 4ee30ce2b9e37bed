"""Calibrated thresholds as JSON files: a single setting, the named settings of a model, and a table of budgets.

A setting says what its threshold is for, on what evidence, and for which model it holds. Its file has a checksum, by
which edits are noticed; it is not a signature, so it does not show who wrote the file. A model folder may contain
``settings/NAME.json`` and ``budgets.json``, which gives a threshold for any budget without records. The setting named
near-lossless is the default. All of them are written by ``progresvit calibrate``; ``progresvit train`` writes a first
default, from its validation images.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from progresvit.io.files import replace_file
from progresvit.io.imports import is_import_string
from progresvit.io.model_folder import BUDGETS_FILE, BUNDLED, SETTINGS, bundled_folder
from progresvit.io.parse import Section, count_of, dump_json, former_name, parse_json, read_json, read_text
from progresvit.metrics.arrays import Floats
from progresvit.routing.calibrate import ROUNDING, check_quantiles
from progresvit.routing.certify import check_evidence
from progresvit.routing.decide import OODRule, Policy, Threshold, as_thresholds
from progresvit.routing.metric import OperatingPoint

if TYPE_CHECKING:
    from progresvit.routing.router import Router

Rule = Literal["near-lossless", "budget", "exit-share", "guarantee"]
Loss = Literal["labelled", "unlabelled", "pixel-error"]

DEFAULT = "near-lossless"
"""The setting that a model is used with unless another is asked for."""


CHECKSUM = "checksum"
"""Key in files for the checksum of a setting. Settings of earlier versions have none."""


class SettingWarning(UserWarning):
    """There is no setting, or it was edited or calibrated with another preprocessing, precision or backend; or int8
    ranges were calibrated on few images."""


class Calibrated(Section):
    """What thresholds hold for: the model, its preprocessing and precision, and the number of images."""

    rounds: int
    weights_sha256: str = Field(validation_alias="weights")
    preprocessing_sha256: str = Field(validation_alias="preprocessing")
    precision: str
    backend: str | None = None
    """Backend that ran the graphs of an export; None for a model in torch."""
    graphs_sha256: str | None = Field(None, validation_alias="graphs")
    """Hash of int8 graphs with calibrated ranges; None if the weights determine the answers."""
    n: int
    """Number of images that were measured."""

    weights: ClassVar = former_name("weights_sha256")
    preprocessing: ClassVar = former_name("preprocessing_sha256")
    graphs: ClassVar = former_name("graphs_sha256")


class Setting(Calibrated):
    """A threshold with its rule, its evidence and the model that it holds for."""

    rule: Rule
    threshold: Threshold
    router_sha256: str | None = Field(None, validation_alias="router")
    """The learned router whose probabilities the threshold is for; None for entropies."""
    epsilon: float | None = None
    """Certificates only: the share of images that an early exit may harm, or the mean loss that is allowed."""
    delta: float | None = None
    """Certificates only: the probability that the certificate fails."""
    k: int | None = None
    """Certificates only: the number of harmed images among the n, that is, with a loss above 0."""
    mean_loss: float | None = None
    """Certificates on losses from 0 to 1 only: the mean loss over the n images."""
    loss: Loss | None = None
    """Certificates only: the definition of harm. A correct answer is lost (labelled), the last round disagrees
    (unlabelled), or the increase of an image's pixel error over the last round's (pixel-error)."""
    p_value: float | None = None
    copies: int | None = None
    """Certificates only: copies of other images that were left out; None if the records did not say which are
    copies."""
    choices: int | None = None
    """Certificates only: number of choices on these images, such as the evaluations among which a training chose the
    model. The test is at delta / choices (Bonferroni). None without a choice."""
    abstain: float | None = None
    """Answers of this top-10 entropy or more are withheld; None if all are given."""
    ood: OODRule | None = None
    """The rule for out-of-distribution images; None if no image counts as one."""
    entropy_quantiles: tuple[float, ...] | None = None
    """Quantiles of the calibration images' top-10 entropies in round 1, at evenly spaced levels from 0 to 1; None if
    they were not stored."""
    expected: dict[str, Any] = Field(default_factory=dict)
    """Results of the threshold on the calibration images."""
    data: str = ""
    date: str = ""
    chosen_on: Literal["validation"] | None = None
    """``validation`` if the training chose the threshold on its validation images; None for a setting of ``progresvit
    calibrate``."""

    router: ClassVar = former_name("router_sha256")

    @model_validator(mode="before")
    @classmethod
    def _check_checksum(cls, values: Any) -> Any:
        """Compare the content of a file with its checksum, if it has one."""
        if not isinstance(values, Mapping) or CHECKSUM not in values:
            return values
        content = {key: value for key, value in values.items() if key != CHECKSUM}
        if values[CHECKSUM] != _checksum(content):
            if content.get("rule") == "guarantee":  # the name of certificates in files
                raise ValueError("it was edited after it was certified")
            warnings.warn(
                "the setting was edited after it was calibrated, and its results may be those of another threshold; "
                "run progresvit calibrate again.",
                SettingWarning,
                stacklevel=2,
            )
        return content

    @field_validator("abstain")
    @classmethod
    def _check_abstain(cls, value: float | None) -> float | None:
        if value is not None and not value >= 0:
            raise ValueError(f"abstaining begins at an entropy of 0 or more, not at {value}")
        return value

    @field_validator("entropy_quantiles")
    @classmethod
    def _check_quantiles(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None:
            check_quantiles(value)
        return value

    @model_validator(mode="after")
    def _check_threshold(self) -> Setting:
        as_thresholds([self.threshold], self.rounds)
        return self

    @model_validator(mode="after")
    def _check_evidence(self) -> Setting:
        if self.is_certified:
            mean_loss = self.mean_loss if self.loss == "pixel-error" else None
            if self.epsilon is None or self.delta is None or self.k is None:
                raise ValueError("a guarantee without epsilon, delta and k certifies nothing; calibrate again")
            if self.loss == "pixel-error" and mean_loss is None:
                raise ValueError("a guarantee on the pixel error without mean_loss certifies nothing; calibrate again")
            check_evidence(
                harmed=self.k,
                mean_loss=mean_loss,
                images=self.n,
                epsilon=self.epsilon,
                delta=self.delta,
                choices=1 if self.choices is None else self.choices,
                p_value=self.p_value,
            )
        return self

    @property
    def is_certified(self) -> bool:
        """Whether the threshold has a certificate."""
        return self.rule == "guarantee"

    @property
    def evidence(self) -> str:
        """The rule and the images: ``near-lossless on 12 validation images, not certified``."""
        if self.is_certified:
            return f"certified on {count_of(self.n, 'image')}"
        images = "image" if self.chosen_on is None else "validation image"
        return f"{self.rule} on {count_of(self.n, images)}, not certified"

    @property
    def withheld(self) -> str:
        """Which answers are withheld: ``entropy of 0.97 or more, energy below 8.55``; empty for none."""
        limits = [] if self.abstain is None else [f"entropy of {self.abstain:.3g} or more"]
        limits += [] if self.ood is None else [f"{self.ood.score} below {self.ood.limit:.3g}"]
        return ", ".join(limits)

    def check_weights(self, weights_sha256: str, name: str = "the setting") -> None:
        """Refuse a model with other weights than the setting was calibrated for. ``name`` begins the error.

        An export has the weights of its model, also in int8, which is another precision.
        """
        if self.weights_sha256 == weights_sha256:
            return
        bundled = _bundled_model(self.weights_sha256)
        origin = "" if bundled is None else f" (the bundled model {bundled!r})"
        numbers = self.threshold if isinstance(self.threshold, tuple) else (self.threshold,)
        raise ValueError(
            f"{name} was calibrated for a model with other weights{origin}, and does not hold for this one. "
            "Calibrate on this model (progresvit evaluate, then progresvit calibrate), or give the number itself as "
            f"the threshold: {','.join(f'{number:g}' for number in numbers)}"
        )

    def caveat(
        self, *, preprocessing_sha256: str, precision: str, backend: str | None = None, graphs_sha256: str | None = None
    ) -> str | None:
        """A warning if the setting was calibrated under other conditions; None under its own.

        In float32 all built-in backends give the same answers up to rounding, so they count below that only. One of
        your own, which has an import string, always counts.
        """
        if precision == "fp32" and self.precision == "tf32" and not self.is_certified:
            precision = "tf32"  # engines run in fp32 what was trained in tf32; it differs by rounding
        used: dict[str, str | None] = {"preprocessing_sha256": preprocessing_sha256, "precision": precision}
        if precision == self.precision != "fp32" or is_import_string(backend):
            used |= {"backend": backend, "graphs_sha256": graphs_sha256}
        differing = [name.removesuffix("_sha256") for name, value in used.items() if getattr(self, name) != value]
        if not differing:
            return None
        effect = "the certificate does not hold here" if self.is_certified else "expect other results"
        return (
            f"the threshold was calibrated with other {' and '.join(differing)}: {effect}. "
            "Evaluate and calibrate again."
        )

    def check_use(self, rounds: int, router_sha256: str | None) -> None:
        """Refuse a model with another number of rounds, or scores of another kind."""
        if self.rounds != rounds:
            raise ValueError(
                f"the setting is for a model of {self.rounds} rounds, and this model has {rounds}; calibrate on the "
                "records of this model."
            )
        if self.router_sha256 != router_sha256:
            kind = "entropies" if self.router_sha256 is None else "the probabilities of a learned router"
            other = ", but not of the one that was given" if self.router_sha256 and router_sha256 else ""
            raise ValueError(
                f"the setting's threshold is for {kind}{other}; give the router that it was calibrated with, or none "
                "if it was none."
            )

    def policy(self, router: Router | None = None) -> Policy:
        """The policy of the setting; ``router`` is the one that its threshold is for."""
        return Policy.make(self.rounds, self.threshold, router=router, abstain=self.abstain, ood=self.ood)

    def to_json(self) -> str:
        """The JSON text with its checksum; fields that are None are left out."""
        first = {"rule": self.rule, "threshold": self.threshold}  # in the file they stand above the model
        values = {key: value for key, value in {**first, **self.by_key()}.items() if value is not None}
        if self.ood is not None:
            values["ood"] = self.ood.model_dump()
        return dump_json({**values, CHECKSUM: _checksum(values)})

    def save(self, path: str | Path) -> None:
        """Write the JSON file."""
        replace_file(Path(path), self.to_json() + "\n")


def expected_results(
    point: Mapping[str, Any], rounds: Mapping[str, Sequence[float] | Floats], *, full_gmacs: float, convention: str
) -> dict[str, Any]:
    """``Setting.expected``: an operating point beside all rounds.

    Args:
        point: The fields of the operating point.
        rounds: The accuracy of each round by name (top1; miou and pixel_accuracy); empty without labels.
        full_gmacs: GMACs of all rounds, on average over the images.
        convention: Convention of the GMACs.
    """
    return {
        **{name: point[name] for name in rounds},
        "gmacs": point["gmacs"],
        "exit_shares": list(point["exit_shares"]),
        "full_gmacs": full_gmacs,
        "saving": 1 - point["gmacs"] / full_gmacs,
        "convention": convention,
        **{f"full_{name}": float(of_rounds[-1]) for name, of_rounds in rounds.items()},
    }


def now() -> str:
    """The date of a new setting."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _checksum(values: Mapping[str, Any]) -> str:
    """SHA-256 of the values as JSON; the order of keys and the notation of numbers do not matter."""
    content = json.loads(dump_json(values, indent=None), parse_int=float)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_setting(path: str | Path) -> Setting:
    """Read a setting that ``progresvit calibrate`` wrote."""
    setting = read_json(Setting, path, what="setting", remedy="make one with the command progresvit calibrate.")
    if setting.is_certified and CHECKSUM not in parse_json(read_text(path)):
        warnings.warn(
            f"{path} has no checksum: an earlier version wrote it, or it was edited. Its threshold cannot be checked; "
            "run progresvit calibrate again.",
            SettingWarning,
            stacklevel=2,
        )
    return setting


def setting_names(folder: Path | None) -> list[str]:
    """Names of the settings in a model folder; none without a folder."""
    return [] if folder is None else sorted(path.stem for path in (folder / SETTINGS).glob("*.json"))


def setting_path(folder: Path, name: str = DEFAULT) -> Path:
    """The file of a setting in a model folder; by default that of the default setting."""
    return folder / SETTINGS / f"{name}.json"


def default_setting(folder: Path | None) -> Setting | None:
    """The near-lossless setting, if the folder has it."""
    path = None if folder is None else setting_path(folder)
    return None if path is None or not path.is_file() else load_setting(path)


def _bundled_model(weights_sha256: str) -> str | None:
    """The bundled model that has these weights, by its default setting."""
    for name in BUNDLED:
        setting = default_setting(bundled_folder(name))
        if setting is not None and setting.weights_sha256 == weights_sha256:
            return name
    return None


def find_setting(name_or_file: str | os.PathLike[str], folder: Path | None) -> Setting:
    """The setting in a file, or the setting of that name in the model folder.

    An existing file, or anything that ends in .json, is a path; everything else is a name.
    """
    path = Path(name_or_file).expanduser()
    if path.suffix == ".json" or path.is_file():
        return load_setting(path)
    names = setting_names(folder)
    if str(name_or_file) not in names:
        where = "the model" if folder is None else str(folder)
        listing, choice = (
            (f"it has {', '.join(names)}", "one of them, ") if names else (f"it has no {SETTINGS} folder with any", "")
        )
        raise ValueError(
            f"{where} has no setting {str(name_or_file)!r} ({listing}); give {choice}a number, or a file of the "
            "command progresvit calibrate."
        )
    assert folder is not None
    return load_setting(setting_path(folder, str(name_or_file)))


class Budgets(Calibrated):
    """The compute of many thresholds, from the first round alone to all rounds, and the model for which it holds."""

    points: tuple[OperatingPoint, ...] = Field(min_length=1)
    """Points in the order of falling GMACs, which are in the paper's convention."""
    data: str = ""
    date: str = ""

    def setting(self, gmacs: float) -> Setting:
        """The threshold that spends the most within an average of ``gmacs``."""
        full, first = self.points[0], self.points[-1]
        if not first.gmacs - ROUNDING <= gmacs <= full.gmacs + ROUNDING:
            raise ValueError(
                f"a budget of {gmacs:g} GMACs is out of reach: this model spends {first.gmacs:.3f} with the first "
                f"round alone and {full.gmacs:.3f} with all; choose one in between."
            )
        point = next((candidate for candidate in self.points if candidate.gmacs <= gmacs + 1e-9), first)
        spent = {"gmacs": point.gmacs, "full_gmacs": full.gmacs, "saving": 1 - point.gmacs / full.gmacs}
        accuracy = {"top1": point.top1} if point.top1 is not None else {}
        expected = {**spent, **accuracy, "exit_shares": list(point.exit_shares), "convention": "paper"}
        about = {name: value for name, value in self if name != "points"}  # the model and the images
        return Setting(rule="budget", threshold=point.threshold, expected=expected, **about)

    def save(self, path: str | Path) -> None:
        """Write the JSON file, one line per point."""
        points = ",\n".join(
            "    " + dump_json({key: value for key, value in asdict(point).items() if value is not None}, indent=None)
            for point in self.points
        )
        fields = {key: value for key, value in self.by_key().items() if key != "points" and value is not None}
        head = dump_json(fields).removesuffix("\n}")
        replace_file(Path(path), f'{head},\n  "points": [\n{points}\n  ]\n}}\n')


def load_budgets(path: str | Path) -> Budgets:
    """Read the table of budgets that ``progresvit calibrate`` wrote."""
    remedy = "the command progresvit calibrate makes it with its option for budgets."
    return read_json(Budgets, path, what="table of budgets", remedy=remedy)


def budget_setting(folder: Path | None, gmacs: float) -> Setting:
    """The setting for a budget, from the table in a model folder."""
    if folder is None:
        raise ValueError(
            f"a budget needs the {BUDGETS_FILE} of a model folder or an export, which a model in memory does not have; "
            "give the folder, or a threshold."
        )
    return load_budgets(folder / BUDGETS_FILE).setting(gmacs)
