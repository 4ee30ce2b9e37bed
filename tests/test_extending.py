"""The examples of docs/extending.md: extracted from the page, short, and run with the commands that it shows."""

import importlib
import json
import multiprocessing
import re
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import progresvit
from progresvit.data.augment.corruption import Corruption
from progresvit.engine import Engine
from progresvit.engine.rounds import RoundRunner
from progresvit.evaluation import calibrate_exit_share, read_records
from progresvit.model import registry
from progresvit.routing import STATISTICS, SettingWarning, logit_statistics, open_router
from progresvit.training.logger import read_log
from tests.commands import refused, works
from tests.factories import digits_config

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
FILES = {re.match(r"# (\S+)\n", code)[1]: code for language, code in FENCES if language in ("python", "yaml")}
COMMANDS = [line for language, code in FENCES if not language for line in code.replace("\\\n", "").splitlines()]
MODULES = [name.removesuffix(".py") for name in FILES if name.endswith(".py")]


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """A folder with the files of the page, as the working directory of a new user."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it is not renewed for an edit within a second
    known = dict(registry.KINDS)
    yield tmp_path
    registry.KINDS.clear()
    registry.KINDS.update(known)
    for name in list(sys.modules):
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def model(tmp_path, randomize):
    """The folder of a model for the digits."""
    return progresvit.save(randomize(progresvit.ProgResViT(digits_config())), tmp_path / "model")


def typed(start, *more, **words):
    """Run the command of the page that begins so, with files in place of words in capitals, and more options."""
    found = [command for command in COMMANDS if command.startswith(start)]
    assert len(found) == 1, f"{found} begin with {start!r}"
    program, *arguments = shlex.split(found[0])
    assert program == "progresvit"
    return works(*[words.get(argument, argument) for argument in arguments], *more)


def all_logits(model, images):
    """(B, S, K)"""
    loaded = progresvit.load(model)
    with torch.no_grad():
        outputs = loaded(progresvit.data.transforms.normalise(images, loaded.config))
    return torch.stack([output.logits for output in outputs], dim=1)


def noise(count, seed=0):
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_there_are_five_examples_of_less_than_thirty_lines_and_each_has_a_command():
    assert MODULES == ["self_distillation", "margin", "dust", "cascade", "double"]
    assert {name: code.count("\n") for name, code in FILES.items() if code.count("\n") >= 30} == {}
    for name in MODULES:
        assert any(re.search(rf"[ =,]{name}(:| train)", command) for command in COMMANDS), name


@pytest.mark.slow
def test_a_task_of_your_own_trains_with_its_own_loss(digits, tmp_path):
    changes = ("schedule.epochs=1", "schedule.cooldown=0", "run.log_every=1")
    short = [*(word for change in changes for word in ("--set", change)), "--device", "cpu"]
    typed("progresvit train digits", *short, DATA=digits)
    works("train", "digits", "--data", digits, "--out", "plain", *short)
    (own, *_), (plain, *_) = read_log(tmp_path / "runs" / "distilled"), read_log(tmp_path / "plain")
    assert own["losses"][-1] == pytest.approx(plain["losses"][-1])  # the last round learns the labels alone
    assert own["losses"][0] > plain["losses"][0] + 0.1
    assert "task: self_distillation:SelfDistillation" in (tmp_path / "runs" / "distilled" / "recipe.yaml").read_text()


def test_a_task_that_is_not_there_is_refused(digits):
    base = ["train", "digits", "--data", digits, "--out", "out", "--set"]
    refused("task: missing cannot be imported (No module named 'missing'); run the", *base, "task=missing:Task")
    refused("has no Task class 'SelfDistilation'; did you mean", *base, "task=self_distillation:SelfDistilation")
    Path("needs.py").write_text("import no_such_package\n")
    refused("install or correct what needs imports", *base, "task=needs:Task")


def test_a_router_of_your_own_goes_from_records_to_the_engine(model, digits, tmp_path):
    typed("progresvit evaluate MODEL --data DATA --out records", MODEL=model, DATA=digits)
    assert "near-lossless" in typed("progresvit frontier records")
    typed("progresvit calibrate")
    shown = typed("progresvit classify IMAGES --model MODEL --router", IMAGES=digits / "val", MODEL=model)
    records, setting = read_records("records.parquet"), json.loads(Path("margin.json").read_text())
    margins = 1 - records.statistics[:, 0, STATISTICS.index("probability_margin_1_2")]
    early = int((margins < setting["threshold"]).sum())
    assert setting["expected"]["exit_shares"][0] == pytest.approx(early / len(records))
    assert f"{early} after round 1, {len(records) - early} after round 2" in shown
    router = open_router("margin:margin", records.rounds)
    assert np.array_equal(records.scores(router)[:, 0], margins)
    works("compare-routers", "records.parquet", "--router", "margin:margin")


def test_a_router_decides_which_images_exit(model):
    images = noise(60)
    scores = 1 - logit_statistics(all_logits(model, images)[:, 0])[:, STATISTICS.index("probability_margin_1_2")]
    threshold = float(scores.quantile(0.5))
    expected = [1 if score < threshold else 2 for score in scores.tolist()]
    function = open_router("margin:margin", 2).function
    for router in ("margin:margin", function):
        found = Engine(model, threshold, router=router, device="cpu").classify(images)
        assert [one.exit_round for one in found] == expected
    entropy = Engine(model, float("inf"), device="cpu").classify(images)
    limit = float(np.median([one.entropy for one in entropy]))
    by_entropy = [one.exit_round for one in Engine(model, limit, device="cpu").classify(images)]
    assert by_entropy != expected


def test_a_setting_belongs_to_the_file_of_its_router(model, digits):
    works("evaluate", model, "--data", digits, "--out", "records.parquet", "--workers", 0)
    setting = calibrate_exit_share(read_records("records.parquet"), 0.5, router=open_router("margin:margin", 2))
    setting.save("margin.json")
    Engine(model, "margin.json", router="margin:margin", device="cpu")
    Path("margin.py").write_text(FILES["margin.py"] + "\n")
    with pytest.raises(ValueError, match="but not of the one that was given"):
        Engine(model, "margin.json", router="margin:margin", device="cpu")


class Scaled(torch.nn.Module):
    """A router with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, s, statistics):
        return self.scale * statistics[:, 0].sigmoid()


