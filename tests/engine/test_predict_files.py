import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from progresvit.data.dataset import find_unlabelled
from progresvit.engine import Engine, predict_files
from progresvit.engine.predict_files import OLD_NAME, classify_files, summarise
from progresvit.engine.torch_backend import TorchBackend
from progresvit.io.resumable import ResumableTable
from progresvit.model import ProgResViT
from tests.engine.conftest import LABELS
from tests.factories import image_folder


@pytest.fixture
def model(small_config, randomize):
    return randomize(ProgResViT(small_config.replace(labels=LABELS, class_ids=tuple(f"n{n:02}" for n in range(12)))))


@pytest.fixture
def folder(tmp_path):
    return image_folder(tmp_path / "images")


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(predict_files, "PART", 8)


def middling(model, folder):
    """A threshold that parts the images."""
    entropies = [one.entropy for one in Engine(model, float("inf")).classify(sorted(folder.rglob("*.png")))]
    return float(torch.tensor(entropies).median())


def noting(read, monkeypatch, *, until=None):
    """Note the numbers of the images that the engine gets; interrupt at one of them, once."""
    batches = predict_files.input_batches

    def noted(dataset, items, size):
        for first, batch in zip(items[::size], batches(dataset, items, size)):
            read.extend(range(first, first + len(batch)))
            if until in read[-len(batch) :] and read.count(until) == 1:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(predict_files, "input_batches", noted)


def test_the_table_holds_what_the_engine_says(model, folder, tmp_path, small_parts):
    engine = Engine(model, middling(model, folder), batch=16)
    calls = []
    summary = classify_files(
        engine, find_unlabelled(folder), tmp_path / "r.parquet", progress=lambda *done: calls.append(done)
    )
    rows = pq.read_table(tmp_path / "r.parquet").to_pylist()
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    answers = engine.classify(paths)
    assert [row["image"] for row in rows] == [path.relative_to(folder).as_posix() for path in paths]
    for row, answer in zip(rows, answers):
        assert (row["index"], row["label"], row["exit_round"]) == (answer.index, answer.label, answer.exit_round)
        assert row["error"] == answer.error
        assert row["class_id"] == (None if answer.error else f"n{answer.index:02}")
    assert summary.exits == summarise(answers, 2).exits
    assert summary.gmacs == pytest.approx(summarise(answers, 2).gmacs, rel=1e-6)
    assert (summary.images, summary.errors, sum(summary.exits)) == (41, 1, 40)
    assert min(summary.exits) > 5
    assert calls[-1] == (41, 41)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "r.parquet"]


def test_a_stopped_run_goes_on_with_what_is_missing_and_ends_the_same(
    model, folder, tmp_path, small_parts, monkeypatch
):
    images = find_unlabelled(folder)
    threshold = middling(model, folder)
    classify_files(Engine(model, threshold), images, tmp_path / "whole.parquet")
    read = []
    noting(read, monkeypatch, until=25)
    with pytest.raises(KeyboardInterrupt):
        classify_files(Engine(model, threshold, batch=4), images, tmp_path / "r.parquet")
    parts = sorted((tmp_path / "r.parquet.parts").glob("*.parquet"))
    kept = sum(pq.read_table(path).num_rows for path in parts)
    assert 8 < kept <= 24
    assert not (tmp_path / "r.parquet").exists()
    read.append("again")
    classify_files(Engine(model, threshold, batch=4), images, tmp_path / "r.parquet")
    assert read[read.index("again") + 1 :] == list(range(kept, 41))
    found, whole = (pq.read_table(tmp_path / name).to_pylist() for name in ("r.parquet", "whole.parquet"))
    for one, other in zip(found, whole, strict=True):
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-5, nan_ok=True)
        for key in ("image", "index", "exit_round", "error"):
            assert one[key] == other[key]


def test_answers_of_another_run_are_neither_mixed_in_nor_replaced(model, folder, tmp_path, small_parts, monkeypatch):
    images, out = find_unlabelled(folder), tmp_path / "r.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(ResumableTable, "paths", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            classify_files(Engine(model, 0.5), images, out)
    with pytest.raises(ValueError, match=r"beginning of another run \(other thresholds\)"):
        classify_files(Engine(model, 0.6), images, out)
    with pytest.raises(ValueError, match=r"beginning of another run \(other pictures\)"):
        classify_files(Engine(model, 0.5), images.subset(range(5)), out)
    classify_files(Engine(model, 0.6), images, out, overwrite=True)
    with pytest.raises(ValueError, match="already exists; pass overwrite=True"):
        classify_files(Engine(model, 0.6), images, out)
    assert classify_files(Engine(model, 0.6), images.subset(range(3)), out, overwrite=True).images == 3


