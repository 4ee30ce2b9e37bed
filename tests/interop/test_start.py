"""A start from the weights of plain ViTs."""

import pickle

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.data import ImageNetInfo

import progresvit
from progresvit.baselines.thinkingvit import ThinkingViT, ThinkingViTConfig
from progresvit.config import ModelConfig, make_rounds, plain_vit, preset
from progresvit.data.crop import crop
from progresvit.data.dataset import find_unlabelled
from progresvit.data.decode import decode
from progresvit.data.samples import samples_folder
from progresvit.data.transforms import normalise
from progresvit.interop import start_from, start_from_timm
from progresvit.model import ProgResViT
from tests.interop.authors import Trap
from tests.model.pooled import PooledConfig, PooledModel


def tiny_backbone(**changes):
    """192 channels, two blocks and two rounds by default."""
    return ModelConfig(**{"rounds": make_rounds([160, 224], [2, 3]), "heads": 3, "depth": 2, **changes})


def random_vit(name="deit_tiny_patch16_224", **changes):
    """A ViT of timm with random weights, none of them an identity."""
    vit = timm.create_model(name, pretrained=False, **changes).eval()
    with torch.no_grad():
        for key, parameter in vit.named_parameters():
            parameter.normal_(std=0.05)
            if "norm" in key and key.endswith("weight"):
                parameter.add_(1)
    return vit


def small_vit(**changes):
    """For ``small_config``: 128 channels, two blocks, patches of 8 on 32 pixels."""
    sizes = {"embed_dim": 128, "num_heads": 2, "depth": 2, "patch_size": 8, "img_size": 32, "num_classes": 12}
    return random_vit(**{**sizes, **changes})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deit_tiny_patch16_224", {}),
        ("vit_tiny_patch16_224", {}),
        ("deit3_small_patch16_384", {"layer_scale": 1e-6, "heads": 6, "rounds": make_rounds([160, 384], [3, 6])}),
    ],
)
def test_the_last_rounds_backbone_is_the_source(name, changes):
    source = timm.create_model(name, depth=2).eval()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_(std=0.05)
    config = tiny_backbone(**changes)
    model = ProgResViT(config)
    fresh = start_from_timm(model, source)
    assert all(key.startswith(("psg.", "projectors.")) for key in fresh)
    fields = {"heads": config.heads, "depth": 2, "layer_scale": config.layer_scale}
    plain = ProgResViT(plain_vit(resolution=config.resolution, **fields))
    plain.load_state_dict({key: value for key, value in model.state_dict().items() if key not in fresh})
    images = torch.randn(1, 3, config.resolution, config.resolution)
    with torch.no_grad():
        assert (plain.eval()(images)[0].logits - source(images)).abs().max() <= 1e-5


def test_deit_iii_has_no_class_position_and_ours_starts_at_zero():
    source = timm.create_model("deit3_small_patch16_384", depth=1)
    model = ProgResViT(preset("progresvit_small_192_240", depth=1, layer_scale=1e-6))
    start_from_timm(model, source)
    assert not model.pos_embed[:, 0].any()
    assert model.pos_embed[:, 1:].any()


def test_position_grid_is_resampled():
    source = timm.create_model("deit_small_patch16_224", depth=1)
    model = ProgResViT(preset("progresvit_small_192_240", depth=1))
    start_from_timm(model, source.state_dict())
    assert torch.equal(model.pos_embed[:, 0], source.pos_embed[:, 0])
    at_240 = timm.create_model("deit_small_patch16_224", depth=1)
    at_240.load_state_dict(source.state_dict())
    at_240.set_input_size(img_size=(240, 240))
    assert torch.allclose(model.pos_embed, at_240.pos_embed, atol=1e-6)


def test_a_head_of_other_classes_keeps_its_fresh_start():
    source = timm.create_model("deit_small_patch16_224", depth=1)
    model = ProgResViT(preset("progresvit_small_192_240", depth=1, num_classes=20))
    before = model.head.weight.clone()
    fresh = start_from_timm(model, source)
    assert {"head.weight", "head.bias"} <= set(fresh)
    assert torch.equal(model.head.weight, before)


def test_a_source_without_a_head_fits():
    source = timm.create_model("vit_small_patch16_224", depth=1, num_classes=0)
    model = ProgResViT(preset("progresvit_small_192_240", depth=1))
    assert "head.weight" in start_from_timm(model, source)


