"""Token merging: one step against loops, and the model with it in every mode of use."""

import pytest
import torch

import progresvit
from progresvit.config import ModelConfig, make_rounds
from progresvit.io.weights import weights_hash
from progresvit.model import ProgResViT, slicing
from progresvit.model.psg import BlockGates
from progresvit.model.token_merging import Merging, match, merge, unmerge

CONFIG = ModelConfig(rounds=make_rounds([24, 32], [1, 2]), heads=2, depth=2, patch_size=8, num_classes=12)


@pytest.fixture
def model(randomize):
    return randomize(ProgResViT(CONFIG.with_merge([2, 5])))


def merged_by_hand(x, keys, groups, r):
    """One step on one image, in loops: tokens (N, d), keys (h, N, 64), and the patches that each token stands for."""
    direction = keys.mean(dim=0)
    first, second = range(1, len(x), 2), range(2, len(x), 2)
    best = {}
    for a in first:
        cosines = {b: float(torch.cosine_similarity(direction[a], direction[b], dim=0)) for b in second}
        best[a] = max(cosines.items(), key=lambda item: item[1])
    merged = sorted(first, key=lambda a: -best[a][1])[:r]
    tokens, members = [x[0]], [groups[0]]
    for a in first:
        if a not in merged:
            tokens.append(x[a])
            members.append(groups[a])
    for b in second:
        together = [b, *(a for a in merged if best[a][0] == b)]
        count = sum(len(groups[token]) for token in together)
        tokens.append(sum(x[token] * len(groups[token]) for token in together) / count)
        members.append([patch for token in together for patch in groups[token]])
    return torch.stack(tokens), members


@pytest.mark.parametrize("patches", [9, 10])
def test_steps_equal_loops_over_the_tokens(patches):
    x, start = torch.randn(3, patches + 1, 7), [["class"], *([patch] for patch in range(patches))]
    expected, groups = list(x), [start] * 3
    merging = Merging.start(x, r=2)
    for _ in range(3):
        keys = torch.randn(3, 2, x.shape[1], 64)
        x, merging = merge(x, keys, merging)
        for image in range(3):
            expected[image], groups[image] = merged_by_hand(expected[image], keys[image], groups[image], r=2)
        assert torch.allclose(x, torch.stack(expected), atol=1e-5)
        assert merging.size.tolist() == [[len(group) for group in own] for own in groups]
        assert merging.size[:, 1:].sum(dim=1).tolist() == [patches] * 3
    assert x.shape[1] == patches + 1 - 3 * 2
    full = unmerge(x, merging)
    assert full.shape == (3, patches + 1, 7)
    assert torch.equal(full[:, 0], x[:, 0])
    for image, own in enumerate(groups):
        for number, group in enumerate(own[1:], start=1):
            for patch in group:
                assert torch.equal(full[image, patch + 1], x[image, number])


def test_identical_tokens_are_merged_first_and_stay_as_they_are():
    x, keys = torch.randn(1, 9, 4), torch.randn(1, 1, 9, 64)
    x[0, 6], keys[0, :, 6] = x[0, 3], keys[0, :, 3]  # one in each half
    merged, merging = merge(x, keys, Merging.start(x, r=1))
    assert merging.place[0, 2] == merging.place[0, 5]
    assert torch.allclose(unmerge(merged, merging), x)


def test_equal_similarities_are_merged_in_the_order_of_their_positions():
    matching = match(torch.ones(2, 1, 10, 64), r=2)
    assert matching.merged.tolist() == [[0, 1]] * 2
    assert matching.target.tolist() == [[0, 0]] * 2
    assert matching.kept.tolist() == [[2, 3, 4]] * 2


def test_the_class_token_is_never_merged():
    """Not even if all keys are equal to its key, and it counts once."""
    x = torch.randn(2, 9, 4)
    merged, merging = merge(x, torch.ones(2, 3, 9, 64), Merging.start(x, r=4))
    assert torch.equal(merged[:, 0], x[:, 0])
    assert merging.size[:, 0].tolist() == [1, 1]


