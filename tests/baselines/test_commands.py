"""Rounds that are alternatives, as a user meets them: trained, evaluated, and refused where they need routing."""

import numpy as np
import pytest
import yaml

import progresvit
from progresvit.baselines.hydravit import HydraViT
from progresvit.evaluation import read_records
from progresvit.routing import fit_router, save_router
from tests.commands import refused, works
from tests.training.test_subnetworks import baseline

ALTERNATIVES = "the rounds of a model of kind 'hydravit' are alternatives, so there is no routing among them"


@pytest.fixture(scope="module")
def evaluated(digits, tmp_path_factory):
    """A HydraViT that was trained, and the records of it."""
    folder = tmp_path_factory.mktemp("hydravit")
    values = yaml.safe_load(baseline("hydravit", schedule={"epochs": 3, "cooldown": 0, "warmup": 0}).to_yaml())
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    works("train", folder / "recipe.yaml", "--data", digits, "--out", folder / "run", "--device", "cpu")
    model, records = folder / "run" / "model", folder / "r.parquet"
    shown = works("evaluate", model, "--data", digits, "--out", records, "--workers", 0, "--device", "cpu")
    assert "round 3" in shown
    assert "progresvit frontier" not in shown  # a next step that would be refused
    return model, records


def test_a_trained_hydravit_is_compared_by_round(evaluated):
    folder, path = evaluated
    model, records = progresvit.load(folder), read_records(path)
    assert isinstance(model, HydraViT)
    assert records.gmacs() == model.gmacs()
    assert records.gmacs("executed") == model.gmacs("executed")
    assert records.correct.shape == (24, 3)


@pytest.mark.parametrize(
    "command",
    [
        ("calibrate", "--near-lossless"),
        ("calibrate", "--exit-share", 0.5),
        ("calibrate", "--max-drop", 0.2),
        ("calibrate", "--max-drop", 0.2, "--unlabelled"),
        ("frontier",),
        ("fit-router", "--out", "router.safetensors"),
        ("trust",),
        ("trust", "--threshold", 0.5),
        ("abstention",),
    ],
    ids=lambda command: " ".join(map(str, command)),
)
def test_routing_among_alternatives_is_refused(evaluated, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    refused(ALTERNATIVES, command[0], evaluated[1], *command[1:])
    assert list(tmp_path.iterdir()) == []


def test_a_router_of_another_model_is_refused_too(evaluated, tmp_path):
    records = read_records(evaluated[1])
    correct = np.arange(24)[:, None] % [2, 3, 5] == 0  # with examples of everything that a router predicts
    save_router(fit_router(records.statistics, correct, epochs=1), tmp_path / "router.safetensors")
    refused(ALTERNATIVES, "compare-routers", evaluated[1], "--router", tmp_path / "router.safetensors")
    refused(ALTERNATIVES, "frontier", evaluated[1], "--router", tmp_path / "router.safetensors")


def test_the_engine_names_what_to_call_instead(evaluated, digits, tmp_path):
    for source in (evaluated[0], progresvit.load(evaluated[0])):
        with pytest.raises(ValueError, match=r"not 'hydravit'; its rounds are alternatives .* model\.run_round"):
            progresvit.Engine(source)
    refused("its rounds are alternatives", "classify", digits / "val" / "0", "--model", evaluated[0])
    refused("its rounds are alternatives", "export", evaluated[0], "--out", tmp_path / "export")


def test_shift_measures_the_rounds_and_refuses_a_threshold_before_the_first_image(evaluated, digits, tmp_path):
    command = ("shift", evaluated[0], "--suite", "generated", "--data", digits, "--out", tmp_path / "s", "--workers", 0)
    one = ("--corruptions", "fog", "--severities", "1", "--device", "cpu")
    refused(ALTERNATIVES, *command, *one, "--threshold", 0.5)
    assert not list(tmp_path.rglob("*.parquet"))
    assert "round 3 top-1" in works(*command, *one)
    assert (tmp_path / "s" / "shift.json").exists()
    assert not (tmp_path / "s" / "frontiers.json").exists()
