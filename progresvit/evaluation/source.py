"""Images and options of an evaluation, and the header of its records."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from progresvit import __version__
from progresvit.compute import CONVENTIONS
from progresvit.config import BaseConfig
from progresvit.data.augment.corruption import Corruption
from progresvit.data.crop import describe_preprocessing, description_hash
from progresvit.data.dataset import TIMM_NAMES, ImageDataset, find_images, find_unlabelled
from progresvit.data.gpu_decode import plan_for
from progresvit.data.split import draw_sample
from progresvit.data.trained_on import count_evaluations, count_training_images
from progresvit.distributed import Processes
from progresvit.evaluation.classes import class_numbers
from progresvit.evaluation.header import Header
from progresvit.io.parse import count_of
from progresvit.io.weights import weights_hash
from progresvit.model.interface import RoundModel
from progresvit.model.precision import PRECISIONS, check_precision


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where images come from and how they are prepared."""

    data: str
    """A folder, tars, or a name that timm knows (``hfds/…``, ``wds/…``)."""
    split: str = "val"
    unlabelled: bool = False
    """Take all images of all folders; there are no labels."""
    restrict_classes: bool = False
    """Predictions choose only among the classes of the data (ImageNet-A and -R)."""
    corruption: Corruption | None = None
    limit: int | None = None
    """Take a random sample of this many images; None takes all."""
    seed: int = 0
    """Seed of the sample. Every model gets the same images, and a larger sample contains a smaller one."""
    others: dict[str, Mapping[str, int]] = field(default_factory=dict, compare=False)
    """By split (``.`` if it was drawn), the number of other files than images, by suffix. :meth:`find` fills it."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}; without a limit, all images are taken.")

    def find(self) -> ImageDataset:
        """The images, with targets by the data's own classes. Names must be unique."""
        if self.unlabelled and self.data.startswith(TIMM_NAMES):
            raise ValueError(
                "images without labels are read from a folder or tars; timm's datasets have labels, so leave out "
                "unlabelled=True."
            )
        if self.unlabelled:
            images = find_unlabelled(self.data, others := Counter[str]())
            images = replace(images, others=others)
        else:
            images = find_images(self.data, self.split)
        self.others["." if images.drawn_from is not None else self.split] = images.others
        counts = Counter(entry.name for entry in images.entries)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise ValueError(
                f"{len(twice)} images of {self.data} share their name with another, such as {twice[0]}; records "
                "identify images by name, so rename them or evaluate the sets separately."
            )
        if self.limit is None:
            return images
        if self.limit > len(images):
            raise ValueError(
                f"limit={self.limit} is more than the {count_of(len(images), 'image')} of {self.data}"
                f"{'' if self.unlabelled else f' ({self.split})'}; give at most {len(images)}, or leave it out to "
                "take all."
            )
        sample = draw_sample([entry.name for entry in images.entries], self.limit, seed=self.seed)
        return replace(images.subset(sample), sampled_from=len(images))


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """How an evaluation runs. Only the precision and ``decode`` change its outcome."""

    precision: str = "fp32"
    batch: int = 128
    workers: int = 2
    """Processes that decode images; 0 decodes in the calling process."""
    decode: str = "cpu"
    """Where images are decoded and cropped: cpu is exact; gpu, or auto with a GPU that can, is faster and differs by
    rounding."""
    keep_logits: bool = False
    overwrite: bool = False
    cache: Path | None = None
    """Folder that keeps corrupted images for later models; None generates them each time."""

    def __post_init__(self) -> None:
        if self.batch < 1 or self.workers < 0:
            raise ValueError(
                f"a batch holds at least one image and workers are at least 0; got batch={self.batch} and "
                f"workers={self.workers}."
            )

    @property
    def dtype(self) -> torch.dtype | None:
        """Precision of autocast; None: float32."""
        return PRECISIONS[self.precision]


