"""Images in memory: what is stored, and the cache of decoded images."""

import dataclasses
import os
import shutil

import pytest
import torch

from progresvit.data.dataset import find_images
from progresvit.data.in_memory import in_memory_for_evaluation, in_memory_for_training
from tests.data.shapes import save_damaged

CPU = torch.device("cpu")


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


def test_a_cache_gives_the_same_images_without_decoding_them_again(digits, tmp_path, monkeypatch):
    damaged = save_damaged(tmp_path / "data", digits)
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
