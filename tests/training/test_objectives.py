"""Loss identities, schedule and weight decay, term by term."""

import math

import pytest
import torch
from torch import nn

from progresvit.model import ProgResViT, RoundOutput
from progresvit.training.distillation import HardDistillation, SoftDistillation
from progresvit.training.recipe import Optimizer, Schedule, load_recipe
from progresvit.training.step import RoundLosses, learning_rate, make_mixup, make_optimizer, make_schedule
from progresvit.training.supervised import Supervised


def by_hand(logits, target):
    """-sum_k y_k log softmax(z)_k, averaged over the batch, in plain Python."""
    total = 0.0
    for row, labels in zip(logits.tolist(), target.tolist()):
        log_sum = math.log(sum(math.exp(value) for value in row))
        total -= sum(label * (value - log_sum) for value, label in zip(row, labels))
    return total / len(logits)


@pytest.fixture
def outputs():
    return [RoundOutput(torch.randn(5, 7), torch.empty(0)) for _ in range(3)]


@pytest.fixture
def labels():
    return torch.rand(5, 7).softmax(dim=-1)


def test_each_round_has_the_soft_cross_entropy(outputs, labels):
    losses = Supervised().losses(outputs, labels)
    assert losses.tolist() == pytest.approx([by_hand(output.logits, labels) for output in outputs], abs=1e-5)


def test_the_step_takes_the_plain_mean_over_rounds(small_model, images):
    labels = torch.rand(3, 12).softmax(dim=-1)
    losses = RoundLosses(small_model, Supervised())(images, labels)
    expected = [by_hand(output.logits, labels) for output in small_model(images)]
    assert losses.mean().item() == pytest.approx(sum(expected) / 2, abs=1e-5)


class Fixed(nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images):
        return self.logits


def test_hard_distillation_is_half_the_label_and_half_the_teachers(outputs, labels):
    teacher = Fixed(torch.randn(5, 7))
    objective = HardDistillation(teacher)
    targets = objective.targets(torch.zeros(5, 3, 8, 8), labels)
    assert targets[1].tolist() == teacher.logits.argmax(dim=1).tolist()
    one_hot = torch.eye(7)[teacher.logits.argmax(dim=1)]
    expected = [0.5 * by_hand(o.logits, labels) + 0.5 * by_hand(o.logits, one_hot) for o in outputs]
    assert objective.losses(outputs, *targets).tolist() == pytest.approx(expected, abs=1e-5)
    assert not teacher.logits.requires_grad
    assert not teacher.training


def divergence(taught, logits, temperature):
    """t² sum_k p_k (log p_k - log q_k), averaged over the rows, in plain Python."""
    total = 0.0
    for mine, other in zip(taught.tolist(), logits.tolist()):
        p, q = ([math.exp(value / temperature) for value in row] for row in (mine, other))
        total += sum(a / sum(p) * math.log(a / sum(p) / (b / sum(q))) for a, b in zip(p, q))
    return temperature**2 * total / len(logits)


def test_soft_distillation_is_the_labels_and_the_divergence_from_the_teacher(outputs, labels):
    teacher = Fixed(torch.randn(5, 7))
    objective = SoftDistillation(teacher, nn.Linear(4, 7), weight=0.7, temperature=2.0)
    losses = objective.losses(outputs, *objective.targets(torch.zeros(5, 3, 8, 8), labels))
    expected = [
        0.3 * by_hand(output.logits, labels) + 0.7 * divergence(teacher.logits, output.logits, 2.0)
        for output in outputs
    ]
    assert losses.tolist() == pytest.approx(expected, abs=1e-5)
    assert not teacher.logits.requires_grad


def test_a_student_that_says_what_its_teacher_says_has_nothing_to_learn_from_it(labels):
    teacher = Fixed(torch.randn(5, 7))
    objective = SoftDistillation(teacher, nn.Linear(4, 7), weight=1.0, temperature=3.0)
    same = [RoundOutput(teacher.logits.detach().clone(), torch.empty(0))]
    assert objective.losses(same, *objective.targets(torch.zeros(5, 3, 8, 8), labels)).item() == pytest.approx(
        0, abs=1e-6
    )


