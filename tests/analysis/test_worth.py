"""A plain and a progressive model on the same images: equal compute, thresholds from other images, and the verdict."""

import json
import shutil
from itertools import product

import numpy as np
import pytest
import torch

import progresvit
from progresvit.analysis import worth as worth_module
from progresvit.analysis.worth import Answers, Worth, cross_fitted_rounds, plain_recipe, worth_figure, worth_lines
from progresvit.compute import cumulative_gmacs
from progresvit.evaluation import read_records
from progresvit.evaluation.records import split_by_id
from progresvit.interop import start_from
from progresvit.metrics.interval import Interval
from progresvit.model import ProgResViT
from progresvit.routing import load_setting
from progresvit.routing.frontier import operating_point
from progresvit.training.recipe import load_recipe
from progresvit.training.step import TrainingStep
from tests.commands import refused, run, works
from tests.evaluation.made import make_records
from tests.factories import tiny_config
from tests.training.test_own_images import make_images


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", 10)


@pytest.fixture
def options(tmp_path, randomize, monkeypatch):
    """A micro model as the start, one epoch, and short timings."""
    for name, value in (("TURNS", 3), ("SECONDS", {"cpu": 0.0}), ("TIMED", {"cpu": 8})):
        monkeypatch.setattr(worth_module, name, value)
    start = progresvit.save(randomize(ProgResViT(tiny_config(depth=2, num_classes=5))), tmp_path / "start")
    changes = (f"model.start={start}", "schedule.epochs=1", "data.in_memory_side=null")
    return ["--device", "cpu", *(word for change in changes for word in ("--set", change))]


@pytest.mark.slow
def test_two_models_are_trained_compared_and_kept(images, options, tmp_path):
    out = tmp_path / "out"
    printed = works("worth", images, "--out", out, "--seed", 3, *options)
    plain, progressive = (progresvit.load(out / name / "model").config for name in ("plain", "progressive"))
    assert (plain.rounds, plain.psg) == (progressive.rounds[-1:], False)
    assert len(progressive.rounds) == 2
    result = json.loads((out / "worth.json").read_text())
    early, alone = result["answers"]["progressive, early exits"], result["answers"]["plain ViT"]
    assert alone["top1"]["mean"] == read_records(out / "plain.parquet").correct.mean()
    assert alone["gmacs"]["mean"] == pytest.approx(cumulative_gmacs(plain)[-1])
    records = read_records(out / "progressive.parquet")
    exits = cross_fitted_rounds(records)
    assert early["top1"]["mean"] == records.correct[np.arange(6), exits].mean()
    assert result["top1_change"]["mean"] == pytest.approx(early["top1"]["mean"] - alone["top1"]["mean"])
    assert result["speed"]["lowest"] <= result["speed"]["mean"] <= result["speed"]["highest"]
    assert printed.splitlines()[-1] == result["verdict"]
    assert (out / "worth.png").stat().st_size > 10_000
    setting = load_setting(out / "progressive" / "model" / "settings" / "near-lossless.json")
    point = operating_point(records.scores(), records.correct, records.gmacs(), setting.threshold)
    assert point.top1 >= records.correct[:, -1].mean()
    assert "seed: 3" in (out / "plain" / "recipe.yaml").read_text()

    refused(f"{out} already holds a comparison; pass --resume to continue it", "worth", images, "--out", out, *options)
    refused("pass only one of them", "worth", images, "--out", out, "--resume", "--overwrite", *options)
    refused("(seed)", "worth", images, "--out", out, "--resume", *options)
    works("worth", images, "--out", out, "--overwrite", *options)
    assert "seed: 42" in (out / "plain" / "recipe.yaml").read_text()


@pytest.mark.slow
def test_a_comparison_that_was_killed_goes_on_with_what_is_finished(images, options, tmp_path, monkeypatch):
    out, words = tmp_path / "out", ("worth", images, "--out", tmp_path / "out", *options)

    def kill(*arguments, **others):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worth_module, "evaluate", kill)
        assert run(*words).exit_code == 130
    trained = (out / "plain" / "model" / "model.safetensors").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(worth_module, "rates_in_turns", kill)
        assert run(*words, "--resume").exit_code == 130
    assert (out / "plain.parquet").stat().st_mtime_ns > trained
    assert not (out / "worth.json").exists()
    lower = ("--resume", "--set", "optimizer.lr=1e-5")
    refused("plain was trained with another optimizer.lr, 0.0001, so the models would", *words, *lower)
    for module, name in ((TrainingStep, "__call__"), (worth_module, "evaluate")):  # both are finished
        monkeypatch.setattr(module, name, kill)
    works(*words, "--resume")
    assert (out / "worth.json").exists()


def test_the_plain_vit_of_the_recipe_is_the_last_round_of_the_bundled_model_at_equal_compute():
    recipe, start = load_recipe("own_images"), progresvit.load().config
    own = plain_recipe(recipe, start)
    config = own.model.config(num_classes=3, class_ids=None, labels=None, start=start)
    assert config == start.replace(rounds=start.rounds[-1:], psg=False, num_classes=3, class_ids=None, labels=None)
    computes = [wanted.epochs * cumulative_gmacs(model)[-1] for wanted, model in ((own, config), (recipe, start))]
    assert computes[0] == pytest.approx(computes[1], rel=worth_module.TOLERANCE)
    assert own.epochs > recipe.epochs
    assert {key for key in recipe.model_fields_set if getattr(own, key) != getattr(recipe, key)} == {
        "model",
        "schedule",
    }


