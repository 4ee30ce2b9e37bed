"""Training of rounds that are alternatives: which of them run, what is minimised, and that a draw follows the seed."""

from collections import Counter

import pytest
import torch

from progresvit.baselines.hydravit import HydraViT, HydraViTConfig
from progresvit.baselines.matformer import MatFormer, MatFormerConfig
from progresvit.baselines.sortednet import SortedNet, SortedNetConfig
from progresvit.config import make_rounds
from progresvit.data.augment.classification import Batch
from progresvit.data.sampler import Draw, seed_all
from progresvit.distributed import Processes
from progresvit.training.check_run import check_run_options
from progresvit.training.step import RoundLosses
from progresvit.training.tasks.subnetworks import DrawnBatch, Subnetworks, SubnetworksOptions
from progresvit.training.tasks.supervised import Supervised
from tests.training.runs import ALONE, assert_resumes_to_the_bit, ready, recipe, run, take_steps

OTHER = {"resolutions": None, "heads": None, "depth": None, "patch_size": None}
HEADS = {"heads": 3, "depth": 1, "patch_size": 8, "rounds": [{"resolution": 32, "heads": h} for h in (1, 2, 3)]}
SHARES = {"heads": 1, "depth": 1, "patch_size": 8, "rounds": [{"resolution": 32, "mlp_share": m} for m in (0.25, 1)]}
FIELDS = {"hydravit": HEADS, "sortednet": HEADS, "matformer": SHARES}
RULES = {
    "hydravit": {"per_step": 1},
    "sortednet": {"per_step": 2},
    "matformer": {"per_step": "all", "reduction": "sum"},
}


def baseline(kind, **sections):
    model = {**OTHER, "kind": kind, "fields": FIELDS[kind]}
    return recipe(**{"model": model, "task": "subnetworks", "task_options": RULES[kind], **sections})


@pytest.fixture
def batch(images):
    return Batch(images, torch.softmax(torch.randn(3, 5), dim=-1))


def cross_entropies(model, batch):
    """The cross entropy of every round, as literal sums."""
    return [-(batch.targets * output.logits.log_softmax(-1)).sum(1).mean() for output in model(batch.images)]


def tiny(model, config, rounds):
    return model(config(rounds=rounds, heads=4, depth=1, num_classes=5)).eval()


def losses_of(model, batch, rounds, **options):
    task = Subnetworks(SubnetworksOptions(**options))
    drawn = DrawnBatch(*batch, rounds)
    return task.losses(task.outputs(model, drawn), drawn)


def test_hydravit_minimises_the_cross_entropy_of_the_drawn_round(batch):
    model = tiny(HydraViT, HydraViTConfig, make_rounds([32] * 4, [1, 2, 3, 4]))
    measured = losses_of(model, batch, (2,), per_step=1)
    torch.testing.assert_close(measured.mean(), cross_entropies(model, batch)[2])
    assert measured[[0, 1, 3]].tolist() == [0, 0, 0]


def test_sortednet_minimises_the_mean_of_the_drawn_rounds(batch):
    model = tiny(SortedNet, SortedNetConfig, make_rounds([32] * 4, [1, 2, 3, 4]))
    measured, each = losses_of(model, batch, (0, 1, 3), per_step=3), cross_entropies(model, batch)
    torch.testing.assert_close(measured.mean(), (each[0] + each[1] + each[3]) / 3)
    assert measured[2] == 0
    for loss in (each[0], each[1], each[3]):  # one after the other, as gradients are accumulated
        (loss / 3).backward()
    accumulated = model.blocks[0].mlp.fc1.weight.grad.clone()
    model.zero_grad()
    measured.mean().backward()
    torch.testing.assert_close(model.blocks[0].mlp.fc1.weight.grad, accumulated, atol=1e-6, rtol=1e-4)


def test_matformer_minimises_the_sum_of_all_rounds(batch):
    rounds = [{"resolution": 32, "mlp_share": share} for share in (0.125, 0.25, 0.5, 1)]
    model = tiny(MatFormer, MatFormerConfig, rounds)
    measured = losses_of(model, batch, (), per_step="all", reduction="sum")
    torch.testing.assert_close(measured.mean(), sum(cross_entropies(model, batch)))
    assert len(measured) == 4


def test_only_the_drawn_rounds_run(batch, monkeypatch):
    model, ran = tiny(HydraViT, HydraViTConfig, make_rounds([32] * 4, [1, 2, 3, 4])), []
    run_round = model.run_round
    monkeypatch.setattr(model, "run_round", lambda s, images: ran.append(s) or run_round(s, images))
    losses_of(model, batch, (1, 3), per_step=2)
    assert ran == [1, 3]


def drawing(rounds, per_step):
    task = Subnetworks(SubnetworksOptions(per_step=per_step))
    task.rounds = rounds

    def draw():
        task.before_step(0)
        return task.drawn

    return draw


