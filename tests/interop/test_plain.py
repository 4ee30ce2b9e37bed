"""Plain ViTs of timm as models of one round: answers as timm's own, by timm's own images."""

import argparse
import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import ImageNetInfo, create_transform, resolve_model_data_config
from timm.models import save_for_hf
from torch import nn

import progresvit
from progresvit.api import is_timm_name
from progresvit.evaluation import read_records
from progresvit.interop import from_timm, import_official, start_from
from progresvit.interop.plain import config_from_timm, timm_name
from progresvit.interop.timm_config import PLAIN_NAMES
from tests.commands import refused, works
from tests.interop.authors import Trap
from tests.serving.conftest import encode, running

SMALL = {"depth": 2, "img_size": 64}
DEIT_TINY = os.environ.get("PROGRESVIT_DEIT_TINY", "")
"""A file of DeiT-Tiny's weights, deit_tiny_patch16_224.safetensors."""


def random_vit(name, **changes):
    """A model of timm with every weight random, LayerScale and biases too."""
    module = timm.create_model(name, **changes).eval()
    with torch.no_grad():
        for key, value in module.named_parameters():
            value.normal_(std=0.1)
            if key.endswith("gamma") or "norm" in key:
                value.add_(1)
    return module


def folder_of(module, folder, changes, **options):
    save_for_hf(module, folder, model_args=changes, safe_serialization=True, **options)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A validation split of two classes of ImageNet, four images of coloured patches."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number, name in enumerate(ImageNetInfo().label_names()[:4]):
        patches = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8))
        path = root / "val" / name / f"{number}.png"
        path.parent.mkdir(parents=True)
        patches.resize((300, 260), Image.Resampling.NEAREST).save(path)
    return root


def timms_logits(module, files):
    side = {"input_size": (3, *module.patch_embed.img_size)}
    transform = create_transform(**{**resolve_model_data_config(module), **side})
    with torch.no_grad():
        return module(torch.stack([transform(Image.open(file)) for file in files]))


def check_answers(source, module, images, folder):
    """Engine, evaluate, export and serve answer as timm does, and nothing asks for a threshold."""
    files = sorted(images.rglob("*.png"))
    logits = timms_logits(module, files)
    probabilities, classes = logits.softmax(-1).max(-1)

    def check(engine):
        predictions = engine.classify(files)
        assert [prediction.index for prediction in predictions] == classes.tolist()
        assert [prediction.exit_round for prediction in predictions] == [1] * len(files)
        assert [prediction.probability for prediction in predictions] == pytest.approx(probabilities.tolist(), abs=1e-4)

    with warnings.catch_warnings():
        warnings.simplefilter("error", progresvit.routing.SettingWarning)
        check(progresvit.Engine(source))
        works("export", source, "--out", folder / "export")
        check(progresvit.Engine(folder / "export"))
    records = folder / "records.parquet"
    works("evaluate", source, "--data", images, "--out", records, "--logits", "--workers", "0")
    np.testing.assert_allclose(read_records(records).logits[:, 0], logits.numpy(), atol=1e-4)
    assert works("frontier", records).count("100.0") == 1  # one row: every image exits after round 1
    for rule in ("--near-lossless", "--budget-gmacs=1", "--exit-share=0.5", "--max-drop=0.1", "--budgets"):
        refused("one round has no threshold to calibrate", "calibrate", records, rule)
    corruption = ("--suite", "generated", "--corruptions", "fog", "--severities", "1", "--workers", "0")
    works("shift", source, *corruption, "--data", images, "--out", folder / "shift")
    with running(source, None) as server:
        answer = server.classify(encode(Image.open(files[0]).convert("RGB"), "PNG")).json()
    assert answer["index"] == classes[0]
    assert answer["probability"] == pytest.approx(probabilities[0].item(), abs=1e-4)


def test_a_folder_of_timm_is_accepted_wherever_a_model_is(images, tmp_path):
    module = random_vit("vit_tiny_patch16_224", **SMALL)
    check_answers(folder_of(module, tmp_path / "vit", SMALL), module, images, tmp_path)


