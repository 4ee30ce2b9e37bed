"""What a training adds to a model folder so that the model can be used: the default setting and the card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from progresvit.io.files import replace_file
from progresvit.io.model_folder import CARD_FILE
from progresvit.io.parse import count_of
from progresvit.io.weights import weights_hash
from progresvit.model.card import CARD_NAME, GENERATED, make_card
from progresvit.model.interface import RoundModel
from progresvit.model.registry import DEFAULT_KIND
from progresvit.routing.settings import Setting, expected_results, load_setting, now, setting_path
from progresvit.training.tasks.task import Task

ACCURACIES = ("top1", "miou", "pixel_accuracy")
"""The accuracies of a near-lossless point that a setting shows, as far as a task measures them."""


def hand_over(
    folder: Path, model: RoundModel, task: Task, values: Mapping[str, Any], *, data: str, precision: str
) -> None:
    """Write the default setting and the card of a model that was just validated.

    Files for the same weights stay as they are: they may have been calibrated or edited since.

    Args:
        folder: The model folder.
        model: Its model.
        task: The task that validated it.
        values: The result of the validation, ``Metrics.values``.
        data: The validation images in words.
        precision: The precision of the validation.
    """
    weights_sha256 = weights_hash(model)
    setting = validation_setting(model, task, values, weights_sha256, data=data, precision=precision)
    path = setting_path(folder)
    if setting is not None:
        present = _read(path)
        if present is not None and present.weights_sha256 == weights_sha256:
            setting = present
        else:
            path.parent.mkdir(exist_ok=True)
            setting.save(path)
    card = folder / CARD_FILE
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else GENERATED
    if GENERATED in text and f"{GENERATED}`{weights_sha256}`" not in text:
        about = describe(task, values, setting, weights_sha256)
        replace_file(card, make_card(model, CARD_NAME, title=folder.resolve().parent.name, about=about))


def validation_setting(
    model: RoundModel, task: Task, values: Mapping[str, Any], weights_sha256: str, *, data: str, precision: str
) -> Setting | None:
    """The near-lossless setting of a validation; None for a model that has no early exits or that no engine runs."""
    config, point = model.config, values.get("near_lossless")
    if (
        point is None
        or "images" not in values
        or config.kind != DEFAULT_KIND
        or not config.num_classes
        or len(config.rounds) == 1
    ):
        return None
    rounds = {name: values[name] for name in ACCURACIES if name in values and name in point}
    expected = expected_results(point, rounds, full_gmacs=values["full_gmacs"], convention=values["convention"])
    return Setting(
        rule="near-lossless",
        threshold=point["threshold"],
        rounds=len(config.rounds),
        weights_sha256=weights_sha256,
        preprocessing_sha256=task.preprocessing_sha256(model),
        precision=precision,
        n=values["images"],
        expected=expected,
        data=data,
        date=now(),
        chosen_on="validation",
    )


def describe(task: Task, values: Mapping[str, Any], setting: Setting | None, weights_sha256: str) -> list[str]:
    """The lines of the card about this training."""
    images = f" on {count_of(values['images'], 'image')}" if "images" in values else ""
    lines = [f"Validation at the end of the training{images}: {task.summarize(values)}.", ""]
    if setting is not None:
        lines += [
            f"The setting `near-lossless` is used by default. After the training it was τ = {setting.threshold}: "
            f"{setting.evidence}. `progresvit info MODEL` shows the settings as they are now.",
            "",
        ]
    return [*lines, f"{GENERATED}`{weights_sha256}`", ""]


def _read(path: Path) -> Setting | None:
    """The setting in a file; None if there is none, or none that can be read."""
    try:
        return load_setting(path) if path.is_file() else None
    except ValueError:
        return None
