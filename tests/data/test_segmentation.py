"""Datasets of images and masks: layouts, labels, and files that do not fit."""

import json
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from progresvit.data.dataset import UNLABELLED
from progresvit.data.decode import ImageError
from progresvit.data.segmentation import IGNORE, MaskError, SegmentationDataset, find_segmentation
from tests.data.files import names, pack, png_of, save_image

MASK = [[0, 1, 2], [2, 255, 0]]
SIZE = (3, 2)
MANY = "\n".join(map(str, range(256)))


def save_mask(path, rows=MASK, dtype=np.uint8):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.array(rows, dtype)).save(path)


def make_pairs(root, stems, *, labels="sky\nroad\ncar\n"):
    """Images and masks with the same names; the masks hold 0, 1, 2 and 255."""
    for stem in stems:
        save_image(root / "images" / f"{stem}.jpg", size=SIZE)
        save_mask(root / "annotations" / f"{stem}.png")
    if labels:
        (root / "labels.txt").write_text(labels)
    return root


def make_pets(root, *, breeds=("Abyssinian", "Egyptian_Mau"), folder="images"):
    lists = {"trainval": range(10), "test": range(10, 14)}
    for split, numbers in lists.items():
        lines = ["#Image CLASS-ID SPECIES BREED ID\n"]
        for breed in breeds:
            for number in numbers:
                save_image(root / folder / f"{breed}_{number}.jpg", size=SIZE)
                save_mask(root / "annotations" / "trimaps" / f"{breed}_{number}.png", [[1, 2, 3], [3, 2, 1]])
                lines.append(f"{breed}_{number} 1 1 1\n")
        (root / "annotations" / f"{split}.txt").write_text("".join(lines))
    return root


def make_ade(root):
    for split, stems in {"training": "ab", "validation": "c"}.items():
        for stem in stems:
            save_image(root / "images" / split / f"{stem}.jpg", size=SIZE)
            save_mask(root / "annotations" / split / f"{stem}.png", [[0, 1, 2], [150, 150, 1]])
    rows = [f"{number}\t0.1\t10\t1\tthing {number}" for number in range(3, 151)]
    header = ["Idx\tRatio\tTrain\tVal\tName", "1\t0.1576\t11664\t1172\twall", "2 \t0.1\t6046\t612\tbuilding, edifice "]
    (root / "objectInfo150.txt").write_text("\n".join([*header, *rows]) + "\n")
    return root


def test_images_and_masks_are_paired_by_name(tmp_path):
    make_pairs(tmp_path, ["train/b", "train/a", "train/city/c", "val/d"])
    save_mask(tmp_path / "annotations" / "train" / "without_image.png")
    train = find_segmentation(tmp_path, "train")
    assert names(train) == ["images/train/a.jpg", "images/train/b.jpg", "images/train/city/c.jpg"]
    assert [entry.name for entry in train.masks] == [
        "annotations/train/a.png",
        "annotations/train/b.png",
        "annotations/train/city/c.png",
    ]
    assert train.class_ids == ("sky", "road", "car")
    assert (train.values, train.ignored) == ((0, 1, 2), (255,))
    assert (set(train.targets), train.drawn_from) == ({UNLABELLED}, None)
    image, mask = train.read_pair(2)
    assert (image.mode, image.size) == ("RGB", (3, 2))
    assert (mask.dtype, mask.tolist(), mask.flags.writeable) == (np.uint8, MASK, True)
    assert names(find_segmentation(tmp_path, ".")) == [*names(train), "images/val/d.jpg"]


