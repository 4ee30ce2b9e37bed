"""Many files: kills at any moment, shards, a full disk, bad names, memory. Most tests need no model."""

import csv
import errno
import hashlib
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import progresvit
from progresvit.data.dataset import Entries, Entry, find_listed, find_unlabelled, unlabelled
from progresvit.data.timm_dataset import ReaderDataset
from progresvit.engine import Engine, predict_files
from progresvit.engine.files import Shard, input_batches, listing_hash
from progresvit.engine.images import UnreadImage
from progresvit.engine.predict_files import classify_files
from progresvit.engine.prediction import Prediction
from progresvit.io import files
from progresvit.io.resumable import ResumableTable
from progresvit.model import ProgResViT
from tests.waiting import wait_until

FILES = 41
PART = 8


class Answering:
    """Stands for an engine: its answer depends on the content of the file alone."""

    batch, gmacs, config = 5, (1.0, 3.0), SimpleNamespace(class_ids=None)

    def __init__(self, weights="w"):
        self.weights, self.asked = weights, 0

    def identity(self):
        return {"weights": self.weights}

    def stream(self, batches, deadline, processes):
        for batch in batches:
            for image in batch:
                self.asked += 1
                yield self.answer(image)

    def answer(self, image):
        if isinstance(image, Entry):
            try:
                image = image.read()
            except (OSError, ValueError) as error:
                image = UnreadImage(str(error))
        if isinstance(image, UnreadImage):
            return Prediction.failed(image.reason)
        number = sum(image)
        return Prediction(
            index=number % 7, label=f"class {number % 7}", probability=0.5, exit_round=1 + number % 2, entropy=0.25,
            gmacs=self.gmacs[number % 2], abstained=number % 3 == 0,
        )  # fmt: skip


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(predict_files, "PART", PART)


@pytest.fixture
def folder(tmp_path):
    """Files whose content is their number."""
    for number in range(FILES):
        path = tmp_path / "images" / f"{number % 3}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]))
    return tmp_path / "images"


def read(*paths):
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def names(folder):
    """Files, and folders of parts that are not empty."""
    return sorted({path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file()} - {"images"})


class Killed(BaseException):
    """The process is dead: nothing it would still do is done."""


def kill_at(moment, monkeypatch):
    """Every call that changes a file fails from the given one on, also those that would tidy up."""
    made = []

    def dying(function):
        def wrapper(*given, **options):
            made.append(function)
            if len(made) > moment:
                raise Killed
            return function(*given, **options)

        return wrapper

    for owner, name in (
        *((files.Path, name) for name in ("write_bytes", "replace", "unlink", "mkdir", "rmdir")),
        (os, "fsync"),
        (pq.ParquetWriter, "write_table"),
    ):
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))


@pytest.mark.parametrize("shard", [None, Shard(2, 3)])
def test_a_kill_between_any_two_changes_of_files_duplicates_and_loses_no_row(folder, tmp_path, monkeypatch, shard):
    dataset = find_unlabelled(folder)
    classify_files(Answering(), dataset, tmp_path / "whole.parquet", shard=shard)
    whole = (tmp_path / "whole.parquet") if shard is None else shard.path(tmp_path / "whole.parquet")
    moment, is_killed = 0, True
    while is_killed:
        place = tmp_path / f"{moment}"
        place.mkdir()
        out = (place / "r.parquet") if shard is None else shard.path(place / "r.parquet")
        with monkeypatch.context() as patch:
            kill_at(moment, patch)
            try:
                classify_files(Answering(), dataset, place / "r.parquet", shard=shard)
                is_killed = False
            except Killed:
                pass
        if is_killed:
            engine, kept = Answering(), len(list(out.with_name(out.name + ".parts").glob("0*.parquet")))
            is_written = out.exists()
            if not is_written or names(place) != [out.name]:
                classify_files(engine, dataset, place / "r.parquet", shard=shard)
            total = pq.read_table(whole).num_rows
            assert engine.asked == (0 if is_written else total - min(total, PART * kept))
        assert pq.read_table(out).equals(pq.read_table(whole))
        assert names(place) == [out.name]
        moment += 1
    assert moment > 20


