"""Both ways of feeding: the same pictures, the same evaluation, and pictures that cannot be read."""

import shutil

import pytest
import torch

from progresvit.config import ModelConfig, make_rounds
from progresvit.data.augmentation import Augmentation
from progresvit.data.loader import LoaderBatches, Unreadable, evaluation_batches
from progresvit.data.order import Order
from progresvit.data.pictures import find_pictures
from progresvit.data.resident import (
    ResidentBatches,
    resident_evaluation_batches,
    resident_for_evaluation,
    resident_for_training,
)

CPU = torch.device("cpu")
CONFIG = ModelConfig(rounds=make_rounds([16, 32], [1, 2]), heads=2, depth=1, patch_size=8, num_classes=4)
PLAIN = Augmentation(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0)
FULL = Augmentation(colour=(0.3, 0.3, 0.3), erasing=0.5)


def loader(pictures, augmentation=FULL, workers=0, **order):
    order = Order(count=len(pictures), batch=8, **order)
    return LoaderBatches(
        pictures, config=CONFIG, augmentation=augmentation, order=order, resolution=32, workers=workers, device=CPU
    )


def resident(pictures, augmentation=FULL, **order):
    stored = resident_for_training(pictures, side=32, device=CPU)
    order = Order(count=len(stored), batch=8, **order)
    return ResidentBatches(stored, config=CONFIG, augmentation=augmentation, order=order, resolution=32)


def test_without_augmentation_both_modes_give_the_same_batches(digits):
    pictures = find_pictures(digits, "train")
    for one, other in zip(loader(pictures, PLAIN).steps(0, 12), resident(pictures, PLAIN).steps(0, 12)):
        assert torch.equal(one[0].targets, other[0].targets)
        assert torch.allclose(one[0].images, other[0].images, atol=1e-5)


@pytest.mark.parametrize("make", [loader, resident])
def test_batches_of_a_step_do_not_depend_on_where_the_run_began(digits, make):
    pictures = find_pictures(digits, "train")
    whole = list(make(pictures).steps(0, 9))
    later = list(make(pictures).steps(7, 9))
    for one, other in zip(whole[7:], later):
        assert torch.equal(one[0].images, other[0].images)
    assert not torch.equal(whole[0][0].images, whole[6][0].images)  # another epoch


def test_workers_do_not_change_the_batches(digits):
    pictures = find_pictures(digits, "train")
    for one, other in zip(loader(pictures).steps(0, 4), loader(pictures, workers=2).steps(0, 4)):
        assert torch.equal(one[0].images, other[0].images)


def test_evaluation_is_the_same_in_both_modes(digits):
    pictures = find_pictures(digits, "val")
    wanted = {"config": CONFIG, "batch": 10}
    unreadable = Unreadable(pictures)
    one = list(evaluation_batches(pictures, **wanted, workers=0, device=CPU, unreadable=unreadable))
    other = list(resident_evaluation_batches(resident_for_evaluation(pictures, config=CONFIG, device=CPU), **wanted))
    assert [len(batch.targets) for batch in one] == [10, 10, 4]
    for left, right in zip(one, other):
        assert torch.equal(left.targets, right.targets)
        assert torch.allclose(left.images, right.images, atol=1e-6)


def test_rand_augment_is_refused_in_the_resident_mode(digits):
    with pytest.raises(ValueError, match=r"augment\.rand_augment=null"):
        resident(find_pictures(digits, "train"), Augmentation(rand_augment="rand-m9-mstd0.5-inc1"))


def test_rand_augment_replaces_colour_jitter_in_the_loader(digits):
    wanted = Augmentation(rand_augment="rand-m9-mstd0.5-inc1", colour=(0.3, 0.3, 0.3))
    batches = next(iter(loader(find_pictures(digits, "train"), wanted).steps(0, 1)))
    assert batches[0].images.shape == (8, 3, 32, 32)


@pytest.fixture
def damaged(digits, tmp_path):
    """Two hundred pictures, one of them unreadable."""
    for split in ("train", "val"):
        for digit in range(4):
            folder = tmp_path / split / str(digit)
            folder.mkdir(parents=True)
            for number in range(50):
                shutil.copy(digits / "train" / str(digit) / f"{number % 12}.png", folder / f"{number}.png")
    (tmp_path / "train" / "2" / "7.png").write_bytes(b"not a picture")
    (tmp_path / "val" / "2" / "7.png").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize("make", [loader, resident])
def test_an_unreadable_picture_is_skipped_and_listed(damaged, make):
    batches = make(find_pictures(damaged, "train"))
    seen = sum(len(step[0].targets) for step in batches.steps(0, 25))
    assert seen == 200
    (line,) = batches.unreadable.lines()
    assert line.startswith("train/2/7.png: ")


def test_evaluation_leaves_an_unreadable_picture_out(damaged):
    pictures = find_pictures(damaged, "val")
    unreadable = Unreadable(pictures)
    batches = evaluation_batches(pictures, config=CONFIG, batch=64, workers=0, device=CPU, unreadable=unreadable)
    assert sum(len(batch.targets) for batch in batches) == 199
    assert len(resident_for_evaluation(pictures, config=CONFIG, device=CPU)) == 199
    assert len(unreadable.lines()) == 1


@pytest.mark.parametrize("make", [loader, resident])
def test_more_than_one_in_a_hundred_stops_the_run(damaged, make):
    for number in (3, 9):
        (damaged / "train" / "1" / f"{number}.png").write_bytes(b"not a picture")
    with pytest.raises(ValueError, match="3 of 200 pictures cannot be read"):
        list(make(find_pictures(damaged, "train")).steps(0, 25))


@pytest.mark.slow
def test_many_unreadable_pictures_in_a_row_are_passed_over(digits, tmp_path):
    for digit in range(4):
        folder = tmp_path / "train" / str(digit)
        folder.mkdir(parents=True)
        for number in range(300):
            shutil.copy(digits / "train" / str(digit) / f"{number % 12}.png", folder / f"{number:03}.png")
    for number in range(12):
        (tmp_path / "train" / "2" / f"{number:03}.png").write_bytes(b"not a picture")
    batches = loader(find_pictures(tmp_path, "train"))
    assert sum(len(step[0].targets) for step in batches.steps(0, 150)) == 1200
    assert len(batches.unreadable.lines()) == 12


def test_a_picture_that_may_not_be_read_is_unreadable(digits, monkeypatch):
    pictures = find_pictures(digits, "train")
    read = type(pictures).read

    def forbidden(self, index):
        if index == 3:
            raise PermissionError(13, "Permission denied")
        return read(self, index)

    monkeypatch.setattr(type(pictures), "read", forbidden)
    monkeypatch.setattr(Unreadable, "limit", 0.05)
    batches = loader(pictures)
    assert len(list(batches.steps(0, 6))) == 6
    assert batches.unreadable.lines() == ["train/0/11.png: cannot be read (Permission denied)"]