def test_a_tar_holds_the_same_dataset_as_its_folder(tmp_path):
    for source, splits in (
        (make_pairs(tmp_path / "split", ["train/a", "train/deep/b", "val/c"]), ("train", "val", ".")),
        (make_pairs(tmp_path / "flat", "abcdefghij"), ("train", "val", ".")),
        (make_ade(tmp_path / "ade"), ("train", "validation")),
        (make_pets(tmp_path / "pets"), ("train", "val", "trainval", "test")),
    ):
        tar = pack(source)
        for split in splits:
            folder, packed = find_segmentation(source, split), find_segmentation(tar, split)
            assert names(folder) == names(packed)
            assert [entry.name for entry in folder.masks] == [entry.name for entry in packed.masks]
            for field in ("class_ids", "targets", "drawn_from", "values", "ignored"):
                assert getattr(folder, field) == getattr(packed, field)
            for index in range(len(folder)):
                pairs = [dataset.read_pair(index) for dataset in (folder, packed)]
                assert pairs[0][0].tobytes() == pairs[1][0].tobytes()
                assert np.array_equal(pairs[0][1], pairs[1][1])


def test_a_subset_keeps_pairs_together(tmp_path):
    for number in range(4):
        save_image(tmp_path / "images" / f"{number}.png", size=SIZE, colour=(number, 0, 0))
        save_mask(tmp_path / "annotations" / f"{number}.png", [[number] * 3] * 2)
    (tmp_path / "labels.txt").write_text("a\nb\nc\nd")
    whole = find_segmentation(tmp_path, ".")
    some = whole.subset([3, 1])
    assert isinstance(some, SegmentationDataset)
    for index, number in enumerate((3, 1)):
        image, mask = some.read_pair(index)
        assert image.getpixel((0, 0)) == (number, 0, 0)
        assert (mask == number).all()
    assert len(some) == len(some.masks) == len(some.targets) == 2
    assert (some.class_ids, some.values, some.ignored) == (whole.class_ids, whole.values, whole.ignored)
    assert pickle.loads(pickle.dumps(some)) == some


def test_without_split_folders_a_fifth_is_held_out(tmp_path):
    make_pairs(tmp_path, [f"{number:02}" for number in range(20)])
    train, val, whole = (find_segmentation(tmp_path, split) for split in ("train", "val", "."))
    assert (len(train), len(val)) == (16, 4)
    assert not set(names(train)) & set(names(val))
    assert sorted(names(train) + names(val)) == names(whole)
    assert (train.drawn_from, val.drawn_from, whole.drawn_from) == (20, 20, None)
    for dataset in (train, val):
        for image, mask in zip(dataset.entries, dataset.masks):
            assert image.name.replace("images", "annotations").replace("jpg", "png") == mask.name


@pytest.mark.parametrize("mode", ["L", "P", "1", "I", "I;16"])
def test_masks_are_read_as_numbers_in_every_mode(tmp_path, mode):
    make_pairs(tmp_path, ["a"])
    rows = np.array([[0, 1, 0], [1, 1, 0]], np.uint8)
    path = tmp_path / "annotations" / "a.png"
    if mode == "P":
        mask = Image.fromarray(rows, "L").convert("P")
        mask.putpalette([9, 9, 9, 200, 0, 0])
    else:
        mask = Image.fromarray(rows.astype({"1": bool, "I": np.int32, "I;16": np.uint16}.get(mode, np.uint8)))
    assert mask.mode == mode
    mask.save(path, format="TIFF" if mode == "I" else "PNG")  # a PNG has no 32 bits
    assert find_segmentation(tmp_path, ".").read_mask(0).tolist() == rows.tolist()


@pytest.mark.parametrize(("depth", "row"), [(2, 0b00_01_10_00), (4, 0x12)])
def test_grey_masks_of_two_and_four_bits_are_not_scaled(tmp_path, depth, row):
    """Pillow scales them to 0..255, so that the label 3 of two bits would become the ignored 255."""
    width = 8 // depth
    make_pairs(tmp_path, [], labels="sky\nroad\ncar\n")
    save_image(tmp_path / "images" / "a.jpg", size=(width, 1))
    (tmp_path / "annotations").mkdir()
    content = png_of(width, 1, depth=depth, colour_type=0, rows=bytes([0, row]))
    (tmp_path / "annotations" / "a.png").write_bytes(content)
    _, mask = find_segmentation(tmp_path, ".").read_pair(0)
    assert mask.tolist() == ([[0, 1, 2, 0]] if depth == 2 else [[1, 2]])


