"""What ``model.start`` of a segmentation recipe takes: plain ViTs, model folders, and checkpoints of the authors."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import progresvit
from progresvit.config import ModelConfig, make_rounds
from progresvit.interop import import_official, start
from progresvit.model import ProgResViT
from progresvit.model.backbone import resample_position
from progresvit.training.build import build_model, start_model
from progresvit.training.check_run import check_run_options
from progresvit.training.recipe import load_recipe
from progresvit.training.tasks.registry import make_task
from tests.data.shapes import CLASSES, save_shapes
from tests.interop.authors import authors_state
from tests.interop.test_start import random_vit
from tests.training.runs import ALONE, losses, run, run_until_killed
from tests.training.test_segmentation import PLAIN, THINKING, TINY, recipe


def started(source, wanted=None, classes=CLASSES, **model):
    """The model of a recipe with this start, and the line about it."""
    network = {"resolutions": [32, 48], "heads": [1, 2], **TINY} if wanted is None else wanted
    wanted_recipe = recipe(model={**network, "start": str(source), **model})
    made = build_model(wanted_recipe, classes, task="segmentation")
    line = start_model(made, wanted_recipe)
    return made.eval(), line


@pytest.fixture
def vit():
    """A plain ViT for images of 80 pixels, of another number of classes."""
    sizes = {"embed_dim": 128, "num_heads": 2, "depth": 2, "img_size": 80, "num_classes": 7}
    return random_vit(**sizes)


@pytest.mark.parametrize("network", [None, THINKING, PLAIN], ids=["progresvit", "thinkingvit", "plain"])
def test_after_a_quiet_start_the_last_rounds_patches_are_those_of_the_vit(vit, network, tmp_path):
    save_file(vit.state_dict(), tmp_path / "vit.safetensors")
    fusion = {} if network is PLAIN else {"start_fusion": "quiet"}
    model, line = started(tmp_path / "vit.safetensors", network, **fusion)
    own = {"progresvit": ", projectors, psg", "thinkingvit": ", transitions"}[model.config.kind]
    assert line.endswith(f"not copied: head{'' if network is PLAIN else own}")
    vit.set_input_size(img_size=(48, 48))
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        last, expected = model(images)[-1], vit.forward_features(images)
    torch.testing.assert_close(last.tokens, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        last.logits.flatten(2).mT, F.linear(expected[:, 1:], model.head.weight, model.head.bias), atol=1e-5, rtol=1e-5
    )


def test_the_papers_start_from_a_vit_is_not_quiet(vit, tmp_path):
    save_file(vit.state_dict(), tmp_path / "vit.safetensors")
    model, _ = started(tmp_path / "vit.safetensors")
    vit.set_input_size(img_size=(48, 48))
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        assert (model(images)[-1].tokens - vit.forward_features(images)).abs().max() > 0.1


def two_rounds(**changes):
    values = {"rounds": make_rounds([32, 48], [1, 2]), "heads": 2, "num_classes": 7, **TINY}
    return ModelConfig(**{**values, **changes})


def test_a_classification_model_gives_everything_but_its_head(randomize, tmp_path):
    source = randomize(ProgResViT(two_rounds()))
    folder = progresvit.save(source, tmp_path / "source")
    model, line = started(folder)
    assert line == f"start: {folder}; not copied: head"
    assert (model.config.task, model.head.weight.shape) == ("segmentation", (3, 128))
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        for output, expected in zip(model(images), source(images)):
            assert torch.equal(output.tokens, expected.tokens)
    larger, line = started(folder, {"resolutions": [48, 64], "heads": [1, 2], **TINY})
    assert line.endswith("not copied: head")
    state, given = larger.state_dict(), source.state_dict()
    assert torch.equal(state.pop("pos_embed"), resample_position(given["pos_embed"], 4))
    learned = [key for key in state if not key.startswith("head.")]
    assert any(key.startswith("projectors.") for key in learned)
    assert any(key.startswith("psg.") for key in learned)
    assert all(torch.equal(state[key], given[key]) for key in learned)


def test_the_recipe_of_the_paper_starts_from_the_model_of_192_240(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    wanted = load_recipe("segmenter_448_576")
    assert list(wanted.model.heads) == [round_.heads for round_ in progresvit.preset("progresvit_small_192_240").rounds]
    expected = r"there is no file or folder runs/192_240/model; .* Set model\.start to another start"
    with pytest.raises(ValueError, match=expected):
        check_run_options(wanted, make_task(wanted)[1], ALONE)


def test_without_rounds_the_network_is_that_of_the_classification_model(randomize, tmp_path):
    folder = progresvit.save(randomize(ProgResViT(two_rounds(psg="static", layer_scale=0.1))), tmp_path / "source")
    model, line = started(folder, {})
    assert line.endswith("not copied: head")
    expected = two_rounds(psg="static", layer_scale=0.1, task="segmentation", num_classes=3)
    assert model.config == expected.replace(class_ids=CLASSES, labels=CLASSES)


def test_a_segmentation_model_gives_its_decoder_too(randomize, tmp_path):
    config = two_rounds(task="segmentation", num_classes=3, class_ids=CLASSES, labels=CLASSES)
    source = randomize(ProgResViT(config))
    folder = progresvit.save(source, tmp_path / "source")
    for classes in (CLASSES, CLASSES[::-1]):
        model, line = started(folder, classes=classes)
        assert line.endswith("not copied: nothing")
        assert torch.equal(model.head.weight, source.head.weight[[CLASSES.index(name) for name in classes]])


@pytest.fixture
def authors(tmp_path):
    """A file as the authors publish them, for rounds of 32 and 48 pixels."""
    state = authors_state(width=128, widths=[64, 128], depth=2, patch_size=16, grid=3, classes=11)
    torch.save({"epoch": 3, "state_dict_ema": state}, tmp_path / "progresvit_32_48.pth.tar")
    return tmp_path / "progresvit_32_48.pth.tar"


def test_a_checkpoint_of_the_authors_gives_everything_but_its_head(authors):
    source = import_official(authors)
    model, line = started(authors)
    assert line == f"start: {authors}; not copied: head"
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        for output, expected in zip(model(images), source(images), strict=True):
            assert torch.equal(output.tokens, expected.tokens)
    larger, line = started(authors, {"resolutions": [48, 80], "heads": [1, 2], **TINY})
    assert line.endswith("not copied: head")
    assert torch.equal(larger.psg.encoder.weight, source.psg.encoder.weight)


def test_other_networks_take_the_backbone_of_a_checkpoint_of_the_authors(authors):
    source = import_official(authors)
    for network, missing in ((THINKING, "head, transitions"), (PLAIN, "head")):
        model, line = started(authors, network)
        assert line.endswith(f"not copied: {missing}")
        assert torch.equal(model.blocks[1].mlp.fc2.weight, source.blocks[1].mlp.fc2.weight)


def test_a_model_of_the_authors_is_found_by_its_hub_id(authors, monkeypatch):
    name = "NCPS/progresvit-deit-s-192-240-imagenet1k"
    asked = []
    monkeypatch.setattr(start, "load_official", lambda name: (asked.append(name), import_official(authors))[1])
    model, line = started(name)
    assert (asked, line) == ([name], f"start: {name}; not copied: head")
    assert torch.equal(model.norm.weight, import_official(authors).norm.weight)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"start_fusion": "quiet"}, r"brings what it learned between its rounds.*set model\.start_fusion=paper"),
        ({"depth": 3}, r"it has 2 blocks and the model 3: set model\.depth=2"),
        ({"heads": [1, 3]}, r"it is 128 channels wide and the model 192: set model\.heads so that it ends in 2"),
        ({"patch_size": 8}, r"set model\.patch_size=16"),
        ({"layer_scale": 1e-6}, r"set model\.layer_scale=null"),
    ],
)
def test_a_checkpoint_of_the_authors_that_does_not_fit_is_refused(authors, model, message):
    with pytest.raises(ValueError, match=message):
        started(authors, **model)


def test_files_that_are_no_checkpoint_of_the_authors_are_refused(authors, tmp_path):
    weights = torch.load(authors, weights_only=True)["state_dict_ema"]
    torch.save({key: value for key, value in weights.items() if key != "head.weight"}, authors)
    with pytest.raises(ValueError, match=r"not a complete checkpoint: it lacks head\.weight"):
        started(authors)
    torch.save({**weights, "token_projectors.0.extra": torch.zeros(1)}, authors)
    with pytest.raises(ValueError, match=r"token_projectors\.0\.extra"):
        started(authors)
    authors.write_bytes(authors.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged or not a PyTorch checkpoint"):
        started(authors)
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="not a plain ViT: it lacks cls_token"):
        started(tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"there is no file or folder .*nowhere\.pth"):
        started(tmp_path / "nowhere.pth")


def test_the_rounds_of_a_checkpoint_of_the_authors_must_be_given(authors):
    expected = r"from which only weights are read, not rounds; set model\.resolutions and model\.heads"
    with pytest.raises(ValueError, match=rf"{expected}, or model\.preset"):
        started(authors, {})
    with pytest.raises(ValueError, match=rf"{expected} \(its own are \[160, 384\] and \[3, 6\]\)"):
        started("NCPS/progresvit-deit-s-160-384-imagenet1k", {})
    with pytest.raises(ValueError, match=r"is neither a model folder nor a bundled model, so the rounds are unknown"):
        started("deit_tiny_patch16_224", {})


def test_a_resumed_run_remembers_the_rounds_of_its_start(randomize, tmp_path):
    """The start is a classification model, and its folder may be gone."""
    shapes = save_shapes(tmp_path / "shapes", val=2)
    folder = progresvit.save(randomize(ProgResViT(two_rounds())), tmp_path / "source")
    wanted = recipe(model={"start": str(folder)}, run={"log_every": 1, "save_minutes": 1e-9})
    run_until_killed(1, wanted, shapes, tmp_path / "run")
    (folder / "config.json").unlink()
    model = progresvit.load(run(wanted, shapes, tmp_path / "run", resume=True))
    assert (model.config.task, model.config.rounds) == ("segmentation", two_rounds().rounds)
    assert [step for step, *_ in losses(tmp_path / "run")] == [1, 2, 3]


def test_a_classification_head_of_the_same_classes_does_not_start_the_decoder(tmp_path):
    """It was trained on class tokens, whichever classes it knows."""
    progresvit.save(ProgResViT(two_rounds(num_classes=len(CLASSES), class_ids=CLASSES)), tmp_path / "classifies")
    _, line = started(tmp_path / "classifies")
    assert line.endswith("not copied: head")


def test_a_quiet_start_takes_a_folder_whose_projectors_do_not_fit(tmp_path):
    progresvit.save(ProgResViT(two_rounds(rounds=make_rounds([32, 48], [2, 2]))), tmp_path / "model")
    _, line = started(tmp_path / "model", start_fusion="quiet")
    assert "projectors" in line
