"""Training and evaluation batches that a GPU makes of files; stand-ins let a CPU pass for one."""

import dataclasses

import pytest
import torch
from PIL import Image

from progresvit.config import ModelConfig, make_rounds
from progresvit.data import gpu_decode
from progresvit.data.augment.classification import Augmentation
from progresvit.data.dataset import find_images
from progresvit.data.evaluation_batches import numbered_batches
from progresvit.data.sampler import EpochSampler
from progresvit.data.sources import GpuSource, classification_from_workers, plan_training
from progresvit.data.transforms import NamedTransform
from tests.data import gpu_stand_ins

pytest.importorskip("triton")
CPU = torch.device("cpu")
CONFIG = ModelConfig(rounds=make_rounds([16, 32], [1, 2]), heads=2, depth=1, patch_size=8, num_classes=4)
PLAIN = Augmentation(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0)
FULL = Augmentation(colour=(0.3, 0.3, 0.3), erasing=0.5)
RAND = Augmentation(rand_augment="rand-m9-mstd0.5-inc1", erasing=0.25)


@pytest.fixture
def stand_ins(monkeypatch):
    gpu_stand_ins.install(monkeypatch)


@pytest.fixture(scope="module")
def photos(tmp_path_factory, digits):
    """The digits as JPEGs of different shapes, and some as PNGs."""
    root = tmp_path_factory.mktemp("photos")
    for number, path in enumerate(sorted(digits.glob("train/*/*.png"))):
        target = root / path.relative_to(digits)
        target.parent.mkdir(parents=True, exist_ok=True)
        image = Image.open(path).convert("RGB").resize((50 + number % 5, 36 + number % 7))
        image.save(target) if number % 6 == 0 else image.save(target.with_suffix(".jpg"), quality=95)
    return root


def on_gpu(images, augmentation=FULL, ahead=2, workers=1, device=CPU, **order):
    plan = plan_training(CONFIG, augmentation, device, "gpu")
    sampler = EpochSampler(count=len(images), batch=12, **order)
    return GpuSource(images, sampler, plan=plan, augmentation=augmentation, workers=workers, device=device, ahead=ahead)


@pytest.mark.slow
def test_without_augmentation_the_batches_are_those_of_the_worker_processes(stand_ins, photos):
    images = find_images(photos, "train")
    sampler = EpochSampler(count=len(images), batch=12)
    plain = classification_from_workers(images, sampler, config=CONFIG, augmentation=PLAIN, workers=0, device=CPU)
    for one, other in zip(plain.steps(2, 6), on_gpu(images, PLAIN).steps(2, 6), strict=True):
        assert torch.equal(one[0].targets, other[0].targets)
        assert torch.allclose(one[0].images, other[0].images, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("augmentation", [FULL, RAND], ids=["colour", "rand_augment"])
def test_batches_of_a_step_do_not_depend_on_where_the_run_began_or_who_reads(stand_ins, photos, augmentation):
    images = find_images(photos, "train")
    whole = list(on_gpu(images, augmentation, workers=2).steps(0, 6))
    later = list(on_gpu(images, augmentation, ahead=0).steps(4, 6))
    for one, other in zip(whole[4:], later, strict=True):
        assert torch.equal(one[0].images, other[0].images)
        assert torch.equal(one[0].targets, other[0].targets)
    assert not torch.equal(whole[0][0].images, whole[4][0].images)  # another epoch


@pytest.mark.slow
def test_an_unreadable_image_is_replaced_by_the_next_and_listed(stand_ins, photos, monkeypatch):
    images = find_images(photos, "train")
    monkeypatch.setattr("progresvit.data.loading.Unreadable.limit", 0.1)
    broken = dataclasses.replace(images.entries[5], path=str(photos / "none.jpg"))
    entries = (*images.entries[:5], broken, *images.entries[6:])
    damaged = dataclasses.replace(images, entries=entries)
    batches = on_gpu(damaged, PLAIN, ahead=0)
    expected = on_gpu(dataclasses.replace(images, entries=(*entries[:5], entries[6], *entries[6:])), PLAIN, ahead=0)
    for one, other in zip(batches.steps(0, 4), expected.steps(0, 4), strict=True):
        assert torch.equal(one[0].images, other[0].images)
    assert list(batches.unreadable.reasons) == [5]
    assert "no such file" in batches.unreadable.lines()[0]


@pytest.mark.slow
def test_evaluation_batches_have_the_reference_crop_and_name_what_is_unreadable(stand_ins, photos):
    images = find_images(photos, "train")
    broken = dataclasses.replace(images.entries[3], path=str(photos / "none.jpg"))
    images = dataclasses.replace(images, entries=(*images.entries[:3], broken, *images.entries[4:]))
    groups = [list(range(20)), list(range(20, 23)), [3]]
    transform = NamedTransform(CONFIG)
    found = list(numbered_batches(images, groups, transform=transform, workers=1, device=CPU, decode="gpu"))
    expected = list(numbered_batches(images, groups, transform=transform, workers=0, device=CPU))
    assert [batch.numbers for batch in found] == [batch.numbers for batch in expected]
    assert [list(batch.unreadable) for batch in found] == [[3], [], [3]]
    assert found[2].pixels is None
    for one, other in zip(found[:2], expected[:2]):
        assert (one.pixels.int() - other.pixels.int()).abs().max() <= 1


def test_the_gpu_decodes_where_it_can_and_is_asked_for_otherwise_with_an_error(monkeypatch):
    assert plan_training(CONFIG, FULL, CPU, "auto") is None
    with pytest.raises(ValueError, match="decode=gpu is not possible here"):
        plan_training(CONFIG, FULL, CPU, "gpu")
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
    images, device = find_images(photos, "train"), torch.device("cuda")
    whole = list(on_gpu(images, augmentation, workers=2, device=device).steps(0, 6))
    later = list(on_gpu(images, augmentation, ahead=0, device=device).steps(4, 6))
    for one, other in zip(whole[4:], later, strict=True):
        assert torch.equal(one[0].images, other[0].images)
        assert torch.equal(one[0].targets, other[0].targets)