def test_raw_values_of_sixteen_bits_become_class_indices(tmp_path):
    make_pairs(tmp_path, ["a"], labels=None)
    (tmp_path / "labels.json").write_text(json.dumps({"26000": "car", "7": "road", "300": "sky"}))
    save_mask(tmp_path / "annotations" / "a.png", [[7, 300, 26000], [65535, 0, 7]], np.uint16)
    dataset = find_segmentation(tmp_path, ".", ignore=(65535, 0))
    assert (dataset.class_ids, dataset.values) == (("road", "sky", "car"), (7, 300, 26000))
    assert dataset.read_mask(0).tolist() == [[0, 1, 2], [IGNORE, IGNORE, 0]]


def test_all_255_classes_are_kept_apart_from_ignored_pixels(tmp_path):
    make_pairs(tmp_path, ["a"], labels="\n".join(f"class {number}" for number in range(255)))
    save_mask(tmp_path / "annotations" / "a.png", [[254, 255, 0]] * 2)
    assert find_segmentation(tmp_path, ".").read_mask(0)[0].tolist() == [254, IGNORE, 0]


def save_wide_values(path):
    Image.fromarray(np.array([[0, -1, 65536]] * 2, np.int32)).save(path, format="TIFF")


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    return exif


BAD_FILES = {
    "an image of another size": (
        lambda image, mask: save_image(image, size=(5, 4)),
        r"annotations/a\.png is 3×2, and its image images/a\.jpg is 5×4",
    ),
    "an image that EXIF turns": (
        lambda image, mask: save_image(image, size=SIZE, exif=turned()),
        r"a\.png is 3×2, and its image images/a\.jpg is 2×3 \(after EXIF rotation\)",
    ),
    "an image that is text": (lambda image, mask: image.write_bytes(b"text"), "not an image"),
    "no image": (lambda image, mask: image.unlink(), "cannot be read"),
    "a mask that is cut off": (
        lambda image, mask: mask.write_bytes(mask.read_bytes()[:45]),
        r"a\.png is damaged or truncated",
    ),
    "a mask that is text": (lambda image, mask: mask.write_bytes(b"text"), r"a\.png is not an image"),
    "no mask": (lambda image, mask: mask.unlink(), r"a\.png cannot be read \(No such file"),
    "values of more than sixteen bits": (
        lambda image, mask: save_wide_values(mask),
        r"a\.png has pixels of value -1, 65536, which no label names",
    ),
    **{
        f"a mask of {mode}": (
            lambda image, mask, mode=mode: Image.new(mode, (3, 2)).save(mask),
            rf"a\.png has {mode} pixels.*8-bit grey or palette PNG",
        )
        for mode in ("RGB", "RGBA", "LA")
    },
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_pair_that_cannot_be_used_is_refused(tmp_path, name):
    make_pairs(tmp_path, ["a"])
    damage, expected = BAD_FILES[name]
    dataset = find_segmentation(tmp_path, ".")
    damage(tmp_path / "images" / "a.jpg", tmp_path / "annotations" / "a.png")
    of_image = name in ("an image that is text", "no image")  # such images may be left out; a wrong mask is an error
    with pytest.raises(ImageError if of_image else MaskError, match=expected) as error:
        dataset.read_pair(0)
    assert isinstance(error.value, ImageError) == of_image
    if name.startswith("an image"):
        assert dataset.read_mask(0).shape == (2, 3)


def test_a_value_that_no_label_names_is_refused(tmp_path):
    make_pairs(tmp_path, ["a"])
    save_mask(tmp_path / "annotations" / "a.png", [[0, 3, 4], [5, 9, 255]])
    expected = (
        r" has pixels of value 3–5, 9, .*3 classes are 0–2, ignored are 255; .*\(labels=… to .*\(ignore=… to .* train\)"
    )
    for source, place in ((tmp_path, "annotations/a.png"), (pack(tmp_path), f"a.png in {tmp_path}.tar")):
        with pytest.raises(MaskError, match=expected) as error:
            find_segmentation(source, ".").read_pair(0)
        assert place in str(error.value)
    assert IGNORE in find_segmentation(tmp_path, ".", ignore=(3, 4, 5, 9, 255)).read_mask(0)
    with pytest.raises(MaskError, match=r"value 3–5, 9, 255, .*ignored are none"):
        find_segmentation(tmp_path, ".", ignore=()).read_mask(0)


@pytest.mark.parametrize(
    ("images", "split", "expected"),
    [
        ("train/a train/b loose", "val", r"no images under images/val/; its splits are train, and '\.' for all"),
        ("train/a test/b", "val", r"no images under images/val/; its splits are test, train, and '\.'"),
        ("training/a validation/b", "train", r"under images/train/; its splits are training, validation, and '\.'"),
        ("a b", "test", r"under images/test/; its splits are train, val, and '\.'"),
    ],
)
def test_a_split_that_does_not_exist_is_refused_and_the_others_are_listed(tmp_path, images, split, expected):
    make_pairs(tmp_path, images.split())
    with pytest.raises(ValueError, match=expected):
        find_segmentation(tmp_path, split)


def test_images_without_a_mask_of_their_own_are_refused(tmp_path):
    make_pairs(tmp_path, ["train/a", "train/b", "train/c"])
    for name in "bc":
        (tmp_path / "annotations" / "train" / f"{name}.png").unlink()
    expected = r"images/train/b\.jpg of .* has no mask annotations/train/b\.png \(and 1 more images have none\)"
    with pytest.raises(ValueError, match=expected):
        find_segmentation(tmp_path, "train")
    save_image(tmp_path / "images" / "train" / "a.webp")
    with pytest.raises(ValueError, match=r"images/train/a\.jpg and images/train/a\.webp differ in the suffix only"):
        find_segmentation(tmp_path, "train")


def test_a_source_without_images_is_refused(tmp_path):
    with pytest.raises(ValueError, match="pass a folder, a tar, or a pattern"):
        find_segmentation(tmp_path / "nowhere", "train")
    save_image(tmp_path / "train" / "cat" / "a.jpg")
    with pytest.raises(ValueError, match=r"no images under images/; lay the data out as images/<split>/NAME\.jpg"):
        find_segmentation(tmp_path, "train")


@pytest.mark.parametrize("suffix", ["jpg", "jpeg", "bmp"])
def test_a_mask_that_is_not_a_png_is_refused_with_the_reason(tmp_path, suffix):
    make_pairs(tmp_path, ["train/a", "train/b"])
    save_mask(tmp_path / "annotations" / "train" / f"b.{suffix}")
    assert len(find_segmentation(tmp_path, "train")) == 2
    (tmp_path / "annotations" / "train" / "b.png").unlink()
    expected = (
        rf"b\.jpg of .* has no mask annotations/train/b\.png; annotations/train/b\.{suffix} exists, .*must be PNG"
    )
    for source in (tmp_path, pack(tmp_path)):
        with pytest.raises(ValueError, match=expected):
            find_segmentation(source, "train")


def test_hidden_files_are_skipped(tmp_path):
    make_pairs(tmp_path, ["train/a", "train/._a", "train/.cache/b"])
    make_pets(tmp_path / "pets")
    save_mask(tmp_path / "pets" / "annotations" / "trimaps" / "._Abyssinian_1.png")
    assert names(find_segmentation(tmp_path, "train")) == ["images/train/a.jpg"]
    assert len(find_segmentation(pack(tmp_path / "pets"), "trainval")) == 20


def test_label_files_are_found_at_the_top_or_given(tmp_path):
    make_pairs(tmp_path, ["a"], labels=" sky\r\nroad\r\ncar \r\n\r\n")
    assert find_segmentation(tmp_path, ".").class_ids == ("sky", "road", "car")
    label_file = tmp_path / "given.json"
    label_file.write_text('["x", "y", "z"]', encoding="utf-8-sig")
    dataset = find_segmentation(tmp_path, ".", labels=label_file)
    assert (dataset.class_ids, dataset.values) == (("x", "y", "z"), (0, 1, 2))
    label_file.write_text('{"10": "ten", "9": "nine"}')
    dataset = find_segmentation(tmp_path, ".", labels=str(label_file))
    assert (dataset.class_ids, dataset.values) == (("nine", "ten"), (9, 10))
    dataset = find_segmentation(tmp_path, ".", labels="camvid")
    assert (len(dataset.class_ids), dataset.class_ids[3], dataset.values[10]) == (11, "road", 10)


@pytest.mark.parametrize(
    ("files", "options", "expected"),
    [
        ({}, {}, r"labels\.txt with a class name per line.*labels\.json.*camvid, pets.*labels=…"),
        ({}, {"labels": "cityscapes"}, r"cityscapes is not a label file.*list \(camvid, pets, ade20k\) as labels="),
        ({}, {"labels": "ade20k"}, r"ade20k are read from objectInfo150\.txt"),
        (
            {"labels.txt": "sky", "labels.json": '["sky"]'},
            {},
            r"has labels\.txt and labels\.json; keep one.*\(labels=… to .*task_options\.labels",
        ),
        ({"labels.txt": MANY}, {}, r"the labels name 256 classes, and at most 255 .*\(ignore=… .*_options\.ignore"),
        ({"labels.txt": "sky"}, {"ignore": (-1,)}, "-1 cannot be a value of a mask"),
    ],
)
def test_missing_and_unsuitable_labels_are_explained(tmp_path, files, options, expected):
    make_pairs(tmp_path, ["a"], labels=None)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=expected):
        find_segmentation(tmp_path, ".", **options)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("labels.txt", "sky\n\nroad", "the raw value 1 has no name"),
        ("labels.txt", "sky\nroad\nsky ", "has the class sky twice"),
        ("labels.txt", "\n", "names no classes"),
        ("labels.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("labels.json", '["sky", ""]', "the raw value 1 has no name"),
        ("labels.json", '["sky", 7]', "the raw value 1 has no name (but 7)"),
        ("labels.json", '{"0": "sky", "0": "road"}', "names the raw value 0 twice"),
        ("labels.json", '{"sky": "0"}', "'sky' is not a raw value of a mask"),
        ("labels.json", '{"65536": "sky"}', "'65536' is not a raw value of a mask"),
        ("labels.json", '{"-1": "sky"}', "'-1' is not a raw value of a mask"),
        ("labels.json", '"sky"', "holds no labels"),
        ("labels.json", "sky", "is not valid JSON"),
    ],
)
def test_labels_that_cannot_be_used_are_refused(tmp_path, name, content, expected):
    make_pairs(tmp_path, ["a"], labels=None)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for source in (tmp_path, pack(tmp_path)):
        with pytest.raises(ValueError, match=f"{re.escape(name)}.* {re.escape(expected)}"):
            find_segmentation(source, ".")


