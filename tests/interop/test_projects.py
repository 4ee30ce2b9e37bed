"""Checkpoints and hub folders of other projects, made under the names of the weights in their repositories."""

import argparse
import json

import pytest
import timm
import torch
from safetensors.torch import save_file

import progresvit
from progresvit.interop import import_official, start_from
from tests.commands import works
from tests.interop.authors import attention, authors_forward, authors_state, embed, norm
from tests.interop.test_official import CASES, make_state


def vit_state(*, heads, depth=2, grid=4, classes=11):
    """A ViT under timm's names, every weight random: what a HydraViT stores."""
    state = authors_state(width=64 * heads, widths=[64 * heads], depth=depth, patch_size=16, grid=grid, classes=classes)
    return {name: value for name, value in state.items() if not any(part in name for part in ("gate", "prog", "cond"))}


def thinking_state(heads):
    """A ThinkingViT: a ViT, and for each transition what widens the tokens of the round before, and its scale."""
    state, width = vit_state(heads=heads[-1]), 64 * heads[-1]
    for t, (name, before) in enumerate(zip(("proj_layer", "proj_layer2"), heads[:-1])):
        state[f"alpha.{t}"] = torch.full((1,), 0.5 + t)
        state[f"{name}.weight"] = 0.1 * torch.randn(width, 64 * before)
        state[f"{name}.bias"] = 0.1 * torch.randn(width)
    return state


def vit_forward(state, images, d, added=0):
    """Logits and normalised tokens of the leading channels of a ViT; ``added`` is added to the embedded tokens."""
    x = embed(state, images, images.shape[-1], d) + added
    for b in range(2):
        p = f"blocks.{b}"
        x = x + attention(state, p, norm(x, state[f"{p}.norm1.weight"], state[f"{p}.norm1.bias"]))
        y = norm(x, state[f"{p}.norm2.weight"], state[f"{p}.norm2.bias"])
        y = y @ state[f"{p}.mlp.fc1.weight"][: 4 * d, :d].T + state[f"{p}.mlp.fc1.bias"][: 4 * d]
        y = torch.nn.functional.gelu(y) @ state[f"{p}.mlp.fc2.weight"][:d, : 4 * d].T
        x = x + y + state[f"{p}.mlp.fc2.bias"][:d]
    tokens = norm(x, state["norm.weight"], state["norm.bias"])
    return tokens[:, 0] @ state["head.weight"][:, :d].T + state["head.bias"], tokens


def assert_close(outputs, expected):
    assert len(outputs) == len(expected)
    for output, logits in zip(outputs, expected):
        assert logits.std() > 0.1
        assert (output.logits - logits).abs().max() <= 1e-4


@pytest.mark.parametrize("heads", [(1, 2), (1, 2, 3)])
def test_a_checkpoint_of_thinkingvit_gives_its_logits(heads, tmp_path):
    state = thinking_state(heads)
    torch.save({"state_dict_ema": state}, tmp_path / "ThinkingViT_re_3_6.pth.tar")
    works("import-official", tmp_path / "ThinkingViT_re_3_6.pth.tar", "--out", tmp_path / "model")
    model = progresvit.load(tmp_path / "model")
    assert (model.config.kind, [round_.heads for round_ in model.config.rounds]) == ("thinkingvit", list(heads))
    assert (model.config.resolution, model.config.crop) == (64, 0.9)
    images, added, expected = torch.randn(2, 3, 64, 64), 0, []
    for s, count in enumerate(heads):
        logits, tokens = vit_forward(state, images, 64 * count, added)
        expected.append(logits)
        if s < len(heads) - 1:
            d, name = 64 * heads[s + 1], f"proj_layer{'' if s == 0 else s + 1}"
            added = state[f"alpha.{s}"] * (tokens @ state[f"{name}.weight"][:d].T + state[f"{name}.bias"][:d])
    with torch.no_grad():
        assert_close(model(images), expected)


