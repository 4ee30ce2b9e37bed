"""Training of segmentation: the loss, runs that learn and resume, and validation by hand."""

import math
import warnings
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import progresvit
from progresvit import compute
from progresvit.data.augment.segmentation import SegmentationBatch
from progresvit.data.loading import Unreadable
from progresvit.data.segmentation import IGNORE
from progresvit.distributed import Processes
from progresvit.metrics.miou import ClassCounts, mean_iou
from progresvit.model import RoundOutput
from progresvit.routing import MeanIoU, metric_near_lossless
from progresvit.training.build import build_model
from progresvit.training.recipe import load_recipe
from progresvit.training.tasks.registry import make_task
from progresvit.training.tasks.segmentation import Segmentation, SegmentationOptions, pixel_cross_entropy, upsample
from tests.data.shapes import CLASSES, save_shapes
from tests.evaluation.made_segmentation import (
    make_dataset,
    make_model,
    make_segmentation_records,
    naive_iou,
    naive_miou,
)
from tests.evaluation.test_segmentation_run import naive_map
from tests.training.runs import (
    ALONE,
    assert_close_losses,
    assert_resumes_to_the_bit,
    evaluations,
    losses,
    merge_sections,
    run,
)

TINY = {"depth": 2, "patch_size": 16}
THINKING = {
    "kind": "thinkingvit",
    "fields": {"heads": 2, "depth": 2, "rounds": [{"resolution": 48, "heads": 1}, {"resolution": 48, "heads": 2}]},
}
PLAIN = {"resolutions": [48], "heads": [2], "psg": False, **TINY}


def recipe(model=None, **sections):
    """24 images are three steps."""
    values = {
        "task": "segmentation",
        "model": model or {"resolutions": [32, 48], "heads": [1, 2], "drop_path": 0.1, **TINY},
        "data": {"mode": "in_memory", "workers": 0, "in_memory_side": 64},
        "optimizer": {"lr": 2e-3, "lr_batch": 8, "batch": 8},
        "schedule": {"name": "poly", "by": "step", "epochs": 1, "cooldown": 0, "warmup": 0},
        "ema": 0.0,
        "run": {"log_every": 1},
    }
    return merge_sections(values, sections)


SGD = {"name": "sgd", "lr": 2e-2, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """No test may change it."""
    return save_shapes(tmp_path_factory.mktemp("shapes"))


# the loss


@pytest.mark.parametrize(("g", "side"), [(1, 16), (2, 32), (3, 48), (3, 50), (5, 7), (36, 576)])
def test_upsampling_by_products_is_that_of_torch(g, side):
    logits = torch.randn(2, 4, g, g)
    expected = F.interpolate(logits, size=(side, side), mode="bilinear", align_corners=False)
    torch.testing.assert_close(upsample(logits, side), expected, atol=1e-5, rtol=0)


def exact_loss(logits, masks):
    """In float64, with torch's own parts."""
    size = masks.shape[-2:]
    resized = F.interpolate(logits.double(), size=size, mode="bilinear", align_corners=False)
    return F.cross_entropy(resized, masks, ignore_index=IGNORE)


@pytest.mark.parametrize(("g", "ignored"), [(2, 0.0), (3, 0.3), (3, 0.999)])
def test_the_loss_is_the_mean_cross_entropy_of_the_labelled_pixels(g, ignored):
    logits, masks = 3 * torch.randn(4, 6, g, g), torch.randint(0, 6, (4, 48, 48))
    masks[torch.rand(masks.shape) < ignored] = IGNORE
    masks[0, 0, 0] = 2
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    loss, expected = pixel_cross_entropy(ours, masks), exact_loss(theirs, masks)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4)


def test_ignored_pixels_alone_have_no_loss_and_no_gradient():
    logits = torch.randn(2, 5, 3, 3, requires_grad=True)
    loss = pixel_cross_entropy(logits, torch.full((2, 48, 48), IGNORE))
    assert loss.item() == 0
    loss.backward()
    assert not logits.grad.any()


def test_logits_under_ignored_pixels_do_not_matter():
    logits, masks = torch.randn(1, 3, 3, 3), torch.zeros(1, 48, 48, dtype=torch.long)
    masks[..., 16:] = IGNORE  # the first patch reaches to the middle of the second
    other = logits.clone()
    other[..., 2] = 1e4
    assert pixel_cross_entropy(logits, masks) == pixel_cross_entropy(other, masks)


