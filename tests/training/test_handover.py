"""What a training leaves in its model folder: the default setting, and the card."""

import json
import warnings

import pytest

import progresvit
from progresvit.evaluation import calibrate_near_lossless, read_records
from progresvit.routing import SettingWarning
from progresvit.routing.settings import load_setting
from tests.commands import refused, run, works
from tests.factories import setting_of, undecided_model
from tests.training.runs import recipe
from tests.training.runs import run as train

SHORT = {"schedule": {"epochs": 2, "cooldown": 0}}


@pytest.mark.slow
def test_a_training_leaves_the_setting_that_calibrate_chooses_on_the_validation_images(digits, tmp_path):
    folder = train(recipe(**SHORT), digits, tmp_path / "run")
    setting = load_setting(folder / "settings" / "near-lossless.json")
    works("evaluate", folder, "--data", digits, "--out", tmp_path / "r.parquet", "--workers", 0, "--device", "cpu")
    expected = calibrate_near_lossless(read_records(tmp_path / "r.parquet"))
    same = ("rule", "rounds", "weights_sha256", "preprocessing_sha256", "precision", "n")
    assert {name: getattr(setting, name) for name in same} == {name: getattr(expected, name) for name in same}
    assert setting.threshold == pytest.approx(expected.threshold, abs=1e-5)
    assert setting.expected == expected.expected
    assert (setting.chosen_on, setting.is_certified) == ("validation", False)
    assert load_setting(tmp_path / "run" / "best" / "settings" / "near-lossless.json").chosen_on == "validation"
    images = sorted((digits / "val").rglob("*.png"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SettingWarning)
        assert progresvit.Engine(folder).setting == setting
        assert len(progresvit.Engine(folder).classify(images)) == len(images)
    card = (folder / "README.md").read_text()
    assert "Validation at the end of the training on 24 images: top-1 of the rounds" in card
    assert "near-lossless on 24 validation images, not certified" in card
    assert "near-lossless on 24 validation images, not certified" in works("classify", images[0], "--model", folder)


@pytest.mark.slow
def test_a_resumed_run_keeps_what_was_calibrated_since_and_replaces_a_setting_of_other_weights(digits, tmp_path):
    folder = train(recipe(**SHORT), digits, tmp_path / "run")
    path, card = folder / "settings" / "near-lossless.json", folder / "README.md"
    calibrated = load_setting(path).model_copy(update={"chosen_on": None, "threshold": 0.25})
    calibrated.save(path)
    card.write_text(card.read_text() + "My notes.\n")
    train(recipe(**SHORT), digits, tmp_path / "run", resume=True)
    assert load_setting(path) == calibrated
    assert card.read_text().endswith("My notes.\n")
    calibrated.model_copy(update={"weights_sha256": "other"}).save(path)
    train(recipe(**SHORT), digits, tmp_path / "run", resume=True)
    assert load_setting(path).chosen_on == "validation"
    assert progresvit.Engine(folder).setting == load_setting(path)
    card.write_text("Written by hand.\n")
    train(recipe(**SHORT), digits, tmp_path / "run", resume=True)
    assert card.read_text() == "Written by hand.\n"


@pytest.mark.slow
def test_a_model_of_one_round_has_a_card_and_no_setting(digits, tmp_path):
    network = {"resolutions": [16], "heads": [2]}
    folder = train(recipe(model=network, **SHORT), digits, tmp_path / "run")
    assert not (folder / "settings").exists()
    assert "used by default" not in (folder / "README.md").read_text()
    with warnings.catch_warnings():
        warnings.simplefilter("error", SettingWarning)
        progresvit.Engine(folder)


def test_without_a_setting_every_round_runs_with_a_note_and_a_setting_of_other_weights_is_refused(tmp_path):
    model = undecided_model(progresvit.preset("progresvit_tiny_160_224", depth=1, num_classes=4))
    folder = progresvit.save(model, tmp_path / "model")
    with pytest.warns(SettingWarning, match=f"every round runs, because {folder} has no default setting"):
        assert progresvit.Engine(folder).policy.thresholds == (0.0,)
    with pytest.warns(SettingWarning, match="every round runs, because this model has no default setting"):
        progresvit.Engine(model)
    path = folder / "settings" / "near-lossless.json"
    path.parent.mkdir()
    setting_of(model, weights_sha256="other", rule="near-lossless", threshold=0.3).save(path)
    before = path.read_bytes()
    refused(f"the default setting of {folder} was calibrated for a model with other weights", "classify", "--samples",
            "--model", folder)  # fmt: skip
    refused("give the number itself as the threshold: 0.3", "classify", "--samples", "--model", folder)
    refused("the setting near-lossless was calibrated for a model with other weights", "classify", "--samples",
            "--model", folder, "--threshold", "near-lossless")  # fmt: skip
    assert path.read_bytes() == before
    (row,) = json.loads(works("info", folder, "--json"))["settings"]
    assert (row["default"], row["certified"], row["note"]) == (True, False, "the setting is for other weights.")
    assert run("classify", "--samples", "--model", folder, "--threshold", 0).exit_code == 0
