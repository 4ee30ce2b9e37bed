"""The figures of ``progresvit analyze`` that look at several images or at the gates, and the report of all."""

import csv
import re
from functools import partial

import pytest
from PIL import Image

import progresvit
from progresvit.analysis import report, similarity, throughput
from progresvit.analysis.registry import DIAGNOSTICS
from progresvit.config import plain_vit
from progresvit.model import ProgResViT
from tests.commands import refused, works

SIZES = {"depth": 1, "patch_size": 8, "num_classes": 4, "class_ids": tuple("0123")}
OF_MODEL = ["gates", "gate-distributions", "gate-depth"]
OF_IMAGES = {
    "similarity": (),
    "trajectories": ("--classes", "0,2,3"),
    "low-pass": ("--strengths", "0,0.5"),
    "token-swap": ("--strength", "0.5"),
    "noise-replacement": ("--strengths", "0,1"),
    "exits": ("--threshold", "0.7"),
    "throughput": ("--seconds", "0", "--batch", "8"),
}


@pytest.fixture
def source(digits):
    return ("--data", digits, "--images", "16", "--workers", "0", "--device", "cpu")


@pytest.fixture
def plain(randomize, tmp_path):
    """One round, no PSG."""
    return progresvit.save(randomize(ProgResViT(plain_vit(resolution=32, heads=2, **SIZES))), tmp_path / "plain")


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_every_figure_has_a_command_and_a_place_in_the_report():
    listed = works("analyze", "--help")
    assert set(DIAGNOSTICS) == {*OF_MODEL, *OF_IMAGES, "attention", "memory"}
    assert all(name in listed for name in (*DIAGNOSTICS, "all"))


@pytest.mark.parametrize("name", OF_MODEL)
def test_figures_of_the_gates_are_written_with_their_numbers(name, model, tmp_path):
    out = tmp_path / "figures" / f"{name}.png"
    output = works("analyze", name, model, "--out", out)
    assert output.splitlines() == [f"wrote {out}", f"wrote {out.with_suffix('.csv')}"]
    assert Image.open(out).format == "PNG"
    assert read(out.with_suffix(".csv"))
    refused("use --overwrite", "analyze", name, model, "--out", out)


@pytest.mark.parametrize("name", OF_IMAGES)
def test_figures_of_images_are_written_with_their_numbers(name, model, source, tmp_path):
    out = tmp_path / f"{name}.png"
    output = works("analyze", name, model, *source, *OF_IMAGES[name], "--out", out)
    assert f"wrote {out}" in output
    assert Image.open(out).format == "PNG"
    rows = read(out.with_suffix(".csv"))
    if name in ("low-pass", "noise-replacement"):
        assert [float(row["strength"]) for row in rows] == [float(text) for text in OF_IMAGES[name][1].split(",")]
        assert {row["images"] for row in rows} == {"16"}
    elif name == "token-swap":
        assert {row["strength"] for row in rows} == {"0.0", "0.5"}
    elif name == "trajectories":
        assert {row["class"] for row in rows} == {"0", "2", "3"}
    elif name == "exits":
        assert len(rows) == 16
        assert "repaired" in output


def test_gates_of_chosen_blocks(model, tmp_path):
    works("analyze", "gate-distributions", model, "--out", tmp_path / "a.png", "--blocks", "1")
    assert {row["block"] for row in read(tmp_path / "a.csv")} == {"1"}
    refused("1", "analyze", "gate-distributions", model, "--out", tmp_path / "b.png", "--blocks", "0,3")
    refused("whole numbers", "analyze", "gate-distributions", model, "--out", tmp_path / "b.png", "--blocks", "last")


def test_what_a_model_cannot_show_is_refused_and_nothing_is_written(plain, source, tmp_path):
    out = ("--out", tmp_path / "a.png")
    for name in OF_MODEL:
        refused("give a model with PSG", "analyze", name, plain, *out)
    refused("one round", "analyze", "exits", plain, *source, *out)
    refused("memory of a GPU, and there is none here", "analyze", "memory", plain, *out)
    assert not list(tmp_path.glob("a.*"))


def test_wrong_settings_and_data_are_refused(model, source, tmp_path):
    out = ("--out", tmp_path / "a.png")
    refused("comma-separated numbers", "analyze", "low-pass", model, *source, *out, "--strengths", "much")
    refused("no setting 'careful'", "analyze", "exits", model, *source, *out, "--threshold", "careful")
    refused("no class '33'; did you mean '3'?", "analyze", "trajectories", model, *source, *out, "--classes", "0,33")
    refused("nowhere", "analyze", "similarity", model, "--data", tmp_path / "nowhere", *out)


@pytest.mark.long
def test_the_report_holds_every_figure_and_says_what_it_skips(model, source, tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "throughput", partial(throughput.throughput, seconds=0))
    out = tmp_path / "report"
    output = works("analyze", "all", model, *source, "--out", out)
    page, drawn = (out / "index.html").read_text(), [name for name in DIAGNOSTICS if name != "memory"]
    assert re.findall(r'<h2 id="([\w-]+)">', page) == list(DIAGNOSTICS)
    assert page.count('src="data:image/png;base64,') == len(drawn)
    assert "16 images of 3 classes" in page or "16 images of 4 classes" in page
    for name in drawn:
        assert Image.open(out / f"{name}.png").format == "PNG"
        assert read(out / f"{name}.csv")
    assert not (out / "memory.png").exists()
    assert page.count("Skipped: memory measures the memory of a GPU") == 1
    assert "skipped: memory: " in output
    assert {row["outcome"] for row in read(out / "exits-repairs.csv")} >= {"repaired", "broken"}
    (out / "index.html").unlink()
    refused("gates.png already exists; use --overwrite", "analyze", "all", model, *source, "--out", out)
    (out / "memory.png").write_text("of another model")
    (out / "notes.txt").write_text("mine")
    works("analyze", "all", model, *source, "--out", out, "--overwrite")
    assert not (out / "memory.png").exists()
    assert (out / "notes.txt").exists()


def test_a_diagnostic_that_runs_out_of_memory_leaves_the_others(model, source, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("CUDA out of memory")

    kept = {"gates": DIAGNOSTICS["gates"], "similarity": DIAGNOSTICS["similarity"]}
    monkeypatch.setattr(report, "DIAGNOSTICS", kept)
    monkeypatch.setattr(similarity, "similarity", fail)
    output = works("analyze", "all", model, *source, "--out", tmp_path / "report")
    assert "skipped: similarity: CUDA out of memory" in output
    assert (tmp_path / "report" / "gates.png").exists()


def test_a_split_that_was_drawn_is_reported(model, digits, tmp_path):
    words = ("--data", digits / "val", "--workers", "0", "--device", "cpu", "--out", tmp_path / "a.png")
    assert "using 4 of its 24 images" in works("analyze", "similarity", model, *words)


def test_the_report_of_a_plain_vit_says_why_figures_are_missing(plain, source, tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "throughput", partial(throughput.throughput, seconds=0))
    (tmp_path / "file").write_text("mine")
    refused("file is a file; name a folder", "analyze", "all", plain, *source, "--out", tmp_path / "file")
    works("analyze", "all", plain, *source, "--out", tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count("Skipped: ") == 8
    written = {path.stem for path in (tmp_path / "report").glob("*.png")}
    assert written == {"similarity", "trajectories", "attention", "throughput"}
