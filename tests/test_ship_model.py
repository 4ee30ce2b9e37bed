"""scripts/ship_model.py, on a tiny random model and small made-up pictures."""

import importlib.util
import json
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
from progresvit.config import ModelConfig, make_rounds
from progresvit.io.weights import weights_hash
from progresvit.model import ProgResViT

SCRIPTS = Path(__file__).parent.parent / "scripts"
CLASSES = {"n02088364": "beagle", "n03028079": "church", "n03445777": "golf ball"}
COUNT = 1350  # half of them must do for a certificate


def load_script(name):
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, randomize):
    torch.manual_seed(1)
    config = ModelConfig(
        rounds=make_rounds([8, 16], [1, 2]), heads=2, depth=1, patch_size=8, num_classes=3,
        class_ids=tuple(CLASSES), labels=tuple(CLASSES.values()),
    )  # fmt: skip
    return progresvit.save(randomize(ProgResViT(config)), tmp_path_factory.mktemp("run") / "best")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for class_id in CLASSES:
        (root / "val" / class_id).mkdir(parents=True)
        for number in range(COUNT // len(CLASSES)):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "val" / class_id / f"{number}.bmp")
    return root


def make_run(folder, **changes):
    """The traces of a training, as far as the card tells of it."""
    folder.mkdir()
    command = ["/somewhere/bin/progresvit", "train", "photos", "--data", "/data/*.tar", "--out", "/runs/a", "--resume"]
    recipe = {
        "schedule": {"epochs": 10, "cooldown": 2}, "seed": 7, "distillation": {"teacher": "efficientnet-lite2"},
        "optimizer": {"batch": 100}, "model": {"start": "/runs/before/model"},
    }  # fmt: skip
    about = {"command": command, "pictures": 1234, "device": "a card", "processes": 1, "torch": "2.0", **changes}
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    lines = [{"event": "train", "step": 60, "images_per_second": 10}, {"event": "evaluation", "step": 60}]
    lines += [{"event": "train", "step": 120, "images_per_second": 100}]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def shipped(trained, pictures, tmp_path_factory):
    base = tmp_path_factory.mktemp("out")
    runs = [make_run(base / "first"), make_run(base / "second", pictures=99)]
    load_script("ship_model").main(
        [str(trained), "--data", str(pictures), "--runs", *map(str, runs), "--out", str(base / "shipped"),
         "--max-error", "0.75", "--workers", "0", "--records", str(base / "records.parquet")]
    )  # fmt: skip
    return base / "shipped"


def test_everything_is_made_of_the_rounded_weights(shipped, trained):
    assert {str(value.dtype) for value in load_file(shipped / "model.safetensors").values()} == {"torch.float16"}
    rounded = weights_hash(progresvit.load(shipped))
    assert rounded != weights_hash(progresvit.load(trained))
    settings = {path.stem: json.loads(path.read_text()) for path in (shipped / "settings").iterdir()}
    assert set(settings) == {"near-lossless", "drop-0.5", "drop-1", "careful"}
    assert {one["weights"] for one in settings.values()} == {rounded}
    assert settings["drop-0.5"]["epsilon"] == 0.005
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in settings:
            progresvit.Engine(shipped, name)
        gmacs = progresvit.Engine(shipped).gmacs
        progresvit.Engine(shipped, budget_gmacs=sum(gmacs) / 2)


def test_figures_tell_the_groups_apart(shipped):
    figures = json.loads((shipped / "figures.json").read_text())
    third = COUNT // 3
    assert figures["pictures"] == {"all": 3 * third, "easy ten": 2 * third, "ten dogs": third}
    assert figures["picked_on_them"]
    top1 = figures["rounds"][1]["top1"]
    assert top1["all"] == pytest.approx((2 * top1["easy ten"] + top1["ten dogs"]) / 3)
    for one in figures["settings"].values():
        assert sum(one["exit_shares"]["ten dogs"]) == pytest.approx(1)
    assert figures["halves"]["settings"]["drop-1"]["drop"]["highest"] <= 1
    assert [run["pictures"] for run in figures["training"]] == [1234, 99]
    assert figures["training"][0]["minutes"] == 11.0  # 60 steps of 100 pictures, at 10 and at 100 a second


def test_neither_card_nor_files_name_folders_of_the_machine(shipped, pictures):
    for path in [path for path in shipped.rglob("*") if path.suffix in (".json", ".md")]:
        text = path.read_text()
        assert not any(word in text for word in (str(pictures), "/somewhere", "/runs", "/data/")), path
    assert "progresvit train photos --data '*.tar' --out a\n" in (shipped / "README.md").read_text()


def test_the_card_is_what_the_figures_render_to(shipped):
    figures = json.loads((shipped / "figures.json").read_text())
    card = (shipped / "README.md").read_text()
    assert card == load_script("model_card").render(figures)
    assert "Stage 2: 12 epochs, seed 7, hard distillation from efficientnet-lite2" in card
    assert "The checkpoint was selected by its accuracy on these images" in card


def test_records_of_other_weights_are_refused(shipped, trained, pictures, tmp_path, randomize):
    other = progresvit.save(randomize(progresvit.load(trained)), tmp_path / "other")
    common = ["--data", str(pictures), "--out", str(tmp_path / "out"), "--runs", str(shipped.parent / "first")]
    with pytest.raises(SystemExit, match="of other weights"):
        load_script("ship_model").main([str(other), *common, "--records", str(shipped.parent / "records.parquet")])
    assert not (tmp_path / "out").exists()