RUN = """
import sys, time, torch
from pathlib import Path
from progresvit.data.dataset import find_listed
from progresvit.engine import Engine, predict_files
torch.set_num_threads(1)
predict_files.PART = 8
batches = predict_files.input_batches
predict_files.input_batches = lambda *given: ((time.sleep(0.1), batch)[1] for batch in batches(*given))
write = predict_files.pq.ParquetWriter.write_table
predict_files.pq.ParquetWriter.write_table = lambda *given, **more: (time.sleep(0.02), write(*given, **more))[1]
predict_files.classify_files(Engine(sys.argv[1], 0.5, batch=3), find_listed(sys.argv[2]), Path(sys.argv[3]))
"""


@pytest.mark.long
def test_a_run_that_is_killed_again_and_again_ends_with_the_table_of_an_uninterrupted_run(
    small_config, randomize, tmp_path
):
    model = progresvit.save(randomize(ProgResViT(small_config)), tmp_path / "model")
    paths = []
    for number in range(FILES):
        paths.append(tmp_path / f"{number:02}.png")
        Image.effect_noise((40, 36), 90).convert("RGB").save(paths[-1])
    paths[30].write_bytes(b"torn")
    listed, out = tmp_path / "paths.txt", tmp_path / "r.parquet"
    listed.write_text("".join(f"{path}\n" for path in paths))
    pause, kills = random.Random(0), 0

    def has_new_part(since):
        return any(path.stat().st_mtime_ns > since for path in tmp_path.glob("r.parquet.parts/0*.parquet"))

    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", RUN, model, listed, out])
        begun = time.time_ns()
        wait_until(lambda since=begun, run=process: run.poll() is not None or has_new_part(since))
        time.sleep(pause.uniform(0, 0.3))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills >= 2
    engine = Engine(model, 0.5, batch=3)
    if not out.exists():
        classify_files(engine, find_listed(listed), out)
    classify_files(engine, find_listed(listed), tmp_path / "whole.parquet")
    found, whole = read(out), read(tmp_path / "whole.parquet")
    assert [row["image"] for row in found] == [str(path) for path in paths]
    for row, expected in zip(found, whole, strict=True):
        for key in ("index", "exit_round", "error"):
            assert row[key] == expected[key]
        assert row["probability"] == pytest.approx(expected["probability"], abs=1e-5, nan_ok=True)


def test_an_interrupted_overwrite_continues_and_a_finished_one_starts_again(folder, tmp_path, monkeypatch):
    dataset, out = find_unlabelled(folder), tmp_path / "r.parquet"
    classify_files(Answering("old"), dataset, out)
    with monkeypatch.context() as patch:
        kill_at(12, patch)
        with pytest.raises(Killed):
            classify_files(Answering("new"), dataset, out, overwrite=True)
    kept = len(list((tmp_path / "r.parquet.parts").glob("0*.parquet")))
    assert 0 < kept < FILES // PART
    with pytest.raises(ValueError, match="already exists"):
        classify_files(Answering("new"), dataset, out)
    engine = Answering("new")
    classify_files(engine, dataset, out, overwrite=True)
    assert engine.asked == FILES - PART * kept
    engine = Answering("new")
    classify_files(engine, dataset, out, overwrite=True)
    assert engine.asked == FILES


