import io
import shutil
import tarfile

import pytest
from PIL import Image

from progresvit.data.dataset import UNLABELLED, find_images, find_unlabelled
from progresvit.data.decode import decode
from progresvit.data.timm_dataset import find_timm_images


def png(colour="red"):
    file = io.BytesIO()
    Image.new("RGB", (4, 4), colour).save(file, "PNG")
    return file.getvalue()


def make_tar(path, files):
    with tarfile.open(path, "w") as tar:
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
        assert [entry.name for entry in train.entries] == ["train/cat/a.png", "train/cat/c.png", "train/dog/b.png"]
        assert [decode(train.read(i)).getpixel((0, 0)) for i in range(3)] == [(255, 0, 0), (0, 0, 255), (0, 255, 0)]
        val = find_images(source, "val", train.class_ids)
        assert list(val.targets) == [1]


def test_hugging_face_data_sets_come_through_timm(digits, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    images = find_timm_images(f"hfds/{digits}", "train", None)
    assert images.class_ids == ("0", "1", "2", "3")
    assert len(images) == 48
    some = images.subset([3, 40])
    assert decode(some.read(1)).size == (32, 32)
    assert some.targets[1] == images.targets[40]


def test_web_data_set_shards(tmp_path):
    make_tar(tmp_path / "set-train-0.tar", {"a.png": png("red"), "a.cls": b"1", "b.cls": b"0", "b.png": png("blue")})
    images = find_timm_images(f"wds/{tmp_path}", "train", None)
    assert (images.class_ids, images.targets) == (("0", "1"), (1, 0))
    assert decode(images.read(1)).getpixel((0, 0)) == (0, 0, 255)


@pytest.mark.parametrize(
    ("source", "remedy"),
    [("tfds/mnist", "use hfds"), ("wds/nowhere", "no shards"), ("hfds/./nowhere", "could not be opened")],
)
def test_timm_names_that_cannot_be_read_are_refused(source, remedy):
    with pytest.raises(ValueError, match=remedy):
        find_timm_images(source, "train", None)


def test_an_unlabelled_shard_is_refused(tmp_path):
    make_tar(tmp_path / "train.tar", {"a.png": png()})
    with pytest.raises(ValueError, match=r"no \.cls next to it"):
        find_timm_images(f"wds/{tmp_path}", "train", None)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="give a folder, a tar, or a pattern"):
        find_images(tmp_path / "nowhere", "train")
    with pytest.raises(ValueError, match="under train/<class>/"):
        find_images(tmp_path, "train")


def test_an_empty_class_is_refused(tmp_path):
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "a.png").write_bytes(png())
    (tmp_path / "train" / "dog").mkdir()
    with pytest.raises(ValueError, match=r"dog of .* hold no images"):
        find_images(tmp_path, "train")


def test_a_class_that_training_lacks_is_refused(digits):
    with pytest.raises(ValueError, match="val has classes that the training split lacks: 3"):
        find_images(digits, "val", ("0", "1", "2"))


def test_a_damaged_tar_is_refused(tmp_path):
    (tmp_path / "train.tar").write_bytes(b"not a tar" * 100)
    with pytest.raises(ValueError, match="copy or unpack it again"):
        find_images(tmp_path, "train")


def test_a_compressed_tar_is_refused(tmp_path):
    with tarfile.open(tmp_path / "train.tar", "w:gz") as tar:
        info = tarfile.TarInfo("train/cat/a.png")
        info.size = len(png())
        tar.addfile(info, io.BytesIO(png()))
    with pytest.raises(ValueError, match="compressed"):
        find_images(tmp_path, "train")


def test_a_tar_beside_its_contents_counts_once(tmp_path):
    make_tar(tmp_path / "train.tar", {"train/cat/a.png": png(), "train/cat/b.png": png()})
    shutil.unpack_archive(tmp_path / "train.tar", tmp_path)
    assert len(find_images(tmp_path, "train")) == 2


def test_damaged_or_empty_shards_are_refused(tmp_path):
    (tmp_path / "train-0.tar").write_bytes(b"not a tar" * 100)
    with pytest.raises(ValueError, match="copy it again"):
        find_timm_images(f"wds/{tmp_path}", "train", None)
    make_tar(tmp_path / "train-0.tar", {"./a.txt": b"text"})
    with pytest.raises(ValueError, match="hold no images"):
        find_timm_images(f"wds/{tmp_path}", "train", None)
    make_tar(tmp_path / "train-0.tar", {"./a.png": png(), "./a.cls": b"0"})
    assert len(find_timm_images(f"wds/{tmp_path}", "train", None)) == 1


def test_images_without_labels_are_found_however_deep(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/b/1.png", "a/2.JPG", "3.webp", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    found = find_unlabelled(tmp_path)
    assert sorted(entry.name for entry in found.entries) == ["3.webp", "a/2.JPG", "a/b/1.png"]
    assert set(found.targets) == {UNLABELLED}
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        tar.add(tmp_path / "a", "a")
    packed = find_unlabelled(tmp_path / "t.tar")
    assert sorted(entry.name for entry in packed.entries) == ["t.tar/a/2.JPG", "t.tar/a/b/1.png"]
    assert packed.read(0) == b"x"
