"""Outputs that are written in parts: what an error leaves behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from progresvit.io.files import replacing_file
from progresvit.io.lock import FolderLock
from progresvit.io.part_formats import ParquetRows
from progresvit.io.resumable import ResumableTable, signals_held

ROOT = Path(__file__).parents[2]
ROWS = ParquetRows(pa.schema([("n", pa.int64())]))


def table(out, **options):
    """Four items in two parts."""
    return ResumableTable(out, ROWS, total=4, size=2, **options)


def claimed(out):
    begun = table(out)
    begun.claim({"run": 1}, overwrite=False)
    return begun


def rows(*numbers):
    """Items with the numbers of their parts."""
    return ((number // 2, {"n": number}) for number in numbers)


def interrupted(error, *numbers):
    yield from rows(*numbers)
    raise error


def write_numbers(parts):
    """As ``finish`` takes it."""
    return lambda path: path.write_text(str(pa.concat_tables(parts.parts())["n"].to_pylist()))


def test_an_error_before_the_first_part_leaves_no_folder(tmp_path):
    begun = claimed(tmp_path / "a")
    with pytest.raises(ValueError, match="wrong mask"):
        begun.fill(interrupted(ValueError("wrong mask"), 0))
    assert not begun.folder.exists()


def test_only_the_first_process_removes_it_since_others_may_be_writing(tmp_path):
    begun = claimed(tmp_path / "a")
    with pytest.raises(ValueError, match="wrong mask"):
        begun.fill(interrupted(ValueError("wrong mask"), 0), first=False)
    begun.fill(rows(0, 1))
    assert begun.done() == [0]


def test_finished_parts_are_kept(tmp_path):
    begun = claimed(tmp_path / "a")
    with pytest.raises(ValueError, match="wrong mask"):
        begun.fill(interrupted(ValueError("wrong mask"), 2, 3))
    assert begun.done() == [1]


def test_an_interrupted_table_continues_with_the_first_missing_item(tmp_path):
    with claimed(tmp_path / "a") as begun, pytest.raises(KeyboardInterrupt):
        begun.fill(interrupted(KeyboardInterrupt, 0, 1, 2))
    with claimed(tmp_path / "a") as again:
        remaining = again.remaining()
        assert remaining == {1: range(3, 4)}
        again.fill_in_order(remaining, [{"n": 3}])
        again.finish(write_numbers(again))
    assert (tmp_path / "a").read_text() == "[0, 1, 2, 3]"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_table_whose_parts_a_kill_left_is_finished_until_it_is_replaced(tmp_path, monkeypatch):
    def begin(identity, **options):
        with table(tmp_path / "a") as again:
            return again.begin(identity, overwrite=False, is_complete=lambda path: True)

    for is_replaced in (False, True):
        begun = claimed(tmp_path / "a")
        begun.fill(rows(0, 1, 2, 3))
        with monkeypatch.context() as patch:
            patch.setattr(ResumableTable, "remove", lambda self: self.__exit__())
            begun.finish(write_numbers(begun))
        with pytest.raises(ValueError, match="already exists"):
            begin({"run": 2})
        if is_replaced:
            (tmp_path / "a").write_text("another")
            with pytest.raises(ValueError, match="already exists"):
                begin({"run": 1})
        else:
            assert not begin({"run": 1})
            assert not begun.folder.exists()


def test_the_file_that_identifies_the_run_is_removed_last(tmp_path, monkeypatch):
    begun, removed = claimed(tmp_path / "a"), []
    begun.fill(rows(0, 1, 2, 3))
    monkeypatch.setattr(Path, "unlink", lambda path, **options: removed.append(path.name))
    begun.remove()
    assert removed[:4] == ["000000.parquet", "000001.parquet", "lock", "run.json"]


HOLD = """
import sys
from pathlib import Path
from tests.io.test_resumable import claimed
begun = claimed(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_that_another_process_uses_is_refused_until_that_process_is_dead(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "a"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        waiting = table(tmp_path / "a")
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=rf"used by another run right now \(process {other.pid} on .*\); wait"):
                waiting.claim({"run": 2}, overwrite=overwrite)
        claimed(tmp_path / "neighbour")  # such as another shard
        other.kill()
    waiting.claim({"run": 1}, overwrite=False)
    waiting.remove()
    assert not waiting.folder.exists()


def test_a_second_run_in_the_same_process_is_refused_until_the_first_ends(tmp_path):
    begun = claimed(tmp_path / "a")
    with pytest.raises(ValueError, match=rf"used by another run right now \(process {os.getpid()} on .*\); wait"):
        claimed(tmp_path / "a")
    with begun:
        begun.fill(rows(0, 1))
    assert claimed(tmp_path / "a").done() == [0]


def test_a_lock_removes_the_folder_that_it_made_and_no_other(tmp_path):
    made, existing = tmp_path / "made", tmp_path / "given"
    existing.mkdir()
    for folder in (made, existing):
        lock = FolderLock(folder, "give another folder")
        lock.acquire()
        assert (folder / "lock").read_text().startswith(f"process {os.getpid()} on ")
        lock.release()
    assert [path.name for path in tmp_path.iterdir()] == ["given"]
    assert not list(existing.iterdir())


def test_the_first_items_of_a_part_are_kept_until_it_is_complete(tmp_path):
    begun = claimed(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        begun.fill(interrupted(KeyboardInterrupt, 2))
    assert (begun.done(), ROWS.read(begun.begun_path(1))["n"].to_pylist()) == ([], [2])
    begun.fill(rows(2, 3))
    assert (begun.done(), begun.begun_path(1).exists()) == ([1], False)


def test_items_of_an_incomplete_part_are_kept_in_whole_batches(tmp_path):
    begun = ResumableTable(tmp_path / "a", ROWS, total=8, size=8, step=3)
    begun.claim({"run": 1}, overwrite=False)
    with pytest.raises(KeyboardInterrupt):
        begun.fill((0, row) for _, row in interrupted(KeyboardInterrupt, *range(7)))
    assert begun.remaining() == {0: range(6, 8)}


def test_signals_take_effect_after_a_block_that_holds_them():
    done = []

    def write():
        with signals_held():
            signal.raise_signal(signal.SIGINT)
            done.append("all")
        done.append("more")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            write()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["all"]


KILLED = """
import os, signal, sys
from pathlib import Path
from progresvit.io.files import replacing_file
from tests.io.test_resumable import claimed, rows
begun = claimed(Path(sys.argv[1]))
begun.fill(rows(0, 1))
files = [replacing_file(target) for target in (begun.path(1), begun.begun_path(1), begun.out)]
for file in files:
    file.__enter__().write_bytes(b"half")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_temporary_files_of_a_killed_run_are_removed_when_it_starts_again(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "a"], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    left = [path.name for path in tmp_path.rglob(".*")]
    assert len(left) == 3
    (tmp_path / ".a.notes.txt").touch()  # a file of the user
    again = claimed(tmp_path / "a")
    assert [path.name for path in tmp_path.rglob(".*")] == [".a.notes.txt"]
    assert again.done() == [0]


def test_temporary_files_of_a_run_in_progress_stay(tmp_path):
    begun = claimed(tmp_path / "a")
    with replacing_file(begun.path(0)) as staged:
        staged.write_bytes(b"half")
        with pytest.raises(ValueError, match="used by another run right now"):
            claimed(tmp_path / "a")
        assert staged.read_bytes() == b"half"


def test_on_a_drive_without_locks_temporary_files_stay(tmp_path, monkeypatch):
    begun = claimed(tmp_path / "a")
    begun._lock.release()
    monkeypatch.setattr(FolderLock, "acquire", lambda lock: None)  # it warns there
    with replacing_file(begun.path(0)) as staged:
        staged.write_bytes(b"half")
        claimed(tmp_path / "a")
        assert staged.read_bytes() == b"half"
