"""Both ways of feeding: the same images, the same evaluation, and images that cannot be read."""

import dataclasses
import os
import shutil

import pytest
import torch

from progresvit.config import ModelConfig, make_rounds
from progresvit.data.augment.classification import Augmentation, AugmentImages
from progresvit.data.augment.rand_augment import RandAugment
from progresvit.data.dataset import find_images
from progresvit.data.evaluation_batches import evaluation_batches, in_memory_evaluation_batches
from progresvit.data.in_memory import in_memory_for_evaluation, in_memory_for_training
from progresvit.data.loading import Unreadable
from progresvit.data.sampler import Draw, EpochSampler, mix_seed
from progresvit.data.sources import InMemorySource, classification_from_workers

CPU = torch.device("cpu")
CONFIG = ModelConfig(rounds=make_rounds([16, 32], [1, 2]), heads=2, depth=1, patch_size=8, num_classes=4)
PLAIN = Augmentation(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0)
FULL = Augmentation(colour=(0.3, 0.3, 0.3), erasing=0.5)
RAND = Augmentation(rand_augment="rand-m9-mstd0.5-inc1", colour=(0.3, 0.3, 0.3), erasing=0.5)


def loader(images, augmentation=FULL, workers=0, **order):
    order = EpochSampler(count=len(images), batch=8, **order)
    return classification_from_workers(
        images, order, config=CONFIG, augmentation=augmentation, workers=workers, device=CPU
    )


def in_memory(images, augmentation=FULL, **order):
    stored = in_memory_for_training(images, side=32, device=CPU)
    order = EpochSampler(count=len(stored), batch=8, **order)
    return InMemorySource(stored, order, AugmentImages(CONFIG, augmentation, device=CPU))


def test_without_augmentation_both_modes_give_the_same_batches(digits):
    images = find_images(digits, "train")
    for one, other in zip(loader(images, PLAIN).steps(0, 12), in_memory(images, PLAIN).steps(0, 12)):
        assert torch.equal(one[0].targets, other[0].targets)
        assert torch.allclose(one[0].images, other[0].images, atol=1e-5)


@pytest.mark.parametrize("augmentation", [FULL, RAND], ids=["colour", "rand_augment"])
@pytest.mark.parametrize("make", [loader, in_memory])
def test_batches_of_a_step_do_not_depend_on_where_the_run_began(digits, make, augmentation):
    images = find_images(digits, "train")
    whole = list(make(images, augmentation).steps(0, 9))
    later = list(make(images, augmentation).steps(7, 9))
    for one, other in zip(whole[7:], later):
        assert torch.equal(one[0].images, other[0].images)
    assert not torch.equal(whole[0][0].images, whole[6][0].images)  # another epoch


def test_workers_do_not_change_the_batches(digits):
    images = find_images(digits, "train")
    for one, other in zip(loader(images).steps(0, 4), loader(images, workers=2).steps(0, 4)):
        assert torch.equal(one[0].images, other[0].images)


def test_evaluation_is_the_same_in_both_modes(digits):
    images = find_images(digits, "val")
    wanted = {"config": CONFIG, "batch": 10}
    unreadable = Unreadable(images)
    one = list(evaluation_batches(images, **wanted, workers=0, device=CPU, unreadable=unreadable))
    other = list(in_memory_evaluation_batches(in_memory_for_evaluation(images, config=CONFIG, device=CPU), **wanted))
    assert [len(batch.targets) for batch in one] == [10, 10, 4]
    for left, right in zip(one, other):
        assert torch.equal(left.targets, right.targets)
        assert torch.allclose(left.images, right.images, atol=1e-6)


def test_rand_augment_of_the_in_memory_mode_is_that_of_single_images(digits):
    images = find_images(digits, "train")
    plain = next(in_memory(images, PLAIN).steps(0, 1))[0].images
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (CONFIG.mean, CONFIG.std))
    pixels = ((plain * std + mean) * 255).round().to(torch.uint8)
    wanted = PLAIN.model_copy(update={"rand_augment": "rand-m9-n3-p0.8-mstd0.5-inc1"})
    augmented = next(in_memory(images, wanted).steps(0, 1))[0].images
    seed = mix_seed(Draw.BATCH, 0, 0, 0)
    expected = RandAugment.parse("rand-m9-n3-p0.8-mstd0.5-inc1", CONFIG.mean)(pixels, seed)
    assert not torch.equal(expected, pixels)
    assert torch.allclose(augmented, (expected / 255 - mean) / std, atol=1e-6)


@pytest.mark.parametrize("make", [loader, in_memory])
def test_rand_augment_replaces_colour_jitter(digits, make):
    images = find_images(digits, "train")
    nothing = "rand-m9-p0.0-inc1"  # no operation is applied
    wanted = PLAIN.model_copy(update={"rand_augment": nothing, "colour": (0.9, 0.9, 0.9)})
    (augmented,), (plain,) = (next(make(images, augmentation).steps(0, 1)) for augmentation in (wanted, PLAIN))
    assert torch.allclose(augmented.images, plain.images, atol=1e-6)


def test_a_rand_augment_that_batches_cannot_have_is_refused_with_the_remedy(digits):
    with pytest.raises(ValueError, match=r"'t3a' is unknown there.*data\.mode=loader"):
        in_memory(find_images(digits, "train"), Augmentation(rand_augment="rand-m9-t3a"))