def test_a_value_that_is_both_a_label_and_ignored_is_refused(tmp_path):
    make_pairs(tmp_path, ["a"], labels=None)
    (tmp_path / "labels.json").write_text('{"0": "sky", "1": "road", "2": "car", "255": "void"}')
    with pytest.raises(
        ValueError, match=r"labels and ignored values have 255 \(void\) in common.*\(ignore=… to evaluate"
    ):
        find_segmentation(tmp_path, ".")
    assert find_segmentation(tmp_path, ".", ignore=()).read_mask(0)[1].tolist() == [2, 3, 0]


def test_ade20k_as_released(tmp_path):
    make_ade(tmp_path)
    train, val = find_segmentation(tmp_path, "train"), find_segmentation(tmp_path, "val")
    assert names(train) == ["images/training/a.jpg", "images/training/b.jpg"]
    assert names(find_segmentation(tmp_path, "training")) == names(train)
    assert names(find_segmentation(tmp_path, "validation")) == names(val) == ["images/validation/c.jpg"]
    assert (len(train.class_ids), train.class_ids[:3]) == (150, ("wall", "building", "thing 3"))
    assert (train.values, train.ignored) == (tuple(range(1, 151)), (0, 255))
    assert train.read_mask(0).tolist() == [[IGNORE, 0, 1], [149, 149, 0]]
    assert find_segmentation(tmp_path, "train", labels="ade20k") == train
    with pytest.raises(ValueError, match="its splits are training, validation"):
        find_segmentation(tmp_path, "test")


