"""A folder of your own images, without splits: from the bundled model to a model for their classes."""

import json
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

import progresvit
from progresvit.cli import app
from progresvit.config import ModelConfig
from progresvit.data.dataset import find_images
from progresvit.evaluation import read_records
from progresvit.io import model_folder
from progresvit.model import ProgResViT
from progresvit.training.build import build_model, start_model
from progresvit.training.recipe import load_recipe
from tests.factories import tiny_config
from tests.training.runs import losses, ready, recipe, run, take_steps

MICRO = {"resolutions": [16, 32], "heads": [1, 2], "depth": 2, "patch_size": 8}
COLOURS = {"bella": (200, 40, 40), "luna": (40, 200, 40), "rex": (40, 40, 200)}


@pytest.fixture
def bundled(tmp_path, monkeypatch, randomize):
    """A micro model instead of the bundled ones."""
    config = tiny_config(depth=2, num_classes=5, class_ids=tuple("abcde"), crop=0.8)
    folder = progresvit.save(randomize(ProgResViT(config)), tmp_path / "as_bundled")
    monkeypatch.setattr(model_folder, "bundled_folder", lambda name: folder)
    return folder


@pytest.fixture
def own_images(tmp_path):
    """Three classes of ten images, in folders at the top."""
    return make_images(tmp_path / "images", 10)


def make_images(root, count):
    for name, colour in COLOURS.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (40, 48), tuple(channel + number for channel in colour)).save(
                root / name / f"{number}.png"
            )
    return root


def short(**sections):
    wanted = {"optimizer": {"batch": 8, "lr_batch": 8}, "schedule": {"epochs": 2, "cooldown": 0}, **sections}
    return recipe(**wanted)


def command(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result


@pytest.mark.parametrize("name", ["imagenet-tiny", "shipped"])
def test_a_bundled_model_gives_its_backbone_and_the_head_is_new(bundled, own_images, name):
    wanted = short(model={"start": name})
    model = build_model(wanted, find_images(own_images, "train").class_ids)
    assert start_model(model, wanted) == f"start: {name}; not copied: head"
    assert model.config.class_ids == model.config.labels == ("bella", "luna", "rex")
    weights, before = model.state_dict(), load_file(bundled / "model.safetensors")
    assert weights["head.weight"].shape[0] == 3
    same = {key: torch.equal(weights[key], before[key]) for key in before if not key.startswith("head.")}
    assert all(same.values()), same


def test_without_rounds_the_model_is_that_of_its_start(bundled, own_images):
    wanted = load_recipe("own_images")
    model = build_model(wanted, find_images(own_images, "train").class_ids)
    source = progresvit.load(bundled).config
    assert source.crop != ModelConfig.model_fields["crop"].default  # or the test shows less
    assert model.config == source.replace(num_classes=3, class_ids=tuple(COLOURS), labels=tuple(COLOURS))
    assert start_model(model, wanted) == "start: imagenet-tiny; not copied: head"
    with pytest.raises(
        ValueError, match=r"model\.start=imagenet-tinny is neither a model .* did you mean 'imagenet-tiny'\?"
    ):
        build_model(load_recipe("own_images", ["model.start=imagenet-tinny"]), ("a", "b"))


def test_a_wrong_start_is_refused_with_what_to_give(bundled, own_images):
    wanted = short(model={"start": "imagenet-tinny"})
    with pytest.raises(ValueError, match=r"timm has no model 'imagenet-tinny'.* did you mean 'imagenet-tiny'\?"):
        start_model(build_model(wanted, ("a", "b")), wanted)


def test_a_run_prints_its_training_and_validation_images(bundled, own_images, tmp_path, capsys):
    for name in ("bella/a.cr2", "rex/b.CR2", "rex/notes.txt"):
        (own_images / name).write_bytes(b"")
    run(short(), own_images, tmp_path / "out")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        "training on 24 images of 3 classes (bella, luna, rex); "
        "6 validation images, a fifth of each class, selected by name"
    )
    assert lines[1] == "note: 3 files that are not images were left out (2 .cr2, 1 .txt)"
    about = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (about["pictures"], about["held_back"]) == (24, 6)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_split_and_another_set_of_names_is_refused(own_images, tmp_path):
    run(short(), own_images, tmp_path / "out")
    whole = losses(tmp_path / "out")
    run(short(), own_images, tmp_path / "out", resume=True)
    assert losses(tmp_path / "out") == whole
    (own_images / "rex" / "3.png").rename(own_images / "rex" / "new.png")
    with pytest.raises(ValueError, match=r"other data: .*24 images of 3 classes"):
        run(short(), own_images, tmp_path / "out", resume=True)
    (own_images / "rex" / "new.png").rename(own_images / "rex" / "3.png")
    Image.new("RGB", (40, 48)).save(own_images / "rex" / "10.jp2")  # of a kind that an earlier version did not read
    with pytest.raises(
        ValueError, match=r"24 images of 3 classes, and this data has 25 images of 3; resume with the same data"
    ):
        run(short(), own_images, tmp_path / "out", resume=True)


