"""Features of many files in a table: a resumed run duplicates and misses no row, and neighbours of every image."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from progresvit.data.crop import describe_preprocessing
from progresvit.data.dataset import find_unlabelled
from progresvit.engine import EmbeddingEngine, embed_files
from progresvit.engine.embed_files import FEATURES_KEY, find_neighbours
from progresvit.engine.embed_files import embed_files as embed
from progresvit.io.resumable import ResumableTable
from progresvit.io.weights import weights_hash
from progresvit.model import ProgResViT
from tests.factories import image_folder

IMAGES = 41
"""One of them cannot be read."""
CPU = torch.device("cpu")


@pytest.fixture
def model(small_config, randomize):
    return randomize(ProgResViT(small_config.replace(num_classes=0)))


@pytest.fixture
def folder(tmp_path):
    return image_folder(tmp_path / "images", IMAGES - 1)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(embed_files, "PART", 8)


def brute_force(features, k):
    """Indices and similarities of the k nearest others, from the whole matrix in float64."""
    rows = features.astype(np.float64) / np.linalg.norm(features.astype(np.float64), axis=1, keepdims=True)
    matrix = rows @ rows.T
    np.fill_diagonal(matrix, -np.inf)
    order = np.argsort(-matrix, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(matrix, order, axis=1)


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_the_table_holds_the_features_of_the_engine_and_how_they_were_made(model, folder, tmp_path, small_parts, pool):
    engine, out = EmbeddingEngine(model, round=1, pool=pool, batch=5), tmp_path / "new" / "f.parquet"
    result = embed(engine, find_unlabelled(folder), out)
    assert (result.images, result.errors) == (IMAGES, 1)
    table = pq.read_table(out)
    assert table.column_names == ["image", "features", "error"]
    assert str(table.schema.field("features").type).startswith("fixed_size_list<")
    assert table.schema.field("features").type.list_size == 64
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    assert table["image"].to_pylist() == [path.relative_to(folder).as_posix() for path in paths]
    for found, expected in zip(table.to_pylist(), engine.embed(paths), strict=True):
        assert found["error"] == expected.error
        if expected.error is None:
            np.testing.assert_allclose(found["features"], expected.features, atol=1e-5)
        else:
            assert found["features"] is None
    assert json.loads(table.schema.metadata[FEATURES_KEY]) == {
        "weights": weights_hash(model),
        "round": 1,
        "pool": pool,
        "precision": "fp32",
        "preprocessing": describe_preprocessing(model.config),
    }
    assert sorted(path.name for path in out.parent.iterdir()) == ["f.parquet"]


def test_progress_is_shown_step_by_step(model, folder, tmp_path):
    calls = []
    embed(
        EmbeddingEngine(model), find_unlabelled(folder), tmp_path / "f.parquet", neighbours=2,
        progress=lambda step: lambda *done: calls.append((step, *done)),
    )  # fmt: skip
    assert ("embedding", IMAGES, IMAGES) in calls
    assert calls[-1] == ("neighbours", IMAGES - 1, IMAGES - 1)


@pytest.mark.parametrize("neighbours", [None, 3])
def test_a_stopped_run_continues_with_what_is_missing_and_gives_the_identical_table(
    model, folder, tmp_path, small_parts, monkeypatch, neighbours
):
    """Batches of 3 do not divide parts of 8."""
    images = find_unlabelled(folder)
    embed(EmbeddingEngine(model, batch=3), images, tmp_path / "whole.parquet", neighbours=neighbours)
    read = []
    batches = embed_files.input_batches

    def breaking(dataset, items, size):
        for first, batch in zip(items[::size], batches(dataset, items, size)):
            read.extend(range(first, first + len(batch)))
            if 25 in read[-len(batch) :] and read.count(25) == 1:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(embed_files, "input_batches", breaking)
    out = tmp_path / "f.parquet"
    with pytest.raises(KeyboardInterrupt):
        embed(EmbeddingEngine(model, batch=3), images, out, neighbours=neighbours)
    parts = sorted(path.name for path in (tmp_path / "f.parquet.parts").glob("*.parquet"))
    assert 1 <= len(parts) <= 3
    assert not out.exists()
    read.append("again")
    embed(EmbeddingEngine(model, batch=3), images, out, neighbours=neighbours)
    assert read[read.index("again") + 1 :] == list(range(8 * len(parts), IMAGES))
    found, whole = pq.read_table(out), pq.read_table(tmp_path / "whole.parquet")
    assert found.equals(whole, check_metadata=True)
    assert len(set(found["image"].to_pylist())) == IMAGES


def begun(engine, images, out, monkeypatch):
    """A run that was killed when all its parts were there."""
    with monkeypatch.context() as patch:
        patch.setattr(ResumableTable, "paths", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            embed(engine, images, out)


def test_features_of_another_model_round_or_pooling_are_neither_mixed_in_nor_replaced(
    model, folder, tmp_path, small_parts, monkeypatch, randomize
):
    images, out = find_unlabelled(folder), tmp_path / "f.parquet"
    begun(EmbeddingEngine(model), images, out, monkeypatch)
    torch.manual_seed(1)
    other = randomize(ProgResViT(model.config))
    for engine, what in (
        (EmbeddingEngine(model, round=1), "round"),
        (EmbeddingEngine(model, pool="mean"), "pool"),
        (EmbeddingEngine(model, precision="bf16"), "precision"),
        (EmbeddingEngine(other), "weights"),
    ):
        with pytest.raises(ValueError, match=rf"beginning of another run \(other {what}\)"):
            embed(engine, images, out)
    with pytest.raises(ValueError, match=r"beginning of another run \(other images\)"):
        embed(EmbeddingEngine(model), images.subset(range(5)), out)
    with monkeypatch.context() as patch:
        patch.setattr(embed_files, "input_batches", lambda *given: 1 / 0)  # no image is read again
        embed(EmbeddingEngine(model, batch=7), images, out, neighbours=2)  # neighbours may be asked for later
    with pytest.raises(ValueError, match="already exists; pass overwrite=True"):
        embed(EmbeddingEngine(model), images, out)
    assert embed(EmbeddingEngine(other), images.subset(range(3)), out, overwrite=True).images == 3


@pytest.mark.parametrize("k", [1, 5, IMAGES - 2])
def test_neighbours_equal_a_brute_force_reference_without_the_unreadable_image(model, folder, tmp_path, small_parts, k):
    images, out = find_unlabelled(folder), tmp_path / "f.parquet"
    embed(EmbeddingEngine(model), images, out, neighbours=k)
    table = pq.read_table(out)
    assert table.column_names == ["image", "features", "error", "neighbours", "similarities"]
    rows = table.to_pylist()
    (bad,) = [row for row in rows if row["error"] is not None]
    assert (bad["image"], bad["neighbours"], bad["similarities"]) == ("1/torn.jpg", None, None)
    good = [row for row in rows if row["error"] is None]
    order, similarities = brute_force(np.array([row["features"] for row in good], np.float32), k)
    for row, indices, expected in zip(good, order, similarities):
        assert row["neighbours"] == [good[index]["image"] for index in indices]
        np.testing.assert_allclose(row["similarities"], expected, atol=1e-5)


@pytest.mark.parametrize("k", [1, 6])
def test_neighbours_do_not_depend_on_blocks(k, monkeypatch):
    features = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    order, similarities = brute_force(features, k)
    for block in (7, 50, 4096):
        monkeypatch.setattr(embed_files, "QUERY_BLOCK", block)
        found = find_neighbours(features, k, CPU)
        assert np.array_equal(found[0], order)
        np.testing.assert_allclose(found[1], similarities, atol=1e-5)


def test_an_image_is_no_neighbour_of_itself_however_many_duplicates_it_has():
    features = np.ones((9, 4), np.float32)
    features[8] = [1, 2, 3, 4]
    indices, similarities = find_neighbours(features, 3, CPU)
    assert all(number not in row for number, row in enumerate(indices.tolist()))
    assert all(len(set(row)) == 3 for row in indices.tolist())
    np.testing.assert_allclose(similarities[:8], 1, atol=1e-6)


def test_few_readable_images_have_fewer_neighbours(model, folder, tmp_path):
    images, out = find_unlabelled(folder), tmp_path / "f.parquet"
    place = [entry.name for entry in images.entries].index("1/torn.jpg")
    for chosen, expected in (([0, 1, place], [["0/03.png"], ["0/00.png"], None]), ([0, place], [[], None])):
        result = embed(EmbeddingEngine(model), images.subset(chosen), out, neighbours=len(chosen) - 1, overwrite=True)
        assert (result.images, result.errors) == (len(chosen), 1)
        assert pq.read_table(out)["neighbours"].to_pylist() == expected


def test_more_neighbours_than_images_are_refused_before_anything_is_read(model, folder, tmp_path):
    images, out = find_unlabelled(folder), tmp_path / "f.parquet"
    for wrong, match in (
        (0, "neighbours must be at least 1, got 0"),
        (IMAGES, f"need {IMAGES + 1} images or more, and there are {IMAGES}"),
    ):
        with pytest.raises(ValueError, match=match):
            embed(EmbeddingEngine(model), images, out, neighbours=wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


@pytest.mark.gpu
def test_a_gpu_finds_the_neighbours_of_the_cpu():
    features = np.random.default_rng(0).normal(size=(5000, 64)).astype(np.float32)
    expected, found = find_neighbours(features, 5, CPU), find_neighbours(features, 5, torch.device("cuda"))
    np.testing.assert_allclose(found[1], expected[1], atol=1e-4)
    assert (found[0] == expected[0]).mean() > 0.99


def test_a_run_that_was_killed_while_its_parts_were_removed_is_finished_unless_neighbours_are_missing(
    model, folder, tmp_path, small_parts, monkeypatch
):
    images, out = find_unlabelled(folder), tmp_path / "f.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(ResumableTable, "remove", lambda self: None)
        embed(EmbeddingEngine(model), images, out)
    monkeypatch.setattr(embed_files, "input_batches", lambda *given: 1 / 0)  # no image is read again
    with pytest.raises(ValueError, match="already exists; pass overwrite=True"):
        embed(EmbeddingEngine(model), images, out, neighbours=2)
    assert embed(EmbeddingEngine(model), images, out).errors == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.parquet", "images"]
