from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import confusion_matrix

from progresvit.data.crop import preprocessing_hash
from progresvit.data.loading import Unreadable
from progresvit.data.segmentation.windows import WindowOptions, windows_hash
from progresvit.data.transforms import normalise
from progresvit.distributed import Processes
from progresvit.evaluation import DataSource, EvalOptions, evaluate, evaluate_segmentation, read_segmentation_records
from progresvit.io.weights import weights_hash
from progresvit.metrics.miou import mean_iou
from progresvit.model import ProgResViT
from tests.evaluation.made import ONE
from tests.evaluation.made_segmentation import CLASSES, IGNORE, SIZES, make_dataset, make_model, naive_miou
from tests.evaluation.test_run import stop_after
from tests.factories import tiny_config

SINGLE = EvalOptions(workers=0, batch=1)
"""A window at a time, so that no grouping changes the rounding."""


@pytest.fixture
def model(randomize):
    return make_model(randomize)


@pytest.fixture
def data(tmp_path):
    return make_dataset(tmp_path / "data")


def run(model, data, out, options=SINGLE, **more):
    known = {"split": "val", "name": "m", "processes": ONE, **more}
    return evaluate_segmentation(model, data=str(data), out=out, options=options, **known)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr("progresvit.evaluation.run.MASK_CHUNK", 3)


def same(a, b):
    assert np.array_equal(a.ids, b.ids)
    assert np.array_equal(a.scores, b.scores)
    for mine, other in zip(a.confusion, b.confusion, strict=True):
        assert np.array_equal(mine.toarray(), other.toarray())


def naive_map(model, pixels, s):
    """The classes of every pixel, window by window, and the score, of an image on a window's side: as in the paper."""
    side, (height, width) = 48, pixels.shape[:2]
    shorter = min(height, width)
    h, w = (round(side * height / shorter), round(side * width / shorter))
    resized = np.asarray(Image.fromarray(pixels).resize((w, h), Image.Resampling.BICUBIC))
    tops, lefts = ([*range(0, length - side, side), length - side] for length in (h, w))
    merged, times, entropies = torch.zeros(len(CLASSES), h, w), torch.zeros(h, w), []
    for top in tops:
        for left in lefts:
            window = torch.tensor(resized[top : top + side, left : left + side]).permute(2, 0, 1)[None]
            with torch.no_grad():
                logits = model(normalise(window, model.config))[s].logits
            p = logits.softmax(dim=1)
            entropies += (-(p * p.log()).sum(dim=1)).flatten().tolist()
            place = slice(top, top + side), slice(left, left + side)
            merged[:, *place] += F.interpolate(logits, size=(side, side), mode="bilinear")[0]
            times[place] += 1
    upsampled = F.interpolate((merged / times)[None], size=(height, width), mode="bilinear")[0]
    worst = sorted(entropies)[-int(np.ceil(0.1 * len(entropies) - 1e-9)) :]
    return upsampled.argmax(dim=0).numpy(), np.mean(worst)


def test_records_hold_the_answers_of_the_model_for_each_image(model, data, tmp_path):
    records = run(model, data, tmp_path / "r.parquet")
    assert len(records) == len(SIZES)
    for s in range(2):
        predictions, labels = [], []
        for row, name in enumerate(records.ids):
            pixels = np.asarray(Image.open(data / name))
            mask = np.asarray(Image.open(data / name.replace("images", "annotations")))
            found, score = naive_map(model, pixels, s)
            kept = mask != IGNORE
            expected = confusion_matrix(mask[kept], found[kept], labels=range(4))
            assert np.array_equal(records.confusion[s].toarray()[row].reshape(4, 4), expected)
            assert records.scores[row, s] == pytest.approx(score, abs=1e-5)
            predictions.append(found.ravel())
            labels.append(mask.ravel())
        found = mean_iou(records.totals)[s]
        assert found == pytest.approx(naive_miou(np.concatenate(predictions), np.concatenate(labels)))
    header = records.header
    assert (header.weights_sha256, header.images, header.split) == (weights_hash(model), len(SIZES), "val")
    assert header.preprocessing_sha256 == windows_hash(model.config, WindowOptions())
    assert records.windows.tolist() == [1, 2, 2, 2, 1, 2, 1, 2]
    assert np.allclose(records.gmacs()[1], 2 * np.array(model.gmacs()))
    assert [path.name for path in tmp_path.iterdir() if path.name != "data"] == ["r.parquet"]


