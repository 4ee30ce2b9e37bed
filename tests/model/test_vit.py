"""The network against timm's, its rounds, and what it refuses."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer

from progresvit.config import ModelConfig, make_rounds, plain_vit, preset
from progresvit.model import ProgResViT, RoundOutput
from progresvit.model.backbone import resample_position

TOLERANCE = 1e-5


def copy_prefix(model, target):
    """Each parameter of a narrow timm ViT becomes the leading corner of the model's own."""
    d, full = target.embed_dim, model.config.width
    source = model.state_dict()
    narrow = {}
    for key, value in target.state_dict().items():
        wide = source[key]
        if ".qkv." in key:
            wide = wide.unflatten(0, (3, full))[:, :d].flatten(0, 1)
        if key == "pos_embed":
            side = target.patch_embed.grid_size[0]
            stored = model.config.stored_grid
            grid = wide[:, 1:].reshape(1, stored, stored, full).permute(0, 3, 1, 2)
            if side != stored:
                grid = F.interpolate(grid, size=(side, side), mode="bicubic", antialias=True, align_corners=False)
            wide = torch.cat([wide[:, :1], grid.flatten(2).mT], dim=1)
        narrow[key] = wide[tuple(slice(size) for size in value.shape)]
    target.load_state_dict(narrow)
    return target.eval()


@pytest.mark.parametrize("layer_scale", [None, 0.5])
@pytest.mark.parametrize(("resolution", "position"), [(224, 224), (192, 224), (240, 224)])
def test_narrow_round_equals_a_standalone_vit_of_that_width(resolution, position, layer_scale):
    config = ModelConfig(
        rounds=make_rounds([resolution, 240], [3, 6]),
        heads=6,
        depth=3,
        position_resolution=position,
        layer_scale=layer_scale,
    )
    model = ProgResViT(config).eval()
    narrow = VisionTransformer(
        img_size=resolution, embed_dim=192, num_heads=3, depth=3, num_classes=1000, init_values=layer_scale
    )
    copy_prefix(model, narrow)
    images = torch.randn(2, 3, 240, 240)
    resized = F.interpolate(images, size=(resolution, resolution), mode="bicubic", antialias=True, align_corners=False)
    with torch.no_grad():
        output = model.run_round(0, images)
        tokens = narrow.forward_features(resized)
        assert (output.tokens - tokens).abs().max() <= TOLERANCE
        assert (output.logits - narrow.forward_head(tokens)).abs().max() <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "heads", "resolution", "depth"),
    [
        ("deit_small_patch16_224", 6, 224, 12),
        ("deit_small_patch16_224", 6, 192, 12),
        ("deit_small_patch16_224", 6, 240, 12),
        ("vit_tiny_patch16_224", 3, 224, 2),
        ("vit_base_patch16_224", 12, 224, 2),
    ],
)
def test_one_full_round_equals_timms_vit(name, heads, resolution, depth):
    model = ProgResViT(plain_vit(resolution=resolution, heads=heads, depth=depth, position_resolution=224)).eval()
    vit = copy_prefix(model, timm.create_model(name, img_size=resolution, depth=depth))
    images = torch.randn(2, 3, resolution, resolution)
    with torch.no_grad():
        assert (model(images)[0].logits - vit(images)).abs().max() <= TOLERANCE


def test_at_the_start_the_model_with_psg_equals_the_one_without():
    config = ModelConfig(rounds=make_rounds([32, 48], [1, 2]), heads=2, depth=3, num_classes=10)
    with_psg, without = ProgResViT(config).eval(), ProgResViT(config.replace(psg=False)).eval()
    missing, unexpected = without.load_state_dict(with_psg.state_dict(), strict=False)
    assert not missing
    assert all(key.startswith("psg.") for key in unexpected)
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        for gated, plain in zip(with_psg(images), without(images)):
            assert torch.equal(gated.logits, plain.logits)
            assert torch.equal(gated.tokens, plain.tokens)