def test_a_batch_larger_than_a_small_set_is_refused_with_the_largest_that_fits(tmp_path):
    small = make_images(tmp_path / "few", 2)
    with pytest.raises(ValueError, match=r"larger than the dataset of 3 images; .* with optimizer\.batch=3\."):
        run(short(), small, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_average_that_warms_up_does_not_keep_the_start_of_a_short_run(own_images, tmp_path):
    apart = {}
    for warmup in (False, True):
        started = ready(short(model={"drop_path": 0.0}, ema=0.999, ema_warmup=warmup), own_images)
        weight = started.model.head.weight
        start = weight.detach().clone()
        take_steps(started, 6)
        average = started.step.ema.module.model.head.weight
        apart[warmup] = ((average - weight).norm() / (weight - start).norm()).item()
    assert apart[False] > 0.9  # after six steps the plain average is still where it began
    assert apart[True] < 0.6


@pytest.mark.slow
def test_own_folder_to_adaptive_model_in_three_commands(bundled, own_images, tmp_path):
    """The recipe itself, at the size of a micro model."""
    assert load_recipe("own_images").model.start == model_folder.DEFAULT_MODEL
    settings = ["schedule.epochs=3", "data.in_memory_side=null"]
    options = [part for setting in settings for part in ("--set", setting)]
    command("train", "own_images", "--data", own_images, "--out", tmp_path / "own", "--device", "cpu", *options)
    model, records = tmp_path / "own" / "model", tmp_path / "own.parquet"

    result = command("evaluate", model, "--data", own_images, "--out", records, "--workers", 0, "--device", "cpu")
    assert "using 6 of its 30 images, a fifth of each class" in result.stderr
    assert "training images of this model" not in result.stderr
    table = read_records(records)
    assert sorted(table.ids) == sorted(entry.name for entry in find_images(own_images, "val").entries)
    assert (table.header.split, table.header.drawn_from) == ("val", 30)

    threshold = tmp_path / "threshold.json"
    command("calibrate", records, "--near-lossless", "--out", threshold)
    image = own_images / "rex" / "0.png"
    answer = command("classify", image, "--model", model, "--threshold", threshold, "--json", "--device", "cpu")
    assert any(name in answer.stdout for name in COLOURS)


@pytest.mark.slow
def test_evaluating_warns_if_the_model_was_trained_on_validation_images_of_now(bundled, own_images, tmp_path):
    model = run(short(), own_images, tmp_path / "out")
    before = {entry.name for entry in find_images(own_images, "train").entries}
    for number in range(10, 30):
        shutil.copy(own_images / "rex" / "0.png", own_images / "rex" / f"{number}.png")
    now = [entry.name for entry in find_images(own_images, "val").entries]
    moved = len(before & set(now))
    assert moved > 0  # or the test shows nothing
    evaluate = ("evaluate", model, "--data", own_images, "--workers", 0, "--device", "cpu")
    result = command(*evaluate, "--out", tmp_path / "new.parquet")
    assert f"{moved} of these {len(now)} images are training images of this model" in result.stderr
    result = command(*evaluate, "--split", ".", "--out", tmp_path / "all.parquet")
    assert f"{len(before)} of these 50 images are training images of this model" in result.stderr
