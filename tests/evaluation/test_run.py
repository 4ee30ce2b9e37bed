import io
import json
import shutil
import tarfile
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import progresvit
from progresvit.data.augment.corruption import Corruption
from progresvit.data.transforms import NamedTransform, normalise
from progresvit.distributed import Processes
from progresvit.evaluation import DataSource, EvalOptions, evaluate, read_records
from progresvit.io.weights import weights_hash
from progresvit.model import ProgResViT
from tests.evaluation.made import ONE, copy_digits
from tests.factories import digits_config

PLAIN = EvalOptions(workers=0, batch=5)


def make_model(randomize):
    torch.manual_seed(1)
    return randomize(ProgResViT(digits_config(depth=2)))


@pytest.fixture
def model(randomize):
    return make_model(randomize)


def run(model, data, out, options=PLAIN, processes=ONE, **source):
    return evaluate(model, DataSource(data=str(data), **source), out, name="m", processes=processes, options=options)


def stop_after(count, monkeypatch):
    """Ctrl-C in the batch after this number of images; returns the sizes of the batches."""
    seen, forward = [], ProgResViT.forward

    def counting(self, images):
        seen.append(len(images))
        if sum(seen) > count:
            raise KeyboardInterrupt
        return forward(self, images)

    monkeypatch.setattr(ProgResViT, "forward", counting)
    return seen


