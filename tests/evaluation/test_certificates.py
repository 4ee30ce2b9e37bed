"""Mistakes after which a certificate would promise too much, made for real: evaluate, then certify."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import progresvit
from progresvit.data.augment.corruption import Corruption
from progresvit.data.trained_on import count_evaluations, count_training_images, save_splits, save_training_list
from progresvit.distributed import Processes
from progresvit.evaluation import (
    DataSource,
    EvalOptions,
    calibrate_guarantee,
    calibrate_near_lossless,
    evaluate,
    evaluate_knn,
    evaluate_segmentation,
    read_records,
    write_records,
)
from progresvit.io.model_folder import MODEL_FILES, TRAINING_LISTS
from progresvit.routing import certified_threshold, load_setting
from tests.commands import refused, works
from tests.evaluation.made import ONE, copy_digits, make_records
from tests.evaluation.made_segmentation import SIZES, make_dataset
from tests.evaluation.made_segmentation import make_model as make_segmenter
from tests.evaluation.test_run import make_model
from tests.training.runs import recipe
from tests.training.runs import run as train

FEW = {"epsilon": 0.3, "delta": 0.1}
"""A guarantee that 24 images can give."""


@pytest.fixture
def model(randomize):
    return make_model(randomize)


def run(model, data, out, how=evaluate, **source):
    options = EvalOptions(workers=0, batch=5)
    return how(model, DataSource(data=str(data), **source), out, name="m", processes=ONE, options=options)


@pytest.mark.parametrize(
    ("folder", "split"),
    [
        *(("", "train"), ("train", "."), ("", "Training"), ("", "train/day"), ("", "train2017")),
        ("my_train_images", "."),
    ],
)
def test_records_of_a_training_split_certify_nothing(model, digits, tmp_path, folder, split):
    shutil.copytree(digits / "train", tmp_path / "data" / (folder or split))
    records = run(model, tmp_path / "data" / folder, tmp_path / "r.parquet", split=split)
    assert records.header.split == split
    with pytest.raises(ValueError, match=r"(?i)training split \(.*train.*fewer errors.*rename .*train.* and evaluate"):
        calibrate_guarantee(records, **FEW)
    assert calibrate_near_lossless(records).rule == "near-lossless"  # an observation may be made
    for words in (("--max-drop", 0.3), ("--near-lossless", "--ood-share", 0.2)):
        refused("records of the training split", "calibrate", tmp_path / "r.parquet", *words)


def test_unlabelled_images_of_a_training_folder_certify_nothing(model, digits, tmp_path):
    records = run(model, digits / "train", tmp_path / "r.parquet", unlabelled=True)
    assert records.header.split is None
    with pytest.raises(ValueError, match=r"training split \(train\)"):
        calibrate_guarantee(records, loss="unlabelled", **FEW)


def test_images_on_the_list_of_the_model_certify_nothing_whatever_their_split_is_called(model, digits, tmp_path):
    folder = progresvit.save(model, tmp_path / "model")
    data = copy_digits(digits, tmp_path / "data", splits=("mine",), classes="0123", count=6)
    assert run(progresvit.load(folder), data, tmp_path / "before.parquet", split="mine").header.training_images is None
    names = sorted(path.relative_to(data).as_posix() for path in data.rglob("*.png"))
    save_training_list(folder, names[:3])
    records = run(progresvit.load(folder), data, tmp_path / "r.parquet", split="mine")
    assert read_records(tmp_path / "r.parquet").header.training_images == 3
    with pytest.raises(ValueError, match="trained on 3 of these 24 images, by name"):
        calibrate_guarantee(records, **FEW)


def test_copies_of_a_model_keep_what_it_was_trained_on(model, digits, tmp_path):
    folder = progresvit.save(model, tmp_path / "model")
    save_training_list(folder, ["a", "b"])
    save_splits(folder, training=["a", "b"], validation=["c"], evaluations=3)
    copy = progresvit.save(progresvit.load(folder), tmp_path / "copy")
    for name in TRAINING_LISTS:
        assert (copy / name).read_bytes() == (folder / name).read_bytes()
    assert (count_training_images(copy, ["a", "x"]), count_evaluations(copy, ["c"])) == (1, 3)
    again = progresvit.save(progresvit.load(copy), copy)
    assert count_evaluations(again, ["c"]) == 3
    progresvit.save(model, copy)  # another model, of which nothing is known
    assert (count_training_images(copy, ["a"]), count_evaluations(copy, ["c"])) == (None, None)
    assert set(TRAINING_LISTS) <= set(MODEL_FILES)  # what is uploaded to the hub and downloaded from it


@pytest.mark.parametrize("name", TRAINING_LISTS)
@pytest.mark.parametrize("content", ["", "{", "3", "[[1]]", "[" * 100_000, '{"evaluations": 0}'])
def test_damaged_lists_of_training_images_are_named(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        count_training_images(tmp_path, ["a"])


def test_a_split_is_recognised_as_a_folder_of_its_own(tmp_path):
    save_splits(tmp_path, training=["fit/a/1", "fit/b/2"], validation=["val/a/1", "val/b/3"], evaluations=4)
    assert count_training_images(tmp_path, ["b/2", "a/1"]) == 2
    assert count_evaluations(tmp_path, ["a/1", "b/3"]) == 4
    assert count_evaluations(tmp_path, ["a/1", "b/4"]) is None
    save_splits(tmp_path, training=["fit/a/1"], validation=["val/a/1"], evaluations=4)  # equal names
    assert count_training_images(tmp_path, ["val/a/1"]) is None


def test_images_of_a_hub_are_refused_with_a_remedy_that_is_possible(model, digits, tmp_path):
    records = run(model, digits, tmp_path / "r.parquet", split="val")
    hub = replace(records, header=replace(records.header, data="hfds/a/b", split="train[90%:]"))
    with pytest.raises(ValueError, match="save them to a folder of another name and evaluate again"):
        calibrate_guarantee(hub, **FEW)


def test_the_best_model_of_a_stopped_run_knows_its_training(digits, tmp_path, monkeypatch):
    monkeypatch.setattr("progresvit.training.loop.Loop._finish", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train(recipe(schedule={"epochs": 2, "cooldown": 0}), digits, tmp_path / "run")
    records = run(progresvit.load(tmp_path / "run" / "best"), digits, tmp_path / "val.parquet")
    assert records.header.evaluations == 2


def test_a_model_that_a_training_chose_on_these_images_is_tested_at_a_smaller_delta(digits, tmp_path):
    """``best/`` is the best of four evaluations on val, ``model/`` the last whatever they are."""
    wanted = recipe(schedule={"epochs": 7, "cooldown": 0}, run={"evaluate_every": 2, "log_every": 9})
    train(wanted, digits, tmp_path / "run")
    chosen = progresvit.load(tmp_path / "run" / "best")
    records = run(chosen, digits, tmp_path / "val.parquet")
    assert read_records(tmp_path / "val.parquet").header.evaluations == 4
    setting = calibrate_guarantee(records, **FEW)
    assert (setting.delta, setting.choices) == (FEW["delta"], 4)
    lost = records.losses("labelled")[:, 0]
    alone = certified_threshold(records.top10_entropy[:, 0], lost, FEW["epsilon"], FEW["delta"] / 4)
    assert (setting.threshold, setting.p_value) == (alone.threshold, alone.p_value)
    setting.save(tmp_path / "t.json")
    assert load_setting(tmp_path / "t.json") == setting
    assert "tested at 0.9875" in works("calibrate", tmp_path / "val.parquet", "--max-drop", 0.3, "--confidence", 0.95,
                                       "--out", tmp_path / "t.json")  # fmt: skip
    with pytest.raises(ValueError, match="for one of 4 choices on these images: at least 51 are needed"):
        calibrate_guarantee(records, epsilon=0.1, delta=0.02)
    assert calibrate_guarantee(records, epsilon=0.5, delta=0.1, choices=3).choices == 12
    with pytest.raises(ValueError, match=r"delta, .* at most"):
        calibrate_guarantee(records, epsilon=0.3, delta=0.9)  # a quarter of it would pass
    assert run(chosen, digits, tmp_path / "train.parquet", split="train").header.evaluations is None
    last = progresvit.load(tmp_path / "run" / "model")
    assert run(last, digits, tmp_path / "last.parquet").header.evaluations is None
    assert "choices" not in json.loads(calibrate_guarantee(read_records(tmp_path / "last.parquet"), **FEW).to_json())


def test_a_training_split_of_any_name_is_known_again(digits, tmp_path):
    shutil.copytree(digits, tmp_path / "data")
    (tmp_path / "data" / "train").rename(tmp_path / "data" / "fit")
    wanted = recipe(data={"train": "fit"}, schedule={"epochs": 1, "cooldown": 0}, run={"log_every": 9})
    train(wanted, tmp_path / "data", tmp_path / "run")
    trained = progresvit.load(tmp_path / "run" / "model")
    records = run(trained, tmp_path / "data", tmp_path / "fit.parquet", split="fit")
    with pytest.raises(ValueError, match="trained on 48 of these 48 images, by name"):
        calibrate_guarantee(records, **FEW)
    assert calibrate_guarantee(run(trained, tmp_path / "data", tmp_path / "val.parquet"), **FEW).rule == "guarantee"


def test_with_patience_the_images_choose_the_last_model_too(digits, tmp_path):
    train(recipe(run={"patience": 3, "log_every": 9}), digits, tmp_path / "run")
    for name in ("best", "model"):
        records = run(progresvit.load(tmp_path / "run" / name), digits, tmp_path / f"{name}.parquet")
        assert records.header.evaluations == 4  # three epochs and one to cool down


@pytest.mark.parametrize("how", [evaluate, evaluate_knn])
def test_copies_are_found_in_an_evaluation_and_left_out_of_a_certificate(model, digits, tmp_path, how):
    data = copy_digits(digits, tmp_path / "data", classes="0123", count=30)  # 30 files of 12 images
    if how is evaluate_knn:
        shutil.rmtree(data / "train")
        shutil.copytree(digits / "val", data / "train")
    records = run(model, data, tmp_path / "r.parquet", how)
    assert len(records) == 120
    distinct = records.distinct()
    assert len(distinct) == 48
    numbers = [int(name.rpartition("/")[2].removesuffix(".png")) for name in records.ids]
    firsts = {}
    for name, number in zip(records.ids, numbers):  # in the order of the records
        firsts.setdefault((name.rpartition("/")[0], number % 12), name)
    assert set(distinct.ids) == set(firsts.values())
    setting = calibrate_guarantee(records, **FEW)
    assert (setting.n, setting.copies) == (48, 72)
    alone = calibrate_guarantee(replace(distinct, image_hash=None), **FEW)
    assert alone.copies is None
    assert (alone.threshold, alone.k, alone.p_value) == (setting.threshold, setting.k, setting.p_value)
    with pytest.raises(ValueError, match=r"48 images \(72 copies of others are left out\) are too few"):
        calibrate_guarantee(records, epsilon=0.02, delta=0.1)  # 120 would do


def test_copies_would_certify_what_the_images_do_not():
    """The same 300 images, ten times: without their hashes they pass as 3,000."""
    records = make_records(300, seed=5)
    rows = np.tile(np.arange(300), 10)
    names = np.array([f"{name}-{number}" for number, name in enumerate(records.ids[rows])])
    copied = replace(records.take(rows), ids=names)
    assert calibrate_guarantee(copied, epsilon=0.005, delta=0.05).n == 3000
    known = replace(copied, image_hash=rows + 7)
    with pytest.raises(ValueError, match=r"300 images \(2700 copies of others are left out\) are too few"):
        calibrate_guarantee(known, epsilon=0.005, delta=0.05)


def test_copies_of_segmented_images_are_left_out(randomize, tmp_path):
    data = make_dataset(tmp_path / "data", sizes=SIZES[:6])
    for number in range(6, 26):
        for kind in ("images", "annotations"):
            shutil.copy(data / kind / "val" / f"{number % 6}.png", data / kind / "val" / f"{number}.png")
    options = EvalOptions(workers=0, batch=4)
    places = {"data": str(data), "split": "val", "out": tmp_path / "r.parquet"}
    records = evaluate_segmentation(make_segmenter(randomize), **places, name="m", processes=ONE, options=options)
    assert (len(records), len(records.distinct())) == (26, 6)
    setting = calibrate_guarantee(records, epsilon=0.4, delta=0.3)
    assert (setting.n, setting.copies, setting.loss) == (6, 20, "pixel-error")


def test_the_hash_does_not_depend_on_the_batch_or_the_workers_and_corrupted_images_have_none(model, digits, tmp_path):
    source = DataSource(data=str(digits))
    hashes = [
        evaluate(model, source, tmp_path / f"{batch}.parquet", name="m", processes=ONE, options=options).image_hash
        for batch in (3, 24)
        for options in [EvalOptions(workers=batch // 24, batch=batch)]
    ]
    assert np.array_equal(*hashes)
    corrupted = replace(source, corruption=Corruption.parse("gaussian_noise/1"))  # each copy has another noise
    options = EvalOptions(workers=0, batch=24)
    records = evaluate(model, corrupted, tmp_path / "c.parquet", name="m", processes=ONE, options=options)
    assert records.image_hash is None
    assert records.distinct() is records


def test_the_same_pixels_in_another_file_are_a_copy_and_other_pixels_are_none(model, digits, tmp_path):
    folder = tmp_path / "data" / "val" / "0"
    folder.mkdir(parents=True)
    image = Image.open(digits / "val" / "0" / next(path.name for path in (digits / "val" / "0").iterdir()))
    image.save(folder / "a.png")
    image.save(folder / "b.bmp")
    changed = image.convert("RGB")
    changed.putpixel((image.width // 2, image.height // 2), (1, 2, 3))
    changed.save(folder / "c.png")
    records = run(model, tmp_path / "data", tmp_path / "r.parquet")
    first, second, third = records.image_hash.tolist()
    assert first == second != third


def test_calibrate_says_how_many_copies_it_left_out_and_if_it_cannot_know(model, digits, tmp_path):
    data = copy_digits(digits, tmp_path / "data", classes="0123", count=30)
    run(model, data, tmp_path / "r.parquet")
    words = ("--max-drop", 0.3, "--out", tmp_path / "t.json")
    assert "left out: 72 images with the same pixels" in works("calibrate", tmp_path / "r.parquet", *words)
    write_records(replace(read_records(tmp_path / "r.parquet"), image_hash=None), tmp_path / "old.parquet")
    assert "do not say which images are copies, since an earlier version" in works(
        "calibrate", tmp_path / "old.parquet", *words
    )


@pytest.mark.gpu
def test_a_gpu_gives_the_same_hashes(model, digits, tmp_path):
    hashes = [
        evaluate(
            model,
            DataSource(data=str(digits)),
            tmp_path / f"{device}.parquet",
            name="m",
            processes=Processes(0, 1, torch.device(device)),
            options=EvalOptions(workers=0, batch=24),
        ).image_hash
        for device in ("cpu", "cuda")
    ]
    assert np.array_equal(*hashes)
