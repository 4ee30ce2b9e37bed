"""The three sources of training batches, with the augmentation of each task: the same steps in every run."""

import dataclasses
from functools import partial

import pytest
import torch

from progresvit.data import gpu_decode
from progresvit.data.augment.classification import Augmentation, AugmentImages
from progresvit.data.augment.multicrop import MultiCrop, MultiCropOptions
from progresvit.data.augment.rand_augment import RandAugment
from progresvit.data.augment.segmentation import AugmentPairs, SegmentationAugmentation
from progresvit.data.dataset import find_images
from progresvit.data.in_memory import in_memory_for_training, load_whole
from progresvit.data.loading import Unreadable
from progresvit.data.sampler import Draw, EpochSampler, mix_seed
from progresvit.data.segmentation import find_segmentation
from progresvit.data.segmentation.sources import pairs_in_memory, segmentation_from_workers
from progresvit.data.sources import (
    GpuSource,
    InMemorySource,
    WorkerSource,
    classification_from_workers,
    plan_training,
)
from tests.data import gpu_stand_ins
from tests.data.shapes import save_photos, save_shapes
from tests.factories import tiny_config

CPU = torch.device("cpu")
CONFIG = tiny_config(num_classes=4)
SEGMENTER = CONFIG.replace(num_classes=3, task="segmentation")
PLAIN = Augmentation(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0)
FULL = Augmentation(colour=(0.3, 0.3, 0.3), erasing=0.5, erase_before_mixing=True)
RAND = FULL.model_copy(update={"rand_augment": "rand-m9-mstd0.5-inc1"})
PLAIN_PAIRS = SegmentationAugmentation(scale=(1.0, 1.0), flip=0.0, photometric=False)


def order_of(images, batch=8, **order):
    return EpochSampler(count=len(images), batch=batch, **order)


def from_workers(images, *, augmentation=FULL, workers=0, **order):
    return classification_from_workers(
        images, order_of(images, **order), config=CONFIG, augmentation=augmentation, workers=workers, device=CPU
    )


def from_memory(images, *, augmentation=FULL, **order):
    stored = in_memory_for_training(images, side=32, device=CPU)
    return InMemorySource(stored, order_of(stored, **order), AugmentImages(CONFIG, augmentation, device=CPU))


def from_gpu(images, *, augmentation=FULL, workers=1, ahead=2, device=CPU, **order):
    plan = plan_training(CONFIG, augmentation, device, "gpu")
    augment = AugmentImages(CONFIG, augmentation, device=device)
    order = order_of(images, **order)
    return GpuSource(images, order, plan=plan, augment=augment, workers=workers, device=device, ahead=ahead)


def crops_from_workers(images, *, workers=0, **order):
    augment = MultiCrop(CONFIG, MultiCropOptions(local_side=16, local_crops=2), device=CPU)
    load = partial(load_whole, images, 32)
    return WorkerSource(images, order_of(images, **order), load=load, augment=augment, workers=workers, device=CPU)


def crops_from_memory(images, **order):
    stored = in_memory_for_training(images, side=32, device=CPU)
    augment = MultiCrop(CONFIG, MultiCropOptions(local_side=16, local_crops=2), device=CPU)
    return InMemorySource(stored, order_of(stored, **order), augment)


def pairs_from_workers(images, *, augmentation=SegmentationAugmentation(), workers=0, **order):  # noqa: B008
    return segmentation_from_workers(
        images, order_of(images, **order), config=SEGMENTER, augmentation=augmentation, workers=workers, device=CPU
    )


def pairs_from_memory(images, *, augmentation=SegmentationAugmentation(), side=64, **order):  # noqa: B008
    stored = pairs_in_memory(images, config=SEGMENTER, side=side, device=CPU)
    return InMemorySource(stored, order_of(stored, **order), AugmentPairs(SEGMENTER, augmentation, device=CPU))


SOURCES = {
    "workers": from_workers,
    "memory": from_memory,
    "files by gpu": from_gpu,
    "crops from workers": crops_from_workers,
    "crops from memory": crops_from_memory,
    "pairs from workers": pairs_from_workers,
    "pairs from memory": pairs_from_memory,
}
WITH_WORKERS = ["workers", "files by gpu", "crops from workers", "pairs from workers"]
IN_MEMORY = ["memory", "crops from memory", "pairs from memory"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory, digits):
    return find_images(save_photos(tmp_path_factory.mktemp("photos"), digits), "train")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return find_segmentation(save_shapes(tmp_path_factory.mktemp("shapes")), "train")


@pytest.fixture
def stand_ins(monkeypatch):
    """Let the CPU pass for a GPU."""
    pytest.importorskip("triton")
    gpu_stand_ins.install(monkeypatch)


@pytest.fixture
def images(request, name):
    """The dataset of a source."""
    if name == "files by gpu":
        request.getfixturevalue("stand_ins")
        return request.getfixturevalue("photos")
    if name.startswith("pairs"):
        return request.getfixturevalue("shapes")
    return find_images(request.getfixturevalue("digits"), "train")


