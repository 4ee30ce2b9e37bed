"""What holds for every kind of baseline: it is registered, saved and described, and refuses tokens out of turn."""

import json

import pytest
import torch

import progresvit
from progresvit.baselines.dynabert import DynaBERT
from progresvit.baselines.early_exit import EarlyExit
from progresvit.baselines.hydravit import HydraViT
from progresvit.baselines.matformer import MatFormer
from progresvit.baselines.sortednet import SortedNet
from progresvit.baselines.thinkingvit import ThinkingViT
from progresvit.model import RoundModel, registry
from tests.commands import works

KINDS = {  # kind: model class, what sets its two rounds apart
    "hydravit": (HydraViT, [{"heads": 1}, {"heads": 2}]),
    "sortednet": (SortedNet, [{"heads": 1}, {"heads": 2}]),
    "matformer": (MatFormer, [{"mlp_share": 0.125}, {"mlp_share": 1}]),
    "dynabert": (DynaBERT, [{"share": 0.5}, {"share": 1}]),
    "thinkingvit": (ThinkingViT, [{"heads": 1}, {"heads": 2}]),
    "early_exit": (EarlyExit, [{"blocks": 1}, {"blocks": 2}]),
}


@pytest.fixture(params=KINDS)
def model(request, randomize):
    rounds = [{"resolution": 32, **round_} for round_ in KINDS[request.param][1]]
    config = registry.config_class(request.param)(rounds=rounds, heads=2, depth=2, num_classes=5)
    return randomize(registry.build(config))


def test_a_folder_keeps_the_kind_of_its_model(model, images, tmp_path):
    assert isinstance(model, RoundModel)
    loaded = progresvit.load(progresvit.save(model, tmp_path / "model"))
    assert type(loaded) is type(model) is KINDS[model.config.kind][0]
    assert loaded.config == model.config
    for mine, theirs in zip(loaded(images), model(images), strict=True):
        assert torch.equal(mine.logits, theirs.logits)


def test_features_are_the_normalised_tokens(model, images):
    for features, output in zip(model.features(images), model(images), strict=True):
        tokens = torch.cat([features.class_token[:, None], features.patch_tokens], dim=1)
        assert torch.equal(tokens, output.tokens) == (model.config.kind != "early_exit")  # returned before the norm
        assert features.patch_tokens.shape[1] == features.grid**2 == 4


def test_class_tokens_end_with_those_of_the_features(model, images):
    """A first exit after one block has no second."""
    early = model.config.kind == "early_exit"
    tokens = model.class_tokens(images, 1 if early else 2)
    for of_round, features in zip(tokens, model.features(images), strict=True):
        width = features.class_token.shape[1]
        assert of_round.shape[1] == width * (1 if early else 2)
        assert torch.allclose(of_round[:, -width:], features.class_token, atol=1e-5)
    with pytest.raises(ValueError, match=f"round 1 ends after {'1 block' if early else '2 blocks'}; pass blocks="):
        model.class_tokens(images, 3)


def test_tokens_out_of_turn_are_refused(model, images):
    first = model.run_round(0, images)
    if model.config.routable:
        with pytest.raises(ValueError, match="round 0 starts from the image alone"):
            model.run_round(0, images, first.tokens)
        with pytest.raises(ValueError, match="round 1 needs the tokens of round 0"):
            model.run_round(1, images)
    else:
        name = type(model).__name__
        with pytest.raises(ValueError, match=rf"rounds of {name} are alternatives .* call round 1 without previous"):
            model.run_round(1, images, first.tokens)


def test_info_shows_the_gmacs_of_each_round(model, tmp_path):
    folder = progresvit.save(model, tmp_path / "model")
    report, shown = json.loads(works("info", folder, "--json")), works("info", folder)
    name = "cumulative_gmacs" if model.config.routable else "alternative_gmacs"
    for convention in ("paper", "executed"):
        assert report["compute"][convention] == {name: model.gmacs(convention)}
        assert all(f"{gmacs:.3f}" in shown for gmacs in model.gmacs(convention))
    assert report["rounds"][0]["resolution"] == 32
    assert ("cumulative" if model.config.routable else "each round alone") in shown
    assert next(iter(KINDS[model.config.kind][1][0])) in shown
