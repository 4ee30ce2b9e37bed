"""Optimizers, schedules, clipping and freezing: what a recipe names, by its effect."""

import math

import pytest
import torch
from torch import nn

from progresvit.model import ProgResViT
from progresvit.training.optim import Schedules, make_optimizer
from progresvit.training.recipe import load_recipe
from progresvit.training.step import RoundLosses
from progresvit.training.tasks.supervised import Supervised
from tests.training.runs import losses, ready, recipe, run, take_steps


def values_over_time(wanted, times, steps_per_epoch=1, key="lr"):
    """What the schedules set, from a rate of 1e-3."""
    group = {"params": [nn.Parameter(torch.zeros(1))], "decays": True, "weight_decay": wanted.optimizer.weight_decay}
    optimizer = torch.optim.SGD([group], lr=1e-3)
    schedules = Schedules(optimizer, wanted, steps_per_epoch)
    values = []
    for time in times:
        schedules.set(time)
        values.append(optimizer.param_groups[0][key])
    return values


def test_learning_rate_grows_with_the_batch():
    optimizer = make_optimizer(nn.Linear(2, 2), recipe(optimizer={"lr": 5e-4, "lr_batch": 512, "batch": 1024}))
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3}


def cosine(done, high=1e-3, low=1e-5):
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * done))


def test_cosine_at_warm_up_middle_end_and_cooldown():
    rates = values_over_time(load_recipe("192_240"), [0, 2, 5, 150, 299, 300, 305, 309])
    warm = [1e-6, 1e-6 + 2 / 5 * (1e-3 - 1e-6)]
    assert rates == pytest.approx([*warm, cosine(5 / 300), (1e-3 + 1e-5) / 2, cosine(299 / 300), *[1e-5] * 3])


def test_by_epoch_the_rate_is_constant_within_an_epoch_and_by_step_it_is_not():
    steps = [600, 603, 609]  # of ten per epoch
    by_epoch = values_over_time(load_recipe("192_240"), steps, 10)
    assert by_epoch == pytest.approx([cosine(60 / 300)] * 3)
    by_step = values_over_time(load_recipe("192_240", ["schedule.by=step"]), steps, 10)
    assert by_step == pytest.approx([cosine(step / 3000) for step in steps])


def test_poly_decays_per_step_to_the_minimum():
    wanted = load_recipe(
        "192_240", ["schedule={name: poly, by: step, epochs: 2, cooldown: 1, warmup: 0, min_lr: 1.0e-5}"]
    )
    rates = values_over_time(wanted, [0, 5, 10, 19, 20, 29], 10)
    expected = [1e-5 + (1e-3 - 1e-5) * (1 - step / 20) ** 0.9 for step in (0, 5, 10, 19)]
    assert rates == pytest.approx([*expected, 1e-5, 1e-5])


def test_weight_decay_follows_a_cosine_to_its_end():
    overrides = ["optimizer.weight_decay=0.04", "schedule.weight_decay_end=0.4", "schedule.by=step"]
    decays = values_over_time(load_recipe("192_240", overrides), [0, 750, 1500, 3000, 3099], 10, "weight_decay")
    assert decays == pytest.approx([0.04, cosine(0.25, 0.04, 0.4), 0.22, 0.4, 0.4])


