"""Early exit: rounds that continue exactly, a frozen backbone, MACs by hand, heads that follow the classes."""

import json

import pytest
import torch
import torch.nn.functional as F

import progresvit
from progresvit.baselines.early_exit import EarlyExit, EarlyExitConfig
from progresvit.config import plain_vit
from progresvit.evaluation import read_records
from progresvit.interop import start_from_timm
from progresvit.model import ProgResViT
from progresvit.training.recipe import load_recipe
from tests.baselines.literal import plain_block, plain_embedding
from tests.commands import works
from tests.training.runs import ready, recipe, take_steps


def exits(*blocks, resolution=32):
    return [{"resolution": resolution, "blocks": number} for number in blocks]


TINY = {"rounds": exits(1, 3), "heads": 2, "depth": 3, "num_classes": 5}


@pytest.fixture
def model(randomize):
    return randomize(EarlyExit(EarlyExitConfig(**TINY)))


def literal_exits(model, images):
    """Two exits of a ViT, after blocks 1 and 3, written with nothing but products."""
    x, logits = plain_embedding(model, images), []
    for number, block in enumerate(model.blocks, start=1):
        x = plain_block(block, x, 4 * 128)
        if number in (1, 3):
            own = model.exits[0] if number == 1 else model
            normed = F.layer_norm(x, (128,), own.norm.weight, own.norm.bias, 1e-6)
            logits.append(normed[:, 0] @ own.head.weight.T + own.head.bias)
    return logits


def test_both_exits_equal_the_blocks_written_out(model, images):
    for output, literal in zip(model(images), literal_exits(model, images), strict=True):
        torch.testing.assert_close(output.logits, literal, atol=1e-5, rtol=1e-5)


def test_rounds_run_one_by_one_equal_the_forward_pass(model, images):
    first = model.run_round(0, images)
    second = model.run_round(1, images, previous=first.tokens)
    for output, alone in zip(model(images), (first, second), strict=True):
        assert torch.equal(output.logits, alone.logits)
        assert torch.equal(output.tokens, alone.tokens)


def test_the_last_exit_of_a_start_is_the_plain_vit(images, randomize):
    plain = randomize(ProgResViT(plain_vit(resolution=32, heads=2, depth=3, num_classes=5)))
    model = EarlyExit(EarlyExitConfig(**TINY)).eval()
    fresh = start_from_timm(model, plain)
    assert set(fresh) == {f"exits.0.{part}.{kind}" for part in ("norm", "head") for kind in ("weight", "bias")}
    torch.testing.assert_close(model(images)[1].logits, plain(images)[0].logits)  # products of other shapes may round
    assert (model.exits[0].norm.weight == 1).all()


def test_an_exit_does_not_depend_on_what_follows_it(model, images):
    before = [output.logits for output in model(images)]
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight[0, 0] += 1
    after = [output.logits for output in model(images)]
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight[0, 0] += 1
    assert not torch.equal(model(images)[0].logits, after[0])


def test_macs_by_hand_for_deit_s():
    config = EarlyExitConfig(rounds=exits(3, 6, 9, 12, resolution=224), heads=6)
    with torch.device("meta"):
        model = EarlyExit(config)
    embedding, head = 196 * 768 * 384, 384 * 1000
    block = 197 * 12 * 384 * 384 + 2 * 197 * 197 * 384
    by_hand = [embedding + 3 * exit_ * block + exit_ * head for exit_ in (1, 2, 3, 4)]
    for convention in ("paper", "executed"):  # tokens are as wide as the backbone, so both are equal
        assert model.gmacs(convention) == [number / 1e9 for number in by_hand]
    assert [round(number, 3) for number in model.gmacs()] == [1.193, 2.329, 3.464, 4.6]


def test_only_norms_and_heads_of_a_frozen_model_are_trained(model):
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    parts = {f"{part}.{kind}" for part in ("norm", "head") for kind in ("weight", "bias")}
    assert trained == parts | {f"exits.0.{part}" for part in parts}
    thawed = EarlyExit(EarlyExitConfig(**TINY, frozen=False), drop_path=0.1)
    assert all(parameter.requires_grad for parameter in thawed.parameters())
    with pytest.raises(ValueError, match=r"disturb a frozen backbone; set model\.drop_path=0"):
        EarlyExit(EarlyExitConfig(**TINY), drop_path=0.1)


def test_steps_change_the_exits_and_leave_backbone_and_average_as_they_are(digits, plain):
    started = ready(run_recipe(plain), digits)
    before = {key: value.clone() for key, value in started.model.state_dict().items()}
    take_steps(started, 3)
    after, average = started.model.state_dict(), started.step.ema.module.model.state_dict()
    for key, value in before.items():
        own = key.startswith(("norm.", "head.", "exits."))
        assert torch.equal(value, after[key]) != own, key
        assert torch.equal(value, average[key]) != own, key
    assert sum(len(group["params"]) for group in started.step.optimizer.param_groups) == 2 * 4


@pytest.fixture
def plain(tmp_path, randomize):
    """The folder of a plain ViT to start from."""
    config = plain_vit(resolution=32, heads=2, depth=2, patch_size=8, num_classes=10)
    return progresvit.save(randomize(ProgResViT(config)), tmp_path / "plain")