def default_batch(device: torch.device) -> int:
    """Images per batch. On a CPU few are as fast, and only whole batches are kept when a run is stopped."""
    return 32 if device.type == "cpu" else 128


def check_run(out: Path, options: EvalOptions, device: torch.device) -> None:
    """Errors before anything is read or written."""
    if out.is_dir():
        raise ValueError(f"{out} is a folder; give the name of a file, such as {out / 'records.parquet'}.")
    if out.exists() and not options.overwrite:
        raise ValueError(f"{out} already exists; pass overwrite=True to replace it, or name another file.")
    check_precision(device, options.precision)


def check_classifies(model: RoundModel) -> None:
    """Refuse segmentation models."""
    if model.config.task != "classification":
        raise ValueError(
            "the model segments images, and this takes classification models; evaluate it with progresvit evaluate, or "
            "evaluate_segmentation in Python."
        )


def intended_header(
    model: RoundModel, source: DataSource, name: str, options: EvalOptions, processes: Processes
) -> Header:
    """The header that an evaluation would write, without its outcome."""
    check_classifies(model)
    return source_header(model, source, source.find(), name=name, options=options, device=processes.device)


def source_header(
    model: RoundModel,
    source: DataSource,
    images: ImageDataset,
    *,
    name: str,
    options: EvalOptions,
    device: torch.device,
    config: BaseConfig | None = None,
) -> Header:
    """The header for images of a source, without the outcome. ``config`` prepares the images; None: the model's."""
    config, restricted = config or model.config, None
    if source.restrict_classes:
        if source.unlabelled:
            raise ValueError("predictions cannot be restricted to the classes of images that have no labels.")
        restricted = tuple(sorted(class_numbers(images.class_ids, model.config)))
    header = make_header(
        model,
        images,
        name=name,
        options=options,
        device=device,
        preprocessing=describe_preprocessing(config),
        data=source.data,
        split=None if source.unlabelled else source.split,
        classes=restricted,
        corruption=f"{source.corruption.name}/{source.corruption.severity}" if source.corruption else None,
        corruption_sha256=source.corruption.source if source.corruption else None,
        sample=None
        if images.sampled_from is None
        else {"images": len(images), "of": images.sampled_from, "seed": source.seed},
    )
    if source.corruption is None and plan_for(config, device, options.decode).jpeg:
        return replace(header, preprocessing={**header.preprocessing, "decode": "gpu"})  # the hash is of the crop alone
    return header


def make_header(
    model: RoundModel,
    images: ImageDataset,
    *,
    name: str,
    options: EvalOptions,
    device: torch.device,
    preprocessing: Mapping[str, Any],
    **about: Any,
) -> Header:
    """A header; ``about`` holds the fields that depend on the kind of model."""
    names, folder = [entry.name for entry in images.entries], getattr(model, "loaded_from", None)
    return Header(
        model=name,
        weights_sha256=weights_hash(model),
        config=model.config.to_dict(),
        gmacs={convention: model.gmacs(convention) for convention in CONVENTIONS},
        routable=model.config.routable,
        preprocessing=preprocessing,
        preprocessing_sha256=description_hash(preprocessing),
        precision=getattr(model, "precision", options.precision),  # graphs of an export may be int8
        backend=getattr(model, "backend", None),
        graphs_sha256=getattr(model, "graphs_sha256", None),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        images=len(images),
        drawn_from=images.drawn_from,
        training_images=count_training_images(folder, names),
        evaluations=count_evaluations(folder, names),
        names_sha256=header_names_hash(images),
        version=__version__,
        **about,
    )


def header_names_hash(images: ImageDataset) -> str:
    """SHA-256 of the names of all images in their order, as a header has it."""
    return hashlib.sha256("\n".join(entry.name for entry in images.entries).encode()).hexdigest()


def finished(header: Header, unreadable: tuple[str, ...]) -> Header:
    """The header of an evaluation that is complete."""
    return replace(header, unreadable=unreadable, date=datetime.now(UTC).isoformat(timespec="seconds"))
