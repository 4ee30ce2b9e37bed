"""Interventions on round 1: nothing changes at strength 0, and at full strength what they say."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from progresvit.analysis import interventions, low_pass, noise_replacement, token_swap
from progresvit.analysis.interventions import Effect, Outcome
from progresvit.config import ModelConfig, make_rounds
from progresvit.data.transforms import normalise
from progresvit.model import ProgResViT
from progresvit.plots import render
from progresvit.table import PLOTS
from tests.analysis.made import random_sample
from tests.model.pooled import PooledConfig, PooledModel


@pytest.fixture(scope="module")
def sample():
    return random_sample(images=60, classes=6)  # more than a batch


@pytest.fixture
def three(randomize):
    rounds = make_rounds([16, 24, 32], [1, 1, 2])
    return randomize(ProgResViT(ModelConfig(rounds=rounds, heads=2, depth=2, patch_size=8, num_classes=12)))


@pytest.fixture(params=["two rounds", "three rounds"])
def model(request, small_model, three):
    return small_model if request.param == "two rounds" else three


def untouched(model, sample):
    """The last round by the model's own forward, in the batches of the sample."""
    correct, confidence = [], []
    with torch.inference_mode():
        for rows in torch.arange(len(sample)).split(50):
            logits = model(normalise(sample.pixels[rows], model.config))[-1].logits
            correct.append(logits.argmax(dim=-1) == sample.labels[rows])
            confidence.append(logits.softmax(dim=-1)[torch.arange(len(rows)), sample.labels[rows]].double())
    return torch.cat(correct).numpy(), torch.cat(confidence).numpy()


def same(outcome, expected):
    return np.array_equal(outcome.correct, expected[0]) and np.array_equal(outcome.confidence, expected[1])


def test_at_strength_zero_every_intervention_reproduces_the_untouched_model_exactly(model, sample):
    expected = untouched(model, sample)
    result = [*low_pass.low_pass(model, sample, [0.0]), *noise_replacement.noise_replacement(model, sample, [0.0])]
    result += token_swap.token_swap(model, sample, 0.0)
    assert len(result) == 9
    assert all(same(condition.effect.outcome, expected) for condition in result)
    assert all(condition.effect.accuracy.mean == 0 and condition.effect.confidence.mean == 0 for condition in result)


def test_at_full_strength_every_intervention_changes_the_last_round(model, sample):
    expected = untouched(model, sample)
    result = [*low_pass.low_pass(model, sample, [0.9]), *noise_replacement.noise_replacement(model, sample, [1.0])]
    result += token_swap.token_swap(model, sample)
    assert not any(same(condition.effect.outcome, expected) for condition in result)


def later(model, sample, first):
    """The logits of the last round after tokens of round 1, by a loop of its own."""
    images = normalise(sample.pixels, model.config)
    with torch.inference_mode():
        tokens = first
        for s in range(1, len(model.config.rounds)):
            output = model.run_round(s, images, tokens)
            tokens = output.tokens
    return output.logits


def close(outcome, logits, labels):
    probabilities = logits.softmax(dim=-1)
    own = probabilities[torch.arange(len(labels)), labels].numpy()
    correct = (probabilities.argmax(dim=-1) == labels).numpy()
    return np.allclose(outcome.confidence, own, atol=1e-5) and (outcome.correct == correct).mean() > 0.95


def test_the_blur_resizes_down_and_up_and_only_round_one_sees_it(three, sample):
    (result,) = low_pass.low_pass(three, sample, [0.75])
    assert result.side == 4
    images = F.interpolate(normalise(sample.pixels, three.config), size=(16, 16), mode="bicubic", antialias=True)
    small = F.interpolate(images, size=(4, 4), mode="bicubic", antialias=True)
    blurred = F.interpolate(small, size=(16, 16), mode="bicubic", antialias=True)
    with torch.inference_mode():
        tokens = three.run_round(0, blurred).tokens
    assert close(result.effect.outcome, later(three, sample, tokens), sample.labels)