def test_a_module_is_a_router_too_and_its_parameters_identify_it():
    from progresvit.routing.router import router_hash

    first, second = open_router(Scaled, 2), open_router(Scaled(), 2)
    assert router_hash(first) == router_hash(second)
    second.function.scale.data += 0.1
    assert router_hash(first) != router_hash(second)
    logits = torch.randn(4, 10)
    logits[1, 2] = torch.nan
    assert first.score(0, logits).isfinite().tolist() == [True, False, True, True]


def test_bad_routers_are_refused(model, digits):
    Path("bad.py").write_text(
        "def one(s): return s\n"
        "def shapes(s, statistics): return statistics\n"
        "def high(s, statistics): return 2 + statistics[:, 0]\n"
        "class Needs:\n    def __init__(self, path): ...\n"
    )
    works("evaluate", model, "--data", digits, "--out", "records.parquet", "--workers", 0)
    base = ["frontier", "records.parquet", "--router"]
    refused("bad:one is not a router; define it as score(s, statistics)", *base, "bad:one")
    refused("must return a tensor with one score for each image, of shape (24,), not (24, 23)", *base, "bad:shapes")
    refused("scale them to 0 … 1", *base, "bad:high")
    refused("bad:Needs cannot be made (Needs.__init__() missing 1", *base, "bad:Needs")
    refused("bad has no function or class 'hihg'; did you mean 'high'?", *base, "bad:hihg")
    refused("missing cannot be imported", *base, "missing:margin")
    refused("there is no router at missing.safetensors", *base, "missing.safetensors")