def test_the_plain_vit_starts_from_the_weights_of_the_last_round():
    start = progresvit.load()
    model = ProgResViT(start.config.replace(rounds=start.config.rounds[-1:], psg=False)).eval()
    assert start_from(model, "imagenet-tiny") == []
    pixels = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(
            model.embed(pixels, resolution=224, width=192), start.embed(pixels, resolution=224, width=192)
        )


def test_the_labels_of_an_image_do_not_choose_its_own_threshold():
    records = make_records(400)
    rounds, half = cross_fitted_rounds(records), split_by_id(records.ids, 0.5, seed=0)
    for part in (half, ~half):
        threshold = records.take(part).near_lossless().threshold
        assert np.array_equal(rounds[~part] == 0, records.exit_scores()[~part, 0] < threshold)
    assert records.take(half).near_lossless().threshold != records.take(~half).near_lossless().threshold
    assert 0 < (rounds == 0).sum() < 400


def made(top1, speed, tmacs=(1.0, 1.0)):
    point = Interval(mean=0.5, lowest=0.4, highest=0.6)
    kinds = {"epochs": 1, "exit_shares": (1.0,), "top1": point, "gmacs": point}
    answers = {f"{n}": Answers(model="m", training_tmacs=compute, **kinds) for n, compute in enumerate(tmacs)}
    changes = {"top1_change": top1, "gmacs_change": point, "speed": speed}
    return Worth(answers=answers, images=100, timed=64, hardware="x", curve=((1.0, 0.5),), **changes)


LOWER, EQUAL, HIGHER = (Interval(mean=m, lowest=m - 0.02, highest=m + 0.02) for m in (-0.03, 0.01, 0.03))
SLOWER, AS_FAST, FASTER = (Interval(mean=m, lowest=m - 0.2, highest=m + 0.2) for m in (0.5, 1.1, 1.5))
VERDICTS = (
    "Use the plain ViT: the progressive model has 3.0 points lower top-1 (-5.0 to -1.0 points) and 0.50 times",
    "Use the plain ViT: the progressive model has 3.0 points lower top-1 (-5.0 to -1.0 points) and no clear difference",
    "Use the plain ViT for accuracy and the progressive model for speed: the progressive model has 3.0 points lower",
    "No clear difference in top-1 on 100 images: +1.0 points (-1.0 to +3.0 points), and the progressive model has 0.50 "
    "times the images/s (0.30 to 0.70): use the plain ViT for its speed, but its top-1 may be up to 3.0 points lower",
    "No clear difference in top-1 on 100 images: +1.0 points (-1.0 to +3.0 points), and none in images/s "
    "(0.90 to 1.30): use either, but top-1 may differ by up to 3.0 points",
    "No clear difference in top-1 on 100 images: +1.0 points (-1.0 to +3.0 points), and the progressive model has 1.50 "
    "times the images/s (1.30 to 1.70): use the progressive model for its speed, but its top-1 may be up to 1.0 points",
    "Use the progressive model for accuracy and the plain ViT for speed: the progressive model has 3.0 points higher",
    "Use the progressive model: the progressive model has 3.0 points higher top-1 (+1.0 to +5.0 points) and no clear",
    "Use the progressive model: the progressive model has 3.0 points higher top-1 (+1.0 to +5.0 points) and 1.50 times",
)


@pytest.mark.parametrize(
    ("changes", "verdict"), list(zip(product((LOWER, EQUAL, HIGHER), (SLOWER, AS_FAST, FASTER)), VERDICTS))
)
def test_the_verdict_claims_no_difference_that_its_interval_does_not_show(changes, verdict):
    worth = made(*changes)
    assert worth.verdict.startswith(verdict)
    assert worth_lines(worth)[-1] == worth.verdict


def test_unequal_training_compute_is_reported():
    unequal = made(EQUAL, FASTER, (0.77, 1.0))
    assert "not equal (77% of the compute for the plain ViT)" in "\n".join(worth_lines(unequal))
    assert "at 77% of the compute" in " ".join(worth_figure(unequal)._suptitle.get_text().split())
    assert "training compute" not in "\n".join(worth_lines(made(EQUAL, FASTER, (1.02, 1.0))))


def test_bad_input_is_refused_before_anything_is_written(images, tmp_path):
    out, empty = tmp_path / "out", tmp_path / "empty"
    empty.mkdir()
    worth = ("worth", images, "--out", out)
    refused("empty has no images under train/<class>/", "worth", empty, "--out", out)
    shutil.copytree(images / "rex", tmp_path / "single" / "rex")
    refused("has only one class, rex", "worth", tmp_path / "single", "--out", out)
    refused("there is no data at", "worth", tmp_path / "nowhere", "--out", out)
    refused("set run.patience=null", *worth, "--set", "run.patience=2")
    refused(
        "needs a ProgResViT of two or more rounds",
        *worth,
        "--set",
        "model.fields={rounds: [{resolution: 224, heads: 3}]}",
    )
    refused("unknown key", *worth, "--set", "schedule.epoch=2")
    refused("for task=supervised", *worth, "--set", 'optimizer.freeze=["blocks.*"]')
    refused("the data has 3 classes and the model 5; leave out", *worth, "--set", "model.num_classes=5")
    assert not out.exists()
    refused("holds other files and no comparison; name a new folder", "worth", images, "--out", images)
    refused("is a file; name a folder", "worth", images, "--out", images / "bella" / "0.png")


def test_too_few_held_out_images_are_refused_before_training(tmp_path):
    images = make_images(tmp_path / "images", 10)
    for path in [*(images / "rex").iterdir(), *(images / "luna").iterdir(), *(images / "bella").iterdir()]:
        split = "val" if path.parent.name == "rex" and path.name == "0.png" else "train"
        target = images / split / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    refused("1 images are too few to split; evaluate on more", "worth", images, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