def test_the_blur_removes_detail_and_keeps_the_mean():
    board = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(16, 16)[None, None].expand(1, 3, -1, -1)
    kept = low_pass.low_passed(board + 0.5, resolution=32, side=32)
    assert torch.equal(kept, board + 0.5)
    flat = low_pass.low_passed(board + 0.5, resolution=32, side=8)
    assert flat.shape == board.shape
    inner = flat[..., 8:-8, 8:-8]  # at the edge, one pixel of a pair is missing
    assert torch.allclose(inner, torch.full_like(inner, 0.5), atol=1e-3)


def first_tokens(model, sample):
    with torch.inference_mode():
        return model.run_round(0, normalise(sample.pixels, model.config)).tokens


def test_swapped_tokens_come_from_the_donor(model, sample):
    own, donors = first_tokens(model, sample), token_swap.find_donors(sample.labels, sample.class_names, seed=0)
    result = {
        (condition.tokens, condition.donor): condition.effect.outcome
        for condition in token_swap.token_swap(model, sample)
    }
    assert len(result) == 7
    for donor, places in donors.items():
        other = own[places]
        expected = {
            "class token": torch.cat([other[:, :1], own[:, 1:]], dim=1),
            "patch tokens": torch.cat([own[:, :1], other[:, 1:]], dim=1),
            "all tokens": other,
        }
        for tokens, mixed in expected.items():
            assert close(result[tokens, donor], later(model, sample, mixed), sample.labels), (tokens, donor)
    shuffled = token_swap.shuffle_patches(own, token_swap.patch_order(own, seed=0))
    assert close(result["patch tokens", "shuffled in space"], later(model, sample, shuffled), sample.labels)


def test_half_of_a_swap_is_the_mean_of_both_images():
    own, other = torch.randn(2, 5, 5, 3)
    mixed = token_swap.mix(own, other, "patch tokens", 0.5)
    assert torch.equal(mixed[:, 0], own[:, 0])
    assert torch.allclose(mixed[:, 1:], (own[:, 1:] + other[:, 1:]) / 2)
    assert torch.equal(token_swap.mix(own, other, "all tokens", 1.0), other)


@pytest.mark.parametrize("counts", [[2, 2], [5, 5, 5], [2, 3, 4, 9], [7, 2, 2, 2, 2], [2] * 40])
@pytest.mark.parametrize("seed", range(3))
def test_each_image_gives_its_tokens_to_one_other_of_the_right_class(counts, seed):
    labels = torch.cat([torch.full((count,), number) for number, count in enumerate(counts)])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    donors = token_swap.find_donors(labels, {}, seed=seed)
    for places in donors.values():
        assert sorted(places.tolist()) == list(range(len(labels)))
        assert (places != torch.arange(len(labels))).all()
    assert (labels[donors["same class"]] == labels).all()
    assert (labels[donors["other class"]] != labels).all()


def test_donors_of_another_class_come_from_all_classes():
    labels = torch.arange(10).repeat_interleave(40)
    donors = token_swap.find_donors(labels, {}, seed=0)["other class"]
    of_first = Counter(labels[donors[:40]].tolist())
    assert set(of_first) == set(range(1, 10))


def test_shuffled_patches_are_the_same_patches_in_another_order():
    tokens = torch.randn(4, 17, 3)
    shuffled = token_swap.shuffle_patches(tokens, token_swap.patch_order(tokens, seed=0))
    assert torch.equal(shuffled[:, 0], tokens[:, 0])
    assert not torch.equal(shuffled[:, 1:], tokens[:, 1:])
    orders = set()
    for own, other in zip(tokens[:, 1:], shuffled[:, 1:]):
        order = tuple((own[None] == other[:, None]).all(dim=-1).nonzero()[:, 1].tolist())
        assert sorted(order) == list(range(16))
        orders.add(order)
    assert len(orders) == 4  # each image has its own


