"""``progresvit analyze``: the figure, its numbers beside it, and what is refused in one line."""

import csv
import sys

import numpy as np
import pytest
from PIL import Image

import progresvit
from progresvit.analysis import attention
from progresvit.analysis.attention import attention_maps
from tests.commands import refused, run, works


@pytest.fixture
def photo(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (48, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def read_maps(path):
    """The values of a CSV as arrays, by round."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    rounds = {}
    for row in rows:
        place = tuple(int(row[key]) - 1 for key in ("head", "row", "column"))
        rounds.setdefault(int(row["round"]), {})[place] = np.float32(row["attention"])
    for number, values in rounds.items():
        rounds[number] = np.zeros(np.max(list(values), axis=0) + 1, np.float32)
        assert rounds[number].size == len(values)
        for place, value in values.items():
            rounds[number][place] = value
    return list(rounds.values())


def test_attention_writes_the_figure_and_its_numbers_beside_it(model, photo, tmp_path):
    out = tmp_path / "new" / "attention.png"
    output = works("analyze", "attention", model, photo, "--out", out, "--device", "cpu")
    assert output.splitlines() == [f"wrote {out}", f"wrote {out.with_suffix('.csv')}"]
    assert Image.open(out).format == "PNG"
    expected = [round_.patches for round_ in attention_maps(progresvit.load(model), Image.open(photo))]
    assert [maps.shape for maps in expected] == [(1, 2, 2), (2, 4, 4)]
    for maps, patches in zip(read_maps(out.with_suffix(".csv")), expected, strict=True):
        assert np.array_equal(maps, patches)


def test_the_figure_shows_the_maps(model, photo, tmp_path, monkeypatch):
    real, figures = attention.attention_figure, []
    monkeypatch.setattr(attention, "attention_figure", lambda rounds: figures.append(real(rounds)) or figures[-1])
    works("analyze", "attention", model, photo, "--out", tmp_path / "a.svg", "--device", "cpu")
    (figure,) = figures
    marked = [axes.get_title() for axes in figure.axes if "inactive" in [text.get_text() for text in axes.texts]]
    assert marked == ["head 2"]
    assert "<svg" in (tmp_path / "a.svg").read_text()[:1000]


def test_images_that_cannot_be_read_are_refused(model, photo, tmp_path):
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "cut.png").write_bytes(photo.read_bytes()[:-2000])
    out = ("--out", tmp_path / "a.png")
    for name, reason in (
        ("none.jpg", "there is no such file."),
        ("text.jpg", "not an image"),
        ("cut.png", "damaged or truncated"),
        ("model", "a folder, not an image"),
    ):
        refused(f"error: {tmp_path / name}: {reason}", "analyze", "attention", model, tmp_path / name, *out)
    refused("a web address", "analyze", "attention", model, "https://example.org/photo.jpg", *out)
    assert not (tmp_path / "a.png").exists()


def test_wrong_models_and_devices_are_refused(photo, model, tmp_path):
    out = ("--out", tmp_path / "a.png")
    refused("there is no model folder", "analyze", "attention", tmp_path / "nowhere", photo, *out)
    refused("nettewoof-tiny", "analyze", "attention", "nettewof-tiny", photo, *out)
    refused("unknown device 'tpu'", "analyze", "attention", model, photo, *out, "--device", "tpu")
    assert not list(tmp_path.glob("a.*"))


@pytest.mark.parametrize("name", ["a.csv", "a.jpg", "a"])
def test_figures_of_unknown_formats_are_refused(model, photo, tmp_path, name):
    refused("use .png, .svg, .pdf", "analyze", "attention", model, photo, "--out", tmp_path / name)


def test_existing_files_are_kept_unless_overwriting_is_asked_for(model, photo, tmp_path):
    words = ("analyze", "attention", model, photo, "--out", tmp_path / "a.png", "--device", "cpu")
    for name in ("a.csv", "a.png"):
        (tmp_path / name).write_text("mine")
        refused(f"{name} already exists; use --overwrite", *words)
        assert (tmp_path / name).read_text() == "mine"
    works(*words, "--overwrite")
    assert Image.open(tmp_path / "a.png").format == "PNG"
    assert len(read_maps(tmp_path / "a.csv")) == 2


def test_the_image_itself_is_never_overwritten(model, photo):
    before = photo.read_bytes()
    refused("is an input", "analyze", "attention", model, photo, "--out", photo, "--overwrite")
    assert photo.read_bytes() == before


def test_without_matplotlib_the_error_names_the_extra_and_nothing_is_written(model, photo, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ("analyze", "attention", model, photo, "--out", tmp_path / "a.png", "--device", "cpu")
    refused("matplotlib is not installed; run: pip install 'matplotlib>=", *words)
    assert not list(tmp_path.glob("a.*"))


def test_the_group_lists_its_commands():
    assert "attention" in works("analyze", "--help")
    assert "attention" in run("analyze").output
    result = run("analyze", "atention")
    assert result.exit_code == 2
    assert "No such command" in result.output
