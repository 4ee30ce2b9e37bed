"""scripts/interpolate.py: between the start of a run and its end."""

import json

import pytest
import torch

import progresvit
from tests.test_bundle_model import load_script
from tests.training.runs import recipe, run


@pytest.fixture(scope="module")
def script():
    return load_script("interpolate")


STILL = {"optimizer": {"lr": 1e-12}, "schedule": {"epochs": 1, "cooldown": 0, "min_lr": 0, "warmup_lr": 0}, "seed": 5}


@pytest.mark.parametrize("gates", ["paper", "torch"])
def test_the_start_is_that_of_the_run(digits, tmp_path, script, gates):
    trained = progresvit.load(run(recipe(model={"start_gates": gates}, **STILL), digits, tmp_path / "run"))
    if gates == "torch":  # as all runs before the key existed
        path = tmp_path / "run" / "recipe.yaml"
        path.write_text("".join(line for line in path.open() if "start_gates" not in line))
    start = script.make_start(tmp_path / "run", trained)
    for name, value in trained.state_dict().items():
        assert torch.allclose(value, start.state_dict()[name], atol=1e-6), name


def test_weights_are_between_the_start_and_the_trained_ones(digits, tmp_path, script):
    trained = progresvit.load(run(recipe(ema=0.0), digits, tmp_path / "run"))
    start = script.make_start(tmp_path / "run", trained).state_dict()
    script.main([str(tmp_path / "run"), "--weight", "0.25", "--out", str(tmp_path / "mixed")])
    mixed = progresvit.load(tmp_path / "mixed").state_dict()
    for name, value in trained.state_dict().items():
        assert torch.allclose(mixed[name], 0.25 * value + 0.75 * start[name], rtol=1e-3, atol=1e-4), name
    assert (trained.state_dict()["pos_embed"] - start["pos_embed"]).abs().max() > 2e-3  # or the test shows nothing
    assert json.loads((tmp_path / "mixed" / "interpolation.json").read_text()) == {"trained": 0.25}


def test_a_run_that_saved_fewer_classes_than_it_trained_is_refused(tmp_path, script):
    wanted = {"teacher": "x", "kind": "soft", "classes": "teacher"}
    (tmp_path / "recipe.yaml").write_text(recipe(distillation=wanted).to_yaml())
    with pytest.raises(SystemExit, match="more classes than it saved"):
        script.make_start(tmp_path, None)


@pytest.mark.parametrize("weight", ["0", "1.5"])
def test_a_weight_outside_of_its_range_is_refused(tmp_path, script, weight, capsys):
    with pytest.raises(SystemExit):
        script.main([str(tmp_path), "--weight", weight, "--out", str(tmp_path / "mixed")])
    assert "above 0 and at most 1" in capsys.readouterr().err
