"""The bundled models and sample images: whole, small, and what they say they are."""

import json
import os
import re
import warnings

import pytest
import torch
from safetensors.torch import load_file

import progresvit
from progresvit import evaluation
from progresvit.api import BUNDLED, bundled_folder
from progresvit.data.crop import preprocessing_hash
from progresvit.distributed import Processes
from progresvit.io.weights import weights_hash
from progresvit.routing import load_budgets, load_setting
from tests.test_bundle_model import load_script

CLASSES = {"imagenet-tiny": 1000, "nettewoof-tiny": 20}
SETTINGS = ("near-lossless", "drop-0.5", "drop-1", "careful")


@pytest.fixture(scope="module", params=BUNDLED)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def folder(name):
    return bundled_folder(name)


@pytest.fixture(scope="module")
def model(name):
    return progresvit.load(name)


@pytest.fixture(scope="module")
def figures(folder):
    return json.loads((folder / "figures.json").read_text())


def test_weights_are_float16_and_small(folder):
    assert {str(value.dtype) for value in load_file(folder / "model.safetensors").values()} == {"torch.float16"}
    assert (folder / "model.safetensors").stat().st_size <= 16e6


def test_it_knows_the_names_of_its_classes(name, model):
    assert len(model.config.labels) == len(model.config.class_ids) == model.config.num_classes == CLASSES[name]
    assert {"church", "beagle", "golf ball"} <= set(model.config.labels)


def test_the_default_and_the_alias_are_the_models_that_they_stand_for():
    assert weights_hash(progresvit.load()) == weights_hash(progresvit.load("imagenet-tiny"))
    assert weights_hash(progresvit.load("shipped")) == weights_hash(progresvit.load("nettewoof-tiny"))


def test_a_misspelt_name_gets_the_nearest():
    with pytest.raises(ValueError, match=r"bundled model 'imagenet-tinny'; did you mean 'imagenet-tiny'\?"):
        progresvit.load("imagenet-tinny")
    with pytest.raises(ValueError, match=r"did you mean 'nettewoof-tiny'\?"):
        progresvit.Engine("nettewoof_tiny")


def test_settings_of_one_model_are_refused_with_the_other(name):
    (other,) = set(BUNDLED) - {name}
    own = bundled_folder(name) / "settings" / "careful.json"
    number = re.escape(f"{load_setting(own).threshold:g}")
    with pytest.raises(ValueError, match=rf"other weights \(the bundled model '{name}'\), .* threshold: {number}$"):
        progresvit.Engine(other, own)


def test_settings_and_budgets_are_for_these_weights(model, folder, figures):
    own = (weights_hash(model), preprocessing_hash(model.config), "fp32")
    settings = {name: load_setting(folder / "settings" / f"{name}.json") for name in SETTINGS}
    for calibrated in (*settings.values(), load_budgets(folder / "budgets.json")):
        assert (calibrated.weights_sha256, calibrated.preprocessing_sha256, calibrated.precision) == own
    assert figures["weights"] == own[0]
    for name, setting in settings.items():
        assert figures["settings"][name]["threshold"] == setting.threshold
        assert figures["images"]["calibration half"] == setting.n


def test_the_twenty_class_model_is_as_good_as_promised():
    figures = json.loads((bundled_folder("nettewoof-tiny") / "figures.json").read_text())
    first, last = (figure["top1"]["all"]["mean"] for figure in figures["rounds"])
    near = figures["settings"]["near-lossless"]
    assert figures["images"]["all"] == 3932
    assert last >= 0.94
    assert first >= 0.88
    assert near["saving"]["all"] >= 0.45
    assert near["difference"]["mean"] >= -0.003  # on other images than it was calibrated on


def test_the_thousand_class_model_is_as_good_as_promised():
    figures = json.loads((bundled_folder("imagenet-tiny") / "figures.json").read_text())
    first, last = (figure["top1"]["all"]["mean"] for figure in figures["rounds"])
    budget = figures["settings"]["budget-1.0"]
    assert figures["images"] == {"all": 5000, "calibration half": 2500, "test half": 2500}
    assert last >= 0.72
    assert first >= 0.60
    assert budget["top1"]["all"]["mean"] >= 0.715
    assert budget["gmacs"]["all"] <= 1.0
    plain = {figure["resolution"]: figure for figure in figures["plain"]}
    assert budget["top1"]["all"]["mean"] > plain[192]["top1"]["test half"]["mean"]


def test_certificates_are_broken_no_more_often_than_they_say(figures):
    draws = figures["certificates"]["draws"]
    for certificate in figures["certificates"]["settings"].values():
        assert certificate["exceeded"] <= certificate["delta"] * draws


def test_energy_tells_unknown_classes_from_known_ones(figures):
    scores = {(row["answers"], row["score"]): row["auroc"] for row in figures["ood"]["scores"]}
    assert scores["routed", "energy"] >= 0.80
    assert len(figures["ood"]["unknown_classes"]) == 100


@pytest.mark.skipif(
    "PROGRESVIT_PHOTOS" not in os.environ, reason="PROGRESVIT_PHOTOS names no photographs to measure on"
)
def test_the_figures_come_out_again(tmp_path):
    """PROGRESVIT_PHOTOS='photos/*.tar' python -m pytest tests/test_bundled.py: Imagenette's and Imagewoof's val."""
    model = progresvit.load("nettewoof-tiny")
    figures = json.loads((bundled_folder("nettewoof-tiny") / "figures.json").read_text())
    source = evaluation.DataSource(data=os.environ["PROGRESVIT_PHOTOS"])
    alone = Processes(0, 1, torch.device("cpu"))
    records = evaluation.evaluate(model, source, tmp_path / "val.parquet", name="nettewoof-tiny", processes=alone)
    assert len(records) == figures["images"]["all"]
    for s, figure in enumerate(figures["rounds"]):
        assert records.correct[:, s].mean() == pytest.approx(figure["top1"]["all"]["mean"], abs=0.0006)


@pytest.mark.parametrize("arguments", [(), *((name,) for name in BUNDLED)], ids=["no name", *BUNDLED])
def test_an_engine_is_silent_and_near_lossless(arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = progresvit.Engine(*arguments)
    folder = bundled_folder(*arguments)
    assert engine.config.num_classes == CLASSES[folder.name]
    assert engine.setting == load_setting(folder / "settings" / "near-lossless.json")


def test_the_card_says_what_the_figures_say(folder, figures):
    assert (folder / "README.md").read_text() == load_script("model_card").render(figures)
