"""A model on disk: what comes back, what a crash leaves, what is refused."""

import json
import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file

import progresvit
from progresvit.config import make_rounds
from progresvit.io import weights
from progresvit.io.weights import weights_hash, write_safetensors
from progresvit.model import ProgResViT, saving
from tests.model.pooled import PooledConfig, PooledModel


def logits(model, images):
    """The logits of all rounds, one row per image."""
    with torch.no_grad():
        return torch.cat([output.logits for output in model.eval()(images)], dim=1)


def test_saved_and_loaded_model_gives_the_same_logits(small_model, images, tmp_path):
    folder = progresvit.save(small_model, tmp_path / "model")
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    loaded = progresvit.load(folder)
    assert not loaded.training
    assert loaded.config == small_model.config
    assert torch.equal(logits(loaded, images), logits(small_model, images))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": make_rounds([16, 24, 32], [1, 1, 2]), "layer_scale": 1e-6},
        {"psg": False, "num_classes": 0},
        {"in_channels": 1, "mean": (0.5,), "std": (0.5,), "position_resolution": 24},
        {"class_ids": tuple("abcdefghijkl"), "labels": tuple(f"größe {i}" for i in range(12))},
    ],
)
def test_every_kind_of_model_comes_back(small_config, randomize, tmp_path, changes):
    model = randomize(ProgResViT(small_config.replace(**changes)))
    loaded = progresvit.load(str(progresvit.save(model, tmp_path / "model")))
    images = torch.randn(2, model.config.in_channels, 32, 32)
    assert loaded.config == model.config
    assert torch.equal(logits(loaded, images), logits(model, images))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_disk_is_float32_in_memory(small_model, images, tmp_path, dtype):
    rounded = small_model.to(dtype)
    loaded = progresvit.load(progresvit.save(rounded, tmp_path / "model"))
    assert {value.dtype for value in load_file(tmp_path / "model" / "model.safetensors").values()} == {dtype}
    assert loaded.cls_token.dtype == torch.float32
    assert torch.equal(logits(loaded, images), logits(rounded.float(), images))


def test_a_loaded_model_owns_its_weights_and_has_drawn_no_random_numbers(small_model, tmp_path):
    folder = progresvit.save(small_model, tmp_path / "model")
    before = torch.get_rng_state()
    loaded = progresvit.load(folder)
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(loaded.cls_token, torch.nn.Parameter)
    assert loaded.cls_token.requires_grad
    file = folder / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))  # a map of the file would change with it
    assert weights_hash(loaded) == weights_hash(small_model)


class PooledWithTensors(PooledModel):
    """Holds tensors that no file of weights does."""

    def __init__(self, config, *, drop_path=0.0):
        super().__init__(config)
        self.register_buffer("fixed", torch.arange(3.0), persistent=False)
        self.plain = torch.arange(4.0)


@pytest.mark.parametrize("lacking", ["fixed", "plain"])
def test_tensors_that_are_in_no_file_are_those_of_a_new_model(monkeypatch, tmp_path, lacking):
    class Model(PooledWithTensors):
        def __init__(self, config, *, drop_path=0.0):
            super().__init__(config)
            delattr(self, "plain" if lacking == "fixed" else "fixed")

    monkeypatch.setattr("tests.model.pooled.PooledModel", Model)
    model = Model(PooledConfig(rounds=[{"resolution": 16, "grid": 2}], num_classes=3))
    loaded = progresvit.load(progresvit.save(model, tmp_path / "model"))
    assert torch.equal(getattr(loaded, lacking), getattr(model, lacking))
    assert torch.equal(loaded.head.weight, model.head.weight)


def test_saving_in_float16_rounds_the_weights_once(small_model, tmp_path):
    folder = progresvit.save(small_model, tmp_path / "half", dtype=torch.float16)
    assert {value.dtype for value in load_file(folder / "model.safetensors").values()} == {torch.float16}
    assert {value.dtype for value in small_model.state_dict().values()} == {torch.float32}
    rounded = progresvit.load(folder)
    assert torch.equal(rounded.head.weight, small_model.head.weight.half().float())
    assert weights_hash(rounded) != weights_hash(small_model)
    again = progresvit.save(rounded, tmp_path / "again", dtype=torch.float16)
    assert weights_hash(progresvit.load(again)) == weights_hash(rounded)


def test_what_does_not_fit_into_float16_is_refused_and_nothing_is_written(small_model, tmp_path):
    with torch.no_grad():
        small_model.head.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"head\.weight has numbers too large"):
        progresvit.save(small_model, tmp_path / "half", dtype=torch.float16)
    with pytest.raises(ValueError, match="floating-point"):
        progresvit.save(small_model, tmp_path / "half", dtype=torch.int8)
    assert not (tmp_path / "half").exists()


def test_config_json_names_classes_in_index_order(small_config, tmp_path):
    labels = tuple(f"label {index}" for index in range(12))
    ids = tuple(f"n{index:08}" for index in range(12))
    progresvit.save(ProgResViT(small_config.replace(class_ids=ids, labels=labels)), tmp_path / "model")
    stored = json.loads((tmp_path / "model" / "config.json").read_text())
    assert stored["class_ids"] == list(ids)
    assert stored["labels"] == list(labels)


