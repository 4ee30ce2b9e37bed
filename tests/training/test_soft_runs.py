"""Runs with a teacher of more classes than the data has: of the wider head in training, the data's rows are kept."""

import json

import pytest
import torch
from safetensors.torch import load_file

import progresvit
from progresvit.distributed import Processes
from progresvit.training import loop
from progresvit.training.check_run import check_run_options
from progresvit.training.recipe import RunOptions
from progresvit.training.step import compile_blocks
from progresvit.training.tasks.supervised import Supervised
from progresvit.training.teachers import load_teacher, teacher_class_ids
from tests.factories import tiny_config
from tests.training.runs import ALONE, assert_equal_runs, losses, ready, recipe, run, run_until_killed

CLASSES = ("5", "3", "0", "9", "1", "2")  # the digits 0 to 3 are among them


def save_teacher(folder, **fields):
    torch.manual_seed(0)
    return str(progresvit.save(progresvit.ProgResViT(tiny_config(**fields)), folder))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("soft") / "teacher", num_classes=6, class_ids=CLASSES)


@pytest.fixture(scope="module")
def finished(digits, teacher, tmp_path_factory):
    """The folder of a whole run; no test may change it."""
    out = tmp_path_factory.mktemp("finished") / "out"
    run(soft(teacher), digits, out)
    return out


def soft(teacher, **changes):
    return recipe(
        distillation={"teacher": teacher, "kind": "soft", "classes": "teacher", "temperature": 2.0, **changes}
    )


@pytest.mark.slow
def test_the_model_keeps_the_rows_of_the_data(finished):
    model = progresvit.load(finished / "model")
    assert model.config.class_ids == ("0", "1", "2", "3")
    (newest,) = sorted((finished / "checkpoints").iterdir())[-1:]
    wide = load_file(newest / "ema.safetensors")
    assert wide["head.weight"].shape == (6, 128)
    assert torch.equal(model.head.weight, wide["head.weight"][[2, 4, 5, 1]])
    assert torch.equal(model.blocks[0].mlp.fc1.weight, wide["blocks.0.mlp.fc1.weight"])


@pytest.mark.slow
def test_what_is_logged_is_measured_with_the_model_that_is_saved(finished, digits, teacher):
    logged = json.loads((finished / "log.jsonl").read_text().splitlines()[-1])
    started = ready(soft(teacher), digits)
    again = started.task.validate(progresvit.load(finished / "model"), started.data, processes=ALONE, dtype=None)
    assert logged["top1"] == pytest.approx(again.values["top1"])
    assert again.primary == again.values["top1"][-1]
    assert again.values["images"] == 24


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one(finished, digits, teacher, tmp_path):
    run_until_killed(7, soft(teacher), digits, tmp_path)
    run(soft(teacher), digits, tmp_path, resume=True)
    assert_equal_runs(finished, tmp_path, "model")


def test_the_teacher_is_neither_trained_nor_averaged_nor_saved(digits, teacher):
    started = ready(soft(teacher), digits)
    assert started.task.state_dict() == {}
    (frozen,) = started.task.teachers
    assert started.step.ema.module.task.teachers[0] is frozen
    assert not any(parameter.requires_grad for parameter in frozen.module.parameters())


def test_classes_that_the_teacher_does_not_know_are_refused(digits, tmp_path):
    teacher = save_teacher(tmp_path / "teacher", num_classes=2, class_ids=("0", "7"))
    with pytest.raises(ValueError, match=r"does not know the classes 1, 2, 3.*distillation.classes=data"):
        run(soft(teacher), digits, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_teacher_that_does_not_name_its_classes_cannot_give_them(digits, tmp_path):
    teacher = save_teacher(tmp_path / "teacher", num_classes=6)
    with pytest.raises(ValueError, match="does not name its classes"):
        run(soft(teacher), digits, tmp_path / "out")


def test_recording_needs_one_gpu_without_gradient_checkpointing():
    gpu = Processes(rank=0, count=1, device=torch.device("cuda"))
    with pytest.raises(ValueError, match=r"^run\.cuda_graphs needs a GPU; set run\.cuda_graphs=false\.$"):
        check_run_options(recipe(run={"cuda_graphs": True}), Supervised(), ALONE)
    with pytest.raises(ValueError, match=r"works on one GPU .* and run\.grad_checkpointing=false"):
        check_run_options(recipe(run={"cuda_graphs": True, "grad_checkpointing": True}), Supervised(), gpu)


def test_a_bundled_model_can_teach():
    class_ids = teacher_class_ids("nettewoof-tiny")
    assert len(class_ids) == 20
    student = progresvit.preset("progresvit_tiny_160_224", num_classes=20, class_ids=class_ids)
    assert load_teacher("nettewoof-tiny", student).classes is None


@pytest.mark.slow
def test_blocks_compiled_alone_answer_as_before(small_model, images):
    before = [output.logits for output in small_model(images)]
    compile_blocks(small_model)
    for output, logits in zip(small_model(images), before):
        assert torch.allclose(output.logits, logits, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "ways", [{"compile": "blocks"}, {"cuda_graphs": True}, {"compile": "blocks", "cuda_graphs": True}]
)
def test_recorded_steps_learn_what_plain_ones_learn(digits, tmp_path, ways):
    gpu = Processes(rank=0, count=1, device=torch.device("cuda"))
    for name, options in (("plain", {}), ("quick", ways)):
        wanted = recipe(run={**RunOptions(log_every=1).model_dump(), **options}, model={"drop_path": 0.0})
        loop.train(wanted, data=str(digits), out=tmp_path / name, processes=gpu)
    plain, quick = ([loss for _, step, _ in losses(tmp_path / name) for loss in step] for name in ("plain", "quick"))
    assert quick == pytest.approx(plain, rel=1e-3)
