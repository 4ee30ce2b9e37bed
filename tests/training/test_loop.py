"""Whole runs: they learn, with every way of execution, and write what is needed to understand them."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

import progresvit
from progresvit.distributed import Processes
from progresvit.training import loop
from progresvit.training.logger import read_log
from tests.training.runs import assert_close_losses, evaluations, losses, ready, recipe, run


@pytest.mark.slow
def test_a_few_dozen_images_are_learned_by_heart_within_300_steps(digits, tmp_path):
    shutil.copytree(digits / "train", tmp_path / "data" / "train")
    shutil.copytree(digits / "train", tmp_path / "data" / "val")  # by heart: validation images are training images
    wanted = recipe(
        augment={"crop_scale": [1.0, 1.0], "crop_ratio": [1.0, 1.0], "colour": None, "erasing": 0.0, "flip": 0.0},
        mixing={"mixup": 0.0, "cutmix": 0.0, "smoothing": 0.0},
        schedule={"epochs": 40, "cooldown": 2, "warmup": 5},
        run={"log_every": 10, "evaluate_every": 42, "save_every": 42},
    )
    model = run(wanted, tmp_path / "data", tmp_path / "out")
    result = read_log(tmp_path / "out")[-1]
    assert result["event"] == "evaluation"
    assert result["step"] <= 300
    assert result["top1"][-1] > 0.9
    assert progresvit.load(model).config.class_ids == ("0", "1", "2", "3")


@pytest.fixture(scope="module")
def finished(digits, tmp_path_factory):
    """The folder of a whole run; no test may change it."""
    out = tmp_path_factory.mktemp("finished") / "out"
    run(recipe(), digits, out)
    return out


@pytest.mark.slow
def test_draws_for_images_and_for_the_step_are_unrelated(digits, tmp_path, monkeypatch):
    """Stochastic depth must not follow from how an image was cropped."""
    seeds = {"torch": [], "generator": []}
    manual_seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: (seeds["torch"].append(seed), manual_seed(seed))[1])

    class Spy(torch.Generator):
        def manual_seed(self, seed):
            seeds["generator"].append(seed)
            return super().manual_seed(seed)

    monkeypatch.setattr(torch, "Generator", Spy)
    run(recipe(), digits, tmp_path / "out")
    assert len(seeds["generator"]) >= 12
    assert len(seeds["torch"]) >= 12
    assert not set(seeds["torch"]) & set(seeds["generator"])


@pytest.mark.slow
def test_a_run_writes_what_is_needed_to_understand_it(digits, tmp_path, capsys):
    out = tmp_path / "out"
    run(recipe(), digits, out)
    about = json.loads((out / "run.json").read_text())
    assert about["torch"] == torch.__version__
    assert {"git", "command", "python", "timm", "device", "processes", "data"} <= set(about)
    assert (out / "recipe.yaml").read_text() == recipe().to_yaml()
    run(recipe(), digits, out, resume=True)
    resumed = json.loads((out / "run.json").read_text())
    assert (resumed["git"], len(resumed["resumed"])) == (about["git"], 1)
    assert list((out / "tensorboard").iterdir())
    evaluation = evaluations(out)[-1]
    assert len(evaluation["top1"]) == 2
    assert evaluation["near_lossless"]["gmacs"] <= evaluation["full_gmacs"]
    assert evaluation["convention"] == "paper"
    shown = capsys.readouterr().err
    assert "images/s" in shown
    assert shown.strip().splitlines()[-1] == f"next: progresvit evaluate {out / 'model'}"


@pytest.mark.slow
def test_fine_tuning_starts_from_a_model_folder(finished, digits, tmp_path):
    first = finished / "model"
    schedule = {"epochs": 1, "cooldown": 0, "warmup": 0, "min_lr": 0.0}
    wanted = recipe(model={"start": str(first)}, schedule=schedule, optimizer={"lr": 1e-12})
    second = run(wanted, digits, tmp_path / "second")  # at a rate near zero the weights stay
    left, right = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert all(torch.allclose(left[key], right[key], atol=1e-6) for key in left)


def test_one_class_is_refused(digits, tmp_path):
    for split in ("train", "val"):
        shutil.copytree(digits / split / "0", tmp_path / "data" / split / "0")
    with pytest.raises(ValueError, match="only one class, 0"):
        run(recipe(), tmp_path / "data", tmp_path / "out")


@pytest.mark.parametrize(
    ("sections", "remedy"),
    [
        ({"model": {"num_classes": 3}}, r"4 classes and the head 3; set model\.num_classes=4"),
        ({"optimizer": {"batch": 64}}, "larger than the dataset of 48"),
        ({"run": {"precision": "fp16"}}, r"run\.precision=bf16"),
        ({"run": {"precision": "tf32"}}, r"compute capability 8\.0 .*set run\.precision=fp32"),
    ],
)
def test_a_recipe_that_the_data_or_a_cpu_does_not_fit_is_refused(digits, tmp_path, sections, remedy):
    with pytest.raises(ValueError, match=remedy):
        run(recipe(**sections), digits, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"grad_checkpointing": True}])
def test_other_ways_of_execution_learn_the_same_thing(finished, digits, tmp_path, options):
    run(recipe(run=options), digits, tmp_path)
    assert_close_losses(tmp_path, finished, 0.03)


@pytest.mark.long
def test_a_compiled_run_learns_the_same_thing(digits, tmp_path):
    """At the full rate from the first step, so that losses and weights follow from the gradients of both rounds."""
    torch.compiler.reset()
    short = {"schedule": {"epochs": 1, "cooldown": 0, "warmup": 0}, "model": {"depth": 1, "drop_path": 0.0}}
    models = [
        run(recipe(**short), digits, tmp_path / "plain"),
        run(recipe(**short, run={"compile": True, "log_every": 1}), digits, tmp_path / "compiled"),
    ]
    assert_close_losses(tmp_path / "compiled", tmp_path / "plain", 1e-3)
    weights = [load_file(folder / "model.safetensors")["projectors.0.widen_class.weight"] for folder in models]
    assert torch.allclose(*weights, atol=1e-4)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_loss_scaler_skips_what_overflows_and_stops_at_a_loss_that_is_not_finite(digits, clip):
    """The path of fp16, with bfloat16 in its place, so that a CPU can take it."""
    started = ready(recipe(run={"precision": "bf16"}, optimizer={"clip": clip}), digits)
    step, weight = started.step, started.model.blocks[0].mlp.fc1.weight
    step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)  # overflows at first
    before = weight.detach().clone()
    first, second, third = started.data.train.steps(0, 3)
    step(0, first)
    assert torch.equal(weight, before)
    assert not step.broken
    step.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step(1, second)
    after = weight.detach().clone()
    assert not torch.equal(after, before)
    step.broken += 1
    step(2, third)
    assert torch.equal(weight, after)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_a_run_ends_with_finite_losses_in_every_precision_on_a_gpu(digits, tmp_path, precision):
    gpu = Processes(rank=0, count=1, device=torch.device("cuda", 0))
    wanted = recipe(run={"precision": precision, "log_every": 1})
    loop.train(wanted, data=str(digits), out=tmp_path / "out", processes=gpu)
    assert all(math.isfinite(loss) for _, rounds, _ in losses(tmp_path / "out") for loss in rounds)
