import errno
import inspect
import io
import json
import os
import re

import pyarrow.parquet as pq
import pytest
from PIL import Image, features
from rich.console import Console
from typer.testing import CliRunner

import progresvit
from progresvit.cli import app, output
from progresvit.data.samples import samples_folder
from progresvit.io.model_folder import bundled_folder
from progresvit.io.resumable import ResumableTable
from progresvit.model import ProgResViT
from progresvit.routing import load_setting
from tests.commands import refused, run, works
from tests.factories import digits_config


@pytest.fixture
def model(tmp_path, randomize):
    config = digits_config(labels=("zero", "one", "two", "three"))
    return progresvit.save(randomize(ProgResViT(config)), tmp_path / "model")


@pytest.fixture
def picture(digits):
    return next((digits / "val").rglob("*.png"))


def test_a_table_of_answers_and_what_was_saved(model, digits, picture):
    output = works("classify", picture, digits / "val" / "0", "--model", model, "--threshold", "0.9")
    assert picture.name in output
    assert any(name in output for name in ("zero", "one", "two", "three"))
    assert "7 images: " in output
    assert "GMACs on average instead of" in output


def test_json_has_a_line_for_each(model, picture):
    lines = works("classify", picture, picture, "--model", model, "--threshold", "0", "--json").strip().splitlines()
    assert [json.loads(line)["exit_round"] for line in lines] == [2, 2]
    assert json.loads(lines[0])["image"] == str(picture)


def test_several_classes_are_named_in_the_table_in_json_and_in_parquet(model, picture, tmp_path):
    common = ("classify", picture, "--model", model, "--threshold", "0", "--top-k", "3")
    answer = json.loads(works(*common, "--json"))
    assert answer["top"][0]["label"] == answer["label"]
    probabilities = [candidate["probability"] for candidate in answer["top"]]
    assert probabilities == sorted(probabilities, reverse=True)
    second = answer["top"][1]
    assert f"{second['label']} {second['probability']:.1%}" in works(*common)
    works(*common, "--out", tmp_path / "a.parquet")
    (row,) = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [candidate["index"] for candidate in row["top"]] == [candidate["index"] for candidate in answer["top"]]
    assert "top" not in json.loads(works("classify", picture, "--model", model, "--threshold", "0", "--json"))
    refused("--top-k must be at most", *common[:-1], "9")


@pytest.mark.slow
def test_a_setting_is_chosen_by_name_and_a_budget_by_number(model, digits, tmp_path):
    records, val = tmp_path / "r.parquet", digits / "val"
    works("evaluate", model, "--data", digits, "--out", records, "--workers", 0, "--device", "cpu")
    output = works("classify", val, "--model", model, "--device", "cpu")
    assert f"note: every round runs, because {model} has no default setting" in output
    assert "0 after round 1" in output
    refused("the command progresvit calibrate makes it", "classify", val, "--model", model, "--budget-gmacs", "0.001")
    works("calibrate", records, "--exit-share", 0.5, "--out", model / "settings" / "half.json")
    works("calibrate", records, "--exit-share", 0.75, "--out", model / "settings" / "near-lossless.json")
    works("calibrate", records, "--budgets", "--out", model / "budgets.json")
    assert "12 after round 1" in works("classify", val, "--model", model, "--threshold", "half", "--device", "cpu")
    assert "18 after round 1" in works("classify", val, "--model", model, "--device", "cpu")
    budget = sum(progresvit.Engine(model).gmacs) / 2
    assert "12 after round 1" in works("classify", val, "--model", model, "--budget-gmacs", budget, "--device", "cpu")
    refused("it has half, near-lossless", "classify", val, "--model", model, "--threshold", "quick")
    refused("give one of them", "classify", val, "--model", model, "--threshold", "1", "--budget-gmacs", budget)
    refused("out of reach", "classify", val, "--model", model, "--budget-gmacs", "100")


@pytest.mark.slow
@pytest.mark.parametrize("model", [(), ("--model", "nettewoof-tiny")], ids=["default", "nettewoof-tiny"])
def test_bundled_models_use_their_settings_and_withhold_unsure_answers(model):
    output = works("classify", "--samples", *model)
    assert re.search(r"golden_retriever\.jpg +│ golden retriever +│ yes ", output)
    assert f"{len(list(samples_folder().glob('*.jpg')))} images: " in output
    n = load_setting(bundled_folder(*model[1:]) / "settings" / "near-lossless.json").n
    assert f"calibrated by the rule near-lossless on {n} images" in output
    careful = works("classify", "--samples", *model, "--threshold", "careful")
    assert re.search(r"none (of its classes )?\(", careful)