def test_forward_runs_every_round_and_each_alone_gives_the_same(small_model, images):
    with torch.no_grad():
        outputs = small_model(images)
        first = small_model.run_round(0, images)
        second = small_model.run_round(1, images, previous=first.tokens)
    assert [type(output) for output in outputs] == [RoundOutput, RoundOutput]
    assert [tuple(output.tokens.shape) for output in outputs] == [(3, 5, 64), (3, 17, 128)]
    assert [tuple(output.logits.shape) for output in outputs] == [(3, 12), (3, 12)]
    for whole, alone in zip(outputs, (first, second)):
        assert torch.equal(whole.logits, alone.logits)
        assert torch.equal(whole.tokens, alone.tokens)


def test_tokens_handed_on_are_those_after_the_final_norm(small_model, images):
    with torch.no_grad():
        small_model.norm.weight.fill_(1.0)
        small_model.norm.bias.zero_()
        for output in small_model(images):
            assert output.tokens.mean(dim=-1).abs().max() < 1e-5
            assert (output.tokens.var(dim=-1, unbiased=False) - 1).abs().max() < 1e-3


def test_a_larger_image_is_resized_by_each_round(small_model):
    large = torch.randn(2, 3, 50, 50)
    resized = F.interpolate(large, size=(32, 32), mode="bicubic", antialias=True, align_corners=False)
    with torch.no_grad():
        first = small_model.run_round(0, large)
        second = small_model.run_round(1, large, previous=first.tokens).logits
        assert torch.allclose(second, small_model.run_round(1, resized, previous=first.tokens).logits, atol=1e-6)
        assert not torch.allclose(first.logits, small_model.run_round(0, resized).logits, atol=1e-6)  # resized twice


def test_the_second_round_depends_on_the_first(small_model, images):
    with torch.no_grad():
        first = small_model.run_round(0, images)
        second = small_model.run_round(1, images, previous=first.tokens)
        swapped = small_model.run_round(1, images, previous=first.tokens.flip(0))
    assert (second.logits[0] - swapped.logits[0]).abs().max() > 1e-3
    assert torch.allclose(second.logits[1], swapped.logits[1], atol=1e-5)  # the middle image kept its own


def test_gradients_flow_from_the_second_round_into_the_first(small_model, images):
    first = small_model.run_round(0, images)
    first.tokens.retain_grad()
    small_model.run_round(1, images, previous=first.tokens).logits.sum().backward()
    assert first.tokens.grad.any()


def test_a_model_is_built_on_the_meta_device_and_filled_later(small_model, images):
    with torch.device("meta"):
        model = ProgResViT(small_model.config)
    assert model(images.to("meta"))[-1].logits.shape == (3, 12)
    model.to_empty(device="cpu").load_state_dict(small_model.state_dict())
    with torch.no_grad():
        assert torch.equal(model.eval()(images)[-1].logits, small_model(images)[-1].logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("side", "grid"), [(14, 14), (14, 10), (14, 24), (7, 1)])
def test_positions_are_resampled_as_by_timm_to_the_bit(side, grid, dtype):
    whole = torch.randn(1, side**2 + 1, 192).to(dtype)
    for position in (whole, whole[..., :128]):  # of all channels, and of a narrow round
        expected = resample_abs_pos_embed(position, new_size=[grid, grid])
        assert torch.equal(resample_position(position, grid), expected)


