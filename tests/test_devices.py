"""Devices: the GPU is the default for models by name, and a device that is not there is one line with the remedy."""

import pytest
import torch
from PIL import Image

import progresvit
from progresvit.distributed import choose_device
from progresvit.engine import EmbeddingEngine, Engine
from progresvit.engine.backends import open_source
from tests.commands import refused

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


COMMANDS = {
    "classify": lambda model, data: ("classify", data, "--model", model, "--threshold", "0.5"),
    "embed": lambda model, data: ("embed", data, "--model", model, "--out", data / "a.parquet"),
    "serve": lambda model, data: ("serve", model, "--threshold", "0.5", "--port", "0"),
    "bench": lambda model, data: ("bench", model),
    "evaluate": lambda model, data: ("evaluate", model, "--data", data, "--out", data / "r.parquet"),
    "shift": lambda model, data: ("shift", model, "--data", data, "--suite", "imagenet-c", "--out", data / "s"),
    "analyze": lambda model, data: ("analyze", "similarity", model, "--data", data, "--out", data / "g.png"),
    "train": lambda model, data: ("train", "photos_tiny", "--data", data, "--out", data / "run"),
}


@needs_no_gpu
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_devices_that_are_not_there(name, folder, tmp_path):
    for split in ("train", "val"):
        (tmp_path / "data" / split / "a").mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(tmp_path / "data" / split / "a" / "b.png")
    words = COMMANDS[name](folder, tmp_path / "data")
    refused("there is no CUDA device here; use --device cpu", *words, "--device", "cuda")
    refused("unknown device 'tpu'; use cpu", *words, "--device", "tpu")
    refused("cpu", *words, "--device", "mps")