def test_a_checkpoint_of_hydravit_gives_the_logits_of_every_width(tmp_path):
    state = vit_state(heads=4)
    options = argparse.Namespace(model="hydravit_dyn_patch16_224", heads=[4, 1, 2])
    torch.save({"args": options, "state_dict_ema": state}, tmp_path / "model_best.pth.tar")
    model = import_official(tmp_path / "model_best.pth.tar")
    assert (model.config.kind, [round_.heads for round_ in model.config.rounds]) == ("hydravit", [1, 2, 4])
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert_close(model(images), [vit_forward(state, images, 64 * heads)[0] for heads in (1, 2, 4)])
    torch.save(state, tmp_path / "hydravit_uniform.pth")
    named = works("import-official", tmp_path / "hydravit_uniform.pth", "--out", tmp_path / "hydra")
    assert "64 px × 3 heads, 64 px × 4 heads" in named  # 3 and more, as published


def test_the_same_weights_without_a_name_are_refused(tmp_path):
    torch.save(vit_state(heads=3), tmp_path / "model_best.pth.tar")
    with pytest.raises(ValueError, match=r"Rename it.*timm's name.*hydravit"):
        import_official(tmp_path / "model_best.pth.tar")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.0.blocks.0.attn.qkv.weight": torch.zeros(3)}, "not a checkpoint of a known project: it has layers"),
        ({"proj_layer.weight": torch.zeros(128, 64)}, r"lack transitions\.0\.alpha"),
        (
            {"alpha.0": torch.zeros(2), "proj_layer.weight": torch.zeros(128, 64), "proj_layer.bias": torch.zeros(128)},
            "fit",
        ),
    ],
)
def test_weights_of_unknown_projects_and_damaged_ones_are_refused(change, message, tmp_path):
    torch.save({**vit_state(heads=2), **change}, tmp_path / "model.pth")
    with pytest.raises(ValueError, match=message):
        import_official(tmp_path / "model.pth")


def publish(folder, state, *, architecture="progresvit", file="model.safetensors", **arguments):
    """A folder as timm's save_for_hf writes it for a model of the authors' code."""
    folder.mkdir()
    config = {
        "architecture": architecture,
        "num_classes": len(state["head.weight"]),
        "num_features": state["cls_token"].shape[-1],
        "global_pool": "token",
        "model_args": arguments,
        "pretrained_cfg": {
            "custom_load": False,
            "input_size": [3, 240, 240],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 0.9,
            "crop_mode": "center",
            "mean": [0.485, 0.456, 0.406],
            "std": [0.229, 0.224, 0.225],
            "num_classes": 1000,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(state, folder / file)
    else:
        torch.save({"state_dict_ema": state, "args": argparse.Namespace(lr=1e-3)}, folder / file)
    return folder


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "progresvit_192_240.pth.tar"])
@pytest.mark.parametrize("case", ["two rounds", "layer scale", "three rounds"])
def test_a_folder_of_the_authors_loads_here_and_through_timm(case, file, tmp_path):
    case = CASES[case]
    state = make_state(case)
    sides = case["resolutions"]
    heads = [width // 64 for width in case["widths"]]
    init = {"init_values": 1e-6} if case["layer_scale"] else {}
    sizes = {"img_size": sides[-1], "embed_dim": 64 * heads[-1], "depth": 2, "num_heads": heads[-1]}
    arguments = {**sizes, "progress_stages": heads, "progress_img_sizes": sides, "num_classes": 11, **init}
    folder = publish(tmp_path / "hub", state, file=file, **arguments)
    model = progresvit.load(folder)
    assert [round_.resolution for round_ in model.config.rounds] == sides
    images = torch.randn(2, 3, model.config.input_side, model.config.input_side)
    expected = authors_forward(state, images, resolutions=sides, widths=case["widths"])
    through_timm = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert through_timm.pretrained_cfg["input_size"][-1] == model.config.input_side
    with torch.no_grad():
        assert_close(model(images), expected)
        assert torch.equal(through_timm(images), model(images)[-1].logits)
    assert timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=3).head.weight.shape[0] == 3
    start = progresvit.ProgResViT(model.config)
    assert start_from(start, str(folder)) == []


def test_without_arguments_the_rounds_follow_from_the_position_grid(tmp_path):
    folder = publish(tmp_path / "hub", make_state(CASES["two rounds"]))
    assert [round_.resolution for round_ in progresvit.load(folder).config.rounds] == [192, 240]


def test_a_folder_of_thinkingvit_loads(tmp_path):
    state = thinking_state((1, 2))
    folder = publish(tmp_path / "hub", state, architecture="thinkingvit", thinking_stages=[1, 2])
    model = progresvit.load(folder)
    assert model.config.kind == "thinkingvit"
    assert torch.equal(model.transitions[0].widen.weight, state["proj_layer.weight"])


