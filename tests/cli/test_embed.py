"""``progresvit embed``: a folder of images in, a table of features out."""

import json
import tarfile

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

import progresvit
from progresvit.data.samples import samples_folder
from progresvit.model import ProgResViT
from tests.commands import refused, run, works
from tests.engine.test_segmentation_engine import made_images


@pytest.fixture
def folder(small_config, randomize, tmp_path):
    return progresvit.save(randomize(ProgResViT(small_config.replace(num_classes=0))), tmp_path / "backbone")


@pytest.fixture
def photos(tmp_path):
    """Five images, one of them in a subfolder."""
    photos = tmp_path / "photos"
    (photos / "more").mkdir(parents=True)
    names = ("a.png", "b.jpg", "c.png", "d.png", "more/a.png")
    for name, image in zip(names, made_images([(90, 60), (48, 70), (60, 60), (40, 40), (50, 41)])):
        image.save(photos / name)
    return photos


def test_a_folder_is_embedded(folder, photos, tmp_path):
    out = tmp_path / "f.parquet"
    output = works("embed", photos, "--model", folder, "--out", out, "--device", "cpu")
    assert f"wrote {out}: 5 images, 128 features each (class token of round 2)" in output
    table = pq.read_table(out)
    assert table["image"].to_pylist() == ["a.png", "b.jpg", "c.png", "d.png", "more/a.png"]
    expected = progresvit.EmbeddingEngine(folder).embed(sorted(photos.rglob("*.*g")))
    np.testing.assert_allclose(table["features"].to_pylist(), [answer.features for answer in expected], atol=1e-5)


def test_round_pooling_precision_and_batch_are_chosen(folder, photos, tmp_path):
    out = tmp_path / "f.parquet"
    words = ("--round", 1, "--pool", "mean", "--precision", "bf16", "--batch", 2, "--workers", 1, "--device", "cpu")
    output = works("embed", photos, "--model", folder, "--out", out, *words)
    assert "5 images, 64 features each (mean of the patch tokens of round 1)" in output
    engine = progresvit.EmbeddingEngine(folder, round=1, pool="mean", precision="bf16", batch=2)
    expected = engine.embed(sorted(photos.rglob("*.*g")))
    table = pq.read_table(out)
    np.testing.assert_allclose(table["features"].to_pylist(), [answer.features for answer in expected], atol=1e-6)
    about = json.loads(table.schema.metadata[b"progresvit_features"])
    assert (about["round"], about["pool"], about["precision"]) == (1, "mean", "bf16")


def test_files_folders_and_tars_are_embedded(folder, photos, tmp_path):
    with tarfile.open(tmp_path / "few.tar", "w") as tar:
        tar.add(photos / "b.jpg", "in/b.jpg")
    out = tmp_path / "f.parquet"
    works("embed", photos / "b.jpg", photos / "more", tmp_path / "few.tar", "--model", folder, "--out", out)
    table = pq.read_table(out)
    first, _, last = table["features"].to_pylist()
    assert first == last
    names = [photos / "b.jpg", f"{photos / 'more'}/a.png", f"{tmp_path / 'few.tar'}/few.tar/in/b.jpg"]
    assert table["image"].to_pylist() == [str(name) for name in names]


def test_neighbours_are_printed_and_stored(folder, photos, tmp_path):
    out = tmp_path / "f.parquet"
    output = works("embed", photos, "--model", folder, "--out", out, "--neighbours", 2)
    rows = pq.read_table(out).to_pylist()
    printed = [line.split("│")[1:4] for line in output.splitlines() if line.startswith("│")]
    listed = [
        [row["image"], name, f"{similarity:.3f}"]
        for row in rows
        for name, similarity in zip(row["neighbours"], row["similarities"])
    ]
    assert [[cell.strip() for cell in cells] for cells in printed] == listed
    assert len(listed) == 10
    assert "the first" not in output