@pytest.mark.parametrize("count", [1, 3, 4, FILES + 9])
def test_shards_together_hold_every_image_once_and_in_order(folder, tmp_path, count):
    dataset, out = find_unlabelled(folder), tmp_path / "r.parquet"
    whole = classify_files(Answering(), dataset, out)
    shards = [Shard(number, count) for number in range(1, count + 1)]
    summaries = [classify_files(Answering(), dataset, out, shard=shard) for shard in reversed(shards)]
    paths = [shard.path(out) for shard in shards]
    assert sorted(tmp_path.glob("r-*")) == paths
    assert paths[0].name == f"r-00001-of-{count:05d}.parquet"
    assert pq.read_table(paths).equals(pq.read_table(out))
    sizes = [pq.read_table(path).num_rows for path in paths]
    assert max(sizes) - min(sizes) <= 1
    assert sum(summary.images for summary in summaries) == whole.images == FILES
    assert sum(summary.abstained for summary in summaries) == whole.abstained > 0


def test_a_shard_of_other_images_is_refused(folder, tmp_path, monkeypatch):
    dataset, out = find_unlabelled(folder), tmp_path / "r.parquet"
    classify_files(Answering(), dataset, out, shard=Shard(1, 3))
    with monkeypatch.context() as patch:
        kill_at(9, patch)
        with pytest.raises(Killed):
            classify_files(Answering(), dataset, out, shard=Shard(2, 3))
    with pytest.raises(ValueError, match=r"r-00001-of-00003\.parquet was made of other images \(41, and here are 40\)"):
        classify_files(Answering(), dataset.subset(range(1, FILES)), out, shard=Shard(3, 3))
    Shard(1, 3).path(out).unlink()
    with pytest.raises(ValueError, match=r"r-00002-of-00003\.parquet was made of other images"):
        classify_files(Answering(), dataset.subset(range(1, FILES)), out, shard=Shard(3, 3))
    (tmp_path / "r-00001-of-00003.parquet").write_bytes(b"torn")
    classify_files(Answering(), dataset, out, shard=Shard(3, 3))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_finished_shard_of_other_images_is_refused_in_every_format(folder, tmp_path, suffix):
    dataset, out = find_unlabelled(folder), tmp_path / f"r{suffix}"
    classify_files(Answering(), dataset, out, shard=Shard(1, 2))
    with pytest.raises(ValueError, match=r"was made of other images \(41, and here are 40\)"):
        classify_files(Answering(), dataset.subset(range(1, FILES)), out, shard=Shard(2, 2))
    classify_files(Answering(), dataset, out, shard=Shard(2, 2))


@pytest.mark.parametrize(
    ("text", "match"),
    [("5/4", "shard 5/4 does not exist; name one of 1/4 to 4/4"), ("0/4", "shard 0/4 does not exist")]
    + [(text, "is not of the form i/n") for text in ("2", "a/4", "1/0", "-1/4", "1/4/2", "")],
)
def test_wrong_shards_are_refused(text, match):
    with pytest.raises(ValueError, match=match):
        Shard.parse(text)


def test_files_that_vanish_are_rows_with_an_error_and_new_files_are_not_seen(folder, tmp_path, monkeypatch):
    dataset = find_unlabelled(folder)
    (folder / "1" / "04.png").unlink()
    (folder / "2" / "05.png").chmod(0)
    (folder / "0" / "new.png").write_bytes(b"x")
    summary = classify_files(Answering(), dataset, tmp_path / "r.parquet")
    rows = {row["image"]: row for row in read(tmp_path / "r.parquet")}
    assert len(rows) == FILES
    assert "No such file" in rows["1/04.png"]["error"]
    assert summary.unreadable[0] == ("1/04.png", rows["1/04.png"]["error"])
    assert summary.errors == len(summary.unreadable) == sum(row["error"] is not None for row in rows.values())
    assert rows["0/00.png"]["error"] is None


def test_a_summary_names_the_first_unreadable_images_and_counts_all(tmp_path):
    dataset = unlabelled(Entries(Entry(f"{tmp_path}/{number}.png", f"{number}.png") for number in range(99)))
    summary = classify_files(Answering(), dataset, tmp_path / "r.parquet")
    assert (summary.images, summary.errors, summary.exits) == (99, 99, (0, 0))
    assert [name for name, _ in summary.unreadable] == [f"{number}.png" for number in range(20)]
    assert summary.gmacs != summary.gmacs


