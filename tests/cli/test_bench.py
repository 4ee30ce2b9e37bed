"""``progresvit bench`` as a user types it. Except in the first test, rows are measured in this process."""

import importlib
import json
import re

import pytest

import progresvit
from progresvit import compute
from progresvit.engine import measurement
from progresvit.io.model_folder import bundled_folder
from progresvit.model.registry import build, config_class
from tests.commands import refused, run, works

bench = importlib.import_module("progresvit.cli.bench")  # the package has a function of this name
QUICK = ("--seconds", 0, "--batch", 4)


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(measurement, "in_fresh_process", lambda function, *given: function(*given))


def rows_of(output):
    report = json.loads(output)
    return {row["name"]: row for row in report["rows"]}


@pytest.mark.slow
def test_memory_is_measured_in_a_fresh_process(model):
    subject = {"model": str(model), "eager": True, "device": "cpu", "precision": "fp32", "batch": 4, "continuing": 1}
    timing = {"device": "cpu", "threads": 1, "seconds": 0}
    row = measurement.in_fresh_process(bench.measure, "model, round by round", subject, timing)
    assert row["exit_shares"] == [0, 1]
    assert 0 < row["peak_gib"] < 1


def test_the_engine_is_measured_beside_the_model(model, here):
    rows = rows_of(works("bench", model, *QUICK, "--json"))
    assert list(rows) == ["engine, torch", "engine, all rounds", "model, round by round", "plain ViT in the engine"]
    assert [rows[name]["exit_shares"][1] for name in rows if name != "plain ViT in the engine"] == [
        pytest.approx(0.664, abs=1 / 32), 1, pytest.approx(0.664, abs=1 / 32)
    ]  # fmt: skip
    for row in rows.values():
        assert row["images_per_s"] > 0
        assert row["p50_ms"] <= row["p95_ms"]
    config = progresvit.load(model).config
    assert rows["engine, all rounds"]["gmacs"] == pytest.approx(compute.cumulative_gmacs(config)[-1])
    plain = config.replace(rounds=config.rounds[-1:], psg=False)
    assert rows["plain ViT in the engine"]["gmacs"] == pytest.approx(compute.cumulative_gmacs(plain)[0])


def test_a_table_and_a_ratio_are_printed(model, here):
    output = works("bench", model, *QUICK, "--continuing", 0.5)
    assert "engine, torch" in output
    assert "50.0" in output
    assert re.search("engine, torch, beside plain ViT in the engine: .* at batch 4; at batch 1 .p50. .* ms", output)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("thinkingvit", ["model, round by round", "all rounds"]),  # rounds that follow each other
        ("hydravit", ["round 1", "round 2"]),  # alternatives
    ],
)
def test_a_baseline_is_measured_round_by_round(tmp_path, here, kind, names):
    rounds = [{"resolution": 32, "heads": heads} for heads in (1, 2)]
    model = build(config_class(kind)(heads=2, depth=1, num_classes=4, rounds=rounds)).eval()
    progresvit.save(model, tmp_path / "model")
    out = tmp_path / "speed.md"
    words = ("bench", tmp_path / "model", *QUICK, "--continuing", 0.5, "--json", "--out", out)
    rows = rows_of(works(*words).split("wrote")[0])
    assert list(rows) == names
    assert all(row["images_per_s"] > 0 for row in rows.values())
    gmacs = model.gmacs()
    if kind == "hydravit":
        assert [row["gmacs"] for row in rows.values()] == pytest.approx(gmacs)
        assert [row["exit_shares"] for row in rows.values()] == [[1, 0], [0, 1]]
    else:
        assert [row["gmacs"] for row in rows.values()] == pytest.approx([sum(gmacs) / 2, gmacs[-1]])
    assert out.read_text().count(f"| {names[0]} |") == 1
    assert "inf" not in out.read_text()


def test_a_table_is_written_in_a_known_format(model, here, tmp_path):
    refused("suffix", "bench", model, *QUICK, "--out", tmp_path / "speed.png")


def test_a_ratio_is_told_only_if_the_runs_do_not_overlap():
    slow, fast = {"images_per_s": 100, "spread": 0.2}, {"images_per_s": 150, "spread": 0.2}
    assert measurement.describe_ratio(fast, slow) == "1.50 × the speed (1.23 to 1.83)"
    assert measurement.describe_ratio(slow, fast) == "0.67 × the speed (0.55 to 0.81)"
    assert measurement.describe_ratio({**fast, "spread": 0.6}, slow) is None


@pytest.mark.slow
def test_images_and_thresholds_can_be_given(model, digits, here):
    for threshold, share in (("inf", 0), ("0", 1)):
        rows = rows_of(works("bench", model, *QUICK, "--data", digits / "val", "--threshold", threshold, "--json"))
        assert [rows[name]["exit_shares"][1] for name in ("engine, torch", "model, round by round")] == [share, share]
    assert rows["engine, torch"]["thresholds"] == [0.0]


@pytest.mark.slow
def test_the_name_of_a_setting_is_a_threshold(model, here):
    refused("has no setting 'careful'", "bench", model, "--threshold", "careful")
    refused("the model has no setting 'careful'", "bench", "progresvit_tiny_160_224", "--threshold", "careful")
    foreign = bundled_folder("nettewoof-tiny") / "settings" / "careful.json"
    refused("other weights (the bundled model 'nettewoof-tiny')", "bench", model, *QUICK, "--threshold", foreign)


def test_wrong_arguments_are_refused_with_a_remedy(model, tmp_path, here):
    cpu = ("--device", "cpu")
    refused("progresvit_tiny_160_224", "bench", "progresvit_tiny_160")
    refused("unknown device 'tpu'; use cpu or cuda", "bench", model, "--device", "tpu")
    refused("use one of them", "bench", model, "--continuing", 0.5, "--threshold", 0.5)
    refused("fp8 needs a GPU", "bench", model, *cpu, "--precision", "fp8")
    refused("unknown backend 'magic'; choose", "bench", model, *cpu, "--backend", "magic")
    refused("there is no data at", "bench", model, *cpu, "--data", tmp_path / "nothing")
    for option, value in (("--batch", 0), ("--threads", 0), ("--continuing", 1.5), ("--seconds", -1)):
        result = run("bench", model, option, value)
        assert result.exit_code == 2
        assert option in result.output
