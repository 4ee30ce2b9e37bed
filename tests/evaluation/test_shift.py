import copy
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import ImageNetInfo

from progresvit.data.augment.corruptions import CORRUPTIONS
from progresvit.evaluation import EvalOptions, frontier_table
from progresvit.evaluation.shift import (
    ALEXNET_ERRORS,
    by_severity,
    evaluate_sets,
    imagenet_c_errors,
    mce_table,
    mean_corruption_error,
    plan,
    pool,
    read_summary,
    shift_table,
    summarize,
)
from progresvit.model import ProgResViT
from tests.evaluation.made import ONE, make_records
from tests.factories import digits_config, tiny_config

OPTIONS = EvalOptions(workers=0, batch=64)


@pytest.fixture
def imagenet_model(randomize):
    return randomize(ProgResViT(tiny_config(num_classes=1000)))


@pytest.fixture
def digit_model(randomize):
    return randomize(ProgResViT(digits_config()))


def run(model, sets, out, options=OPTIONS):
    return evaluate_sets(model, sets, out, name="m", processes=ONE, options=options)


def one_image_each(folder, names):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    folder.mkdir(parents=True)
    image.save(folder / "image.png")
    for name in names:
        (folder / name).mkdir()
        shutil.copy(folder / "image.png", folder / name / "1.png")
    (folder / "image.png").unlink()


def test_alexnets_errors_stand_in_imagenet_cs_order():
    assert list(ALEXNET_ERRORS) == list(CORRUPTIONS)
    assert (ALEXNET_ERRORS["gaussian_noise"], ALEXNET_ERRORS["jpeg_compression"]) == (0.886428, 0.6065)
    assert ALEXNET_ERRORS["brightness"] == 0.564592


def test_mce_of_alexnet_itself_is_one_hundred_and_severities_are_averaged_first():
    alexnet = {name: [error - 0.1, error + 0.1, error, error, error] for name, error in ALEXNET_ERRORS.items()}
    assert mean_corruption_error(alexnet) == pytest.approx(100)
    half = {name: [error / 2] * 5 for name, error in ALEXNET_ERRORS.items()}
    half["fog"] = [2 * value for value in half["fog"]]
    assert mean_corruption_error(half) == pytest.approx(50 + 50 / 15)
    with pytest.raises(ValueError, match="15 corruptions at 5 severities; fog and 0 more"):
        mean_corruption_error({**half, "fog": [0.5]})


@pytest.mark.slow
def test_imagenet_v2s_folders_are_numbers(imagenet_model, tmp_path):
    one_image_each(tmp_path / "v2", [str(number) for number in range(1000)])
    found = run(imagenet_model, plan("imagenet-v2", str(tmp_path / "v2")), tmp_path / "out")["imagenet-v2"]
    label_of = dict(zip(found.ids.tolist(), found.labels.tolist()))
    assert [label_of[f"{number}/1.png"] for number in (2, 10, 999)] == [2, 10, 999]
    assert found.header.classes is None


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["imagenet-a", "imagenet-r"])
def test_imagenet_a_and_r_predict_among_their_200_classes(imagenet_model, tmp_path, suite):
    model = copy.deepcopy(imagenet_model)
    with torch.no_grad():
        model.head.bias[0] += 100  # the model predicts class 0, which is none of the 200
    names = ImageNetInfo().label_names()
    subset = names[3:1000:5][:200]
    one_image_each(tmp_path / "a", subset)
    found = run(model, plan(suite, str(tmp_path / "a")), tmp_path / "out")[suite]
    numbers = [names.index(name) for name in subset]
    assert found.header.classes == tuple(sorted(numbers))
    assert set(found.predictions.ravel().tolist()) <= set(numbers)
    free = run(
        model,
        [replace(s, source=replace(s.source, restrict_classes=False)) for s in plan(suite, str(tmp_path / "a"))],
        tmp_path / "free",
    )[suite]
    assert np.array_equal(free.top10_entropy, found.top10_entropy)  # the router sees all classes
    assert set(free.predictions.ravel().tolist()) == {0}


