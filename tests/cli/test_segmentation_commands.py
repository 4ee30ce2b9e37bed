"""Evaluate, frontier, calibrate and info with a segmentation model as a user types them, wrong arguments too."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import progresvit
from progresvit.baselines.thinkingvit import ThinkingViT, ThinkingViTConfig
from progresvit.config import make_rounds
from progresvit.evaluation import read_segmentation_records, write_records, write_segmentation_records
from progresvit.metrics.miou import bootstrap_ends, mean_iou
from progresvit.model.registry import build
from progresvit.routing import load_setting
from tests.commands import refused, run, works
from tests.evaluation.made import make_records
from tests.evaluation.made_segmentation import CLASSES, config, make_dataset, make_model, make_segmentation_records


@pytest.fixture
def data(tmp_path):
    return make_dataset(tmp_path / "data")


@pytest.fixture
def records(tmp_path):
    write_segmentation_records(make_segmentation_records(600), tmp_path / "r.parquet")
    return tmp_path / "r.parquet"


def evaluating(model, data, out):
    return ("evaluate", model, "--data", data, "--out", out, "--workers", 0, "--device", "cpu")


def test_from_images_with_masks_to_a_threshold(segmenter, data, tmp_path):
    table = tmp_path / "val.parquet"
    shown = works(*evaluating(segmenter, data, table), "--split", "val")
    records = read_segmentation_records(table)
    first, second = mean_iou(records.totals)
    low, high = 100 * np.array(bootstrap_ends(records.counts, mean_iou))
    assert f"mIoU of 8 images: round 1 {first:.2%} ({low[0]:.2f} to {high[0]:.2f}), round 2 {second:.2%} (" in shown
    assert f"({low[1]:.2f} to {high[1]:.2f}) (95% intervals)" in shown
    assert "pixel accuracy of 8 images: round 1" in shown
    for name in (*CLASSES, "Intersection over union by class", "round 2 IoU (%)"):
        assert name in shown
    assert f"{table} is ready: progresvit frontier {table}" in " ".join(shown.split())
    output = works("frontier", table)
    assert "mIoU (%)" in output
    assert "near-lossless" in output
    shown = works("calibrate", table, "--exit-share", 0.5, "--out", tmp_path / "half.json")
    assert "SegmentationEngine(model, threshold=" in shown
    works("frontier", table, "--setting", tmp_path / "half.json", "--out", tmp_path / "f.json")
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert (rows[-1]["note"], rows[-1]["exit_share_1"]) == ("half", 0.5)


def test_evaluate_with_options_of_segmentation(segmenter, data, tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps({"0": "sky", "1": "road", "2": "car", "9": "tree"}))
    options = ("--stride", 0.5, "--scales", "1,1.25", "--flip", "--labels", tmp_path / "mine.json")
    works(*evaluating(segmenter, data, tmp_path / "r.parquet"), *options, "--ignore", "3,255", "--batch", 4)
    records = read_segmentation_records(tmp_path / "r.parquet")
    windows = records.header.preprocessing
    assert (windows["stride"], windows["scales"], windows["flip"]) == (0.5, [1.0, 1.25], True)
    assert records.header.masks == {"values": [0, 1, 2, 9], "ignored": [3, 255]}
    assert records.totals.labelled[0, 3] == 0


def test_evaluate_refuses_options_of_the_other_task(segmenter, model, data, digits, tmp_path):
    out = tmp_path / "new" / "r.parquet"
    base = evaluating(segmenter, data, out)
    for option in (["--unlabelled"], ["--restrict-classes"], ["--corruption", "fog/2"], ["--logits"]):
        refused(f"{option[0]} is for classification models, and this one segments images; leave it out", *base, *option)
    others = evaluating(model, digits, out)
    for option in (["--stride", 0.5], ["--scales", "1,2"], ["--flip"], ["--labels", "camvid"], ["--ignore", "0"]):
        message = f"{option[0]} is for segmentation models, and this one classifies images; leave it out"
        refused(message, *others, *option)
    refused("--stride and --flip are for segmentation models", *others, "--stride", 0.5, "--flip")
    refused("stride must be above 0 and at most 1", *base, "--stride", 1.5)
    refused("scales must be at least 1", *base, "--scales", "0.5,1")
    refused("--scales takes comma-separated numbers", *base, "--scales", "big")
    refused("--ignore takes comma-separated whole numbers", *base, "--ignore", "none")
    refused("at least one image", *base, "--batch", 0)
    (data / "labels.txt").write_text("sky\nroad\nboat\ntree\n")
    refused("the model's classes are sky, road, car, tree", *base)
    refused("is not a label file", *base, "--labels", "cityscape")
    assert not out.parent.exists()


def test_evaluate_refuses_data_without_masks(segmenter, digits, data, tmp_path):
    out = tmp_path / "new" / "r.parquet"
    refused("has no images under images/", *evaluating(segmenter, digits, out))
    refused("there is no data at", *evaluating(segmenter, tmp_path / "none", out))
    refused("its splits are val", *evaluating(segmenter, data, out), "--split", "test")
    (data / "annotations" / "val" / "3.png").unlink()
    refused("images/val/3.png of", *evaluating(segmenter, data, out))
    assert not out.parent.exists()
    Image.fromarray(np.full((50, 33), 7, np.uint8)).save(data / "annotations" / "val" / "3.png")
    refused("has pixels of value 7, which no label names", *evaluating(segmenter, data, out))
    assert not list(out.parent.iterdir())
    works(*evaluating(segmenter, data, out), "--ignore", "7,255")


def test_evaluate_says_how_the_validation_images_of_the_pets_are_drawn(tmp_path, randomize):
    data = tmp_path / "pets"
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    for folder in ("images", "annotations/trimaps"):
        (data / folder).mkdir(parents=True)
    names = [f"{breed}_{number}" for breed in ("Abyssinian", "Egyptian_Mau") for number in range(5)]
    for name in names:
        Image.fromarray(pixels).save(data / "images" / f"{name}.jpg")
        Image.fromarray(pixels[..., 0] % 3 + 1).save(data / "annotations" / "trimaps" / f"{name}.png")
    (data / "annotations" / "trainval.txt").write_text("".join(f"{name} 1 1 1\n" for name in names))
    model = progresvit.save(make_model(randomize, classes=("pet", "background", "border")), tmp_path / "model")
    for split, count, share in (("val", 2, "a fifth"), ("train", 8, "the training share")):
        output = works(*evaluating(model, data, tmp_path / f"{split}.parquet"), "--split", split)
        assert f"pets has no split {split} of its own; using {count} of 10 images, {share}, selected by" in output
    assert "note:" not in works(*evaluating(model, data, tmp_path / "all.parquet"), "--split", "trainval")


def test_evaluate_says_what_is_special_about_the_images(segmenter, tmp_path, randomize):
    data = make_dataset(tmp_path / "flat", split=".")  # without split folders: a fifth is held out
    broken = make_model(randomize)
    with torch.no_grad():
        broken.head.bias[0] = torch.inf
    progresvit.save(broken, segmenter)
    output = works(*evaluating(segmenter, data, tmp_path / "r.parquet"))
    assert "flat has no split val of its own; using 2 of 8 images, a fifth, selected by file name, the same" in output
    assert "2 images have NaN or infinite logits" in output
    assert len(read_segmentation_records(tmp_path / "r.parquet")) == 2


def test_frontier_in_every_format_and_of_several_models(records, tmp_path):
    write_segmentation_records(make_segmentation_records(100, rounds=3), tmp_path / "three.parquet")
    outs = [tmp_path / "f" / f"frontier.{suffix}" for suffix in ("csv", "json", "md", "png")]
    shown = works("frontier", records, tmp_path / "three.parquet", *(x for out in outs for x in ("--out", out)))
    assert "three" in shown
    assert all(out.stat().st_size > 100 for out in outs)
    assert works("frontier", records, "--thresholds", "0,0.25").count("0.25") >= 1
    works("frontier", tmp_path / "three.parquet", "--per-round", "0.2,0.4")


def test_frontier_refuses_bad_input(records, tmp_path):
    write_records(make_records(20), tmp_path / "c.parquet")
    refused("is of a segmentation model and", "frontier", tmp_path / "c.parquet", records)
    refused("--router is for records of classification models", "frontier", records, "--router", "x.safetensors")
    refused("so 1 for 2 rounds, not 2", "frontier", records, "--per-round", "0.1,0.2")
    works("calibrate", records, "--exit-share", 0.5, "--out", tmp_path / "t.json")
    setting = load_setting(tmp_path / "t.json")
    setting.model_copy(update={"weights_sha256": "x"}).save(tmp_path / "foreign.json")
    refused("calibrated for a model with other weights", "frontier", records, "--setting", tmp_path / "foreign.json")
    setting.model_copy(update={"preprocessing_sha256": "x"}).save(tmp_path / "other.json")
    assert "other preprocessing" in run("frontier", records, "--setting", tmp_path / "other.json").output


def test_calibrate_by_each_rule(records, tmp_path):
    setting = json.loads(run("calibrate", records, "--near-lossless").stdout)
    assert (setting["rule"], setting["n"]) == ("near-lossless", 600)
    low, high = read_segmentation_records(records).gmacs().mean(axis=0)
    shown = works("calibrate", records, "--budget-gmacs", (low + high) / 2, "--out", tmp_path / "b.json")
    expected = load_setting(tmp_path / "b.json").expected
    assert expected["gmacs"] == pytest.approx((low + high) / 2, rel=1e-2)
    assert f"mIoU {expected['miou']:.3%} against {expected['full_miou']:.3%}" in " ".join(shown.split())
    shown = works("calibrate", records, "--max-drop", 0.1, "--confidence", 0.9, "--out", tmp_path / "g.json")
    certificate = load_setting(tmp_path / "g.json")
    assert (certificate.epsilon, certificate.delta, certificate.loss) == (0.1, 0.1, "pixel-error")
    assert "the mean increase of an image's pixel error is at most 0.1" in " ".join(shown.split())
    assert f"on these images it is {certificate.mean_loss:.3g}" in " ".join(shown.split())
    executed = json.loads(run("calibrate", records, "--exit-share", 0.2, "--convention", "executed").stdout)
    assert executed["expected"]["convention"] == "executed"


def test_calibrate_and_other_commands_refuse_what_is_for_classification(records, segmenter, tmp_path):
    why = "for records of classification models, and these are of a segmentation model"
    near = ("calibrate", records, "--near-lossless", "--out", tmp_path / "new" / "t.json")
    refused(f"--router is {why}", *near, "--router", tmp_path / "x.safetensors")
    refused(f"--max-error is {why}", *near, "--max-error", 0)
    refused(f"--ood-share is {why}", *near, "--ood-share", 0.05)
    refused(f"--unlabelled is {why}", "calibrate", records, "--max-drop", 0.1, "--unlabelled")
    refused(f"--budgets is {why}", "calibrate", records, "--budgets", "--out", tmp_path / "budgets.json")
    refused("600 images are too few", "calibrate", records, "--max-drop", 0.001)
    refused("round 1 alone costs", "calibrate", records, "--budget-gmacs", 99)
    assert not (tmp_path / "new").exists()
    other = "holds records of a segmentation model; progresvit frontier and progresvit calibrate take them"
    shift = ("shift", segmenter, "--data", tmp_path, "--out", tmp_path / "shift", "--device", "cpu")
    refused("the model segments images, and this takes classification models", *shift, "--suite", "generated")
    refused(other, "trust", records)
    refused(other, "abstention", records)
    refused(other, "fit-router", records, "--out", tmp_path / "x.safetensors")
    refused(other, "ood", records, records)


def test_info_names_the_task_and_the_decoder(segmenter, tmp_path):
    shown = " ".join(works("info", segmenter).split())
    assert "segmentation, 4 classes" in shown
    assert "decoder (every patch)" in shown
    assert "GMACs of a window, paper convention" in shown
    report = json.loads(works("info", segmenter, "--json"))
    assert (report["task"], report["config"]["task"]) == ("segmentation", "segmentation")
    heads = [macs["head"] for macs in report["compute"]["paper"]["round_macs"]]
    assert heads == [2 * 2 * 64 * 4, 3 * 3 * 128 * 4]
    assert report["compute"]["paper"]["cumulative_gmacs"] == progresvit.compute.cumulative_gmacs(config())
    assert "decoder" not in works("info", "progresvit_small_192_240")
    thinking = ThinkingViTConfig(
        rounds=make_rounds([32, 32], [1, 2]), heads=2, depth=1, patch_size=16, num_classes=3, task="segmentation"
    )
    folder = progresvit.save(build(thinking), tmp_path / "thinking")
    assert "segmentation, 3 classes" in " ".join(works("info", folder).split())
    report = json.loads(works("info", folder, "--json"))
    assert report["compute"]["executed"]["cumulative_gmacs"] == ThinkingViT(thinking).gmacs("executed")
