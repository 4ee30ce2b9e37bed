"""Models by hub id, from a cache laid out as the hub's client lays it out, without a network."""

import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
import timm
import torch

import progresvit
from progresvit.baselines.thinkingvit import ThinkingViT
from progresvit.interop import OFFICIAL_MODELS
from progresvit.model.card import CARD_NAME, GENERATED, make_card
from progresvit.routing.metric import OperatingPoint
from progresvit.routing.settings import Budgets
from tests.commands import works
from tests.factories import setting_of
from tests.interop.authors import authors_state
from tests.interop.test_projects import publish
from tests.model.test_saving import logits

TABLE = ((0.0, 2.0), (0.5, 1.5), (2.0, 1.0))  # thresholds and their GMACs
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
    setting_of(small_model, threshold=1.25).save(settings / "near-lossless.json")
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


def test_an_authors_id_may_hold_a_folder_of_timm(tmp_path, hub):
    state = authors_state(width=128, widths=[64, 128], depth=1, patch_size=16, grid=15, classes=9)
    arguments = {"progress_stages": [1, 2], "progress_img_sizes": [192, 240], "img_size": 240}
    repo_id = "NCPS/progresvit-deit-s-192-240-imagenet1k"
    hub(repo_id, *publish(tmp_path / "hub", state, **arguments).iterdir())
    assert [round_.resolution for round_ in progresvit.load(repo_id).config.rounds] == [192, 240]


@pytest.mark.parametrize("safe", [True, False])
def test_a_repository_of_timm_is_a_model_of_one_round(safe, images, tmp_path, hub):
    changes = {"depth": 1, "img_size": 32}
    module = timm.create_model("vit_tiny_patch16_224", **changes).eval()
    timm.models.save_for_hf(module, tmp_path / "vit", model_args=changes, safe_serialization=safe)
    hub("someone/vit", *(tmp_path / "vit").iterdir())
    model = progresvit.load("someone/vit")
    with torch.no_grad():
        torch.testing.assert_close(model(images)[0].logits, module(images), atol=1e-4, rtol=0)


def test_a_repository_of_the_authors_that_timm_saved_loads_through_timm(tmp_path, hub):
    state = authors_state(width=128, widths=[64, 128], depth=1, patch_size=16, grid=15, classes=9)
    arguments = {"progress_stages": [1, 2], "progress_img_sizes": [192, 240], "img_size": 240}
    hub("someone/progressive", *publish(tmp_path / "hub", state, **arguments).iterdir())
    loaded = timm.create_model("hf-hub:someone/progressive", pretrained=True)
    assert torch.equal(loaded.head.weight, state["head.weight"])
    assert [round_.resolution for round_ in progresvit.load("someone/progressive").config.rounds] == [192, 240]


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


@pytest.fixture
def remote(tmp_path, hub, monkeypatch):
    """A hub that is a folder: what is uploaded lies in the cache as if it had been downloaded."""
    calls = []
    snapshots = tmp_path / "cache"

    def folder_of(repo_id):
        return snapshots / f"models--{repo_id.replace('/', '--')}" / "snapshots" / COMMIT

    class Api:
        def __init__(self, *, token, library_name):
            calls.append(token)

        def create_repo(self, repo_id, private, exist_ok):
            repo_id = repo_id if "/" in repo_id else f"me/{repo_id}"
            if not folder_of(repo_id).exists():
                hub(repo_id)
            return SimpleNamespace(repo_id=repo_id)

        def file_exists(self, repo_id, filename):
            return (folder_of(repo_id) / filename).exists()

        def upload_folder(self, repo_id, folder_path, commit_message):
            shutil.copytree(folder_path, folder_of(repo_id), dirs_exist_ok=True)
            calls.append(commit_message)
            return SimpleNamespace(commit_url="https://hub/commit")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return SimpleNamespace(calls=calls, folder=folder_of)