@pytest.mark.slow
def test_vit_tiny_answers_as_timm_does(images, tmp_path):
    module = random_vit("vit_tiny_patch16_224")
    check_answers(folder_of(module, tmp_path / "vit", None), module, images, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not DEIT_TINY, reason="needs PROGRESVIT_DEIT_TINY, a file of DeiT-Tiny's weights")
def test_deit_tiny_answers_as_timm_does(images, tmp_path):
    module = timm.create_model("deit_tiny_patch16_224").eval()
    module.load_state_dict(load_file(DEIT_TINY))
    check_answers(DEIT_TINY, module, images, tmp_path)


PLAIN = {
    "DeiT": ("deit_tiny_patch16_224", {}),
    "DeiT-III, LayerScale and no class position": ("deit3_small_patch16_224", {}),
    "AugReg": ("vit_tiny_patch16_224", {}),
    "other patches": ("vit_small_patch32_224", {}),
    "no bias of qkv": ("vit_tiny_patch16_224", {"qkv_bias": False}),
    "other classes": ("vit_tiny_patch16_224", {"num_classes": 7}),
    "one channel": ("vit_tiny_patch16_224", {"in_chans": 1}),
}


@pytest.mark.parametrize("name", PLAIN)
def test_logits_are_timms(name):
    architecture, changes = PLAIN[name]
    module = random_vit(architecture, **SMALL, **changes)
    if name == "one channel":
        module.pretrained_cfg.update(mean=(0.5,), std=(0.25,))
    model = from_timm(module)
    pixels = torch.randn(2, model.config.in_channels, 64, 64)
    with torch.no_grad():
        expected = module(pixels)
        (output,) = model(pixels)
    assert expected.std() > 0.1
    assert (output.logits - expected).abs().max() <= 1e-4


def test_preprocessing_and_classes_are_those_of_timms_entry():
    augreg = config_from_timm("vit_small_patch16_384.augreg_in21k_ft_in1k")
    assert (augreg.mean, augreg.std, augreg.crop) == ((0.5,) * 3, (0.5,) * 3, 1.0)
    assert (augreg.resolution, augreg.heads, augreg.psg) == (384, 6, False)
    deit3 = config_from_timm("deit3_small_patch16_224.fb_in22k_ft_in1k")
    assert (deit3.mean, deit3.crop, deit3.layer_scale) == (progresvit.config.IMAGENET_MEAN, 1.0, 1e-6)
    assert config_from_timm("deit_small_patch16_224.fb_in1k").crop == 0.9
    assert (deit3.class_ids[0], deit3.labels[0]) == ("n01440764", "tench, Tinca tinca")
    assert config_from_timm("vit_small_patch14_dinov2").num_classes == 0


def test_a_folder_keeps_its_own_classes_preprocessing_and_settings(tmp_path):
    changes = {**SMALL, "num_classes": 2}
    module = random_vit("deit_tiny_patch16_224", **changes)
    names = {"label_names": ["n1", "n2"], "label_descriptions": {"n1": "cat", "n2": "dog"}}
    folder = folder_of(module, tmp_path / "vit", SMALL, model_config=names)
    values = json.loads((folder / "config.json").read_text())
    values["pretrained_cfg"]["crop_pct"] = 0.8
    (folder / "config.json").write_text(json.dumps(values))
    model = progresvit.load(folder)
    assert (model.config.class_ids, model.config.labels, model.config.crop) == (("n1", "n2"), ("cat", "dog"), 0.8)
    progresvit.save(model, tmp_path / "ours")
    assert progresvit.load(tmp_path / "ours").config == model.config
    start = progresvit.ProgResViT(model.config)
    assert start_from(start, str(folder)) == []
    assert torch.equal(start.head.weight, model.head.weight)


def test_a_setting_of_one_round_prints_no_threshold(images, tmp_path):
    from tests.factories import setting_of

    folder = folder_of(random_vit("vit_tiny_patch16_224", **SMALL), tmp_path / "vit", SMALL)
    (folder / "settings").mkdir()
    setting_of(progresvit.load(folder), rounds=1, threshold=0.0).save(folder / "settings" / "near-lossless.json")
    printed = works("classify", *sorted(images.rglob("*.png")), "--model", folder)
    assert "after round 1" in printed
    assert "τ" not in printed