def test_of_many_neighbours_the_first_are_printed(folder, tmp_path):
    (tmp_path / "many").mkdir()
    for number, image in enumerate(made_images([(40, 40)] * 9)):
        image.save(tmp_path / "many" / f"{number}.png")
    out = tmp_path / "f.parquet"
    output = works("embed", tmp_path / "many", "--model", folder, "--out", out, "--neighbours", 7)
    assert sum(line.startswith("│") for line in output.splitlines()) == 5 * 7  # 40 rows at most
    assert f"the first 5 of 9 images; {out} has all of them (columns neighbours, similarities)" in output
    assert all(len(names) == 7 for names in pq.read_table(out)["neighbours"].to_pylist())


def test_what_cannot_be_read_is_listed_and_is_no_neighbour(folder, photos, tmp_path):
    (photos / "cut.jpg").write_bytes((photos / "b.jpg").read_bytes()[:-300])
    out = tmp_path / "f.parquet"
    result = run("embed", photos, tmp_path / "none.png", "--model", folder, "--out", out, "--neighbours", 4)
    assert result.exit_code == 1
    assert "5 images, 128 features each (class token of round 2); 1 unreadable (see column error)" in result.stdout
    assert f"skipped: {tmp_path / 'none.png'}: there is no such file" in result.stderr
    rows = pq.read_table(out).to_pylist()
    (bad,) = [row for row in rows if row["error"] is not None]
    assert bad["image"].endswith("cut.jpg")
    assert "truncated" in bad["error"]
    assert bad["features"] is bad["neighbours"] is None
    for row in rows:
        if row is not bad:
            assert sorted([row["image"], *row["neighbours"]]) == sorted(r["image"] for r in rows if r is not bad)


def test_wrong_arguments_are_refused_in_one_line(folder, photos, tmp_path):
    out = tmp_path / "f.parquet"
    words = ("embed", photos, "--model", folder, "--out", out)
    refused("there is no round 3; the rounds of this model are 1 to 2", *words, "--round", 3)
    refused("there is no round 0", *words, "--round", 0)
    refused("unknown pool 'men'; did you mean 'mean'?", *words, "--pool", "men")
    refused("5 neighbours need 6 images or more, and there are 5", *words, "--neighbours", 5)
    refused("neighbours must be at least 1, got 0", *words, "--neighbours", 0)
    refused("must be at least 1, got 0", *words, "--batch", 0)
    refused("unknown precision", *words, "--precision", "int4")
    refused("features are written as .parquet", "embed", photos, "--model", folder, "--out", tmp_path / "f.csv")
    refused("", "embed", photos, "--model", tmp_path / "nowhere", "--out", out)
    assert run("embed", photos, "--model", folder).exit_code == 2  # without --out
    assert run("embed", "--model", folder, "--out", out).exit_code == 2  # without images
    assert not list(tmp_path.glob("f.*"))


def test_an_existing_table_is_kept_without_overwrite(folder, photos, tmp_path):
    out = tmp_path / "f.parquet"
    words = ("embed", photos, "--model", folder, "--out", out)
    works(*words)
    refused("already exists; pass --overwrite", *words, "--neighbours", 1)
    works(*words, "--neighbours", 1, "--overwrite")
    assert "neighbours" in pq.read_table(out).column_names


def test_a_model_without_a_head_leads_from_classify_to_embed(folder, photos):
    refused("has no head, so it cannot classify; embed images with", "classify", photos, "--model", folder)


@pytest.mark.slow
def test_the_bundled_model_is_the_default(tmp_path):
    output = works("embed", samples_folder(), "--out", tmp_path / "f.parquet", "--pool", "mean", "--neighbours", 1)
    assert "10 images, 192 features each (mean of the patch tokens of round 2)" in output
    rows = {row["image"]: row["neighbours"] for row in pq.read_table(tmp_path / "f.parquet").to_pylist()}
    assert rows["tabby.jpg"] == ["samoyeds.jpg"]
    Image.open(samples_folder() / "tabby.jpg").resize((300, 300)).save(tmp_path / "copy.png")
    words = (samples_folder(), tmp_path / "copy.png", "--out", tmp_path / "g.parquet", "--neighbours", 1)
    works("embed", *words)
    last = pq.read_table(tmp_path / "g.parquet").to_pylist()[-1]
    assert last["neighbours"] == [f"{samples_folder()}/tabby.jpg"]