@pytest.fixture
def damaged(digits, tmp_path):
    """Two hundred images, one of them unreadable."""
    for split in ("train", "val"):
        for digit in range(4):
            folder = tmp_path / split / str(digit)
            folder.mkdir(parents=True)
            for number in range(50):
                shutil.copy(digits / "train" / str(digit) / f"{number % 12}.png", folder / f"{number}.png")
    (tmp_path / "train" / "2" / "7.png").write_bytes(b"not an image")
    (tmp_path / "val" / "2" / "7.png").write_bytes(b"")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("make", [loader, in_memory])
def test_an_unreadable_image_is_skipped_and_listed(damaged, make):
    batches = make(find_images(damaged, "train"))
    seen = sum(len(step[0].targets) for step in batches.steps(0, 25))
    assert seen == 200
    (line,) = batches.unreadable.lines()
    assert line.startswith("train/2/7.png: ")


def test_evaluation_crops_are_cached_by_their_preprocessing(digits, tmp_path, small_config, monkeypatch):
    images, cache = find_images(digits, "val"), str(tmp_path)
    decoded = in_memory_for_evaluation(images, config=small_config, device=CPU, cache=cache)
    other = in_memory_for_evaluation(images, config=small_config.replace(crop=0.5), device=CPU, cache=cache)
    assert not torch.equal(decoded.images, other.images)
    in_memory_for_training(images, side=32, device=CPU, cache=cache)  # whole images of the same side
    assert len(list(tmp_path.iterdir())) == 3
    with monkeypatch.context() as patched:
        patched.setattr("progresvit.data.dataset.ImageDataset.read_image", None)
        again = in_memory_for_evaluation(images, config=small_config, device=CPU, cache=cache)
    assert torch.equal(again.images, decoded.images)


def test_a_cache_gives_the_same_images_without_decoding_them_again(damaged, tmp_path, monkeypatch):
    images = find_images(damaged, "train")
    decoded = in_memory_for_training(images, side=32, device=CPU, cache=tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr("progresvit.data.dataset.ImageDataset.read_image", None)
        cached = in_memory_for_training(images, side=32, device=CPU, cache=tmp_path / "cache")
    for name in ("images", "sizes", "targets"):
        assert torch.equal(getattr(cached, name), getattr(decoded, name))
    assert cached.unreadable.lines() == decoded.unreadable.lines() != []

    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"is damaged .* delete it"):
        in_memory_for_training(images, side=32, device=CPU, cache=tmp_path / "cache")
    file.unlink()
    elsewhere = dataclasses.replace(images, entries=(dataclasses.replace(images.entries[0], path="hfds/nothing"),))
    with pytest.raises(ValueError, match=r"cannot be cached; remove data\.in_memory_cache"):
        in_memory_for_training(elsewhere, side=32, device=CPU, cache=tmp_path / "cache")

    changed = images.subset(range(len(images) - 1))
    assert len(in_memory_for_training(changed, side=32, device=CPU, cache=tmp_path / "cache")) == len(decoded) - 1
    assert in_memory_for_training(images, side=16, device=CPU, cache=tmp_path / "cache").images.shape[-1] == 16
    file = damaged / "train" / "0" / "0.png"
    shutil.copy(damaged / "train" / "1" / "0.png", file)
    os.utime(file, ns=(1, 1))
    again = in_memory_for_training(images, side=32, device=CPU, cache=tmp_path / "cache")
    assert not torch.equal(again.images, decoded.images)


def test_evaluation_leaves_an_unreadable_image_out(damaged):
    images = find_images(damaged, "val")
    unreadable = Unreadable(images)
    batches = evaluation_batches(images, config=CONFIG, batch=64, workers=0, device=CPU, unreadable=unreadable)
    assert sum(len(batch.targets) for batch in batches) == 199
    assert len(in_memory_for_evaluation(images, config=CONFIG, device=CPU)) == 199
    assert len(unreadable.lines()) == 1


@pytest.mark.parametrize("make", [loader, in_memory])
def test_more_than_one_in_a_hundred_stops_the_run(damaged, make):
    for number in (3, 9):
        (damaged / "train" / "1" / f"{number}.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match="3 of 200 images cannot be read"):
        list(make(find_images(damaged, "train")).steps(0, 25))


@pytest.mark.slow
def test_many_unreadable_images_in_a_row_are_passed_over(digits, tmp_path):
    for digit in range(4):
        folder = tmp_path / "train" / str(digit)
        folder.mkdir(parents=True)
        for number in range(300):
            shutil.copy(digits / "train" / str(digit) / f"{number % 12}.png", folder / f"{number:03}.png")
    for number in range(12):
        (tmp_path / "train" / "2" / f"{number:03}.png").write_bytes(b"not an image")
    batches = loader(find_images(tmp_path, "train"))
    assert sum(len(step[0].targets) for step in batches.steps(0, 150)) == 1200
    assert len(batches.unreadable.lines()) == 12


def test_an_image_that_may_not_be_read_is_unreadable(digits, monkeypatch):
    images = find_images(digits, "train")
    read = type(images).read

    def forbidden(self, index):
        if index == 3:
            raise PermissionError(13, "Permission denied")
        return read(self, index)

    monkeypatch.setattr(type(images), "read", forbidden)
    monkeypatch.setattr(Unreadable, "limit", 0.05)
    batches = loader(images)
    assert len(list(batches.steps(0, 6))) == 6
    assert batches.unreadable.lines() == ["train/0/11.png: cannot be read (Permission denied)"]
