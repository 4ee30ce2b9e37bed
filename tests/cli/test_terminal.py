"""Labels, file names and messages are text: they neither control the terminal nor are they markup."""

import json
import os
from pathlib import Path

import pytest
from PIL import Image

import progresvit
from progresvit.cli import output
from progresvit.io.parse import printable
from progresvit.model import ProgResViT
from progresvit.table import Column, Table
from progresvit.training.logger import RunLogger
from tests.commands import run, works
from tests.evaluation.made_segmentation import make_model
from tests.factories import digits_config

TITLE = "\x1b]0;owned\x07"
"""Sets the title of the terminal."""
CLEAR = "\x1b[2J\x9b2J"
"""Clears the screen, the second time in one byte."""
MARKUP = "[red]x[/red]"
REVERSED = "cat\u202egpj.exe"
"""A terminal shows the end of the name backwards."""
NAMES = (TITLE, CLEAR, MARKUP, REVERSED)
SHOWN = (r"\x1b]0;owned\x07", r"\x1b[2J\x9b2J", MARKUP, r"cat\u202egpj.exe")


def is_harmless(text):
    return all(character.isprintable() or character == "\n" for character in text)


@pytest.fixture
def model(tmp_path, randomize):
    """The folder of a model whose labels are attacks."""
    return progresvit.save(randomize(ProgResViT(digits_config(labels=NAMES))), tmp_path / "model")


@pytest.mark.parametrize(("name", "shown"), list(zip(NAMES, SHOWN)))
def test_a_file_name_is_escaped_in_the_table_and_on_stderr(model, tmp_path, name, shown):
    name, shown = name.replace("/", "|"), shown.replace("/", "|")
    Image.new("RGB", (32, 32)).save(tmp_path / f"{name}.png")
    (tmp_path / f"{name}.jpg").write_bytes(b"torn")
    result = run("classify", tmp_path, "--model", model, "--threshold", "0")
    assert f"{shown}.png" in result.stdout
    assert f"skipped: {shown}.jpg: " in result.stderr
    assert is_harmless(result.output)


def test_labels_are_escaped_in_the_table(model, digits):
    shown = works("classify", digits / "val", "--model", model, "--threshold", "0", "--top-k", "4")
    assert all(label in shown for label in SHOWN)
    assert is_harmless(shown)


def test_labels_stay_as_they_are_in_json(model, digits):
    lines = works(
        "classify", digits / "val", "--model", model, "--threshold", "0", "--top-k", "4", "--json"
    ).splitlines()
    assert {candidate["label"] for candidate in json.loads(lines[0])["top"]} == set(NAMES)


def test_labels_are_escaped_in_the_line_of_a_segmentation(tmp_path, randomize):
    network = make_model(randomize)
    labels = (TITLE, *[f"{MARKUP}{number}" for number in range(1, network.config.num_classes)])
    network.config = network.config.replace(labels=labels)
    folder = progresvit.save(network, tmp_path / "segmenter")
    Image.new("RGB", (64, 64)).save(tmp_path / f"{REVERSED}.png")
    shown = works(
        "segment",
        tmp_path / f"{REVERSED}.png",
        "--model",
        folder,
        "--threshold",
        "0",
        "--out",
        tmp_path / "overlay.png",
    )
    assert r"cat\u202egpj.exe.png: " in shown
    assert any(label in shown for label in (SHOWN[0], MARKUP))
    assert is_harmless(shown)


@pytest.mark.parametrize("name", [TITLE, REVERSED])
def test_an_error_names_a_file_in_one_escaped_line(tmp_path, name):
    (tmp_path / name).mkdir()
    result = run("info", tmp_path / name)
    assert result.stderr.startswith("error: ")
    assert dict(zip(NAMES, SHOWN))[name] in result.stderr
    assert result.stderr.count("\n") == 1
    assert is_harmless(result.stderr)


def test_text_of_a_damaged_file_is_escaped_in_the_error(tmp_path):
    (tmp_path / "config.json").write_text(
        f'{{"kind": "{TITLE}"}}'.replace("\x1b", r"\u001b").replace("\x07", r"\u0007")
    )
    result = run("info", tmp_path)
    assert result.exit_code == 2
    assert is_harmless(result.stderr)


def test_a_file_name_that_looks_like_an_option_is_escaped(model):
    result = run("classify", f"--{TITLE}.png", "--model", model)
    assert result.exit_code == 2
    assert r"\x1b]0;owned" in result.stderr
    assert is_harmless(result.stderr)


def test_titles_headings_and_emoji_codes_of_tables_are_text(capsys):
    name = f"{MARKUP}{TITLE}:cat:"
    output.show_table(Table(name, [Column("label", name)], [{"label": name}]))
    assert capsys.readouterr().out.count(f"{MARKUP}{SHOWN[0]}:cat:") == 3


def test_the_log_of_a_training_run_is_text(tmp_path, capsys):
    logger = RunLogger(tmp_path, total_steps=1, first_step=0, evaluated_step=0)
    logger.say(f"note: 1 file was left out ({MARKUP}{TITLE})")
    logger.close()
    assert capsys.readouterr().err == f"note: 1 file was left out ({MARKUP}{SHOWN[0]})\n"


def test_every_line_of_a_command_goes_through_echo_unless_it_is_json():
    lines = [
        f"{path.stem}: {line.strip()}"
        for path in sorted(Path(output.__file__).parent.glob("*.py"))
        if path.stem not in ("output", "errors", "__init__")
        for line in path.read_text().splitlines()
        if "typer.echo" in line
    ]
    assert [line for line in lines if "json" not in line] == []


def test_a_byte_that_is_not_utf8_is_escaped():
    assert printable(os.fsdecode(b"\xff")) == r"\udcff"
