"""Corrupted images on the disk, through the evaluations that read them."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from progresvit.config import ModelConfig, make_rounds
from progresvit.data.augment.corruption import Corruption
from progresvit.data.corrupted_cache import CorruptedCache
from progresvit.data.dataset import find_images
from progresvit.data.transforms import NamedTransform
from progresvit.evaluation import DataSource, EvalOptions, evaluate
from progresvit.model import ProgResViT
from tests.evaluation.test_run import ONE
from tests.factories import digits_config

FOG = Corruption("fog", 3)
COLUMNS = ("ids", "labels", "top5_labels", "top5_probabilities", "top10_entropy", "entropy", "statistics", "logits")


def make_model(randomize, seed=1, resolution=32):
    torch.manual_seed(seed)
    return randomize(ProgResViT(digits_config(resolutions=(16, resolution))))


@pytest.fixture
def photos(digits, tmp_path):
    """104 images of four classes; one is unreadable."""
    for digit in range(4):
        folder = tmp_path / "photos" / "val" / str(digit)
        folder.mkdir(parents=True)
        for number in range(26):
            shutil.copy(digits / "train" / str(digit) / f"{number % 12}.png", folder / f"{number}.png")
    (tmp_path / "photos" / "val" / "2" / "7.png").write_bytes(b"no image")
    return tmp_path / "photos"


def run(model, data, out, cache, corruption=FOG, **options):
    eval_options = EvalOptions(**{"workers": 0, "batch": 10, "keep_logits": True, "cache": cache} | options)
    source = DataSource(data=str(data), corruption=corruption)
    return evaluate(model, source, out, name="m", processes=ONE, options=eval_options)


def no_decoding(monkeypatch):
    def refuse(*_):
        raise AssertionError("an image was decoded")

    monkeypatch.setattr("progresvit.data.dataset.ImageDataset.read_image", refuse)


@pytest.mark.parametrize("workers", [0, 2])
def test_records_are_bit_identical_with_and_without_a_cache(randomize, photos, tmp_path, monkeypatch, workers):
    models = [make_model(randomize, seed) for seed in (1, 2)]
    plain = [run(model, photos, tmp_path / f"{number}.parquet", None) for number, model in enumerate(models)]
    filling = run(models[0], photos, tmp_path / "filling.parquet", tmp_path / "cache", workers=workers)
    no_decoding(monkeypatch)
    reading = run(models[1], photos, tmp_path / "reading.parquet", tmp_path / "cache")
    assert len(filling) == 103
    for without, cached in zip(plain, (filling, reading)):
        assert replace(without.header, date="") == replace(cached.header, date="")  # the unreadable image is listed
        for name in COLUMNS:
            assert getattr(without, name).tobytes() == getattr(cached, name).tobytes(), name
    assert not np.array_equal(filling.logits, reading.logits)


def test_an_evaluation_that_was_stopped_continues_from_the_cache(randomize, photos, tmp_path, monkeypatch):
    monkeypatch.setattr("progresvit.evaluation.parts.CHUNK", 20)
    model = make_model(randomize)
    whole = run(model, photos, tmp_path / "whole.parquet", None)
    forward, calls = ProgResViT.forward, []

    def stop_in_the_third_chunk(self, images):
        calls.append(len(images))
        if len(calls) == 6:
            raise KeyboardInterrupt
        return forward(self, images)

    monkeypatch.setattr(ProgResViT, "forward", stop_in_the_third_chunk)
    with pytest.raises(KeyboardInterrupt):
        run(model, photos, tmp_path / "r.parquet", tmp_path / "cache")
    no_decoding(monkeypatch)
    resumed = run(model, photos, tmp_path / "r.parquet", tmp_path / "cache")
    assert sum(calls[6:]) == 103 - 40 - 10  # two parts, and a batch of the third
    assert np.array_equal(resumed.logits, whole.logits)


def test_generating_that_was_stopped_leaves_nothing_and_starts_again(randomize, photos, tmp_path, monkeypatch):
    model, cache = make_model(randomize), tmp_path / "cache"
    whole = run(model, photos, tmp_path / "whole.parquet", None)
    corrupt, calls = Corruption.__call__, []

    def stop_at_the_80th(self, image, name):
        calls.append(name)
        if len(calls) == 80:
            raise KeyboardInterrupt
        return corrupt(self, image, name)

    with monkeypatch.context() as patched:
        patched.setattr(Corruption, "__call__", stop_at_the_80th)
        with pytest.raises(KeyboardInterrupt):
            run(model, photos, tmp_path / "r.parquet", cache)
    assert list(cache.iterdir()) == []
    assert np.array_equal(run(model, photos, tmp_path / "r.parquet", cache).logits, whole.logits)


def test_too_many_unreadable_images_are_an_error_and_are_not_kept(randomize, photos, tmp_path):
    (photos / "val" / "3" / "7.png").write_bytes(b"")
    with pytest.raises(ValueError, match="2 of 104 images cannot be read"):
        run(make_model(randomize), photos, tmp_path / "r.parquet", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def change_severity(folder):
    about = json.loads((folder / "about.json").read_text())
    (folder / "about.json").write_text(json.dumps({**about, "severity": 4}))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "images.npy").write_bytes((folder / "images.npy").read_bytes()[:-1]),
        lambda folder: (folder / "images.npy").unlink(),
        lambda folder: (folder / "about.json").write_text("{"),
        lambda folder: (folder / "about.json").write_text("[]"),
        lambda folder: np.save(folder / "images.npy", np.zeros((103, 3, 32, 32), np.uint8)),
        lambda folder: np.save(folder / "images.npy", np.zeros((104, 3, 32, 32), np.float32)),
        change_severity,
    ],
)
def test_a_damaged_or_foreign_cache_is_refused_with_the_remedy(randomize, photos, tmp_path, damage):
    model, cache = make_model(randomize), tmp_path / "cache"
    run(model, photos, tmp_path / "r.parquet", cache)
    (folder,) = cache.iterdir()
    damage(folder)
    with pytest.raises(ValueError, match=r"fog_3-32-\w+ is damaged .*; delete it, and the images are corrupted again"):
        run(model, photos, tmp_path / "r.parquet", cache, overwrite=True)
    shutil.rmtree(folder)
    run(model, photos, tmp_path / "r.parquet", cache, overwrite=True)


def test_every_input_and_corruption_has_a_folder_of_its_own(photos, tmp_path):
    images = find_images(photos, "val")

    def folder(corruption=FOG, images=images, resolution=32, **fields):
        sizes = {"rounds": make_rounds([16, resolution], [1, 2]), "heads": 2, "patch_size": 8, "num_classes": 4}
        config = ModelConfig(**sizes, **fields)
        return CorruptedCache(tmp_path, images, NamedTransform(config, corruption)).folder

    assert folder() == folder(mean=(0.1, 0.2, 0.3), depth=2)  # the same bytes
    changed = shutil.copytree(photos, tmp_path / "changed")
    Image.new("RGB", (9, 9)).save(changed / "val" / "0" / "0.png")
    others = [
        folder(resolution=40),
        folder(crop=0.5),
        folder(corruption=Corruption("fog", 4)),
        folder(corruption=Corruption("snow", 3)),
        folder(images=images.subset(range(50))),
        folder(images=find_images(changed, "val")),
    ]
    assert len({folder(), *others}) == 7


def test_clean_images_and_images_without_files_are_not_cached(randomize, photos, tmp_path):
    run(make_model(randomize), photos, tmp_path / "r.parquet", tmp_path / "cache", corruption=None)
    assert not (tmp_path / "cache").exists()
    images = find_images(photos, "val")
    elsewhere = replace(images, entries=tuple(replace(entry, path="hfds/nothing") for entry in images.entries))
    with pytest.raises(ValueError, match="cannot be cached; evaluate them without a cache"):
        CorruptedCache(tmp_path, elsewhere, NamedTransform(make_model(randomize).config, FOG))