def begun(model, images, out, monkeypatch):
    """A run that was killed when all its parts were there."""
    with monkeypatch.context() as patch:
        patch.setattr(ResumableTable, "paths", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            classify_files(Engine(model, 0.5), images, out)
    return out.with_name(out.name + ".parts")


def test_damaged_parts_are_made_again(model, folder, tmp_path, small_parts, monkeypatch):
    images, out = find_unlabelled(folder), tmp_path / "r.parquet"
    parts = begun(model, images, out, monkeypatch)
    content = (parts / "000002.parquet").read_bytes()
    (parts / "000002.parquet").write_bytes(content[: len(content) // 2])
    classify_files(Engine(model, 0.5), images, out)
    assert pq.read_table(out).num_rows == 41
    assert not parts.exists()
    parts = begun(model, images, tmp_path / "s.parquet", monkeypatch)
    (parts / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json is damaged; pass overwrite=True"):
        classify_files(Engine(model, 0.5), images, tmp_path / "s.parquet")
    classify_files(Engine(model, 0.5), images, tmp_path / "s.parquet", overwrite=True)


def test_other_labels_and_changed_images_are_another_run(model, folder, tmp_path, small_parts, monkeypatch):
    out = tmp_path / "r.parquet"
    begun(model, find_unlabelled(folder), out, monkeypatch)
    other = ProgResViT(model.config.replace(labels=tuple("abcdefghijkl")))
    other.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match=r"other config"):
        classify_files(Engine(other.eval(), 0.5), find_unlabelled(folder), out)
    Image.new("RGB", (50, 50)).save(folder / "0" / "00.png")
    with pytest.raises(ValueError, match=r"other pictures"):
        classify_files(Engine(model, 0.5), find_unlabelled(folder), out)


def test_overwriting_never_brings_back_old_answers_nor_removes_foreign_files(
    model, folder, tmp_path, small_parts, monkeypatch
):
    images, out = find_unlabelled(folder), tmp_path / "r.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(ResumableTable, "remove", lambda self: None)  # killed when all but the tidying was done
        classify_files(Engine(model, 0.5), images, out)
    read = []
    noting(read, monkeypatch)
    classify_files(Engine(model, 0.5), images, out, overwrite=True)
    assert read == list(range(41))
    parts = tmp_path / "q.parquet.parts"
    parts.mkdir()
    (parts / "mine.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"mine\.txt, which no run wrote"):
            classify_files(Engine(model, 0.5), images, tmp_path / "q.parquet", overwrite=overwrite)
    assert (parts / "mine.txt").exists()


def test_bulk_runs_wait_for_full_batches_however_slow_the_loading(model, folder, tmp_path, monkeypatch):
    counts = []
    run = TorchBackend.run

    def counting(self, s, buffer, first, count):
        counts.append((s, count))
        return run(self, s, buffer, first, count)

    monkeypatch.setattr(TorchBackend, "run", counting)
    monkeypatch.setattr("progresvit.engine.engine.DEADLINE", 0.0)
    classify_files(Engine(model, 0.0, batch=16), find_unlabelled(folder), tmp_path / "r.parquet")
    assert sorted(counts) == sorted([(0, 16), (1, 16), (0, 16), (1, 16), (0, 8), (1, 8)])


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_tables_and_parts_of_earlier_versions_name_the_column_of_images_differently(
    model, folder, tmp_path, small_parts, monkeypatch, suffix
):
    images, out = find_unlabelled(folder), tmp_path / f"r{suffix}"
    with monkeypatch.context() as patch:
        patch.setattr(ResumableTable, "remove", lambda self: None)  # killed when all but the tidying was done
        summary = classify_files(Engine(model, 0.5), images, out)
    parts = sorted((tmp_path / f"{out.name}.parts").glob("*.parquet"))
    for path in parts:
        table = pq.read_table(path)
        pq.write_table(table.rename_columns([OLD_NAME, *table.column_names[1:]]), path)
    if suffix == ".parquet":
        table = pq.read_table(out)
        pq.write_table(table.rename_columns([OLD_NAME, *table.column_names[1:]]), out)
    else:
        out.write_text(out.read_text().replace('"image"', f'"{OLD_NAME}"', -1 if suffix == ".jsonl" else 1))
    run = tmp_path / f"{out.name}.parts" / "run.json"
    about = json.loads(run.read_text())
    about["written"] = [out.stat().st_size, out.stat().st_mtime_ns]
    run.write_text(json.dumps(about))
    before = out.read_bytes()
    assert classify_files(Engine(model, 0.5), images, out) == summary  # of the finished table
    assert out.read_bytes() == before


def test_the_parts_of_an_earlier_version_are_continued(model, folder, tmp_path, small_parts, monkeypatch):
    images, out = find_unlabelled(folder), tmp_path / "r.parquet"
    parts = begun(model, images, out, monkeypatch)
    paths = sorted(parts.glob("*.parquet"))
    for path in paths:
        table = pq.read_table(path)
        table = table.rename_columns([OLD_NAME, *table.column_names[1:]])
        pq.write_table(table.set_column(3, "label", pa.array(["of the part"] * len(table))), path)
    classify_files(Engine(model, 0.5), images, out)
    found = pq.read_table(out)
    assert found.column_names[0] == "image"
    assert found["image"].to_pylist() == [entry.name for entry in images.entries]
    assert "of the part" in found["label"].to_pylist()