@pytest.mark.parametrize(
    ("name", "kwargs", "changes", "remedy"),
    [
        (
            "deit_small_patch16_224",
            {},
            {},
            r"384 channels wide .* 192: set model\.heads so that it ends in 6",
        ),
        ("deit_tiny_patch16_224", {"depth": 3}, {}, r"set model\.depth=3"),
        ("deit_tiny_patch16_224", {"depth": 1}, {}, r"set model\.depth=1"),
        ("deit_tiny_patch16_224", {"depth": 2, "patch_size": 32}, {}, r"set model\.patch_size=32"),
        ("deit_tiny_patch16_224", {"depth": 3, "patch_size": 8}, {}, r"model\.depth=3; .*model\.patch_size=8"),
        ("deit_tiny_patch16_224", {"depth": 2}, {"layer_scale": 1e-6}, "layer_scale=null"),
        ("deit_tiny_patch16_224", {"depth": 2, "init_values": 0.1}, {}, "layer_scale=1e-6"),
        ("deit_tiny_distilled_patch16_224", {"depth": 2}, {}, "take the plain variant"),
        ("deit_tiny_patch16_224", {"depth": 2, "num_heads": 6}, {}, "take a source with 3"),
        ("resnet10t", {}, {}, "not a plain ViT: it lacks cls_token"),
    ],
)
def test_a_source_that_does_not_fit_is_refused(name, kwargs, changes, remedy):
    with pytest.raises(ValueError, match=remedy):
        start_from_timm(ProgResViT(tiny_backbone(**changes)), timm.create_model(name, **kwargs))


def sample_images(config):
    samples = find_unlabelled(samples_folder())
    pixels = [torch.from_numpy(crop(decode(samples.read(index)), config)) for index in range(len(samples))]
    return normalise(torch.stack(pixels), config)


def test_the_last_round_of_a_quiet_start_is_the_source_on_real_images():
    source, model = random_vit(), ProgResViT(preset("progresvit_tiny_160_224")).eval()
    fresh = start_from_timm(model, source, fusion="quiet")
    plain = ProgResViT(plain_vit(resolution=224, heads=3)).eval()
    assert start_from_timm(plain, source) == []
    images = sample_images(model.config)
    with torch.no_grad():
        first, last = model(images)
        expected = source(images)
        assert expected.std() > 0.5
        assert (last.logits - expected).abs().max() <= 1e-5
        assert torch.equal(last.logits, plain(images)[0].logits)
        paper = ProgResViT(model.config).eval()
        assert start_from_timm(paper, source) == fresh
        first_of_paper, last_of_paper = paper(images)
    assert torch.equal(first.logits, first_of_paper.logits)
    assert (last_of_paper.logits - expected).abs().max() > 0.1


def test_a_step_after_a_quiet_start_changes_the_widening_layers(small_config, images):
    model = ProgResViT(small_config)
    start_from_timm(model, small_vit(), fusion="quiet")
    projector = model.projectors[0]
    widening = [*projector.widen_patches.parameters(), *projector.widen_class.parameters()]
    assert not any(parameter.any() for parameter in widening)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(images)[-1].logits, torch.arange(3)).backward()
    optimizer.step()
    assert all(parameter.any() for parameter in widening)


def write_weights(kind, weights, folder):
    if kind == "safetensors":
        save_file(weights, folder / "vit.safetensors")
        return folder / "vit.safetensors"
    wrapped = {
        "bare.pth": weights,
        "model.pt": {"model": weights, "epoch": 3},
        "state_dict.bin": {"state_dict": {f"module.{key}": value for key, value in weights.items()}},
        "model_ema.pth.tar": {"model": {}, "model_ema": weights},
    }
    torch.save(wrapped[kind], folder / kind)
    return folder / kind


@pytest.mark.parametrize("kind", ["safetensors", "bare.pth", "model.pt", "state_dict.bin", "model_ema.pth.tar"])
def test_a_file_of_weights_is_a_source_in_any_precision(kind, small_config, tmp_path):
    rounded = {key: value.half() for key, value in small_vit().state_dict().items()}
    model, same = ProgResViT(small_config), ProgResViT(small_config)
    path = write_weights(kind, rounded, tmp_path)
    assert start_from_timm(model, str(path)) == start_from_timm(same, rounded) == start_from_timm(same, path)
    own = model.state_dict()
    assert {value.dtype for value in own.values()} == {torch.float32}
    assert all(torch.equal(own[key], value.float()) for key, value in rounded.items())