def test_a_folder_of_hydravit_loads(tmp_path):
    state = vit_state(heads=3)
    folder = publish(tmp_path / "hub", state, architecture="hydravit_dyn_patch16_224", heads="1, 3")
    config = progresvit.load(folder).config
    assert (config.kind, [round_.heads for round_ in config.rounds]) == ("hydravit", [1, 3])
    (tmp_path / "other").mkdir()
    other = publish(tmp_path / "other" / "hub", state, architecture="hydravit", heads="1;3")
    with pytest.raises(ValueError, match=r"hub/model\.safetensors: the option heads is a list of numbers"):
        progresvit.load(other)


@pytest.mark.parametrize("architecture", ["progresvit", "thinkingvit", "hydravit"])
def test_preprocessing_and_classes_of_a_projects_folder_are_kept(architecture, tmp_path):
    states = {
        "progresvit": lambda: make_state(CASES["two rounds"], depth=1),
        "thinkingvit": lambda: thinking_state((1, 2)),
        "hydravit": lambda: vit_state(heads=3),
    }
    folder = publish(tmp_path / "hub", states[architecture](), architecture=architecture)
    values = json.loads((folder / "config.json").read_text())
    values["pretrained_cfg"].update(mean=[0.5] * 3, std=[0.25] * 3, crop_pct=0.8)
    values["label_names"] = [f"n{number}" for number in range(11)]
    (folder / "config.json").write_text(json.dumps(values))
    config = progresvit.load(folder).config
    assert (config.mean, config.std, config.crop) == ((0.5,) * 3, (0.25,) * 3, 0.8)
    assert config.class_ids == config.labels == tuple(values["label_names"])
    if architecture == "progresvit":
        through_timm = timm.create_model(f"local-dir:{folder}", pretrained=True)
        assert through_timm.config == config
        cfg = through_timm.pretrained_cfg
        assert (tuple(cfg["mean"]), tuple(cfg["std"]), cfg["crop_pct"]) == (config.mean, config.std, config.crop)


def test_a_pickle_is_read_only_without_a_safetensors_file(tmp_path):
    state = make_state(CASES["two rounds"], depth=1)
    folder = publish(tmp_path / "hub", state, file="weights.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    assert torch.equal(progresvit.load(folder).norm.weight, state["norm.weight"])


def test_settings_of_an_authors_folder_are_found(tmp_path):
    folder = publish(tmp_path / "hub", make_state(CASES["two rounds"], depth=1))
    model, found = progresvit.api.load_with_folder(folder)
    assert found == folder
    from tests.factories import setting_of

    (folder / "settings").mkdir()
    setting_of(model).save(folder / "settings" / "near-lossless.json")
    assert progresvit.Engine(folder).setting.threshold == 1.5
    assert "near-lossless" in works("info", folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_args": [1]}, "model_args is an object"),
        ({"model_args": {"progress_img_sizes": "192"}}, "progress_img_sizes is a list"),
        ({"model_args": {"progress_img_sizes": [192, 230]}}, "the nearest are 224 and 240"),
        ({"model_args": {"progress_img_sizes": [128, 192, 240]}}, "hub/model.safetensors: 3 resolutions for 2 head"),
        ({"num_classes": 1000}, "says num_classes 1000, but model.safetensors has 11 classes"),
        ({"model_args": {"num_classes": 12}}, "says num_classes 12, but"),
        ({"pretrained_cfg": {"interpolation": "bilinear"}}, "interpolation bilinear"),
        ({"pretrained_cfg": [1]}, "pretrained_cfg is an object"),
        ({"label_names": ["cat", "dog"]}, "label_names has 2 names for 11 classes"),
        ({"architecture": "progresvit2"}, "neither timm nor this package has"),
    ],
)
def test_a_damaged_folder_of_the_authors_is_refused(change, message, tmp_path):
    folder = publish(tmp_path / "hub", make_state(CASES["two rounds"], depth=1))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **change}))
    with pytest.raises(ValueError, match=message):
        progresvit.load(folder)


def test_a_recipe_names_the_command_for_such_a_folder(tmp_path):
    folder = publish(tmp_path / "hub", make_state(CASES["two rounds"], depth=1))
    with pytest.raises(ValueError, match="progresvit import-official"):
        progresvit.ProgResViT.from_pretrained(folder)
