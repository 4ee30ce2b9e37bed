"""The header of records: which model was evaluated on which data, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from progresvit import compute
from progresvit.config import ModelConfig
from progresvit.data.dataset import TIMM_NAMES
from progresvit.io.parse import former_name
from progresvit.model.registry import DEFAULT_KIND

TRAINING_WORDS = {"train", "training", "trainval", "trainset"}
"""Words in the names of splits for training, such as ``train2017``, ``train+validation`` and ``train/cats``."""

FROM_THE_FOLDER = ("training_images", "evaluations")
"""Fields of a header that the folder of the model tells; they are left out of files if they are None."""

FILE_KEYS = {
    "weights_sha256": "weights",
    "preprocessing_sha256": "preprocessing_hash",
    "names_sha256": "names",
    "corruption_sha256": "corruption_source",
    "graphs_sha256": "graphs",
}
"""Fields of a header that have another key in files."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """Which model was evaluated on which data, and how."""

    model: str
    """Name of the model as the user gave it."""
    weights_sha256: str
    config: Mapping[str, Any]
    """The model's config as JSON holds it. Its kind may be unknown to this version."""
    gmacs: Mapping[str, Sequence[float]]
    """GMACs of an image that exits after each round, by convention."""
    routable: bool = True
    """False if the rounds are alternatives among which there is no routing."""
    preprocessing: Mapping[str, Any]
    preprocessing_sha256: str
    precision: str
    """Precision of the arithmetic, or int8 for an export of int8 graphs."""
    device: str
    data: str
    split: str | None
    """None if the images have no labels."""
    images: int
    """Images that were found; unreadable ones are not among the records."""
    names_sha256: str
    """Names of the images, in order."""
    drawn_from: int | None = None
    """Number of images in the data, if it has no splits and these are a sample of it."""
    sample: Mapping[str, int] | None = None
    """If the images are a random sample: its size (``images``), the number it was drawn from (``of``), and ``seed``."""
    training_images: int | None = None
    """Images that the model was trained on, by the names in its folder; None if its folder does not tell."""
    evaluations: int | None = None
    """Evaluations on these images among which the training chose the model; None if it was not chosen on them."""
    classes: tuple[int, ...] | None = None
    """Numbers of the data's classes, if predictions were restricted to them. Entropies are over all classes."""
    corruption: str | None = None
    """Corruption and severity, such as ``fog/3``."""
    corruption_sha256: str | None = None
    """File of your own corruption; None for the built-in ones."""
    masks: Mapping[str, Sequence[int]] | None = None
    """Raw values of the masks: the values of the classes, in order, and the ignored values; None in classification."""
    probe: Mapping[str, Any] | None = None
    """The predictor on the model's features in place of its head: ``task`` (``knn`` or ``linear``), its settings, the
    labelled images and their classes. None if the head predicts."""
    probe_result: Mapping[str, Any] | None = None
    """The choices on held-out images; None for k-NN and if the head predicts."""
    backend: str | None = None
    """The runtime of an export's graphs (onnxruntime or openvino); None for a model in torch."""
    graphs_sha256: str | None = None
    """Int8 graphs whose ranges come from calibration images; None if the weights determine them."""
    unreadable: tuple[str, ...] = ()
    """One line for each image that could not be read."""
    date: str = ""
    version: str = ""

    weights = former_name("weights_sha256")
    preprocessing_hash = former_name("preprocessing_sha256")
    names = former_name("names_sha256")
    corruption_source = former_name("corruption_sha256")
    graphs = former_name("graphs_sha256")

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.gmacs["paper"])

    def check_not_trained_on(self) -> None:
        """Refuse images that the model was trained on: a split with such a name, or names on the model's list."""
        split = Path(self.data).name if self.split in (None, ".") else self.split
        if TRAINING_WORDS & set(re.findall("[a-z]+", split.lower())):
            is_named = self.data.startswith(TIMM_NAMES)  # the names of its splits cannot be changed
            remedy = "save them to a folder of another name" if is_named else f"rename {split}"
            raise ValueError(
                f"these are records of the training split ({split}), on which a model makes fewer errors than on other "
                "images, so they cannot certify it; evaluate on images that it was not trained on. If it was not "
                f"trained on these, {remedy} and evaluate again."
            )
        if self.training_images:
            raise ValueError(
                f"the model was trained on {self.training_images} of these {self.images} images, by name, and makes "
                "fewer errors on them, so they cannot certify it; evaluate on other images, or rename images that only "
                "have the same names."
            )

    def describe_sample(self) -> str:
        """Which of its images the data were evaluated on."""
        if self.sample is None:
            return "all images"
        return "a sample of {images} of {of} images (seed {seed})".format(**self.sample)

    def check_routable(self) -> None:
        """Refuse rounds that are alternatives."""
        if not self.routable:
            raise ValueError(
                f"the rounds of a model of kind {self.config.get('kind')!r} are alternatives, so there is no routing "
                "among them; compare the accuracy and the GMACs of its rounds."
            )

    def to_dict(self) -> dict[str, Any]:
        """The content of the file; fields that do not apply to this evaluation (masks, probe, …) are left out."""
        optional = ("sample", "corruption_sha256", "masks", "probe", "probe_result", "backend", "graphs_sha256")
        return {
            FILE_KEYS.get(name, name): value
            for name, value in asdict(self).items()
            if name not in (*optional, *FROM_THE_FOLDER) or value is not None
        }

    def identity(self) -> dict[str, Any]:
        """The fields that tell one evaluation from another: not the outcome, and nothing that follows from the rest."""
        values = self.to_dict()
        outcome = ("unreadable", "date", "version", "model", "device", "gmacs", "routable", "probe_result")
        for key in (*outcome, *FROM_THE_FOLDER):
            values.pop(key, None)
        return values


def read_header(values: Mapping[str, Any]) -> Header:
    """A header; one of version 0.1.0 has ``pictures`` for ``images``, no kind of model and no GMACs."""
    names = {"pictures": "images", **{key: name for name, key in FILE_KEYS.items()}}
    values = {names.get(key, key): value for key, value in values.items()}
    values["config"] = {"kind": DEFAULT_KIND, **values["config"]}
    if "gmacs" not in values:
        config = ModelConfig.from_dict(values["config"])
        values["gmacs"] = {
            convention: compute.cumulative_gmacs(config, convention) for convention in compute.CONVENTIONS
        }
    lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return Header(**{**values, **lists})