def test_a_file_that_runs_code_is_refused_and_runs_none(small_config, tmp_path):
    sprung, file = tmp_path / "sprung", tmp_path / "vit.pth"
    torch.save({"model": small_vit().state_dict(), "args": Trap(sprung)}, file)
    with pytest.raises(ValueError, match="could run code"):
        start_from_timm(ProgResViT(small_config), str(file))
    assert not sprung.exists()
    pickle.loads(pickle.dumps(Trap(sprung))).close()
    assert sprung.exists()  # the trap works


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vit.safetensors", b"<html>404</html>", "not a complete safetensors file"),
        ("vit.pth", b"<html>404</html>", "not a PyTorch checkpoint"),
        ("vit.jpg", b"", r"not a file of weights; give one that ends in \.safetensors"),
        ("weights", b"", "not a file of weights"),
        ("foo.safetensors", None, "there is no file or folder .*foo.safetensors"),
        ("foo", None, "there is no file or folder .*foo"),
    ],
)
def test_a_file_without_weights_is_refused(name, content, message, small_config, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        start_from_timm(ProgResViT(small_config), str(tmp_path / name))


def weights_with_an_integer_bias():
    weights = small_vit().state_dict()
    return {**weights, "norm.bias": weights["norm.bias"].int()}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda config: "deit_smal", "timm has no model 'deit_smal'"),
        (
            lambda config: "deit_tiny_patch16_224.nonsense",
            "timm cannot load .*Invalid pretrained tag.*or set model.start=FILE to a file of them",
        ),
        (
            lambda config: "deit_tiny_patch16_224.safetensors",
            r"there is no file or folder deit_tiny_patch16_224\.safetensors",
        ),
        (lambda config: ProgResViT(config).state_dict(), r"it has projectors\.0.*give the folder"),
        (lambda config: weights_with_an_integer_bias(), r"another shape or type for norm\.bias"),
        (
            lambda config: small_vit(in_chans=1),
            r"it takes 1 channels and the model 3: set model\.fields\.in_channels=1",
        ),
    ],
)
def test_a_source_without_fitting_weights_is_refused(source, message, small_config):
    with pytest.raises(ValueError, match=message):
        start_from_timm(ProgResViT(small_config), source(small_config))


def test_a_fusion_that_does_not_exist_is_refused(small_config):
    with pytest.raises(ValueError, match="fusion is 'paper' or 'quiet', not 'quite'"):
        start_from_timm(ProgResViT(small_config), small_vit(), fusion="quite")


def test_a_head_of_imagenet_gives_the_rows_of_the_models_classes(small_config):
    wnids = ImageNetInfo().label_names()
    source = small_vit(num_classes=1000)
    rows = [999, *range(0, 950, 50)]
    config = small_config.replace(num_classes=20, class_ids=tuple(wnids[row] for row in rows))
    model = ProgResViT(config)
    assert not [key for key in start_from_timm(model, source) if key.startswith("head.")]
    assert torch.equal(model.head.weight, source.head.weight[rows])
    assert torch.equal(model.head.bias, source.head.bias[rows])


@pytest.mark.parametrize("rows", [1000, 12])
def test_a_head_that_lacks_a_class_of_the_model_is_not_copied(small_config, rows):
    names = tuple(ImageNetInfo().label_names()[:11])
    model = ProgResViT(small_config.replace(class_ids=(*names, "my_cat")))
    before = model.head.weight.clone()
    assert {"head.weight", "head.bias"} <= set(start_from_timm(model, small_vit(num_classes=rows)))
    assert torch.equal(model.head.weight, before)


def test_a_model_without_a_head_takes_the_rest(small_config):
    model = ProgResViT(small_config.replace(num_classes=0))
    source = small_vit()
    start_from_timm(model, source)
    assert torch.equal(model.norm.bias, source.norm.bias)


class Gained(ProgResViT):
    """Another kind of model on the same backbone, with a part of its own and no projectors to quieten."""

    start_quiet = property()  # hasattr is false

    def __init__(self, config):
        super().__init__(config)
        self.gain = torch.nn.Parameter(torch.full((3,), 2.0))