def test_a_corruption_of_your_own_changes_the_pixels_and_the_records(model, digits):
    typed("progresvit evaluate MODEL --data DATA --out dust", MODEL=model, DATA=digits)  # two workers
    works("evaluate", model, "--data", digits, "--out", "clean.parquet", "--workers", 0)
    dusty, clean = read_records("dust.parquet"), read_records("clean.parquet")
    assert dusty.header.corruption == "dust:dust/3"
    assert not np.array_equal(dusty.entropy, clean.entropy)
    white = Image.new("RGB", (100, 100), "white")
    for severity, share in ((1, 0.01), (5, 0.16)):
        pixels = np.asarray(Corruption.parse(f"dust:dust/{severity}")(white, "a.png"))
        assert (pixels == 26).all(axis=-1).mean() == pytest.approx(share, rel=0.3)
        assert set(np.unique(pixels)) == {26, 255}
    first, again, other = (np.asarray(Corruption("dust:dust", 3)(white, name)) for name in ("a", "a", "b"))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_suite_mixes_corruptions_and_a_cache_follows_the_file(model, digits, tmp_path):
    assert "dust.dust_5" in typed("progresvit shift", "--workers", 0, MODEL=model, DATA=digits)
    folders = list(Path("corrupted").glob("dust.dust_5-*"))
    assert len(folders) == 1
    fresh, again = (["--out", folder, "--workers", 0, "--corruptions", "dust:dust"] for folder in ("fresh", "shift"))
    base = ["shift", model, "--suite", "generated", "--data", digits, "--severities", 5]
    works(*base, *fresh)
    cached, direct = (read_records(Path(folder) / "records" / "dust.dust_5.parquet") for folder in ("shift", "fresh"))
    assert np.array_equal(cached.statistics, direct.statistics)
    Path("dust.py").write_text(FILES["dust.py"].replace("0.1, image", "0.9, image"))
    del sys.modules["dust"]
    refused("is of another model, data or precision; pass --overwrite", *base, *again)
    works(*base, *again, "--overwrite", "--cache", "corrupted")
    assert len(list(Path("corrupted").glob("dust.dust_5-*"))) == 2
    edited = read_records(Path("shift") / "records" / "dust.dust_5.parquet")
    assert not np.array_equal(edited.statistics, cached.statistics)


@pytest.mark.slow
def test_a_new_process_finds_a_corruption_in_the_working_directory():
    white = Image.new("RGB", (40, 40), "white")
    expected = np.asarray(Corruption("dust:dust", 3)(white, "a"))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(Corruption("dust:dust", 3), white, "a").result()
    assert np.array_equal(np.asarray(found), expected)


def test_bad_corruptions_are_refused_before_workers_start(model, digits):
    Path("bad.py").write_text(
        "def grey(image, severity, rng): return image.mean(-1)\n"
        "def nan(image, severity, rng): return image * float('nan')\n"
    )
    base = ["evaluate", model, "--data", digits, "--out", "r.parquet", "--corruption"]
    refused("bad:grey gives an array of shape (32, 32) for an image of shape (32, 32, 3); return", *base, "bad:grey/1")
    refused("bad:nan gives values that are not finite", *base, "bad:nan/1")
    refused("json:loads is not a corruption; define it as corrupt(image, severity, rng)", *base, "json:loads/1")
    refused("bad has no function 'gray'; did you mean 'grey'?", *base, "bad:gray/1")
    refused("missing cannot be imported", *base, "missing:fog/1")
    refused("not a corruption with a severity from 1 to 5", *base, "dust:dust/6")
    base = ["shift", model, "--data", digits, "--out", "shift"]
    refused("Your own is my_module:my_corruption", *base, "--suite", "generated", "--corruptions", "rain")
    refused("imagenet-c has no images of dust:dust", *base, "--suite", "imagenet-c", "--corruptions", "dust:dust")


@pytest.mark.slow
def test_a_baseline_of_your_own_is_trained_evaluated_and_routed(digits):
    few = [word for change in ("optimizer.batch=8", "optimizer.lr_batch=8", "ema=0.9") for word in ("--set", change)]
    typed("progresvit --import cascade train", *few, DATA=digits)  # there are only 48 images
    typed("progresvit --import cascade evaluate", DATA=digits)
    records = read_records("cascade.parquet")
    loaded = progresvit.load("runs/cascade/model")
    assert (type(loaded).__name__, loaded.config.kind) == ("Cascade", "cascade")
    assert records.correct.mean(axis=0).min() > 0.5  # four classes
    assert records.gmacs() == loaded.gmacs()
    assert 0 < loaded.gmacs()[0] < loaded.gmacs()[1]
    assert "near-lossless" in typed("progresvit frontier cascade")


