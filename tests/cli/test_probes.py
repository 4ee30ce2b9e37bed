import pytest

import progresvit
from progresvit.evaluation import read_records
from progresvit.metrics.interval import share_interval
from progresvit.routing import near_lossless
from tests.commands import refused, works


@pytest.fixture
def evaluate(model, digits):
    """A model without a head."""
    headless = progresvit.load(model)
    headless.reset_classifier(0)
    progresvit.save(headless, model)
    return ("evaluate", model, "--data", digits, "--workers", 0, "--device", "cpu")


def test_knn_prints_the_accuracy_of_rounds_and_of_routing_and_its_records_are_used_like_others(
    evaluate, digits, tmp_path
):
    table = tmp_path / "knn.parquet"
    output = works(*evaluate, "--task", "knn", "--out", table, "--k", 5, "--temperature", 0.1)
    records = read_records(table)
    first = f"round 1 {records.correct[:, 0].mean():.2%}"
    assert f"k-NN (k 5, temperature 0.1, 48 images of train), top-1 of 24 images: {first}" in output
    point = near_lossless(records.scores(), records.correct, records.gmacs())
    routed = share_interval(round(24 * point.top1), 24).as_percent()
    assert f"near-lossless threshold {point.threshold:.4g}: top-1 {routed} at" in output
    assert f"{table} is ready: progresvit frontier" in output
    assert "near-lossless" in works("frontier", table)
    works("calibrate", table, "--near-lossless", "--out", tmp_path / "t.json")
    works("frontier", table, "--setting", tmp_path / "t.json")
    works("report", table, "--data", digits, "--threshold", tmp_path / "t.json", "--out", tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "knn in place of the head" in page


def test_linear_prints_the_held_out_accuracy_of_every_learning_rate(evaluate, tmp_path):
    table = tmp_path / "linear.parquet"
    linear = (
        *evaluate,
        "--task",
        "linear",
        "--epochs",
        2,
        "--learning-rates",
        "0.03,0.3",
        "--in-memory",
        "--blocks",
        1,
    )
    output = works(*linear, "--out", table)
    accuracy = read_records(table).header.probe_result["held_out_top1"][0]
    shares = ", ".join(
        f"{rate} {share_interval(round(4 * share), 4).as_percent()}" for rate, share in zip(("0.03", "0.3"), accuracy)
    )
    assert f"round 1, top-1 of 4 held-out images by learning rate: {shares}; using" in output
    assert "learning rate that was tried" in output
    assert "linear probe (1 block, 2 epochs, 48 images of train), top-1 of 24 images: round 1" in output
    works("frontier", table)


def test_options_of_another_task_are_refused(evaluate, tmp_path):
    base = (*evaluate, "--out", tmp_path / "r.parquet")
    refused("the model has no classes to choose from; evaluate its features with --task knn or --task linear", *base)
    refused("unknown task 'kn'", *base, "--task", "kn")
    refused("--task segmentation does not fit the model", *base, "--task", "segmentation")
    refused("--k is for --task knn; leave it out", *base, "--k", 3)
    refused("--epochs and --in-memory are for --task linear", *base, "--epochs", 3, "--in-memory")
    refused("--blocks is for --task linear", *base, "--task", "knn", "--blocks", 4)
    refused("--crop is for --task knn and --task linear", *base, "--crop", 0.875)
    refused("error: --blocks must be at least 1, got 0.", *base, "--task", "linear", "--blocks", 0)
    refused("pass --blocks 1 or fewer", *base, "--task", "linear")
    refused("--bank-split is for --task knn and --task linear", *base, "--bank-split", "train")
    refused("--k is for --task knn, and this is --task linear", *base, "--task", "linear", "--k", 3)
    refused("--learning-rates is for --task linear", *base, "--task", "knn", "--learning-rates", "1")
    refused("--learning-rates takes comma-separated numbers", *base, "--task", "linear", "--learning-rates", "some")
    refused("--unlabelled is for predictions of the model's head", *base, "--task", "knn", "--unlabelled")
    refused("--stride is for segmentation models", *base, "--task", "knn", "--stride", 0.5)
    refused("fewer than k = 49", *base, "--task", "knn", "--k", 49)
    assert not list(tmp_path.glob("r.parquet*"))
