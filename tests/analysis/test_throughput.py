"""Throughput and memory: what the engine answers at each threshold and how fast, and its peak memory on a GPU."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import progresvit
from progresvit.analysis import memory as memory_module
from progresvit.analysis.exits import exits
from progresvit.analysis.memory import (
    BATCHES,
    WAYS,
    Memory,
    PeakMemory,
    memory,
    memory_figure,
    memory_table,
    peak_gib,
)
from progresvit.analysis.throughput import (
    SpeedPoint,
    Throughput,
    throughput,
    throughput_figure,
    throughput_table,
)
from progresvit.config import make_rounds
from progresvit.metrics.interval import share_interval
from progresvit.model import ProgResViT
from progresvit.routing.decide import exit_rounds
from tests.analysis.made import answered_sample, rows_of

IMAGES = 40


@pytest.fixture
def sample(small_model):
    return answered_sample(small_model)


def run(model, sample, thresholds=None, **options):
    return throughput(model, sample, thresholds, **{"device": "cpu", "batch": 8, "seconds": 0, **options})


def test_by_default_from_all_to_none_of_the_images_continue(small_model, sample):
    result = run(small_model, sample)
    assert [point.continuing for point in result.points] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert (result.points[0].threshold, result.points[-1].threshold) == ((0.0,), (math.inf,))
    assert all(point.images_per_s > 0 for point in result.points)
    assert (result.images, result.precision, result.batch) == (IMAGES, "fp32", 8)
    assert "thread" in result.hardware


def test_accuracy_equals_the_model_routed_by_the_threshold(small_model, sample):
    result = run(small_model, sample)
    every = exits(small_model, sample, 0.0)
    counts = set()
    for point in result.points:
        rounds = exit_rounds(every.entropy, point.threshold)
        correct = int(every.correct[np.arange(IMAGES), rounds].sum())
        assert point.accuracy == share_interval(correct, IMAGES)
        assert point.exit_shares == ((rounds == 0).mean(), (rounds == 1).mean())
        counts.add(correct)
    assert len(counts) > 1


def test_several_passes_count_every_image_once(small_model, sample):
    once, often = (run(small_model, sample, [0.0], seconds=seconds).points[0] for seconds in (0, 0.3))
    assert (often.accuracy, often.exit_shares) == (once.accuracy, once.exit_shares)
    assert once.spread >= 0  # of three passes
    assert often.spread >= 0


def test_given_thresholds_are_used_and_sorted_by_what_continues(small_model, sample):
    result = run(small_model, sample, [math.inf, 0.0])
    assert [point.threshold for point in result.points] == [(0.0,), (math.inf,)]


def test_three_rounds_share_a_threshold_or_have_their_own(small_config, randomize):
    model = randomize(ProgResViT(small_config.replace(rounds=make_rounds([16, 24, 32], [1, 1, 2]))))
    sample = answered_sample(model)
    every = exits(model, sample, 0.0)
    result = run(model, sample)
    assert [point.continuing for point in result.points] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert all(len(set(point.threshold)) == 1 for point in result.points)
    limits = tuple(np.quantile(every.entropy[:, :2], 0.4, axis=0).tolist())
    (own,) = run(model, sample, [limits]).points
    rounds = exit_rounds(every.entropy, limits)
    assert own.exit_shares == tuple((rounds == s).mean() for s in range(3))
    assert min(own.exit_shares) > 0
    assert own.accuracy.mean == every.correct[np.arange(IMAGES), rounds].mean()


def test_a_model_of_one_round_is_a_single_point(small_config, randomize):
    model = randomize(ProgResViT(small_config.replace(rounds=make_rounds([32], [2]))))
    sample = answered_sample(model)
    result = run(model, sample)
    (point,) = result.points
    assert (point.threshold, point.exit_shares, point.continuing) == ((), (1.0,), 0)
    assert point.accuracy.mean == 1  # the labels are its answers
    assert throughput_table(result).rows[0]["threshold"] is None
    throughput_figure(result).draw_without_rendering()
    with pytest.raises(ValueError, match="leave out the thresholds"):
        run(model, sample, [0.5])


def test_progress_counts_the_points(small_model, sample):
    calls = []
    run(small_model, sample, [0.0, 1.0], progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 2), (2, 2)]


def test_the_engine_leaves_the_model_as_it_was(small_model, sample):
    before = {key: value.clone() for key, value in small_model.state_dict().items()}
    run(small_model.train(), sample, [0.0])
    assert small_model.training
    assert all(torch.equal(value, before[key]) for key, value in small_model.state_dict().items())


@pytest.mark.parametrize(
    ("thresholds", "what"), [([], "there are none"), ([(0.1, 0.2)], "so 1 for 2 rounds"), ([-1.0], "or more, not -1")]
)
def test_wrong_thresholds_are_refused(small_model, sample, thresholds, what):
    with pytest.raises(ValueError, match=what):
        run(small_model, sample, thresholds)


def made_points(speeds=(20, 25, 33, 49, 90)):
    """Points without an engine."""
    points = tuple(
        SpeedPoint(
            threshold=(number / 4,),
            accuracy=share_interval(289 - number, 300),
            exit_shares=(number / 4, 1 - number / 4),
            images_per_s=speed,
            spread=0.02,
        )
        for number, speed in enumerate(speeds)
    )
    return Throughput(points=points, images=300, hardware="a processor, 2 threads", precision="fp32", batch=64)


def test_the_table_has_accuracy_and_speed_of_each_threshold():
    rows = rows_of(throughput_table(made_points()))
    assert list(rows[0]) == [
        *("continuing", "threshold", "images", "accuracy", "accuracy_low", "accuracy_high", "images_per_s", "spread")
    ]
    assert [float(row["continuing"]) for row in rows] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert [float(row["images_per_s"]) for row in rows] == [20, 25, 33, 49, 90]
    assert [row["spread"] for row in rows] == ["0.02"] * 5
    for row in rows:
        assert 0 < float(row["accuracy_low"]) < float(row["accuracy"]) < float(row["accuracy_high"]) < 1
    assert "a processor, 2 threads; fp32, batch 64, 300 images" in throughput_table(made_points()).to_markdown()


def test_points_of_the_figure_are_labelled_with_the_share_that_continues():
    result = made_points()
    figure = throughput_figure(result)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    (line, *_) = axes.lines
    assert line.get_xdata().tolist() == [20, 25, 33, 49, 90]
    assert line.get_ydata() == pytest.approx([100 * point.accuracy.mean for point in result.points])
    labels = {"100 %": 20, "75 %": 25, "50 %": 33, "25 %": 49, "0 %": 90}
    assert {text.get_text(): text.xy[0] for text in axes.texts} == labels


@pytest.mark.parametrize("speeds", [(20, 25, 33, 49, 90), (1000, 1050, 1100, 1200, 1300), (20_000,)])
def test_labels_of_the_figure_do_not_meet(speeds):
    figure = throughput_figure(made_points(speeds))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts] + [figure.legends[0].get_window_extent()]
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[number + 1 :])
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1


def made_memory(batches=BATCHES, *, without=()):
    """Measurements without a GPU; ``without`` ran out of memory."""
    points = tuple(
        PeakMemory(
            way=way,
            batch=batch,
            peak_gib=None if (way, batch) in without else 0.03 + 0.001 * batch * (1 + number),
            images=4 * batch,
        )
        for number, way in enumerate(WAYS)
        for batch in batches
    )
    return Memory(points=points, hardware="a GPU", precision="bf16")


def test_the_table_of_memory_leaves_a_batch_that_is_too_large_empty():
    rows = rows_of(memory_table(made_memory(without=[("eager", 512)])))
    assert list(rows[0]) == ["way", "batch", "peak_gib", "images"]
    assert [(row["way"], int(row["batch"])) for row in rows] == [(way, batch) for way in WAYS for batch in BATCHES]
    assert [row["peak_gib"] == "" for row in rows] == [False] * 9 + [True]


def test_the_figure_of_memory_has_a_line_for_each_way():
    figure = memory_figure(made_memory(without=[("eager", 512)]))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    engine, eager = axes.lines
    assert list(engine.get_xdata()) == list(BATCHES)
    assert list(engine.get_ydata()) == pytest.approx([0.03 + 0.001 * batch for batch in BATCHES])
    assert list(eager.get_xdata()) == [1, 8, 32, 128]
    assert (engine.get_marker(), engine.get_linestyle()) != (eager.get_marker(), eager.get_linestyle())
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "engine",
        "eager, round by round (out of memory: 512)",
    ]


def test_the_figure_of_memory_is_drawn_of_one_batch_and_of_no_measurement():
    for without in ([], [(way, 8) for way in WAYS]):
        memory_figure(made_memory([8], without=without)).draw_without_rendering()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_memory_needs_a_gpu():
    with pytest.raises(ValueError, match="memory of a GPU, and there is none here; run it on a machine with"):
        memory("nettewoof-tiny")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"device": "cpu"}, "not of 'cpu'; give a CUDA device"),
        ({"batches": ()}, "one image or more"),
        ({"batches": (8, 0)}, r"not \(8, 0\)"),
    ],
)
def test_wrong_options_of_memory_are_refused(monkeypatch, options, what):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=what):
        memory("nettewoof-tiny", **options)


def test_a_batch_that_runs_out_of_memory_is_reported_and_the_others_are_measured(monkeypatch):
    def measure(model, way, batch, device, precision):
        assert (model, device, precision) == ("some-model", "cuda", "bf16")
        return None if (way, batch) == ("eager", 32) else 1.5 + batch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory_module, "hardware", lambda device: "a GPU")
    monkeypatch.setattr(memory_module, "in_fresh_process", lambda function, *arguments: measure(*arguments))
    calls = []
    result = memory("some-model", [8, 32], progress=lambda done, total: calls.append((done, total)))
    assert [(point.way, point.batch, point.peak_gib, point.images) for point in result.points] == [
        ("engine", 8, 9.5, 32),
        ("engine", 32, 33.5, 128),
        ("eager", 8, 9.5, 32),
        ("eager", 32, None, 0),
    ]
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.gpu
def test_memory_grows_with_the_batch_on_a_gpu(small_model, tmp_path):
    held = torch.zeros(2**28, dtype=torch.uint8, device="cuda")  # of the caller; it does not count
    folder = progresvit.save(small_model, tmp_path / "model")
    result = memory(folder, [1, 512])
    for way in WAYS:
        small, large = (point.peak_gib for point in result.points if point.way == way)
        assert 0 < small < large < 1
    assert result.points[0].peak_gib < 0.2
    assert len(held) == 2**28


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_for_which_the_images_leave_no_memory_has_no_peak(small_model, tmp_path, way):
    folder = str(progresvit.save(small_model, tmp_path / "model"))
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 2**31 / total))
    try:
        assert peak_gib(folder, way, 2**17, "cuda", "bf16") is None  # an engine continues with smaller batches
        assert peak_gib(folder, way, 8, "cuda", "bf16") > 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_a_gpu_gives_the_accuracy_of_the_cpu(small_model, sample):
    on_cpu = run(small_model, sample)
    on_gpu = run(small_model, sample, device="cuda", precision="fp32", seconds=0.1)
    for slow, fast in zip(on_cpu.points, on_gpu.points, strict=True):
        assert fast.continuing == pytest.approx(slow.continuing, abs=0.05)
        assert fast.accuracy.mean == pytest.approx(slow.accuracy.mean, abs=0.05)
        assert fast.images_per_s > 0
        assert fast.spread is not None


def test_titles_hold_the_speeds_and_the_memory():
    result = made_points()
    title = throughput_figure(result).axes[0].get_title()
    every, *others = result.points
    equal = [point for point in others if point.accuracy.mean >= every.accuracy.mean]
    fastest = max(equal or others, key=lambda point: point.images_per_s)
    assert title.startswith(f"{fastest.images_per_s:.0f} instead of {every.images_per_s:.0f} images/s")
    assert title.endswith("\na processor, 2 threads, fp32, batch 64, 300 images")
    assert "× the speed" not in title  # the accuracy is lower
    even = [replace(point, accuracy=every.accuracy) for point in result.points]
    title = throughput_figure(replace(result, points=even)).axes[0].get_title()
    assert "at equal top-1: 4.50 × the speed (4.41 to 4.59)" in " ".join(title.split())
    unsteady = [replace(point, spread=1.5) for point in even]
    title = throughput_figure(replace(result, points=unsteady)).axes[0].get_title()
    assert "at equal top-1: no clear difference" in " ".join(title.split())
    first = throughput_figure(replace(result, points=result.points[:1])).axes[0].get_title()
    assert first.startswith(f"{every.images_per_s:.0f} images/s at a top-1 of {100 * every.accuracy.mean:.1f}")
    memory = made_memory(without=[("eager", 512)])
    title = " ".join(memory_figure(memory).axes[0].get_title().split())
    peaks = {(point.way, point.batch): point.peak_gib for point in memory.points}
    assert f"batch 1–128: engine {peaks['engine', 1]:.2f}–{peaks['engine', 128]:.2f} GiB" in title
    assert f"round by round {peaks['eager', 1]:.2f}–{peaks['eager', 128]:.2f} GiB" in title
