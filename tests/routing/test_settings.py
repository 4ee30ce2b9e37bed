"""Settings and budgets that lie in a model's folder."""

import json

import numpy as np
import pytest

from progresvit.evaluation import (
    calibrate_budget,
    calibrate_guarantee,
    calibrate_near_lossless,
    measure_budgets,
    with_abstention,
    write_records,
)
from progresvit.evaluation.selective import abstain_entropy
from progresvit.io.model_folder import BUNDLED, bundled_folder
from progresvit.routing import Setting, SettingWarning, find_setting, load_budgets, load_setting, setting_names
from progresvit.routing.calibrate import STEPS, entropy_quantiles
from progresvit.routing.settings import budget_setting, default_setting
from tests.commands import refused, works
from tests.evaluation.made import make_records
from tests.evaluation.made_segmentation import make_segmentation_records


def a_setting(threshold, **changes):
    model = {"rounds": 2, "weights_sha256": "w", "preprocessing_sha256": "p", "precision": "fp32"}
    return Setting(rule="budget", threshold=threshold, n=9, **model, **changes)


def test_hashes_have_the_names_of_earlier_versions_too():
    setting = Setting(rule="budget", threshold=0.1, rounds=2, weights="w", preprocessing="p", precision="fp32", n=9)
    assert (setting.weights_sha256, setting.preprocessing_sha256) == ("w", "p")
    assert (setting.weights, setting.preprocessing) == ("w", "p")
    assert json.loads(setting.to_json()).keys() >= {"weights", "preprocessing"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model" / "settings").mkdir(parents=True)
    for name, threshold in (("near-lossless", 0.4), ("drop-0.5", 0.6)):
        a_setting(threshold).save(tmp_path / "model" / "settings" / f"{name}.json")
    return tmp_path / "model"


def test_a_name_is_looked_up_in_the_models_folder(folder):
    assert setting_names(folder) == ["drop-0.5", "near-lossless"]
    assert find_setting("drop-0.5", folder).threshold == 0.6
    assert default_setting(folder).threshold == 0.4


def test_a_file_that_is_there_and_whatever_ends_in_json_is_a_path(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a_setting(0.1).save(tmp_path / "drop-0.5")
    assert find_setting("drop-0.5", folder).threshold == 0.1
    with pytest.raises(ValueError, match=r"there is no setting at near-lossless\.json"):
        find_setting("near-lossless.json", folder)


def test_an_unknown_name_lists_what_is_there(folder, tmp_path):
    with pytest.raises(ValueError, match=r"no setting 'fast' \(it has drop-0\.5, near-lossless\)"):
        find_setting("fast", folder)
    for none in (tmp_path, None):
        with pytest.raises(ValueError, match="no settings folder"):
            find_setting("fast", none)
        assert default_setting(none) is None


def test_a_table_of_budgets_gives_the_threshold_that_records_give(tmp_path):
    records = make_records(2000)
    measure_budgets(records).save(tmp_path / "budgets.json")
    table = load_budgets(tmp_path / "budgets.json")
    assert table.points == measure_budgets(records).points
    first, last = records.gmacs()
    for budget in np.linspace(first, last, 7):
        found, exact = table.setting(budget), calibrate_budget(records, float(budget))
        assert found.expected["gmacs"] <= budget + 1e-9
        assert exact.expected["gmacs"] - found.expected["gmacs"] <= (last - first) / STEPS + 1e-9
        assert (found.weights_sha256, found.precision, found.rule) == (exact.weights_sha256, exact.precision, "budget")
    assert table.setting(last).expected["top1"] == pytest.approx(records.correct[:, -1].mean())
    assert budget_setting(tmp_path, last) == table.setting(last)


def test_a_budget_out_of_reach_or_without_its_table_is_refused(tmp_path):
    table = measure_budgets(make_records(100))
    with pytest.raises(ValueError, match="out of reach"):
        table.setting(table.points[0].gmacs + 1)
    with pytest.raises(ValueError, match="the command progresvit calibrate makes it"):
        budget_setting(tmp_path, 1.0)
    with pytest.raises(ValueError, match="give the folder"):
        budget_setting(None, 1.0)
    for damaged in ("[]", "{}", '{"points": 3}', "text"):
        (tmp_path / "budgets.json").write_text(damaged)
        with pytest.raises(ValueError, match="not a valid table of budgets"):
            budget_setting(tmp_path, 1.0)


def test_a_setting_that_abstains_gives_as_many_answers_as_the_errors_allow(tmp_path):
    records = make_records(2000)
    setting = calibrate_near_lossless(records)
    careful = with_abstention(records, setting, 0.1)
    assert careful.threshold == setting.threshold
    assert careful.expected["answered_top1"] >= 0.9
    assert 0 < careful.expected["coverage"] < 1
    careful.save(tmp_path / "careful.json")
    assert load_setting(tmp_path / "careful.json") == careful
    assert "abstain" not in json.loads(setting.to_json())
    assert with_abstention(records, setting, 0.999).abstain is None


def test_equally_sure_answers_are_withheld_together():
    unsure, wrong = [0.1, 0.2, 0.2, 0.2, 0.5], [False, False, True, False, True]
    assert abstain_entropy(unsure, wrong, 0.25) == 0.5
    assert abstain_entropy(unsure, wrong, 0.2) == 0.2  # two of the three would do, but which?
    assert abstain_entropy(unsure, wrong, 0.4) is None
    with pytest.raises(ValueError, match="even the most confident"):
        abstain_entropy([0.1, 0.2], [True, False], 0.3)
    with pytest.raises(ValueError, match="between 0 and 1"):
        abstain_entropy(unsure, wrong, 5)


def test_abstaining_below_zero_is_refused():
    with pytest.raises(ValueError, match="entropy of 0 or more"):
        a_setting(0.1, abstain=-1.0)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_settings_and_budgets_are_written_as_they_were(name, tmp_path):
    folder = bundled_folder(name)
    for path in sorted((folder / "settings").glob("*.json")):
        load_setting(path).save(tmp_path / path.name)
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    load_budgets(folder / "budgets.json").save(tmp_path / "budgets.json")
    assert (tmp_path / "budgets.json").read_bytes() == (folder / "budgets.json").read_bytes()


def test_an_infinite_threshold_is_written_and_read(tmp_path):
    a_setting(float("inf")).save(tmp_path / "always.json")
    assert '"threshold": "inf"' in (tmp_path / "always.json").read_text()
    assert load_setting(tmp_path / "always.json") == a_setting(float("inf"))


def test_calibrate_stores_the_quantiles_of_entropies_if_asked(tmp_path):
    records = make_records(300)
    write_records(records, tmp_path / "r.parquet")
    words = ("calibrate", tmp_path / "r.parquet", "--exit-share", 0.5, "--out", tmp_path / "t.json")
    works(*words)
    assert "entropy_quantiles" not in json.loads((tmp_path / "t.json").read_text())
    assert load_setting(tmp_path / "t.json").entropy_quantiles is None
    works(*words, "--entropies")
    setting = load_setting(tmp_path / "t.json")
    assert setting.entropy_quantiles == entropy_quantiles(records.top10_entropy[:, 0])
    assert setting.entropy_quantiles[50] == np.sort(records.top10_entropy[:, 0])[149]
    budgets = ("calibrate", tmp_path / "r.parquet", "--budgets", "--entropies", "--out", tmp_path / "b.json")
    refused("--entropies and --convention", *budgets)


def test_infinite_quantiles_come_back_and_wrong_ones_are_refused(tmp_path):
    known = a_setting(0.4).model_dump()
    Setting(**{**known, "entropy_quantiles": (0.1, 0.1, float("inf"))}).save(tmp_path / "t.json")
    assert load_setting(tmp_path / "t.json").entropy_quantiles == (0.1, 0.1, float("inf"))
    for wrong in ((0.2, 0.1), (0.1,), (0.1, float("nan"))):
        with pytest.raises(ValueError, match="at least two ascending numbers of 0 or more"):
            Setting(**{**known, "entropy_quantiles": wrong})


def test_a_setting_keeps_the_mean_loss_and_leaves_it_out_without_one(tmp_path):
    known = {"rounds": 2, "weights": "w", "preprocessing": "p", "precision": "fp32", "n": 2000, "threshold": 0.4}
    evidence = {"rule": "guarantee", "epsilon": 0.01, "delta": 0.05, "k": 3}
    setting = Setting(**evidence, mean_loss=0.004, loss="pixel-error", **known)
    setting.save(tmp_path / "drop.json")
    assert load_setting(tmp_path / "drop.json") == setting
    assert json.loads(setting.to_json())["mean_loss"] == 0.004
    assert "mean_loss" not in Setting(**evidence, loss="labelled", **known).to_json()
    with pytest.raises(ValueError, match="pixel error without mean_loss certifies nothing"):
        Setting(**evidence, loss="pixel-error", **known)


@pytest.fixture
def certified(tmp_path):
    """The file of a certificate."""
    calibrate_guarantee(make_records(3000), epsilon=0.01, delta=0.05).save(tmp_path / "drop.json")
    return tmp_path / "drop.json"


def edit(path, *, drop=(), **changes):
    """The file after an edit by hand."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if key not in drop}))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"threshold": 1.2},
        {"epsilon": 0.02},
        {"n": 30_000},
        {"weights": "other"},
        {"loss": "unlabelled"},
        {"abstain": 1.5},
        {"checksum": "0" * 64},
        {"checksum": None},
    ],
)
def test_a_certificate_that_was_edited_is_refused(certified, changes):
    load_setting(certified)
    with pytest.raises(
        ValueError, match=r"drop\.json is not a valid setting: it was edited after it was certified; make"
    ):
        load_setting(edit(certified, **changes))


@pytest.mark.parametrize("key", ["epsilon", "delta", "k"])
def test_a_certificate_without_its_evidence_is_refused(certified, key):
    with pytest.raises(ValueError, match="without epsilon, delta and k certifies nothing; calibrate again"):
        load_setting(edit(certified, drop=("checksum", key)))


def test_a_certificate_without_a_checksum_is_used_with_a_note(certified):
    values = json.loads(certified.read_text())
    del values["checksum"]
    certified.write_text(json.dumps({**values, "threshold": 2.0}))
    with pytest.warns(SettingWarning, match="has no checksum: an earlier version wrote it, or it was edited"):
        assert load_setting(certified).threshold == 2.0


def test_another_setting_that_was_edited_is_used_with_a_note(tmp_path, recwarn):
    records = make_records(300)
    write_records(records, tmp_path / "r.parquet")
    calibrate_near_lossless(records).save(tmp_path / "t.json")
    load_setting(tmp_path / "t.json")
    assert not recwarn.list
    edit(tmp_path / "t.json", threshold=0.123)
    with pytest.warns(SettingWarning, match="edited after it was calibrated, and its results may be those of another"):
        assert load_setting(tmp_path / "t.json").threshold == 0.123


def test_an_edited_observation_does_not_become_a_certificate(tmp_path):
    calibrate_near_lossless(make_records(300)).save(tmp_path / "t.json")
    evidence = {"rule": "guarantee", "epsilon": 0.01, "delta": 0.05, "k": 0, "n": 3000, "p_value": 0.99**3000}
    with pytest.raises(ValueError, match="edited after it was certified"):
        load_setting(edit(tmp_path / "t.json", **evidence))


def test_another_order_and_notation_of_the_same_content_is_no_edit(certified):
    known = load_setting(certified)
    values = json.loads(certified.read_text())
    turned = json.dumps(dict(reversed(values.items())), indent=7, ensure_ascii=False)
    certified.write_text(turned.replace('"n": 3000', '"n": 3000.0').replace('"epsilon": 0.01', '"epsilon": 1e-2'))
    assert load_setting(certified) == known


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"k": 3}, "contradict each other: 3 harmed of 3000 images at epsilon 0.01 have a p-value of .*, not 0.0"),
        ({"n": 30_000}, "contradict each other: .* of 30000 images"),
        ({"epsilon": 0.001}, "contradict each other"),
        ({"p_value": 0.001}, "contradict each other: .* not 0.001"),
        ({"k": 29, "p_value": 0.475}, "contradict each other|certify nothing"),
        ({"n": 10**40, "k": 10**38}, "contradict each other: .* a p-value of nan"),
        ({"delta": 0.001}, "certify nothing: .* above delta = 0.001"),
        ({"delta": 0.7}, "at most 0.5"),
        ({"k": -1}, "p-value of nan"),
        ({"loss": "pixel-error", "mean_loss": 0.009, "drop": ("p_value",)}, "certify nothing"),
    ],
)
def test_a_certificate_without_a_checksum_has_to_give_its_own_p_value(certified, changes, match):
    """As earlier versions wrote it."""
    edit(certified, drop=("checksum", "copies"))
    assert load_setting(certified).rule == "guarantee"
    with pytest.raises(ValueError, match=match):
        load_setting(edit(certified, **changes))


@pytest.mark.parametrize("rounds", [2, 3])
def test_every_certificate_gives_its_own_p_value(tmp_path, rounds):
    for number, (epsilon, delta, loss) in enumerate(
        [(0.02, 0.05, "labelled"), (0.05, 0.5, "unlabelled"), (0.4, 1e-9, "labelled"), (0.1, 0.3, "pixel-error")]
    ):
        make = make_segmentation_records if loss == "pixel-error" else make_records
        setting = calibrate_guarantee(make(2000, rounds=rounds), epsilon=epsilon, delta=delta, loss=loss)
        setting.save(tmp_path / f"{number}.json")
        assert load_setting(tmp_path / f"{number}.json") == setting
        edit(tmp_path / f"{number}.json", drop=("checksum",))
        assert load_setting(tmp_path / f"{number}.json") == setting


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_settings_have_checksums_and_load_without_a_warning(name, recwarn):
    for path in sorted((bundled_folder(name) / "settings").glob("*.json")):
        assert "checksum" in json.loads(path.read_text())
        load_setting(path)
    assert not recwarn.list


def test_commands_refuse_an_edited_certificate_and_note_an_edited_setting(tmp_path):
    records, folder = make_records(3000), tmp_path
    write_records(records, folder / "r.parquet")
    for name, words in (("drop", ("--max-drop", 0.01)), ("near", ("--near-lossless",))):
        works("calibrate", folder / "r.parquet", *words, "--out", folder / f"{name}.json")
        edit(folder / f"{name}.json", threshold=0.5)
    frontier = ("frontier", folder / "r.parquet", "--setting")
    refused(
        "edited after it was certified; make one with the command progresvit calibrate", *frontier, folder / "drop.json"
    )
    assert "edited after it was calibrated" in works(*frontier, folder / "near.json")