def test_images_of_no_class_are_declined_in_the_table_in_json_and_in_parquet(model, digits, tmp_path):
    works("evaluate", model, "--data", digits, "--out", tmp_path / "r.parquet", "--workers", 0, "--device", "cpu")
    words = ("--exit-share", 0.5, "--ood-share", 0.4, "--out", model / "settings" / "ood.json")
    works("calibrate", tmp_path / "r.parquet", *words)
    command = ("classify", digits / "val", "--model", model, "--threshold", "ood", "--device", "cpu")
    lines = [json.loads(line) for line in works(*command, "--json").splitlines()]
    limit = load_setting(model / "settings" / "ood.json").ood.limit
    unknown = [line["out_of_distribution"] for line in lines]
    assert 0 < sum(unknown) < len(lines)
    assert [line["ood_score"] < limit for line in lines] == unknown == [line["abstained"] for line in lines]
    output = works(*command)
    assert output.count("none of its classes (") == sum(unknown)
    assert f"{sum(unknown)} of them out-of-distribution" in output
    works(*command, "--out", tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet")["out_of_distribution"].to_pylist() == unknown
    line = works("classify", digits / "val", "--model", model, "--threshold", "0.5", "--json").splitlines()[0]
    assert (json.loads(line)["out_of_distribution"], json.loads(line)["ood_score"]) == (False, None)


def test_classify_needs_exactly_one_source_of_images(picture):
    refused("--samples for the bundled sample images", "classify")
    refused("--samples for the bundled sample images", "classify", picture, "--samples")
    refused("--list for a list of paths", "classify", picture, "--list", "paths.txt")


def test_many_images_are_written_into_a_parquet_table(model, digits, tmp_path):
    out = tmp_path / "answers.parquet"
    words = ("classify", digits / "val", "--model", model, "--threshold", "0.9", "--out", out)
    assert "wrote" in works(*words)
    assert pq.read_table(out).num_rows == 24
    refused("already exists; pass --overwrite", *words)
    works(*words, "--overwrite")


def test_what_cannot_be_read_is_listed_and_the_rest_is_classified(model, picture, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.jpg").write_bytes(b"")
    (tmp_path / "note.txt").write_text("hello")
    Image.effect_noise((64, 64), 90).save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:-900])
    bad = [tmp_path / name for name in ("empty", "nothing.jpg", "note.txt", "cut.jpg", "none.jpg")]
    result = run("classify", *bad, picture, "https://a.org/b.jpg", "--model", model, "--threshold", "0.5")
    assert result.exit_code == 1
    assert "1 image: " in result.output
    for path, reason in zip(bad, ("holds no images", "not an image", "not an image", "truncated", "no such file")):
        line = next(line for line in result.output.splitlines() if line.startswith(f"skipped: {path}"))
        assert reason in line
    assert "download it" in result.output
    assert run("classify", tmp_path / "none.jpg", "--model", model, "--threshold", "0.5").exit_code == 1
    out = tmp_path / "r.parquet"
    assert run("classify", *bad, picture, "--model", model, "--threshold", "0.5", "--out", out).exit_code == 1
    assert [row["error"] is None for row in pq.read_table(out).to_pylist()] == [False, False, False, True]


def test_unreadable_images_in_a_folder_do_not_affect_the_others(model, picture, tmp_path):
    Image.open(picture).save(tmp_path / "good.png")
    Image.effect_noise((64, 64), 90).save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:-900])
    (tmp_path / "empty.png").write_bytes(b"")
    result = run("classify", tmp_path, "--model", model, "--threshold", "0.5", "--json")
    assert result.exit_code == 1
    lines = [json.loads(line) for line in result.stdout.strip().splitlines() if line.startswith("{")]
    assert [line["error"] is None for line in lines if line["image"] == "good.png"] == [True]
    assert {line["image"] for line in lines if line["error"]} == {"cut.jpg", "empty.png"}
    assert "skipped: cut.jpg: " in result.stderr


def test_wrong_arguments_are_refused(model, picture, tmp_path):
    refused("has no setting 'low'", "classify", picture, "--model", model, "--threshold", "low")
    refused("no setting at", "classify", picture, "--model", model, "--threshold", tmp_path / "none.json")
    refused("unknown backend", "classify", picture, "--model", model, "--threshold", "0.5", "--backend", "tflite")
    refused("written as .parquet", "classify", picture, "--model", model, "--threshold", "1", "--out", "x.txt")
    refused("unknown precision", "classify", picture, "--model", model, "--threshold", "1", "--precision", "int4")
    refused("must be at least 1, got 0", "classify", picture, "--model", model, "--threshold", "1", "--batch", "0")
    refused("", "classify", picture, "--model", tmp_path / "nowhere", "--threshold", "1")
    refused("--shard writes a file for each shard", "classify", picture, "--shard", "1/2")
    refused("shard 5/4 does not exist", "classify", picture, "--shard", "5/4", "--out", "x.parquet")
    refused("No such file", "classify", "--list", tmp_path / "none.txt", "--model", model, "--threshold", "1")


