"""Models by hub id, from a cache laid out as the hub's client lays it out, without a network."""

import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
import timm
import torch

import progresvit
from progresvit.interop import OFFICIAL_MODELS
from tests.engine.test_engine import a_setting
from tests.interop.authors import authors_state
from tests.model.test_saving import logits

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Puts files into the cache as if they had been downloaded; the network is off."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def publish(repo_id, *files):
        repo = tmp_path / "cache" / f"models--{repo_id.replace('/', '--')}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(COMMIT)
        (repo / "snapshots" / COMMIT).mkdir(parents=True)
        for file in files:
            shutil.copy(file, repo / "snapshots" / COMMIT)

    return publish


def test_a_model_comes_from_the_hub(small_model, images, tmp_path, hub):
    hub("someone/small", *progresvit.save(small_model, tmp_path / "model").iterdir())
    loaded = progresvit.load("someone/small")
    assert torch.equal(logits(loaded, images), logits(small_model, images))


def test_a_model_brings_its_settings_from_the_hub(small_model, tmp_path, hub):
    hub("someone/small", *progresvit.save(small_model, tmp_path / "model").iterdir())
    settings = tmp_path / "cache" / "models--someone--small" / "snapshots" / COMMIT / "settings"
    settings.mkdir()
    a_setting(small_model, threshold=1.25).save(settings / "near-lossless.json")
    assert progresvit.Engine("someone/small").policy.thresholds == (1.25,)


def test_timm_loads_the_same_model_from_the_hub(small_model, images, tmp_path, hub):
    hub("someone/small", *progresvit.save(small_model, tmp_path / "model").iterdir())
    loaded = timm.create_model("hf-hub:someone/small", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(loaded(images), small_model(images)[-1].logits)


@pytest.mark.parametrize("repo_id", OFFICIAL_MODELS)
def test_the_authors_hub_ids_are_converted(repo_id, tmp_path, hub):
    expected = OFFICIAL_MODELS[repo_id]
    state = authors_state(
        width=128,
        widths=[64, 128],
        depth=1,
        patch_size=16,
        grid=expected.stored_grid,
        classes=1000,
        layer_scale=expected.layer_scale is not None,
    )
    torch.save({"state_dict_ema": state}, tmp_path / "progresvit_of_the_authors.pth.tar")
    hub(repo_id, tmp_path / "progresvit_of_the_authors.pth.tar")
    config = progresvit.load(repo_id).config
    assert [round_.resolution for round_ in config.rounds] == [round_.resolution for round_ in expected.rounds]
    assert (config.layer_scale, config.crop) == (expected.layer_scale, 0.9)
    assert config.input_side == (240 if repo_id == "NCPS/progresvit-deit-s-192-240-imagenet1k" else 384)
    assert (config.class_ids[0], config.labels[0]) == ("n01440764", "tench, Tinca tinca")


def test_a_repository_with_a_pickle_alone_is_refused_with_the_command(small_model, tmp_path, hub):
    torch.save(small_model.state_dict(), tmp_path / "pytorch_model.bin")
    hub("someone/pickled", tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="progresvit import-official"):
        progresvit.load("someone/pickled")


def test_timms_cache_dir_is_used(small_model, images, tmp_path, hub, monkeypatch):
    hub("someone/small", *progresvit.save(small_model, tmp_path / "model").iterdir())
    cache = huggingface_hub.constants.HF_HUB_CACHE
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    loaded = timm.create_model("hf-hub:someone/small", pretrained=True, cache_dir=cache).eval()
    with torch.no_grad():
        assert torch.equal(loaded(images), small_model(images)[-1].logits)


def test_an_id_that_is_not_to_be_had_is_refused(hub):
    with pytest.raises(ValueError, match="give the path of a model folder"):
        progresvit.load("someone/nothing")


def test_push_uploads_the_model_folder(small_model, monkeypatch):
    uploaded = {}

    class Api:
        def __init__(self, **settings):
            uploaded["token"] = settings["token"]

        def create_repo(self, repo_id, private, exist_ok):
            return SimpleNamespace(repo_id=f"me/{repo_id}")

        def upload_folder(self, repo_id, folder_path, commit_message):
            uploaded.update(repo_id=repo_id, model=progresvit.load(folder_path))
            return SimpleNamespace(commit_url="https://hub/commit")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert progresvit.push_to_hub(small_model, "small", token="secret") == "https://hub/commit"
    assert (uploaded["repo_id"], uploaded["token"]) == ("me/small", "secret")
    assert uploaded["model"].config == small_model.config