def test_push_uploads_a_model_in_memory_with_a_short_card(small_model, images, remote):
    assert progresvit.push_to_hub(small_model, "small", token="secret") == "https://hub/commit"
    assert remote.calls == ["secret", "Upload ProgResViT model"]
    assert torch.equal(logits(progresvit.load("me/small"), images), logits(small_model, images))
    card = (remote.folder("me/small") / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: progresvit\npipeline_tag: image-classification\n---\n# small\n")
    assert 'progresvit.Engine("me/small")' in card


def test_push_uploads_card_settings_and_budgets_and_the_engine_reads_them_back(small_model, images, tmp_path, remote):
    folder = saved_with_settings(small_model, tmp_path)
    (folder / "README.md").write_text("# A card by hand\n")
    (folder / "notes.txt").write_text("not for the hub")
    progresvit.push_to_hub(folder, "me/small")
    names = {path.relative_to(remote.folder("me/small")).as_posix() for path in remote.folder("me/small").rglob("*.*")}
    assert names == {"config.json", "model.safetensors", "README.md", "budgets.json", "settings/near-lossless.json"}
    assert (remote.folder("me/small") / "README.md").read_text() == "# A card by hand\n"
    assert progresvit.Engine("me/small").policy.thresholds == (1.25,)
    assert progresvit.Engine("me/small", budget_gmacs=1.5).policy.thresholds == (0.5,)
    loaded = progresvit.ProgResViT.from_pretrained("me/small")
    assert torch.equal(logits(loaded, images), logits(small_model, images))


def test_a_generated_card_names_the_settings_and_one_on_the_hub_is_kept(small_model, tmp_path, remote):
    folder = saved_with_settings(small_model, tmp_path)
    progresvit.push_to_hub(folder, "me/small")
    card = remote.folder("me/small") / "README.md"
    assert "Calibrated settings: near-lossless." in card.read_text()
    card.write_text("edited on the hub")
    progresvit.push_to_hub(folder, "me/small")
    assert card.read_text() == "edited on the hub"


def test_a_card_of_a_training_names_the_repository_and_replaces_no_other_card(small_model, tmp_path, remote):
    folder = saved_with_settings(small_model, tmp_path)
    (folder / "README.md").write_text(make_card(small_model, CARD_NAME, about=[f"{GENERATED}`0`"]))
    progresvit.push_to_hub(folder, "me/small")
    card = remote.folder("me/small") / "README.md"
    assert 'progresvit.load("me/small")' in card.read_text()
    card.write_text("edited on the hub")
    progresvit.push_to_hub(folder, "me/small")
    assert card.read_text() == "edited on the hub"


def test_settings_of_other_weights_are_not_uploaded(small_model, tmp_path, remote):
    folder = saved_with_settings(small_model, tmp_path, weights_sha256="0" * 64)
    for name in ("budgets.json", "settings/near-lossless.json"):
        with pytest.raises(ValueError, match=f"{name} was not calibrated with the weights of this model"):
            progresvit.push_to_hub(folder, "me/small")
        (folder / name).unlink()
    assert not remote.calls


def test_a_model_of_another_class_is_refused_by_from_pretrained(small_model, tmp_path):
    folder = progresvit.save(small_model, tmp_path / "model")
    with pytest.raises(ValueError, match=r"is a ProgResViT, not a ThinkingViT; use progresvit\.load"):
        ThinkingViT.from_pretrained(folder)


def saved_with_settings(model, tmp_path, **changes):
    folder = progresvit.save(model, tmp_path / "model")
    (folder / "settings").mkdir()
    setting = setting_of(model, threshold=1.25, **changes)
    setting.save(folder / "settings" / "near-lossless.json")
    known = {
        "weights_sha256": setting.weights_sha256,
        "preprocessing_sha256": setting.preprocessing_sha256,
        "precision": "fp32",
    }
    points = [
        OperatingPoint(threshold=limit, exit_shares=(2 - gmacs, gmacs - 1), gmacs=gmacs) for limit, gmacs in TABLE
    ]
    Budgets(**known, rounds=2, n=10, points=points).save(folder / "budgets.json")
    return folder


def test_a_repository_of_timm_is_judged_before_its_weights_are_asked_for(tmp_path, hub, monkeypatch):
    sizes = {"depth": 1, "img_size": 64}
    module = timm.create_model("vit_tiny_patch16_224", **sizes)
    timm.models.save_for_hf(module, tmp_path / "vit", model_args=sizes, safe_serialization=True)
    asked, download = [], huggingface_hub.snapshot_download

    def record(repo_id, *, allow_patterns, **options):
        asked.extend(allow_patterns)
        return download(repo_id, allow_patterns=allow_patterns, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", record)
    hub("someone/config", tmp_path / "vit" / "config.json")
    assert "round 1" in works("info", "someone/config")
    assert set(asked) == {"config.json"}
    hub("someone/vit", *(tmp_path / "vit").iterdir())
    assert torch.equal(progresvit.load("someone/vit").norm.weight, module.norm.weight)
    assert "*.safetensors" in asked
    assert "*.bin" not in asked
    asked.clear()
    config = (tmp_path / "vit" / "config.json").read_text()
    (tmp_path / "vit" / "config.json").write_text(config.replace("bicubic", "bilinear"))
    hub("someone/other", *(tmp_path / "vit").iterdir())
    with pytest.raises(ValueError, match="interpolation bilinear"):
        progresvit.load("someone/other")
    assert set(asked) == {"config.json"}
