"""The losses of the built-in tasks, term by term."""

import math

import pytest
import torch
from torch import nn

from progresvit.data.augment.classification import Batch
from progresvit.model import RoundOutput
from progresvit.training.recipe import DistillationOptions, load_recipe
from progresvit.training.step import RoundLosses
from progresvit.training.tasks.classification import make_mixup
from progresvit.training.tasks.distillation import Distillation
from progresvit.training.tasks.supervised import Supervised
from progresvit.training.tasks.task import Frozen

IMAGES = torch.zeros(5, 3, 8, 8)


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
    losses = Supervised().losses(outputs, Batch(IMAGES, labels))
    assert losses.tolist() == pytest.approx([by_hand(output.logits, labels) for output in outputs], abs=1e-5)


def test_the_step_takes_the_plain_mean_over_rounds(small_model, images):
    labels = torch.rand(3, 12).softmax(dim=-1)
    losses = RoundLosses(small_model, Supervised())(Batch(images, labels))
    expected = [by_hand(output.logits, labels) for output in small_model(images)]
    assert losses.mean().item() == pytest.approx(sum(expected) / 2, abs=1e-5)


class Fixed(nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images):
        return self.logits


def distillation(*teachers, **options):
    """The task with teachers of its own, and labels that are mixed already."""
    task = Distillation(DistillationOptions(teacher=("given",) * len(teachers), **options))
    task.teachers, task.mixup = [Frozen(teacher) for teacher in teachers], lambda images, labels: (images, labels)
    return task


def test_hard_distillation_is_half_the_label_and_half_the_teachers(outputs, labels):
    teacher = Fixed(torch.randn(5, 7))
    task = distillation(teacher)
    batch = task.prepare(Batch(IMAGES, labels))
    assert batch.answer.tolist() == teacher.logits.argmax(dim=1).tolist()
    one_hot = torch.eye(7)[teacher.logits.argmax(dim=1)]
    expected = [0.5 * by_hand(o.logits, labels) + 0.5 * by_hand(o.logits, one_hot) for o in outputs]
    assert task.losses(outputs, batch).tolist() == pytest.approx(expected, abs=1e-5)
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
    task = distillation(teacher, kind="soft", weight=0.7, temperature=2.0)
    losses = task.losses(outputs, task.prepare(Batch(IMAGES, labels)))
    expected = [
        0.3 * by_hand(output.logits, labels) + 0.7 * divergence(teacher.logits, output.logits, 2.0)
        for output in outputs
    ]
    assert losses.tolist() == pytest.approx(expected, abs=1e-5)
    assert not teacher.logits.requires_grad


def test_several_teachers_are_one_with_the_mean_of_their_probabilities(outputs, labels):
    teachers = [Fixed(torch.randn(5, 7)), Fixed(torch.randn(5, 7))]
    mean = sum(teacher.logits.detach().softmax(dim=-1) for teacher in teachers) / 2
    task = distillation(*teachers, kind="soft", weight=0.7)
    losses = task.losses(outputs, task.prepare(Batch(IMAGES, labels)))
    expected = [
        0.3 * by_hand(output.logits, labels) + 0.7 * divergence(mean.log(), output.logits, 1.0) for output in outputs
    ]
    assert losses.tolist() == pytest.approx(expected, abs=1e-5)
    hard = distillation(*teachers).prepare(Batch(IMAGES, labels))
    assert hard.answer.tolist() == mean.argmax(dim=1).tolist()


def test_of_several_teachers_the_first_gives_the_map(labels):
    places, whole = Fixed(torch.randn(5, 4, 7)), Fixed(torch.randn(5, 7))
    batch = distillation(places, whole, kind="soft", map_weight=0.5).prepare(Batch(IMAGES, labels))
    logits = places.logits.detach()
    assert torch.allclose(batch.places[0], logits.softmax(dim=-1))
    expected = (logits.mean(dim=1).softmax(dim=-1) + whole.logits.detach().softmax(dim=-1)) / 2
    assert torch.allclose(batch.answer, expected)


def test_labels_count_among_the_datas_rows_of_a_wider_head_and_the_teacher_among_all(outputs):
    rows, labels = [5, 0, 3], torch.rand(5, 3).softmax(dim=-1)
    teacher = Fixed(torch.randn(5, 7))
    task = distillation(teacher, kind="soft", weight=0.25)
    task.rows = torch.tensor(rows)
    losses = task.losses(outputs, task.prepare(Batch(IMAGES, labels)))
    expected = [
        0.75 * by_hand(output.logits[:, rows], labels) + 0.25 * divergence(teacher.logits, output.logits, 1.0)
        for output in outputs
    ]
    assert losses.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_map_teaches_each_patch_the_teachers_prediction_at_its_place(labels):
    """A grid of 4 × 4 patches and a map of 2 × 2: the mean of four patches predicts a place."""
    head, places = nn.Linear(6, 7), torch.randn(5, 4, 7)
    tokens = torch.randn(5, 17, 4)  # a round of 4 of the head's 6 channels
    output = RoundOutput(torch.randn(5, 7), tokens)

    class Student:
        def __init__(self):
            self.head = head

        def __call__(self, images):
            return (output,)

    task = distillation(Fixed(places), kind="soft", weight=0.5, map_weight=2.0)
    batch = task.prepare(Batch(IMAGES, labels))
    image = places.mean(dim=1)  # the prediction for the image
    assert torch.allclose(batch.answer, image.softmax(dim=-1), atol=1e-6)
    grid = tokens[:, 1:].unflatten(1, (2, 2, 2, 2)).mean(dim=(2, 4)).flatten(1, 2)  # (5, 2, 2, 2, 2, 4) -> (5, 4, 4)
    predicted = grid @ head.weight[:, :4].T + head.bias
    expected = 0.5 * by_hand(output.logits, labels) + 0.5 * divergence(image, output.logits, 1.0)
    expected += 2.0 * divergence(places.flatten(0, 1), predicted.flatten(0, 1), 1.0)
    assert task.losses(task.outputs(Student(), batch), batch).tolist() == pytest.approx([expected], abs=1e-4)


def test_smoothed_labels_without_mixing():
    recipe = load_recipe("photos_tiny", ["mixing.mixup=0", "mixing.cutmix=0", "mixing.smoothing=0.1"])
    _, labels = make_mixup(recipe, 4)(torch.zeros(2, 3, 8, 8), torch.tensor([1, 3]))
    assert labels[0].tolist() == pytest.approx([0.025, 0.925, 0.025, 0.025])


def test_mixup_needs_an_even_batch():
    with pytest.raises(ValueError, match="not 7; change"):
        make_mixup(load_recipe("photos_tiny", ["optimizer.batch=7"]), 4)
    with pytest.raises(ValueError, match="not 3; change"):
        make_mixup(load_recipe("photos_tiny", ["optimizer.batch=12"]), 4, processes=4)
