"""The model and the pictures that come with the package: whole, small, and what they say they are."""

import json
import os
import re
import warnings

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import progresvit
from progresvit import evaluation
from progresvit.api import bundled_folder
from progresvit.data.crop import preprocessing_hash
from progresvit.data.samples import samples_folder
from progresvit.distributed import Processes
from progresvit.io.weights import weights_hash
from progresvit.routing import load_budgets, load_setting
from tests.test_ship_model import load_script

FOLDER = bundled_folder("nettewoof-tiny")
SETTINGS = ("near-lossless", "drop-0.5", "drop-1", "careful")


@pytest.fixture(scope="module")
def model():
    return progresvit.load("nettewoof-tiny")


@pytest.fixture(scope="module")
def figures():
    return json.loads((FOLDER / "figures.json").read_text())


def test_weights_are_float16_and_small():
    assert {str(value.dtype) for value in load_file(FOLDER / "model.safetensors").values()} == {"torch.float16"}
    assert (FOLDER / "model.safetensors").stat().st_size <= 16e6


def test_it_knows_the_names_of_its_twenty_classes(model):
    assert len(model.config.labels) == len(model.config.class_ids) == model.config.num_classes == 20
    assert {"church", "beagle", "golf ball"} <= set(model.config.labels)


def test_settings_and_budgets_are_for_these_weights(model, figures):
    own = (weights_hash(model), preprocessing_hash(model.config), "fp32")
    found = [load_setting(FOLDER / "settings" / f"{name}.json") for name in SETTINGS]
    for one in (*found, load_budgets(FOLDER / "budgets.json")):
        assert (one.weights, one.preprocessing, one.precision) == own
    assert figures["weights"] == own[0]
    for name, one in zip(SETTINGS, found):
        assert figures["settings"][name]["threshold"] == one.threshold
        assert figures["settings"][name]["top1"]["all"] == pytest.approx(one.expected["top1"])


def test_it_is_as_good_as_promised(figures):
    first, last = (one["top1"]["all"] for one in figures["rounds"])
    near = figures["settings"]["near-lossless"]
    assert figures["pictures"]["all"] == 3932
    assert last >= 0.85
    assert first >= 0.70
    assert near["saving"]["all"] >= 0.20
    assert near["top1"]["all"] >= last - 0.0005


@pytest.mark.skipif(
    "PROGRESVIT_PHOTOS" not in os.environ, reason="PROGRESVIT_PHOTOS names no photographs to measure on"
)
def test_the_figures_come_out_again(model, figures, tmp_path):
    """PROGRESVIT_PHOTOS='photos/*.tar' python -m pytest tests/test_bundled.py: Imagenette's and Imagewoof's val."""
    source = evaluation.DataSource(data=os.environ["PROGRESVIT_PHOTOS"])
    alone = Processes(0, 1, torch.device("cpu"))
    records = evaluation.evaluate(model, source, tmp_path / "val.parquet", name="nettewoof-tiny", processes=alone)
    assert len(records) == figures["pictures"]["all"]
    for s, one in enumerate(figures["rounds"]):
        assert records.correct[:, s].mean() == pytest.approx(one["top1"]["all"], abs=0.0006)


def test_an_engine_without_arguments_is_silent_and_near_lossless():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = progresvit.Engine("nettewoof-tiny")
    assert engine.setting == load_setting(FOLDER / "settings" / "near-lossless.json")


def test_the_card_says_what_the_figures_say(figures):
    assert (FOLDER / "README.md").read_text() == load_script("model_card").render(figures)


def test_it_knows_the_church_among_the_samples():
    (found,) = progresvit.Engine("nettewoof-tiny").classify([samples_folder() / "church.jpg"])
    assert found.label == "church"


def test_every_sample_is_a_small_picture_with_its_credit():
    credits_ = (samples_folder() / "CREDITS.md").read_text()
    told = set(re.findall(r"^\| `([^`]+)` \|", credits_, re.MULTILINE))
    files = [path for path in samples_folder().iterdir() if path.name != "CREDITS.md"]
    assert told == {path.name for path in files}
    assert sum(path.stat().st_size for path in files) < 1.5e6
    for path in files:
        with Image.open(path) as picture:
            assert max(picture.size) <= 512
