import copy
import io
import os
import pickle
import shutil
import sys
import tarfile
import tracemalloc
from dataclasses import replace

import pytest
from PIL import Image

from progresvit.data.dataset import (
    SUFFIXES,
    UNLABELLED,
    Entries,
    Entry,
    find_images,
    find_listed,
    find_unlabelled,
    unlabelled,
)
from progresvit.data.decode import decode
from tests.data.files import names, pack, save_files, saved


def png(colour="red"):
    return saved(Image.new("RGB", (4, 4), colour), "PNG")


def make_tar(path, files, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_a_folder_is_read_in_sorted_order(digits):
    images = find_images(digits, "train")
    assert images.class_ids == ("0", "1", "2", "3")
    assert len(images) == 48
    assert list(images.targets) == sorted(images.targets)
    assert decode(images.read(7)).size == (32, 32)


def test_several_tars_are_one_set_and_other_tars_are_passed_over(tmp_path):
    make_tar(tmp_path / "train-0.tar", {"train/cat/a.png": png("red"), "train/dog/b.png": png("lime")})
    make_tar(tmp_path / "train-1.tar", {"./train/cat/c.png": png("blue"), "train/README": b"text"})
    make_tar(tmp_path / "val.tar", {"val/dog/d.png": png("white")})
    make_tar(tmp_path / "scenes.tar", {"images/train/e.png": png()})
    for source in (tmp_path, f"{tmp_path}/*.tar"):
        train = find_images(source, "train")
        assert train.class_ids == ("cat", "dog")
        assert names(train) == ["train/cat/a.png", "train/cat/c.png", "train/dog/b.png"]
        assert [decode(train.read(i)).getpixel((0, 0)) for i in range(3)] == [(255, 0, 0), (0, 0, 255), (0, 255, 0)]
        val = find_images(source, "val", train.class_ids)
        assert list(val.targets) == [1]


def test_hugging_face_data_sets_come_through_timm(digits, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    images = find_images(f"hfds/{digits}", "train")
    assert images.class_ids == ("0", "1", "2", "3")
    assert len(images) == 48
    some = images.subset([3, 40])
    assert decode(some.read(1)).size == (32, 32)
    assert some.targets[1] == images.targets[40]


def test_web_data_set_shards(tmp_path):
    make_tar(
        tmp_path / "set-train-0.tar", {"./a.png": png("red"), "./a.cls": b"1", "b.cls": b"0", "b.png": png("blue")}
    )
    images = find_images(f"wds/{tmp_path}", "train")
    assert (images.class_ids, images.targets) == (("0", "1"), (1, 0))
    assert decode(images.read(1)).getpixel((0, 0)) == (0, 0, 255)


@pytest.mark.parametrize(
    ("source", "shard", "remedy"),
    [
        ("tfds/mnist", None, "use hfds"),
        ("wds/nowhere", None, "no shards"),
        ("hfds/./nowhere", None, "could not be opened"),
        ("wds/{}", {"a.png": png()}, r"no \.cls next to it"),
        ("wds/{}", {"./a.txt": b"text"}, "hold no images"),
        ("wds/{}", {"a.png": png(), "a.cls": b"cat"}, r"a\.cls is not the number of a class"),
        ("wds/{}", b"not a tar" * 100, "copy or unpack it again"),
    ],
)
def test_timm_datasets_that_cannot_be_read_are_refused(tmp_path, source, shard, remedy):
    if isinstance(shard, bytes):
        (tmp_path / "train-0.tar").write_bytes(shard)
    elif shard:
        make_tar(tmp_path / "train-0.tar", shard)
    with pytest.raises(ValueError, match=remedy):
        find_images(source.format(tmp_path), "train")


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda root: root.rmdir(), "pass a folder, a tar, or a pattern"),
        (lambda root: None, "under train/<class>/"),
        (lambda root: (root / "train" / "dog").mkdir(parents=True), r"dog of .* hold no images"),
        (lambda root: (root / "train.tar").write_bytes(b"not a tar" * 100), "copy or unpack it again"),
        (lambda root: make_tar(root / "train.tar", {"train/cat/a.png": png()}, mode="w:gz"), "compressed"),
    ],
    ids=["nowhere", "empty", "empty class", "damaged tar", "compressed tar"],
)
def test_images_that_cannot_be_read_are_refused(tmp_path, make, remedy):
    root = tmp_path / "data"
    root.mkdir()
    make(root)
    with pytest.raises(ValueError, match=remedy):
        find_images(root, "train")