def each(names=SOURCES):
    """A table over sources; processes that decode for a GPU take a second to start."""
    cases = [pytest.param(name, marks=pytest.mark.slow) if name == "files by gpu" else name for name in names]
    return pytest.mark.parametrize("name", cases)


def are_equal(steps, others):
    return all(
        torch.equal(left, right)
        for step, other in zip(steps, others, strict=True)
        for batch, batch_of_other in zip(step, other, strict=True)
        for left, right in zip(batch, batch_of_other, strict=True)
    )


@each()
def test_batches_of_a_step_do_not_depend_on_where_the_run_began(name, images):
    make, epoch = SOURCES[name], len(images) // 8
    steps = list(make(images).steps(0, epoch + 3))
    assert are_equal(make(images).steps(epoch + 1, epoch + 3), steps[-2:])
    assert not are_equal(steps[:1], steps[epoch : epoch + 1])
    assert not are_equal(steps[:1], make(images, seed=1).steps(0, 1))


@each(["workers", "memory", "files by gpu"])
def test_rand_augment_of_a_step_does_not_depend_on_where_the_run_began(name, images):
    make = partial(SOURCES[name], augmentation=RAND)
    steps = list(make(images).steps(0, 8))
    assert are_equal(make(images).steps(6, 8), steps[6:])
    assert not are_equal(steps[:1], SOURCES[name](images).steps(0, 1))


@each()
def test_processes_share_the_micro_batches_of_one(name, images):
    make = SOURCES[name]
    (alone,) = make(images, accumulate=2).steps(0, 1)
    for rank in range(2):
        assert are_equal(make(images, processes=2, rank=rank).steps(0, 1), [[alone[rank]]])


@each(WITH_WORKERS)
def test_workers_do_not_change_the_batches(name, images):
    make = SOURCES[name]
    few, many = (0, 2) if name != "files by gpu" else (1, 2)
    assert are_equal(make(images, workers=few).steps(2, 5), make(images, workers=many).steps(2, 5))


@pytest.mark.slow
def test_steps_that_a_thread_makes_ahead_are_the_same(stand_ins, photos):
    assert are_equal(from_gpu(photos, ahead=0).steps(0, 3), from_gpu(photos, ahead=2).steps(0, 3))


def without_file(images, *indices):
    """The dataset, with images that do not exist at these indices."""
    entries = list(images.entries)
    for index in indices:
        entries[index] = dataclasses.replace(entries[index], path=f"{entries[index].path}.gone")
    return dataclasses.replace(images, entries=tuple(entries))


