"""Class tokens of every round of a frozen model, for predictions without its head: k-NN and the linear probe.

Letters: B images, S rounds, d channels.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from progresvit.data.dataset import ImageDataset, some_of
from progresvit.data.transforms import NamedTransform, normalise
from progresvit.distributed import Processes
from progresvit.evaluation.parts import Parts
from progresvit.evaluation.run import DataSource, EvalOptions, ProgressCallback, fill_parts, source_header
from progresvit.model.interface import RoundModel
from progresvit.model.precision import autocast


@dataclass(frozen=True)
class LabelledSplits:
    """Labelled images to learn from, and those to classify."""

    bank: ImageDataset
    images: ImageDataset
    """Their targets are classes of the bank."""

    def describe(self, bank_split: str) -> dict[str, Any]:
        """The bank, as a header holds it."""
        names = "\n".join(entry.name for entry in self.bank.entries)
        return {
            "split": bank_split,
            "images": len(self.bank),
            "names": hashlib.sha256(names.encode()).hexdigest(),
            "classes": list(self.bank.class_ids),
        }


def check_features(model: RoundModel, source: DataSource) -> None:
    """Refuse models without class tokens, and sources whose images have no classes."""
    if not hasattr(model, "features"):
        raise ValueError(
            f"k-NN and the linear probe need the features of a model, and {type(model).__name__} has no method "
            "'features'; evaluate its head (without --task), or give another model."
        )
    if model.config.task != "classification":
        raise ValueError(
            "k-NN and the linear probe classify images by the class token, and the model segments images; evaluate it "
            "without --task, or give a classification model."
        )
    if source.unlabelled:
        raise ValueError("k-NN and the linear probe need labelled images (<split>/<class>/<image>), not --unlabelled.")
    if source.restrict_classes:
        raise ValueError("k-NN and the linear probe choose among the classes of the data only; omit restrict_classes.")


def find_labelled(source: DataSource, bank_split: str) -> LabelledSplits:
    """The images of the bank, and those of the source; each class needs images in the bank, and no image is in both."""
    bank = replace(source, split=bank_split).find()
    images = source.find()
    filled = Counter(bank.targets)
    known = {name: number for number, name in enumerate(bank.class_ids) if filled[number]}
    missing = sorted({images.class_ids[target] for target in images.targets} - set(known))
    if missing:
        raise ValueError(
            f"the split {source.split} has classes of which the bank, the split {bank_split}, has no images: "
            f"{some_of(missing)}; add images there, remove the classes here, or name another split with --bank-split."
        )
    shared = {*bank.entries} & {*images.entries}
    if shared:
        raise ValueError(
            f"{len(shared)} images of the split {source.split} are in the bank, the split {bank_split}, too, such as "
            f"{min(entry.name for entry in shared)}; name another split with --split or --bank-split."
        )
    targets = tuple(known[images.class_ids[target]] for target in images.targets)
    return LabelledSplits(bank, replace(images, class_ids=bank.class_ids, targets=targets))


def class_tokens(model: RoundModel, images: Tensor, precision: str) -> list[Tensor]:
    """The class token of each round, after its final norm, in float32: (B, C, H, H) -> S times (B, d)."""
    with autocast(images.device, precision):
        rounds = model.features(images)  # type: ignore[attr-defined]  # see check_features
    return [features.class_token.float() for features in rounds]


def extract_features(
    model: RoundModel,
    source: DataSource,
    parts: Parts,
    *,
    name: str,
    options: EvalOptions,
    processes: Processes,
    progress: ProgressCallback | None = None,
) -> None:
    """Write the class tokens of all images as parts: a column ``round1``, ``round2``, … for each round.

    Args:
        model: It is on the device of the processes, in evaluation mode.
        source: Where the images are from, and how they are corrupted.
        parts: The parts of the images.
        name: The model's name.
        options: Precision, batch size and so on.
        processes: Processes that share the work, and their device.
        progress: Called after each batch.
    """

    def columns_of(indices: Sequence[int], pixels: Tensor) -> dict[str, Tensor]:
        rounds = class_tokens(model, normalise(pixels, model.config), options.precision)
        return {f"round{s}": features for s, features in enumerate(rounds, start=1)}

    plain = replace(options, keep_logits=False)
    header = source_header(model, source, parts.dataset, name=name, options=options, device=processes.device)
    header = replace(header, probe={"task": "features"})  # another number of neighbours continues with the same parts
    transform = NamedTransform(model.config, source.corruption)
    fill_parts(parts, header, transform, columns_of, options=plain, processes=processes, progress=progress)


def read_features(parts: Parts, s: int) -> Tensor:
    """The features of round s, counted from 0, of all readable images: (N, d)."""
    return torch.from_numpy(parts.column(f"round{s + 1}"))