def test_another_kind_of_model_keeps_the_initial_weights_of_its_own_parts(small_config):
    model, source = Gained(small_config), small_vit()
    assert "gain" in start_from_timm(model, source)
    assert torch.equal(model.gain, torch.full((3,), 2.0))
    assert torch.equal(model.blocks[1].mlp.fc2.weight, source.blocks[1].mlp.fc2.weight)
    with pytest.raises(ValueError, match=r"model\.start_fusion=quiet needs a model with 'start_quiet'"):
        start_from_timm(model, source, fusion="quiet")


def test_a_model_that_is_no_vit_is_refused():
    model = PooledModel(PooledConfig(rounds=[{"resolution": 32, "grid": 2}], num_classes=12))
    with pytest.raises(ValueError, match="PooledModel has no backbone of a plain ViT"):
        start_from_timm(model, small_vit())


def test_a_start_from_a_folder_draws_the_random_numbers_of_a_new_model(small_config, tmp_path):
    """What a task initialises afterwards is the same for a seed as in earlier versions."""
    folder = progresvit.save(ProgResViT(small_config), tmp_path / "model")
    model = ProgResViT(small_config)
    torch.manual_seed(1)
    ProgResViT(small_config, start_gates="torch")
    expected = torch.get_rng_state()
    torch.manual_seed(1)
    start_from(model, str(folder))
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("heads", [6, 12])
def test_a_narrow_vit_becomes_the_leading_heads_of_a_wider_model(heads):
    source = random_vit(depth=2, num_classes=7)
    fields = {"heads": heads, "rounds": ({"resolution": 224, "heads": 3}, {"resolution": 224, "heads": heads})}
    torch.manual_seed(0)
    model = ThinkingViT(ThinkingViTConfig(**fields, depth=2, num_classes=7)).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fresh = start_from_timm(model, source, as_prefix=True)
    assert all(key.startswith("transitions.") for key in fresh)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert (model.run_round(0, images).logits - source(images)).abs().max() <= 1e-5
    qkv, old = (weights["blocks.1.attn.qkv.weight"].unflatten(0, (3, -1)) for weights in (model.state_dict(), before))
    assert torch.equal(qkv[:, :192, :192].flatten(0, 1), source.blocks[1].attn.qkv.weight)  # Q, K and V each
    assert torch.equal(qkv[:, 192:], old[:, 192:])
    assert torch.equal(qkv[:, :, 192:], old[:, :, 192:])


def test_a_prefix_has_the_rows_of_the_models_classes():
    ids = tuple(ImageNetInfo().label_names()[5:9])
    source = random_vit(depth=1)
    config = ModelConfig(rounds=make_rounds([160, 224], [3, 6]), heads=6, depth=1, num_classes=4, class_ids=ids)
    model = ProgResViT(config)
    start_from_timm(model, source, as_prefix=True)
    assert torch.equal(model.head.weight[:, :192], source.head.weight[5:9])
    assert torch.equal(model.head.bias, source.head.bias[5:9])


def test_a_narrow_start_needs_the_word_prefix_and_a_wide_one_never_fits():
    narrow, wide = random_vit(depth=2), random_vit("deit_base_patch16_224", depth=2)
    model = ProgResViT(ModelConfig(rounds=make_rounds([160, 224], [3, 6]), heads=6, depth=2))
    with pytest.raises(ValueError, match=r"192 channels wide and the model 384.*set model\.start_as_prefix=true"):
        start_from_timm(model, narrow)
    for as_prefix, message in (
        (True, "768 channels wide, and a prefix is narrower than the model, which has 384: choose a narrower"),
        (False, "so that it ends in 12"),
    ):
        with pytest.raises(ValueError, match=message):
            start_from_timm(model, wide, as_prefix=as_prefix)


def test_a_prefix_needs_a_round_of_its_width():
    source = random_vit(depth=2)
    for rounds in ([4, 6], [6]):
        fields = {"heads": 6, "depth": 2, "rounds": make_rounds([224] * len(rounds), rounds)}
        for model in (ProgResViT(ModelConfig(**fields)), ThinkingViT(ThinkingViTConfig(**fields))):
            named = " and ".join(map(str, rounds))
            with pytest.raises(ValueError, match=f"it has 3 heads, but the rounds have {named}.*give a round 3 heads"):
                start_from_timm(model, source, as_prefix=True)
