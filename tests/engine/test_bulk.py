import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from progresvit.data.pictures import find_unlabelled
from progresvit.engine import Engine, bulk
from progresvit.engine.bulk import classify_files, summarise
from progresvit.model import ProgResViT


@pytest.fixture
def model(small_config, randomize):
    labels = tuple(f"class {number}" for number in range(12))
    return randomize(ProgResViT(small_config.replace(labels=labels, class_ids=tuple(f"n{n:02}" for n in range(12)))))


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    for number in range(40):
        path = tmp_path / "pictures" / f"{number % 3}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(torch.randint(0, 256, (36, 40, 3), dtype=torch.uint8).numpy()).save(path)
    (tmp_path / "pictures" / "1" / "torn.jpg").write_bytes(b"torn")
    return tmp_path / "pictures"


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(bulk, "PART", 8)


def middling(model, folder):
    """A threshold that parts the pictures."""
    entropies = [one.entropy for one in Engine(model, float("inf")).classify(sorted(folder.rglob("*.png")))]
    return float(torch.tensor(entropies).median())


def test_the_table_holds_what_the_engine_says(model, folder, tmp_path, small_parts):
    engine = Engine(model, middling(model, folder), batch=16)
    told = []
    summary = classify_files(
        engine, find_unlabelled(folder), tmp_path / "r.parquet", progress=lambda *one: told.append(one)
    )
    rows = pq.read_table(tmp_path / "r.parquet").to_pylist()
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    answers = engine.classify(paths)
    assert [row["picture"] for row in rows] == [path.relative_to(folder).as_posix() for path in paths]
    for row, answer in zip(rows, answers):
        assert (row["index"], row["label"], row["exit_round"]) == (answer.index, answer.label, answer.exit_round)
        assert row["error"] == answer.error
        assert row["class_id"] == (None if answer.error else f"n{answer.index:02}")
    assert summary.exits == summarise(answers, 2).exits
    assert summary.gmacs == pytest.approx(summarise(answers, 2).gmacs, rel=1e-6)
    assert (summary.pictures, summary.errors, sum(summary.exits)) == (41, 1, 40)
    assert min(summary.exits) > 5
    assert told[-1] == (41, 41)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pictures", "r.parquet"]


def test_a_stopped_run_goes_on_with_what_is_missing_and_ends_the_same(
    model, folder, tmp_path, small_parts, monkeypatch
):
    pictures = find_unlabelled(folder)
    threshold = middling(model, folder)
    classify_files(Engine(model, threshold), pictures, tmp_path / "whole.parquet")
    read = []
    content = bulk._content

    def breaking(pictures, place):
        read.append(place)
        if len(read) == 25:
            raise KeyboardInterrupt
        return content(pictures, place)

    monkeypatch.setattr(bulk, "_content", breaking)
    with pytest.raises(KeyboardInterrupt):
        classify_files(Engine(model, threshold, batch=4), pictures, tmp_path / "r.parquet")
    parts = sorted(path.name for path in (tmp_path / "r.parquet.parts").glob("*.parquet"))
    assert 1 <= len(parts) <= 3
    assert not (tmp_path / "r.parquet").exists()
    classify_files(Engine(model, threshold, batch=4), pictures, tmp_path / "r.parquet")
    assert read[25:] == list(range(8 * len(parts), 41))
    found, whole = (pq.read_table(tmp_path / name).to_pylist() for name in ("r.parquet", "whole.parquet"))
    for one, other in zip(found, whole, strict=True):
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-5, nan_ok=True)
        for key in ("picture", "index", "exit_round", "error"):
            assert one[key] == other[key]


def test_answers_of_another_run_are_neither_mixed_in_nor_replaced(model, folder, tmp_path, small_parts, monkeypatch):
    pictures, out = find_unlabelled(folder), tmp_path / "r.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(bulk._Parts, "merge", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            classify_files(Engine(model, 0.5), pictures, out)
    with pytest.raises(ValueError, match=r"beginning of another run \(other thresholds\)"):
        classify_files(Engine(model, 0.6), pictures, out)
    with pytest.raises(ValueError, match=r"beginning of another run \(other pictures\)"):
        classify_files(Engine(model, 0.5), pictures.subset(range(5)), out)
    classify_files(Engine(model, 0.6), pictures, out, overwrite=True)
    with pytest.raises(ValueError, match="there already; use --overwrite"):
        classify_files(Engine(model, 0.6), pictures, out)
    assert classify_files(Engine(model, 0.6), pictures.subset(range(3)), out, overwrite=True).pictures == 3
