"""Records from made-up logits, through the same code that records are made with, and what evaluations begin with."""

import shutil
from dataclasses import replace

import numpy as np
import torch

from progresvit.compute import CONVENTIONS, cumulative_gmacs
from progresvit.config import ModelConfig, make_rounds
from progresvit.data.crop import describe_preprocessing, preprocessing_hash
from progresvit.distributed import Processes
from progresvit.evaluation.header import Header
from progresvit.evaluation.records import Records
from progresvit.predict.head import record_columns

CLASSES = 12
ONE = Processes(0, 1, torch.device("cpu"))
"""A single process on the CPU."""


def config(rounds=2):
    resolutions, heads = [16, 24, 32][-rounds:], [1, 2, 3][-rounds:]
    return ModelConfig(rounds=make_rounds(resolutions, heads), heads=3, depth=2, patch_size=8, num_classes=CLASSES)


def make_logits(count=400, rounds=2, seed=0):
    """Each round is surer and better than the one before; some images are unrecoverable."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    ease = rng.normal(1.0, 1.5, count)
    logits = rng.normal(0, 1, (rounds, count, CLASSES))
    for s in range(rounds):
        logits[s, np.arange(count), labels] += 2.5 * np.clip(ease + 0.8 * s, 0, 3)
    return logits, labels


def make_header(model, count, *, preprocessing, preprocessing_sha256, **fields):
    """The header of records of a model with this configuration."""
    gmacs = {convention: cumulative_gmacs(model, convention) for convention in CONVENTIONS}
    known = {"model": "made", "data": "made", "precision": "fp32", "device": "cpu", "split": "val", "images": count}
    hashes = {"weights_sha256": "w" * 64, "names_sha256": "n" * 64, "preprocessing_sha256": preprocessing_sha256}
    return Header(config=model.to_dict(), gmacs=gmacs, preprocessing=preprocessing, **{**known, **hashes, **fields})


def make_records(count=400, rounds=2, seed=0, *, labelled=True, keep_logits=False, classes=None, logits=None):
    values, labels = make_logits(count, rounds, seed)
    values = values if logits is None else logits
    answers = torch.tensor(labels) if labelled else None
    tensors = [torch.tensor(z, dtype=torch.float32) for z in values]
    columns = record_columns(tensors, classes, answers, keep_logits=keep_logits)
    model = config(rounds)
    header = make_header(
        model,
        count,
        preprocessing=describe_preprocessing(model),
        preprocessing_sha256=preprocessing_hash(model),
        split="val" if labelled else None,
        classes=classes,
    )
    return Records(
        header=header,
        ids=np.array([f"val/{label}/{seed}-{number}" for number, label in enumerate(labels)]),
        labels=labels if labelled else np.full(count, -1),
        **{name: column.numpy() for name, column in columns.items()},
    )


def of_imagenet(records, **fields):
    """The records as if the model had ImageNet's classes; ``fields`` of the header change."""
    config = {**records.header.config, "num_classes": 1000}
    return replace(records, header=replace(records.header, **{"config": config, "images": 50_000, **fields}))


def copy_digits(digits, data, *, splits=("train", "val"), classes="01", count=60):
    """Many images in the layout of ``digits``: copies of the twelve training images of each class."""
    for split in splits:
        for digit in classes:
            (data / split / digit).mkdir(parents=True)
            for number in range(count):
                shutil.copy(digits / "train" / digit / f"{number % 12}.png", data / split / digit / f"{number}.png")
    return data
