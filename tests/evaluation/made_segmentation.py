"""Records of segmentation from made-up label maps, and a small dataset and model to make real ones."""

import numpy as np
import torch
from PIL import Image

from progresvit.config import ModelConfig, make_rounds
from progresvit.data.segmentation.windows import WindowOptions, describe_windows, windows_hash
from progresvit.evaluation import SegmentationRecords
from progresvit.evaluation.segmentation_records import confusion_rows
from progresvit.metrics.miou import confusion_matrix
from progresvit.model import ProgResViT
from tests.evaluation.made import make_header

CLASSES = ("sky", "road", "car", "tree")
IGNORE = 255
PIXELS = 30


def config(rounds=2, classes=CLASSES):
    """Rounds of 32, 48 and 64 pixels, of which the first are left out."""
    resolutions = {1: [48], 2: [32, 48], 3: [32, 48, 64]}[rounds]
    return ModelConfig(
        rounds=make_rounds(resolutions, [2] if rounds == 1 else [1, 2, 3][:rounds]),
        heads=max(2, rounds),
        depth=2,
        patch_size=16,
        task="segmentation",
        num_classes=len(classes),
        class_ids=classes,
        labels=classes,
    )


def make_model(randomize, **options):
    torch.manual_seed(3)
    return randomize(ProgResViT(config(**options)))


def make_maps(count=300, rounds=2, seed=0, classes=4):
    """Labels (N, P), predictions (S, N, P) and scores (N, S): later rounds are better, and sure images are easy.

    The last class is neither labelled nor predicted.
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes - 1, (count, PIXELS))
    ease = rng.beta(4, 2, count)
    predictions = np.empty((rounds, count, PIXELS), int)
    scores = np.empty((count, rounds), np.float32)
    for s in range(rounds):
        chance = np.clip(ease + 0.15 * s, 0, 0.98)[:, None]
        right = rng.random((count, PIXELS)) < chance
        predictions[s] = np.where(right, labels, rng.integers(0, classes - 1, (count, PIXELS)))
        scores[:, s] = np.clip(1.2 * (1 - ease) + rng.normal(0, 0.1, count), 0, np.log(classes) - 0.01)
    labels[rng.random(labels.shape) < 0.1] = IGNORE
    return labels, predictions, scores


def make_segmentation_records(count=300, rounds=2, seed=0, *, maps=None):
    labels, predictions, scores = maps or make_maps(count, rounds, seed)
    model, windows = config(rounds), WindowOptions()
    header = make_header(
        model,
        count,
        preprocessing=describe_windows(model, windows),
        preprocessing_sha256=windows_hash(model, windows),
        masks={"values": [0, 1, 2, 3], "ignored": [IGNORE]},
    )
    return SegmentationRecords(
        header=header,
        ids=np.array([f"images/val/{seed}-{number}.jpg" for number in range(count)]),
        windows=np.random.default_rng(seed + 1).integers(1, 4, count),
        scores=scores,
        confusion=tuple(_matrix(labels, maps_of_round) for maps_of_round in predictions),
    )


def _matrix(labels, predictions):
    each = [
        confusion_matrix(torch.tensor(found), torch.tensor(label), classes=len(CLASSES), ignore=IGNORE).flatten()
        for found, label in zip(predictions, labels)
    ]
    images, cells = torch.stack(each).numpy().nonzero()
    counts = torch.stack(each).numpy()[images, cells]
    return confusion_rows(images, cells, counts, shape=(len(labels), len(CLASSES) ** 2))


def naive_iou(predictions, labels, classes):
    """Class by class from the maps; None for a class that is neither labelled nor predicted."""
    counted = labels != IGNORE
    found = []
    for k in range(classes):
        union = counted & ((labels == k) | (predictions == k))
        both = counted & (labels == k) & (predictions == k)
        found.append(both.sum() / union.sum() if union.any() else None)
    return found


def naive_miou(predictions, labels):
    known = [value for value in naive_iou(predictions, labels, len(CLASSES)) if value is not None]
    return float(np.mean(known))


SIZES = [(48, 48), (40, 64), (70, 48), (33, 50), (64, 64), (48, 90), (50, 50), (44, 61)]
"""Width and height of the images of :func:`make_dataset`."""


def make_dataset(root, *, split="val", sizes=SIZES, labels=CLASSES, seed=0):
    """Photographs of coloured rectangles, with ignored pixels along one border."""
    rng = np.random.default_rng(seed)
    images, masks = root / "images" / split, root / "annotations" / split
    images.mkdir(parents=True)
    masks.mkdir(parents=True)
    for number, (width, height) in enumerate(sizes):
        mask = np.zeros((height, width), np.uint8)
        mask[height // 3 :] = 1
        left, top = rng.integers(0, width // 2), rng.integers(0, height // 2)
        mask[top : top + height // 3, left : left + width // 3] = 2 + number % 2
        colours = rng.integers(0, 255, (len(CLASSES), 3))
        pixels = colours[mask] + rng.normal(0, 10, (height, width, 3))
        mask[:, :2] = IGNORE
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(images / f"{number}.png")
        Image.fromarray(mask).save(masks / f"{number}.png")
    if labels:
        (root / "labels.txt").write_text("\n".join(labels))
    return root