def test_a_merged_token_gets_the_attention_of_its_patches():
    """Tokens that stand for equal patches lead to the same attention as these patches."""
    torch.manual_seed(1)
    attention = ProgResViT(CONFIG).blocks[0].attn
    few = torch.randn(1, 3, 64)
    size = torch.tensor([[1.0, 3.0, 2.0]])
    many = few.repeat_interleave(size[0].long(), dim=1)
    update, _ = attention(few, merging=Merging(0, size, torch.zeros(1, 5)))
    assert torch.allclose(update, attention(many)[0][:, [0, 1, 4]], atol=1e-6)


def test_without_merging_nothing_changes_to_the_bit(model, images):
    model.set_merge([0, 0])
    x = model.embed(images, resolution=24, width=64)
    expected = x
    for block in model.blocks:
        expected = expected + block.attn(slicing.layer_norm(expected, block.norm1))[0]
        expected = expected + block.mlp(slicing.layer_norm(expected, block.norm2))
    assert torch.equal(model.run_blocks(x, [BlockGates()] * 2, merge=0), expected)
    fresh = ProgResViT(CONFIG).eval()
    fresh.load_state_dict(model.state_dict())
    for output, expected in zip(model(images), fresh(images)):
        assert torch.equal(output.logits, expected.logits)
        assert torch.equal(output.tokens, expected.tokens)


def test_rounds_keep_their_shapes_and_change_their_answers(model, images):
    merged = model(images)
    model.set_merge([0, 0])
    plain = model(images)
    for merged_output, output in zip(merged, plain):
        assert merged_output.tokens.shape == output.tokens.shape
        assert not torch.allclose(merged_output.logits, output.logits, atol=1e-4)
    model.set_merge([0, 5])
    assert torch.equal(model(images)[0].logits, plain[0].logits)
    assert not torch.equal(model(images)[1].logits, plain[1].logits)


def test_merging_identical_patches_does_not_change_the_answers(model):
    """All patches of a plain image are the same without a position embedding, so averages lose nothing."""
    with torch.no_grad():
        model.pos_embed[:, 1:] = 0
    image = torch.randn(2, 3, 1, 1).expand(-1, -1, 32, 32)
    merged = model.run_round(0, image)
    model.set_merge([0, 0])
    plain = model.run_round(0, image)
    assert torch.allclose(merged.tokens, plain.tokens, atol=1e-5)
    assert torch.allclose(merged.logits, plain.logits, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_reach_every_parameter_and_checkpointing_does_not_change_them(model, images, autocast):
    def gradients():
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs = model(images)
        sum(output.logits.float().square().mean() + output.tokens.float().mean() for output in outputs).backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.train()
    expected = gradients()
    assert all(gradient.isfinite().all() and gradient.any() for gradient in expected.values())
    model.set_grad_checkpointing()
    for name, gradient in gradients().items():
        assert torch.allclose(gradient, expected[name], atol=1e-5), name


@pytest.mark.slow
def test_the_model_is_one_graph(model, images):
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.no_grad():
        for merged_output, output in zip(compiled(images), model(images)):
            assert torch.allclose(merged_output.logits, output.logits, atol=1e-5)


def test_a_trained_model_is_switched_to_merging_and_saved(randomize, images, tmp_path):
    model = randomize(ProgResViT(CONFIG.replace(input_resolution=40, position_resolution=48)))
    before = weights_hash(model), model.gmacs()
    model.set_merge([0, 5])
    assert (model.config.input_side, model.config.stored_grid) == (40, 6)
    assert model.gmacs()[0] == before[1][0]
    assert model.gmacs()[1] < before[1][1]
    loaded = progresvit.load(progresvit.save(model, tmp_path / "model"))
    assert loaded.config == model.config
    assert torch.equal(loaded(images)[1].logits, model(images)[1].logits)
    assert weights_hash(loaded) == weights_hash(model) != before[0]  # thresholds do not hold across merging
    model.set_merge([0, 0])
    assert weights_hash(model) == before[0]


def test_hooks_on_blocks_fire_in_a_round_that_merges(model, images):
    """So do compiled blocks (run.compile=blocks)."""
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].shape[1], output[0].shape[1])))
    model.run_round(0, images)
    assert seen == [(10, 8), (8, 6)]


def test_a_merging_model_runs_without_memory():
    with torch.device("meta"):
        model = ProgResViT(CONFIG)
        images = torch.zeros(2, CONFIG.in_channels, CONFIG.resolution, CONFIG.resolution)
    assert model(images)[-1].logits.shape == (2, CONFIG.num_classes)
