"""The script that fine-tunes starts on 3 classes of 20 images."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import progresvit
from progresvit.model import ProgResViT
from repro import own_images
from tests.factories import tiny_config

BREEDS = ("Abyssinian", "american_bulldog", "pug", "wheaten_terrier")
SHORT = ("schedule.epochs=1", "schedule.warmup=0", "data.in_memory_side=null")


@pytest.fixture
def pets(tmp_path):
    """Four breeds of 23 images; another file, and a breed of too few images."""
    folder = tmp_path / "pets"
    folder.mkdir()
    noise = np.random.default_rng(0)
    for name, count in {**dict.fromkeys(BREEDS, 23), "Sphynx": 20}.items():
        for number in range(count):
            pixels = noise.integers(0, 256, (36, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{name}_{number + 1}.jpg")
    (folder / "Abyssinian_100.mat").write_bytes(b"")
    return folder


@pytest.fixture
def start(tmp_path, randomize):
    """A micro model in a folder."""
    return progresvit.save(randomize(ProgResViT(tiny_config(num_classes=5))), tmp_path / "starts" / "micro")


def measure(pets, starts, out, *more):
    starts = [str(start) for start in starts]
    own_images.main(["--pets", str(pets), "--out", str(out), "--start", *starts, "--set", *SHORT, *more])
    return json.loads(out.read_text())


def names(folder):
    return {path.parent.name: {path.name for path in path.parent.iterdir()} for path in folder.glob("*/*")}


def test_a_draw_is_a_seed_and_test_images_are_the_others(pets, tmp_path):
    breeds = own_images.find_breeds(pets)
    assert set(breeds) == set(BREEDS)
    drawn = {}
    for draw in range(6):
        for again in ("a", "b"):
            images, test, classes = own_images.make_folders(tmp_path / f"{again}{draw}", breeds, draw)
            train, others = names(images), names(test)
            assert sorted(train) == sorted(others) == classes
            for breed in classes:
                assert (len(train[breed]), len(others[breed])) == (20, 3)
                assert train[breed] | others[breed] == {path.name for path in breeds[breed]}
            assert drawn.setdefault(draw, (train, others)) == (train, others)
    assert len({tuple(train) for train, _ in drawn.values()}) > 1
    with pytest.raises(ValueError, match="has 0 breeds with more than 20 images"):
        own_images.find_breeds(tmp_path)


def test_results_are_kept_until_weights_or_recipe_change(pets, start, tmp_path, randomize, monkeypatch, capsys):
    out = tmp_path / "own.json"
    first = measure(pets, [start], out, "--draws", "0", "1")
    assert [(result["start"], result["draw"]) for result in first] == [("micro", 0), ("micro", 1)]
    for result in first:
        assert (len(result["classes"]), result["images"], len(result["top1"])) == (3, 9, 2)
        assert sum(result["routed"]["exit_shares"]) == pytest.approx(1)
        assert result["gmacs"][0] <= result["routed"]["gmacs"] <= result["gmacs"][1]
    assert "| micro | mean of 2 draws |" in capsys.readouterr().out

    def refuse(*arguments):
        raise AssertionError("measured again")

    with monkeypatch.context() as patched:
        patched.setattr(own_images, "measure", refuse)
        assert measure(pets, [start], out, "--draws", "0", "1") == first
        for changed in ("seed=1", "optimizer.lr=1e-5"):
            with pytest.raises(AssertionError, match="measured again"):
                measure(pets, [start], out, changed)
        progresvit.save(randomize(ProgResViT(progresvit.load(start).config)), start)
        with pytest.raises(AssertionError, match="measured again"):
            measure(pets, [start], out, "--draws", "0")
    second = measure(pets, [start], out, "--draws", "0")
    assert {result["draw"]: result["weights"] == first[0]["weights"] for result in second} == {1: True, 0: False}


def test_a_start_that_is_no_model_folder_is_refused(pets, tmp_path):
    with pytest.raises(ValueError, match="there is no model folder or bundled model 'no_model'"):
        measure(pets, ["no_model"], tmp_path / "own.json")


def test_the_page_shows_the_results():
    root = Path(__file__).parents[2]
    results = json.loads((root / "repro" / "own_images.json").read_text())
    assert own_images.table(results) in (root / "docs" / "own_images.md").read_text()
    means = {
        start: sum(result["top1"][-1] for result in results if result["start"] == start) / 3
        for start in ("imagenet-tiny", "version-0.1")
    }
    assert means["imagenet-tiny"] >= means["version-0.1"] + 0.02
