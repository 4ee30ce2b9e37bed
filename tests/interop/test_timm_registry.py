"""The presets as timm's users meet them."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.data import resolve_data_config
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3

import progresvit
import progresvit.interop
from progresvit.config import PRESETS, make_rounds

SMALL = {"num_classes": 7, "rounds": make_rounds([16, 32], [1, 2]), "heads": 2, "depth": 2, "patch_size": 8}


def small_timm_model(**changes):
    return timm.create_model("progresvit_tiny_160_224", **{**SMALL, **changes})


def test_every_preset_is_in_the_registry():
    assert set(PRESETS) <= set(timm.list_models("progresvit_*"))


@pytest.mark.parametrize("name", PRESETS)
def test_timm_builds_the_preset(name):
    model = timm.create_model(name)
    assert model.config == PRESETS[name]
    size = PRESETS[name].resolution
    data = resolve_data_config({}, model=model)
    assert data["input_size"] == (3, size, size)
    assert (data["crop_pct"], data["interpolation"]) == (0.9, "bicubic")
    assert data["mean"] == PRESETS[name].mean


def test_through_timm_forward_is_the_last_rounds_logits(randomize, images):
    model = randomize(small_timm_model())
    plain = progresvit.ProgResViT(model.config).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        last = plain(images)[-1]
        assert torch.equal(model(images), last.logits)
        assert torch.equal(model.forward_features(images), last.tokens)
        assert torch.equal(model.forward_head(last.tokens), last.logits)
        assert torch.equal(model.forward_head(last.tokens, pre_logits=True), last.tokens[:, 0])


def test_classifier_is_reset_as_timms_users_expect(images):
    model = small_timm_model()
    assert model.get_classifier() is model.head
    model.reset_classifier(4, "token")
    assert (model.num_classes, model(images).shape) == (4, (3, 4))
    assert model.get_classifier().out_features == 4
    model.reset_classifier(0)
    assert model(images).shape == (3, model.num_features) == (3, 128)


def test_a_model_without_classes_gives_features(images):
    assert small_timm_model(num_classes=0)(images).shape == (3, 128)


def test_optimizer_groups_leave_vectors_and_embeddings_undecayed():
    model = small_timm_model(layer_scale=1e-6)
    assert model.no_weight_decay() == {"pos_embed", "cls_token"}
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {names[id(p)] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {
        name for name, p in model.named_parameters() if p.ndim > 1 and name not in ("pos_embed", "cls_token")
    }


def test_layer_decay_ranks_every_parameter():
    model = small_timm_model()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    assert len(scale) == len(list(model.parameters()))
    ranks = [model.patch_embed.proj, model.blocks[0].mlp.fc1, model.blocks[1].mlp.fc1, model.head]
    assert [scale[id(layer.weight)] for layer in ranks] == sorted(scale[id(layer.weight)] for layer in ranks)
    assert scale[id(model.psg.blocks[0].attn_gate.delta.weight)] == scale[id(model.blocks[0].mlp.fc1.weight)]


def test_data_config_follows_rounds_and_channels():
    rounds = make_rounds([160, 320], [2, 3])
    model = timm.create_model("progresvit_tiny_160_224", rounds=rounds, in_chans=1)
    data = resolve_data_config({}, model=model)
    assert data["input_size"] == (1, 320, 320)
    assert len(data["mean"]) == 1


def test_without_pooling_every_token_is_kept(images):
    assert small_timm_model(num_classes=0, global_pool="")(images).shape == (3, 17, 128)
    model = small_timm_model()
    model.reset_classifier(0, "")
    assert model(images).shape == (3, 17, 128)


def test_a_training_step_as_timms_script_takes_it(images):
    model = small_timm_model(drop_rate=0.1, drop_path_rate=0.1, drop_block_rate=None)
    model.set_grad_checkpointing(enable=True)
    ema = ModelEmaV3(model, decay=0.9)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.05)
    target = torch.tensor([0, 1, 2])
    model.train()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), target)
        loss.backward()
        optimizer.step()
        ema.update(model)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert ema.module.config == model.config


def test_a_saved_model_loads_through_timm_bit_for_bit(small_model, images, tmp_path):
    folder = progresvit.save(small_model, tmp_path / "model")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert model.config == small_model.config
    with torch.no_grad():
        assert torch.equal(model(images), small_model(images)[-1].logits)


def test_a_timm_model_saved_by_us_loads_as_ours(randomize, images, tmp_path):
    model = randomize(small_timm_model())
    loaded = progresvit.load(progresvit.save(model, tmp_path / "model"))
    with torch.no_grad():
        assert torch.equal(loaded(images)[-1].logits, model(images))


def test_timm_gives_a_saved_model_other_classes_and_channels(small_model, tmp_path):
    folder = progresvit.save(small_model, tmp_path / "model")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=3, in_chans=1)
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 3)
    assert torch.equal(model.norm.weight, small_model.norm.weight)
    assert torch.allclose(model.patch_embed.proj.weight, small_model.patch_embed.proj.weight.sum(1, keepdim=True))


def test_timms_checkpoint_path_takes_our_weights(randomize, images, tmp_path):
    model = randomize(small_timm_model())
    folder = progresvit.save(model, tmp_path / "model")
    other = small_timm_model(checkpoint_path=folder / "model.safetensors").eval()
    with torch.no_grad():
        assert torch.equal(other(images), model(images))


@pytest.mark.parametrize(
    ("build", "remedy"),
    [
        (lambda: timm.create_model("progresvit_tiny_160_224", global_pool="avg"), "reads the class token"),
        (lambda: timm.create_model("progresvit_tiny_160_224", img_size=240), "the rounds set the resolutions"),
        (lambda: small_timm_model(img_size=999), "the rounds set the resolutions"),
        (lambda: timm.create_model("progresvit_tiny_160_224", features_only=True), "forward_features"),
        (lambda: timm.create_model("progresvit_tiny_160_224", dept=3), "did you mean 'depth'"),
        (lambda: timm.create_model("progresvit"), "local-dir:FOLDER"),
        (lambda: small_timm_model().reset_classifier(3, "map"), "reads the class token"),
    ],
)
def test_what_timm_cannot_have_is_refused_with_the_remedy(build, remedy):
    with pytest.raises(ValueError, match=remedy):
        build()
