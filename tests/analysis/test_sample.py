"""The images that an analysis looks at: chosen evenly, the same each time, with the model's classes."""

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from progresvit.analysis.sample import find_class, load_sample
from progresvit.config import ModelConfig, make_rounds
from progresvit.data.transforms import evaluation_transform
from progresvit.evaluation.source import DataSource

ROUNDS = {"rounds": make_rounds([16, 32], [1, 2]), "heads": 2, "depth": 1, "patch_size": 8}


def config_for(classes, **fields):
    ids = tuple(f"n{number:02d}" for number in range(classes))
    return ModelConfig(
        num_classes=classes, class_ids=ids, labels=tuple(f"bird {n}" for n in range(classes)), **ROUNDS, **fields
    )


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Twenty classes of eight images each; one class has three."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(20):
        folder = root / "val" / f"n{number:02d}"
        folder.mkdir(parents=True)
        for image in range(3 if number == 7 else 8):
            Image.fromarray(rng.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(folder / f"{image}.png")
    return root


def load(photos, config=None, **options):
    return load_sample(config or config_for(20), DataSource(data=str(photos)), workers=0, **options)


def test_classes_take_turns(photos):
    sample = load(photos, images=100)
    counts = Counter(sample.labels.tolist())
    assert len(sample) == 100
    assert set(counts) == set(range(20))
    assert counts[7] == 3
    assert {counts[number] for number in range(20) if number != 7} <= {5, 6}


def test_with_few_images_some_classes_are_drawn_with_five_each(photos):
    counts = Counter(load(photos, images=30).labels.tolist())
    assert len(counts) == 6
    assert set(counts.values()) <= {3, 5, 6}
    assert len(load(photos, images=1)) == 1


def test_all_images_are_taken_if_there_are_fewer(photos):
    assert len(load(photos, images=1000)) == 19 * 8 + 3


def test_the_choice_is_the_same_each_time_and_pixels_are_the_evaluation_crop(photos):
    sample, again = load(photos, images=40), load(photos, images=40)
    assert sample.ids == again.ids
    assert torch.equal(sample.pixels, again.pixels)
    config = config_for(20)
    for row in (0, 17, 39):
        image = Image.open(photos / sample.ids[row])
        assert torch.equal(sample.pixels[row], evaluation_transform(config, as_bytes=True)(image))
        assert sample.class_ids[int(sample.labels[row])] == sample.ids[row].split("/")[1]
    rows, images = list(sample.batches(config, torch.device("cpu")))[-1]
    assert torch.equal(images[-1], evaluation_transform(config)(Image.open(photos / sample.ids[-1])))
    assert rows.stop == 40


def test_classes_are_found_by_name_and_folder_name(photos):
    sample = load(photos, images=1000, classes=["Bird 3", "n07"])
    assert Counter(sample.labels.tolist()) == {3: 8, 7: 3}
    assert sample.class_names == {3: "bird 3", 7: "bird 7"}
    whole = load(photos, images=1000)
    assert whole.find_class("bird 12") == whole.find_class("N12") == 12
    assert set(whole.of_classes([3, 7]).ids) == set(sample.ids)


def test_a_name_of_two_classes_is_refused_unless_it_fits_one_exactly():
    names, ids = {0: "crane", 1: "crane", 2: "Cardigan", 3: "cardigan"}, {0: "n0", 1: "n1", 2: "n2", 3: "n3"}
    assert [find_class(name, names, ids) for name in ("Cardigan", "cardigan", "n1", "N1")] == [2, 3, 1, 1]
    with pytest.raises(ValueError, match="2 classes have the name 'crane'; give a folder name: 'n0' or 'n1'"):
        find_class("crane", names, ids)
    with pytest.raises(ValueError, match="2 classes have the name 'CARDIGAN'"):
        find_class("CARDIGAN", names, ids)
    many = {number: f"bird {number}" for number in range(1000)}
    with pytest.raises(ValueError, match="no class 'xyz'; they are of bird 0") as caught:
        find_class("xyz", many, many)
    assert len(str(caught.value)) < 200


def test_as_many_images_are_taken_as_asked_for(photos):
    for images in (2, 9, 31, 100, 155):
        assert len(load(photos, images=images)) == images
    assert len(set(load(photos, images=9).labels.tolist())) == 2


def test_an_unknown_class_is_refused_with_the_nearest_name(photos):
    with pytest.raises(ValueError, match="no class 'brid 3'; did you mean 'bird 3'"):
        load(photos, classes=["brid 3"])


def test_a_model_without_a_head_gets_the_classes_of_the_data(photos):
    sample = load(photos, ModelConfig(num_classes=0, **ROUNDS), images=100)
    assert sample.class_names[4] == sample.class_ids[4] == "n04"


def test_what_cannot_be_sampled_is_refused(photos):
    with pytest.raises(ValueError, match="segments images"):
        load(photos, ModelConfig(num_classes=3, task="segmentation", **ROUNDS))
    with pytest.raises(ValueError, match="at least one image, not 0"):
        load(photos, images=0)


def test_unreadable_images_are_left_out_and_listed(tmp_path):
    for number in range(2):
        (tmp_path / "val" / f"n0{number}").mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(tmp_path / "val" / f"n0{number}" / "good.png")
    (tmp_path / "val" / "n01" / "bad.png").write_text("no image")
    sample = load(tmp_path, config_for(2))
    assert sample.ids == ("val/n00/good.png", "val/n01/good.png")
    assert len(sample.unreadable) == 1
    assert sample.unreadable[0].startswith("val/n01/bad.png: ")
    for name in sample.ids:
        (tmp_path / name).write_text("no image")
    with pytest.raises(ValueError, match=r"none of 3 images .* can be read; the first: val/n00/good\.png"):
        load(tmp_path, config_for(2))
