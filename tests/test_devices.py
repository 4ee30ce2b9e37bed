"""Devices: the GPU is the default for models by name, and a device that is not there is one line with the remedy."""

import pytest
import torch
import typer
from PIL import Image

import progresvit
from progresvit.cli import app
from progresvit.distributed import choose_device
from progresvit.engine import EmbeddingEngine, Engine
from progresvit.engine.backends import open_source
from tests.commands import run
from tests.evaluation.made_segmentation import make_model as make_segmenter

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture
def one_gpu(monkeypatch):
    """torch reports one CUDA device; nothing may run on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.fixture
def folder(small_model, tmp_path):
    return progresvit.save(small_model, tmp_path / "model")


def test_a_model_by_name_goes_to_the_gpu_and_a_given_one_stays(one_gpu, small_model, folder):
    assert open_source(folder).device(None).type == "cuda"
    assert open_source(folder).device("cpu").type == "cpu"
    assert open_source(small_model).device(None).type == "cpu"
    assert open_source(small_model).device("cuda:0") == torch.device("cuda", 0)


@needs_no_gpu
def test_a_model_by_name_stays_on_the_cpu_without_a_gpu(folder):
    assert open_source(folder).device(None).type == "cpu"


def test_an_index_beyond_the_gpus_is_refused(one_gpu):
    with pytest.raises(ValueError, match="there is no device cuda:1 here; there are 1, the first is cuda:0"):
        choose_device("cuda:1")


def test_the_description_of_an_engine_names_model_backend_device_precision_and_threshold(small_model, folder):
    assert repr(Engine(folder, 0.25, device="cpu")) == f"<Engine {folder}: torch on cpu, fp32, threshold 0.25>"
    assert repr(Engine(small_model, 0.5, precision="bf16")) == "<Engine ProgResViT: torch on cpu, bf16, threshold 0.5>"
    about = "<EmbeddingEngine ProgResViT: torch on cpu, fp32, round 2, pool class>"
    assert repr(EmbeddingEngine(small_model)) == about


def test_the_default_engine_names_its_model_and_setting():
    assert repr(Engine(device="cpu")).startswith("<Engine imagenet-tiny: torch on cpu, fp32, threshold 0.")
    assert repr(Engine(device="cpu")).endswith(" (near-lossless)>")


def data_of(command):
    """Analyses take a model, data and an output."""
    return lambda model, data: ("analyze", command, model, "--data", data, "--out", data / "g.png")


COMMANDS = {
    "classify": lambda model, data: ("classify", data, "--model", model, "--threshold", "0.5"),
    "segment": lambda model, data: ("segment", data, "--model", model, "--threshold", "1", "--out", data / "g"),
    "embed": lambda model, data: ("embed", data, "--model", model, "--out", data / "a.parquet"),
    "serve": lambda model, data: ("serve", model, "--threshold", "0.5", "--port", "0"),
    "bench": lambda model, data: ("bench", model),
    "evaluate": lambda model, data: ("evaluate", model, "--data", data, "--out", data / "r.parquet"),
    "shift": lambda model, data: ("shift", model, "--data", data, "--suite", "imagenet-c", "--out", data / "s"),
    "worth": lambda model, data: ("worth", data, "--out", data / "worth"),
    "train": lambda model, data: ("train", "photos_tiny", "--data", data, "--out", data / "run"),
    "analyze attention": lambda model, data: (
        "analyze", "attention", model, data / "val" / "a" / "b.png", "--out", data / "g.png"
    ),
}  # fmt: skip
"""Arguments of commands without ``--device``; analyses that are not here take those of :func:`data_of`."""


def commands_with_a_device(group=None, prefix=""):
    """Names of all commands that have the option."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands_with_a_device(command, f"{prefix}{name} ")
        elif any("--device" in option.opts for option in command.params):
            yield f"{prefix}{name}"


def test_there_are_commands_with_a_device():
    assert set(commands_with_a_device()) > set(COMMANDS)


@needs_no_gpu
@pytest.mark.parametrize("name", list(commands_with_a_device()))
def test_every_command_refuses_devices_that_are_not_there(name, small_model, randomize, tmp_path):
    model = make_segmenter(randomize) if name == "segment" else small_model
    folder = progresvit.save(model, tmp_path / "model")
    for split in ("train", "val"):
        (tmp_path / "data" / split / "a").mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(tmp_path / "data" / split / "a" / "b.png")
    words = (COMMANDS.get(name) or data_of(name.removeprefix("analyze ")))(folder, tmp_path / "data")
    for device in ("cuda", "cuda:7", "mps", "gpu", "tpu"):
        result = run(*words, "--device", device)
        assert result.exit_code == 2, result.output
        (line,) = result.stderr.splitlines()
        unknown, missing = f"error: unknown device '{device}'; use cpu", "use --device cpu"
        if device in ("cuda:7", "mps"):  # some commands take cpu and cuda alone
            assert line.startswith(unknown) or missing in line
        else:
            assert missing in line if device == "cuda" else line.startswith(unknown)
        assert line.startswith("error: ")
