"""Sets without splits: what training learns from and what is held back are drawn by name."""

import hashlib

import pytest

from progresvit.data.dataset import find_images
from progresvit.data.split import halves_by_name, hold_out
from tests.data.files import names, pack, save_files, save_image


def make_set(root, counts, *, below=""):
    for class_id, count in counts.items():
        folder = root / class_id / below
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            save_image(folder / f"{number}.png", colour=(number, 0, 0))
    return root


def test_train_and_val_share_out_the_whole_set_and_have_nothing_in_common(tmp_path):
    make_set(tmp_path, {"rex": 20, "bella": 7, "luna": 2})
    train, val, whole = (find_images(tmp_path, split) for split in ("train", "val", "."))
    assert train.class_ids == val.class_ids == ("bella", "luna", "rex")
    assert [val.targets.count(target) for target in range(3)] == [1, 1, 4]
    assert not {*names(train)} & {*names(val)}
    assert {*names(train), *names(val)} == {*names(whole)}
    assert (train.drawn_from, val.drawn_from, whole.drawn_from) == (29, 29, None)
    assert val.subset([0]).drawn_from == 29


def test_the_draw_goes_by_names_alone_so_it_is_the_same_elsewhere_and_in_a_tar(tmp_path):
    first = make_set(tmp_path / "here", {"rex": 20, "bella": 20})
    second = make_set(tmp_path / "there", {"bella": 20, "rex": 20})
    held_out = names(find_images(first, "val"))
    assert held_out == names(find_images(second, "val")) == names(find_images(pack(first), "val"))
    drawn = {name.split("/")[1] for name in held_out if name.startswith("rex")}
    assert drawn != {name.split("/")[1] for name in held_out if name.startswith("bella")}


def test_the_draw_is_what_it_was_in_earlier_versions():
    """Another draw would hand out as unseen what earlier models have learned from."""
    assert hold_out([f"rex/{number}.jpg" for number in range(10)], class_id="rex") == {"rex/1.jpg", "rex/7.jpg"}


def test_the_draw_is_the_same_where_names_are_spelled_as_on_a_mac():
    composed, apart = "rex/Zo\u00e9.jpg", "rex/Zoe\u0301.jpg"
    others = [f"rex/{number}.jpg" for number in range(20)]
    first, second = (hold_out([name, *others], class_id="rex") for name in (composed, apart))
    assert first - {composed} == second - {apart}
    assert (composed in first) == (apart in second)


@pytest.mark.parametrize(("count", "expected"), [(2, 1), (3, 1), (7, 1), (8, 2), (20, 4), (1000, 200)])
def test_a_fifth_is_held_out_and_one_at_least(count, expected):
    assert len(hold_out([str(number) for number in range(count)], class_id="rex")) == expected


@pytest.mark.parametrize(
    ("make", "splits", "expected"),
    [
        (
            lambda root: make_set(root, {"rex": 5, "bella": 1}),
            ("train", "val"),
            "the class bella has only one image; at least two are needed",
        ),
        (lambda root: make_set(root, {"rex": 5, "bella": 0}), ("train",), r"bella of .* hold no images; add some"),
        (
            lambda root: save_files(root, ["0.png", "1.png", "2.png"]),
            ("train", "val", "."),
            r"holds 3 images without class folders.* <class>/<image>",
        ),
        (lambda root: save_files(root.parent, [root.name]), ("train",), r"rex\.jpg is a file but not a tar; pass the"),
        (
            lambda root: save_files(root, ["train/1.png", "train/2.png", "val/1.png", "val/2.png"]),
            ("train",),
            "has train, val with images and no classes in them",
        ),
    ],
    ids=["one image", "empty class", "no folders", "a file", "splits without classes"],
)
def test_images_that_cannot_be_divided_are_refused(tmp_path, make, splits, expected):
    root = tmp_path / "rex.jpg"
    make(root)
    for split in splits:
        with pytest.raises(ValueError, match=expected):
            find_images(root, split)


def test_a_class_of_one_image_can_be_read_undivided(tmp_path):
    assert len(find_images(make_set(tmp_path, {"rex": 5, "bella": 1}), ".")) == 6


def test_where_there_are_splits_nothing_is_drawn(tmp_path):
    make_set(tmp_path, {"rex": 5, "bella": 5})
    make_set(tmp_path / "train", {"rex": 3})
    train = find_images(tmp_path, "train")
    assert (len(train), train.class_ids, train.drawn_from) == (3, ("rex",), None)
    with pytest.raises(ValueError, match=r"no images under val/<class>/; .*data\.val=.*/train, of which a part"):
        find_images(tmp_path, "val")


def test_splits_of_other_names_are_not_taken_for_classes(tmp_path):
    for split in ("training", "validation"):
        make_set(tmp_path / split, {"rex": 5, "bella": 5})
    with pytest.raises(ValueError, match=r"training, validation hold folders of images.*data\.train=…"):
        find_images(tmp_path, "train")
    assert len(find_images(tmp_path, "training")) == 10


def test_a_class_may_be_called_train_and_may_have_folders_of_its_own(tmp_path):
    make_set(tmp_path, {"train": 5, "car": 5})
    make_set(tmp_path, {"car": 5}, below="red")
    images = find_images(tmp_path, "train")
    assert images.class_ids == ("car", "train")
    assert (len(images), images.drawn_from) == (12, 15)


def test_what_systems_leave_behind_is_not_a_class_or_an_image(tmp_path):
    images = ["cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"]
    save_files(tmp_path / "set", [*images, "cat/._1.png", ".cache/1.png", "__MACOSX/cat/1.png"])
    for source in (tmp_path / "set", pack(tmp_path / "set")):
        assert names(find_images(source, ".")) == images


def test_halves_are_ranked_by_the_hash_of_the_name_whatever_the_order():
    ids = [f"{number % 7}/image_{number}.jpg" for number in range(11)]
    first, second = halves_by_name(ids)
    assert (len(first), len(second)) == (5, 6)
    assert sorted(first + second) == list(range(11))
    hashes = [hashlib.sha256(name.encode()).hexdigest() for name in ids]
    assert max(hashes[index] for index in first) < min(hashes[index] for index in second)
    turned = ids[::-1]
    assert {turned[index] for index in halves_by_name(turned)[0]} == {ids[index] for index in first}
