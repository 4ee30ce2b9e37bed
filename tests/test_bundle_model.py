"""scripts/bundle_model.py, on a tiny random model and small made-up images."""

import dataclasses
import importlib.util
import json
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

import progresvit
from progresvit.config import plain_vit
from progresvit.data.split import halves_by_name
from progresvit.distributed import Processes
from progresvit.evaluation import DataSource, EvalOptions, evaluate, read_records
from progresvit.io.weights import weights_hash
from progresvit.model import ProgResViT
from progresvit.routing import load_budgets, load_setting, operating_point
from repro.measure import certificates
from tests.evaluation.made import make_records
from tests.factories import tiny_config

SCRIPTS = Path(__file__).parent.parent / "scripts"
CLASSES = {"n02088364": "beagle", "n03028079": "church", "n03445777": "golf ball"}
COUNT = 1350  # half of them must suffice for a certificate


def load_script(name):
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, randomize):
    torch.manual_seed(1)
    config = tiny_config((8, 16), num_classes=3, class_ids=tuple(CLASSES), labels=tuple(CLASSES.values()))
    return progresvit.save(randomize(ProgResViT(config)), tmp_path_factory.mktemp("run") / "best")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for class_id in CLASSES:
        (root / "val" / class_id).mkdir(parents=True)
        for number in range(COUNT // len(CLASSES)):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "val" / class_id / f"{number}.bmp")
    return root


def make_run(folder, **changes):
    """The files of a training run that the card is made of."""
    folder.mkdir()
    command = ["/somewhere/bin/progresvit", "train", "photos", "--data", "/data/*.tar", "--out", "/runs/a", "--resume"]
    recipe = {
        "schedule": {"epochs": 10, "cooldown": 2}, "seed": 7, "distillation": {"teacher": "efficientnet-lite2"},
        "optimizer": {"batch": 100}, "model": {"start": "/runs/before/model"},
    }  # fmt: skip
    machine = {"device": "a card", "processes": 1, "torch": "2.0"}
    about = {"command": command, "pictures": 1234, "held_back": 50, **machine, **changes}
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    lines = [{"event": "train", "step": 60, "images_per_second": 10}, {"event": "evaluation", "step": 60}]
    lines += [{"event": "train", "step": 120, "images_per_second": 100}]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def bundle(name, model, images, base, *more):
    """Run the script; returns the model's folder."""
    out = base / name
    common = ["--data", str(images), "--out", str(out), "--figures", str(base / "figures"), "--workers", "0"]
    common += ["--records", str(base / "records"), "--max-error", "0.75"]
    load_script("bundle_model").main([name, str(model), *common, *map(str, more)])
    return out


@pytest.fixture(scope="module")
def twenty(trained, images, tmp_path_factory):
    """Made as nettewoof-tiny is."""
    base = tmp_path_factory.mktemp("twenty")
    runs = [make_run(base / "first"), make_run(base / "second", pictures=99)]
    return bundle("nettewoof-tiny", trained, images, base, "--runs", *runs)


@pytest.fixture(scope="module")
def plain(images, tmp_path_factory, randomize):
    """Records of two plain ViTs on the same images, the larger first."""
    folder, alone = tmp_path_factory.mktemp("plain"), Processes(0, 1, torch.device("cpu"))
    for side in (16, 8):
        config = plain_vit(resolution=side, heads=2, depth=1, patch_size=8, num_classes=3, class_ids=tuple(CLASSES))
        model, source = randomize(ProgResViT(config)), DataSource(data=str(images))
        path = folder / f"{side}.parquet"
        evaluate(model, source, path, name=f"plain {side}", processes=alone, options=EvalOptions(workers=0))
    return [folder / "16.parquet", folder / "8.parquet"]


OOD = {
    "weights": None, "known_classes": 3, "calibration_images": 77, "known_images": 1234, "unknown_images": 500,
    "unknown_classes": ["n02088364"] * 100,
    "scores": [{"answers": "routed", "score": "energy", "auroc": 0.876, "fpr95": 0.432}],
    "calibrated": {"score": "energy", "share": 0.05, "known_rejected": 0.0512, "unknown_rejected": 0.654},
}  # fmt: skip


@pytest.fixture(scope="module")
def thousand(trained, images, plain, tmp_path_factory):
    """Made as imagenet-tiny is, with everything that is optional."""
    base = tmp_path_factory.mktemp("thousand")
    rounded = progresvit.save(progresvit.load(trained), base / "rounded", dtype=torch.float16)
    (base / "ood.json").write_text(json.dumps({**OOD, "weights": weights_hash(progresvit.load(rounded))}))
    unknown = images / "val" / "n03028079" / "0.bmp"
    low, high = progresvit.load(trained).gmacs("paper")
    return bundle(
        "imagenet-tiny", trained, images, base, "--runs", make_run(base / "run"), "--held-out", "--shift",
        images / "val", "--plain", *plain, "--ood", base / "ood.json", "--unknown", unknown,
        "--budgets", middle_of(low, high),
    )  # fmt: skip


def middle_of(low, high):
    return f"{(low + high) / 2:.6f}"


def read_figures(folder):
    return json.loads((folder / "figures.json").read_text())


def records_of(folder):
    """All records, and those of the half that calibrates and of the other."""
    records = read_records(folder.parent / "records" / f"{folder.name}.parquet")
    return records, *(records.take(np.array(half)) for half in halves_by_name(records.ids.tolist()))


def test_everything_is_made_of_the_rounded_weights(twenty, trained):
    assert {str(value.dtype) for value in load_file(twenty / "model.safetensors").values()} == {"torch.float16"}
    rounded = weights_hash(progresvit.load(twenty))
    assert rounded != weights_hash(progresvit.load(trained))
    settings = {path.stem: load_setting(path) for path in (twenty / "settings").iterdir()}
    assert set(settings) == {"near-lossless", "drop-0.5", "drop-1", "careful"}
    assert {setting.weights_sha256 for setting in settings.values()} == {rounded}
    assert settings["drop-0.5"].epsilon == 0.005
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in settings:
            progresvit.Engine(twenty, name)
        gmacs = progresvit.Engine(twenty).gmacs
        progresvit.Engine(twenty, budget_gmacs=sum(gmacs) / 2)


def test_one_half_calibrates_and_the_other_gives_the_figures_of_settings(twenty):
    records, calibration, test = records_of(twenty)
    figures = read_figures(twenty)
    assert len(calibration) + len(test) == len(records) == COUNT
    budgets = load_budgets(twenty / "budgets.json")
    assert budgets.n == len(calibration)
    assert budgets.data == f"Imagenette and Imagewoof, validation, {COUNT // 2} of {COUNT:,} images, drawn by name"
    for name, measured in figures["settings"].items():
        setting = load_setting(twenty / "settings" / f"{name}.json")
        assert (setting.n, setting.data) == (len(calibration), budgets.data)
        points = [operating_point(half.scores(), half.correct, half.gmacs(), setting.threshold)
                  for half in (calibration, test)]  # fmt: skip
        assert setting.expected["top1"] == pytest.approx(points[0].top1)
        assert measured["top1"]["all"]["mean"] == pytest.approx(points[1].top1)
        assert measured["gmacs"]["all"] == pytest.approx(points[1].gmacs)
    for s, one in enumerate(figures["rounds"]):
        assert one["top1"]["all"]["mean"] == pytest.approx(records.correct[:, s].mean())
        assert one["top1"]["test half"]["mean"] == pytest.approx(test.correct[:, s].mean())


def test_figures_tell_the_groups_apart(twenty):
    figures = read_figures(twenty)
    third = COUNT // 3
    halves = {"calibration half": COUNT // 2, "test half": COUNT - COUNT // 2}
    assert figures["images"] == {"all": 3 * third, "easy ten": 2 * third, "ten dogs": third, **halves}
    top1 = {name: one["mean"] for name, one in figures["rounds"][1]["top1"].items()}
    assert top1["all"] == pytest.approx((2 * top1["easy ten"] + top1["ten dogs"]) / 3)
    for one in figures["settings"].values():
        assert sum(one["exit_shares"]["ten dogs"]) == pytest.approx(1)
    assert [run["images"] for run in figures["training"]] == [1234, 99]
    assert figures["training"][0]["minutes"] == 11.0  # 60 steps of 100 images, at 10 and at 100 a second


def test_intervals_are_wilson_s():
    n, p, z = 200, 0.75, 1.959964
    middle, reach = p + z**2 / (2 * n), z * (p * (1 - p) / n + z**2 / (4 * n**2)) ** 0.5
    lowest, highest = ((middle + sign * reach) / (1 + z**2 / n) for sign in (-1, 1))
    found = load_script("bundle_figures").share(np.arange(n) < p * n)
    assert found == pytest.approx({"mean": p, "lowest": lowest, "highest": highest}, abs=1e-6)


def test_certificates_hold_in_bootstrap_draws_and_a_wrong_one_is_noticed(monkeypatch):
    script, records = load_script("bundle_figures"), make_records(3000)
    checked = script.check_certificates(records, images=1500, draws=200)
    for one in checked["settings"].values():
        assert one["exceeded"] <= 0.1 * 200
        assert one["harm"]["mean"] <= one["epsilon"]
        assert 0 < one["saving"] < 1

    class Careless:
        threshold = 10.0

    monkeypatch.setattr(certificates, "certified_thresholds", lambda *_: Careless)
    careless = script.check_certificates(records, images=1500, draws=20)["settings"]["drop-1"]
    assert careless["exceeded"] == 20
    assert careless["harm"]["mean"] == pytest.approx((~records.correct[:, 0] & records.correct[:, 1]).mean())


def test_images_of_imagenet_s_training_set_are_known_by_their_names():
    records = make_records(4)
    ids = np.array(["val/n01440764/n01440764_10026.JPEG", "n01440764/ILSVRC2012_val_00000293.JPEG", "a/b.png", "c.png"])
    seen = load_script("bundle_figures")._seen_before(dataclasses.replace(records, ids=ids))
    assert (seen["images"], seen["others"]) == (1, 3)
    assert [one["mean"] for one in seen["top1_of_others"]] == records.correct[1:].mean(axis=0).tolist()


def test_optional_figures_are_on_the_card(thousand, trained, plain):
    figures, card = read_figures(thousand), (thousand / "README.md").read_text()
    text = " ".join(card.split())
    low, high = progresvit.load(trained).gmacs("paper")
    budget = f"budget-{middle_of(low, high)}"
    setting = load_setting(thousand / "settings" / f"{budget}.json")
    assert setting.rule == "budget"
    assert setting.expected["gmacs"] <= (low + high) / 2
    assert figures["shift"]["images"] == COUNT
    assert figures["shift"]["settings"][budget]["gmacs"]["all"] < high
    assert figures["shift"]["rounds"][1]["top1"] == figures["rounds"][1]["top1"]["all"]  # the same images here
    assert [one["resolution"] for one in figures["plain"]] == [8, 16]
    assert figures["plain"][1]["top1"]["all"]["mean"] == pytest.approx(read_records(plain[0]).correct.mean())
    assert "| routed | energy | 0.876 | 43.2 |" in card
    assert "to reject 5 % of them, rejects 5.1 % of the known and 65.4 % of the unknown images" in text
    careful, measured = load_setting(thousand / "settings" / "careful.json"), figures["settings"]["careful"]
    assert careful.ood.share == 0.05
    assert measured["ood"] == careful.ood.model_dump()
    assert 0 < measured["out_of_distribution"]["all"] < 0.2
    assert f"whose energy is below {careful.ood.limit:.4f}" in text
    (unknown,) = figures["unknown"]
    assert f"| 0.bmp | {unknown['answer']} | {100 * unknown['probability']:.1f} |" in card
    assert "were chosen by accuracy on 50 other images" in text
    assert "classify photo.jpg  " in card  # no --model: it is the default
    assert "easy ten" not in card


@pytest.mark.parametrize("name", ["twenty", "thousand"])
def test_neither_card_nor_files_name_folders_of_the_machine(name, request, images):
    folder = request.getfixturevalue(name)
    for path in [path for path in folder.rglob("*") if path.suffix in (".json", ".md")]:
        text = path.read_text()
        assert not any(word in text for word in (str(images), "/somewhere", "/runs", "/data/")), path
    assert "progresvit train photos --data '*.tar' --out a\n" in (folder / "README.md").read_text()


@pytest.mark.parametrize("name", ["twenty", "thousand"])
def test_the_card_is_what_the_figures_render_to(name, request):
    folder = request.getfixturevalue(name)
    card = (folder / "README.md").read_text()
    assert card == load_script("model_card").render(read_figures(folder))
    plot = folder.parent / "figures" / f"{folder.name}_frontier.png"
    assert f"docs/figures/{plot.name}" in card
    assert Image.open(plot).size[0] > 900


def test_the_card_tells_of_training_and_selection(twenty):
    card = (twenty / "README.md").read_text()
    text = " ".join(card.split())
    assert "Stage 2: 99 images, 12 epochs, seed 7, begun from model, hard distillation from efficientnet-lite2" in text
    assert "The checkpoint was selected by its accuracy on them" in text
    assert "--model nettewoof-tiny --threshold careful" in card
    assert "beagle (n02088364)" in text


def test_records_are_reused_only_for_the_same_weights_and_images(twenty, trained, images, tmp_path, randomize):
    run = twenty.parent / "first"
    other = progresvit.save(randomize(progresvit.load(trained)), tmp_path / "other")
    fewer = tmp_path / "fewer"
    shutil.copytree(images, fewer)
    (fewer / "val" / "n02088364" / "0.bmp").unlink()
    shutil.copytree(twenty.parent / "records", tmp_path / "records")
    for model, data, what in ((other, images, "weights"), (trained, fewer, "names")):
        with pytest.raises(ValueError, match=f"is of other {what}; delete it"):
            bundle("nettewoof-tiny", model, data, tmp_path, "--runs", run)
    assert not (tmp_path / "nettewoof-tiny").exists()


def test_what_does_not_fit_is_refused(twenty, trained, images, plain, tmp_path):
    run = twenty.parent / "first"
    shutil.copytree(twenty.parent / "records", tmp_path / "records")
    with pytest.raises(ValueError, match="budget of 2 GMACs is out of reach"):
        bundle("nettewoof-tiny", trained, images, tmp_path, "--runs", run, "--budgets", "2")
    same = make_run(tmp_path / "same", held_back=COUNT)
    with pytest.raises(SystemExit, match="leave out --held-out"):
        bundle("nettewoof-tiny", trained, images, tmp_path, "--runs", same, "--held-out")
    (tmp_path / "ood.json").write_text(json.dumps(OOD))
    with pytest.raises(SystemExit, match="was measured with other weights"):
        bundle("nettewoof-tiny", trained, images, tmp_path, "--runs", run, "--ood", tmp_path / "ood.json")
    script, records = load_script("bundle_figures"), records_of(twenty)[0]
    with pytest.raises(ValueError, match="other images"):
        script.measure_plain(records, [read_records(plain[0]).take(np.arange(9))])
    with pytest.raises(ValueError, match="2 rounds; a plain ViT has one"):
        script.measure_plain(records, [records])
    assert not (tmp_path / "nettewoof-tiny").exists()