def test_the_loss_is_float32_in_low_precision():
    logits, masks = torch.randn(2, 4, 3, 3).bfloat16(), torch.randint(0, 4, (2, 48, 48))
    with torch.autocast("cpu", torch.bfloat16):
        loss = pixel_cross_entropy(logits, masks)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact_loss(logits, masks).item(), abs=1e-5)


def test_every_round_has_a_loss_of_its_own():
    masks = torch.randint(0, 4, (2, 48, 48))
    outputs = [RoundOutput(torch.randn(2, 4, g, g), torch.empty(0)) for g in (2, 3)]
    measured = Segmentation().losses(outputs, SegmentationBatch(torch.empty(0), masks))
    assert measured.tolist() == pytest.approx([exact_loss(output.logits, masks).item() for output in outputs], abs=1e-5)


# runs


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "optimizer"), [("in_memory", {}), ("loader", SGD)], ids=["adamw", "sgd"])
def test_a_run_learns_to_segment_shapes(shapes, tmp_path, mode, optimizer):
    long = {"log_every": 15, "evaluate_every": 100, "save_every": 100}
    wanted = recipe(data={"mode": mode}, optimizer=optimizer, schedule={"epochs": 25}, run=long)
    untrained, _ = make_validation(wanted, shapes)
    model = progresvit.load(run(wanted, shapes, tmp_path / "out"))
    first, *_, last = [rounds for _, rounds, _ in losses(tmp_path / "out")]
    assert all(after < 0.8 * before for before, after in zip(first, last, strict=True))
    (result,) = evaluations(tmp_path / "out")
    assert max(untrained.values["miou"]) < 0.4
    assert result["miou"][-1] > 0.55
    assert result["miou"][0] > 0.4
    assert min(result["iou"].values()) > 0.35
    assert list(result["iou"]) == list(CLASSES)
    assert model.config.task == "segmentation"
    assert model.config.class_ids == model.config.labels == CLASSES
    rates = [rate for *_, rate in losses(tmp_path / "out")]
    assert rates == sorted(rates, reverse=True)


def make_validation(wanted, data, model=None, processes=ALONE):
    """The metrics of a model, new unless given, and the task's data."""
    wanted, task = make_task(wanted)
    splits = task.find_splits(wanted, str(data))
    torch.manual_seed(0)
    model = build_model(wanted, task.class_ids(splits), task="segmentation") if model is None else model
    task.setup(model, splits, wanted, processes)
    loaded = task.load_data(model, splits, wanted, processes)
    return task.validate(model, loaded, processes=processes, dtype=None), loaded


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "optimizer"), [("in_memory", SGD), ("loader", {})])
def test_a_resumed_run_equals_an_unbroken_one(shapes, tmp_path, mode, optimizer):
    epochs = {"schedule": {"epochs": 3}, "run": {"log_every": 1, "keep": 9}}
    wanted = recipe(data={"mode": mode}, optimizer=optimizer, ema=0.9, **epochs)
    whole = assert_resumes_to_the_bit(wanted, shapes, tmp_path, "model", "ema", "optimizer", killed_at=4)
    assert whole.name == "step-000000009"


@pytest.mark.parametrize(
    ("network", "rounds"), [(THINKING, 2), (PLAIN, 1), (None, 2)], ids=["thinkingvit", "plain", "progresvit"]
)
def test_every_kind_of_model_trains_and_the_run_says_what_it_does(shapes, tmp_path, capsys, network, rounds):
    folder = run(recipe(model=network), shapes, tmp_path / "out")
    shown = capsys.readouterr().err
    assert "training on 24 images; 8 validation images" in shown
    assert "epoch 1: mIoU of the rounds " in shown
    assert " GMACs (paper), threshold " in shown
    model = progresvit.load(folder)
    assert len(losses(tmp_path / "out")[-1][1]) == rounds
    assert all(math.isfinite(loss) for _, each, _ in losses(tmp_path / "out") for loss in each)
    (result,) = evaluations(tmp_path / "out")
    assert len(result["miou"]) == rounds
    assert result["near_lossless"]["gmacs"] <= result["full_gmacs"] + 1e-12
    assert model(torch.randn(1, 3, 48, 48))[-1].logits.shape == (1, 3, 3, 3)
    assert progresvit.load(tmp_path / "out" / "best").config == model.config
    assert (folder / "settings").exists() == (network is None)  # an engine runs it, and it has early exits
    if network is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            setting = progresvit.SegmentationEngine(folder).setting
        assert (setting.chosen_on, setting.n) == ("validation", 8)
        assert setting.expected["miou"] == result["near_lossless"]["miou"]