def test_only_names_of_transformers_on_patches_import_timm(monkeypatch):
    assert is_timm_name("deit_tiny_patch16_224.fb_in1k")
    assert is_timm_name("flexivit_small")
    assert not is_timm_name("vit_nosuch")
    monkeypatch.setattr(timm, "is_model", lambda name: pytest.fail("asks timm"))
    for name in ("nosuch", "imagenet-tniy", "models", "progresvit_small_192_240", "vit_tiny_patch16_224.pth"):
        assert not is_timm_name(name)
    refused("there is no preset, bundled model or model folder 'nosuch'", "info", "nosuch")


def test_a_pickle_of_weights_in_a_folder_is_read_as_tensors(tmp_path):
    module = random_vit("vit_tiny_patch16_224", **SMALL)
    save_for_hf(module, tmp_path / "vit", model_args=SMALL, safe_serialization=False)
    assert not (tmp_path / "vit" / "model.safetensors").exists()
    assert torch.equal(progresvit.load(tmp_path / "vit").norm.weight, module.norm.weight)


def test_a_file_takes_architecture_and_preprocessing_from_its_name(tmp_path):
    weights = random_vit("deit_tiny_patch16_224", num_classes=5).state_dict()
    path = tmp_path / "deit_tiny_patch16_224.fb_in1k.safetensors"
    save_file(weights, path)
    model = progresvit.load(path)
    assert (model.config.num_classes, model.config.mean) == (5, progresvit.config.IMAGENET_MEAN)
    assert torch.equal(model.head.weight, weights["head.weight"])
    printed = works("import-official", path, "--out", tmp_path / "tiny")
    assert "224 px × 3 heads, 5 classes" in printed
    assert "timm entry deit_tiny_patch16_224.fb_in1k: crop 0.9, mean 0.485, 0.456, 0.406" in printed
    assert progresvit.load(tmp_path / "tiny").config == model.config
    torch.save(weights, tmp_path / "vit_tiny_patch16_224.pth")
    assert import_official(tmp_path / "vit_tiny_patch16_224.pth").config.mean == (0.5,) * 3
    path.rename(tmp_path / "my_best.safetensors")
    with pytest.raises(ValueError, match=r"Rename it to timm's name of the model"):
        progresvit.load(tmp_path / "my_best.safetensors")


def test_a_file_is_named_as_timms_entry():
    for name, entry in {
        "deit_tiny_patch16_224-a1311bcf.pth": "deit_tiny_patch16_224",
        "vit_base_patch16_224.augreg_in21k.safetensors": "vit_base_patch16_224.augreg_in21k",
        "vit_base_patch16_224_miil.pth.tar": "vit_base_patch16_224_miil",
        "vit_small_patch16_224_dino.safetensors": "vit_small_patch16_224_dino",
    }.items():
        assert timm_name(Path(name)) == entry


@pytest.mark.parametrize("rest", ["-mine", "_dinosaur", ".nosuch", ".augreg_in21k-mine", "0"])
def test_another_name_of_a_file_is_refused_with_timms_entries(rest):
    with pytest.raises(ValueError, match=r"Rename the file to .*, vit_tiny_patch16_224\.augreg_in21k\.safetensors"):
        timm_name(Path(f"vit_tiny_patch16_224{rest}.safetensors"))


