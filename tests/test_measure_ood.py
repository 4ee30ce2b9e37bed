"""scripts/measure_ood.py, on tiny random models and small made-up images."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import progresvit
from progresvit.evaluation.classes import ImageNetInfo
from progresvit.model import ProgResViT
from progresvit.routing import OOD_SCORES
from tests.factories import tiny_config

SCRIPTS = Path(__file__).parent.parent / "scripts"
IMAGENET = ImageNetInfo().label_names()


def save_model(folder, randomize, class_ids):
    torch.manual_seed(0)
    config = tiny_config((8, 16), num_classes=len(class_ids), class_ids=tuple(class_ids))
    return progresvit.save(randomize(ProgResViT(config)), folder)


def make_images(root, names, count):
    rng = np.random.default_rng(0)
    for name in names:
        (root / name).mkdir(parents=True)
        for number in range(count):
            image = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
            image.save(root / name / f"{name}-{number}.bmp")
    return root


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("measure_ood")


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """One image for each of the 1000 classes, in folders named by numbers."""
    return make_images(tmp_path_factory.mktemp("imagenet"), [f"{number:03d}" for number in range(1000)], 1)


def measure(script, tmp_path, *words):
    script.main([*map(str, words), "--workers", "0", "--out", str(tmp_path / "ood.json")])
    return json.loads((tmp_path / "ood.json").read_text())


def test_classes_are_drawn_by_hash_whatever_their_order(script):
    draw = script.draw_classes
    drawn = draw(IMAGENET, 100)
    assert len(set(drawn)) == 100
    assert draw(IMAGENET[::-1], 100) == drawn
    assert draw(IMAGENET, 10) == drawn[:10]
    with pytest.raises(ValueError, match="cannot be drawn"):
        draw(["a", "b"], 2)


def check(figures, known, unknown):
    assert figures["calibration_images"] + figures["known_images"] == known
    assert figures["unknown_images"] == unknown
    assert [one["score"] for one in figures["scores"]] == [*OOD_SCORES, *OOD_SCORES]
    assert all(0 <= one["auroc"] <= 1 and 0 <= one["fpr95"] <= 1 for one in figures["scores"])
    assert figures["calibrated"]["score"] == "energy"
    assert 0 <= figures["calibrated"]["known_rejected"] < 0.2


@pytest.mark.slow
def test_a_model_of_1000_classes_loses_100_of_them(script, imagenet, tmp_path, randomize):
    model = save_model(tmp_path / "model", randomize, IMAGENET)
    figures = measure(script, tmp_path, model, "--images", imagenet)
    assert figures["known_classes"] == 900
    assert len(figures["unknown_classes"]) == 100
    check(figures, known=900, unknown=100)


@pytest.mark.slow
def test_a_model_of_few_classes_is_shown_others(script, imagenet, tmp_path, randomize):
    own = sorted(IMAGENET[:3])
    model = save_model(tmp_path / "model", randomize, own)
    known = make_images(tmp_path / "known" / "val", own, 40)
    figures = measure(
        script, tmp_path, model, "--images", imagenet, "--known", known.parent, "--limit", 30, "--classes", 50
    )
    assert figures["known_classes"] == 3
    assert len(figures["unknown_classes"]) == 50
    assert not set(own) & set(figures["unknown_classes"])
    check(figures, known=90, unknown=50)
    with pytest.raises(ValueError, match="give images of them with --known"):
        measure(script, tmp_path, model, "--images", imagenet)
    with pytest.raises(ValueError, match="has no images of 50 classes"):
        measure(script, tmp_path, model, "--images", known, "--known", known.parent, "--classes", 50)