def calm_recipe(**sections):
    """Without random depths and crops, which other micro-batches would draw differently."""
    model = {"resolutions": [32, 48], "heads": [1, 2], **TINY}
    calm = {"scale": [1.0, 1.0], "flip": 0.0, "photometric": False}
    return recipe(model=model, task_options=calm, **sections)


@pytest.fixture(scope="module")
def calm(shapes, tmp_path_factory):
    """The folder of a run of this recipe."""
    out = tmp_path_factory.mktemp("calm") / "out"
    run(calm_recipe(), shapes, out)
    return out


@pytest.mark.parametrize(
    "sections",
    [{"run": {"precision": "bf16"}}, {"run": {"grad_checkpointing": True}}, {"optimizer": {"accumulate": 2}}],
    ids=["bf16", "checkpointing", "accumulate"],
)
def test_other_ways_of_execution_learn_the_same_thing(calm, shapes, tmp_path, sections):
    run(calm_recipe(**sections), shapes, tmp_path / "other")
    assert_close_losses(tmp_path / "other", calm, 0.1)


def test_unreadable_images_are_listed_in_the_folder_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Unreadable, "limit", 0.2)
    data = save_shapes(tmp_path / "data", train=12)
    for name in ("train/03", "val/02"):
        (data / "images" / f"{name}.png").write_bytes(b"not an image")
    for mode in ("loader", "in_memory"):
        run(recipe(data={"mode": mode}), data, tmp_path / mode)
        lines = (tmp_path / mode / "unreadable.txt").read_text().splitlines()
        assert [line.partition(":")[0] for line in lines] == ["images/train/03.png", "images/val/02.png"]
        assert evaluations(tmp_path / mode)[-1]["images"] == 7


# validation


@pytest.fixture
def rectangles(tmp_path):
    """Four classes; eight validation images of one and two windows."""
    make_dataset(tmp_path / "data", split="train")
    return make_dataset(tmp_path / "data", seed=1)


class Share(Processes):
    """A process of several that validate one after the other: the last gathers the values of all."""

    heard: ClassVar[list] = []

    def gather(self, value):
        self.heard.append(value)
        return list(self.heard)


def validate_in_shares(wanted, data, model, count):
    """The metrics in each process; only the last process gathers all images."""
    Share.heard.clear()
    shares = (Share(rank, count, ALONE.device) for rank in range(count))
    return [make_validation(wanted, data, model, share)[0] for share in shares]


@pytest.mark.parametrize("mode", ["in_memory", "loader"])
def test_validation_is_the_miou_of_all_processes_by_hand(rectangles, randomize, mode):
    model, wanted = make_model(randomize), recipe(data={"mode": mode})
    alone, loaded = make_validation(wanted, rectangles, model)
    half, both = validate_in_shares(wanted, rectangles, model, 2)
    assert (half.values["images"], both.values["images"]) == (4, 8)
    assert half.primary != alone.primary
    for key in ("miou", "pixel_accuracy", "iou", "full_gmacs"):
        assert both.values[key] == pytest.approx(alone.values[key], abs=1e-12)
    for key, value in alone.values["near_lossless"].items():
        assert both.values["near_lossless"][key] == pytest.approx(value)

    paths = sorted((rectangles / "images" / "val").iterdir())
    masks = [np.asarray(Image.open(str(path).replace("images", "annotations"))) for path in paths]
    labels = np.concatenate([mask.ravel() for mask in masks])
    for s in range(2):
        maps = [naive_map(model, np.asarray(Image.open(path)), s)[0] for path in paths]
        prediction = np.concatenate([classes.ravel() for classes in maps])
        assert alone.values["miou"][s] == pytest.approx(naive_miou(prediction, labels), abs=1e-6)
        kept = labels != IGNORE
        assert alone.values["pixel_accuracy"][s] == pytest.approx((prediction == labels)[kept].mean())
    expected = naive_iou(prediction, labels, 4)
    assert list(alone.values["iou"].values()) == pytest.approx(expected)
    assert alone.primary == alone.values["miou"][-1]
    windows = np.array([1, 2, 2, 2, 1, 2, 1, 2])
    assert alone.values["full_gmacs"] == pytest.approx(compute.cumulative_gmacs(model.config)[-1] * windows.mean())
    assert [len(list(loaded.val())) for _ in range(2)] == [8, 8]  # again at every evaluation


