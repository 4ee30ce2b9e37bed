"""Runs with a teacher of more classes than the data has: a wider head in training, the data's rows of it kept."""

import json

import pytest
import torch
from safetensors.torch import load_file

import progresvit
from progresvit.config import ModelConfig, make_rounds
from progresvit.distributed import Processes
from progresvit.training import build, loop
from progresvit.training.recipe import Run
from progresvit.training.step import TrainingStep, _check_recording, compile_blocks
from progresvit.training.supervised import Supervised
from progresvit.training.teachers import load_teacher, teacher_class_ids
from tests.training.runs import ALONE, losses, recipe, run

CLASSES = ("5", "3", "0", "9", "1", "2")  # those of the digits, 0 to 3, are among them


@pytest.fixture
def teacher(tmp_path):
    torch.manual_seed(0)
    config = ModelConfig(
        rounds=make_rounds([16, 32], [1, 2]), heads=2, depth=1, patch_size=8, num_classes=6, class_ids=CLASSES
    )
    return str(progresvit.save(progresvit.ProgResViT(config), tmp_path / "teacher"))


def soft(teacher, **changes):
    return recipe(
        distillation={"teacher": teacher, "kind": "soft", "classes": "teacher", "temperature": 2.0, **changes}
    )


def test_the_model_keeps_the_rows_of_the_data(digits, teacher, tmp_path):
    folder = run(soft(teacher), digits, tmp_path / "out")
    model = progresvit.load(folder)
    assert model.config.class_ids == ("0", "1", "2", "3")
    (newest,) = sorted((tmp_path / "out" / "checkpoints").iterdir())[-1:]
    wide = load_file(newest / "ema.safetensors")
    assert wide["head.weight"].shape == (6, 128)
    assert torch.equal(model.head.weight, wide["head.weight"][[2, 4, 5, 1]])
    assert torch.equal(model.blocks[0].mlp.fc1.weight, wide["blocks.0.mlp.fc1.weight"])


@pytest.mark.slow
def test_what_is_told_while_training_is_of_the_model_that_is_kept(digits, teacher, tmp_path):
    folder = run(soft(teacher), digits, tmp_path / "out")
    told = json.loads((tmp_path / "out" / "log.jsonl").read_text().splitlines()[-1])
    pictures, held_out = build.find_splits(soft(teacher), str(digits))
    fed = build.feed(soft(teacher), pictures, held_out, progresvit.load(folder), ALONE)
    again = loop.validate(progresvit.load(folder), fed.val(), processes=ALONE, dtype=None)
    assert told["top1"] == pytest.approx(again["top1"])
    assert again["images"] == len(held_out)


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one(digits, teacher, tmp_path, monkeypatch):
    wanted = soft(teacher)
    run(wanted, digits, tmp_path / "whole")

    class KilledError(Exception):
        pass

    count, step = iter(range(100)), TrainingStep.__call__

    def dies_in_step_eight(self, *arguments):
        if next(count) == 7:
            raise KilledError
        step(self, *arguments)

    monkeypatch.setattr(TrainingStep, "__call__", dies_in_step_eight)
    with pytest.raises(KilledError):
        run(wanted, digits, tmp_path / "broken")
    monkeypatch.setattr(TrainingStep, "__call__", step)
    run(wanted, digits, tmp_path / "broken", resume=True)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")


def test_classes_that_the_teacher_does_not_know_are_refused(digits, tmp_path):
    config = ModelConfig(
        rounds=make_rounds([16, 32], [1, 2]), heads=2, depth=1, patch_size=8, num_classes=2, class_ids=("0", "7")
    )
    teacher = str(progresvit.save(progresvit.ProgResViT(config), tmp_path / "teacher"))
    with pytest.raises(ValueError, match=r"does not know the classes 1, 2, 3.*distillation.classes=data"):
        run(soft(teacher), digits, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_teacher_that_does_not_name_its_classes_cannot_give_them(digits, tmp_path):
    config = ModelConfig(rounds=make_rounds([16, 32], [1, 2]), heads=2, depth=1, patch_size=8, num_classes=6)
    teacher = str(progresvit.save(progresvit.ProgResViT(config), tmp_path / "teacher"))
    with pytest.raises(ValueError, match="does not name its classes"):
        run(soft(teacher), digits, tmp_path / "out")


def test_recording_needs_one_gpu():
    model = progresvit.ProgResViT(soft("x").model.config(num_classes=6, class_ids=None, labels=None))
    with pytest.raises(ValueError, match="works on one GPU"):
        TrainingStep(model, Supervised(), recipe(run={"cuda_graphs": True}), ALONE)


def test_recording_does_not_go_with_gradient_checkpointing():
    gpu = Processes(rank=0, count=1, device=torch.device("cuda"))
    with pytest.raises(ValueError, match=r"without run\.grad_checkpointing"):
        _check_recording(recipe(run={"cuda_graphs": True, "grad_checkpointing": True}), gpu)


def test_the_model_that_ships_can_teach():
    assert len(teacher_class_ids("shipped")) == 20
    student = progresvit.preset("progresvit_tiny_160_224", num_classes=20, class_ids=teacher_class_ids("shipped"))
    assert load_teacher("shipped", student).classes is None


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
        wanted = recipe(run={**Run(log_every=1).model_dump(), **options}, model={"drop_path": 0.0})
        loop.train(wanted, data=str(digits), out=tmp_path / name, processes=gpu)
    plain, quick = ([loss for _, step, _ in losses(tmp_path / name) for loss in step] for name in ("plain", "quick"))
    assert quick == pytest.approx(plain, rel=1e-3)
