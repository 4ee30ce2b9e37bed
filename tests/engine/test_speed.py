import math

import pytest
import torch
from PIL import Image

import progresvit
from progresvit.config import make_rounds
from progresvit.engine.measurement import Measurement, rates_in_turns
from progresvit.engine.speed import EagerRounds, TimedModel, find_model, load_images, threshold_between
from progresvit.model import ProgResViT

KINDS = pytest.mark.parametrize("eager", [False, True], ids=["engine", "eager"])


@pytest.fixture
def folder(small_model, tmp_path):
    return str(progresvit.save(small_model, tmp_path / "model"))


def routed(folder, *, eager=False, **fields):
    options = {"device": "cpu", "precision": "fp32", "batch": 4, "continuing": 0.664, "count": 40}
    return TimedModel(folder, eager=eager, **{**options, **fields})


def shares(subject):
    subject.build()
    subject.run(1)
    return subject.exit_shares()


@KINDS
@pytest.mark.parametrize("share", [0.0, 0.25, 0.664, 1.0])
def test_as_many_images_continue_as_asked(folder, eager, share):
    assert shares(routed(folder, eager=eager, continuing=share))[1] == pytest.approx(share, abs=1.01 / 40)


def test_with_three_rounds_the_share_continues_after_each(small_config, randomize, tmp_path):
    config = small_config.replace(rounds=make_rounds([16, 24, 32], [1, 1, 2]))
    folder = str(progresvit.save(randomize(ProgResViT(config)), tmp_path / "three"))
    engine, eager = (routed(folder, eager=eager, continuing=0.5) for eager in (False, True))
    assert shares(engine) == shares(eager) == pytest.approx([0.5, 0.25, 0.25])
    assert engine.thresholds == pytest.approx(eager.thresholds, abs=1e-4)


@KINDS
def test_in_a_model_of_one_round_no_image_continues(small_config, randomize, tmp_path, eager):
    config = small_config.replace(rounds=make_rounds([32], [2]))
    folder = str(progresvit.save(randomize(ProgResViT(config)), tmp_path / "one"))
    assert shares(routed(folder, eager=eager)) == [1.0]


@KINDS
def test_given_thresholds_are_used(folder, eager):
    assert shares(routed(folder, eager=eager, thresholds=math.inf)) == [1, 0]
    assert shares(routed(folder, eager=eager, thresholds=[0.0])) == [0, 1]


def test_the_model_round_by_round_gives_the_answers_of_the_engine(folder):
    engine, eager = routed(folder), routed(folder, eager=True)
    thresholds = engine.thresholds
    for subject in (engine, eager):
        subject.thresholds = thresholds
        subject.build()
        subject.run(1)
    assert isinstance(eager.runner, EagerRounds)
    for first, second in zip(engine.exits, eager.exits, strict=True):
        assert (first.exit_round, first.index) == (second.exit_round, second.index)
        assert first.entropy == pytest.approx(second.entropy, abs=1e-4)


def test_images_of_a_folder_are_repeated_to_fill_the_last_batch(small_config, tmp_path):
    for number in range(3):
        Image.new("RGB", (40, 40), (80 * number, 0, 0)).save(tmp_path / f"{number}.png")
    images = load_images(str(tmp_path), small_config, device="cpu", batch=4)
    assert images.shape == (4, 3, 32, 32)
    assert torch.equal(images[3], images[0])
    assert len(images[:, 0, 0, 0].unique()) == 3


def test_a_folder_without_a_readable_image_is_refused(small_config, tmp_path):
    with pytest.raises(ValueError, match="there is no data at"):
        load_images(str(tmp_path / "gone"), small_config, device="cpu", batch=4)
    (tmp_path / "bad.png").write_text("no image")
    with pytest.raises(ValueError, match="none of 1 images can be read"):
        load_images(str(tmp_path), small_config, device="cpu", batch=4)


def test_random_weights_and_images_are_the_same_each_time(small_config):
    first, second = (find_model("progresvit_tiny_160_224").state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    images = [load_images(None, small_config, device="cpu", batch=3) for _ in range(2)]
    assert len(images[0]) == 33  # whole batches
    assert torch.equal(*images)


def test_a_threshold_lies_between_two_entropies():
    entropies = [0.4, 0.1, 0.3, 0.2]
    thresholds = [threshold_between(entropies, share) for share in (0, 0.25, 0.5, 1)]
    assert thresholds == [math.inf, pytest.approx(0.35), 0.25, 0.0]


class Counted:
    """A subject that takes no time and notes its passes."""

    inputs, images = torch.zeros(40, 3), 40

    def __init__(self):
        self.ran = []

    def build(self):
        pass

    def run(self, passes):
        self.ran.append(passes)

    def one(self, number):
        self.ran.append(number)


def test_every_timed_run_is_a_whole_number_of_passes(monkeypatch):
    measurement = Measurement(Counted, device="cpu", threads=None, seconds=0.1)
    ran = measurement.subject.ran
    monkeypatch.setattr(measurement, "_time", lambda passes: ran.append(passes) or 0.001 * passes)
    found = measurement.throughput()
    assert found["images"] == 20 * 40  # a fifth of the seconds
    assert found["images_per_s"] == pytest.approx(40 / 0.001)
    assert ran[:3] == [1, 1, 20]
    assert set(ran[3:]) == {20}


def test_latency_has_ordered_percentiles_and_a_warm_up():
    measurement = Measurement(Counted, device="cpu", threads=None, seconds=0)
    found = measurement.latency()
    assert found["p50_ms"] <= found["p95_ms"] <= found["p99_ms"]
    assert measurement.subject.ran == [*range(10), *range(20)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_error_names_the_remedy():
    with pytest.raises(ValueError, match="use device='cpu'"):
        Measurement(Counted, device="cuda", threads=None, seconds=0)


@pytest.mark.gpu
@KINDS
def test_on_a_gpu_memory_is_measured(folder, eager):
    make = {"eager": eager, "device": "cuda", "precision": "bf16"}
    measurement = Measurement(lambda: routed(folder, **make), device="cuda", threads=None, seconds=0.01)
    assert measurement.throughput()["images_per_s"] > 0
    assert measurement.peak_gib() > 0


def test_each_round_may_have_a_share_of_its_own(small_config, randomize, tmp_path):
    config = small_config.replace(rounds=make_rounds([16, 24, 32], [1, 1, 2]))
    folder = str(progresvit.save(randomize(ProgResViT(config)), tmp_path / "three"))
    assert shares(routed(folder, continuing=[0.8, 0.25])) == pytest.approx([0.2, 0.6, 0.2])


def test_subjects_take_turns():
    calls = []

    class Subject:
        images = 4

        def __init__(self, name):
            self.name = name

        def build(self):
            pass

        def run(self, passes):
            calls.append(self.name)

    measurements = [
        Measurement(lambda name=name: Subject(name), device="cpu", threads=None, seconds=0.0) for name in "ab"
    ]
    rates = rates_in_turns(measurements, turns=3, seconds=0.0)
    assert rates.shape == (3, 2)
    assert (rates > 0).all()
    assert "".join(calls) == "aabb" + 3 * "ab"
