"""Outputs that are written in parts: what an error leaves behind."""

from pathlib import Path

import pytest

from progresvit.io.resumable import PartialOutput


def begun(folder):
    output = PartialOutput(folder, total=4, size=2, suffix="txt", is_whole=lambda path, items: path.is_file())
    output.claim({"run": 1}, overwrite=False)
    return output


def fails(output, *, first):
    with pytest.raises(ValueError, match="wrong mask"), output.kept_if_begun(first=first):
        raise ValueError("wrong mask")


def test_an_error_before_the_first_part_leaves_no_folder(tmp_path):
    output = begun(tmp_path / "parts")
    fails(output, first=True)
    assert not output.folder.exists()


def test_only_the_first_process_removes_it_since_others_may_be_writing(tmp_path):
    output = begun(tmp_path / "parts")
    fails(output, first=False)
    output.write(0, b"part")
    assert output.done() == [0]


def test_finished_parts_are_kept(tmp_path):
    output = begun(tmp_path / "parts")
    output.write(1, b"part")
    fails(output, first=True)
    assert output.done() == [1]


def test_a_file_is_known_as_the_whole_output_until_it_is_replaced(tmp_path):
    output = begun(tmp_path / "parts")
    staged, whole = tmp_path / "staged", tmp_path / "whole"
    staged.write_text("whole")
    output.note_written(staged)
    staged.replace(whole)
    assert output.has_written(whole)
    assert output.has_written(whole, {"run": 1})
    assert not output.has_written(whole, {"run": 2})
    output.claim({"run": 1}, overwrite=False)  # it is still the same run
    whole.write_text("another")
    assert not output.has_written(whole)


def test_the_file_that_identifies_the_run_is_removed_last(tmp_path, monkeypatch):
    output, removed = begun(tmp_path / "parts"), []
    for number in (0, 1):
        output.write(number, b"part")
    monkeypatch.setattr(Path, "unlink", lambda path, **options: removed.append(path.name))
    output.remove()
    assert removed == ["000000.txt", "000001.txt", "run.json"]
