import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from progresvit.data.crop import describe_preprocessing
from progresvit.data.dataset import find_images
from progresvit.data.transforms import evaluation_transform
from progresvit.distributed import Processes
from progresvit.evaluation import DataSource, EvalOptions, evaluate, evaluate_knn, probes, read_records
from progresvit.io.weights import weights_hash
from progresvit.metrics.knn import VOTE_FLOOR, knn_votes
from progresvit.model import ProgResViT
from tests.evaluation.made import ONE, copy_digits
from tests.evaluation.test_run import stop_after
from tests.factories import tiny_config

PLAIN = EvalOptions(workers=0, batch=5)


@pytest.fixture(scope="module")
def model(randomize):
    """A model without a head."""
    torch.manual_seed(1)
    return randomize(ProgResViT(tiny_config(depth=2, num_classes=0)))


def run(model, data, out, options=PLAIN, *, source=None, **settings):
    given = DataSource(data=str(data), **(source or {}))
    return evaluate_knn(model, given, out, name="m", processes=ONE, options=options, **settings)


@pytest.fixture(scope="module")
def records(model, digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("knn")
    records = run(model, digits, folder / "knn.parquet", replace(PLAIN, keep_logits=True))
    assert [path.name for path in folder.iterdir()] == ["knn.parquet"]
    return records


def features(model, digits, split):
    images, crop = find_images(digits, split), evaluation_transform(model.config)
    pixels = torch.stack([crop(Image.open(entry.path).convert("RGB")) for entry in images.entries])
    with torch.no_grad():
        return [of_round.class_token for of_round in model.features(pixels)], torch.tensor(images.targets)


def test_logits_are_logarithms_of_the_votes_on_class_tokens(model, digits, records):
    bank, targets = features(model, digits, "train")
    queries, labels = features(model, digits, "val")
    assert records.labels.tolist() == labels.tolist()
    assert records.ids[0] == "val/0/12.png"
    for s in range(2):
        votes = knn_votes(queries[s], bank[s], targets, classes=4).numpy()
        assert np.exp(records.logits[:, s]) == pytest.approx(votes, abs=1e-5)
        assert records.predictions[:, s].tolist() == votes.argmax(axis=1).tolist()
        entropy = -(votes * np.log(np.maximum(votes, 1e-30))).sum(axis=1)
        assert records.top10_entropy[:, s] == pytest.approx(entropy, abs=1e-4)
    assert records.logits.min() >= np.log(VOTE_FLOOR) - 1e-4
    assert np.isfinite(records.log_probability).all()


def test_the_header_holds_the_settings_and_the_bank(model, records):
    header = records.header
    assert {key: header.probe[key] for key in ("task", "k", "temperature", "split", "images", "classes")} == {
        "task": "knn", "k": 20, "temperature": 0.07, "split": "train", "images": 48, "classes": ["0", "1", "2", "3"],
    }  # fmt: skip
    assert header.identity()["probe"] == header.probe
    assert header.weights_sha256 == weights_hash(model)
    assert (header.images, header.split) == (24, "val")


def test_another_crop_is_that_of_the_bank_and_the_images(model, digits, records, tmp_path, monkeypatch):
    crops, prepare = [], probes.NamedTransform

    def noted(config, corruption):
        crops.append(config.crop)
        return prepare(config, corruption)

    monkeypatch.setattr(probes, "NamedTransform", noted)
    other = run(model, digits, tmp_path / "r.parquet", crop=0.5)
    assert crops == [0.5, 0.5]
    assert other.header.preprocessing == describe_preprocessing(model.config.replace(crop=0.5))
    assert records.header.preprocessing == describe_preprocessing(model.config)
    assert not np.allclose(other.statistics, records.statistics)


def test_headers_of_records_of_a_head_hold_no_probe(model, digits, tmp_path):
    headed = ProgResViT(model.config.replace(num_classes=4))
    source = DataSource(data=str(digits))
    plain = evaluate(headed, source, tmp_path / "r.parquet", name="m", processes=ONE, options=PLAIN)
    assert not {"probe", "probe_result"} & {*plain.header.to_dict(), *plain.header.identity()}


def test_a_head_changes_nothing(model, digits, records, tmp_path):
    headed = ProgResViT(model.config.replace(num_classes=7))
    headed.load_state_dict(model.state_dict(), strict=False)
    again = run(headed.eval(), digits, tmp_path / "r.parquet")
    assert np.array_equal(again.top10_entropy, records.top10_entropy)


@pytest.mark.parametrize("stop", [14, 48 + 14])
def test_a_stopped_run_resumes_and_gives_identical_records(
    model, digits, records, tmp_path, small_chunks, monkeypatch, stop
):
    out = tmp_path / "r.parquet"
    whole = run(model, digits, tmp_path / "whole.parquet")
    with monkeypatch.context() as patch:
        stop_after(stop, patch)
        with pytest.raises(KeyboardInterrupt):
            run(model, digits, out, k=3)
    seen = stop_after(1000, monkeypatch)
    resumed = run(model, digits, out)  # the features do not depend on k
    assert 0 < sum(seen) < 72 - 7
    assert np.array_equal(resumed.ids, whole.ids)
    assert np.array_equal(resumed.statistics, whole.statistics)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.parquet", "whole.parquet"]


def test_unreadable_images_are_left_out_and_named(model, digits, tmp_path):
    data = copy_digits(digits, tmp_path / "data", count=51)
    (data / "train" / "0" / "0.png").write_bytes(b"no image")
    (data / "val" / "1" / "7.png").write_bytes(b"no image")
    records = run(model, data, tmp_path / "r.parquet", replace(PLAIN, batch=51), k=1)
    assert [line.split(":")[0] for line in records.header.unreadable] == ["train/0/0.png", "val/1/7.png"]
    assert len(records) == 101
    assert records.correct.all()  # copies of the images are in the bank


def test_a_corruption_applies_to_the_images_and_not_to_the_bank(model, digits, records, tmp_path):
    from progresvit.data.augment.corruption import Corruption

    source = {"corruption": Corruption("gaussian_noise", 3)}
    corrupted = run(model, digits, tmp_path / "r.parquet", source=source)
    assert corrupted.header.corruption == "gaussian_noise/3"
    assert corrupted.header.probe == records.header.probe
    assert not np.allclose(corrupted.top10_entropy, records.top10_entropy)


def test_a_sample_is_drawn_of_the_images_and_not_of_the_bank(model, digits, records, tmp_path):
    sample = run(model, digits, tmp_path / "s.parquet", source={"limit": 7})
    assert sample.header.sample == {"images": 7, "of": 24, "seed": 0}
    assert sample.header.probe == records.header.probe
    rows = np.isin(records.ids, sample.ids)
    assert sample.top10_entropy == pytest.approx(records.top10_entropy[rows], abs=1e-5)


def test_a_class_with_one_image_in_the_bank_can_be_predicted(model, digits, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    for path in sorted((data / "train" / "3").glob("*.png"))[1:]:
        path.unlink()
    shutil.copy(next((data / "train" / "3").glob("*.png")), data / "val" / "3" / "same.png")
    records = run(model, data, tmp_path / "r.parquet", k=1)
    assert records.correct[records.ids.tolist().index("val/3/same.png")].all()


def test_bad_input_is_refused_and_leaves_no_files(model, digits, tmp_path):
    data, out = tmp_path / "data", tmp_path / "out" / "r.parquet"
    shutil.copytree(digits, data)
    shutil.rmtree(data / "train" / "2")
    for given, match in [
        ({"data": digits, "k": 49}, "the bank has 48 images, fewer than k = 49"),
        ({"data": digits, "temperature": -1.0}, "temperature above 0"),
        ({"data": data}, r"the split val has classes of which the bank.* has no images: 2; add images there"),
        ({"data": digits, "bank_split": "val"}, "24 images of the split val are in the bank"),
        ({"data": digits, "bank_split": "test"}, "no images under test"),
        ({"data": digits, "source": {"unlabelled": True}}, "need labelled images"),
        ({"data": digits, "source": {"restrict_classes": True}}, "the classes of the data only"),
        ({"data": digits / "val" / "0"}, "6 images without class folders"),
    ]:
        with pytest.raises(ValueError, match=match):
            run(model, out=out, **given)

    class Bare:
        config = model.config

    with pytest.raises(ValueError, match="Bare has no method 'features'"):
        run(Bare(), digits, out)
    segmenter = ProgResViT(model.config.replace(num_classes=4, task="segmentation"))
    with pytest.raises(ValueError, match="the model segments images"):
        run(segmenter, digits, out)
    assert not out.parent.exists()
    out.parent.mkdir()
    out.write_bytes(b"")
    with pytest.raises(ValueError, match="already exists"):
        run(model, digits, out)


@pytest.mark.gpu
def test_a_gpu_gives_nearly_the_records_of_a_cpu(model, digits, records, tmp_path):
    gpu = Processes(0, 1, torch.device("cuda", 0))
    source = DataSource(data=str(digits))
    same = evaluate_knn(model, source, tmp_path / "gpu.parquet", name="m", processes=gpu, options=PLAIN)
    assert same.top10_entropy == pytest.approx(records.top10_entropy, abs=2e-2)
    model.cpu()
    assert len(read_records(tmp_path / "gpu.parquet")) == 24