def run_stopped(model, data, out, options=PLAIN, *, after=14):
    """A run that is stopped after this number of images."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(after, patch)
        with pytest.raises(KeyboardInterrupt):
            run(model, data, out, options)


@pytest.fixture(scope="module")
def once(randomize, digits, tmp_path_factory):
    """Records of a whole run, and the folder of the parts of a run that was stopped after 14 of its 24 images."""
    folder, model = tmp_path_factory.mktemp("once"), make_model(randomize)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("progresvit.evaluation.parts.CHUNK", 7)
        whole = run(model, digits, folder / "whole.parquet")
        run_stopped(model, digits, folder / "r.parquet")
    assert not (folder / "r.parquet").exists()
    assert len(list((folder / "r.parquet.parts").glob("*.npz"))) == 2
    return SimpleNamespace(whole=whole, parts=folder / "r.parquet.parts")


@pytest.fixture
def whole(once):
    return once.whole


@pytest.fixture
def begun(once, tmp_path, small_chunks):
    """The file of a stopped run, which has its parts beside it."""
    shutil.copytree(once.parts, tmp_path / "r.parquet.parts")
    return tmp_path / "r.parquet"


def test_records_hold_the_answers_of_the_model_for_each_image(model, digits, tmp_path):
    records = run(model, digits, tmp_path / "r.parquet", replace(PLAIN, keep_logits=True))
    assert len(records) == 24
    assert sorted(records.ids)[0] == "val/0/12.png"
    transform = NamedTransform(model.config)
    for row in (0, 11, 23):
        image = Image.open(digits / records.ids[row]).convert("RGB")
        with torch.no_grad():
            outputs = model(normalise(transform(image, "")[None], model.config))
        for s, output in enumerate(outputs):
            assert records.logits[row, s] == pytest.approx(output.logits[0].numpy(), abs=1e-5)
            expected = output.logits[0].log_softmax(dim=0)[records.labels[row]].item()
            assert records.log_probability[row, s] == pytest.approx(expected, abs=1e-5)
        assert records.labels[row] == int(records.ids[row].split("/")[1])
    header = records.header
    assert (header.weights_sha256, header.images, header.precision) == (weights_hash(model), 24, "fp32")
    assert header.date.startswith("20")
    assert [path.name for path in tmp_path.iterdir()] == ["r.parquet"]


def test_batches_chunks_workers_and_bf16_change_nothing_but_rounding(model, digits, tmp_path, small_chunks):
    first = run(model, digits, tmp_path / "a.parquet")
    second = run(model, digits, tmp_path / "b.parquet", replace(PLAIN, batch=3, workers=2))
    assert np.array_equal(first.ids, second.ids)
    assert first.statistics == pytest.approx(second.statistics, abs=1e-4)
    rough = run(model, digits, tmp_path / "c.parquet", replace(PLAIN, precision="bf16"))
    assert rough.header.precision == "bf16"
    assert not np.array_equal(rough.statistics, first.statistics)
    assert np.abs(rough.top10_entropy - first.top10_entropy).max() < 0.05


def test_a_folder_a_tar_and_a_timm_set_give_the_same(model, digits, tmp_path):
    with tarfile.open(tmp_path / "digits.tar", "w") as tar:
        tar.add(digits / "val", "val")
    folder = run(model, digits, tmp_path / "a.parquet")
    packed = run(model, tmp_path / "digits.tar", tmp_path / "b.parquet")
    assert np.array_equal(folder.ids, packed.ids)
    assert np.array_equal(folder.statistics, packed.statistics)
    shards = tmp_path / "shards"
    shards.mkdir()
    with tarfile.open(shards / "val-0.tar", "w") as tar:
        for number, name in enumerate(folder.ids):
            for suffix, content in (
                ("png", (digits / name).read_bytes()),
                ("cls", str(folder.labels[number]).encode()),
            ):
                member = tarfile.TarInfo(f"{number:04d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    timm_set = run(model, f"wds/{shards}", tmp_path / "c.parquet")
    assert np.array_equal(timm_set.statistics, folder.statistics)
    assert np.array_equal(timm_set.labels, folder.labels)
    hub_set = run(model, f"hfds/{digits}", tmp_path / "d.parquet", split="validation")
    assert sorted(hub_set.top10_entropy[:, 0]) == pytest.approx(sorted(folder.top10_entropy[:, 0]), abs=1e-5)
    assert hub_set.correct.mean() == folder.correct.mean()


def test_a_stopped_run_continues_where_it_stopped(model, digits, begun, whole, monkeypatch):
    seen = stop_after(1000, monkeypatch)
    resumed = run(model, digits, begun)
    assert sum(seen) == 24 - 14
    assert np.array_equal(resumed.ids, whole.ids)
    assert resumed.statistics == pytest.approx(whole.statistics, abs=1e-4)
    assert [path.name for path in begun.parent.iterdir()] == ["r.parquet"]


def test_the_parts_of_another_run_are_refused(model, digits, begun):
    with pytest.raises(ValueError, match=r"beginning of another run \(other precision\)"):
        run(model, digits, begun, replace(PLAIN, precision="bf16"))
    with torch.no_grad():
        model.head.bias += 1
    with pytest.raises(ValueError, match=r"other weights"):
        run(model, digits, begun)
    assert len(run(model, digits, begun, replace(PLAIN, overwrite=True))) == 24


def test_a_run_that_stopped_before_its_first_part_leaves_nothing(model, digits, tmp_path):
    run_stopped(model, digits, tmp_path / "r.parquet", after=0)
    assert not list(tmp_path.glob("r.parquet*"))
    assert len(run(model, digits, tmp_path / "r.parquet", replace(PLAIN, precision="bf16"))) == 24


def test_images_without_labels(model, digits, tmp_path):
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    for number, name in enumerate(["a.png", "deep/b.png"]):
        shutil.copy(digits / "val" / "1" / f"{12 + number}.png", tmp_path / "mine" / name)
    records = run(model, tmp_path / "mine", tmp_path / "r.parquet", unlabelled=True)
    assert records.ids.tolist() == ["a.png", "deep/b.png"]
    assert not records.labelled
    assert records.header.split is None


def test_class_folders_at_the_top_and_a_nested_split(model, digits, tmp_path):
    top = run(model, digits / "val", tmp_path / "a.parquet", split=".")
    assert top.ids[0] == "0/12.png"
    shutil.copytree(digits / "val", tmp_path / "c" / "fog" / "3")
    nested = run(model, tmp_path / "c", tmp_path / "b.parquet", split="fog/3")
    assert np.array_equal(top.statistics, nested.statistics)
    with tarfile.open(tmp_path / "c.tar", "w") as tar:
        tar.add(tmp_path / "c" / "fog", "fog")
    packed = run(model, tmp_path / "c.tar", tmp_path / "d.parquet", split="fog/3")
    assert np.array_equal(packed.statistics, nested.statistics)


def test_a_corruption_is_the_same_in_every_run_and_worker_and_is_recorded(model, digits, tmp_path):
    fog = Corruption("gaussian_noise", 3)
    first = run(model, digits, tmp_path / "a.parquet", corruption=fog)
    second = run(model, digits, tmp_path / "b.parquet", replace(PLAIN, batch=24, workers=2), corruption=fog)
    clean = run(model, digits, tmp_path / "c.parquet")
    assert first.header.corruption == "gaussian_noise/3"
    assert first.statistics == pytest.approx(second.statistics, abs=1e-4)
    assert not np.allclose(first.statistics, clean.statistics, atol=1e-2)


def test_a_sample_is_drawn_by_its_seed_is_the_same_for_every_model_and_is_recorded(
    model, digits, whole, tmp_path, randomize
):
    sample = run(model, digits, tmp_path / "a.parquet", limit=10, seed=3)
    assert sample.header.sample == {"images": 10, "of": 24, "seed": 3}
    assert (sample.header.images, read_records(tmp_path / "a.parquet").header.sample["of"]) == (10, 24)
    rows = np.isin(whole.ids, sample.ids)
    assert np.array_equal(whole.ids[rows], sample.ids)  # in the order of the data
    assert sample.statistics == pytest.approx(whole.statistics[rows], abs=1e-4)
    other_model = run(randomize(ProgResViT(digits_config())), digits, tmp_path / "b.parquet", limit=10, seed=3)
    assert np.array_equal(other_model.ids, sample.ids)
    larger = DataSource(data=str(digits), limit=15, seed=3).find()
    assert {entry.name for entry in larger.entries} > set(sample.ids)
    others = DataSource(data=str(digits), limit=10).find()
    assert {entry.name for entry in others.entries} != set(sample.ids)
    assert others.class_ids == ("0", "1", "2", "3")
    assert "sample" not in whole.header.to_dict()  # headers without a sample are as before


def test_a_stopped_sample_is_continued_and_another_is_refused(model, digits, tmp_path, small_chunks, monkeypatch):
    sample = {"limit": 20, "seed": 1}
    with pytest.MonkeyPatch.context() as patch:
        stop_after(9, patch)
        with pytest.raises(KeyboardInterrupt):
            run(model, digits, tmp_path / "r.parquet", **sample)
    with pytest.raises(ValueError, match=r"beginning of another run \(other .*sample"):
        run(model, digits, tmp_path / "r.parquet", limit=20, seed=2)
    seen = stop_after(1000, monkeypatch)
    assert len(run(model, digits, tmp_path / "r.parquet", **sample)) == 20
    assert 0 < sum(seen) < 20


@pytest.mark.parametrize(
    ("limit", "message"),
    [(25, r"limit=25 is more than the 24 images .*\(val\); give at most 24"), (0, "limit must be at least 1, got 0")],
)
def test_a_sample_of_more_images_than_the_data_has_or_of_none_is_refused(model, digits, tmp_path, limit, message):
    with pytest.raises(ValueError, match=message):
        run(model, digits, tmp_path / "r.parquet", limit=limit)
    assert not list(tmp_path.iterdir())


def test_unreadable_images_are_left_out_and_named_up_to_one_in_a_hundred(model, digits, tmp_path):
    data = copy_digits(digits, tmp_path / "data", splits=("val",), classes="0123", count=30)
    (data / "val" / "2" / "2.png").write_bytes(b"not an image")
    many = replace(PLAIN, batch=60)
    records = run(model, data, tmp_path / "r.parquet", many)
    assert len(records) == 119
    assert [line.split(":")[0] for line in records.header.unreadable] == ["val/2/2.png"]
    assert "val/2/2.png" not in records.ids
    (data / "val" / "3" / "3.png").write_bytes(b"")
    with pytest.raises(ValueError, match="2 of 120 images cannot be read, more than 1%"):
        run(model, data, tmp_path / "s.parquet", many)
    assert not list(tmp_path.glob("s.parquet*"))


def test_images_that_share_a_name_are_refused_before_anything_is_done(model, digits, tmp_path):
    for folder in ("d1", "d2"):
        (tmp_path / folder).mkdir()
        with tarfile.open(tmp_path / folder / "x.tar", "w") as tar:
            tar.add(digits / "val" / "0", "mine")
    with pytest.raises(ValueError, match=r"6 images of .* share their name with another, such as x\.tar/mine/"):
        run(model, tmp_path / "d[12]" / "x.tar", tmp_path / "r.parquet", unlabelled=True)
    assert not list(tmp_path.glob("r.parquet*"))


def test_damaged_parts_are_done_again(model, digits, begun, whole):
    first, second = sorted(begun.with_name("r.parquet.parts").glob("*.npz"))
    first.write_bytes(b"")
    second.write_bytes(second.read_bytes()[:-30])
    assert np.array_equal(run(model, digits, begun).ids, whole.ids)


def test_parts_of_version_0_1_0_are_continued_without_the_column_that_they_lack(model, digits, begun, whole):
    parts = begun.with_name("r.parquet.parts")
    about = json.loads((parts / "run.json").read_text())  # its keys are still those of that version
    assert about["pictures"] == 24
    assert not {"images", "gmacs", "routable", "kind"} & {*about, *about["config"]}
    for path in parts.glob("*.npz"):
        with np.load(path) as part:
            columns = {name: part[name] for name in part.files if name not in ("log_probability", "image_hash")}
        np.savez(path, **columns)
    records = run(model, digits, begun)
    assert np.array_equal(records.ids, whole.ids)
    assert np.array_equal(records.entropy, whole.entropy)
    assert records.log_probability is None
    assert records.image_hash is None


def test_a_damaged_description_of_the_parts_is_named(model, digits, begun):
    (begun.with_name("r.parquet.parts") / "run.json").write_text("")
    with pytest.raises(ValueError, match=r"run\.json is damaged; pass overwrite=True"):
        run(model, digits, begun)
    assert len(run(model, digits, begun, replace(PLAIN, overwrite=True))) == 24


def test_a_run_that_overwrites_can_be_resumed_too(model, digits, tmp_path, small_chunks, monkeypatch):
    out, again = tmp_path / "r.parquet", replace(PLAIN, overwrite=True)
    run(model, digits, out)
    run_stopped(model, digits, out, again)
    seen = stop_after(1000, monkeypatch)
    run(model, digits, out, again)
    assert sum(seen) == 24 - 14


def test_progress_is_reported_after_every_batch(model, digits, tmp_path):
    reported = []
    source = DataSource(data=str(digits))
    evaluate(
        model,
        source,
        tmp_path / "r.parquet",
        name="m",
        processes=ONE,
        options=PLAIN,
        progress=lambda done, total: reported.append((done, total)),
    )
    assert reported == [(done, 24) for done in (0, 5, 10, 15, 20, 24)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_images_with_broken_logits_never_exit_early_and_are_counted(model, digits, tmp_path, bad):
    with torch.no_grad():
        model.head.bias[2] = bad
    records = run(model, digits, tmp_path / "r.parquet")
    assert records.broken == len(records) == 24
    assert not records.correct.any()
    assert not (records.top10_entropy < np.inf).any()


def test_bad_input_is_refused_and_leaves_no_files(model, digits, tmp_path, small_config):
    out = tmp_path / "out" / "r.parquet"
    (tmp_path / "empty" / "val" / "0").mkdir(parents=True)
    (tmp_path / "bare").mkdir()
    cases = [
        ({"data": tmp_path / "none"}, "no data at"),
        ({"data": tmp_path / "empty"}, "hold no images"),
        ({"data": tmp_path / "bare"}, "no images under val/<class>/.*'.' if the class folders are at the top"),
        ({"data": tmp_path / "bare", "unlabelled": True}, "holds no images"),
        ({"data": digits, "split": "test"}, "no images under test"),
        ({"data": digits, "unlabelled": True, "restrict_classes": True}, "have no labels"),
        ({"data": "hfds/some/thing", "unlabelled": True}, "timm's datasets have labels"),
        ({"data": digits, "options": replace(PLAIN, precision="fp16")}, "fp16 needs a CUDA device"),
        ({"data": digits, "options": replace(PLAIN, precision="tf32")}, "tf32 needs an NVIDIA GPU .* use fp32"),
        ({"data": digits, "options": replace(PLAIN, precision="int3")}, "unknown precision 'int3'"),
    ]
    for given, match in cases:
        with pytest.raises(ValueError, match=match):
            run(model, out=out, **given)
    foreign = ProgResViT(model.config.replace(class_ids=("a", "b", "c", "d")))
    with pytest.raises(ValueError, match="the data has the classes 0, 1, 2 and 1 more, the model a, b, c and 1 more"):
        run(foreign, digits, out)
    headless = ProgResViT(model.config.replace(num_classes=0, class_ids=None))
    with pytest.raises(ValueError, match="no classes to choose from"):
        run(headless, digits, out)
    assert not out.parent.exists()
    with pytest.raises(ValueError, match="is a folder"):
        run(model, digits, tmp_path / "bare")
    run(model, digits, out)
    with pytest.raises(ValueError, match=r"already exists; pass overwrite=True"):
        run(model, digits, out)
    with pytest.raises(ValueError, match="at least one image"):
        EvalOptions(batch=0)


@pytest.mark.gpu
def test_a_gpu_in_bf16_gives_nearly_the_cpus_records(model, digits, tmp_path):
    cpu = run(model, digits, tmp_path / "cpu.parquet")
    gpu = Processes(0, 1, torch.device("cuda", 0))
    same = run(model, digits, tmp_path / "gpu.parquet", processes=gpu)
    assert same.top10_entropy == pytest.approx(cpu.top10_entropy, abs=2e-3)
    rough = run(model, digits, tmp_path / "bf16.parquet", replace(PLAIN, precision="bf16", workers=2), processes=gpu)
    assert rough.top10_entropy == pytest.approx(cpu.top10_entropy, abs=0.1)
    assert rough.header.device != "cpu"


@pytest.mark.gpu
def test_a_gpu_in_tf32_rounds_and_leaves_the_process_as_it_was(digits, tmp_path):
    model = progresvit.create_model("progresvit_tiny_160_224", num_classes=4)
    gpu, before = Processes(0, 1, torch.device("cuda", 0)), torch.get_float32_matmul_precision()
    exact, rounded, again = (
        run(model, digits, tmp_path / f"{number}.parquet", replace(PLAIN, precision=precision), processes=gpu)
        for number, precision in enumerate(["fp32", "tf32", "fp32"])
    )
    assert not np.array_equal(rounded.top10_entropy, exact.top10_entropy)
    assert rounded.top10_entropy == pytest.approx(exact.top10_entropy, abs=2e-2)
    assert np.array_equal(again.top10_entropy, exact.top10_entropy)
    assert (rounded.header.precision, torch.get_float32_matmul_precision()) == ("tf32", before)
