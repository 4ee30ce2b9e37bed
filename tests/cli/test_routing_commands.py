"""Evaluate, frontier, calibrate and the rest as a user types them, wrong arguments too."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import progresvit
from progresvit.evaluation import read_records, write_records
from progresvit.evaluation.shift import read_summary
from progresvit.metrics.interval import share_interval
from progresvit.routing import load_budgets, load_router, load_setting
from tests.commands import refused, run, works
from tests.evaluation.made import make_records, of_imagenet

PUBLISHED = Path(__file__).parents[2] / "repro" / "published.yaml"


@pytest.fixture
def records(tmp_path):
    write_records(make_records(3000, keep_logits=True), tmp_path / "r.parquet")
    return tmp_path / "r.parquet"


@pytest.fixture
def others(tmp_path):
    """Records of the same model on other images."""
    write_records(make_records(3000, seed=7), tmp_path / "other.parquet")
    return tmp_path / "other.parquet"


def test_from_images_to_a_threshold_to_predictions(model, digits, tmp_path):
    table = tmp_path / "val.parquet"
    output = works("evaluate", model, "--data", digits, "--out", table, "--workers", 0, "--device", "cpu", "--logits")
    first = share_interval(int(read_records(table).correct[:, 0].sum()), 24)
    assert f"top-1 of 24 images: round 1 {first.as_percent()}, round 2" in output
    assert read_records(table).logits.shape == (24, 2, 4)
    works("frontier", table)
    works("calibrate", table, "--exit-share", 0.5, "--out", tmp_path / "t.json")
    engine = progresvit.Engine(progresvit.load(model), tmp_path / "t.json")
    answers = engine.classify(sorted((digits / "val").rglob("*.png")))
    assert sum(answer.exit_round == 1 for answer in answers) == 12


def test_a_saved_model_that_merges_tokens_is_described_and_evaluated(model, digits, tmp_path):
    merging = progresvit.load(model)
    merging.set_merge([0, 1])
    folder = progresvit.save(merging, tmp_path / "merging")
    report = json.loads(works("info", folder, "--json"))
    assert [round_.get("merge") for round_ in report["config"]["rounds"]] == [None, 1]
    assert [macs["token_merging"] > 0 for macs in report["compute"]["paper"]["round_macs"]] == [False, True]
    works("evaluate", folder, "--data", digits, "--out", tmp_path / "r.parquet", "--workers", 0, "--device", "cpu")
    records = read_records(tmp_path / "r.parquet")
    assert records.config == merging.config
    assert records.gmacs() == report["compute"]["paper"]["cumulative_gmacs"]
    evaluate = ("evaluate", model, "--data", digits, "--workers", 0, "--device", "cpu")
    works(*evaluate, "--merge", "0,1", "--out", tmp_path / "merged.parquet")
    merged = read_records(tmp_path / "merged.parquet")
    assert merged.header.weights_sha256 == records.header.weights_sha256
    assert merged.gmacs() == records.gmacs()
    assert np.array_equal(merged.top10_entropy, records.top10_entropy)
    refused("--merge takes comma-separated whole numbers", *evaluate, "--merge", "few", "--out", tmp_path / "x.parquet")
    refused("merge", *evaluate, "--merge", "1,2,3", "--out", tmp_path / "x.parquet")


def test_evaluate_takes_a_sample(model, digits, segmenter, tmp_path):
    base = ["evaluate", model, "--data", digits, "--workers", 0, "--device", "cpu", "--out", tmp_path / "r.parquet"]
    refused("--limit 25 is more than the 24 images", *base, "--limit", 25)
    refused("--limit must be at least 1, got 0", *base, "--limit", 0)
    refused("give both", *base, "--seed", 1)
    both = ("--limit", 2, "--seed", 0)
    refused("--limit and --seed are for classification models", "evaluate", segmenter, *base[2:], *both)
    output = works(*base, "--limit", 9, "--seed", 1)
    assert "note: a random sample of 9 of 24 images, drawn with seed 1" in output
    assert "top-1 of 9 images" in output
    assert read_records(tmp_path / "r.parquet").header.sample == {"images": 9, "of": 24, "seed": 1}


@pytest.mark.slow
def test_evaluate_says_what_it_left_out_and_refuses_bad_input(model, digits, tmp_path):
    out = tmp_path / "x" / "r.parquet"
    base = ["evaluate", model, "--workers", 0, "--device", "cpu", "--out", out]
    refused("there is no data at", *base, "--data", tmp_path / "none")
    refused("not a corruption with a severity from 1 to 5", *base, "--data", digits, "--corruption", "fog/9")
    refused("unknown corruption 'rain'", *base, "--data", digits, "--corruption", "rain")
    refused("unknown precision", *base, "--data", digits, "--precision", "fp64")
    refused("at least one image", *base, "--data", digits, "--batch", 0)
    refused("unknown device 'gpu'", "evaluate", model, "--data", digits, "--out", out, "--device", "gpu")
    refused("there is no model folder", "evaluate", tmp_path / "nobody", "--data", digits, "--out", out)
    assert not out.parent.exists()
    works(*base, "--data", digits, "--corruption", "fog/2")
    assert read_records(out).header.corruption == "fog/2"
    refused("pass --overwrite", *base, "--data", digits)
    broken = progresvit.load(model)
    with torch.no_grad():
        broken.head.bias[1] = torch.nan
    progresvit.save(broken, model)
    output = works(*base, "--data", digits, "--overwrite")
    assert "24 images have NaN or infinite logits" in output


def test_frontier_beside_published_results(records, tmp_path):
    published = ("--published", PUBLISHED, "--comparison", "dynamic-tokens")
    outs = [tmp_path / f"f.{suffix}" for suffix in ("csv", "json", "png")]
    refused("ImageNet's 1000 classes, and r was evaluated on 12 classes; leave", "frontier", records, *published)
    write_records(of_imagenet(read_records(records), images=3000), records)
    output = works("frontier", records, *published, *(x for out in outs for x in ("--out", out)))
    assert "(measured on 3,000 images, published on 50,000)" in output
    assert "published, DeiT-S, 0.7" in output
    assert "arXiv:2106.02034" in output
    rows = list(csv.DictReader(outs[0].open()))
    assert {row["model"] for row in rows if row["source"]} == {row["model"] for row in rows} - {"r"}
    refused("give both", "frontier", records, "--comparison", "early-exit")
    refused("no comparison 'x'; choose one of adaptive-width", "frontier", records, *published[:3], "x")
    (tmp_path / "bad.yaml").write_text("series: [{method: ToMe, points: []}]")
    refused("ToMe has no source", "frontier", records, "--published", tmp_path / "bad.yaml")


@pytest.mark.slow
def test_frontier_in_every_format_and_of_several_models(records, tmp_path):
    write_records(make_records(500, rounds=3), tmp_path / "three.parquet")
    outs = [tmp_path / "f" / f"frontier.{suffix}" for suffix in ("csv", "json", "md", "png", "svg")]
    output = works("frontier", records, tmp_path / "three.parquet", *(x for out in outs for x in ("--out", out)))
    assert "near-lossless" in output
    assert all(out.stat().st_size > 100 for out in outs)
    rows = list(csv.DictReader(outs[0].open()))
    assert {row["model"] for row in rows} == {"r", "three"}
    assert works("frontier", records, "--thresholds", "0,0.25").count("0.25") >= 1
    works("frontier", tmp_path / "three.parquet", "--per-round", "0.2,0.4", "--per-round", "0.1,0.9")
    refused("use one of them", "frontier", records, "--thresholds", "0", "--per-round", "0.1")
    refused("0 (every round runs) or more, not -0.5", "frontier", records, "--thresholds", "-0.5")
    refused("takes comma-separated numbers", "frontier", records, "--thresholds", "low")
    refused("so 1 for 2 rounds, not 2", "frontier", records, "--per-round", "0.1,0.2")
    refused("the suffix names the format", "frontier", records, "--out", tmp_path / "f.xlsx")
    refused("given twice", "frontier", records, records)
    refused("rows of equal length", "frontier", records, "--per-round", "0.1", "--per-round", "0.1,0.2")
    write_records(make_records(50, labelled=False), tmp_path / "free.parquet")
    outs = ("--out", tmp_path / "u.csv", "--out", tmp_path / "u.png")
    refused("have no label", "frontier", tmp_path / "free.parquet", *outs)
    assert not (tmp_path / "u.csv").exists()
    refused("no records at", "frontier", tmp_path / "none.parquet")


@pytest.mark.slow
def test_frontier_shows_what_settings_give_on_other_records(records, others, tmp_path):
    works("calibrate", records, "--near-lossless", "--out", tmp_path / "mine.json")
    works("calibrate", records, "--exit-share", 0.5, "--out", tmp_path / "half.json")
    settings = ["--setting", tmp_path / "mine.json", "--setting", tmp_path / "half.json"]
    works("frontier", others, *settings, "--out", tmp_path / "f.json", "--out", tmp_path / "f.png")
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert [row["note"] for row in rows[-3:]] == ["near-lossless", "mine", "half"]
    assert rows[-2]["threshold"] == load_setting(tmp_path / "mine.json").threshold
    assert rows[-1]["exit_share_1"] == pytest.approx(0.5, abs=0.05)
    other = read_records(others)
    write_records(replace(other, header=replace(other.header, weights_sha256="x")), tmp_path / "foreign.parquet")
    refused("calibrated for a model with other weights", "frontier", tmp_path / "foreign.parquet", *settings)
    refused("there is no setting at", "frontier", others, "--setting", tmp_path / "none.json")
    refused("a setting is a .json file", "frontier", others, "--setting", "0.5")


def test_calibrate_by_each_rule(records, tmp_path):
    assert json.loads(run("calibrate", records, "--near-lossless").stdout)["rule"] == "near-lossless"
    low, high = read_records(records).gmacs()
    works("calibrate", records, "--budget-gmacs", (low + high) / 2, "--out", tmp_path / "b.json")
    assert load_setting(tmp_path / "b.json").expected["gmacs"] <= (low + high) / 2
    output = works("calibrate", records, "--max-drop", 0.01, "--confidence", 0.9, "--out", tmp_path / "g.json")
    assert "certified: with probability 0.9" in output
    setting = load_setting(tmp_path / "g.json")
    assert (setting.epsilon, setting.delta, setting.loss) == (0.01, 0.1, "labelled")
    works("calibrate", records, "--max-drop", 0.02, "--unlabelled", "--out", tmp_path / "u.json")
    assert load_setting(tmp_path / "u.json").loss == "unlabelled"


def test_calibrate_with_a_threshold_for_each_round(records, tmp_path):
    three = tmp_path / "three.parquet"
    write_records(make_records(1500, rounds=3), three)
    words = ("calibrate", three, "--per-round")
    output = works(*words, "--near-lossless", "--max-error", 0.05, "--out", tmp_path / "t.json")
    assert "chosen on one half of the images and measured on the other, both ways:" in output
    setting = load_setting(tmp_path / "t.json")
    assert len(setting.threshold) == 2
    budget = read_records(three).gmacs()[1]
    assert json.loads(run(*words, "--budget-gmacs", budget).stdout)["expected"]["gmacs"] <= budget
    rows = tmp_path / "f.json"
    works("frontier", three, "--setting", tmp_path / "t.json", "--out", rows)
    shown = json.loads(rows.read_text())["rows"]
    assert shown[-1]["threshold"] == list(setting.threshold)
    assert "near-lossless, per round" in [row["note"] for row in shown]
    out = ("--out", tmp_path / "none.json")
    refused("these records have 2; leave out --per-round", "calibrate", records, "--per-round", "--near-lossless", *out)
    refused("a threshold for each round of three or more already", *words, "--max-drop", 0.1, *out)
    refused("not for --exit-share; leave it out", *words, "--exit-share", 0.5, *out)
    refused("not for --budgets; leave it out", *words, "--budgets", *out)
    refused("choose one of", *words, *out)
    refused("and all rounds", *words, "--budget-gmacs", 99, *out)
    write_records(make_records(50, rounds=3), tmp_path / "few.parquet")
    refused("which need 100", "calibrate", tmp_path / "few.parquet", "--near-lossless", "--per-round", *out)
    assert not (tmp_path / "none.json").exists()


def test_calibrate_says_when_to_withhold_an_answer(records, tmp_path):
    output = works("calibrate", records, "--near-lossless", "--max-error", 0.1, "--out", tmp_path / "careful.json")
    assert "withheld: entropy of" in output
    assert load_setting(tmp_path / "careful.json").abstain > 0
    refused("between 0 and 1", "calibrate", records, "--near-lossless", "--max-error", 5)


def test_calibrate_sets_a_limit_for_images_of_no_class(records, tmp_path):
    words = ("calibrate", records, "--near-lossless")
    output = works(*words, "--ood-share", 0.1, "--out", tmp_path / "ood.json")
    assert "out-of-distribution: energy below" in output
    setting = load_setting(tmp_path / "ood.json")
    assert (setting.ood.score, setting.ood.share) == ("energy", 0.1)
    assert setting.expected["out_of_distribution"] == pytest.approx(0.1, abs=0.001)
    refused("between 0 and 1", *words, "--ood-share", 1.5)
    refused("between 0 and 1", *words, "--ood-share", 0)
    refused("did you mean 'max-logit'", *words, "--ood-share", 0.1, "--ood-score", "maxlogit")
    refused("--ood-score needs --ood-share", *words, "--ood-score", "energy")
    refused("leave out", "calibrate", records, "--budgets", "--ood-share", 0.1, "--out", tmp_path / "b.json")


def test_ood_compares_scores_on_known_and_unknown_images(records, tmp_path):
    logits = np.random.default_rng(1).normal(size=(2, 500, 12))
    write_records(make_records(500, labelled=False, logits=logits), tmp_path / "unknown.parquet")
    works("calibrate", records, "--near-lossless", "--ood-share", 0.05, "--out", tmp_path / "ood.json")
    words = ("ood", records, tmp_path / "unknown.parquet")
    output = works(*words, "--threshold", tmp_path / "ood.json", "--out", tmp_path / "t.json")
    assert "5.0% of the known images and" in output
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert [row["answers"] for row in rows] == ["routed"] * 4 + ["round 2"] * 4
    assert all(0.7 < row["auroc"] < 1 for row in rows)
    assert {(row["known"], row["unknown"]) for row in rows} == {(3000, 500)}
    assert "FPR95" in works(*words, "--threshold", 0.3)
    assert "are rejected" not in works(*words)
    refused("suffix names the format", *words, "--out", tmp_path / "t.png")
    refused("known and unknown images are the same", "ood", records, records)
    refused("there are no records at", "ood", records, tmp_path / "none.parquet")
    others = make_records(50, seed=3)
    write_records(replace(others, header=replace(others.header, weights_sha256="x")), tmp_path / "foreign.parquet")
    refused("models with other weights", "ood", records, tmp_path / "foreign.parquet")


def test_calibrate_writes_a_table_to_look_up_any_budget_in(records, tmp_path):
    output = works("calibrate", records, "--budgets", "--out", tmp_path / "model" / "budgets.json")
    assert "--budget-gmacs G" in output
    assert load_budgets(tmp_path / "model" / "budgets.json").n == 3000
    refused("needs --out MODEL/budgets.json", "calibrate", records, "--budgets")
    refused("leave out --router", "calibrate", records, "--budgets", "--max-error", 0.1, "--out", tmp_path / "b.json")
    refused("choose one of", "calibrate", records, "--budgets", "--near-lossless", "--out", tmp_path / "b.json")


@pytest.mark.slow
def test_calibrate_refuses_bad_input_and_writes_nothing(records, tmp_path):
    write_records(make_records(50, labelled=False), tmp_path / "free.parquet")
    out = tmp_path / "new" / "t.json"
    for match, *options in [
        ("not none", records),
        ("not --near-lossless and --exit-share", records, "--near-lossless", "--exit-share", 0.5),
        ("round 1 alone costs", records, "--budget-gmacs", 0.0001),
        ("and all rounds", records, "--budget-gmacs", 99),
        ("between 0 and 1", records, "--exit-share", 1.5),
        ("at least 29,956 are needed", records, "--max-drop", 0.0001),
        ("--max-drop is between 0 and 1", records, "--max-drop", 0),
        ("--confidence is at least 0.5 and below 1", records, "--max-drop", 0.01, "--confidence", 1),
        ("fails more often than it holds", records, "--max-drop", 0.01, "--confidence", 0.05),
        ("--unlabelled applies to the certificate", records, "--near-lossless", "--unlabelled"),
        ("50 of 50 images in these records have no label", tmp_path / "free.parquet", "--near-lossless"),
        ("have no label", tmp_path / "free.parquet", "--max-drop", 0.1),
        ("no router at", records, "--near-lossless", "--router", tmp_path / "none.safetensors"),
    ]:
        refused(match, "calibrate", *options, "--out", out)
    refused("a setting is a .json file", "calibrate", records, "--near-lossless", "--out", tmp_path / "t.txt")
    assert not out.parent.exists()


@pytest.mark.slow
def test_routers_are_fitted_compared_and_used(records, others, tmp_path):
    router = tmp_path / "model" / "router.safetensors"
    works("fit-router", records, "--out", router)
    works("fit-router", records, "--out", tmp_path / "error.safetensors", "--target", "error", "--epochs", 2)
    assert load_router(router).count_seen(read_records(records).ids) == 3000
    output = works(
        "compare-routers", others, "--router", router, "--router", tmp_path / "error.safetensors",
        "--out", tmp_path / "table.md",
    )  # fmt: skip
    assert "benefit gain (points)" in output
    assert "error gain (points)" in output
    assert (tmp_path / "table.md").read_text().count("\n") == 2 + 2 + 11
    works("fit-router", records, "--out", tmp_path / "entropy.safetensors", "--epochs", 1)
    both = works("compare-routers", others, "--router", router, "--router", tmp_path / "entropy.safetensors")
    for column in ("entropy top-1 (%)", "router router top-1 (%)", "router entropy top-1 (%)"):
        assert column in both
    assert "fitted on 3000 of these images" in run("compare-routers", records, "--router", router).output
    refused("fitted on 3000 of these images", "calibrate", records, "--max-drop", 0.05, "--router", router)
    works("frontier", others, "--router", router)
    output = works("calibrate", others, "--exit-share", 0.4, "--router", router, "--out", tmp_path / "t.json")
    assert f'router="{router}"' in output
    works("trust", others, "--threshold", tmp_path / "t.json", "--router", router)
    works("abstention", others, "--threshold", tmp_path / "t.json", "--router", router)
    refused("for the probabilities of a learned router", "trust", others, "--threshold", tmp_path / "t.json")
    refused("unknown target 'luck'", "fit-router", records, "--out", tmp_path / "x.safetensors", "--target", "luck")
    refused(".safetensors file", "fit-router", records, "--out", tmp_path / "x.bin")
    refused("--epochs must be at least 1", "fit-router", records, "--out", tmp_path / "x.safetensors", "--epochs", 0)
    refused("the suffix", "compare-routers", others, "--router", router, "--out", tmp_path / "t.png")
    foreign = read_records(others)
    write_records(replace(foreign, header=replace(foreign.header, weights_sha256="x")), tmp_path / "foreign.parquet")
    assert "records of another model" in run("frontier", tmp_path / "foreign.parquet", "--router", router).output


@pytest.mark.slow
def test_abstention_and_hopeless_images(records, others, tmp_path):
    for target in ("hopeless", "benefit"):
        works("fit-router", records, "--out", tmp_path / f"{target}.safetensors", "--target", target)
    output = works(
        "abstention", others, "--hopeless", tmp_path / "hopeless.safetensors",
        "--benefit", tmp_path / "benefit.safetensors", "--out", tmp_path / "risk.png", "--out", tmp_path / "risk.csv",
        "--compute-out", tmp_path / "compute.json",
    )  # fmt: skip
    for text in ("area under risk", "oracle", "entropy, unrecoverable rejected", "benefit router"):
        assert text in output
    rules = [row["rule"] for row in json.loads((tmp_path / "compute.json").read_text())["rows"]]
    assert rules[0] == "every round"
    assert (tmp_path / "risk.png").stat().st_size > 1000
    refused("needs --unrecoverable", "abstention", others, "--benefit", tmp_path / "benefit.safetensors")
    refused("takes a number", "abstention", others, "--threshold", "x")


def test_a_setting_of_another_model_is_refused_wherever_it_is_used(records, tmp_path):
    works("calibrate", records, "--max-drop", 0.02, "--out", tmp_path / "t.json")
    assert "note" not in works("trust", records, "--threshold", tmp_path / "t.json")
    other = read_records(records)
    write_records(replace(other, header=replace(other.header, weights_sha256="x")), tmp_path / "other.parquet")
    write_records(replace(other, header=replace(other.header, precision="bf16")), tmp_path / "bf16.parquet")
    for command in ("trust", "abstention"):
        refused("with other weights", command, tmp_path / "other.parquet", "--threshold", tmp_path / "t.json")
        output = works(command, tmp_path / "bf16.parquet", "--threshold", tmp_path / "t.json")
        assert "other precision: the certificate does not hold here" in output


@pytest.mark.slow
def test_trust_with_and_without_temperatures(records, others, tmp_path):
    assert "calibration error" in works("trust", records, "--out", tmp_path / "t.json", "--out", tmp_path / "t.png")
    assert "after scaling" in works("trust", records, "--temperature", "--out", tmp_path / "scaled.png")
    refused("evaluate again with --logits (progresvit evaluate)", "trust", others, "--temperature")


def test_shift_draws_models_beside_each_other(model, digits, randomize, tmp_path):
    other = progresvit.save(randomize(progresvit.load(model)), tmp_path / "other")
    some = ["--data", digits, "--suite", "generated", "--corruptions", "contrast", "--severities", "2", "--workers", 0]
    model = progresvit.save(progresvit.load(model), tmp_path / "mine")
    mine, theirs = (["shift", of, *some, "--device", "cpu", "--out", of / "shift"] for of in (model, other))
    refused("--beside adds results to the figure of --plot", *mine, "--beside", tmp_path)
    refused("there is no summary of progresvit shift", *mine, "--plot", tmp_path / "s.png", "--beside", tmp_path)
    refused("the suffix names the format", *mine, "--plot", tmp_path / "s.jpg")
    works(*theirs)
    works(*mine, "--threshold", "0.9", "--plot", tmp_path / "s.svg", "--beside", other / "shift")
    figure = (tmp_path / "s.svg").read_text()
    assert all(name in figure for name in ("<!-- mine -->", "<!-- mine, routed at τ = 0.9 -->", "<!-- other -->"))
    made = (model / "shift" / "records" / "contrast_2.parquet").stat().st_mtime_ns
    again = [*mine, "--overwrite", "--plot", tmp_path / "again.png", "--beside"]
    refused("is given twice", *again, model / "shift")
    fewer = shutil.copytree(other / "shift", tmp_path / "fewer")
    dump = json.loads((fewer / "summary.json").read_text())
    (fewer / "summary.json").write_text(json.dumps(dump | {"names_sha256": "others"}))
    refused("evaluated on different images of generated", *again, fewer)
    assert (model / "shift" / "records" / "contrast_2.parquet").stat().st_mtime_ns == made  # nothing was evaluated
    works(*mine, "--threshold", "0.9")
    (row,) = json.loads((model / "shift" / "shift.json").read_text())["rows"]
    summary = read_summary(model / "shift")
    assert (summary.full.top1, summary.routed.top1) == (row["top1_round_2"], row["top1_routed"])


@pytest.mark.slow
def test_shift_over_generated_corruptions(model, digits, tmp_path):
    out = tmp_path / "shift"
    base = ["shift", model, "--data", digits, "--out", out, "--workers", 0, "--device", "cpu"]
    some = ["--suite", "generated", "--corruptions", "fog,contrast", "--severities", "1,4"]
    refused("unknown suite", *base, "--suite", "imagenet-x")
    refused("unknown corruption 'rain'", *base, "--suite", "generated", "--corruptions", "rain")
    refused("from 1 to 5", *base, "--suite", "generated", "--severities", "9")
    refused("whole numbers", *base, "--suite", "generated", "--severities", "1,1.7")
    refused("0 (every round runs) or more", *base, *some, "--threshold", "-1")
    refused("give both", *base, *some, "--router", tmp_path / "r.safetensors")
    refused("--cache keeps generated corruptions", *base, "--suite", "imagenet-v2", "--cache", tmp_path / "cache")
    assert not out.exists()
    output = works(*base, *some, "--threshold", "0.9")
    assert "mCE" not in output  # defined for ImageNet-C alone
    assert not list(out.glob("mce*"))
    rows = list(csv.DictReader((out / "shift.csv").open()))
    assert [row["set"] for row in rows] == ["fog_1", "fog_4", "contrast_1", "contrast_4", "mean"]
    frontiers = list(csv.DictReader((out / "frontiers.csv").open()))
    assert {"fog_4", "severity 1", "severity 4"} <= {row["model"] for row in frontiers}
    table = read_records(out / "records" / "fog_4.parquet")
    assert float(rows[1]["top1_round_2"]) == pytest.approx(table.correct[:, 1].mean())
    assert works(*base, *some, "--threshold", "0.9")  # what is done is not done again
    assert np.isfinite(float(rows[-1]["top1_routed"]))
    for name in ("filling", "reading"):
        base[base.index("--out") + 1] = tmp_path / name
        works(*base, *some, "--threshold", "0.9", "--cache", tmp_path / "cache")
        assert (tmp_path / name / "shift.csv").read_bytes() == (out / "shift.csv").read_bytes()
    assert len(list((tmp_path / "cache").iterdir())) == 4
