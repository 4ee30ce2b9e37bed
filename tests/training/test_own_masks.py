"""Images and masks of your own, without splits: from the bundled model to a model that labels their pixels."""

import pytest
from PIL import Image

import progresvit
from progresvit.evaluation import read_segmentation_records
from progresvit.io.model_folder import DEFAULT_MODEL
from progresvit.training.recipe import load_recipe
from tests.commands import refused, works
from tests.data.shapes import CLASSES, SIZES, draw_shape, save_pair


@pytest.fixture
def own_masks(tmp_path):
    """Ten images with masks of three classes, of which two are drawn for validation."""
    for number in range(10):
        save_pair(tmp_path / "data", f"{number:02}", *draw_shape(number, SIZES[number % len(SIZES)]))
    (tmp_path / "data" / "labels.txt").write_text("\n".join(CLASSES))
    return tmp_path / "data"


@pytest.mark.slow
def test_own_masks_to_a_segmented_image_in_four_commands(own_masks, tmp_path):
    """The recipe itself, for one epoch of two steps."""
    assert load_recipe("own_masks").model.start == DEFAULT_MODEL
    short = ("--device", "cpu", "--set", "schedule.epochs=1", "--set", "optimizer.batch=4")
    works("train", "own_masks", "--data", own_masks, "--out", tmp_path / "run", *short)
    model, records = tmp_path / "run" / "model", tmp_path / "val.parquet"
    config, start = progresvit.load(model).config, progresvit.load().config
    assert (config.task, config.labels, config.rounds) == ("segmentation", CLASSES, start.rounds)
    works("evaluate", model, "--data", own_masks, "--out", records, "--workers", 0, "--device", "cpu")
    table = read_segmentation_records(records)
    assert (len(table), table.header.drawn_from) == (2, 10)
    works("calibrate", records, "--near-lossless", "--out", model / "settings" / "near-lossless.json")
    image, overlay = own_masks / "images" / "03.png", tmp_path / "overlay.png"
    works("segment", image, "--model", model, "--out", overlay, "--device", "cpu")
    assert Image.open(overlay).size[0] >= Image.open(image).size[0]


def test_a_mask_of_another_size_than_its_image_is_named(own_masks, tmp_path):
    mask = own_masks / "annotations" / "04.png"
    Image.open(mask).resize((20, 30), Image.Resampling.NEAREST).save(mask)
    image = Image.open(own_masks / "images" / "04.png")
    refused(
        f"the mask {mask} is 20×30, and its image images/04.png is {image.width}×{image.height} (after EXIF rotation); "
        "give both the same size and orientation.",
        *("train", "own_masks", "--data", own_masks, "--out", tmp_path / "run", "--device", "cpu"),
    )
    assert not (tmp_path / "run").exists()
