"""The task dynabert: its loss written out, its teacher, the order of heads and neurons, and resuming."""

import pytest
import torch
from safetensors.torch import load_file

import progresvit
from progresvit.baselines.dynabert import DynaBERT, DynaBERTConfig
from progresvit.config import plain_vit
from progresvit.model import ProgResViT
from progresvit.training.tasks import dynabert
from progresvit.training.tasks.dynabert import DynaBERTDistillation
from tests.training.runs import assert_equal_runs, evaluations, ready, recipe, run, run_until_killed, take_steps

ROUNDS = [{"resolution": 32, "share": 0.5}, {"resolution": 32, "share": 1}]
CLASSES = ("0", "1", "2", "3")


def write_start(folder, randomize):
    """A folder with a plain ViT that knows the classes of the digits."""
    torch.manual_seed(3)
    config = plain_vit(resolution=32, heads=2, depth=2, patch_size=8, num_classes=4, class_ids=CLASSES, labels=CLASSES)
    return progresvit.save(randomize(ProgResViT(config)), folder)


@pytest.fixture
def start(tmp_path, randomize):
    return write_start(tmp_path / "start", randomize)


def distilled(start, **sections):
    wanted = recipe(task="dynabert", task_options={"importance_batches": 2}, **sections)
    fields = {"rounds": ROUNDS, "heads": 2, "depth": 2, "patch_size": 8}
    model = type(wanted.model)(kind="dynabert", fields=fields, start=start and str(start))
    return wanted.model_copy(update={"model": model})


def first_batch(started):
    (batch,) = next(iter(started.data.train.steps(0, 1)))
    torch.manual_seed(5)
    return started.task.prepare(batch)


def literal_loss(student, teacher, images, s, weight=0.1):
    """CE with the teacher's probabilities, and a tenth of the squared distances of the residual streams."""
    output, states = student.run_with_hidden(s, images)
    with torch.no_grad():
        answer, wanted = teacher.run_with_hidden(1, images)
    loss = -(answer.logits.softmax(-1) * output.logits.log_softmax(-1)).sum(1).mean()
    for state, goal in zip(states, wanted, strict=True):
        loss = loss + weight * ((state - goal) ** 2).mean()
    return loss


def plain_start(start):
    teacher = DynaBERT(DynaBERTConfig(rounds=ROUNDS, heads=2, depth=2, patch_size=8, num_classes=4)).eval()
    teacher.load_state_dict(load_file(start / "model.safetensors"))
    return teacher


def test_the_loss_of_every_width_is_the_one_written_out(digits, start):
    started = ready(distilled(start), digits)
    take_steps(started, 2)
    batch, model = first_batch(started), started.model.eval()
    measured = started.task.losses(started.task.outputs(model, batch), batch)
    literal = [literal_loss(model, plain_start(start), batch.images, s) for s in (0, 1)]
    torch.testing.assert_close(measured, torch.stack(literal), atol=1e-5, rtol=1e-5)
    started.task.options = dynabert.DynaBERTOptions(hidden_weight=0)
    without = started.task.losses(started.task.outputs(model, batch), batch)
    assert (without < measured - 1e-4).all()


def test_before_the_first_step_the_whole_width_has_nothing_to_learn(digits, start):
    """Heads and neurons are in another order than the teacher's, which changes nothing at the full width."""
    started = ready(distilled(start), digits)
    teacher = started.task.teacher.module.model
    assert not torch.equal(started.model.blocks[0].mlp.fc1.weight, teacher.blocks[0].mlp.fc1.weight)
    assert torch.equal(teacher.blocks[0].mlp.fc1.weight, plain_start(start).blocks[0].mlp.fc1.weight)
    batch = first_batch(started)
    outputs = started.task.outputs(started.model, batch)
    distances = [dynabert.hidden_distance(states, batch.states) for _, states in outputs]
    assert distances[1] < 1e-9
    assert distances[0] > 1e-3


def test_the_teacher_stays_while_the_student_learns(digits, start):
    started = ready(distilled(start), digits)
    teacher = started.task.teacher.module
    before = {key: value.clone() for key, value in teacher.state_dict().items()}
    first = started.step.trained(first_batch(started)).detach()
    take_steps(started, 40)
    assert all(torch.equal(value, before[key]) for key, value in teacher.state_dict().items())
    assert started.step.trained(first_batch(started))[0] < first[0]
    assert not started.task.state_dict()  # neither saved nor averaged


def test_the_teacher_sees_the_mixed_images(digits, start):
    started = ready(distilled(start), digits)
    batch = first_batch(started)
    output, states = plain_start(start).run_with_hidden(1, batch.images)
    torch.testing.assert_close(batch.answer, output.logits.softmax(dim=-1))
    torch.testing.assert_close(batch.states, states)
    (raw,) = next(iter(started.data.train.steps(0, 1)))
    assert not torch.equal(batch.images, raw.images)


@pytest.mark.slow
def test_a_killed_and_resumed_run_equals_an_unbroken_one(digits, start, tmp_path, monkeypatch):
    wanted = distilled(start, run={"keep": 9})
    run(wanted, digits, tmp_path / "whole")
    run_until_killed(7, wanted, digits, tmp_path / "broken")
    teachers = []
    setup = DynaBERTDistillation.setup

    def remember(self, *arguments):
        setup(self, *arguments)
        teachers.append(self.teacher.module.model)

    monkeypatch.setattr(DynaBERTDistillation, "setup", remember)
    run(wanted, digits, tmp_path / "broken", resume=True)
    for key, value in plain_start(start).state_dict().items():
        assert torch.equal(teachers[0].state_dict()[key], value)
    whole, _ = assert_equal_runs(tmp_path / "whole", tmp_path / "broken", "model", "ema", "optimizer")
    assert whole.name == "step-000000012"
    assert len(evaluations(tmp_path / "whole")[-1]["top1"]) == 2
    assert isinstance(progresvit.load(tmp_path / "whole" / "model"), DynaBERT)


def test_the_compiler_sees_the_losses_as_a_whole(digits, start):
    started = ready(distilled(start), digits)
    compiled = torch.compile(started.step.trained, backend="eager", fullgraph=True, dynamic=False)
    batch = first_batch(started)
    torch.testing.assert_close(compiled(batch), started.step.trained(batch))


def test_a_run_without_a_teacher_is_refused(digits, start):
    with pytest.raises(ValueError, match=r"learns from a trained model of the full width; name it as model\.start"):
        ready(distilled(None), digits)
    wanted = distilled(start)
    narrow = wanted.model_copy(update={"model": wanted.model.model_copy(update={"start_as_prefix": True})})
    with pytest.raises(ValueError, match=r"a start of the full width; remove model\.start_as_prefix"):
        ready(narrow, digits)
    with pytest.raises(ValueError, match="trains models of the kind dynabert, not progresvit"):
        DynaBERTDistillation().setup(ready(recipe(), digits).model, None, distilled(start), None)
    model = progresvit.load(start)
    model.reset_classifier(5)
    progresvit.save(model, start)
    with pytest.raises(ValueError, match="does not know the classes of the data"):
        ready(distilled(start), digits)