def test_noise_has_the_mean_and_the_deviation_of_each_image_and_nothing_else_of_it():
    x = (
        torch.randn(3, 50, 64) * torch.tensor([1.0, 4.0, 0.2])[:, None, None]
        + torch.tensor([0.0, 5.0, -1.0])[:, None, None]
    )
    noise = noise_replacement.noise(1.0, seed=1)(x)
    for before, after in zip(x, noise):
        assert after.mean().item() == pytest.approx(before.mean().item(), abs=0.1 * before.std().item())
        assert after.std().item() == pytest.approx(before.std().item(), rel=0.05)
        assert abs(np.corrcoef(before.flatten(), after.flatten())[0, 1]) < 0.06
    assert torch.equal(noise, noise_replacement.noise(1.0, seed=1)(x))
    half = noise_replacement.noise(0.5, seed=1)(x)
    assert torch.allclose(half, (x + noise) / 2, atol=1e-5)


def test_noise_replaces_the_last_block_output_of_round_one_ahead_of_the_norm(model, sample):
    (result,) = noise_replacement.noise_replacement(model, sample, [1.0], seed=3)
    images, outputs = normalise(sample.pixels, model.config), []
    handle = model.blocks[-1].register_forward_hook(lambda block, args, output: outputs.append(output))
    with torch.inference_mode():
        model.run_round(0, images)
        handle.remove()
        generator = torch.Generator().manual_seed(3)
        normal = torch.cat([torch.randn(rows, *outputs[0].shape[1:], generator=generator) for rows in (50, 10)])
        x = outputs[0]
        noise = x.mean(dim=(1, 2), keepdim=True) + x.std(dim=(1, 2), keepdim=True) * normal
        width = x.shape[-1]
        tokens = F.layer_norm(noise, (width,), model.norm.weight[:width], model.norm.bias[:width], model.norm.eps)
    assert close(result.effect.outcome, later(model, sample, tokens), sample.labels)


def test_quantiles_are_of_the_images_that_the_untouched_model_has_right():
    before = Outcome(correct=np.array([True, False, True]), confidence=np.array([0.9, 0.1, 0.8]))
    after = Outcome(correct=np.array([False, True, True]), confidence=np.array([0.2, 0.9, 0.6]))
    result = noise_replacement.Replaced(1.0, before, Effect.of(after, before))
    assert result.quantiles[2] == pytest.approx(0.4)
    never = Outcome(correct=np.zeros(3, bool), confidence=before.confidence)
    assert noise_replacement.Replaced(1.0, never, Effect.of(after, never)).quantiles is None


def test_models_without_blocks_hand_on_tokens_too(sample):
    rounds = [{"resolution": 16, "grid": 2}, {"resolution": 32, "grid": 4}]
    pooled = PooledModel(PooledConfig(rounds=rounds, num_classes=12)).eval()
    (result,) = low_pass.low_pass(pooled, sample, [0.0])
    assert same(result.effect.outcome, untouched(pooled, sample))


@pytest.mark.parametrize(
    ("analysis", "strengths", "message"),
    [
        (low_pass.low_pass, [0.5, 1.0], r"low-pass are from 0 to 0\.95, not 1"),
        (low_pass.low_pass, [], "not none"),
        (noise_replacement.noise_replacement, [-0.1], r"noise-replacement are from 0 to 1, not -0\.1"),
        (token_swap.token_swap, float("nan"), "token-swap are from 0 to 1, not nan"),
    ],
)
def test_wrong_strengths_are_refused(small_model, sample, analysis, strengths, message):
    with pytest.raises(ValueError, match=message):
        analysis(small_model, sample, strengths)


def test_too_few_images_of_a_class_are_refused_by_name(small_model, sample):
    single = sample.labels.clone()
    single[0] = 11
    few = replace(sample, labels=single, class_names={**sample.class_names, 11: "goldfish"})
    with pytest.raises(ValueError, match=r"too few images per class.* 1 of 'goldfish' among 60 images; take more"):
        token_swap.token_swap(small_model, few)
    with pytest.raises(ValueError, match="60 of 60 images are of 'class 0'"):
        token_swap.token_swap(small_model, replace(sample, labels=torch.zeros(60, dtype=torch.long)))