def test_saving_again_replaces_the_model_and_keeps_other_files(small_config, small_model, images, tmp_path):
    folder = progresvit.save(ProgResViT(small_config), tmp_path / "model")
    (folder / "README.md").write_text("a card")
    (folder / "extra").mkdir()
    (folder / "extra" / "thresholds.json").write_text("{}")
    progresvit.save(small_model, folder)
    assert (folder / "README.md").read_text() == "a card"
    assert (folder / "extra" / "thresholds.json").read_text() == "{}"
    assert torch.equal(logits(progresvit.load(folder), images), logits(small_model, images))
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(("module", "step"), [(weights, "save_file"), (saving, "_keep_other_files")])
def test_a_crash_while_saving_leaves_the_old_model(
    small_config, small_model, images, tmp_path, monkeypatch, module, step
):
    old = ProgResViT(small_config)
    folder = progresvit.save(old, tmp_path / "model")

    def crash(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, step, crash)
    with pytest.raises(OSError, match="No space left"):
        progresvit.save(small_model, folder)
    assert torch.equal(logits(progresvit.load(folder), images), logits(old, images))
    assert os.listdir(tmp_path) == ["model"]


def test_what_safetensors_says_of_a_full_disk_is_an_os_error(small_model, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(OSError, match=r"could not be written: .*No space left"):
        progresvit.save(small_model, tmp_path / "model")


def test_save_refuses_to_overwrite_what_is_no_model(small_model, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="give a new folder"):
        progresvit.save(small_model, tmp_path)
    with pytest.raises(ValueError, match="give the name of a folder"):
        progresvit.save(small_model, tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_saved_files_are_as_readable_as_others(small_model, tmp_path):
    folder = progresvit.save(small_model, tmp_path / "model")
    (tmp_path / "usual").touch()
    usual = (tmp_path / "usual").stat().st_mode
    assert {path.stat().st_mode for path in folder.iterdir()} == {usual}


def test_a_log_that_is_open_in_the_folder_goes_on(small_model, tmp_path):
    folder = progresvit.save(small_model, tmp_path / "model")
    with (folder / "log.txt").open("w") as log:
        progresvit.save(small_model, folder)
        log.write("still here")
    assert (folder / "log.txt").read_text() == "still here"


def test_save_refuses_a_head_that_was_exchanged_by_hand(small_model, tmp_path):
    small_model.head = torch.nn.Linear(128, 5)
    with pytest.raises(ValueError, match="reset_classifier"):
        progresvit.save(small_model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_save_refuses_a_wrapped_model(small_model, tmp_path):
    with pytest.raises(ValueError, match="_orig_mod"):
        progresvit.save(torch.compile(small_model), tmp_path / "model")


@pytest.fixture
def folder(small_model, tmp_path):
    return progresvit.save(small_model, tmp_path / "model")


def test_weights_that_do_not_fit_are_named(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["norm.bias"]
    weights["neck.weight"] = torch.zeros(1)
    weights["head.weight"] = torch.zeros(7, 128)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="do not fit the config") as caught:
        progresvit.load(folder)
    for part in ("lack norm.bias", "unknown neck.weight", "head.weight (7, 128) instead of (12, 128)"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"dept": 2}, r"config\.json: dept: .*did you mean 'depth'"),
        ({"depth": None}, r"config\.json: depth: input should be a valid integer"),
        ({"depth": 3}, r"lack blocks\.2\..* more"),
        ({"num_classes": 1_000_000}, r"instead of \(1000000, 128\)"),  # refused without building it
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(folder, changes, remedy):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=remedy):
        progresvit.load(folder)


def integers(content):
    weights = load(content)
    return save({**weights, "cls_token": weights["cls_token"].long()})


@pytest.mark.parametrize(
    ("name", "damage", "remedy"),
    [
        ("config.json", lambda content: b"\xff\xfe\x00", "save the model again"),
        ("model.safetensors", lambda content: content[:0], "download it again"),
        ("model.safetensors", lambda content: content[:4], "download it again"),
        ("model.safetensors", lambda content: content[:1000], "download it again"),
        ("model.safetensors", lambda content: content[:-1], "download it again"),
        ("model.safetensors", integers, "no floating-point numbers for cls_token"),
    ],
)
def test_a_damaged_file_is_refused(folder, name, damage, remedy):
    (folder / name).write_bytes(damage((folder / name).read_bytes()))
    with pytest.raises(ValueError, match=remedy):
        progresvit.load(folder)


def test_a_folder_without_its_parts_is_refused(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no config\.json"):
        progresvit.load(tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        progresvit.load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "progresvit_192_240.pth.tar", "last.pt"])
def test_a_pickle_is_refused_with_the_command_that_converts_it(folder, small_model, name):
    torch.save(small_model.state_dict(), folder / name)
    remedy = f"progresvit import-official .*{name}"
    with pytest.raises(ValueError, match=remedy):
        progresvit.load(folder / name)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=remedy):
        progresvit.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=remedy):
        progresvit.load(folder)


def test_a_pickle_under_the_name_of_the_weights_is_refused(folder, small_model):
    torch.save(small_model.state_dict(), folder / "model.safetensors")
    with pytest.raises(ValueError, match="has another format"):
        progresvit.load(folder)


def test_a_path_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"give a folder that progresvit\.save wrote"):
        progresvit.load(tmp_path / "nowhere")
    for path in ("~nobody-here/model", "../nowhere", "./a/b"):
        with pytest.raises(ValueError, match="there is no model folder"):
            progresvit.load(path)
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(ValueError, match=r"is a file; give the folder"):
        progresvit.load(tmp_path / "notes.txt")


def test_the_hash_of_weights_is_that_of_what_they_compute(small_model, tmp_path):
    before = weights_hash(small_model)
    progresvit.save(small_model, tmp_path / "m")
    assert weights_hash(progresvit.load(tmp_path / "m")) == before
    with torch.no_grad():
        small_model.head.bias[0] += 1e-3
    assert weights_hash(small_model) != before


def test_tensors_that_share_memory_are_refused_with_the_remedy(tmp_path):
    shared = torch.zeros(3)
    with pytest.raises(ValueError, match="Store one of the tensors that share memory"):
        write_safetensors({"a": shared, "b": shared}, tmp_path / "task.safetensors")
