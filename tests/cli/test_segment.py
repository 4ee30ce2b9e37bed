import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

import progresvit
from progresvit.analysis.overlay import class_shares, palette, short_percent
from progresvit.data.segmentation.windows import WindowOptions
from progresvit.model import ProgResViT
from tests.commands import refused, run, works
from tests.engine.test_segmentation_engine import CONFIGS, a_setting, made_images

NAMES = ("sky", "road", "tree")


@pytest.fixture
def network(randomize):
    torch.manual_seed(3)
    return randomize(ProgResViT(CONFIGS["two rounds"]))


@pytest.fixture
def folder(network, tmp_path):
    return progresvit.save(network, tmp_path / "segmenter")


@pytest.fixture
def photos(tmp_path):
    """Three images, one of them in a subfolder."""
    photos = tmp_path / "photos"
    (photos / "more").mkdir(parents=True)
    for name, image in zip(("a.png", "b.jpg", "more/a.png"), made_images([(90, 60), (48, 70), (60, 60)])):
        image.save(photos / name)
    return photos


def test_one_image_is_drawn_with_its_mask_and_described_in_a_line(folder, photos, tmp_path):
    out, mask = tmp_path / "new" / "overlay.png", tmp_path / "mask.png"
    image = photos / "a.png"
    words = ("segment", image, "--model", folder, "--threshold", 0, "--out", out, "--mask", mask, "--device", "cpu")
    (line,) = works(*words).strip().splitlines()
    (expected,) = progresvit.SegmentationEngine(folder, 0.0).segment([image])
    shares = class_shares(expected.labels, NAMES)
    classes = ", ".join(f"{shown.name} {short_percent(shown.share)}" for shown in shares)
    assert line == f"{image}: round 2 of 2, score {expected.score:.3f}, {expected.gmacs:.3f} GMACs: {classes}"
    read = Image.open(mask)
    assert read.mode == "P"
    assert np.array_equal(np.array(read), expected.labels)
    assert np.array_equal(np.array(read.convert("RGB")), palette()[expected.labels])
    assert Image.open(out).size[0] == 540  # 90 pixels, enlarged for the text


def test_a_folder_is_drawn_into_a_folder(folder, photos, tmp_path):
    out, masks = tmp_path / "out", tmp_path / "masks"
    output = works("segment", photos, "--model", folder, "--threshold", "1e9", "--out", out, "--mask", masks)
    names = ["a.png", "b.png", "more/a.png"]
    for drawn in (out, masks):
        assert sorted(path.relative_to(drawn).as_posix() for path in drawn.rglob("*.png")) == names
    assert np.array(Image.open(masks / "more" / "a.png")).shape == (60, 60)
    assert "b.jpg: round 1 of 2, score " in output
    assert "3 images: 3 after round 1, 0 after round 2; " in output
    assert "% saved" in output


def test_nothing_is_saved_if_all_images_run_all_rounds(folder, tmp_path):
    """The GMACs of 1, 3, 3 and 2 windows, added up, are rounded to more than those of 9 windows."""
    (tmp_path / "many").mkdir()
    for number, image in enumerate(made_images([(60, 60), (130, 60), (130, 60), (90, 60)])):
        image.save(tmp_path / "many" / f"{number}.png")
    output = works("segment", tmp_path / "many", "--model", folder, "--threshold", 0, "--out", tmp_path / "out")
    assert "4 images: 0 after round 1, 4 after round 2; " in output
    assert ", 0.0% saved" in output


def test_several_files_and_folders_and_tars_are_drawn_into_a_folder(folder, photos, tmp_path):
    with tarfile.open(tmp_path / "few.tar", "w") as tar:
        tar.add(photos / "b.jpg", "../in/b.jpg")
    out = tmp_path / "out"
    words = ("segment", tmp_path / "few.tar", "--model", folder, "--threshold", 0, "--out")
    works(*words, out, photos / "b.jpg", photos / "more")
    drawn = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.png"))
    assert drawn == ["a.png", "b.png", "few.tar/in/b.png"]
    works(*words, tmp_path / "of tar")
    assert (tmp_path / "of tar" / "few.tar" / "in" / "b.png").is_file()


def test_windows_and_the_format_are_chosen(folder, photos, tmp_path):
    out, mask = tmp_path / "overlay.jpg", tmp_path / "mask.png"
    words = ("--stride", 0.5, "--scales", "1,1.5", "--flip", "--precision", "bf16", "--batch", 3, "--workers", 1)
    image = photos / "a.png"
    words += ("--out", out, "--mask", mask, "--device", "cpu")
    works("segment", image, "--model", folder, "--threshold", 0, *words)
    windows = WindowOptions(stride=0.5, scales=(1.0, 1.5), flip=True)
    engine = progresvit.SegmentationEngine(folder, 0.0, windows=windows, precision="bf16", batch=3)
    assert np.array_equal(np.array(Image.open(mask)), engine.segment([image])[0].labels)
    assert Image.open(out).format == "JPEG"


def test_a_setting_is_used_and_another_stride_is_noted(network, folder, photos, tmp_path):
    image, out = photos / "a.png", tmp_path / "o.png"
    words = ("segment", image, "--model", folder, "--out", out, "--overwrite")
    output = works(*words)
    assert "note: every round runs, because" in output
    assert "round 2 of 2" in output
    (folder / "settings").mkdir()
    a_setting(network, threshold=1e9).save(folder / "settings" / "near-lossless.json")
    a_setting(network, threshold=0.0).save(folder / "settings" / "careful.json")
    result = run(*words)
    assert result.exit_code == 0
    assert "round 1 of 2" in result.output
    assert "calibrated by the rule near-lossless on 100 images" in result.output
    assert "note:" not in result.output
    assert "round 2 of 2" in works(*words, "--threshold", "careful")
    assert "note: the threshold was calibrated with other preprocessing" in works(*words, "--stride", 0.5)
    refused("it has careful, near-lossless", *words, "--threshold", "low")