def test_a_list_of_paths_is_classified_in_shards(model, digits, tmp_path):
    paths = [str(path) for path in sorted((digits / "val").rglob("*.png"))]
    (tmp_path / "paths.txt").write_text("\n".join([*paths, "none.png"]))
    command = ("classify", "--list", tmp_path / "paths.txt", "--model", model, "--threshold", "0.9")
    lines = [json.loads(line) for line in run(*command, "--json").stdout.splitlines() if line.startswith("{")]
    assert [line["image"] for line in lines] == [*paths, "none.png"]
    out = tmp_path / "a.parquet"
    results = [run(*command, "--out", out, "--shard", f"{number}/3") for number in (3, 1, 2)]
    assert [result.exit_code for result in results] == [1, 0, 0]
    assert "skipped: none.png: " in results[0].stderr
    assert f"wrote {tmp_path}/a-00003-of-00003.parquet; 1 unreadable" in results[0].stdout
    rows = pq.read_table(sorted(tmp_path.glob("a-*-of-00003.parquet"))).to_pylist()
    assert [(row["image"], row["index"]) for row in rows] == [(line["image"], line["index"]) for line in lines]


def test_a_list_comes_from_standard_input(model, picture):
    words = ["classify", "--list", "-", "--model", str(model), "--threshold", "0", "--json"]
    result = CliRunner().invoke(app, words, input=f"{picture}\n")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["image"] == str(picture)


@pytest.mark.parametrize("words", [("--json",), ("--out", "a.parquet")])
def test_of_many_unreadable_images_the_first_are_named_and_all_are_counted(model, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paths.txt").write_text("".join(f"none-{number}.png\n" for number in range(25)))
    result = run("classify", "--list", "paths.txt", "--model", model, "--threshold", "1", *words)
    assert result.exit_code == 1
    lines = result.stderr.strip().splitlines()
    assert [line.split(":")[1].strip() for line in lines[:-1]] == [f"none-{number}.png" for number in range(20)]
    assert lines[-1].startswith("… and 5 more, see ")


def test_a_full_disk_is_one_line_with_the_remedy(model, picture, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ResumableTable, "write", full)
    words = ("--model", model, "--threshold", "1", "--out", tmp_path / "a.parquet")
    refused("a.parquet cannot be written (No space left on device); free some space there", "classify", picture, *words)


def test_odd_file_names_are_shown_on_one_line(model, picture, tmp_path):
    name = os.fsdecode(b"two\nlines \x1b[1m \xff.png")
    (tmp_path / "images").mkdir()
    Image.open(picture).save(tmp_path / "images" / "good\n.png")
    (tmp_path / "images" / name).write_bytes(b"")
    result = run("classify", tmp_path / "images", "--model", model, "--threshold", "0.5")
    assert r"skipped: two\nlines \x1b[1m \udcff.png: " in result.stderr
    assert r"good\n.png" in result.stdout
    result = run("classify", tmp_path / "images", "--model", model, "--threshold", "0.5", "--json")
    shown = [json.loads(line)["image"] for line in result.stdout.splitlines() if line.startswith("{")]
    assert shown == ["good\n.png", "two\nlines \x1b[1m \\udcff.png"]


def test_decoding_options_reach_the_engine(model, picture, monkeypatch):
    calls = []
    monkeypatch.setattr("progresvit.engine.Engine", lambda *_, **options: calls.append(options) or 1 / 0)
    for words in ((), ("--decode", "cpu", "--workers", "3")):
        run("classify", picture, "--model", model, "--threshold", "1", *words)
    assert [(options["decode"], options["workers"]) for options in calls] == [("auto", None), ("cpu", 3)]


def test_a_progress_bar_shows_the_rate_and_counts_only_what_this_run_does(monkeypatch):
    now, shown = [0.0], io.StringIO()
    console = Console(file=shown, width=100, get_time=lambda: now[0])
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
    with output.progress_bars(wanted=True) as begin:
        update = begin("classifying")
        for second, done in enumerate((5000, 5040, 5080, 5120)):
            now[0] = float(second)
            update(done, 10_000)
        bars = inspect.getclosurevars(update).nonlocals["bars"]
        console.print(bars.get_renderable())
    assert "classifying" in shown.getvalue()
    assert "5120/10000" in shown.getvalue()
    assert "40/s" in shown.getvalue()
    assert "0:02:02" in shown.getvalue()


@pytest.mark.parametrize(
    ("speed", "text"), [(None, ""), (0.25, "0.25/s"), (9.87, "9.9/s"), (12.3, "12/s"), (10_234.5, "10,234/s")]
)
def test_rates_are_rounded_as_people_read_them(speed, text):
    assert output.format_rate(speed) == text


def test_formats_of_pillow_are_read_in_folders_and_other_files_are_counted(model, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    kinds = [kind for kind in ("avif", "jp2", "tga", "jfif") if kind != "avif" or features.check("avif")]
    for kind in kinds:
        Image.new("RGB", (40, 40)).save(folder / f"a.{kind}")
    for name in ("notes.txt", "more.TXT", "clip.mp4", ".hidden"):
        (folder / name).write_bytes(b"")
    result = run("classify", folder, "--model", model, "--threshold", "0.9", "--json")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == len(kinds)
    assert result.stderr == "note: 3 files that are not images were left out (2 .txt, 1 .mp4)\n"


def test_the_limit_of_pixels_is_an_option(model, picture):
    words = ("classify", picture, "--model", model, "--threshold", "0.9", "--max-pixels")
    assert run(*words, 10_000).exit_code == 0
    result = run(*words, 1)
    assert result.exit_code == 1
    assert "the limit is 1); a larger --max-pixels … allows more" in result.stderr
