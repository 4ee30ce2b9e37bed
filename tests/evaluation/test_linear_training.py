import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from progresvit.data.crop import describe_preprocessing
from progresvit.data.dataset import find_images
from progresvit.distributed import Processes
from progresvit.evaluation import DataSource, EvalOptions, LinearProbe, evaluate_linear
from progresvit.evaluation.linear_training import held_out_accuracy, hold_out_tenth, largest_batch
from progresvit.model import ProgResViT
from progresvit.routing import near_lossless
from tests.evaluation.made import ONE, copy_digits
from tests.factories import tiny_config

PLAIN = EvalOptions(workers=0, batch=20)
RATES = (0.03, 0.3, 3.0)


@pytest.fixture(scope="module")
def model(randomize):
    """A model without a head."""
    torch.manual_seed(1)
    return randomize(ProgResViT(tiny_config(num_classes=0)))


def run(model, data, out, options=PLAIN, *, source=None, processes=ONE, **settings):
    given = DataSource(data=str(data), **(source or {}))
    settings = {"epochs": 3, "learning_rates": RATES, "in_memory": True, "blocks": 1, **settings}
    return evaluate_linear(model, given, out, name="m", processes=processes, options=options, **settings)


@pytest.fixture(scope="module")
def records(model, digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("linear")
    records = run(model, digits, folder / "linear.parquet", epochs=25)
    assert [path.name for path in folder.iterdir()] == ["linear.parquet"]
    return records


def test_classifiers_learn_and_are_routed(records):
    assert len(records) == 24
    assert (records.correct.mean(axis=0) > 0.5).all()  # by chance 0.25
    point = near_lossless(records.scores(), records.correct, records.gmacs())
    assert point.top1 >= records.correct[:, -1].mean()


def test_the_header_holds_the_settings_and_what_was_chosen(records):
    probe, result = records.header.probe, records.header.probe_result
    known = {key: value for key, value in probe.items() if key != "names"}
    assert known == {
        "task": "linear", "epochs": 25, "batch": 20, "learning_rates": list(RATES), "seed": 0, "in_memory": True,
        "held_out": 4, "split": "train", "images": 48, "classes": ["0", "1", "2", "3"],
    }  # fmt: skip
    assert np.shape(result["held_out_top1"]) == (2, 3)
    for accuracy, rate in zip(result["held_out_top1"], result["learning_rates"]):
        assert rate == RATES[int(np.argmax(accuracy))]
    assert "probe_result" not in records.header.identity()


@pytest.fixture(scope="module")
def deep(randomize):
    """A model of five blocks."""
    torch.manual_seed(1)
    return randomize(ProgResViT(tiny_config(num_classes=0, depth=5)))


def test_by_default_features_and_crop_are_those_of_dino(deep, digits, tmp_path):
    source = DataSource(data=str(digits))
    settings = {"epochs": 1, "learning_rates": RATES, "in_memory": True, "options": PLAIN}
    records = evaluate_linear(deep, source, tmp_path / "r.parquet", name="m", processes=ONE, **settings)
    assert records.header.probe["blocks"] == 4
    assert records.header.preprocessing == describe_preprocessing(deep.config.replace(crop=0.875))
    assert records.header.config["crop"] == deep.config.crop == 0.9


def test_classifiers_read_several_blocks_and_learn_from_them(deep, digits, tmp_path, monkeypatch):
    widths, make = [], LinearProbe.__init__
    monkeypatch.setattr(
        LinearProbe,
        "__init__",
        lambda self, given, *args, **more: (widths.append(given), make(self, given, *args, **more))[1],
    )
    records = run(deep, digits, tmp_path / "r.parquet", epochs=25, blocks=3)
    assert widths == [[3 * 64, 3 * 128]]
    assert (records.correct.mean(axis=0) > 0.4).all()  # by chance 0.25


def test_with_one_block_and_the_models_crop_the_probe_is_the_earlier_one(model, digits, tmp_path):
    """Which read ``features``, and whose header had no key for the blocks."""
    records = run(model, digits, tmp_path / "r.parquet", epochs=1, crop=model.config.crop)
    assert "blocks" not in records.header.probe
    assert records.header.preprocessing == describe_preprocessing(model.config)


def test_a_model_that_gives_no_tokens_of_its_blocks_is_refused(model, digits, tmp_path):
    class FeaturesOnly(torch.nn.Module):
        config, features = model.config, model.features

    with pytest.raises(ValueError, match="FeaturesOnly gives class tokens of its last block only; pass blocks=1"):
        run(FeaturesOnly(), digits, tmp_path / "r.parquet", blocks=4)
    assert not list(tmp_path.iterdir())


def test_the_model_is_not_changed(model, digits, tmp_path):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run(model, digits, tmp_path / "r.parquet", epochs=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("stop", ["training", "prediction"])
def test_a_stopped_run_resumes_and_gives_identical_records(
    model, digits, tmp_path, small_chunks, monkeypatch, in_memory, stop
):
    out = tmp_path / "r.parquet"
    whole = run(model, digits, tmp_path / "whole.parquet", in_memory=in_memory)
    steps, calls, limit = 2, [], 6 + 1 + 2  # training steps of an epoch; 6 in all, held-out images, two parts
    features = type(model).features

    def counting(self, images):
        if len(images) > 1:  # a single image tells the widths
            calls.append(len(images))
        if len(images) > 1 and len(calls) > (steps + 1 if stop == "training" else limit):
            raise KeyboardInterrupt
        return features(self, images)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "features", counting)
        with pytest.raises(KeyboardInterrupt):
            run(model, digits, out, in_memory=in_memory)
        assert not out.exists()
        with pytest.raises(ValueError, match=r"beginning of another run \(other probe\)"):
            run(model, digits, out, in_memory=in_memory, epochs=4)
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "features", lambda *arguments: seen.append(0) or features(*arguments))
        resumed = run(model, digits, out, in_memory=in_memory)
    assert len(seen) - 1 == (4 + 1 + 4 if stop == "training" else 1 + 2)
    assert np.array_equal(resumed.ids, whole.ids)
    assert np.array_equal(resumed.statistics, whole.statistics)
    assert resumed.header.probe_result == whole.header.probe_result
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.parquet", "whole.parquet"]