def test_groups_parts_and_workers_change_nothing(model, data, tmp_path, small_parts, monkeypatch):
    first = run(model, data, tmp_path / "a.parquet")
    monkeypatch.setattr("progresvit.evaluation.run.MASK_CHUNK", 32)
    same(run(model, data, tmp_path / "b.parquet", replace(SINGLE, workers=2)), first)
    grouped = run(model, data, tmp_path / "c.parquet", replace(SINGLE, batch=5))
    assert grouped.scores == pytest.approx(first.scores, abs=1e-5)
    rough = run(model, data, tmp_path / "d.parquet", replace(SINGLE, precision="bf16"))
    assert rough.header.precision == "bf16"
    assert not np.array_equal(rough.scores, first.scores)
    assert rough.scores == pytest.approx(first.scores, abs=0.1)


@pytest.mark.gpu
def test_a_gpu_gives_nearly_the_same(model, data, tmp_path):
    first = run(model, data, tmp_path / "a.parquet")
    second = run(model, data, tmp_path / "b.parquet", processes=Processes(0, 1, torch.device("cuda")))
    assert second.scores == pytest.approx(first.scores, abs=1e-3)
    assert np.array_equal(second.totals.labelled, first.totals.labelled)
    assert mean_iou(second.totals) == pytest.approx(mean_iou(first.totals), abs=0.01)


def test_scales_stride_and_flip_add_windows_and_change_the_preprocessing(model, data, tmp_path):
    plain = run(model, data, tmp_path / "a.parquet")
    options = WindowOptions(stride=0.5, scales=(1.0, 1.5), flip=True)
    rich = run(model, data, tmp_path / "b.parquet", windows=options)
    assert rich.windows[0] == 2 * (1 + 4)  # of 48 pixels one, of 72 two by two, and each flipped
    assert (rich.windows > plain.windows).all()
    assert np.array_equal(rich.totals.labelled, plain.totals.labelled)
    known = rich.header.preprocessing
    assert (known["stride"], known["scales"], known["flip"]) == (0.5, [1.0, 1.5], True)
    assert "crop" not in known
    hashes = {plain.header.preprocessing_sha256, rich.header.preprocessing_sha256, preprocessing_hash(model.config)}
    assert len(hashes) == 3


def test_a_stopped_run_continues_where_it_stopped(model, data, tmp_path, small_parts, monkeypatch):
    whole = run(model, data, tmp_path / "whole.parquet")
    with monkeypatch.context() as patch:
        stop_after(9, patch)
        with pytest.raises(KeyboardInterrupt):
            run(model, data, tmp_path / "r.parquet")
    assert not (tmp_path / "r.parquet").exists()
    kept = sorted(path.name for path in (tmp_path / "r.parquet.parts").glob("*.npz"))
    assert kept == ["000000.npz", "begun-000001.npz"]  # three images with five windows, and the first of the next part
    with pytest.raises(ValueError, match=r"beginning of another run \(other preprocessing, preprocessing_hash\)"):
        run(model, data, tmp_path / "r.parquet", windows=WindowOptions(flip=True))
    with pytest.raises(ValueError, match=r"beginning of another run \(other masks\)"):
        run(model, data, tmp_path / "r.parquet", ignore=(255, 77))
    seen, steps = stop_after(1000, monkeypatch), []
    records = run(model, data, tmp_path / "r.parquet", progress=lambda done, total: steps.append((done, total)))
    done = steps[0][0]
    assert 3 < done < 6
    assert sum(seen) == whole.windows[done:].sum()
    assert steps[-1] == (8, 8)
    same(records, whole)
    assert not (tmp_path / "r.parquet.parts").exists()


def test_a_run_that_stopped_before_the_last_file_only_writes_it(model, data, tmp_path, monkeypatch):
    whole = run(model, data, tmp_path / "whole.parquet")

    def fail(*arguments):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("progresvit.evaluation.run.write_records", fail)
        with pytest.raises(OSError, match="full"):
            run(model, data, tmp_path / "r.parquet")
    monkeypatch.setattr(ProgResViT, "forward", fail)
    same(run(model, data, tmp_path / "r.parquet"), whole)