def test_a_kind_that_is_not_registered_names_the_option(digits):
    arguments = ["train", "cascade.yaml", "--data", digits, "--out", "out"]
    refused("import the module that registers this kind", *arguments)
    refused("--import: missing cannot be imported", "--import", "missing", *arguments)
    registry.register("lost", config="cascade:Config", model="cascade:Cascade")
    refused("cascade has no class 'Config'; did you mean", *arguments, "--set", "model.kind=lost")


def test_a_backend_of_your_own_runs_the_rounds(model, digits):
    shown = typed(
        "progresvit classify IMAGES --model MODEL --backend", "--threshold", 0.9, IMAGES=digits / "val", MODEL=model
    )
    assert "24 images" in shown
    images, logits = noise(40), all_logits(model, noise(40))
    double = importlib.import_module("double").Double
    loaded = progresvit.load(model)
    threshold = float(np.median([one.entropy for one in Engine(model, float("inf"), device="cpu").classify(images)]))
    expected = Engine(model, threshold, device="cpu", batch=8, top_k=4).classify(images)
    for backend in ("double:Double", double, double(progresvit.load(model))):
        engine = Engine(loaded, threshold, backend=backend, batch=8, top_k=4)
        found = engine.classify(images)
        assert engine.backend == "double:Double"
        assert [(one.index, one.exit_round) for one in found] == [(one.index, one.exit_round) for one in expected]
        assert [one.probability for one in found] == pytest.approx([one.probability for one in expected], abs=1e-5)
        assert {one.exit_round for one in found} == {1, 2}
    assert next(loaded.parameters()).dtype == torch.float32  # it got a copy
    result = RoundRunner(engine).run(0, images.numpy())
    assert len(result.rows) == sum(one.exit_round == 2 for one in expected)
    exact = double(progresvit.load(model)).run(0, images.numpy(), None)[0]
    assert exact.dtype == np.float64
    assert 0 < np.abs(exact - logits[:, 0].numpy()).max() < 1e-4


def test_results_of_an_edited_backend_are_not_continued(model):
    before = Engine(model, 0.5, backend="double:Double").identity()
    Path("double.py").write_text(FILES["double.py"] + "\n")
    after = Engine(model, 0.5, backend="double:Double").identity()
    assert {key for key in before if before[key] != after[key]} == {"kernels"}
    assert before["backend"] == "double:Double"


def test_a_certificate_is_not_claimed_for_a_backend_of_your_own():
    with pytest.warns(SettingWarning, match="other backend: the certificate does not hold here"):
        Engine("nettewoof-tiny", "drop-1", backend="double:Double")


def test_bad_backends_are_refused(model, digits):
    Path("bad.py").write_text(
        "class NoRun:\n    def __init__(self, model): ...\n"
        "class NoModel:\n    def run(self, s, pixels, tokens): ...\n"
        "class Nothing:\n    def __init__(self, model): ...\n    def run(self, s, pixels, tokens): ...\n"
        "class Shapes(Nothing):\n    def run(self, s, pixels, tokens): return pixels[:, 0, 0, :4], None\n"
    )
    base = ["classify", digits / "val", "--model", model, "--threshold", 0, "--backend"]
    refused("bad:NoRun is not a backend; define its method run(s, pixels, tokens)", *base, "bad:NoRun")
    refused("bad:NoModel cannot be made (NoModel() takes no arguments); define", *base, "bad:NoModel")
    refused("json:loads cannot be made (the JSON object must be", *base, "json:loads")
    refused("run of bad:Nothing returned NoneType; return (logits, tokens)", *base, "bad:Nothing")
    refused("tokens of round 0 of bad:Shapes must have the shape", *base, "bad:Shapes")
    refused("bad has no backend 'Shape'; did you mean 'Shapes'", *base, "bad:Shape")
    refused("missing cannot be imported", *base, "missing:Backend")
    refused("unknown backend 'openvno'; did you mean 'openvino'? Your own is my_module:MyBackend.", *base, "openvno")
    refused("has no option precision", *base, "double:Double", "--precision", "bf16")
    with pytest.raises(ValueError, match="is not a backend"):
        Engine(model, 0.5, backend=3)
