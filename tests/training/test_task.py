"""The seam: what a task adds is trained, averaged, checked, saved and resumed like the model."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import progresvit
from progresvit.cli import app
from progresvit.io import files
from progresvit.model import RoundOutput
from progresvit.training.recipe import load_recipe
from progresvit.training.state import TrainState, checkpoints, save_model
from progresvit.training.step import TrainingStep, compile_blocks
from progresvit.training.tasks.distillation import Distillation
from progresvit.training.tasks.registry import make_task, task_name
from progresvit.training.tasks.supervised import Supervised
from progresvit.training.tasks.task import Task
from tests.training import toy_tasks
from tests.training.runs import (
    ALONE,
    assert_resumes_to_the_bit,
    evaluations,
    losses,
    ready,
    recipe,
    run,
    take_steps,
)
from tests.training.toy_tasks import Colour, ColourOptions, Crops, OneRound, Scored

COLOUR = "tests.training.toy_tasks:Colour"


def same(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[key], right[key]) for key in left)


@pytest.fixture(scope="module")
def coloured(digits, tmp_path_factory):
    """The folder of a whole run of this task; no test may change it."""
    out = tmp_path_factory.mktemp("coloured") / "out"
    run(recipe(task=COLOUR), digits, out)
    return out


@pytest.mark.slow
def test_an_extra_head_trains_and_is_averaged_and_saved_with_the_model(coloured):
    newest = checkpoints(coloured / "checkpoints")[-1]
    first, last, average = (
        load_file(path)
        for path in (
            checkpoints(coloured / "checkpoints")[0] / "task.safetensors",
            newest / "task.safetensors",
            newest / "task_ema.safetensors",
        )
    )
    heads = {f"{part}.{number}" for part in ("heads", "follower") for number in (0, 1)}
    assert set(last) == {*(f"{head}.{kind}" for head in heads for kind in ("weight", "bias")), "center", "steps"}
    assert last["steps"] == 12
    for key in ("heads.1.weight", "follower.1.weight", "center"):
        assert not torch.equal(first[key], last[key])
        assert not torch.equal(average[key], last[key])
    assert same(load_file(coloured / "model" / "task.safetensors"), average)  # beside the model it was trained with
    assert (coloured / "best" / "task.safetensors").is_file()
    assert progresvit.load(coloured / "model").config.num_classes == 4
    optimizer = load_file(newest / "optimizer.safetensors")
    model = load_file(newest / "model.safetensors")
    assert sum(key.endswith("/exp_avg") for key in optimizer) == len(model) + 4  # the heads, and not their follower


def test_a_crash_while_saving_keeps_model_and_head_of_one_evaluation(digits, tmp_path, monkeypatch):
    started = ready(recipe(task=COLOUR), digits).step
    save_model(*started.average(), tmp_path / "best")
    before = {path.name: path.read_bytes() for path in (tmp_path / "best").iterdir()}
    with torch.no_grad():
        for parameter in started.ema.module.parameters():
            parameter.add_(1)
    monkeypatch.setattr(files, "_put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_model(*started.average(), tmp_path / "best")
    assert {path.name: path.read_bytes() for path in (tmp_path / "best").iterdir()} == before
    monkeypatch.undo()
    save_model(*started.average(), tmp_path / "best")
    after = {path.name: path.read_bytes() for path in (tmp_path / "best").iterdir()}
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in ("model.safetensors", "task.safetensors"))


def test_the_extra_loss_reaches_its_head_and_the_model(digits):
    started = ready(recipe(), digits, Colour())
    before = {key: value.clone() for key, value in started.step.trained.state_dict().items()}
    take_steps(started, 1)
    assert started.task.heads[0].weight.grad.abs().sum() > 0
    moved = {key for key, value in started.step.trained.state_dict().items() if not torch.equal(value, before[key])}
    assert {"task.heads.0.weight", "task.heads.1.bias", "task.center", "model.blocks.0.mlp.fc1.weight"} <= moved


@pytest.mark.slow
def test_a_killed_and_resumed_run_equals_an_unbroken_one_with_head_average_and_buffer(digits, tmp_path):
    wanted = recipe(task=COLOUR, optimizer={"freeze_epochs": {"task.heads.0.*": 2}}, run={"keep": 9})
    files = ("model", "ema", "task", "task_ema", "optimizer")
    assert assert_resumes_to_the_bit(wanted, digits, tmp_path, *files).name == "step-000000012"
    assert same(*(load_file(tmp_path / name / "model" / "task.safetensors") for name in ("whole", "broken")))


@pytest.mark.slow
def test_a_checkpoint_without_the_tasks_state_is_damaged(coloured, digits, tmp_path, capsys):
    out = shutil.copytree(coloured, tmp_path / "out")
    newest = checkpoints(out / "checkpoints")[-1]
    (newest / "task_ema.safetensors").unlink()
    run(recipe(task=COLOUR), digits, out, resume=True)
    assert f"{newest} is damaged and skipped" in capsys.readouterr().err
    assert losses(out) == losses(coloured)


def test_parameters_of_the_task_can_be_frozen_by_name(digits):
    started = ready(recipe(optimizer={"freeze": ["task.heads.*"]}), digits, Colour())
    before = started.task.heads[0].weight.clone()
    take_steps(started, 2)
    assert torch.equal(started.task.heads[0].weight, before)


def test_a_recipe_names_a_task_of_your_own(digits, tmp_path, monkeypatch):
    """A module in the working directory, its options in the recipe, run by the command."""
    shutil.copy(toy_tasks.__file__, tmp_path / "my_tasks.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    values = {**yaml.safe_load(recipe().to_yaml()), "task": "my_tasks:Colour", "task_options": {"weight": 0.25}}
    Path("recipe.yaml").write_text(yaml.safe_dump(values))
    command = ["train", "recipe.yaml", "--data", str(digits), "--out", "run", "--device", "cpu"]
    result = CliRunner().invoke(app, [*command, "--set", "schedule.epochs=1", "--set", "schedule.cooldown=0"])
    assert result.exit_code == 0, (result.output, result.exception)
    stored = yaml.safe_load(Path("run/recipe.yaml").read_text())
    assert (stored["task"], stored["task_options"]) == ("my_tasks:Colour", {"weight": 0.25})
    assert Path("run/model/task.safetensors").is_file()


@pytest.mark.slow
def test_train_takes_a_task_or_its_class_and_the_folder_names_it(digits, tmp_path):
    run(recipe(), digits, tmp_path / "instance", task=Colour(ColourOptions(weight=0.25)))
    run(recipe(task_options={"weight": 0.25}), digits, tmp_path / "class", task=Colour)
    run(recipe(task=COLOUR, task_options={"weight": 0.25}), digits, tmp_path / "recipe")
    folders = [tmp_path / name for name in ("instance", "class", "recipe")]
    assert losses(folders[0]) == losses(folders[1]) == losses(folders[2])
    assert all(yaml.safe_load((folder / "recipe.yaml").read_text())["task"] == COLOUR for folder in folders)
    run(recipe(), digits, folders[0], resume=True, task=Colour(ColourOptions(weight=0.25)))
    with pytest.raises(ValueError, match=r"another recipe \(.*task_options\.weight"):
        run(recipe(), digits, folders[0], resume=True, task=Colour(ColourOptions(weight=0.5)))
    with pytest.raises(ValueError, match=r"another recipe \(task"):
        run(recipe(), digits, folders[0], resume=True)


@pytest.mark.slow
def test_a_batch_may_be_a_list_of_crops_of_two_sizes(digits, tmp_path):
    run(recipe(mixing={"mixup": 0.0, "cutmix": 0.0, "smoothing": 0.0}), digits, tmp_path, task=Crops)
    assert len(losses(tmp_path)) == 12
    assert all(len(rounds) == 2 for _, rounds, _ in losses(tmp_path))


@pytest.mark.slow
def test_a_task_may_run_some_of_the_rounds(digits, tmp_path):
    run(recipe(), digits, tmp_path, task=OneRound)
    assert all(len(rounds) == 1 for _, rounds, _ in losses(tmp_path))
    assert len(evaluations(tmp_path)[-1]["top1"]) == 2  # all rounds are validated


@pytest.mark.slow
def test_the_primary_metric_selects_the_best_model(digits, tmp_path, capsys):
    run(recipe(run={"keep": 9}), digits, tmp_path, task=Scored)
    saved = {path.name: load_file(path / "ema.safetensors") for path in checkpoints(tmp_path / "checkpoints")}
    assert same(load_file(tmp_path / "best" / "model.safetensors"), saved["step-000000006"])
    progress = json.loads((checkpoints(tmp_path / "checkpoints")[-1] / "progress.json").read_text())["progress"]
    assert (progress["best"], progress["best_step"]) == (-1.0, 6)
    assert [entry["score"] for entry in progress["history"]] == [0.5, 1.0, 1.5]
    assert [line["score"] for line in evaluations(tmp_path)] == [0.5, 1.0, 1.5, 2.0]
    assert "epoch 2: score 1.0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_checkpoint_from_before_tasks_knows_its_best(digits, tmp_path):
    assert TrainState.from_dict({"step": 3, "best_top1": 0.5, "best_step": 3}).best == 0.5
    assert TrainState.from_dict({"step": 3, "best_top1": -1.0, "best_step": -1}).best is None
    run(recipe(), digits, tmp_path)
    whole = losses(tmp_path)
    shutil.rmtree(checkpoints(tmp_path / "checkpoints")[-1])
    path = checkpoints(tmp_path / "checkpoints")[-1] / "progress.json"
    stored = json.loads(path.read_text())
    stored["progress"]["best_top1"] = stored["progress"].pop("best")
    path.write_text(json.dumps(stored))
    older = [line for line in (tmp_path / "recipe.yaml").read_text().splitlines() if not line.startswith("task")]
    (tmp_path / "recipe.yaml").write_text("\n".join(older))
    run(recipe(), digits, tmp_path, resume=True)
    assert losses(tmp_path) == whole


def test_the_task_of_an_older_recipe_follows_from_its_sections():
    assert load_recipe("photos_tiny").task == "supervised"
    assert load_recipe("photos_tiny_kd").task == "distillation"
    assert load_recipe("photos_tiny_kd", ["distillation=null"]).task == "supervised"
    _, task = make_task(load_recipe("photos_tiny_soft"))
    assert isinstance(task, Distillation)
    assert (task.soft, task.options.map_weight) == (True, 0.5)
    assert task_name(Distillation) == "distillation"


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"task": "supervized"}, "task: unknown task 'supervized'; did you mean 'supervised'"),
        ({"task": "mae"}, "choose one of supervised, distillation, subnetworks.* my_module:MyTask"),
        ({"task": "no_such_module:MyTask"}, r"cannot be imported \(No module named.*PYTHONPATH"),
        ({"task": "tests.training.toy_tasks:Color"}, "has no Task class 'Color'; did you mean 'Colour'"),
        ({"task": "tests.training.toy_tasks:not_a_task"}, "has no Task class 'not_a_task'"),
        ({"task": COLOUR, "task_options": {"wieght": 1}}, "task_options: wieght: unknown key; did you mean 'weight'"),
        ({"task_options": {"weight": 1}}, "task_options: weight: unknown key"),
        (
            {"task": "supervised", "distillation": {"teacher": "x"}},
            "distillation: the task supervised does not read this section; set task: distillation, or remove it",
        ),
        ({"task": "distillation"}, "needs options; add the section distillation:"),
        ({"distillation": {"teacher": "x"}, "task_options": {"a": 1}}, "task_options: the task distillation"),
        ({"task": "tests.training.test_task:Own"}, "mixing: the task .*Own does not read .*supervised or distillation"),
    ],
)
def test_a_wrong_task_or_a_section_of_another_is_refused(digits, tmp_path, changes, remedy):
    with pytest.raises(ValueError, match=remedy):
        run(recipe(**changes), digits, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Own(Task):
    """From scratch: it has no use for mixup."""

    def find_splits(self, recipe, source):
        raise AssertionError("never reached")

    load_data = losses = validate = find_splits


class Small(nn.Module):
    """A model of another kind, with what ``RoundModel`` asks for and nothing else."""

    def __init__(self, config):
        super().__init__()
        self.config, self.layer = config, nn.Linear(3, config.num_classes)

    def run_round(self, s, images, previous=None):
        tokens = images.mean(dim=(2, 3))[:, None]
        return RoundOutput(self.layer(tokens[:, 0]) * (s + 1), tokens)

    def forward(self, images):
        return tuple(self.run_round(s, images) for s in range(len(self.config.rounds)))

    def gmacs(self, convention="paper"):
        return [1e-9, 2e-9]


def test_a_model_of_another_kind_trains_and_what_it_lacks_is_named(digits):
    started = ready(recipe(), digits)
    model = Small(started.model.config)
    step = TrainingStep(model, started.task, started.recipe, ALONE, steps_per_epoch=3)
    before = model.layer.weight.detach().clone()
    for number, batches in enumerate(started.data.train.steps(0, 2)):
        step(number, batches)
    assert not torch.equal(model.layer.weight, before)
    metrics = started.task.validate(model, started.data, processes=ALONE, dtype=None)
    assert metrics.values["full_gmacs"] == 2e-9
    assert "near-lossless" in started.task.summarize(metrics.values)
    model.config = SimpleNamespace(rounds=model.config.rounds, routable=False)  # rounds that are alternatives
    metrics = started.task.validate(model, started.data, processes=ALONE, dtype=None)
    assert "near_lossless" not in metrics.values
    assert started.task.summarize(metrics.values).startswith("top-1 of the rounds")
    with pytest.raises(ValueError, match=r"needs a model with 'blocks', which Small lacks; set run\.compile=true"):
        compile_blocks(model)
    with pytest.raises(ValueError, match=r"grad_checkpointing needs a model with .* set run\.grad_checkpointing=false"):
        TrainingStep(model, Supervised(), recipe(run={"grad_checkpointing": True}), ALONE, steps_per_epoch=3)


def test_another_number_of_losses_in_a_later_step_is_refused(digits):
    started = ready(recipe(), digits)
    take_steps(started, 1)
    with pytest.raises(ValueError, match="returned 1 losses after 2; return one for each round"):
        started.step._update(1, torch.ones(1))