def test_a_process_without_images_takes_part(rectangles, randomize):
    model, wanted = make_model(randomize), recipe(optimizer={"batch": 3})
    for path in sorted((rectangles / "images" / "val").iterdir())[2:]:
        path.unlink()
    _, second, third = validate_in_shares(wanted, rectangles, model, 3)
    assert not Share.heard[2]
    assert third.values == second.values
    assert third.values["images"] == 2


def test_overlapping_windows_change_the_validation_and_its_compute(rectangles, randomize):
    model = make_model(randomize)
    plain, _ = make_validation(recipe(), rectangles, model)
    dense, _ = make_validation(recipe(task_options={"stride": 0.25}), rectangles, model)
    assert dense.values["full_gmacs"] > plain.values["full_gmacs"]
    assert dense.values["miou"] != plain.values["miou"]


def test_a_class_that_is_nowhere_has_no_iou_and_does_not_count(rectangles, randomize):
    names = ("sky", "road", "car", "tree", "unicorn")
    (rectangles / "labels.txt").write_text("\n".join(names))
    model = make_model(randomize, classes=names)
    with torch.no_grad():
        model.head.bias[4] = -1e4  # it is never predicted
    metrics, _ = make_validation(recipe(), rectangles, model)
    *others, last = metrics.values["iou"].values()
    assert last is None
    assert metrics.primary == pytest.approx(np.mean(others))


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("max_drop", [0.0003, 0.02])
def test_the_near_lossless_point_has_the_least_compute_of_all_thresholds_within_the_drop(rounds, max_drop):
    """Every threshold is tried, image by image."""
    records = make_segmentation_records(60, rounds)
    scores, gmacs = records.scores, np.array(records.gmacs())
    point = metric_near_lossless(scores, MeanIoU(records.counts), gmacs, max_drop)
    points = []
    for threshold in [0.0, *np.nextafter(scores[:, :-1].astype(float).ravel(), 9)]:
        exits = [next((s for s in range(rounds - 1) if row[s] < threshold), rounds - 1) for row in scores]
        routed = ClassCounts(*(sum(part[n, s] for n, s in enumerate(exits)) for part in records.counts))
        spent = np.mean([gmacs[n, s] for n, s in enumerate(exits)])
        points.append((spent, float(mean_iou(routed)), threshold, np.bincount(exits, minlength=rounds) / len(exits)))
    full = points[0][1]
    within = (values for values in points if values[1] >= full - max_drop - 1e-12)
    spent, miou, _, shares = min(within, key=lambda values: values[0])
    assert point.gmacs == pytest.approx(spent)
    assert point.miou == pytest.approx(miou)
    assert point.exit_shares == pytest.approx(tuple(shares))


# recipes


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"augment": {"erasing": 0.25}}, r"augment: .*scale, flip and photometric under task_options"),
        ({"data": {"in_memory_cache": "somewhere"}}, r"data\.in_memory_cache is not for segmentation; remove it"),
        ({"mixing": {"mixup": 0.8}}, "mixing: the task segmentation does not read this section"),
        ({"task_options": {"scales": [1, 2]}}, "task_options: scales: unknown key; did you mean 'scale'"),
        ({"task_options": {"scale": [2.0, 0.5]}}, "a range must go from small to large"),
        ({"task_options": {"flip": 1.5}}, "flip: input should be less than or equal to 1"),
        ({"task_options": {"stride": 0}}, "stride: input should be greater than 0"),
        ({"task_options": {"labels": "cityscapes"}}, "cityscapes is not a label file"),
        ({"task_options": {"labels": "camvid", "ignore": [0, 255]}}, r"labels and ignored values have 0 \(sky\)"),
        ({"task_options": {"ignore": []}}, r"00\.png has pixels of value 255, which no label names"),
        ({"optimizer": {"batch": 32}}, "larger than the dataset of 24"),
        ({"data": {"val": "test"}}, r"no images under images/test/; its splits are train, val"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(shapes, tmp_path, sections, message):
    with pytest.raises(ValueError, match=message):
        run(recipe(**sections), shapes, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({**PLAIN, "num_classes": 2}, r"the data has 3 classes and the head 2; set model\.num_classes=3 or null"),
        (
            {"kind": "early_exit", "fields": {"heads": 2, "depth": 2, "rounds": [{"resolution": 48, "blocks": 2}]}},
            "model: a model of kind early_exit cannot be built for segmentation; use another kind, such as",
        ),
    ],
)
def test_a_network_that_cannot_segment_the_data_is_refused(shapes, tmp_path, network, message):
    with pytest.raises(ValueError, match=message):
        run(recipe(model=network), shapes, tmp_path / "out")