@pytest.mark.parametrize("folder", ["images", "original"])
def test_pets_as_released(tmp_path, folder):
    make_pets(tmp_path, folder=folder)
    save_image(tmp_path / folder / "Abyssinian_99.jpg")  # in no list
    trainval, test, train, val = (find_segmentation(tmp_path, split) for split in ("trainval", "test", "train", "val"))
    assert [len(dataset) for dataset in (trainval, test, train, val)] == [20, 8, 16, 4]
    assert not set(names(train)) & set(names(val))
    assert sorted(names(train) + names(val)) == names(trainval)
    assert [dataset.drawn_from for dataset in (trainval, test, train, val)] == [None, None, 20, 20]
    assert [sum("Egyptian_Mau" in name for name in names(dataset)) for dataset in (train, val)] == [8, 2]
    assert (train.class_ids, train.values) == (("pet", "background", "border"), (1, 2, 3))
    assert train.masks[0].name == f"annotations/trimaps/{names(train)[0].split('/')[1][:-4]}.png"
    assert train.read_pair(0)[1].tolist() == [[0, 1, 2], [2, 1, 0]]


def test_the_drawn_pets_follow_from_their_names_in_either_folder(tmp_path):
    drawn = []
    for folder in ("images", "original"):
        val = find_segmentation(make_pets(tmp_path / folder, folder=folder), "val")
        drawn.append([name.removeprefix(f"{folder}/") for name in names(val)])
    assert drawn[0] == drawn[1]