@pytest.mark.parametrize(
    ("name", "mean", "crop"),
    [("vit_small_patch16_224_dino", 0.485, 0.9), ("deit3_small_patch16_224_in21ft1k", 0.485, 1.0)],
)
def test_a_former_name_of_timm_takes_the_entry_that_it_became(name, mean, crop, tmp_path):
    architecture = name.rsplit("_", 1)[0]
    save_file(random_vit(architecture).state_dict(), tmp_path / f"{name}.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = progresvit.load(tmp_path / f"{name}.safetensors").config
    assert (config.mean[0], config.crop) == (mean, crop)


def test_a_checkpoint_of_timms_training_script_keeps_its_preprocessing(tmp_path):
    options = {"model": "deit_tiny_patch16_224", "mean": [0.25], "std": [0.5, 0.6, 0.7], "crop_pct": 0.8}
    full = {**options, "img_size": 64, "interpolation": ""}
    weights = random_vit("deit_tiny_patch16_224", img_size=64).state_dict()
    torch.save({"args": argparse.Namespace(**full), "state_dict": weights}, tmp_path / "model_best.pth.tar")
    config = import_official(tmp_path / "model_best.pth.tar").config
    assert (config.mean, config.std, config.crop) == ((0.25,) * 3, (0.5, 0.6, 0.7), 0.8)
    bilinear = argparse.Namespace(**{**full, "interpolation": "bilinear"})
    torch.save({"args": bilinear, "state_dict": weights}, tmp_path / "model_best.pth.tar")
    with pytest.raises(ValueError, match="interpolation bilinear"):
        import_official(tmp_path / "model_best.pth.tar")


def test_a_folder_of_timm_opens_no_file_that_it_names(tmp_path):
    sprung, changes = tmp_path / "sprung", {**SMALL, "depth": 1}
    folder = folder_of(random_vit("vit_tiny_patch16_224", **changes), tmp_path / "vit", changes)
    torch.save({"state_dict": Trap(sprung)}, tmp_path / "trap.pth")
    change_cfg(folder, file=str(tmp_path / "trap.pth"), url="https://example.com/trap.pth", custom_load=True)
    assert progresvit.load(folder).config.depth == 1
    change(folder, model_args={**changes, "checkpoint_path": str(tmp_path / "trap.pth")})
    with pytest.raises(ValueError, match="model_args: checkpoint_path: unknown key"):
        progresvit.load(folder)
    assert not sprung.exists()


def test_a_folder_of_timm_is_judged_before_its_weights_are_read(tmp_path):
    changes = {**SMALL, "depth": 1}
    folder = folder_of(random_vit("vit_tiny_patch16_224", **changes), tmp_path / "vit", changes)
    (folder / "model.safetensors").write_bytes(b"cut")
    assert "round 1" in works("info", folder)  # from config.json alone
    change_cfg(folder, interpolation="bilinear")
    with pytest.raises(ValueError, match="interpolation bilinear"):
        progresvit.load(folder)


def test_the_weights_in_a_folder_are_refused_with_the_folder(tmp_path):
    changes = {**SMALL, "depth": 1}
    folder = folder_of(random_vit("vit_tiny_patch16_224", **changes), tmp_path / "vit", changes)
    ours = works("import-official", folder, "--out", tmp_path / "ours") and tmp_path / "ours"
    for part in (folder, ours, progresvit.api.bundled_folder()):
        with pytest.raises(ValueError, match=f"a part of the model folder {part}; give the folder"):
            progresvit.load(part / "model.safetensors")
    refused(f"{ours} is a model folder already", "import-official", ours, "--out", tmp_path / "again")


@pytest.mark.parametrize(
    ("name", "difference", "nearest"),
    [
        ("swin_tiny_patch4_window7_224", "SwinTransformer", "vit_tiny_patch16_224"),
        ("deit_tiny_distilled_patch16_224", "VisionTransformerDistilled", "deit_tiny_patch16_224"),
        ("vit_small_patch14_reg4_dinov2", "reg_token", "vit_small_patch14_dinov2"),
        ("vit_base_patch16_clip_224", r"norm_pre\.weight", "vit_base_patch16_224"),
        ("vit_huge_patch14_224", "16 heads for 1280 channels", "vit_large_patch14_224"),
        ("vit_base_patch16_gap_224", r"norm\.weight|pooled by 'avg'", "vit_base_patch16_224"),
        ("vit_base_patch16_224_miil", "interpolation bilinear", "vit_base_patch16_224"),
    ],
)
def test_a_model_that_is_not_a_plain_vit_is_refused_with_the_nearest_ones(name, difference, nearest):
    with pytest.raises(ValueError, match=f"{difference}.*nearest plain ViTs.* {nearest}"):
        progresvit.load(name)


@pytest.mark.slow
def test_every_plain_vit_that_errors_suggest_is_one():
    for name in filter(PLAIN_NAMES.fullmatch, timm.list_models()):
        assert config_from_timm(name).psg is False


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"act_layer": "gelu_tanh"}, "activation"),
        ({"norm_layer": lambda width, **_: nn.LayerNorm(width, eps=1e-5)}, "epsilon of 1e-05"),
        ({"mlp_ratio": 3}, "576 hidden channels"),
        ({"num_heads": 6}, "6 heads for 192 channels"),
        ({"global_pool": "avg", "fc_norm": False}, "pooled by 'avg'"),
        ({"block_fn": timm.models.vision_transformer.ResPostBlock}, "ResPostBlock"),
        ({"img_size": (64, 96)}, "64x96 pixels"),
        ({"pos_embed": "none"}, "lacks pos_embed"),
        ({"proj_bias": False}, r"lacks blocks\.0\.attn\.proj\.bias"),
    ],
)
def test_differences_that_names_of_weights_do_not_show_are_refused(options, difference):
    module = timm.create_model("vit_tiny_patch16_224", **{**SMALL, **options})
    with pytest.raises(ValueError, match=difference):
        from_timm(module)