def test_unreadable_images_are_listed_and_too_many_are_an_error(model, data, tmp_path, monkeypatch):
    for number in (2, 5):
        (data / "images" / "val" / f"{number}.png").write_bytes(b"no image")
    monkeypatch.setattr("progresvit.evaluation.run.MASK_CHUNK", 1)  # a part without any image
    with pytest.raises(ValueError, match=r"2 of 8 images cannot be read, more than 1%: images/val/2\.png"):
        run(model, data, tmp_path / "r.parquet")
    assert not (tmp_path / "r.parquet.parts").exists()
    monkeypatch.setattr(Unreadable, "limit", 0.3)
    records = run(model, data, tmp_path / "r.parquet")
    assert records.ids.tolist() == [f"images/val/{number}.png" for number in (0, 1, 3, 4, 6, 7)]
    assert records.header.images == 8
    assert [line.split(":")[0] for line in records.header.unreadable] == ["images/val/2.png", "images/val/5.png"]
    Image.new("L", (5, 5)).save(data / "annotations" / "val" / "3.png")
    with pytest.raises(ValueError, match=r"3\.png is 5×5, and its image"):
        run(model, data, tmp_path / "s.parquet")


def test_logits_that_are_not_finite_never_exit(model, data, tmp_path):
    with torch.no_grad():
        model.head.bias[1] = torch.nan
    records = run(model, data, tmp_path / "r.parquet")
    assert records.broken == len(SIZES)
    assert np.isinf(records.scores).all()


def test_data_with_other_classes_than_the_model_is_refused(model, data, tmp_path):
    out = tmp_path / "r.parquet"
    (data / "labels.txt").write_text("sky\nroad\ntree\ncar\n")
    with pytest.raises(
        ValueError, match=r"4 classes of .* sky, road, tree, car, and the model.s classes are .*another order"
    ):
        run(model, data, out)
    (data / "labels.txt").write_text("sky\nroad\ncar\ntree\nboat\n")
    with pytest.raises(ValueError, match=r"5 classes of .*name the label file of the model's classes \(labels=…\)"):
        run(model, data, out)
    (tmp_path / "mine.txt").write_text("\n".join(CLASSES))
    assert len(run(model, data, out, labels=str(tmp_path / "mine.txt"))) == 8
    (data / "labels.txt").unlink()
    same(run(model, data, tmp_path / "s.parquet"), read_segmentation_records(out))  # the model's classes
    with pytest.raises(ValueError, match="built-in list"):
        run(model, data, tmp_path / "t.parquet", labels="cityscape")
    unnamed = make_model(lambda model: model)
    unnamed.config = unnamed.config.replace(class_ids=None, labels=None)
    with pytest.raises(ValueError, match=r"does not say what its classes are; add a file labels\.txt"):
        run(unnamed, data, tmp_path / "t.parquet")
    assert len(run(unnamed, data, tmp_path / "t.parquet", labels=str(tmp_path / "mine.txt"))) == 8
    (tmp_path / "mine.txt").write_text("sky\nroad\n")
    with pytest.raises(ValueError, match=r"2 classes of .* and the model has 4 classes"):
        run(unnamed, data, tmp_path / "u.parquet", labels=str(tmp_path / "mine.txt"))


def test_each_kind_of_model_has_its_own_evaluation(model, data, tmp_path, digits):
    with pytest.raises(ValueError, match=r"the model segments images, .* evaluate_segmentation in Python"):
        evaluate(model, DataSource(data=str(digits)), tmp_path / "r.parquet", name="m", processes=ONE)
    with pytest.raises(ValueError, match="the model classifies images"):
        run(ProgResViT(tiny_config(num_classes=4)), data, tmp_path / "r.parquet")
    (tmp_path / "r.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="pass overwrite=True"):
        run(model, data, tmp_path / "r.parquet")
    assert len(run(model, data, tmp_path / "r.parquet", replace(SINGLE, overwrite=True))) == 8