def test_the_border_of_the_pets_can_be_ignored(tmp_path):
    make_pets(tmp_path)
    labels = tmp_path / "two.json"
    labels.write_text('{"1": "pet", "2": "background"}')
    dataset = find_segmentation(tmp_path, "test", labels=labels, ignore=(3, 255))
    assert dataset.class_ids == ("pet", "background")
    assert dataset.read_mask(0).tolist() == [[0, 1, IGNORE], [IGNORE, 1, 0]]
    with pytest.raises(MaskError, match=r"Abyssinian_10\.png has pixels of value 3, .*the 2 classes are 1–2"):
        find_segmentation(tmp_path, "test", labels=labels).read_mask(0)


def test_pets_that_are_incomplete_are_refused(tmp_path):
    make_pets(tmp_path)
    with pytest.raises(ValueError, match="has no split validation; use train, val, trainval or test"):
        find_segmentation(tmp_path, "validation")
    (tmp_path / "annotations" / "trimaps" / "Egyptian_Mau_11.png").unlink()
    with pytest.raises(ValueError, match=r"Egyptian_Mau_11\.jpg of .* has no mask annotations/trimaps/Egyptian_Mau_11"):
        find_segmentation(tmp_path, "test")
    (tmp_path / "images" / "Egyptian_Mau_3.jpg").unlink()
    expected = r"1 of the 20 names in annotations/trainval\.txt, the first is images/Egyptian_Mau_3\.jpg"
    for split in ("train", "val", "trainval"):
        with pytest.raises(ValueError, match=expected):
            find_segmentation(tmp_path, split)
    (tmp_path / "annotations" / "test.txt").unlink()
    with pytest.raises(ValueError, match=r"lacks annotations/test\.txt, the list of test"):
        find_segmentation(tmp_path, "test")


def test_the_module_needs_no_torch():
    code = "import sys, progresvit.data.segmentation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