def test_a_set_that_is_not_whole_is_refused(imagenet_model, tmp_path):
    one_image_each(tmp_path / "a", ImageNetInfo().label_names()[:57])
    with pytest.raises(ValueError, match=r"imagenet-a has 200 classes and .* 57 class folders"):
        run(imagenet_model, plan("imagenet-a", str(tmp_path / "a")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_generated_corruptions_of_any_data_set(digit_model, digits, tmp_path):
    sets = plan("generated", str(digits), corruptions=("fog", "contrast"), severities=(1, 5))
    assert [one.name for one in sets] == ["fog_1", "fog_5", "contrast_1", "contrast_5"]
    found = run(digit_model, sets, tmp_path / "out")
    assert found["fog_5"].header.corruption == "fog/5"
    assert not np.array_equal(found["fog_5"].statistics, found["fog_1"].statistics)
    table = shift_table(sets, found, threshold=0.9)
    assert table.rows[-1]["set"] == "mean"
    expected = np.mean([records.correct[:, 1].mean() for records in found.values()])
    assert table.rows[-1]["top1_round_2"] == pytest.approx(expected)
    severities = by_severity(sets, found)
    assert list(severities) == ["severity 1", "severity 5"]
    assert len(severities["severity 5"]) == 48
    rows = frontier_table(severities, [0.0]).rows
    both = np.concatenate([found[name].correct[:, 1] for name in ("fog_5", "contrast_5")])
    assert next(row for row in rows if row["model"] == "severity 5")["top1"] == both.mean()


def test_what_was_done_is_not_done_again_and_foreign_records_are_refused(digit_model, digits, tmp_path, monkeypatch):
    sets = plan("generated", str(digits), corruptions=("fog",), severities=(1, 2))
    first = run(digit_model, sets[:1], tmp_path / "out")
    calls = []
    forward = ProgResViT.forward
    monkeypatch.setattr(ProgResViT, "forward", lambda self, images: calls.append(1) or forward(self, images))
    both = run(digit_model, sets, tmp_path / "out")
    assert len(calls) == 1
    assert np.array_equal(both["fog_1"].statistics, first["fog_1"].statistics)
    with torch.no_grad():
        digit_model.head.bias += 1
    with pytest.raises(ValueError, match="of another model, data or precision"):
        run(digit_model, sets, tmp_path / "out")
    (tmp_path / "out" / "records" / "fog_1.parquet").unlink()
    with pytest.raises(ValueError, match=r"fog_2\.parquet is of another model, data or precision"):
        run(digit_model, sets, tmp_path / "out")
    assert len(calls) == 1  # refused before the first set was evaluated
    (tmp_path / "notes").write_text("")
    with pytest.raises(ValueError, match="notes is a file; name a folder"):
        run(digit_model, sets, tmp_path / "notes")
    run(digit_model, sets, tmp_path / "out", replace(OPTIONS, overwrite=True))


def test_other_images_of_the_same_number_are_not_taken_for_the_same(digit_model, digits, tmp_path):
    shutil.copytree(digits / "val", tmp_path / "data" / "val")
    sets = plan("generated", str(tmp_path / "data"), corruptions=("fog",), severities=(1,))
    run(digit_model, sets, tmp_path / "out")
    (tmp_path / "data" / "val" / "0" / "12.png").rename(tmp_path / "data" / "val" / "0" / "new.png")
    with pytest.raises(ValueError, match="of another model, data or precision"):
        run(digit_model, sets, tmp_path / "out")


def test_imagenet_c_is_read_from_its_folders_and_must_be_imagenets(digit_model, digits, tmp_path):
    for name in CORRUPTIONS:
        for severity in range(1, 6):
            (tmp_path / "c" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "c" / name / str(severity)).symlink_to(digits / "val")
    sets = plan("imagenet-c", str(tmp_path / "c"))
    assert [one.source.split for one in sets[:6]] == [*(f"gaussian_noise/{s}" for s in range(1, 6)), "shot_noise/1"]
    with pytest.raises(ValueError, match=r"gaussian_noise_1 has 1000 classes and .* 4 class folders"):
        run(digit_model, sets, tmp_path / "out")
    free = [replace(one, classes=None) for one in sets[:2]]
    assert len(run(digit_model, free, tmp_path / "out")["gaussian_noise_2"]) == 24


def test_a_missing_set_is_reported_before_the_first_is_evaluated(imagenet_model, tmp_path):
    one_image_each(tmp_path / "c" / "fog" / "1", ImageNetInfo().label_names())
    sets = plan("imagenet-c", str(tmp_path / "c"), corruptions=("fog",), severities=(1, 2))
    with pytest.raises(ValueError, match="no images under fog/2"):
        run(imagenet_model, sets, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_mce_is_of_the_whole_of_imagenet_c_alone():
    sets = plan("imagenet-c", "somewhere")
    found = {one.name: make_records(40, seed=number) for number, one in enumerate(sets)}
    rows = mce_table(sets, found, 0.5).rows
    assert [row["answers"] for row in rows] == ["every round", "routed, τ = 0.5"]
    errors = {}
    for one in sets:
        errors.setdefault(one.corruption, []).append(1 - found[one.name].correct[:, 1].mean())
    expected = 100 * np.mean([np.mean(errors[name]) / alexnet for name, alexnet in ALEXNET_ERRORS.items()])
    assert rows[0]["mce"] == pytest.approx(expected)
    leaving = found["fog_3"].top10_entropy[:, 0] < 0.5
    routed = np.where(leaving, found["fog_3"].correct[:, 0], found["fog_3"].correct[:, 1])
    assert imagenet_c_errors(sets, found, 0.5)["fog"][2] == pytest.approx(1 - routed.mean())
    assert mce_table(sets[:74], found) is None
    generated = plan("generated", "somewhere")
    assert mce_table(generated, {one.name: found["fog_1"] for one in generated}) is None


def test_pooled_records_keep_every_image_apart():
    pooled = pool({"a": make_records(10), "b": make_records(10)})
    assert len(pooled) == len(set(pooled.ids.tolist())) == 20
    assert pooled.correct.shape == (20, 2)


def test_bad_suites_are_refused(digits):
    for given, match in [
        ({"suite": "imagenet-x"}, "unknown suite 'imagenet-x'"),
        ({"suite": "generated", "corruptions": ("rain",)}, "unknown corruption 'rain'"),
        ({"suite": "generated", "severities": (6,)}, "from 1 to 5"),
        ({"suite": "generated", "severities": (1, 1)}, "give each severity once"),
        ({"suite": "generated", "corruptions": ("fog", "fog")}, "give each corruption once"),
    ]:
        with pytest.raises(ValueError, match=match):
            plan(data=str(digits), **given)


def test_a_summary_holds_what_the_table_holds(tmp_path):
    sets = plan("generated", "made", corruptions=["fog"], severities=[1, 4])
    found = {"fog_1": make_records(200), "fog_4": make_records(200, seed=1)}
    summary, mean = summarize(sets, found, 0.5), shift_table(sets, found, 0.5).rows[-1]
    assert (summary.suite, summary.sets, summary.images, summary.model) == (
        "generated",
        ("fog_1", "fog_4"),
        200,
        "made",
    )
    assert summary.full.top1 == pytest.approx(mean["top1_round_2"])
    assert summary.full.gmacs == found["fog_1"].gmacs()[-1]
    assert (summary.routed.top1, summary.routed.gmacs) == pytest.approx((mean["top1_routed"], mean["gmacs_paper"]))
    assert summarize(plan("imagenet-c", "made", corruptions=["fog"], severities=[1, 4]), found).suite == "imagenet-c"
    plain = summarize(plan("imagenet-v2", "made"), {"imagenet-v2": found["fog_1"]})
    assert (plain.suite, plain.routed) == ("imagenet-v2", None)
    alone = summarize(plan("imagenet-v2", "made"), {"imagenet-v2": make_records(rounds=1)}, 0.5)
    assert alone.routed is None  # one round
    with pytest.raises(ValueError, match=r"there is no summary of progresvit shift at .*summary\.json; give an output"):
        read_summary(tmp_path)
