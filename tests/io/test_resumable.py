"""Outputs that are written in parts: what an error leaves behind."""

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