@each(WITH_WORKERS)
def test_an_unreadable_image_is_replaced_by_the_next_and_listed(name, images, monkeypatch):
    monkeypatch.setattr(Unreadable, "limit", 0.2)
    make = partial(SOURCES[name], ahead=0) if name == "files by gpu" else SOURCES[name]
    source = make(without_file(images, 5, 6))
    expected = make(images.subset([*range(5), 7, 7, *range(7, len(images))]))
    assert are_equal(source.steps(0, len(images) // 8), expected.steps(0, len(images) // 8))
    assert sorted(source.unreadable.reasons) == [5, 6]
    assert "o such file" in source.unreadable.lines()[0]


@each(IN_MEMORY)
def test_an_unreadable_image_is_left_out_of_the_memory_and_listed(name, images, monkeypatch):
    monkeypatch.setattr(Unreadable, "limit", 0.2)
    source = SOURCES[name](without_file(images, 5, 6))
    expected = SOURCES[name](images.subset([*range(5), *range(7, len(images))]))
    assert source.sampler.count == len(source.stored) == len(images) - 2
    assert are_equal(source.steps(0, 3), expected.steps(0, 3))
    assert [line.partition(":")[0] for line in source.unreadable.lines()] == [
        images.entries[index].name for index in (5, 6)
    ]


@each()
def test_more_than_one_in_a_hundred_stops_the_run(name, images):
    broken = without_file(images, 3, 9)
    with pytest.raises(ValueError, match=f"2 of {len(images)} images cannot be read, more than 1%: .*Repair or remove"):
        list(SOURCES[name](broken).steps(0, len(images) // 8))


@each()
def test_a_dataset_of_unreadable_images_stops_the_run(name, images, monkeypatch):
    monkeypatch.setattr(Unreadable, "limit", 0.99)
    broken = without_file(images, *range(len(images)))
    with pytest.raises(ValueError, match=rf"{len(images)} (of \d+ )?images can(not)? be read"):
        list(SOURCES[name](broken).steps(0, 1))


def test_an_image_that_may_not_be_read_is_unreadable(digits, monkeypatch):
    images = find_images(digits, "train")
    read = type(images).read

    def forbidden(self, index):
        if index == 3:
            raise PermissionError(13, "Permission denied")
        return read(self, index)

    monkeypatch.setattr(type(images), "read", forbidden)
    monkeypatch.setattr(Unreadable, "limit", 0.05)
    source = from_workers(images)
    assert len(list(source.steps(0, 6))) == 6
    assert source.unreadable.lines() == ["train/0/11.png: cannot be read (Permission denied)"]


# What the sources of a task have in common


def test_without_augmentation_memory_and_workers_give_the_same_batches(digits):
    images = find_images(digits, "train")
    for left, right in zip(
        from_workers(images, augmentation=PLAIN).steps(0, 12), from_memory(images, augmentation=PLAIN).steps(0, 12)
    ):
        assert torch.equal(left[0].targets, right[0].targets)
        assert torch.allclose(left[0].images, right[0].images, atol=1e-5)


@pytest.mark.slow
def test_without_augmentation_the_gpu_and_workers_give_the_same_batches(stand_ins, photos):
    expected = from_workers(photos, augmentation=PLAIN).steps(2, 6)
    for left, right in zip(expected, from_gpu(photos, augmentation=PLAIN).steps(2, 6), strict=True):
        assert torch.equal(left[0].targets, right[0].targets)
        assert torch.allclose(left[0].images, right[0].images, atol=1e-5)


def test_worker_processes_bring_the_same_crops_as_memory(digits):
    images = find_images(digits, "train")
    assert are_equal(crops_from_workers(images).steps(2, 5), crops_from_memory(images).steps(2, 5))


def test_rand_augment_in_memory_equals_rand_augment_of_the_images(digits):
    images = find_images(digits, "train")
    (plain,) = next(from_memory(images, augmentation=PLAIN).steps(0, 1))
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (CONFIG.mean, CONFIG.std))
    pixels = ((plain.images * std + mean) * 255).round().to(torch.uint8)
    notation = "rand-m9-n3-p0.8-mstd0.5-inc1"
    augmentation = PLAIN.model_copy(update={"rand_augment": notation})
    (augmented,) = next(from_memory(images, augmentation=augmentation).steps(0, 1))
    expected = RandAugment.parse(notation, CONFIG.mean)(pixels, mix_seed(Draw.BATCH, 0, 0, 0))
    assert not torch.equal(expected, pixels)
    assert torch.allclose(augmented.images, (expected / 255 - mean) / std, atol=1e-6)


@each(["workers", "memory", "files by gpu"])
def test_rand_augment_replaces_colour_jitter(name, images):
    nothing = "rand-m9-p0.0-inc1"  # no operation is applied
    replaced = PLAIN.model_copy(update={"rand_augment": nothing, "colour": (0.9, 0.9, 0.9)})
    (augmented,), (plain,) = (
        next(SOURCES[name](images, augmentation=augmentation).steps(0, 1)) for augmentation in (replaced, PLAIN)
    )
    assert torch.allclose(augmented.images, plain.images, atol=1e-6)


@each(["workers", "memory", "files by gpu"])
def test_a_source_erases_only_before_mixing(name, images):
    late = PLAIN.model_copy(update={"erasing": 1.0})
    early = late.model_copy(update={"erase_before_mixing": True})
    (plain,), (left,), (erased,) = (
        next(SOURCES[name](images, augmentation=augmentation).steps(0, 1)) for augmentation in (PLAIN, late, early)
    )
    assert torch.equal(left.images, plain.images)
    assert (erased.images != plain.images).flatten(1).any(dim=1).all()


def test_a_rand_augment_that_batches_cannot_have_is_refused_with_the_remedy(digits):
    with pytest.raises(ValueError, match=r"'t3a' is unknown there.*data\.mode=loader"):
        from_memory(find_images(digits, "train"), augmentation=Augmentation(rand_augment="rand-m9-t3a"))


# The GPU


def test_the_gpu_decodes_if_it_can_and_it_is_an_error_if_it_must_and_cannot(monkeypatch):
    assert plan_training(CONFIG, FULL, CPU, "auto") is None
    with pytest.raises(ValueError, match="decode=gpu is not possible here"):
        plan_training(CONFIG, FULL, CPU, "gpu")
    pytest.importorskip("triton")
    gpu_stand_ins.install(monkeypatch)
    assert plan_training(CONFIG, FULL, CPU, "auto") is not None
    assert plan_training(CONFIG, FULL, CPU, "cpu") is None
    other = Augmentation(rand_augment="rand-m9-t3a")  # the batch version does not know this set
    assert plan_training(CONFIG, other, CPU, "auto") is None
    with pytest.raises(ValueError, match="decode=cpu"):
        plan_training(CONFIG, other, CPU, "gpu")
    monkeypatch.setattr(gpu_decode, "_missing_for_jpegs", lambda: "this build of torchvision has no nvJPEG")
    assert plan_training(CONFIG, FULL, CPU, "auto") is None


@pytest.mark.gpu
@pytest.mark.parametrize("augmentation", [FULL, RAND], ids=["colour", "rand_augment"])
def test_batches_on_a_gpu_do_not_depend_on_where_the_run_began(photos, augmentation):
    make = partial(from_gpu, photos, augmentation=augmentation, device=torch.device("cuda"))
    steps = list(make(workers=2).steps(0, 8))
    assert are_equal(make(ahead=0).steps(6, 8), steps[6:])
