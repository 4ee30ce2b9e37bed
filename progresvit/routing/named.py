"""The settings that a model brings along: its folder may hold ``settings/NAME.json``, each as calibrate writes it.

A threshold is then asked for by name, and the one called near-lossless is used where none is asked for.
"""

from __future__ import annotations

import os
from pathlib import Path

from progresvit.io.model_folder import SETTINGS
from progresvit.routing.settings import Setting, load_setting

DEFAULT = "near-lossless"
"""The setting that a model is used with unless another is asked for."""


def setting_names(folder: Path | None) -> list[str]:
    """Of the settings in a model's folder; none without a folder."""
    return [] if folder is None else sorted(path.stem for path in (folder / SETTINGS).glob("*.json"))


def default_setting(folder: Path | None) -> Setting | None:
    """The near-lossless one, if the folder has it."""
    return find_setting(DEFAULT, folder) if DEFAULT in setting_names(folder) else None


def find_setting(wanted: str | os.PathLike[str], folder: Path | None) -> Setting:
    """The setting of a file, or the one of that name in the model's folder.

    Whatever is a file here or ends in .json is a path; only then is it a name.
    """
    path = Path(wanted).expanduser()
    if path.suffix == ".json" or path.is_file():
        return load_setting(path)
    names = setting_names(folder)
    if str(wanted) not in names:
        where = "the model" if folder is None else str(folder)
        there, one = (
            (f"it has {', '.join(names)}", "one of them, ") if names else (f"it has no {SETTINGS} folder with any", "")
        )
        raise ValueError(
            f"{where} has no setting {str(wanted)!r} ({there}); give {one}a number, or a file that this wrote: "
            "progresvit calibrate RECORDS --out FILE.json"
        )
    assert folder is not None
    return load_setting(folder / SETTINGS / f"{wanted}.json")
