"""Everything but the engine takes any model that runs in rounds: here one that has nothing of a ViT."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import yaml

import progresvit
from progresvit import compute
from progresvit.data.transforms import evaluation_transform
from progresvit.evaluation import (
    calibrate_near_lossless,
    equal_accuracy_table,
    frontier_table,
    measure_budgets,
    read_records,
    risk_coverage_curves,
)
from progresvit.evaluation.iso_accuracy import RefinementRule
from progresvit.io.weights import weights_hash
from progresvit.model import RoundModel, registry
from tests.commands import refused, works
from tests.model.pooled import AlternativesConfig, PooledConfig, PooledModel

ROUNDS = [{"resolution": 16, "grid": 2}, {"resolution": 32, "grid": 8}]
FIELDS = {"rounds": ROUNDS, "num_classes": 4, "class_ids": ("0", "1", "2", "3"), "crop": 1.0}


def read_images(folder, config):
    from PIL import Image

    transform, paths = evaluation_transform(config), sorted(folder.glob("*/*.png"))
    images = torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])
    return images, torch.tensor([int(path.parent.name) for path in paths])


def fitted(config, digits):
    """A model that has learned the digits, by a loop of its own."""
    model = PooledModel(config)
    images, labels = read_images(digits / "train", config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        sum(F.cross_entropy(output.logits, labels) for output in model(images)).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture
def model(digits):
    return fitted(PooledConfig(**FIELDS), digits)


@pytest.fixture
def folder(model, tmp_path):
    return progresvit.save(model, tmp_path / "pooled")


@pytest.fixture
def records(folder, digits, tmp_path):
    works("evaluate", folder, "--data", digits, "--out", tmp_path / "r.parquet", "--workers", 0, "--device", "cpu")
    return read_records(tmp_path / "r.parquet")


def test_another_model_goes_from_evaluation_to_a_calibrated_threshold(model, records, tmp_path):
    top1 = records.correct.mean(axis=0)
    assert top1[0] > 0.4  # four classes
    assert top1[1] > 0.8
    first, last = model.gmacs()
    assert records.gmacs() == records.gmacs("executed") == [first, last] == [16 * 16 / 1e9, (16 * 16 + 16 * 196) / 1e9]
    rows = frontier_table({"pooled": records}, [0.0, 5.0]).rows
    assert [row["gmacs_paper"] for row in rows[:2]] == pytest.approx([last, first])
    assert rows[0]["top1"] == records.correct[:, 1].mean()
    setting = calibrate_near_lossless(records)
    assert setting.weights_sha256 == weights_hash(model)
    assert setting.expected["top1"] >= setting.expected["full_top1"] - 0.0003
    assert "is ready" in works("calibrate", tmp_path / "r.parquet", "--near-lossless", "--out", tmp_path / "t.json")
    assert "near-lossless" in works("frontier", tmp_path / "r.parquet")
    assert "routed top-1" in works(
        "shift", tmp_path / "pooled", "--suite", "generated", "--data", records.header.data, "--out", tmp_path / "s",
        "--corruptions", "fog", "--severities", "1", "--threshold", tmp_path / "t.json", "--workers", 0,
        "--device", "cpu",
    )  # fmt: skip


@pytest.mark.slow
def test_another_model_is_trained_by_the_one_loop_evaluated_and_calibrated(digits, tmp_path):
    recipe = {
        "model": {"kind": "test_pooled", "fields": {"rounds": ROUNDS, "crop": 1.0}},
        "data": {"mode": "in_memory", "workers": 0},
        "augment": {"crop_scale": [0.9, 1.0], "flip": 0.0},
        "optimizer": {"lr": 0.01, "lr_batch": 16, "batch": 16},
        "schedule": {"epochs": 12, "cooldown": 0, "warmup": 0},
        "ema": 0.5,
    }
    (tmp_path / "pooled.yaml").write_text(yaml.safe_dump(recipe))
    works("train", tmp_path / "pooled.yaml", "--data", digits, "--out", tmp_path / "run", "--device", "cpu")
    model = progresvit.load(tmp_path / "run" / "model")
    assert isinstance(model, PooledModel)
    out = tmp_path / "r.parquet"
    works("evaluate", tmp_path / "run" / "model", "--data", digits, "--out", out, "--workers", 0, "--device", "cpu")
    records = read_records(out)
    assert records.correct[:, -1].mean() > 0.7  # four classes
    assert records.gmacs() == model.gmacs()
    works("frontier", out, "--out", tmp_path / "f.json")
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert rows[0]["gmacs_paper"] == pytest.approx(model.gmacs()[-1])
    works("calibrate", out, "--exit-share", 0.5, "--out", tmp_path / "t.json")
    setting = json.loads((tmp_path / "t.json").read_text())
    assert setting["expected"]["exit_shares"][0] == pytest.approx(0.5, abs=0.05)


def test_a_folder_says_which_kind_of_model_it_holds(model, folder, digits):
    stored = json.loads((folder / "config.json").read_text())
    assert stored["kind"] == "test_pooled"
    assert "architecture" not in stored
    loaded = progresvit.load(folder)
    assert isinstance(loaded, PooledModel)
    assert loaded.config == model.config
    images, _ = read_images(digits / "val", model.config)
    with torch.no_grad():
        for before, after in zip(model(images), loaded(images)):
            assert torch.equal(before.logits, after.logits)
    assert loaded.norms[0].num_batches_tracked == 40  # an integer beside the weights
    half = progresvit.load(progresvit.save(model, folder.parent / "half", dtype=torch.float16))
    assert half.norms[0].num_batches_tracked == 40
    assert torch.equal(half.head.weight, model.head.weight.half().float())


def test_weights_that_do_not_fit_a_config_of_another_kind_are_refused(folder):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "features": 8}))
    with pytest.raises(ValueError, match=r"have other shapes for layers\.0\.weight"):
        progresvit.load(folder)
    (folder / "config.json").write_text(json.dumps({**values, "featurs": 8}))
    with pytest.raises(ValueError, match=r"config\.json: featurs: unknown key; did you mean 'features'"):
        progresvit.load(folder)


def test_info_shows_the_rounds_and_the_compute_of_any_model(model, folder):
    shown = json.loads(works("info", folder, "--json"))
    assert shown["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert shown["rounds"][1] == {"round": 2, "resolution": 32, "grid": 8}
    assert shown["compute"]["paper"]["cumulative_gmacs"] == model.gmacs()
    assert "grid" in works("info", folder)


@pytest.mark.parametrize(("kind", "hint"), [("progresvt", "did you mean 'progresvit'"), ("zzz", "choose one of")])
def test_a_kind_that_is_not_known_is_refused_with_what_to_do(folder, kind, hint):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "kind": kind}))
    with pytest.raises(ValueError, match=rf"config\.json: this version knows no model of kind '{kind}'; {hint}.*") as e:
        progresvit.load(folder)
    assert "Install a newer version of progresvit, or import the module that registers this kind" in str(e.value)
    assert "import the module that registers this kind" in str(e.value)
    refused(f"knows no model of kind '{kind}'", "info", folder)


def test_records_of_a_kind_that_is_not_known_are_read_and_routed(records, tmp_path, monkeypatch):
    monkeypatch.delitem(registry.KINDS, "test_pooled")
    again = read_records(tmp_path / "r.parquet")
    assert again.header == records.header
    assert calibrate_near_lossless(again).threshold == calibrate_near_lossless(records).threshold
    assert frontier_table({"m": again}).rows == frontier_table({"m": records}).rows
    assert "near-lossless" in works("frontier", tmp_path / "r.parquet")
    with pytest.raises(ValueError, match="knows no model of kind 'test_pooled'"):
        again.config  # noqa: B018


def test_rounds_that_are_alternatives_are_compared_and_not_routed(digits, tmp_path):
    model = fitted(AlternativesConfig(**FIELDS), digits)
    folder = progresvit.save(model, tmp_path / "model")
    shown = works("evaluate", folder, "--data", digits, "--out", tmp_path / "r.parquet", "--workers", 0)
    assert "round 2" in shown
    records = read_records(tmp_path / "r.parquet")
    assert records.gmacs() == model.gmacs() == [16 * 16 / 1e9, 16 * 196 / 1e9]
    assert records.correct.shape == (24, 2)
    routings = (
        calibrate_near_lossless,
        measure_budgets,
        risk_coverage_curves,
        lambda records: equal_accuracy_table(records, [RefinementRule(name="entropy")]),
    )
    for route in routings:
        with pytest.raises(ValueError, match="of kind 'test_alternatives' are alternatives"):
            route(records)
    refused("no routing among them", "frontier", tmp_path / "r.parquet")


def test_the_engine_and_exports_refuse_another_kind(model, folder, tmp_path):
    for source in (model, folder):
        with pytest.raises(ValueError, match="the engine runs models of kind 'progresvit' only, not 'test_pooled'"):
            progresvit.Engine(source)
    refused("export runs models of kind 'progresvit' only", "export", folder, "--out", tmp_path / "export")
    with pytest.raises(ValueError, match="not 'Linear'"):
        progresvit.Engine(torch.nn.Linear(1, 1))


def test_a_kind_has_one_meaning():
    registry.register("test_pooled", config="tests.model.pooled:PooledConfig", model="tests.model.pooled:PooledModel")
    with pytest.raises(ValueError, match=r"already registered as tests\.model\.pooled:PooledModel"):
        registry.register("test_pooled", config="tests.model.pooled:PooledConfig", model="elsewhere:Model")
    assert registry.KINDS["test_pooled"].model == "tests.model.pooled:PooledModel"


def test_progresvit_is_a_round_model_of_its_own_kind(small_config):
    model = registry.build(small_config, drop_path=0.5)
    assert isinstance(model, RoundModel)
    assert model.blocks[1].drop_path.drop_prob == 0.5
    for convention in compute.CONVENTIONS:
        assert model.gmacs(convention) == compute.cumulative_gmacs(small_config, convention)


def test_a_second_model_satisfies_the_interface_without_inheriting_from_it():
    assert isinstance(PooledModel(PooledConfig(**FIELDS)), RoundModel)
    assert not isinstance(torch.nn.Linear(1, 1), RoundModel)


def test_a_config_is_read_without_torch():
    code = (
        "import sys, progresvit.io.model_folder as f, progresvit.model.registry as r; "
        "print(r.read_config(f.bundled_folder('nettewoof-tiny')).kind, *sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded[0] == "progresvit"
    assert not {"torch", "timm", "numpy"} & set(loaded)
