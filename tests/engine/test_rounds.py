"""Single rounds on batches, for schedulers outside of the process."""

import numpy as np
import pytest
import torch

from progresvit.config import ModelConfig, make_rounds
from progresvit.engine import Engine
from progresvit.engine.rounds import RoundRunner
from progresvit.model import ProgResViT

CONFIG = ModelConfig(rounds=make_rounds([32, 48, 64], [1, 2, 3]), heads=3, depth=2, num_classes=20)


@pytest.fixture(scope="module")
def model(randomize):
    torch.manual_seed(3)
    return randomize(ProgResViT(CONFIG)).eval()


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(0, 256, (50, 3, 64, 64), np.uint8)


def run_all(runner, images, thresholds=None):
    """The predictions of all images, one round after the other."""
    predictions, rows, tokens = [None] * len(images), np.arange(len(images)), None
    for s in range(3):
        limits = None if thresholds is None else thresholds[rows]
        result = runner.run(s, images[rows], tokens, limits)
        assert [row for row, found in enumerate(result.predictions) if found is None] == result.rows.tolist()
        for row, prediction in zip(rows, result.predictions):
            predictions[row] = prediction
        rows, tokens = rows[result.rows], result.tokens
        if not len(rows):
            break
    return predictions


def middle(model, images, **options):
    everything = Engine(model, float("inf"), **options).classify(images)
    return float(np.median([prediction.entropy for prediction in everything]))


def check_equal(found, expected, tolerance):
    assert [one.exit_round for one in found] == [one.exit_round for one in expected]
    assert [one.index for one in found] == [one.index for one in expected]
    assert [one.probability for one in found] == pytest.approx([one.probability for one in expected], abs=tolerance)
    assert {1, 2, 3} >= {one.exit_round for one in found} >= {1, 3}


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_rounds_one_by_one_answer_as_the_engine(model, images, backend):
    limit = middle(model, images)
    engine = Engine(model, limit, backend=backend, batch=16)
    check_equal(run_all(RoundRunner(engine), images), Engine(model, limit, backend=backend).classify(images), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-4)])
def test_rounds_one_by_one_answer_as_the_engine_on_a_gpu(model, images, precision, tolerance):
    options = {"device": "cuda", "precision": precision, "batch": 64}
    limit = middle(model, images, **options)
    found = run_all(RoundRunner(Engine(model, limit, **options)), images)
    check_equal(found, Engine(model, limit, **options).classify(images), tolerance)


def test_images_may_have_their_own_threshold(model, images):
    runner = RoundRunner(Engine(model, 0.0))
    thresholds = np.full(len(images), np.nan)
    thresholds[::2] = float("inf")
    assert [one.exit_round for one in run_all(runner, images, thresholds)] == [1, 3] * 25


def test_no_images_and_missing_tokens(model, images):
    runner = RoundRunner(Engine(model, 0.0))
    assert runner.run(0, images[:0]).predictions == []
    with pytest.raises(ValueError, match="need the tokens"):
        runner.run(1, images[:2])


def test_read_only_arrays_are_taken(model, images):
    runner, fixed = RoundRunner(Engine(model, 0.0)), images[:4].copy()
    fixed.flags.writeable = False
    tokens = runner.run(0, fixed).tokens
    tokens.flags.writeable = False
    assert runner.run(1, fixed, tokens).tokens is not None