def test_labels_count_among_the_datas_rows_of_a_wider_head_and_the_teacher_among_all(outputs):
    rows, labels = [5, 0, 3], torch.rand(5, 3).softmax(dim=-1)
    teacher = Fixed(torch.randn(5, 7))
    objective = SoftDistillation(teacher, nn.Linear(4, 7), weight=0.25, rows=torch.tensor(rows))
    losses = objective.losses(outputs, *objective.targets(torch.zeros(5, 3, 8, 8), labels))
    expected = [
        0.75 * by_hand(output.logits[:, rows], labels) + 0.25 * divergence(teacher.logits, output.logits, 1.0)
        for output in outputs
    ]
    assert losses.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_map_teaches_each_patch_what_the_teacher_sees_at_its_place(labels):
    """A grid of 4 × 4 patches and a map of 2 × 2: the mean of four patches answers for a place."""
    head, places = nn.Linear(6, 7), torch.randn(5, 4, 7)
    tokens = torch.randn(5, 17, 4)  # a round of 4 of the head's 6 channels
    output = RoundOutput(torch.randn(5, 7), tokens)
    objective = SoftDistillation(Fixed(places), head, weight=0.5, map_weight=2.0)
    targets = objective.targets(torch.zeros(5, 3, 8, 8), labels)
    image = places.mean(dim=1)  # what it says of the image
    assert torch.allclose(targets[1], image.softmax(dim=-1), atol=1e-6)
    grid = tokens[:, 1:].unflatten(1, (2, 2, 2, 2)).mean(dim=(2, 4)).flatten(1, 2)  # (5, 2, 2, 2, 2, 4) -> (5, 4, 4)
    said = grid @ head.weight[:, :4].T + head.bias
    expected = 0.5 * by_hand(output.logits, labels) + 0.5 * divergence(image, output.logits, 1.0)
    expected += 2.0 * divergence(places.flatten(0, 1), said.flatten(0, 1), 1.0)
    assert objective.losses([output], *targets).tolist() == pytest.approx([expected], abs=1e-4)


def test_smoothed_labels_without_mixing():
    recipe = load_recipe("photos_tiny", ["mixing.mixup=0", "mixing.cutmix=0", "mixing.smoothing=0.1"])
    _, labels = make_mixup(recipe, 4)(torch.zeros(2, 3, 8, 8), torch.tensor([1, 3]))
    assert labels[0].tolist() == pytest.approx([0.025, 0.925, 0.025, 0.025])


def test_mixup_needs_an_even_batch():
    with pytest.raises(ValueError, match="not 7; change"):
        make_mixup(load_recipe("photos_tiny", ["optimizer.batch=7"]), 4)
    with pytest.raises(ValueError, match="not 3; change"):
        make_mixup(load_recipe("photos_tiny", ["optimizer.batch=12"]), 4, processes=4)


def test_learning_rate_grows_with_the_batch():
    assert learning_rate(Optimizer(lr=5e-4, lr_batch=512, batch=1024)) == 1e-3


def test_schedule_at_warm_up_middle_end_and_cooldown():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
    schedule = make_schedule(optimizer, Schedule())

    def rate(epoch):
        schedule.step(epoch)
        return optimizer.param_groups[0]["lr"]

    def cosine(epoch):
        return 1e-5 + 0.5 * (1e-3 - 1e-5) * (1 + math.cos(math.pi * epoch / 300))

    assert rate(0) == pytest.approx(1e-6)
    assert rate(2) == pytest.approx(1e-6 + 2 / 5 * (1e-3 - 1e-6))
    assert rate(5) == pytest.approx(cosine(5))
    assert rate(150) == pytest.approx((1e-3 + 1e-5) / 2)
    assert rate(299) == pytest.approx(cosine(299))
    assert [rate(epoch) for epoch in (300, 305, 309)] == pytest.approx([1e-5] * 3)


def test_weight_decay_spares_vectors_biases_position_and_class_token(small_config):
    model = ProgResViT(small_config.replace(layer_scale=1e-6))
    optimizer = make_optimizer(model, Optimizer())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {g["weight_decay"]: {names[id(p)] for p in g["params"]} for g in optimizer.param_groups}
    assert set(groups) == {0.0, 0.05}
    assert groups[0.05] == {
        n for n, p in model.named_parameters() if p.ndim > 1 and n not in ("pos_embed", "cls_token")
    }
    assert {"blocks.0.ls1.gamma", "psg.blocks.0.attn_scale", "head.bias", "norm.weight"} <= groups[0.0]
    defaults = optimizer.defaults
    assert (defaults["betas"], defaults["eps"], defaults["fused"]) == ((0.9, 0.999), 1e-8, True)
