"""Folders change in one step, whatever happens in the middle."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from progresvit.io import files
from progresvit.io.files import replacing_folder

WRITER = """
import sys
from pathlib import Path
from progresvit.io.files import replacing_folder
for version in range(1, 10**6):
    with replacing_folder(Path(sys.argv[1])) as staged:
        for name in ("config", "weights"):
            (staged / name).write_text(str(version) * 20000)
    print(version, flush=True)
"""


def write(folder, text):
    with replacing_folder(folder) as staged:
        (staged / "file").write_text(text)


def test_a_folder_is_made_and_replaced(tmp_path):
    for text in ("first", "second"):
        write(tmp_path / "deep" / "folder", text)
        assert (tmp_path / "deep" / "folder" / "file").read_text() == text
    assert os.listdir(tmp_path / "deep") == ["folder"]


def test_a_new_folder_has_the_usual_permissions(tmp_path):
    (tmp_path / "usual").mkdir()
    write(tmp_path / "folder", "text")
    assert (tmp_path / "folder").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_an_error_while_writing_leaves_the_old_folder_and_no_other(tmp_path):
    write(tmp_path / "folder", "old")

    def write_half():
        with replacing_folder(tmp_path / "folder") as staged:
            (staged / "file").write_text("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert (tmp_path / "folder" / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["folder"]


def test_a_link_keeps_pointing_at_the_folder(tmp_path):
    write(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "file").read_text() == "new"


def test_without_the_system_call_the_folder_is_replaced_in_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(files.sys, "platform", "other")
    for text in ("first", "second"):
        write(tmp_path / "folder", text)
    assert (tmp_path / "folder" / "file").read_text() == "second"
    assert os.listdir(tmp_path) == ["folder"]


def test_a_failed_step_is_undone(tmp_path, monkeypatch):
    monkeypatch.setattr(files.sys, "platform", "other")
    write(tmp_path / "folder", "old")
    rename = files.Path.rename

    def fail_for_the_new_one(path, target):
        if target == tmp_path / "folder" and path.name != ".folder.previous":
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(files.Path, "rename", fail_for_the_new_one)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "folder", "new")
    assert (tmp_path / "folder" / "file").read_text() == "old"


def test_everything_is_on_the_disk_before_the_folders_change_places(tmp_path, monkeypatch):
    write(tmp_path / "folder", "old")
    events, put = [], files._put
    monkeypatch.setattr(files, "_sync", lambda path: events.append(path.name))
    monkeypatch.setattr(files, "_put", lambda *paths: (events.append("put"), put(*paths)))
    write(tmp_path / "folder", "new")
    assert events[0] == "file"
    assert events[1].startswith(".folder.")  # the list of its entries
    assert events[2:] == ["put", tmp_path.name]


def test_two_first_writers_do_not_collide(tmp_path):
    with replacing_folder(tmp_path / "folder") as staged:
        (staged / "file").write_text("slow")
        write(tmp_path / "folder", "quick")
    assert (tmp_path / "folder" / "file").read_text() == "slow"
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kills a process group the POSIX way")
def test_a_killed_writer_leaves_the_old_folder_or_the_new_one(tmp_path):
    """Twenty writers, each killed at a random moment in the middle of its work."""
    target, chance = tmp_path / "folder", random.Random(0)
    for _ in range(20):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE)
        writer.stdout.readline()  # the first version is there
        time.sleep(chance.uniform(0, 0.02))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert (target / "config").read_text() == (target / "weights").read_text() != ""
