"""scripts/resize_pets.py, on small made-up photographs."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from progresvit.data.segmentation import find_segmentation

SCRIPT = Path(__file__).parents[1] / "scripts" / "resize_pets.py"


def test_the_copy_is_a_dataset_of_the_same_images_with_values_of_the_trimaps(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "images").mkdir(parents=True)
    (source / "annotations" / "trimaps").mkdir(parents=True)
    names = ["Abyssinian_1", "Abyssinian_2", "pug_1"]
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    for name in names:
        Image.fromarray(pixels).save(source / "images" / f"{name}.jpg")
        trimap = np.ones((40, 60), np.uint8)
        trimap[:, 20:] = 3
        Image.fromarray(trimap).save(source / "annotations" / "trimaps" / f"{name}.png")
    (source / "annotations" / "trainval.txt").write_text("# a comment\n" + "".join(f"{n} 1 1 1\n" for n in names[:2]))
    (source / "annotations" / "test.txt").write_text(f"{names[2]} 1 1 1\n")
    command = [sys.executable, str(SCRIPT), str(source), str(out), "--side", "32"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"wrote 3 images and trimaps to {out}\n"
    image, mask = find_segmentation(out, "test").read_pair(0)
    assert image.size == (32, 32)
    assert set(np.unique(mask)) == {0, 2}  # pet and border, nothing between them
    assert len(find_segmentation(out, "trainval")) == 2
