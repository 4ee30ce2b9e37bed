"""The sample images and the images of tests/images: credits, labels, and the answers of the bundled models."""

import re
from pathlib import Path

import pytest
import timm
from PIL import Image

import progresvit
from progresvit.data.samples import sample_labels, samples_folder

UNKNOWN = Path(__file__).parent / "images"
"""Images that show none of the 1,000 ImageNet classes."""
BUNDLED = samples_folder().parent / "bundled"


def credit_rows(folder):
    """The cells of each image's row in CREDITS.md, by file name."""
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", (folder / "CREDITS.md").read_text(encoding="utf-8"), re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in rows}


def classify(model, folder, threshold=None):
    """Class id and prediction of every image in a folder, by file name."""
    engine = progresvit.Engine(BUNDLED / model, threshold)
    images = sorted(folder.glob("*.jpg"))
    return {
        path.name: (engine.config.class_ids[prediction.index], prediction)
        for path, prediction in zip(images, engine.classify(images), strict=True)
    }


@pytest.mark.parametrize("folder", [samples_folder(), UNKNOWN], ids=["samples", "unknown"])
def test_every_image_is_small_and_has_its_credit(folder):
    images = sorted(folder.glob("*.jpg"))
    assert sorted(credit_rows(folder)) == [path.name for path in images]
    assert {path.name for path in folder.iterdir()} - {path.name for path in images} <= {"CREDITS.md", "labels.json"}
    assert sum(path.stat().st_size for path in images) < 1.5e6
    for path in images:
        with Image.open(path) as image:
            assert (image.format, image.mode) == ("JPEG", "RGB")
            assert max(image.size) <= 512
            assert not image.getexif()


@pytest.mark.parametrize("folder", [samples_folder(), UNKNOWN], ids=["samples", "unknown"])
def test_every_credit_states_a_free_licence(folder):
    for *_, licence, source in credit_rows(folder).values():
        assert re.search(r"CC0|public domain|creativecommons\.org/licenses/by(-sa)?/", licence)
        assert re.search(r"(PyPI|Debian|Ubuntu) package|the same package", source)


def test_every_label_is_the_imagenet_class_that_its_credit_names():
    imagenet = timm.data.ImageNetInfo()
    credits_ = credit_rows(samples_folder())
    assert sorted(sample_labels()) == sorted(credits_)
    for name, class_ids in sample_labels().items():
        first_names = [imagenet.label_name_to_description(class_id).split(",")[0] for class_id in class_ids]
        assert " or ".join(first_names) == credits_[name][1]


def test_the_default_model_is_right_on_every_sample_and_some_exit_early():
    predictions = classify("imagenet-tiny", samples_folder())
    wrong = {name: p.label for name, (class_id, p) in predictions.items() if class_id not in sample_labels()[name]}
    assert wrong == {}
    exits = [prediction.exit_round for _, prediction in predictions.values()]
    assert min(exits.count(1), exits.count(2)) >= 3


def test_the_twenty_class_model_knows_the_dogs_among_the_samples():
    predictions = classify("nettewoof-tiny", samples_folder())
    assert predictions["golden_retriever.jpg"][1].label == "golden retriever"
    assert predictions["samoyeds.jpg"][1].label == "Samoyed"


@pytest.mark.parametrize("name", ["imagenet-tiny", "nettewoof-tiny"])
def test_careful_withholds_more_of_the_unknown_images_than_of_the_known_ones(name):
    classes = set(progresvit.load(BUNDLED / name).config.class_ids)
    withheld = {True: [], False: []}  # by whether the image shows one of the model's classes
    for folder in (samples_folder(), UNKNOWN):
        for image, (_, prediction) in classify(name, folder, "careful").items():
            withheld[bool(classes & set(sample_labels().get(image, ())))].append(prediction.abstained)
    known, unknown = (sum(withheld[is_known]) / len(withheld[is_known]) for is_known in (True, False))
    assert unknown >= 1 / 3
    assert known < unknown