def test_weight_decay_spares_vectors_biases_position_and_class_token(small_config):
    model = ProgResViT(small_config.replace(layer_scale=1e-6))
    optimizer = make_optimizer(RoundLosses(model, Supervised()), load_recipe("192_240"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {g["weight_decay"]: {names[id(p)] for p in g["params"]} for g in optimizer.param_groups}
    assert set(groups) == {0.0, 0.05}
    assert groups[0.05] == {
        n for n, p in model.named_parameters() if p.ndim > 1 and n not in ("pos_embed", "cls_token")
    }
    assert {"blocks.0.ls1.gamma", "psg.blocks.0.attn_scale", "head.bias", "norm.weight"} <= groups[0.0]
    defaults = optimizer.defaults
    assert (defaults["betas"], defaults["eps"], defaults["fused"]) == ((0.9, 0.999), 1e-8, True)


def test_scheduled_weight_decay_reaches_the_decayed_parameters_alone(digits):
    wanted = recipe(optimizer={"weight_decay": 0.0}, schedule={"weight_decay_end": 0.5, "epochs": 2})
    started = ready(wanted, digits)
    schedules = Schedules(started.step.optimizer, started.recipe, 3)
    decays = []
    for step in (0, 6):
        schedules.set(step)
        decays.append([group["weight_decay"] for group in started.step.optimizer.param_groups])
    assert decays == [[0.0, 0.0], [0.0, 0.5]]


def plain(**sections):
    """A recipe whose steps are neither random nor dependent on earlier steps."""
    steady = {"model": {"drop_path": 0.0}, "mixing": {"mixup": 0.0, "cutmix": 0.0}, "augment": {"erasing": 0.0}}
    return recipe(**steady, **sections)


SGD = {"name": "sgd", "lr": 0.1, "lr_batch": 16, "weight_decay": 0.0}


def gradients(started, batch):
    loss = started.step.trained(started.task.prepare(batch)).mean()
    return dict(zip(weights(started), torch.autograd.grad(loss, list(started.model.parameters()))))


def weights(started):
    return {name: parameter.detach().clone() for name, parameter in started.model.named_parameters()}


def test_sgd_with_momentum_steps_as_written_in_books(digits):
    started = ready(plain(optimizer={**SGD, "momentum": 0.5}), digits)
    velocity = {name: torch.zeros_like(value) for name, value in weights(started).items()}
    for number, batches in enumerate(started.data.train.steps(0, 3)):
        before, gradient = weights(started), gradients(started, batches[0])
        started.step(number, batches)
        velocity = {name: 0.5 * velocity[name] + gradient[name] for name in velocity}
        for name, after in weights(started).items():
            assert torch.allclose(after, before[name] - 0.1 * velocity[name], atol=1e-6), name


@pytest.mark.slow
def test_a_run_with_sgd_and_poly_resumes_to_the_bit(digits, tmp_path):
    schedule = {"name": "poly", "by": "step", "epochs": 4, "cooldown": 0, "warmup": 0, "min_lr": 1e-5}
    wanted = plain(optimizer=SGD, schedule=schedule, run={"keep": 9})
    run(wanted, digits, tmp_path)
    whole = losses(tmp_path)
    assert [lr for _, _, lr in whole] == pytest.approx(
        [1e-5 + (0.1 - 1e-5) * (1 - step / 12) ** 0.9 for step in range(12)]
    )
    for path in sorted((tmp_path / "checkpoints").iterdir())[1:]:
        path.rename(tmp_path / path.name)
    run(wanted, digits, tmp_path, resume=True)
    assert losses(tmp_path) == whole


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_gradient_that_is_not_finite_changes_no_weight_under_any_optimizer(digits, name):
    """In the first step: torch's fused SGD has no momentum yet."""
    started = ready(plain(optimizer={"name": name}), digits)
    before = weights(started)
    first, second = started.data.train.steps(0, 2)
    started.model.head.weight.register_hook(lambda gradient: gradient * float("nan"))
    started.step(0, first)
    assert started.step.broken
    started.step(1, second)
    assert all(torch.equal(value, before[key]) for key, value in weights(started).items())
    for state in started.step.optimizer.state.values():
        assert all(not value.any() for key, value in state.items() if key != "step")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_bounds_the_norm_of_the_whole_gradient(digits, accumulate):
    norms = {}
    for clip in (None, 1e-3, 1e6):
        started = ready(
            plain(optimizer={**SGD, "lr": 1.0, "momentum": 0.0, "accumulate": accumulate, "clip": clip}), digits
        )
        before = weights(started)
        take_steps(started, 1)
        moved = torch.stack([(value - before[key]).norm() for key, value in weights(started).items()]).norm()
        norms[clip] = moved.item()
    assert norms[None] > 0.1
    assert norms[1e-3] == pytest.approx(1e-3, rel=1e-2)
    assert norms[1e6] == norms[None]


def changed(started, before):
    return {name for name, value in weights(started).items() if not torch.equal(value, before[name])}


def test_frozen_parameters_stay_and_the_others_learn(digits):
    started = ready(recipe(optimizer={"freeze": ["blocks.0.*", "cls_token"]}), digits)
    before = weights(started)
    take_steps(started, 3)
    moved = changed(started, before)
    assert not any(name.startswith("blocks.0.") or name == "cls_token" for name in moved)
    assert {"blocks.1.mlp.fc1.weight", "head.weight", "pos_embed"} <= moved
    average = started.step.ema.module.model.state_dict()
    assert torch.equal(average["blocks.0.mlp.fc1.weight"], before["blocks.0.mlp.fc1.weight"])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_parameters_frozen_for_one_epoch_learn_from_the_second(digits, name):
    started = ready(recipe(optimizer={"name": name, "freeze_epochs": {"head.*": 1}}), digits)
    before = weights(started)
    take_steps(started, 3)  # one epoch
    assert not any(key.startswith("head.") for key in changed(started, before))
    assert "blocks.0.mlp.fc1.weight" in changed(started, before)
    take_steps(started, 1, first=3)
    assert {"head.weight", "head.bias"} <= changed(started, before)


@pytest.mark.parametrize(
    ("pattern", "remedy"),
    [
        ("block.0.*", r"did you mean 'blocks\.0\.\*'"),
        ("hed.weight", r"did you mean 'head\.weight'"),
        ("zzz", r"choose one of blocks\.\*, cls_token, head\.\*"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest(digits, pattern, remedy):
    for key in ({"freeze": [pattern]}, {"freeze_epochs": {pattern: 1}}, {"lr_scale": {pattern: 2}}):
        with pytest.raises(ValueError, match=rf"optimizer\.{next(iter(key))}: no parameter matches .*{remedy}"):
            ready(recipe(optimizer=key), digits)


def test_a_scaled_rate_reaches_its_parameters_alone_and_follows_the_schedule(digits):
    scales = {"psg.*": 5, "psg.encoder.*": 0.5}
    started = ready(recipe(optimizer={"lr_scale": scales}, schedule={"warmup": 0}), digits)
    names = {parameter: name.removeprefix("model.") for name, parameter in started.step.trained.named_parameters()}

    def expected(name):
        return 0.5 if name.startswith("psg.encoder.") else 5 if name.startswith("psg.") else 1

    schedules = Schedules(started.step.optimizer, started.recipe, steps_per_epoch=3)
    for step in (0, 6):
        schedules.set(step)
        base = started.step.optimizer.param_groups[0]["lr"]
        rates = {
            names[parameter]: group["lr"]
            for group in started.step.optimizer.param_groups
            for parameter in group["params"]
        }
        assert rates == {name: pytest.approx(base * expected(name)) for name in names.values()}
        decayed = {names[p] for g in started.step.optimizer.param_groups if g["weight_decay"] for p in g["params"]}
        assert {"psg.encoder.weight", "head.weight"} <= decayed
        assert not any(name.endswith("bias") for name in decayed)


@pytest.mark.slow
def test_freezing_everything_is_refused(digits):
    with pytest.raises(ValueError, match="no parameter is left to train"):
        ready(recipe(optimizer={"freeze": ["*"]}), digits)
    with pytest.raises(ValueError, match="leaves no parameter to train in the first epoch"):
        ready(recipe(optimizer={"freeze_epochs": {"*": 1}}), digits)