def change(folder, **changes):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


def change_cfg(folder, **changes):
    change(folder, pretrained_cfg={**json.loads((folder / "config.json").read_text())["pretrained_cfg"], **changes})


DAMAGES = {
    "half a file of weights": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:999]),
        "not a complete safetensors file",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds: none"),
    "a weight too few": (
        lambda folder: save_file(
            {k: v for k, v in load_file(folder / "model.safetensors").items() if k != "norm.bias"},
            folder / "model.safetensors",
        ),
        r"do not fit timm's vit_tiny_patch16_224: .*norm\.bias",
    ),
    "other sizes": (lambda folder: change(folder, model_args={"depth": 3, "img_size": 64}), "blocks.2"),
    "an unknown architecture": (lambda folder: change(folder, architecture="vit_tinny"), "nearest.* vit_tiny"),
    "no name": (lambda folder: change(folder, architecture=None), "neither timm nor this package"),
    "no preprocessing": (lambda folder: change(folder, pretrained_cfg=None), "has no pretrained_cfg"),
    "another preprocessing": (lambda folder: change(folder, pretrained_cfg={"mean": "grey"}), "mean"),
    "an unknown argument": (lambda folder: change(folder, model_args={"depht": 3}), "did you mean 'depth'"),
    "a download": (lambda folder: change(folder, model_args={"pretrained": True}), "model_args: pretrained: unknown"),
    "too many blocks": (lambda folder: change(folder, model_args={"depth": 200_000}), "depth: .*512"),
    "too many heads": (lambda folder: change(folder, model_args={"num_heads": 300}), "num_heads: .*256"),
    "too wide": (lambda folder: change(folder, model_args={"embed_dim": 10**9}), "embed_dim: .*16384"),
    "too large images": (lambda folder: change(folder, model_args={"img_size": [10**6, 10**6]}), "img_size.*4096"),
    "text for a number": (lambda folder: change(folder, model_args={"depth": "3"}), "depth: "),
    "too large an input": (
        lambda folder: change_cfg(folder, input_size=[3, 10**6, 10**6]),
        "input_size.*4096",
    ),
    "names of other classes": (
        lambda folder: change(folder, label_names=["cat", "dog"]),
        "label_names has 2 names for 1000 classes",
    ),
    "another interpolation": (lambda folder: change_cfg(folder, interpolation="bilinear"), "interpolation bilinear"),
    "a number for a mean": (lambda folder: change_cfg(folder, mean=0.5), "mean"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_of_timm_is_refused(damage, tmp_path):
    changes = {**SMALL, "depth": 1}
    folder = folder_of(random_vit("vit_tiny_patch16_224", **changes), tmp_path / "vit", changes)
    apply, message = DAMAGES[damage]
    apply(folder)
    with pytest.raises(ValueError, match=message):
        progresvit.load(folder)


def test_commands_describe_and_refuse_models_of_timm(tmp_path):
    assert "1.254" in works("info", "deit_tiny_patch16_224")
    changes = {**SMALL, "depth": 1}
    folder = folder_of(random_vit("vit_tiny_patch16_224", **changes), tmp_path / "vit", changes)
    assert "round 1" in works("info", folder)
    works("import-official", folder, "--out", tmp_path / "ours")
    assert progresvit.load(tmp_path / "ours").config == progresvit.load(folder).config
    refused("nearest plain ViTs of timm", "info", "swin_tiny_patch4_window7_224")
    refused("leave them out", "import-official", folder, "--out", tmp_path / "no", "--resolutions", "192,240")
    assert not Path(tmp_path / "no").exists()
