"""Files that version 0.1.0 wrote are read, and used with the same results. See fixtures/v0_1/make.py."""

import hashlib
import json
import platform
import shutil
from itertools import compress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import progresvit
from tests.commands import refused, works

FOLDER = Path(__file__).parent / "fixtures" / "v0_1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
CPU = ("--device", "cpu")
ROUTER = ("--router", "model/router.safetensors")


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The current folder holds the files of version 0.1.0."""
    shutil.unpack_archive(FOLDER / "files.tar.xz", tmp_path)
    monkeypatch.chdir(tmp_path)


def is_same_arithmetic():
    """Kernels for other CPUs and other versions of torch add in another order."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = f"{(names or [platform.machine()])[0]}, {torch.backends.cpu.get_cpu_capability()}"
    return EXPECTED["made_with"] == {"torch": torch.__version__, "cpu": name}


def same(expected, rel=1e-5):
    """To the bit where the arithmetic is that of the fixtures, else within rounding."""
    return expected if is_same_arithmetic() else pytest.approx(expected, rel=rel, abs=rel)


def hash_weights(model):
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def rounded(value):
    """Floats with 12 digits: the last digits of an average depend on the CPU and on the version of numpy."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


def without_date(path):
    """Without the checksum too, which settings of that version lack."""
    left_out = ("date", "checksum")
    return rounded({key: value for key, value in json.loads(Path(path).read_text()).items() if key not in left_out})


def check_answers(name, *words):
    notes = works("classify", "images", *words, "--json").splitlines()  # a certificate of 0.1.0 has no checksum
    lines = [json.loads(line) for line in notes if not line.startswith("note: ")]
    expected = EXPECTED["answers"][name]
    for key in ("probability", "entropy"):
        assert [line[key] for line in lines] == same(expected[key])
    limit = json.loads(Path("model/settings/careful.json").read_text())["abstain"]  # exactly the entropy of an image
    keep = [is_same_arithmetic() or abs(entropy - limit) > 1e-5 for entropy in expected["entropy"]]
    for key in ("label", "exit_round", "abstained"):
        assert list(compress((line[key] for line in lines), keep)) == list(compress(expected[key], keep))


def test_the_model_has_the_same_weights_and_logits():
    model = progresvit.load("model")
    assert hash_weights(model) == EXPECTED["model"]["weights"]
    assert model.config.labels == tuple(f"class {number}" for number in range(12))
    inputs = np.random.default_rng(7).integers(-256, 256, (2, 3, 32, 32)) / 128
    with torch.inference_mode():
        outputs = model(torch.from_numpy(inputs).float())
    for output, expected in zip(outputs, EXPECTED["model"]["logits"], strict=True):
        assert output.logits.flatten().tolist() == same(np.ravel(expected).tolist())


@pytest.mark.parametrize(
    ("command", "words"),
    [("frontier", ("--setting", "model/settings/certified.json")), ("trust", ("--temperature",)), ("abstention", ())],
)
def test_records_give_the_same_tables(command, words):
    works(command, "records.parquet", *words, "--out", "table.json")
    rows = json.loads(Path("table.json").read_text())["rows"]
    for row, expected in zip(rows, EXPECTED["tables"][command], strict=True):
        for key, value in expected.items():
            assert rounded(row[key]) == (same(rounded(value)) if isinstance(value, float) else value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("model/settings/near-lossless.json", ("--near-lossless",)),
        ("model/settings/certified.json", ("--max-drop", 0.2, "--confidence", 0.9)),
        ("model/settings/careful.json", ("--near-lossless", "--max-error", 0.3)),
        ("model/budgets.json", ("--budgets",)),
        ("routed.json", ("--exit-share", 0.5, *ROUTER)),
    ],
)
def test_records_give_the_same_settings_and_budgets(path, words):
    works("calibrate", "records.parquet", *words, "--out", "again.json")
    new, old = without_date("again.json"), without_date(path)
    if words[-1] in ROUTER:  # its threshold is a probability that torch computes
        assert new.pop("threshold") == same(old.pop("threshold"))
    assert new == old


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("near-lossless", ()),
        ("certified", ("--threshold", "certified")),
        ("careful", ("--threshold", "careful")),
        ("budget", ("--budget-gmacs", EXPECTED["answers"]["budget_gmacs"])),
        ("routed", ("--threshold", "routed.json", *ROUTER)),
    ],
)
def test_settings_budgets_and_routers_lead_to_the_same_answers(name, words):
    check_answers(name, "--model", "model", *words, *CPU)


def test_an_engine_takes_the_settings_and_the_budgets_without_a_warning(recwarn):
    images = sorted(Path("images").rglob("*.png"))
    for name in ("certified", "careful"):
        predictions = progresvit.Engine("model", name, device="cpu").classify(images)
        assert [one.exit_round for one in predictions] == EXPECTED["answers"][name]["exit_round"]
    engine = progresvit.Engine("model", budget_gmacs=EXPECTED["answers"]["budget_gmacs"], device="cpu")
    assert engine.setting.rule == "budget"
    assert [str(one.message) for one in recwarn if "calibrated" in str(one.message)] == []


def test_the_export_answers_as_before_and_brings_its_setting():
    check_answers("export", "--model", "export")
    assert progresvit.Engine("export").setting.rule == "near-lossless"


def test_finished_answers_are_recognised_and_replaced_only_if_asked():
    command = ("classify", "images", "--model", "model", *CPU, "--out", "answers.parquet")
    before = Path("answers.parquet").read_bytes()
    refused("--overwrite", *command)
    assert Path("answers.parquet").read_bytes() == before
    old = pq.read_table("answers.parquet")
    works(*command, "--overwrite")
    new = pq.read_table("answers.parquet")
    for key in ("index", "class_id", "label", "exit_round", "gmacs", "abstained", "error"):
        assert new[key].to_pylist() == old[key].to_pylist()


def test_a_classification_that_was_stopped_continues_with_the_answers_that_are_there():
    parts = Path("unfinished.parquet.parts")
    images = [(path, path.stat()) for path in sorted(Path("images").rglob("*.png"))]
    listing = [  # of the images at this place, as version 0.1.0 writes it
        [str(path.resolve()), path.relative_to("images").as_posix(), 0, -1, stat.st_size, stat.st_mtime_ns]
        for path, stat in images
    ]
    about = json.loads((parts / "run.json").read_text())
    about["pictures"] = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    (parts / "run.json").write_text(json.dumps(about))
    answers = pq.read_table(parts / "000000.parquet")
    place, labels = answers.schema.get_field_index("label"), pa.array(["from the part"] * len(answers))
    pq.write_table(answers.set_column(place, "label", labels), parts / "000000.parquet")
    works("classify", "images", "--model", "model", *CPU, "--out", "unfinished.parquet")
    assert set(pq.read_table("unfinished.parquet")["label"].to_pylist()) == {"from the part"}
    assert not parts.exists()


@pytest.mark.slow
def test_an_interrupted_training_run_resumes_and_ends_with_the_same_losses():
    works("train", "recipe.yaml", "--data", "digits", "--out", "run", *CPU, "--resume")
    log = [json.loads(line) for line in Path("run", "log.jsonl").read_text().splitlines()]
    steps = [line for line in log if line["event"] == "train"]
    for line, (step, losses, lr) in zip(steps, EXPECTED["run"]["losses"], strict=True):
        assert (line["step"], line["lr"]) == (step, lr)
        assert line["losses"] == same(losses)
    evaluations = [line for line in log if line["event"] == "evaluation"]
    assert [[line["step"], line["top1"]] for line in evaluations] == EXPECTED["run"]["top1"]
    thresholds = [line["near_lossless"]["threshold"] for line in evaluations]
    assert thresholds == same(EXPECTED["run"]["thresholds"])
    if is_same_arithmetic():
        assert hash_weights(progresvit.load("run/model")) == EXPECTED["run"]["weights"]
    assert json.loads(Path("run", "run.json").read_text())["progresvit"] == "0.1.0"


def test_another_recipe_does_not_resume_the_old_run():
    refused("optimizer.batch", "train", "recipe.yaml", "--data", "digits", "--out", "run", "--resume", *CPU,
            "--set", "optimizer.batch=8")  # fmt: skip
