"""ImageNet's own images: results of a set from records, and their table."""

import json
from dataclasses import replace

import numpy as np
import pytest

from progresvit.data.split import halves_by_name
from progresvit.io.model_folder import bundled_folder
from progresvit.routing import load_setting
from repro import imagenet
from repro.imagenet_tables import ImageNet
from tests.evaluation.made import make_records

IMAGES = 200


def plain_records():
    return make_records(IMAGES, rounds=1)


@pytest.fixture
def measured():
    """Ours and DeiT-Tiny on all sets, one of which partly made ours."""
    records = {"imagenet-tiny": make_records(IMAGES), "deit-tiny": plain_records()}
    used = {f"0-{number}" for number in range(50)}
    return [
        imagenet.measure_set(data, model, of_model, f"evaluate {model}", complete=1000, used=names)
        for data, names in (("val", set()), ("b-33", set()), ("a-44", used), ("c-12", set()))
        for model, of_model in records.items()
    ]


def write(path, results):
    path.write_text(json.dumps([one.model_dump(mode="json") for one in results]))
    return path


def test_settings_stand_with_the_images_that_did_not_calibrate_them(measured, tmp_path):
    sets = ImageNet(write(tmp_path / "imagenet.json", measured))
    records = make_records(IMAGES)
    test = halves_by_name(records.ids.tolist())[1]
    threshold = load_setting(bundled_folder("imagenet-tiny") / "settings" / "drop-1.json").threshold
    early = records.top10_entropy[test, 0].astype(float) < threshold
    right = np.where(early, records.correct[test, 0], records.correct[test, 1])
    base = plain_records().correct[test, 0]
    row = sets.row("val", "drop-1")
    assert row.images == len(test)
    assert row.top1.mean == pytest.approx(right.mean())
    assert row.gmacs == pytest.approx(np.where(early, *records.gmacs()).mean())
    assert row.difference.mean == pytest.approx(right.mean() - base.mean())
    only_ours, only_theirs = (right & ~base).mean(), (base & ~right).mean()
    error = ((only_ours + only_theirs - (only_ours - only_theirs) ** 2) / (len(test) - 1)) ** 0.5
    assert row.difference.highest == pytest.approx(row.difference.mean + 1.96 * error)
    change = sets.change("val", "drop-1")
    assert change.mean == pytest.approx(right.mean() - records.correct[test, 1].mean())


def test_images_that_made_ours_are_left_out_of_both_models(measured, tmp_path):
    sets = ImageNet(write(tmp_path / "imagenet.json", measured))
    kept = np.array([int(name.rpartition("-")[2]) >= 50 for name in make_records(IMAGES).ids])
    for model, records in (("imagenet-tiny", make_records(IMAGES)), ("deit-tiny", plain_records())):
        row = sets.row("a-44", "every round", model)
        assert row.images == 150
        assert row.top1.mean == pytest.approx(records.correct[kept, -1].mean())
        everyone = sets.row("a-44", "every round", model, held_out=False)
        assert everyone.top1.mean == pytest.approx(records.correct[:, -1].mean())


def test_a_set_without_one_of_the_models_is_refused(measured, tmp_path):
    path = write(tmp_path / "imagenet.json", measured[:-1])
    with pytest.raises(ValueError, match=r"no results of deit-tiny on c-12; run repro/imagenet\.py again"):
        ImageNet(path)


def test_a_model_with_other_weights_on_another_set_is_refused(measured, tmp_path):
    other = measured[2].model_copy(update={"weights": "other"})
    path = write(tmp_path / "imagenet.json", [*measured[:2], other, *measured[3:]])
    with pytest.raises(ValueError, match="the results of imagenet-tiny on val and b-33 are of other weights"):
        ImageNet(path)


def test_another_file_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "imagenet.json").write_text('[{"data": "val"}]')
    with pytest.raises(ValueError, match=r"imagenet\.json is not a valid results file.*run repro/imagenet\.py again"):
        ImageNet(tmp_path / "imagenet.json")


def test_models_on_other_images_are_not_compared(measured, tmp_path):
    other = imagenet.measure_set("val", "deit-tiny", make_records(IMAGES, 1, seed=1), "", complete=1, used=set())
    with pytest.raises(ValueError, match="were measured on different images of val"):
        ImageNet(write(tmp_path / "imagenet.json", [*measured[:1], other, *measured[2:]]))


def test_records_of_another_model_or_of_other_images_are_refused(tmp_path, monkeypatch):
    made, path, images = make_records(4), tmp_path / "val.parquet", tmp_path / "images"
    records = replace(made, ids=np.array([f"{name}.png" for name in made.ids]))
    with pytest.raises(ValueError, match=r"val\.parquet is of other weights than imagenet-tiny; delete it"):
        imagenet.check_records(records, "imagenet-tiny", images, path)
    monkeypatch.setattr(imagenet, "weights_hash", lambda model: records.header.weights_sha256)
    (images / "class").mkdir(parents=True)
    for name in records.ids:
        (images / "class" / name.rpartition("/")[2]).write_bytes(b"")
    imagenet.check_records(records, "imagenet-tiny", images, path)
    imagenet.check_records(records.take(np.arange(3)), "imagenet-tiny", images, path)  # one was unreadable
    (images / "class" / "more.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"val\.parquet is of other images than .*; delete it"):
        imagenet.check_records(records, "imagenet-tiny", images, path)
    (images / "class" / "0-0.png").unlink()  # as many, but others
    with pytest.raises(ValueError, match=r"val\.parquet is of other images than .*; delete it"):
        imagenet.check_records(records, "imagenet-tiny", images, path)


def test_v2_is_linked_by_class_as_far_as_its_images_are_there(tmp_path):
    images = tmp_path / "data" / "cache" / "imagenet2candidates_mturk"
    images.mkdir(parents=True)
    (tmp_path / "data" / "datasets").mkdir()
    listed = [["first", "n01"], ["second", "n02"], ["absent", "n02"]]
    (tmp_path / "data" / "datasets" / "imagenetv2-b-33.json").write_text(json.dumps({"image_filenames": listed}))
    for name in ("first", "second", "of_another_set"):
        (images / f"{name}.jpg").write_bytes(b"")
    for _ in range(2):  # it may be there already
        out = imagenet.link_v2(tmp_path / "data", "b-33", tmp_path / "b-33")
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*.jpg")) == [
        "n01/first.jpg",
        "n02/second.jpg",
    ]


def test_data_that_is_not_there_is_an_error_at_once(tmp_path, capsys):
    absent = str(tmp_path / "absent")
    with pytest.raises(SystemExit):
        imagenet.main(["--val", absent, "--v2", absent, "--weights", absent, "--runs", str(tmp_path / "runs")])
    assert f"{absent} does not exist" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