def test_a_run_that_stopped_before_its_first_epoch_leaves_nothing(model, digits, tmp_path, monkeypatch):
    def stopping(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(LinearProbe, "train_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(model, digits, tmp_path / "r.parquet")
    assert not list(tmp_path.iterdir())


def test_a_tenth_of_each_class_is_held_out_by_name(digits):
    images = find_images(digits, "train")
    train, held_out = hold_out_tenth(images, "train")
    assert sorted(held_out.targets) == [0, 1, 2, 3]
    assert {*train.entries} | {*held_out.entries} == {*images.entries}
    assert not {*train.entries} & {*held_out.entries}
    shuffled = images.subset(reversed(range(len(images))))
    assert {*hold_out_tenth(shuffled, "train")[1].entries} == {*held_out.entries}


def test_a_class_with_one_training_image_is_refused(model, digits, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    for path in sorted((data / "train" / "3").glob("*.png"))[1:]:
        path.unlink()
    with pytest.raises(ValueError, match=r"only one image of the split train shows the class 3; .* so add images"):
        run(model, data, tmp_path / "r.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_unreadable_images_are_left_out_and_named(model, digits, tmp_path):
    data = copy_digits(digits, tmp_path / "data")
    train, held_out = hold_out_tenth(find_images(data, "train"), "train")
    broken = [train.entries[3].name, held_out.entries[2].name, "val/1/7.png"]
    for name in broken:
        (data / name).write_bytes(b"no image")
    records = run(model, data, tmp_path / "r.parquet", epochs=1)
    assert [line.split(":")[0] for line in records.header.unreadable] == broken
    assert len(records) == 119


def test_processes_share_batches_of_any_size():
    three = Processes(0, 3, torch.device("cpu"))
    assert [largest_batch(256, images, three) for images in (1000, 256, 200, 3)] == [255, 255, 198, 3]
    assert largest_batch(256, 200, ONE) == 200
    for batch, images in ((2, 1000), (256, 2)):
        with pytest.raises(ValueError, match=rf"batch must be at least 3, .* got batch={batch} and {images} images"):
            largest_batch(batch, images, three)


def test_limits_of_unreadable_images_count_those_of_all_processes(model, digits, tmp_path):
    data = shutil.copytree(digits, tmp_path / "data")
    (data / "train" / "0" / "0.png").write_bytes(b"no image")
    broken_and_whole = find_images(data, "train").subset([0, 1])
    probe, gathered = LinearProbe([64, 128], 4, learning_rates=RATES, steps=1, batch=1), {"counts": [], "reasons": []}

    def gather(value):
        values = gathered["reasons" if isinstance(value, dict) else "counts"]
        values.append(value)
        return values

    for rank in (1, 0):
        processes = SimpleNamespace(rank=rank, count=2, device=torch.device("cpu"), gather=gather)
        accuracy, lines = held_out_accuracy(
            model, probe, broken_and_whole, model.config, blocks=1, options=PLAIN, processes=processes
        )
    assert accuracy.shape == (2, 3)
    assert [line.split(":")[0] for line in lines] == ["train/0/0.png"]
    (data / "train" / "0" / "1.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="2 of 2 images cannot be read"):
        held_out_accuracy(model, probe, broken_and_whole, model.config, blocks=1, options=PLAIN, processes=ONE)


def test_bad_input_is_refused_and_leaves_no_files(model, digits, tmp_path):
    data, out = tmp_path / "data", tmp_path / "out" / "r.parquet"
    shutil.copytree(digits, data)
    shutil.rmtree(data / "train" / "2")
    for given, match in [
        ({"data": data}, "the split val has classes of which the bank.* has no images: 2"),
        ({"data": digits, "epochs": 0}, "^epochs must be at least 1, got 0"),
        ({"data": digits, "blocks": 0}, "^blocks must be at least 1, got 0"),
        ({"data": digits, "blocks": 2}, "round 1 ends after 1 block; pass blocks=1"),
        ({"data": digits, "crop": 1.5}, "crop is the share of the side to keep"),
        ({"data": digits, "learning_rates": (0.1, -1.0)}, "learning rates are numbers above 0"),
        ({"data": digits, "source": {"unlabelled": True}}, "need labelled images"),
    ]:
        with pytest.raises(ValueError, match=match):
            run(model, out=out, **given)
    assert not out.parent.exists()


@pytest.mark.gpu
def test_a_gpu_learns_too_and_resumes(model, digits, tmp_path):
    gpu = Processes(0, 1, torch.device("cuda", 0))
    first = run(model, digits, tmp_path / "a.parquet", processes=gpu, epochs=25)
    again = run(model, digits, tmp_path / "b.parquet", processes=gpu, epochs=25)
    model.cpu()
    assert (first.correct.mean(axis=0) > 0.4).all()  # of four classes
    assert np.array_equal(first.statistics, again.statistics)
