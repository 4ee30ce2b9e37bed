"""scripts/collect_photos.py, on small made-up sets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

SCRIPT = Path(__file__).parent.parent / "scripts" / "collect_photos.py"
CLASSES = ("n01440764", "n02088364")


@pytest.fixture
def public(tmp_path):
    """Each set with images of two classes. Of ImageNetV2, b-33 shares an image with a-44, and one file is missing."""
    v2 = tmp_path / "v2"
    subsets = {"a-44": ["a0", "a1", "a2", "shared"], "b-33": ["b0", "shared", "missing"], "c-12": ["a0", "c0"]}
    for name, images in subsets.items():
        listed = {"image_filenames": [[f"{image}{wnid}", wnid] for wnid in CLASSES for image in images]}
        path = v2 / "datasets" / f"imagenetv2-{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(listed))
    for image in sorted({image for images in subsets.values() for image in images} - {"missing"}):
        for wnid in CLASSES:
            save(v2 / "cache" / "imagenet2candidates_mturk" / f"{image}{wnid}.jpg", (600, 300))
    for wnid in CLASSES:
        save(tmp_path / "samples" / f"{wnid}_fish.JPEG", (300, 600))
        save(tmp_path / "dogs" / f"{wnid}-beagle" / f"{wnid}_7.jpg", (40, 30))
        for number in range(3):
            save(tmp_path / "tiny" / "train" / wnid / "images" / f"{wnid}_{number}.JPEG", (64, 64))
        save(tmp_path / "folder" / "train" / wnid / "x.webp", (224, 224))
        save(tmp_path / "folder" / "train" / wnid / "ILSVRC2012_val_00000293.webp", (224, 224))
        save(tmp_path / "folder" / "val" / wnid / "y.webp", (224, 224))
    return tmp_path


def save(path, size):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (200, 30, 30)).save(path)


def collect(public, *names, **options):
    arguments = [part for name in names for part in (f"--{name}", str(public / name))]
    arguments += [part for key, value in options.items() for part in (f"--{key}", str(value))]
    command = [sys.executable, SCRIPT, *arguments, "--processes", "1", "--out", str(public / "out")]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    print(run.stdout)
    return {
        split: sorted(path.name.replace(CLASSES[0], "") for path in (public / "out" / split / CLASSES[0]).glob("*"))
        for split in ("train", "val", "b33")
    }


def test_every_set_goes_to_its_split_and_test_images_stay_out_of_training(public):
    found = collect(public, "v2", "samples", "dogs", "tiny", "folder", **{"tiny-images": 2})
    assert found["b33"] == ["b0.jpg", "shared.jpg"]
    assert len(found["val"]) == 2
    from_v2 = {f"v2_{image}.webp" for image in ("a0", "a1", "a2", "c0")}
    assert set(found["val"]) < from_v2
    others = {"sample_.webp", "dogs__7.webp", "tiny__0.JPEG", "tiny__1.JPEG", "x.webp"}
    assert set(found["train"]) == others | (from_v2 - set(found["val"]))


def test_large_images_are_scaled_in_their_shape_and_small_ones_are_kept(public):
    collect(public, "v2", "dogs", side=100)
    sizes = {path.name[:2]: Image.open(path).size for path in (public / "out" / "train" / CLASSES[0]).iterdir()}
    assert sizes == {"v2": (141, 71), "do": (40, 30)}
    assert Image.open(public / "out" / "b33" / CLASSES[0] / f"b0{CLASSES[0]}.jpg").size == (600, 300)


def test_without_imagenet_v2_the_folders_own_validation_images_are_used(public):
    assert collect(public, "folder") == {"train": ["x.webp"], "val": ["y.webp"], "b33": []}


def test_a_damaged_image_is_named_and_a_second_run_copies_nothing_again(public, capsys):
    damaged = public / "dogs" / f"{CLASSES[0]}-beagle" / f"{CLASSES[0]}_8.jpg"
    damaged.write_bytes(b"not an image")
    assert collect(public, "dogs")["train"] == ["dogs__7.webp"]
    assert f"skipped: {damaged}" in capsys.readouterr().out
    kept = public / "out" / "train" / CLASSES[0] / f"dogs_{CLASSES[0]}_7.webp"
    kept.write_bytes(b"kept")
    collect(public, "dogs")
    assert kept.read_bytes() == b"kept"


def test_wrong_arguments_are_refused(public):
    with pytest.raises(SystemExit, match="give at least one of --v2"):
        collect(public)
    with pytest.raises(SystemExit, match="dags is not a folder"):
        collect(public, folder=public / "dags")