def test_data_that_does_not_name_its_classes_is_refused(tmp_path):
    data = save_shapes(tmp_path / "data", train=8, val=2)
    (data / "labels.txt").unlink()
    with pytest.raises(ValueError, match=r"does not say what its classes are; add a file labels\.txt"):
        run(recipe(), data, tmp_path / "out")
    (tmp_path / "names.txt").write_text("\n".join(CLASSES))
    run(recipe(task_options={"labels": str(tmp_path / "names.txt")}), data, tmp_path / "out")


def test_validation_images_without_any_label_are_refused(shapes, tmp_path):
    data = save_shapes(tmp_path / "data", train=8, val=2)
    for path in (data / "annotations" / "val").iterdir():
        Image.fromarray(np.full_like(np.asarray(Image.open(path)), IGNORE)).save(path)
    with pytest.raises(ValueError, match=r"no pixel of the 2 validation images has a label; check their masks"):
        run(recipe(), data, tmp_path / "out")


def test_a_head_of_more_classes_than_the_data_has_is_allowed(shapes, tmp_path):
    model = progresvit.load(run(recipe(model={**PLAIN, "num_classes": 5}), shapes, tmp_path / "out"))
    assert (model.config.num_classes, model.config.class_ids) == (5, None)
    assert list(evaluations(tmp_path / "out")[-1]["iou"]) == ["0", "1", "2", "3", "4"]


def test_the_options_of_the_task_are_those_of_segmenter_by_default():
    options = SegmentationOptions()
    assert (options.scale, options.flip, options.photometric) == ((0.5, 2.0), 0.5, True)
    assert (options.ignore, options.stride, options.labels) == ((255,), 1.0, None)


@pytest.mark.parametrize(
    ("name", "rounds", "heads", "classes"),
    [
        ("camvid", [256, 384], [2, 3], 11),
        ("pets", [256, 384], [2, 3], 3),
        ("segmenter_448_576", [448, 576], [3, 6], 150),
    ],
)
def test_the_bundled_recipes_load(name, rounds, heads, classes):
    wanted, task = make_task(load_recipe(name))
    assert isinstance(task, Segmentation)
    with torch.device("meta"):
        model = build_model(wanted, tuple(f"class {number}" for number in range(classes)), task=task.model_task)
    assert model.config.task == "segmentation"
    assert [round_.resolution for round_ in model.config.rounds] == rounds
    assert [round_.heads for round_ in model.config.rounds] == heads
    task.setup(model, None, wanted, ALONE)


def test_the_recipe_of_the_paper_is_segmenters():
    wanted, task = make_task(load_recipe("segmenter_448_576"))
    optimizer, schedule = wanted.optimizer, wanted.schedule
    assert (optimizer.name, optimizer.lr, optimizer.momentum, optimizer.weight_decay) == ("sgd", 1e-3, 0.9, 0.0)
    assert optimizer.batch == optimizer.lr_batch == 8
    assert (schedule.name, schedule.by, schedule.power, schedule.min_lr) == ("poly", "step", 0.9, 1e-5)
    assert (schedule.warmup, schedule.cooldown, wanted.model.drop_path) == (0, 0, 0.1)
    assert 20_210 // optimizer.batch * wanted.epochs == pytest.approx(160_000, rel=0.02)
    assert task.options == SegmentationOptions(cat_max_ratio=0.75)