def run_recipe(start, **sections):
    fields = {"rounds": exits(1, 2), "heads": 2, "depth": 2, "patch_size": 8}
    wanted = recipe(**sections)
    model = type(wanted.model)(kind="early_exit", fields=fields, start=None if start is None else str(start))
    return wanted.model_copy(update={"model": model})


@pytest.mark.slow
def test_it_is_trained_evaluated_and_calibrated_by_the_commands(digits, plain, tmp_path):
    wanted = run_recipe(plain, optimizer={"lr": 0.02}, schedule={"epochs": 10, "cooldown": 0}, ema=0.5)
    (tmp_path / "exits.yaml").write_text(wanted.to_yaml())
    works("train", tmp_path / "exits.yaml", "--data", digits, "--out", tmp_path / "run", "--device", "cpu")
    folder, out = tmp_path / "run" / "model", tmp_path / "r.parquet"
    model = progresvit.load(folder)
    assert isinstance(model, EarlyExit)
    works("evaluate", folder, "--data", digits, "--out", out, "--workers", 0, "--device", "cpu")
    records = read_records(out)
    assert records.correct.mean(axis=0).min() > 0.4  # four classes, on a random backbone
    assert records.gmacs() == model.gmacs()
    works("calibrate", out, "--exit-share", 0.5, "--out", tmp_path / "t.json")
    setting = json.loads((tmp_path / "t.json").read_text())
    assert setting["expected"]["exit_shares"][0] == pytest.approx(0.5, abs=0.05)


def test_the_compiler_sees_the_losses_as_a_whole(digits, plain):
    started = ready(run_recipe(plain), digits)
    compiled = torch.compile(started.step.trained, backend="eager", fullgraph=True, dynamic=False)
    (batch,) = next(iter(started.data.train.steps(0, 1)))
    prepared = started.task.prepare(batch)
    assert torch.equal(compiled(prepared), started.step.trained(prepared))


def test_all_heads_keep_the_chosen_classes(model, images):
    kept = model.keep_classes([3, 0])
    for output, narrow in zip(model(images), kept(images), strict=True):
        torch.testing.assert_close(narrow.logits, output.logits[:, [3, 0]])
    assert not kept.blocks[0].mlp.fc1.weight.requires_grad


def test_all_heads_are_reset(model, images):
    model.reset_classifier(7)
    assert [tuple(output.logits.shape) for output in model(images)] == [(3, 7), (3, 7)]
    assert (model.exits[0].head.bias == 0).all()
    model.reset_classifier(0)
    assert [tuple(output.logits.shape) for output in model(images)] == [(3, 128), (3, 128)]


def test_a_start_with_other_classes_gives_fresh_heads(digits, tmp_path, randomize):
    fields = {"rounds": exits(1, 2), "heads": 2, "depth": 2, "patch_size": 8}
    config = EarlyExitConfig(**fields, num_classes=4, class_ids=("a", "b", "c", "d"))
    source = randomize(EarlyExit(config))
    progresvit.save(source, tmp_path / "source")
    wanted = run_recipe(None)
    model = wanted.model.model_copy(update={"start": str(tmp_path / "source")})
    started = ready(wanted.model_copy(update={"model": model}), digits).model
    assert torch.equal(started.exits[0].norm.weight, source.exits[0].norm.weight)
    assert not torch.equal(started.exits[0].head.weight, source.exits[0].head.weight)
    assert not torch.equal(started.head.weight, source.head.weight)


def test_the_recipe_builds_deit_s():
    config = load_recipe("early_exit").model.config(num_classes=1000, class_ids=None, labels=None)
    assert [round_.blocks for round_ in config.rounds] == [3, 6, 9, 12]
    assert (config.heads, config.depth, config.resolution, config.frozen) == (6, 12, 224, True)


@pytest.mark.parametrize(
    ("rounds", "match"),
    [
        (exits(2, 2, 3), r"must rise from round to round, not \[2, 2, 3\]; sort them"),
        (exits(2, 1, 3), "must rise"),
        (exits(1, 2), r"after the last block, 3, not after block 2; add a round with blocks=3, or set depth=2"),
        (exits(1, 4), r"after the last block, 3, not after block 4"),
        (exits(0, 3), "blocks"),
        ([*exits(1), *exits(3, resolution=64)], "one resolution, not at 32 and 64"),
    ],
)
def test_exits_that_make_no_sense_are_refused(rounds, match):
    with pytest.raises(ValueError, match=match):
        EarlyExitConfig(**{**TINY, "rounds": rounds})


def test_a_frozen_backbone_needs_a_start(digits):
    with pytest.raises(ValueError, match=r"name a trained one as model\.start, or set model\.fields\.frozen=false"):
        ready(run_recipe(None), digits)


def test_the_map_of_a_teacher_needs_one_head(digits, plain):
    options = {"teacher": "efficientnet-lite2", "kind": "soft", "map_weight": 0.5}
    with pytest.raises(ValueError, match=r"EarlyExit has one per round; set distillation\.map_weight=0"):
        ready(run_recipe(plain, task="distillation", distillation=options), digits)
