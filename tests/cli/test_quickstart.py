"""``progresvit quickstart``: its pieces, and once the whole of it with the figures that it promises."""

import json
import shlex
import sys
from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageOps
from sklearn.datasets import load_digits
from typer.main import get_command

from progresvit.cli import app
from progresvit.cli.quickstart import ABOUT_FILE, CALIBRATED, CERTIFIED
from progresvit.data.digits import INNER, MARGIN, SPLITS, write_digits
from progresvit.evaluation import read_records
from tests.commands import refused, run, works


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart") / "digits"
    write_digits(folder)
    return folder


def test_every_digit_is_written_to_one_split_and_can_be_read(written):
    paths = list(written.rglob("*.png"))
    assert Counter(path.parts[-3] for path in paths) == SPLITS
    numbers = [int(path.stem) for path in paths]
    assert sorted(numbers) == list(range(sum(SPLITS.values())))  # each once: the splits are disjoint
    data = load_digits()
    assert all(path.parent.name == str(data.target[number]) for path, number in zip(paths, numbers))
    for split in SPLITS:
        assert len(list((written / split).iterdir())) == 10
    for path in paths[::100]:
        with Image.open(path) as picture:
            inner = ImageOps.crop(picture, MARGIN)
            assert inner.size == (INNER, INNER)
            small = np.asarray(inner.resize((8, 8), Image.Resampling.BOX), float) * 16 / 255
        assert np.corrcoef(small.ravel(), data.images[int(path.stem)].ravel())[0, 1] > 0.97


@pytest.mark.slow
def test_digits_are_written_again_unchanged_and_never_beside_other_images(written):
    before = {path: path.read_bytes() for path in written.rglob("*.png")}
    next(iter(before)).unlink()  # a run that was stopped
    write_digits(written)
    assert {path: path.read_bytes() for path in written.rglob("*.png")} == before
    mine = written / "test" / "3" / "mine.png"
    mine.touch()
    with pytest.raises(ValueError, match=r"mine\.png is not one of the digits; move it away"):
        write_digits(written)
    mine.unlink()


def test_a_folder_of_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "file").touch()
    refused("is a file; give the name of a folder", "quickstart", "--out", tmp_path / "file")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "digits").write_text("mine")
    for options in ([], ["--overwrite"]):
        refused("holds other files; name a new folder", "quickstart", "--out", tmp_path / "thesis", *options)
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["digits"]


def test_without_its_packages_the_error_names_the_extra(tmp_path, monkeypatch):
    for gone, named in ("sklearn", "scikit-learn"), ("matplotlib", "scikit-learn and matplotlib"):
        monkeypatch.setitem(sys.modules, gone, None)
        refused(f"{named} is not installed; run: pip install 'matplotlib", "quickstart", "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_command_that_fails_ends_quickstart_with_its_error(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / ABOUT_FILE).touch()
    (tmp_path / "run" / "recipe.yaml").write_text("ema: 0.5")
    result = run("quickstart", "--out", tmp_path)
    assert result.exit_code == 2
    assert "holds a run of another recipe" in result.stderr
    assert "use --overwrite to train from the start" in result.stderr
    assert "evaluate" not in result.stdout
    assert "Traceback" not in result.output


def commands(output):
    """The command lines that were printed, each taken in by the app: its name and its parsed arguments."""
    group = get_command(app)
    for line in output.splitlines():
        if line.startswith("$ "):
            program, *arguments = shlex.split(line.removeprefix("$ "))
            assert program == "progresvit"
            name, command, rest = group.resolve_command(group.make_context(program, [*arguments]), arguments)
            yield name, command.make_context(name, rest).params


@pytest.mark.long
def test_quickstart_trains_a_good_model_and_can_be_run_again(tmp_path):
    out = tmp_path / "quick start"  # a name that must be quoted
    shown = works("quickstart", "--out", out)
    names = [name for name, _ in commands(shown)]
    assert names == ["train", "evaluate", "evaluate", "calibrate", "calibrate", "frontier", "classify"]
    test = read_records(out / "test.parquet")
    assert len(test) == SPLITS["test"]
    assert not set(test.ids) & set(read_records(out / "val.parquet").ids)
    assert test.correct[:, -1].mean() > 0.95
    assert test.correct[:, 0].mean() < test.correct[:, -1].mean()  # there is something to trade
    calibrated = json.loads((out / f"{CALIBRATED}.json").read_text())["expected"]
    assert calibrated["saving"] >= 0.25
    rows = {row["note"]: row for row in json.loads((out / "frontier.json").read_text())["rows"]}
    assert rows[CALIBRATED]["saving"] >= 0.25
    assert rows[CALIBRATED]["top1"] > 0.95
    assert rows[CERTIFIED]["saving"] >= rows[CALIBRATED]["saving"] / 2
    assert f"test, {CALIBRATED} on val: top-1 {rows[CALIBRATED]['top1']:.2%}" in shown
    assert "10 images: " in shown
    with Image.open(out / "frontier.png") as image:
        assert image.size[0] > 900

    again = works("quickstart", "--out", out)
    first = next(iter(commands(again)))
    assert (first[0], first[1]["resume"]) == ("train", True)
    assert "step" not in again.split("$ progresvit evaluate")[0].split("$ progresvit train")[1]  # nothing is left to do
    assert again.splitlines()[-4:-1] == shown.splitlines()[-4:-1]  # the same figures