def test_a_full_disk_stops_the_run_with_the_remedy_and_keeps_what_is_finished(folder, tmp_path, monkeypatch):
    dataset, out = find_unlabelled(folder), tmp_path / "r.parquet"
    write, written = ResumableTable.write, []

    def full(self, number, content):
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(number)
        write(self, number, content)

    with monkeypatch.context() as patch:
        patch.setattr(ResumableTable, "write", full)
        with pytest.raises(OSError, match=r"r\.parquet cannot be written \(No space left on device\); free some space"):
            classify_files(Answering(), dataset, out)
    engine = Answering()
    classify_files(engine, dataset, out)
    assert engine.asked == FILES - 3 * PART
    assert pq.read_table(out).num_rows == FILES


def test_a_disk_that_is_full_when_the_table_is_put_together_loses_no_answer(folder, tmp_path):
    """The limit on file sizes of the system lets parts be written, and not the table."""
    dataset, out = find_unlabelled(folder), tmp_path / "r.parquet"
    classify_files(Answering(), dataset, tmp_path / "whole.parquet")
    most = (tmp_path / "whole.parquet").stat().st_size - 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with pytest.raises(OSError, match=r"r\.parquet cannot be written \(.*free some space there and run the same"):
            classify_files(Answering(), dataset, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ["r.parquet.parts", "whole.parquet"]
    engine = Answering()
    classify_files(engine, dataset, out)
    assert engine.asked == 0
    assert pq.read_table(out).equals(pq.read_table(tmp_path / "whole.parquet"))


def test_any_file_name_is_listed_and_written(tmp_path):
    folder = tmp_path / "imägés"
    folder.mkdir()
    for name in ("два.png".encode(), b"three\xff.png", b"two\nlines.png", b"\xf0\x9f\x90\xb6.png"):
        with open(os.path.join(os.fsencode(folder), name), "wb") as file:
            file.write(b"x")
    summary = classify_files(Answering(), find_unlabelled(folder), tmp_path / "r.parquet")
    assert summary.errors == 0
    found = [row["image"] for row in read(tmp_path / "r.parquet")]
    assert sorted(found) == sorted(["два.png", "three\\udcff.png", "two\nlines.png", "🐶.png"])


def test_a_bad_path_in_a_list_harms_only_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.png").write_bytes(b"x")
    (tmp_path / "loop.png").symlink_to("loop.png")
    bad = ["none.png", "loop.png", str(tmp_path), "x" * 5000, "nu\0ll.png"]
    (tmp_path / "paths.txt").write_text("\n".join(["good.png", *bad, str(tmp_path / "good.png")]))
    classify_files(Answering(), find_listed("paths.txt"), tmp_path / "r.parquet")
    rows = read(tmp_path / "r.parquet")
    assert [row["image"] for row in rows] == ["good.png", *bad, str(tmp_path / "good.png")]
    assert [row["error"] is None for row in rows] == [True, *[False] * 5, True]


def test_the_listing_hash_is_that_of_the_whole_list_as_json(folder, tmp_path, monkeypatch):
    (folder / "link.png").symlink_to(folder / "0" / "00.png")
    (tmp_path / "other").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    for source in ("other", "other/../images/./", "images"):
        dataset = find_unlabelled(source)
        (folder / "1" / "04.png").unlink(missing_ok=True)
        listing = []
        for entry in dataset.entries:
            path = files.Path(entry.path).resolve()
            known = [0, -1, path.stat().st_size, path.stat().st_mtime_ns] if path.exists() else [None]
            listing.append([str(path), entry.name, *known])
        digest = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
        assert listing_hash(dataset) == digest
        assert listing_hash(dataset, range(5)) == listing_hash(dataset.subset(range(5)))
    assert listing_hash(dataset.subset([])) == hashlib.sha256(b"[]").hexdigest()


def peak(dataset, out):
    """The most Python memory of a run, and of Arrow, in bytes."""
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        classify_files(Answering(), dataset, out)
        return tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


def test_memory_does_not_grow_with_the_number_of_images(tmp_path, monkeypatch):
    monkeypatch.setattr(predict_files, "PART", 256)
    few, many = (
        unlabelled(Entries(Entry(f"{tmp_path}/{number}.png", f"{number}.png") for number in range(count)))
        for count in (1024, 8192)
    )
    peak(few, tmp_path / "warm.parquet")
    growth = peak(many, tmp_path / "many.parquet") - peak(few, tmp_path / "few.parquet")
    assert growth / (len(many) - len(few)) < 20  # bytes for an image; a row alone takes hundreds


def test_batches_name_the_files_that_others_read_unless_the_dataset_reads_itself(folder):
    dataset = find_unlabelled(folder)
    batches = list(input_batches(dataset, range(3, 10), 3))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert [entry for batch in batches for entry in batch] == list(dataset.entries[3:10])
    reader = [(io.BytesIO(b"first"), 0), (io.BytesIO(b"second"), 0)]
    other = ReaderDataset((), dataset.entries[:2], dataset.targets[:2], reader=reader, numbers=(1, 0))
    assert list(input_batches(other, range(2), 2)) == [[b"second", b"first"]]


class Interrupted(Answering):
    """Ctrl-C after some images."""

    def stream(self, batches, deadline, processes):
        for answer in super().stream(batches, deadline, processes):
            if self.asked == 22:
                raise KeyboardInterrupt
            yield answer


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_an_interrupted_run_keeps_every_row_and_every_format_is_continued(folder, tmp_path, suffix):
    dataset, whole = find_unlabelled(folder), tmp_path / f"whole{suffix}"
    out, calls, engine = tmp_path / f"r{suffix}", [], Answering()
    expected = classify_files(Answering(), dataset, whole)
    with pytest.raises(KeyboardInterrupt):
        classify_files(Interrupted(), dataset, out)
    summary = classify_files(engine, dataset, out, progress=lambda *done: calls.append(done))
    assert calls[0] == (21, FILES)
    assert engine.asked == FILES - 21
    assert out.read_bytes() == whole.read_bytes()
    assert summary == expected
    assert names(tmp_path) == [out.name, whole.name]


def test_rows_are_kept_while_a_part_is_in_progress(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("progresvit.io.resumable.KEEP_EVERY", 0)
    kept = []

    class Watching(Answering):
        def answer(self, image):
            kept.append(sum(len(read(path)) for path in (tmp_path / "r.parquet.parts").glob("*.parquet")))
            return super().answer(image)

    classify_files(Watching(), find_unlabelled(folder), tmp_path / "r.parquet")
    assert kept == list(range(FILES))


def test_csv_and_json_lines_hold_the_rows_of_parquet(folder, tmp_path):
    (folder / "0" / "00.png").unlink()
    (folder / "0" / "00.png").symlink_to("nowhere")
    dataset = unlabelled(Entries([Entry(str(folder / "0" / "00.png"), "a,\n.png"), *find_unlabelled(folder).entries]))
    for suffix in (".parquet", ".csv", ".jsonl"):
        summary = classify_files(Answering(), dataset, tmp_path / f"r{suffix}")
        assert (summary.errors, summary.unreadable[0][0]) == (1, "a,\n.png")
    rows = read(tmp_path / "r.parquet")
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    with (tmp_path / "r.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    for row, line, cell in zip(rows, lines, cells, strict=True):
        for key in ("image", "index", "label", "exit_round", "error"):
            assert row[key] == line[key]
            assert cell[key] == ("" if row[key] is None else str(row[key]))
    assert "probability" not in lines[0]
    assert cells[0]["probability"] == ""
    assert cells[1]["probability"] == "0.5"