def test_tables_and_figures_hold_every_condition(small_model, sample):
    blurred = low_pass.low_pass(small_model, sample)
    table = low_pass.low_pass_table(blurred)
    assert [row["strength"] for row in table.rows] == [0, 0.25, 0.5, 0.75, 0.9]
    for row, condition in zip(table.rows, blurred):
        assert row["accuracy"] == condition.effect.outcome.correct.mean()
        assert row["accuracy_change_low"] <= row["accuracy_change"] <= row["accuracy_change_high"]
    figures = [low_pass.low_pass_figure(blurred)]
    swapped = token_swap.token_swap(small_model, sample)
    rows = token_swap.token_swap_table(swapped).rows
    assert [row["tokens"] for row in rows] == ["none"] + ["class token"] * 2 + ["patch tokens"] * 3 + ["all tokens"] * 2
    assert rows[0]["accuracy"] == untouched(small_model, sample)[0].mean()
    assert rows[0]["accuracy_change_low"] is None
    figures.append(token_swap.token_swap_figure(swapped))
    replaced = noise_replacement.noise_replacement(small_model, sample)
    rows = noise_replacement.noise_replacement_table(replaced).rows
    assert [row["strength"] for row in rows] == [0, 0.25, 0.5, 0.75, 1]
    assert rows[0]["confidence_p50"] == np.median(replaced[0].untouched.confidence[replaced[0].untouched.correct])
    figures.append(noise_replacement.noise_replacement_figure(replaced))
    for figure in figures:
        assert render(figure, PLOTS[0]).startswith(b"\x89PNG")
        assert all(axes.get_xlabel() for axes in figure.axes)


def test_axes_show_at_least_five_points():
    assert interventions.widened(50, 51) == (48, 53)
    assert interventions.widened(40, 60) == (40, 60)


def row(change, low, high, **more):
    return {
        "strength": 0.9,
        "accuracy": 0.8 + change,
        "accuracy_change": change,
        "accuracy_change_low": low,
        "accuracy_change_high": high,
        **more,
    }


def test_titles_say_whether_top1_changes_and_by_how_much():
    assert interventions.effect_words(row(-0.0997, -0.111, -0.0883)) == "lowers top-1 by 9.97 points (8.83 to 11.10)"
    assert interventions.effect_words(row(0.0359, 0.0289, 0.0428)) == "raises top-1 by 3.59 points (2.89 to 4.28)"
    unclear = interventions.effect_words(row(0.0003, -0.0013, 0.0018))
    assert unclear == "does not clearly change top-1: +0.03 points (−0.13 to +0.18)"
    assert interventions.change_words(row(-0.0032, -0.0064, 0.00001)) == "−0.32 points (−0.64 to 0.00)"
    title = low_pass.draw_low_pass([row(0, 0, 0, strength=0.0), row(-0.0997, -0.111, -0.0883)]).axes[0].get_title()
    assert " ".join(title.split()) == "Blurring round 1's input by 90 % lowers top-1 by 9.97 points (8.83 to 11.10)"


def test_the_title_of_token_swaps_names_the_largest_change():
    nothing = {"confidence": 0.7, "confidence_change": 0, "confidence_change_low": 0, "confidence_change_high": 0}
    rows = [row(0, 0, 0, tokens="none", donor=None, **nothing)]
    rows.append(row(-0.01, -0.02, 0.0, tokens="class token", donor="other class", **nothing))
    rows.append(row(-0.16, -0.173, -0.1468, tokens="all tokens", donor="other class", **nothing))
    title = token_swap.draw_token_swap(rows).get_suptitle()
    expected = "Of 2 swaps, “all tokens, other class” changes top-1 most: −16.00 points (−17.30 to −14.68)"
    assert " ".join(title.split()) == expected
