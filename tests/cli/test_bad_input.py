"""Data that cannot be used: one line with the remedy, in every command that takes it."""

import shutil

import pytest
from PIL import Image

from tests.commands import refused, run, works

URL = "https://example.org/photos.tar"
TAKING_DATA = {
    "train": lambda model, data, out: ("train", "photos_tiny", "--data", data, "--out", out / "run"),
    "evaluate": lambda model, data, out: (
        "evaluate", model, "--data", data, "--workers", 0, "--device", "cpu", "--out", out / "r.parquet"
    ),
    "shift": lambda model, data, out: (
        "shift", model, "--data", data, "--suite", "generated", "--workers", 0, "--device", "cpu", "--out", out / "s"
    ),
    "analyze": lambda model, data, out: (
        "analyze", "similarity", model, "--data", data, "--device", "cpu", "--out", out / "g.png"
    ),
}  # fmt: skip


@pytest.fixture
def unsplit(digits, tmp_path):
    """Class folders at the top, of which one has one image."""
    folder = shutil.copytree(digits / "val", tmp_path / "unsplit")
    for path in sorted((folder / "3").iterdir())[1:]:
        path.unlink()
    return folder


@pytest.mark.parametrize("command", TAKING_DATA)
def test_a_class_with_one_image_is_named_with_the_remedy(command, model, unsplit, tmp_path):
    words = TAKING_DATA[command](model, unsplit, tmp_path / "out")
    refused("the class 3 has only one image; at least two are needed", *words)
    assert not (tmp_path / "out").exists()


def test_a_class_with_one_image_is_evaluated_without_a_split(model, unsplit, tmp_path):
    output = works(*TAKING_DATA["evaluate"](model, unsplit, tmp_path), "--split", ".")
    assert "top-1 of 19 images" in output


@pytest.mark.parametrize("command", TAKING_DATA)
def test_a_web_address_instead_of_data_is_refused_with_the_remedy(command, model, tmp_path):
    words = TAKING_DATA[command](model, URL, tmp_path / "out")
    refused(f"{URL} is a web address; download it, and pass the folder or the tar.", *words)
    assert not (tmp_path / "out").exists()


WITHOUT_AN_IMAGE = {
    "folder": "holds no images",
    "none.png": "there is no such file",
    "https://example.org/a.jpg": "a web address; download it and give the file",
    "note.txt": "not an image",
    "empty.png": "not an image",
}


@pytest.mark.parametrize("name", WITHOUT_AN_IMAGE)
@pytest.mark.parametrize(
    "words", [("classify", "--threshold", 0.5), ("embed",), ("segment", "--threshold", 0.5)], ids=lambda words: words[0]
)
def test_an_input_without_an_image_is_named_with_the_reason(request, tmp_path, monkeypatch, words, name):
    model = request.getfixturevalue("segmenter" if words[0] == "segment" else "model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "note.txt").write_text("hello")
    (tmp_path / "empty.png").touch()
    out = {"classify": (), "embed": ("--out", "out.parquet"), "segment": ("--out", "out.png")}[words[0]]
    result = run(*words, name, "--model", model, *out)
    assert result.exit_code == 1
    if words[0] == "embed" and (tmp_path / name).is_file():
        assert "0 images, 128 features each (class token of round 2); 1 unreadable (see column error)" in result.stdout
    else:
        (line,) = result.output.splitlines()
        assert line.startswith(f"skipped: {name}: {WITHOUT_AN_IMAGE[name]}")
        assert not list(tmp_path.glob("out.*"))


def test_evaluate_prints_the_number_of_files_that_are_no_images(model, digits, tmp_path):
    data = shutil.copytree(digits, tmp_path / "data")
    for name in ("val/0/a.cr2", "val/1/b.CR2", "val/1/notes.txt", "train/0/not_counted.txt"):
        (data / name).write_bytes(b"")
    Image.new("RGB", (32, 32)).save(data / "val" / "0" / "more.jp2")
    words = TAKING_DATA["evaluate"](model, data, tmp_path)
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert result.stderr == "note: 3 files that are not images were left out (2 .cr2, 1 .txt)\n"
    assert "top-1 of 25 images" in result.stdout
    result = run(*words, "--unlabelled", "--overwrite")
    assert result.stderr == "note: 4 files that are not images were left out (2 .cr2, 2 .txt)\n"
