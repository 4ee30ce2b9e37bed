"""Batches after the evaluation crop: the same from files, from memory and on a GPU."""

import dataclasses

import pytest
import torch

from progresvit.data.dataset import find_images, find_unlabelled
from progresvit.data.evaluation_batches import evaluation_batches, in_memory_evaluation_batches, numbered_batches
from progresvit.data.in_memory import in_memory_for_evaluation
from progresvit.data.loading import Unreadable
from progresvit.data.transforms import NamedTransform
from tests.data import gpu_stand_ins
from tests.data.shapes import save_damaged, save_photos
from tests.factories import tiny_config

CPU = torch.device("cpu")
CONFIG = tiny_config(num_classes=4)


def test_evaluation_is_the_same_in_both_modes(digits):
    images = find_images(digits, "val")
    options = {"config": CONFIG, "batch": 10}
    unreadable = Unreadable(images)
    decoded = list(evaluation_batches(images, **options, workers=0, device=CPU, unreadable=unreadable))
    stored = in_memory_for_evaluation(images, config=CONFIG, device=CPU)
    assert [len(batch.targets) for batch in decoded] == [10, 10, 4]
    for left, right in zip(decoded, in_memory_evaluation_batches(stored, **options), strict=True):
        assert torch.equal(left.targets, right.targets)
        assert torch.allclose(left.images, right.images, atol=1e-6)


def test_evaluation_leaves_an_unreadable_image_out(digits, tmp_path):
    images = find_images(save_damaged(tmp_path, digits), "val")
    unreadable = Unreadable(images)
    batches = evaluation_batches(images, config=CONFIG, batch=64, workers=0, device=CPU, unreadable=unreadable)
    assert sum(len(batch.targets) for batch in batches) == 199
    assert len(in_memory_for_evaluation(images, config=CONFIG, device=CPU)) == 199
    assert len(unreadable.lines()) == 1


def test_a_dataset_without_a_readable_image_is_refused(tmp_path):
    (tmp_path / "torn.png").write_bytes(b"torn")
    images = find_unlabelled(tmp_path)
    batches = evaluation_batches(images, config=CONFIG, batch=64, workers=0, device=CPU, unreadable=Unreadable(images))
    with pytest.raises(ValueError, match=r"1 of 1 images cannot be read.*Repair or remove"):
        list(batches)


@pytest.mark.slow
def test_evaluation_batches_have_the_reference_crop_and_name_what_is_unreadable(digits, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    gpu_stand_ins.install(monkeypatch)
    photos = save_photos(tmp_path, digits)
    images = find_images(photos, "train")
    broken = dataclasses.replace(images.entries[3], path=str(photos / "none.jpg"))
    images = dataclasses.replace(images, entries=(*images.entries[:3], broken, *images.entries[4:]))
    groups = [list(range(20)), list(range(20, 23)), [3]]
    transform = NamedTransform(CONFIG)
    batches = list(numbered_batches(images, groups, transform=transform, workers=1, device=CPU, decode="gpu"))
    expected = list(numbered_batches(images, groups, transform=transform, workers=0, device=CPU))
    assert [batch.numbers for batch in batches] == [batch.numbers for batch in expected]
    assert [list(batch.unreadable) for batch in batches] == [[3], [], [3]]
    assert batches[2].pixels is None
    for left, right in zip(batches[:2], expected[:2]):
        assert (left.pixels.int() - right.pixels.int()).abs().max() <= 1