VARIANTS = {
    "one round": {"rounds": make_rounds([32], [2])},
    "one narrow round": {"rounds": make_rounds([32], [1])},
    "three rounds": {"rounds": make_rounds([16, 24, 32], [1, 2, 3]), "heads": 3},
    "equal resolutions": {"rounds": make_rounds([32, 32], [1, 2])},
    "equal widths": {"rounds": make_rounds([16, 32], [2, 2])},
    "without psg": {"psg": False},
    "with layer scale": {"layer_scale": 1e-6},
    "never the full width": {"rounds": make_rounds([16, 32], [1, 2]), "heads": 3},
    "one block": {"depth": 1},
    "patches of four": {"patch_size": 4},
    "coarse positions": {"position_resolution": 8},
    "grey images": {"in_channels": 1, "mean": (0.5,), "std": (0.25,)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_parameter_is_left_without_a_gradient(variant, small_config, randomize):
    model = randomize(ProgResViT(small_config.replace(**VARIANTS[variant]))).train()
    outputs = model(torch.randn(2, model.config.in_channels, 32, 32))
    sum(F.cross_entropy(output.logits, torch.tensor([0, 1])) for output in outputs).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_round_compiles_into_one_graph(variant, small_config, randomize):
    model = randomize(ProgResViT(small_config.replace(**VARIANTS[variant])))
    torch.compiler.reset()
    run_round = torch.compile(model.run_round, fullgraph=True, backend="aot_eager", dynamic=False)
    images = torch.randn(2, model.config.in_channels, 32, 32)
    with torch.no_grad():
        tokens = None
        for s, expected in enumerate(model(images)):
            output = run_round(s, images, previous=tokens)
            assert torch.allclose(output.logits, expected.logits, atol=1e-5)
            tokens = output.tokens


@pytest.mark.slow
def test_compiled_rounds_match_and_train(small_config, randomize, images):
    """Each round by itself, up to the gradients. A compiled run uses the default backend, which takes a minute.

    See ``test_a_compiled_run_learns_the_same_thing`` in tests/training/test_loop.py.
    """
    model = randomize(ProgResViT(small_config.replace(depth=1)))
    torch.compiler.reset()
    run_round = torch.compile(model.run_round, fullgraph=True, backend="aot_eager", dynamic=False)
    first = run_round(0, images)
    second = run_round(1, images, previous=first.tokens)
    outputs = model(images)
    for compiled, eager in zip((first, second), outputs):
        assert torch.allclose(compiled.logits, eager.logits, atol=1e-4)
    parameters = dict(model.named_parameters())
    compiled_gradients, expected = (
        torch.autograd.grad(output.logits.sum(), list(parameters.values())) for output in (second, outputs[1])
    )
    for name, compiled, eager in zip(parameters, compiled_gradients, expected):
        torch.testing.assert_close(compiled, eager, atol=1e-3, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    assert compiled_gradients[list(parameters).index("projectors.0.widen_class.weight")].any()


@pytest.mark.slow
def test_rounds_compile_for_any_number_of_images(small_model):
    torch.compiler.reset()
    run_round = torch.compile(small_model.run_round, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for count in (2, 3, 5):
            images = torch.randn(count, 3, 32, 32)
            assert torch.allclose(run_round(0, images).logits, small_model.run_round(0, images).logits, atol=1e-5)


def test_bfloat16_trains(small_model, images):
    model = small_model.bfloat16().train()
    sum(output.logits.float().square().mean() for output in model(images.bfloat16())).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_bfloat16_weights_come_close_to_float32(small_model, images):
    with torch.no_grad():
        exact = small_model(images)
        rounded = small_model.bfloat16()(images.bfloat16())
    for wide, narrow in zip(exact, rounded):
        assert narrow.logits.dtype == torch.bfloat16
        assert F.cosine_similarity(wide.logits, narrow.logits.float()).min() > 0.99


def test_autocast_keeps_gates_exact(small_model, images):
    plain = small_model.gates(1)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        outputs = small_model(images)
        gates = small_model.gates(1)
    assert outputs[-1].logits.dtype == torch.bfloat16
    assert torch.equal(gates.blocks[1].out, plain.blocks[1].out)
    assert gates.fusion.image.dtype == torch.float32


def test_gradient_checkpointing_changes_nothing_but_memory(small_model, images):
    def gradients():
        small_model.zero_grad()
        sum(output.logits.square().mean() for output in small_model(images)).backward()
        return {name: p.grad.clone() for name, p in small_model.named_parameters()}

    stored = gradients()
    small_model.set_grad_checkpointing()
    recomputed = gradients()
    assert all(torch.allclose(stored[name], recomputed[name], atol=1e-6) for name in stored)


def test_stochastic_depth_drops_the_whole_gated_update_in_training_only(small_config, randomize, images):
    model = randomize(ProgResViT(small_config, drop_path=0.5))
    assert [block.drop_path.drop_prob for block in model.blocks] == [0.0, 0.5]
    with torch.no_grad():
        assert torch.equal(model(images)[0].logits, model(images)[0].logits)
        block, gates = model.blocks[1].train(), model.gates(0).blocks[1]
        block.drop_path.drop_prob = 1.0 - 1e-9  # drops every update
        x = torch.randn(4, 5, 64)
        assert torch.allclose(block(x, gates), gates.out * x)


def test_kept_classes_answer_as_they_did_in_the_wider_head(small_config, randomize, images):
    names = tuple("abcdefghijkl")
    model = randomize(ProgResViT(small_config.replace(class_ids=names, labels=tuple(n.upper() for n in names)))).eval()
    kept = model.keep_classes([7, 0, 3])
    assert (kept.config.class_ids, kept.config.labels) == (("h", "a", "d"), ("H", "A", "D"))
    assert not kept.training
    with torch.no_grad():
        for wide, narrow in zip(model(images), kept(images)):
            assert torch.allclose(narrow.logits, wide.logits[:, [7, 0, 3]], atol=1e-6)
    assert model.config.num_classes == 12


@pytest.mark.parametrize("rows", [[], [0, 0], [-1], [12]])
def test_rows_that_cannot_be_kept_are_refused(small_model, rows):
    with pytest.raises(ValueError, match="distinct rows of the head, from 0 to 11"):
        small_model.keep_classes(rows)


def test_reset_classifier_forgets_the_old_classes(small_config):
    names = tuple(str(index) for index in range(12))
    model = ProgResViT(small_config.replace(class_ids=names, labels=names))
    model.reset_classifier(5)
    assert model(torch.randn(1, 3, 32, 32))[-1].logits.shape == (1, 5)
    assert (model.config.num_classes, model.config.class_ids, model.config.labels) == (5, None, None)
    model.reset_classifier(0)
    output = model(torch.randn(1, 3, 32, 32))[-1]
    assert torch.equal(output.logits, output.tokens[:, 0])


@pytest.mark.parametrize(
    ("images", "remedy"),
    [
        (torch.zeros(1, 3, 32, 24), "crop or pad"),
        (torch.zeros(1, 3, 24, 24), "give at least 32"),
        (torch.zeros(1, 1, 32, 32), "takes 3 channels"),
        (torch.zeros(1, 4, 32, 32), "takes 3 channels"),
        (torch.zeros(3, 32, 32), r"shaped \(B, 3, H, H\)"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), r"subtract config\.mean"),
    ],
)
def test_images_that_do_not_fit_are_refused(small_model, images, remedy):
    with pytest.raises(ValueError, match=remedy):
        small_model(images)


def test_a_round_takes_what_is_large_enough_for_it(small_model):
    assert small_model.run_round(0, torch.zeros(1, 3, 16, 16)).logits.shape == (1, 12)
    with pytest.raises(ValueError, match="give at least 16"):
        small_model.run_round(0, torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize(
    ("s", "previous", "remedy"),
    [
        (2, None, "rounds 0 to 1"),
        (-1, None, "rounds 0 to 1"),
        (0, (3, 5, 64), "call it without previous"),
        (1, None, r"run_round\(0, ...\).tokens"),
        (1, (3, 17, 128), r"shaped \(3, 5, 64\)"),
        (1, (2, 5, 64), "for the same images"),
    ],
)
def test_a_round_out_of_turn_is_refused(small_model, images, s, previous, remedy):
    with pytest.raises(ValueError, match=remedy):
        small_model.run_round(s, images, previous=None if previous is None else torch.zeros(previous))


def test_presets_run():
    model = ProgResViT(preset("progresvit_small_128_192_240")).eval()
    with torch.no_grad():
        outputs = model(torch.randn(1, 3, 240, 240))
    assert [tuple(output.tokens.shape) for output in outputs] == [(1, 65, 128), (1, 145, 256), (1, 226, 384)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["progresvit_small_192_240", "progresvit_small_128_192_240"])
def test_rounds_compile_and_train_in_bfloat16_on_a_gpu(name, randomize):
    model = randomize(ProgResViT(preset(name, depth=3))).cuda()
    images = torch.randn(8, 3, 240, 240, device="cuda")
    with torch.no_grad():
        exact = model(images)
    torch.compiler.reset()
    run_round = torch.compile(model.run_round, fullgraph=True, dynamic=False)
    tokens = None
    with torch.autocast("cuda", torch.bfloat16):
        for s, expected in enumerate(exact):
            output = run_round(s, images, previous=tokens)
            assert F.cosine_similarity(output.logits.float(), expected.logits).min() > 0.99
            tokens = output.tokens
    output.logits.float().sum().backward()
    assert model.cls_token.grad.any()
