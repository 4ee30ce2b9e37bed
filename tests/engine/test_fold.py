import pytest
import torch

from progresvit.config import ModelConfig, make_rounds, plain_vit
from progresvit.engine.fold import FoldedRound, fold, fold_features
from progresvit.model import ProgResViT
from tests.engine.conftest import SMALL

CONFIGS = {
    "two rounds": ModelConfig(rounds=make_rounds([16, 32], [1, 3]), **SMALL),
    "three rounds": ModelConfig(rounds=make_rounds([16, 24, 32], [1, 2, 3]), **SMALL),
    "LayerScale": ModelConfig(rounds=make_rounds([16, 32], [1, 3]), layer_scale=1e-6, **SMALL),
    "no PSG": ModelConfig(rounds=make_rounds([16, 32], [1, 3]), psg=False, **SMALL),
    "same resolution": ModelConfig(rounds=make_rounds([32, 32], [1, 3]), **SMALL),
    "narrow to the end": ModelConfig(rounds=make_rounds([16, 32], [1, 2]), **SMALL),
    "another position grid": ModelConfig(rounds=make_rounds([16, 32], [1, 3]), position_resolution=40, **SMALL),
    "merged tokens": ModelConfig(rounds=make_rounds([24, 32], [1, 3]), **SMALL).with_merge([3, 5]),
    "merged tokens in a plain ViT": plain_vit(
        resolution=32, heads=3, depth=3, patch_size=8, num_classes=12, layer_scale=0.1
    ).with_merge([4]),
    "a plain ViT": plain_vit(resolution=32, heads=3, depth=2, patch_size=8, num_classes=12),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folded_round_equals_the_models(name, randomize):
    model = randomize(ProgResViT(CONFIGS[name]))
    images = torch.randn(3, 3, 40, 40)
    previous = folded_previous = None
    for s, folded in enumerate(fold(model)):
        with torch.no_grad():
            expected, found = model.run_round(s, images, previous), folded(images, folded_previous)
        assert torch.allclose(found.logits, expected.logits, atol=1e-4)
        is_last = s == len(model.config.rounds) - 1
        assert found.tokens.shape[1] == (1 if is_last else expected.tokens.shape[1])
        assert torch.allclose(found.tokens, expected.tokens[:, : found.tokens.shape[1]], atol=1e-4)
        assert expected.logits.std() > 0.05  # there is something to compare
        previous, folded_previous = expected.tokens, found.tokens


def test_a_folded_round_does_not_follow_the_model(small_model, images):
    folded = FoldedRound(small_model, 0)
    with torch.no_grad():
        before = folded(images).logits
        for parameter in small_model.parameters():
            parameter.add_(1)
        assert torch.equal(folded(images).logits, before)
    assert not list(folded.parameters())


@pytest.mark.slow
def test_a_folded_round_is_one_graph(small_model, images):
    first, second = fold(small_model)
    with torch.no_grad():
        expected = second(images, first(images).tokens).logits
        compiled = [torch.compile(one, fullgraph=True, backend="aot_eager") for one in (first, second)]
        found = compiled[1](images, compiled[0](images).tokens).logits
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_headless_folded_round_equals_the_models(name, randomize):
    """Its logits are the class token, as in the model."""
    model = randomize(ProgResViT(CONFIGS[name].replace(num_classes=0)))
    images = torch.randn(3, 3, 40, 40)
    previous = None
    with torch.no_grad():
        for folded, expected in zip(fold(model), model(images), strict=True):
            found = folded(images, previous)
            assert torch.allclose(found.logits, expected.logits, atol=1e-4)
            assert torch.equal(found.logits, found.tokens[:, 0])
            previous = found.tokens


@pytest.mark.parametrize("task", ["classification", "segmentation"])
@pytest.mark.parametrize("name", ["three rounds", "merged tokens", "a plain ViT"])
def test_rounds_folded_for_features_give_the_models_tokens_and_stop_there(name, task, randomize):
    model = randomize(ProgResViT(CONFIGS[name].replace(task=task)))
    images = torch.randn(3, 3, 40, 40)
    with torch.no_grad():
        expected = [output.tokens for output in model(images)]
        for rounds in range(1, len(expected) + 1):
            for patches in (False, True):
                folded = fold_features(model, rounds, patches=patches)
                assert len(folded) == rounds
                assert all(round_.head is None for round_ in folded)
                tokens = None
                for s, round_ in enumerate(folded):
                    tokens = round_(images, tokens).tokens
                    count = expected[s].shape[1] if patches or s < rounds - 1 else 1
                    assert tokens.shape[1] == count
                    assert torch.allclose(tokens, expected[s][:, :count], atol=1e-4)
