"""What holds for every analysis of images: the models that it takes, and that it leaves a model as it was."""

import numpy as np
import pytest
import torch

from progresvit.analysis import sample as sample_module
from progresvit.analysis.attention import attention_of
from progresvit.analysis.exits import exits
from progresvit.analysis.low_pass import low_pass
from progresvit.analysis.noise_replacement import noise_replacement
from progresvit.analysis.similarity import similarity
from progresvit.analysis.throughput import throughput
from progresvit.analysis.token_swap import token_swap
from progresvit.analysis.trajectories import trajectories
from progresvit.config import make_rounds
from progresvit.data.transforms import normalise
from progresvit.model import ProgResViT
from tests.analysis.made import coloured_sample, model_of_kind
from tests.model.pooled import AlternativesConfig, PooledConfig, PooledModel

IMAGES = 8


def attention(model, sample):
    return attention_of(model, normalise(sample.pixels[:1], model.config))


NUMBERS = {
    attention: lambda rounds: rounds[-1].patches,
    similarity: lambda result: result.cosines,
    trajectories: lambda result: result.paths,
    low_pass: lambda effects: effects[-1].effect.outcome.confidence,
    token_swap: lambda effects: effects[-1].effect.outcome.confidence,
    noise_replacement: lambda effects: effects[-1].effect.outcome.confidence,
    exits: lambda result: result.entropy,
}
"""An array of the result of each analysis."""
RUNS = {similarity: 1, trajectories: 1, low_pass: 6, token_swap: 8, noise_replacement: 6, exits: 1}
"""How often every image runs; low-pass and noise replacement have five strengths, token swap has seven conditions."""


@pytest.fixture
def sample():
    return coloured_sample((4, 4))


@pytest.mark.parametrize("analysis", NUMBERS)
def test_a_model_in_training_is_left_as_it_was(small_config, randomize, sample, analysis):
    model = randomize(ProgResViT(small_config, drop_path=0.9))
    expected = NUMBERS[analysis](analysis(model, sample))
    model.train()
    assert np.array_equal(NUMBERS[analysis](analysis(model, sample)), expected)
    assert model.training
    assert model.blocks[0].training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("analysis", RUNS)
def test_progress_counts_images_up_to_the_total(small_model, sample, monkeypatch, analysis):
    monkeypatch.setattr(sample_module, "BATCH", 5)
    calls = []
    analysis(small_model, sample, progress=lambda done, total: calls.append((done, total)))
    every = [IMAGES * run + done for run in range(RUNS[analysis]) for done in (5, IMAGES)]
    assert calls == [(done, IMAGES * RUNS[analysis]) for done in every]


@pytest.mark.parametrize("analysis", [similarity, trajectories, exits])
def test_batches_do_not_matter(small_model, sample, monkeypatch, analysis):
    expected = NUMBERS[analysis](analysis(small_model, sample))
    monkeypatch.setattr(sample_module, "BATCH", 5)
    assert NUMBERS[analysis](analysis(small_model, sample)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("fields", [{"num_classes": 0}, {"task": "segmentation"}], ids=["headless", "segmentation"])
@pytest.mark.parametrize("analysis", [attention, similarity, trajectories])
def test_the_head_does_not_matter_where_blocks_are_shown(small_model, sample, fields, analysis):
    other = ProgResViT(small_model.config.replace(**fields)).eval()
    other.load_state_dict({key: value for key, value in small_model.state_dict().items() if "head" not in key}, False)
    assert np.array_equal(NUMBERS[analysis](analysis(other, sample)), NUMBERS[analysis](analysis(small_model, sample)))


def pooled(config_class=PooledConfig):
    rounds = [{"resolution": 16, "grid": 2}, {"resolution": 32, "grid": 4}]
    return PooledModel(config_class(rounds=rounds, num_classes=12)).eval()


MODELS = {
    "without blocks": pooled,
    "alternatives": lambda: pooled(AlternativesConfig),
    "hydravit": lambda: model_of_kind("hydravit"),
    "early_exit": lambda: model_of_kind("early_exit"),
    "one round": lambda: model_of_kind("progresvit", rounds=make_rounds([32], [2])),
    "headless": lambda: model_of_kind("progresvit", num_classes=0),
    "segmentation": lambda: model_of_kind("progresvit", task="segmentation"),
}
WITHOUT_VIT = "are made of models .* such as progresvit, thinkingvit or hydravit, not of PooledModel"
ONE_ROUND = "this model has one round; give a model of two or more"
NO_HEAD, SEGMENTS = "this model has no head; give a classifier", "this model segments images; give a classifier"


@pytest.mark.parametrize(
    ("analyses", "model", "message"),
    [
        ([attention], "without blocks", f"attention maps {WITHOUT_VIT}"),
        ([similarity], "without blocks", f"similarities of block outputs {WITHOUT_VIT}"),
        ([trajectories], "without blocks", f"trajectories of classes {WITHOUT_VIT}"),
        ([noise_replacement], "without blocks", f"noise replacements {WITHOUT_VIT}"),
        ([throughput], "without blocks", "throughput runs models of kind 'progresvit' only, not 'test_pooled'"),
        ([throughput], "headless", NO_HEAD),
        ([low_pass, token_swap, noise_replacement], "early_exit", "'early_exit' see no image of their own"),
        ([exits], "alternatives", "rounds of a model of kind 'test_alternatives' are alternatives"),
        ([low_pass, token_swap, noise_replacement], "hydravit", "'hydravit' are alternatives; give a model whose"),
        ([low_pass, token_swap, noise_replacement, exits], "one round", ONE_ROUND),
        ([low_pass, token_swap, noise_replacement, exits], "headless", NO_HEAD),
        ([low_pass, token_swap, noise_replacement, exits], "segmentation", SEGMENTS),
    ],
)
def test_models_that_cannot_be_analysed_are_refused(sample, analyses, model, message):
    for analysis in analyses:
        with pytest.raises(ValueError, match=message):
            analysis(MODELS[model](), sample)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_error_names_the_remedy(small_model, sample):
    with pytest.raises(ValueError, match="there is no CUDA device here; use device='cpu'"):
        throughput(small_model, sample, device="cuda")