def test_every_choice_of_rounds_is_equally_probable():
    draw, counts = drawing(4, 2), Counter()
    for number in range(3000):
        seed_all(Draw.STEP, 42, number, 0)
        counts[draw()] += 1
    assert sorted(counts) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert all(abs(count - 500) < 100 for count in counts.values())  # five standard deviations


def test_a_draw_follows_from_the_seed_of_the_step():
    draw = drawing(4, 1)

    def draws(seed):
        for number in range(50):
            seed_all(Draw.STEP, seed, number)
            yield draw()

    assert list(draws(1)) == list(draws(1))
    assert list(draws(1)) != list(draws(2))
    assert drawing(4, "all")() == ()


def test_steps_train_the_drawn_rounds_and_the_losses_stay_one_per_round(digits):
    started = ready(baseline("hydravit", optimizer={"accumulate": 2}, mixing={"mixup": 0.0, "cutmix": 0.0}), digits)
    assert not started.task.uses_all_parameters
    trained = Counter()
    for step in range(12):
        take_steps(started, 1, first=step)
        ran = [s for s, loss in enumerate(started.step.sums.tolist()) if loss]
        assert len(ran) == 1  # one draw for both micro-batches
        assert len(started.step.sums) == 3
        trained.update(ran)
        started.step.sums.zero_()
    assert len(trained) == 3


@pytest.mark.parametrize("kind", ["hydravit", "matformer"])
def test_a_killed_and_resumed_run_equals_an_unbroken_one(digits, tmp_path, kind):
    wanted = baseline(kind, schedule={"epochs": 2, "cooldown": 0})
    assert_resumes_to_the_bit(wanted, digits, tmp_path, "model", killed_at=4)


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=8)  # pytest's monkeypatch would remove it afterwards
def test_a_compiled_step_takes_every_draw(images):
    """More draws than torch compiles by default, each as one whole graph."""
    model = HydraViT(HydraViTConfig(rounds=make_rounds([32] * 5, [1, 2, 3, 4, 5]), heads=5, depth=1, num_classes=5))
    task = Subnetworks(SubnetworksOptions(per_step=2))
    task.setup(model, None, recipe(run={"compile": True}), ALONE)
    torch._dynamo.reset()
    plain = RoundLosses(model.eval(), task)
    compiled = torch.compile(plain, fullgraph=True, dynamic=False, backend="eager")
    targets = torch.softmax(torch.randn(3, 5), dim=-1)
    draws = [(a, b) for a in range(5) for b in range(a + 1, 5)]
    for rounds in draws:
        batch = DrawnBatch(images, targets, rounds)
        torch.testing.assert_close(compiled(batch), plain(batch))


def test_a_changing_draw_cannot_be_recorded():
    gpu = Processes(rank=0, count=1, device=torch.device("cuda"))
    wanted = baseline("hydravit", run={"cuda_graphs": True})
    drawn, every = (Subnetworks(SubnetworksOptions(per_step=count)) for count in (1, "all"))
    with pytest.raises(ValueError, match=r"subnetworks draws other rounds each time; set run\.cuda_graphs=false"):
        check_run_options(wanted, drawn, gpu)
    check_run_options(wanted, every, gpu)
    assert every.uses_all_parameters
    leaves = torch.utils._pytree.tree_leaves(DrawnBatch(torch.zeros(1), torch.zeros(1), every.drawn))
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)  # as recording requires


def test_rounds_that_build_on_each_other_cannot_be_drawn(digits, tmp_path):
    wanted = recipe(task="subnetworks", task_options={"per_step": 1})
    with pytest.raises(ValueError, match=r"kind 'progresvit' build on each other.* set task=supervised"):
        run(wanted, digits, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_mean_of_all_rounds_is_supervised_training(digits):
    every = ready(recipe(task="subnetworks", task_options={"per_step": "all"}), digits)
    plain = ready(recipe(), digits, Supervised())
    for started in (every, plain):
        take_steps(started, 2)
    assert torch.equal(every.step.sums, plain.step.sums)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"per_step": 4}, "per_step=4 is more than the 3 rounds of the model; set it to at most 3, or to all"),
        ({"per_step": 0}, "per_step: must be all, or a number of rounds of at least 1, got 0"),
        ({"per_step": "some"}, "per_step: must be all, or a number of rounds of at least 1, got 'some'"),
        ({"per_steps": 1}, "did you mean 'per_step'"),
        ({"reduction": "max"}, "task_options: reduction: unknown value 'max'"),
    ],
)
def test_wrong_options_are_refused(digits, tmp_path, options, remedy):
    with pytest.raises(ValueError, match=remedy):
        run(baseline("hydravit", task_options=options), digits, tmp_path / "out")
    assert not (tmp_path / "out").exists()