@pytest.mark.slow
def test_a_setting_of_evaluated_images_lets_the_same_images_exit(network, folder, tmp_path):
    with torch.no_grad():
        network.head.weight *= 12
    progresvit.save(network, folder)
    data = tmp_path / "data"
    for kind in ("images", "annotations"):
        (data / kind / "val").mkdir(parents=True)
    (data / "labels.txt").write_text("\n".join(NAMES))
    for number, image in enumerate(made_images([(90, 60), (48, 70), (60, 60), (48, 48), (120, 50)] * 2)):
        image.save(data / "images" / "val" / f"{number}.png")
        Image.fromarray(np.array(image.convert("L")) % 3).save(data / "annotations" / "val" / f"{number}.png")
    records = tmp_path / "r.parquet"
    works("evaluate", folder, "--data", data, "--out", records, "--workers", 0, "--device", "cpu", "--stride", 0.5)
    works("calibrate", records, "--exit-share", 0.5, "--out", folder / "settings" / "half.json")
    words = ("segment", data / "images", "--model", folder, "--threshold", "half", "--device", "cpu")
    output = works(*words, "--out", tmp_path / "out", "--stride", 0.5)
    assert "10 images: 5 after round 1, 5 after round 2" in output
    assert "calibrated by the rule exit-share on 10 images" in output
    assert "note:" not in output
    assert "note:" in works(*words, "--out", tmp_path / "other")


def test_what_cannot_be_read_is_listed_and_the_rest_is_drawn(folder, photos, tmp_path):
    (photos / "cut.jpg").write_bytes((photos / "b.jpg").read_bytes()[:-300])
    (photos / "empty.png").write_bytes(b"")
    Image.new("RGB", (8, 30)).save(photos / "thin.png")
    out = tmp_path / "out"
    result = run("segment", photos, tmp_path / "none.png", "--model", folder, "--threshold", 0, "--out", out)
    assert result.exit_code == 1
    assert sorted(path.name for path in out.rglob("*.png")) == ["a.png", "a.png", "b.png"]
    for name, reason in (("cut.jpg", "truncated"), ("empty.png", "not an image"), ("thin.png", "smaller than a patch")):
        assert any(line.startswith(f"skipped: {name}: ") and reason in line for line in result.stderr.splitlines())
    assert f"skipped: {tmp_path / 'none.png'}: there is no such file" in result.stderr
    assert "3 images: " in result.stdout


def test_wrong_arguments_are_refused(folder, photos, tmp_path):
    image, out = photos / "a.png", tmp_path / "o.png"
    words = ("--model", folder, "--threshold", 0)
    assert "--model" in run("segment", image, "--out", out, "--threshold", 0).stderr
    refused("for one image it is a file (.png, .jpg, .jpeg), not a folder", "segment", image, "--out", tmp_path, *words)
    refused("for one image it is a file", "segment", image, "--out", tmp_path / "o.csv", *words)
    refused("--mask", "segment", image, "--out", out, "--mask", tmp_path / "m.jpg", *words)
    refused("for several images it is a folder", "segment", photos, "--out", out, *words)
    refused("for several images it is a folder", "segment", image, image, "--out", out, *words)
    refused("would be written twice", "segment", image, photos / "more", "--out", tmp_path / "o", *words)
    refused("would be written twice", "segment", image, "--out", out, "--mask", out, *words)
    refused("is one of the images", "segment", image, "--out", image, "--overwrite", *words)
    refused("above 0 and at most 1, a share of the window", "segment", image, "--out", out, "--stride", 2, *words)
    refused("scales must be at least 1", "segment", image, "--out", out, "--scales", "0.5,1", *words)
    refused("--scales takes comma-separated numbers", "segment", image, "--out", out, "--scales", "big", *words)
    refused("unknown precision", "segment", image, "--out", out, "--precision", "int4", *words)
    refused("must be at least 1, got 0", "segment", image, "--out", out, "--batch", 0, *words)
    refused("", "segment", image, "--out", out, "--model", tmp_path / "nowhere", "--threshold", 0)
    assert run("segment", image, *words).exit_code == 2  # without --out
    assert run("segment", image, "--out", out).exit_code == 2  # without --model
    assert not out.exists()


def test_existing_outputs_are_kept_without_overwrite(folder, photos, tmp_path):
    out = tmp_path / "out"
    words = ("segment", photos, "--model", folder, "--threshold", 0, "--out", out)
    works(*words)
    (out / "b.png").write_text("mine")
    refused("a.png already exists; use --overwrite", *words)
    assert (out / "b.png").read_text() == "mine"
    works(*words, "--overwrite")
    assert Image.open(out / "b.png").format == "PNG"


def test_models_of_the_other_task_lead_to_their_command(folder, model, photos, tmp_path):
    image = photos / "a.png"
    segment = ("segment", image, "--model", model, "--out", tmp_path / "o.png")
    refused("use progresvit.Engine, or progresvit classify", *segment)
    refused("use progresvit.SegmentationEngine, or progresvit segment", "classify", image, "--model", folder)
    refused("there is no export for segmentation; run the model", "export", folder, "--out", tmp_path / "export")


def test_classes_without_names_are_numbered(network, photos, tmp_path):
    unnamed = ProgResViT(network.config.replace(labels=None))
    unnamed.load_state_dict(network.state_dict())
    folder = progresvit.save(unnamed, tmp_path / "unnamed")
    output = works("segment", photos / "a.png", "--model", folder, "--threshold", 0, "--out", tmp_path / "o.png")
    assert ": class " in output
