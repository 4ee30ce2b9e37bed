"""Outputs that are written in parts: what an error leaves behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from progresvit.io.lock import FolderLock
from progresvit.io.resumable import PartialOutput, signals_held


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
    assert removed[:4] == ["000000.txt", "000001.txt", "lock", "run.json"]


HOLD = """
import sys
from pathlib import Path
from progresvit.io.resumable import PartialOutput
output = PartialOutput(Path(sys.argv[1]), total=4, size=2, suffix="txt", is_whole=lambda path, items: path.is_file())
output.claim({"run": 1}, overwrite=False)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_that_another_process_uses_is_refused_until_that_process_is_dead(tmp_path):
    folder = tmp_path / "parts"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        output = PartialOutput(folder, total=4, size=2, suffix="txt", is_whole=lambda path, items: path.is_file())
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=rf"used by another run right now \(process {other.pid} on .*\); wait"):
                output.claim({"run": 2}, overwrite=overwrite)
        begun(tmp_path / "neighbour")  # such as another shard
        other.kill()
    output.claim({"run": 1}, overwrite=False)
    output.remove()
    assert not folder.exists()


def test_a_lock_removes_the_folder_that_it_made_and_no_other(tmp_path):
    made, given = tmp_path / "made", tmp_path / "given"
    given.mkdir()
    for folder in (made, given):
        lock = FolderLock(folder, "give another folder")
        lock.acquire()
        assert (folder / "lock").read_text().startswith(f"process {os.getpid()} on ")
        lock.release()
    assert [path.name for path in tmp_path.iterdir()] == ["given"]
    assert not list(given.iterdir())


def test_the_first_items_of_a_part_are_kept_until_it_is_complete(tmp_path):
    output = begun(tmp_path / "parts")
    output.keep(1, 1, b"first")
    with pytest.raises(KeyboardInterrupt), output.kept_if_begun(first=True):
        raise KeyboardInterrupt
    assert (output.done(), output.begun_path(1).read_bytes()) == ([], b"first")
    output.keep(1, 2, b"both")
    assert (output.done(), output.begun_path(1).exists()) == ([1], False)


def test_signals_take_effect_after_a_block_that_holds_them():
    done = []

    def write():
        with signals_held():
            signal.raise_signal(signal.SIGINT)
            done.append("all")
        done.append("more")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert done == ["all"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
