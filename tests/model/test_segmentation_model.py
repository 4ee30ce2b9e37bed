"""Models for segmentation: one linear decoder for all rounds, in the config, on disk, folded and counted."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import progresvit
from progresvit.baselines.early_exit import EarlyExitConfig
from progresvit.baselines.hydravit import HydraViT, HydraViTConfig
from progresvit.baselines.thinkingvit import ThinkingViT, ThinkingViTConfig
from progresvit.config import ModelConfig, make_rounds, plain_vit
from progresvit.engine.fold import fold
from progresvit.io.weights import weights_hash
from progresvit.model import ProgResViT, registry
from tests.baselines.literal import plain_blocks, plain_embedding
from tests.model.pooled import PooledConfig
from tests.test_compute import count_macs, expected_macs

TINY = {"depth": 2, "patch_size": 16, "num_classes": 5, "task": "segmentation"}
LABELS = ("sky", "road", "car", "tree", "sign")
TWO = ModelConfig(rounds=make_rounds([32, 48], [1, 2]), heads=2, **TINY)
CONFIGS = {
    "two rounds": TWO,
    "three rounds": ModelConfig(rounds=make_rounds([32, 48, 64], [1, 2, 3]), heads=3, **TINY),
    "merged tokens": ModelConfig(rounds=make_rounds([48, 64], [1, 2]), heads=2, **TINY).with_merge([3, 5]),
    "three rounds, merged tokens": ModelConfig(
        rounds=make_rounds([48, 48, 64], [1, 2, 3]), heads=3, layer_scale=0.1, **TINY
    ).with_merge([2, 0, 4]),
    "no PSG, another position grid": TWO.replace(psg=False, position_resolution=80),
    "a plain ViT": plain_vit(resolution=48, heads=2, **TINY),
    "a plain ViT, merged tokens": plain_vit(resolution=48, heads=2, **TINY).with_merge([3]),
    "larger input": TWO.replace(input_resolution=64),
}


@pytest.fixture
def model(randomize):
    return randomize(ProgResViT(TWO))


@pytest.fixture
def photos():
    return torch.randn(3, 3, 64, 64)


def decoded_by_hand(tokens, head):
    """Patch by patch, on the leading channels of the decoder."""
    images, count, width = tokens.shape
    g = round((count - 1) ** 0.5)
    logits = torch.empty(images, len(head.weight), g, g)
    for row in range(g):
        for column in range(g):
            patch = tokens[:, 1 + row * g + column]
            logits[:, :, row, column] = patch @ head.weight[:, :width].T + head.bias
    return logits


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_the_head_is_applied_to_every_patch(name, randomize, photos):
    model = randomize(ProgResViT(CONFIGS[name]))
    for output, round_ in zip(model(photos), model.config.rounds, strict=True):
        g = round_.resolution // 16
        assert output.logits.shape == (3, 5, g, g)
        assert output.tokens.shape == (3, g * g + 1, round_.width)
        assert torch.allclose(output.logits, decoded_by_hand(output.tokens, model.head), atol=1e-5)
        assert output.logits.std() > 0.05


@torch.no_grad()
def test_patches_lie_where_they_were_cut(model):
    """Without attention between them, a changed patch changes only the logits at its own place."""
    for block in model.blocks:
        block.attn.proj.weight.zero_()
        block.attn.proj.bias.zero_()
    plain, other = model.run_round(0, torch.zeros(1, 3, 32, 32)), torch.zeros(1, 3, 32, 32)
    other[:, :, :16, 16:] = 1  # top right
    changed = (model.run_round(0, other).logits - plain.logits).abs().amax(dim=1)[0] > 1e-4
    assert changed.tolist() == [[False, True], [False, False]]


@torch.no_grad()
def test_both_rounds_share_one_decoder(model, photos):
    assert [name for name, _ in model.named_parameters() if "head" in name] == ["head.weight", "head.bias"]
    before = [output.logits for output in model(photos)]
    model.head.bias[3] += 1
    for old, output in zip(before, model(photos)):
        assert torch.allclose(output.logits - old, torch.eye(5)[3].view(1, 5, 1, 1), atol=1e-5)
    model.head.weight[:, :64] = 0  # the channels of the first round
    first, last = model(photos)
    assert torch.equal(first.logits, model.head.bias.view(1, 5, 1, 1).expand_as(first.logits))
    assert last.logits.std(dim=(0, 2, 3)).min() > 0.01


@torch.no_grad()
def test_tokens_are_those_of_the_classification_model(model, photos):
    other = ProgResViT(TWO.replace(task="classification")).eval()
    other.load_state_dict(model.state_dict())
    for output, classified in zip(model(photos), other(photos)):
        assert torch.equal(output.tokens, classified.tokens)
        assert classified.logits.shape == (3, 5)


@torch.no_grad()
@pytest.mark.parametrize("kind", [ThinkingViT, HydraViT])
def test_baselines_decode_every_patch_too(kind, randomize):
    configs = {ThinkingViT: ThinkingViTConfig, HydraViT: HydraViTConfig}
    model = randomize(kind(configs[kind](rounds=make_rounds([48, 48], [1, 2]), heads=2, **TINY)))
    images = torch.randn(2, 3, 48, 48)
    for output in model(images):
        assert output.logits.shape == (2, 5, 3, 3)
        assert torch.allclose(output.logits, decoded_by_hand(output.tokens, model.head), atol=1e-5)
    literal = plain_blocks(model, plain_embedding(model, images)[..., :64])
    assert torch.allclose(model(images)[0].logits, decoded_by_hand(literal, model.head), atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_survives_json(name):
    config = CONFIGS[name]
    values = json.loads(config.to_json())
    assert values["task"] == "segmentation"
    assert ModelConfig.from_json(config.to_json()) == config
    assert registry.parse_config(values) == config


def test_the_json_names_the_task_only_of_a_segmentation_model():
    """Configs, records and unfinished runs from before segmentation existed stay equal to new ones."""
    classifies = TWO.replace(task="classification")
    assert "task" not in json.loads(classifies.to_json())
    assert "task" not in classifies.to_dict()
    assert ModelConfig.from_json(classifies.to_json()) == classifies != TWO
    thinking = ThinkingViTConfig(rounds=make_rounds([48, 48], [1, 2]), heads=2, **TINY)
    assert thinking.to_dict()["task"] == "segmentation"
    assert "task" not in thinking.replace(task="classification").to_dict()


def test_changes_of_rounds_and_classes_keep_the_task():
    assert TWO.replace(num_classes=3).task == "segmentation"
    assert TWO.replace(rounds=make_rounds([48], [2])).task == "segmentation"
    assert TWO.with_merge([0, 1]).task == "segmentation"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: EarlyExitConfig(rounds=[{"resolution": 48, "blocks": 2}], heads=2, **TINY),
            "a model of kind early_exit cannot be built for segmentation; use another kind, such as",
        ),
        (
            lambda: PooledConfig(rounds=[{"resolution": 32, "grid": 2}], num_classes=5, task="segmentation"),
            "a model of kind test_pooled cannot be built for segmentation",
        ),
        (lambda: TWO.replace(num_classes=0), "a segmentation model needs classes; give num_classes of 1 or more"),
        (lambda: ProgResViT(TWO).reset_classifier(0), "a segmentation model needs classes"),
        (lambda: TWO.replace(task="detection"), "task: unknown value 'detection'"),
    ],
)
def test_what_cannot_segment_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@torch.no_grad()
def test_a_segmentation_model_is_saved_and_loaded(randomize, photos, tmp_path):
    model = randomize(ProgResViT(TWO.replace(class_ids=LABELS, labels=LABELS)))
    folder = progresvit.save(model, tmp_path / "model")
    stored = json.loads((folder / "config.json").read_text())
    assert stored["task"] == "segmentation"
    assert "architecture" not in stored  # timm builds classification models only
    assert "architecture" in TWO.replace(task="classification").foreign_keys()
    loaded = progresvit.load(folder)
    assert loaded.config == model.config
    assert load_file(folder / "model.safetensors")["head.weight"].shape == (5, 128)
    for output, expected in zip(loaded(photos), model(photos), strict=True):
        assert torch.equal(output.logits, expected.logits)
    assert weights_hash(loaded) == weights_hash(model)


def test_the_hash_of_the_weights_tells_the_task(model):
    other = ProgResViT(TWO.replace(task="classification"))
    other.load_state_dict(model.state_dict())
    hashes = [weights_hash(model), weights_hash(other)]
    for merging in (model, other):
        merging.set_merge([0, 1])
        hashes.append(weights_hash(merging))
    assert len(set(hashes)) == 4


@torch.no_grad()
def test_classes_of_the_decoder_can_be_chosen_and_replaced(model, photos):
    kept = model.keep_classes([3, 0])
    assert kept.config.task == "segmentation"
    for output, whole in zip(kept(photos), model(photos)):
        assert torch.allclose(output.logits, whole.logits[:, [3, 0]], atol=1e-6)
    model.reset_classifier(7)
    assert [output.logits.shape[1] for output in model(photos)] == [7, 7]


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_folded_rounds_equal_the_model(name, randomize, photos):
    model = randomize(ProgResViT(CONFIGS[name]))
    previous = folded_previous = None
    for s, folded in enumerate(fold(model)):
        expected, answer = model.run_round(s, photos, previous), folded(photos, folded_previous)
        assert answer.logits.shape == expected.logits.shape
        torch.testing.assert_close(answer.logits, expected.logits, atol=1e-5, rtol=1e-5)
        assert answer.tokens.shape == expected.tokens.shape  # in the last round too: its patches are used
        torch.testing.assert_close(answer.tokens, expected.tokens, atol=1e-5, rtol=1e-5)
        assert expected.logits.std() > 0.05  # there is something to compare
        previous, folded_previous = expected.tokens, answer.tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_closed_form_equals_torchs_flop_counter(name):
    config = CONFIGS[name]
    assert count_macs(ProgResViT(config).eval(), config) == expected_macs(config)


def test_gradients_reach_the_decoder_and_every_block(model, photos):
    """The class token of the last block alone has no share in the logits."""
    model.train()
    sum(F.interpolate(output.logits, size=64).square().mean() for output in model(photos)).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.slow
def test_the_model_is_one_graph(model, photos):
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.no_grad():
        for whole, output in zip(compiled(photos), model(photos)):
            assert torch.allclose(whole.logits, output.logits, atol=1e-5)