def test_a_class_that_training_lacks_is_refused(digits):
    with pytest.raises(ValueError, match="val has classes that the training split lacks: 3"):
        find_images(digits, "val", ("0", "1", "2"))


def test_a_tar_beside_its_contents_counts_once(tmp_path):
    make_tar(tmp_path / "train.tar", {"train/cat/a.png": png(), "train/cat/b.png": png()})
    shutil.unpack_archive(tmp_path / "train.tar", tmp_path)
    assert len(find_images(tmp_path, "train")) == 2


def test_images_without_labels_are_found_however_deep(tmp_path):
    save_files(tmp_path, ["a/b/1.png", "a/2.JPG", "3.webp", "notes.txt"], b"x")
    images = find_unlabelled(tmp_path)
    assert sorted(names(images)) == ["3.webp", "a/2.JPG", "a/b/1.png"]
    assert set(images.targets) == {UNLABELLED}
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        tar.add(tmp_path / "a", "a")
    packed = find_unlabelled(tmp_path / "t.tar")
    assert sorted(names(packed)) == ["t.tar/a/2.JPG", "t.tar/a/b/1.png"]
    assert packed.read(0) == b"x"


def test_a_folder_is_listed_in_the_order_of_the_parts_of_the_paths(tmp_path):
    save_files(tmp_path, ["a/b.png", "a-b/c.png", "a.png", "ä/1.JPG", "b/.png", "b/x.png.", "b/..png", ".h/2.gif"])
    (tmp_path / "a" / "b").mkdir()
    (tmp_path / "link.png").symlink_to(tmp_path / "a.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "round.png").symlink_to(tmp_path / "round.png")
    (tmp_path / "folder").symlink_to(tmp_path / "a")
    (tmp_path / "folder.png").mkdir()
    expected = [
        path.relative_to(tmp_path).as_posix()
        for path in sorted(tmp_path.rglob("*"))
        if path.suffix.lower() in SUFFIXES and path.is_file()
    ]
    images = find_unlabelled(tmp_path)
    assert names(images) == expected
    assert {"a-b/c.png", "link.png", ".h/2.gif", "b/..png"} < set(expected)
    assert [entry.path for entry in images.entries] == [str(tmp_path / name) for name in expected]
    assert find_unlabelled(f"{tmp_path}/").entries == images.entries


def test_the_current_folder_is_listed_without_a_prefix(tmp_path, monkeypatch):
    (tmp_path / "1.png").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    assert find_unlabelled(".").entries == (Entry("1.png", "1.png"),)


def test_subfolders_that_vanish_while_a_folder_is_listed_are_left_out(tmp_path, monkeypatch):
    save_files(tmp_path, ["a/1.png", "b/2.png"], b"x")
    scan = os.scandir

    def vanishing(path):
        if path == os.path.join(tmp_path, "b", ""):
            os.rename(path, tmp_path / "elsewhere")
        return scan(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert names(find_unlabelled(tmp_path)) == ["a/1.png"]


MANY = (
    Entry("/data/a/1.png", "a/1.png"),
    Entry("/data/a/2.png", "a/2.png"),
    Entry("/data/ü\udcff\n.png", "ü\udcff\n.png"),
    Entry("x.png", "x.png"),
    Entry("/data/t.tar", "t.tar/a.png", 512, 77),
    Entry("/data/t.tar", "t.tar/b.png", 2**40, 0),
    Entry("/home/me/b.png", "~/b.png"),
    Entry("hfds/set", "set/train/0"),
    Entry("", ""),
    Entry("/data/b/3.png", "given/b/3.png"),
    Entry("/data/b/3.png", "b/3.png", 5),
)


@pytest.mark.parametrize("count", range(len(MANY) + 1))
def test_compact_entries_equal_the_entries_they_were_made_of(count):
    for originals in (MANY[:count], MANY[::-1][:count]):
        entries = Entries(originals)
        assert len(entries) == count
        assert tuple(entries) == originals
        assert entries == originals
        assert originals == entries
        assert entries == Entries(originals)
        assert hash(entries) == hash(originals)
        assert [entries[index] for index in range(-count, count)] == [*originals, *originals]
        for part in (slice(1, 4), slice(None, None, -1), slice(-3, None), slice(2, 9, 3), slice(4, 2)):
            assert entries[part] == originals[part]
            assert entries[part][1:] == originals[part][1:]
        assert entries + MANY == originals + MANY == originals + Entries(MANY)
        assert pickle.loads(pickle.dumps(entries)) == copy.deepcopy(entries) == originals
        with pytest.raises(IndexError):
            entries[count]
    assert Entries(MANY) != MANY[1:]
    assert Entries(MANY) != [*MANY[1:], MANY[0]]


def test_a_subset_of_compact_entries_is_compact():
    some = unlabelled(Entries(MANY)).subset([5, 0, 5])
    assert isinstance(some.entries, Entries)
    assert some.entries == (MANY[5], MANY[0], MANY[5])
    assert some == unlabelled((MANY[5], MANY[0], MANY[5]))


def size_of(make):
    tracemalloc.start()
    kept = make()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(kept) == 20_000
    return taken


def test_compact_entries_take_a_fraction_of_the_memory():
    def entries():
        return (Entry(f"/data/images/{number:08}.jpg", f"{number:08}.jpg") for number in range(20_000))

    assert size_of(lambda: Entries(entries())) < size_of(lambda: tuple(entries())) / 4


def test_a_list_names_images_line_by_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (b"a.png", b"with space.png", b"\xff.png"):
        with open(name, "wb") as file:
            file.write(name)
    content = b"\xef\xbb\xbfa.png\r\n\nwith space.png\n\xff.png\n" + os.fsencode(tmp_path / "a.png")
    (tmp_path / "paths.txt").write_bytes(content)
    images = find_listed("paths.txt")
    assert names(images) == ["a.png", "with space.png", "\udcff.png", str(tmp_path / "a.png")]
    assert [images.read(index) for index in range(4)] == [b"a.png", b"with space.png", b"\xff.png", b"a.png"]
    assert set(images.targets) == {UNLABELLED}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert find_listed("-") == images


def test_a_list_without_paths_or_without_a_file_is_refused(tmp_path):
    (tmp_path / "paths.txt").write_text("\n\n")
    with pytest.raises(ValueError, match=r"paths\.txt names no images; write one path per line"):
        find_listed(tmp_path / "paths.txt")
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(ValueError, match=r"cannot be read .*one path per line"):
            find_listed(path)


@pytest.mark.parametrize("in_tar", [False, True])
def test_files_of_other_kinds_in_class_folders_are_counted(tmp_path, in_tar):
    root = tmp_path / "photos"
    save_files(root, ["train/cat/a.png", "train/cat/b.png", "train/dog/c.png", "val/cat/d.png", "val/dog/e.png"])
    save_files(root, ["train/cat/a.CR2", "train/dog/deep/b.cr2", "train/dog/notes", "val/dog/clip.mp4"])
    save_files(root, ["train/cat/.hidden", "train/list.txt", "readme.md"])  # not counted
    root = pack(root) if in_tar else root
    train, val = find_images(root, "train"), find_images(root, "val")
    assert train.others == {".cr2": 2, "no suffix": 1}
    assert val.others == {".mp4": 1}
    assert train == replace(train, others={})  # they do not make it another dataset


def test_a_drawn_split_counts_the_files_of_other_kinds_of_the_whole_dataset(tmp_path):
    save_files(tmp_path, [*(f"cat/{number}.png" for number in range(5)), "cat/a.cr2"])
    assert find_images(tmp_path, "train").others == find_images(tmp_path, "val").others == {".cr2": 1}
