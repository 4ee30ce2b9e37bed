"""What ``model.start`` of a recipe takes, from the recipe to a run."""

from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed

import progresvit
from progresvit.config import ModelConfig, make_rounds, plain_vit
from progresvit.model import ProgResViT, registry
from progresvit.training.build import build_model, start_model
from tests.model.pooled import PooledConfig, PooledModel
from tests.training.runs import losses, recipe, run, run_until_killed

CLASSES = tuple("abcde")
MICRO = {"depth": 2, "patch_size": 8, "num_classes": 5, "class_ids": CLASSES}


class KinConfig(ModelConfig):
    """Another kind of model on the same backbone."""

    kind: Literal["test_kin"] = "test_kin"


class KinModel(ProgResViT):
    """Its own parts have the names of ProgResViT's, which need not mean the same."""


registry.register("test_kin", config=f"{__name__}:KinConfig", model=f"{__name__}:KinModel")


@pytest.fixture
def saved(tmp_path, randomize):
    """Saves a model with random weights; returns its folder and its weights."""

    def save(model):
        folder = progresvit.save(randomize(model), tmp_path / "source")
        return folder, load_file(folder / "model.safetensors")

    return save


def two_rounds(**changes):
    return ModelConfig(**{"rounds": make_rounds([16, 32], [1, 2]), "heads": 2, **MICRO, **changes})


def started(folder, classes=CLASSES, **model):
    """The model of a recipe with this start, and the line about it."""
    wanted = recipe(model={"start": str(folder), **model})
    fresh = build_model(wanted, classes)
    line = start_model(fresh, wanted)
    return fresh, line


def equal_parts(model, weights):
    """The parts of the model whose weights all equal the source's."""
    own = model.state_dict()
    parts = {key.partition(".")[0] for key in own}
    same = {key for key in own if key in weights and torch.equal(own[key], weights[key])}
    return {part for part in parts if {key for key in own if key.partition(".")[0] == part} <= same}


def test_a_folder_of_the_same_rounds_gives_everything(saved):
    folder, weights = saved(ProgResViT(two_rounds()))
    model, line = started(folder)
    assert line == f"start: {folder}; not copied: nothing"
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_a_plain_folder_gives_the_backbone_and_its_position_grid_is_resampled(saved):
    folder, weights = saved(ProgResViT(plain_vit(resolution=48, heads=2, **MICRO)))
    model, line = started(folder, start_fusion="quiet")
    assert line == f"start: {folder}; not copied: projectors, psg"
    assert equal_parts(model, weights) == {"cls_token", "patch_embed", "blocks", "norm", "head"}
    assert model.pos_embed.shape[1] == 1 + 4 * 4
    assert torch.equal(model.pos_embed, resample_abs_pos_embed(weights["pos_embed"], new_size=[4, 4]))
    assert not model.projectors[0].widen_class.weight.any()


def test_a_folder_of_other_rounds_gives_what_fits(saved):
    """The source's second transition is 64 to 128 channels wide, the model's is its first."""
    source = two_rounds(rounds=make_rounds([16, 24, 32], [1, 1, 2]))
    folder, weights = saved(ProgResViT(source))
    model, line = started(folder)
    assert line == f"start: {folder}; not copied: projectors, psg"
    own = model.state_dict()
    copied = {key for key in own if torch.equal(own[key], weights[key])}
    assert {"projectors.0.depthwise.weight", "psg.encoder.weight", "blocks.1.norm2.weight"} <= copied
    assert "projectors.0.widen_class.weight" not in copied


def test_a_folder_of_another_kind_gives_the_backbone_alone(saved):
    fields = {name: getattr(two_rounds(), name) for name in ModelConfig.model_fields if name != "kind"}
    folder, weights = saved(KinModel(KinConfig(**fields)))
    model, line = started(folder)
    assert line == f"start: {folder}; not copied: projectors, psg"
    assert equal_parts(model, weights) == {"cls_token", "pos_embed", "patch_embed", "blocks", "norm", "head"}


def test_rows_of_the_head_follow_the_class_ids(saved):
    folder, weights = saved(ProgResViT(two_rounds()))
    for classes in ("edcba", "db"):
        model, line = started(folder, classes=tuple(classes))
        assert line.endswith("not copied: nothing")
        assert torch.equal(model.head.weight, weights["head.weight"][[CLASSES.index(name) for name in classes]])
    assert started(folder, classes=("a", "x"))[1].endswith("not copied: head")
    assert started(folder, num_classes=7)[1].endswith("not copied: head")


def test_a_kind_of_model_without_a_vit_starts_from_its_own_folder_only(saved, randomize):
    rounds = [{"resolution": 32, "grid": 2}]
    config = PooledConfig(rounds=rounds, num_classes=5, class_ids=CLASSES)
    folder, weights = saved(PooledModel(config))
    wanted = {"kind": "test_pooled", "fields": {"rounds": rounds}, "start": str(folder)}
    pooled = recipe().model_copy(update={"model": type(recipe().model)(**wanted)})
    model = build_model(pooled, CLASSES)
    assert start_model(model, pooled) == f"start: {folder}; not copied: nothing"
    assert torch.equal(model.layers[0].weight, weights["layers.0.weight"])
    with pytest.raises(ValueError, match=r"not a plain ViT: it lacks cls_token"):
        started(folder)
    vit = progresvit.save(randomize(ProgResViT(two_rounds())), folder.parent / "vit")
    pooled = pooled.model_copy(update={"model": type(recipe().model)(**{**wanted, "start": str(vit)})})
    with pytest.raises(ValueError, match="kind progresvit, whose weights PooledModel cannot take"):
        start_model(model, pooled)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 3}, r"it has 3 blocks and the model 2: set model\.depth=3"),
        ({"patch_size": 4}, r"set model\.patch_size=4"),
        (
            {"rounds": make_rounds([16, 32], [1, 3]), "heads": 3},
            r"192 channels wide.*model\.heads so that it ends in 3",
        ),
        ({"layer_scale": 0.1}, "layer_scale=1e-6"),
    ],
)
def test_a_folder_of_another_backbone_is_refused(changes, message, saved):
    folder, _ = saved(ProgResViT(two_rounds(**changes)))
    with pytest.raises(ValueError, match=message):
        started(folder)


def of_start(start, **model):
    """A recipe without rounds."""
    return recipe(
        model={"resolutions": None, "heads": None, "depth": None, "patch_size": None, "start": str(start), **model}
    )


def test_without_rounds_the_model_is_that_of_the_folder(saved):
    folder, weights = saved(ProgResViT(two_rounds(psg="static", crop=0.8, position_resolution=48)))
    model = build_model(of_start(folder), ("a", "x"))
    assert model.config == two_rounds(
        psg="static", crop=0.8, position_resolution=48, num_classes=2, class_ids=("a", "x"), labels=("a", "x")
    )
    assert start_model(model, of_start(folder)).endswith("not copied: head")
    assert torch.equal(model.pos_embed, weights["pos_embed"])


def test_without_rounds_fields_of_the_start_can_be_changed(saved):
    folder, _ = saved(ProgResViT(two_rounds()))
    changed = of_start(folder, psg=False, merge=[0, 2], fields={"crop": 0.7})
    config = build_model(changed, CLASSES).config
    assert (config.psg, config.crop, [round_.merge for round_ in config.rounds]) == (False, 0.7, [0, 2])
    assert start_model(build_model(changed, CLASSES), changed).endswith("not copied: nothing")


def test_without_rounds_the_kind_is_that_of_the_folder(saved):
    config = PooledConfig(rounds=[{"resolution": 32, "grid": 2}], num_classes=5, class_ids=CLASSES)
    folder, _ = saved(PooledModel(config))
    assert build_model(of_start(folder), CLASSES).config == config.replace(labels=CLASSES)
    with pytest.raises(
        ValueError, match=r"only models of the kind progresvit have psg; put .* test_pooled under fields"
    ):
        build_model(of_start(folder, psg=False), CLASSES)


def test_a_start_without_rounds_of_its_own_needs_those_of_the_recipe(weights_file):
    with pytest.raises(ValueError, match="either preset, or resolutions and heads, or a model folder as start"):
        recipe(model={"resolutions": None, "heads": None})
    for start in ("deit_tiny_patch16_224", weights_file, "no_such_folder"):
        with pytest.raises(
            ValueError, match=rf"model\.start={start} is neither a model folder .* set model\.preset, or"
        ):
            build_model(of_start(start), CLASSES)


def test_a_resumed_run_remembers_the_rounds_of_its_start(saved, digits, tmp_path):
    """The folder of the start may have changed, or be gone."""
    rounds = two_rounds().replace(num_classes=0, class_ids=None)
    folder, _ = saved(ProgResViT(rounds))
    one_epoch = {"schedule": {"epochs": 1, "cooldown": 0, "warmup": 0}, "run": {"log_every": 1, "save_minutes": 1e-9}}
    wanted = of_start(folder).model_copy(update={key: getattr(recipe(**one_epoch), key) for key in one_epoch})
    run_until_killed(2, wanted, digits, tmp_path / "run")
    progresvit.save(ProgResViT(rounds.replace(rounds=make_rounds([24, 32], [2, 2]))), folder)
    with pytest.raises(ValueError, match=r"another recipe \(model\.resolutions, model\.heads"):
        run(recipe(model={"start": str(folder)}, **one_epoch), digits, tmp_path / "run", resume=True)
    model = progresvit.load(run(wanted, digits, tmp_path / "run", resume=True))
    assert model.config.rounds == rounds.rounds
    assert [step for step, *_ in losses(tmp_path / "run")] == [1, 2, 3]


def test_a_quiet_start_is_refused_where_it_cannot_be(saved):
    with pytest.raises(ValueError, match="set start, or remove start_fusion"):
        recipe(model={"start_fusion": "quiet"})
    folder, _ = saved(ProgResViT(two_rounds()))
    with pytest.raises(ValueError, match=r"set model\.start_fusion=paper"):
        started(folder, start_fusion="quiet")
    with pytest.raises(ValueError, match=r"set model\.start_fusion=paper"):
        started("nettewoof-tiny", start_fusion="quiet", depth=12, patch_size=16, heads=[2, 3], resolutions=[16, 32])


@pytest.fixture
def weights_file(tmp_path, randomize):
    """Plain weights in float16, in a file."""
    plain = randomize(ProgResViT(plain_vit(resolution=32, heads=2, depth=2, patch_size=8, num_classes=1000)))
    save_file({key: value.half() for key, value in plain.state_dict().items()}, tmp_path / "vit.safetensors")
    return tmp_path / "vit.safetensors"


def short(start, **sections):
    model = {"start": str(start), "start_fusion": "quiet"}
    return recipe(model=model, schedule={"epochs": 1, "cooldown": 0, "warmup": 0}, **sections)


def test_a_run_starts_from_a_file_and_says_what_is_new(weights_file, digits, tmp_path, capsys):
    rate = {"optimizer": {"lr": 1e-9}}
    model = progresvit.load(run(short(weights_file, **rate), digits, tmp_path / "run"))
    assert f"start: {weights_file}; not copied: head, projectors, psg" in capsys.readouterr().err.splitlines()
    weights = load_file(weights_file)
    assert torch.allclose(model.blocks[0].attn.qkv.weight, weights["blocks.0.attn.qkv.weight"].float(), atol=1e-5)
    assert model.projectors[0].widen_class.weight.abs().max() < 1e-5


def test_a_resumed_run_needs_its_start_only_without_a_checkpoint(weights_file, digits, tmp_path):
    wanted = short(weights_file, run={"log_every": 1, "save_minutes": 1e-9})
    run(wanted, digits, tmp_path / "whole")
    run_until_killed(0, wanted, digits, tmp_path / "run")
    run_until_killed(2, wanted, digits, tmp_path / "run", resume=True)  # no checkpoint yet
    assert len(losses(tmp_path / "run")) == 2
    weights_file.unlink()
    run(wanted, digits, tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_narrower_model_folder_becomes_the_leading_channels(saved):
    folder, weights = saved(ProgResViT(plain_vit(resolution=32, heads=1, **MICRO)))
    model, line = started(folder, start_as_prefix=True)
    assert line == f"start: {folder} as the leading channels; not copied: projectors, psg"
    assert torch.equal(model.norm.weight[:64], weights["norm.weight"])
    assert torch.equal(model.blocks[1].mlp.fc1.weight[:256, :64], weights["blocks.1.mlp.fc1.weight"])
    with pytest.raises(ValueError, match="start_fusion: quiet begins the last round as the start"):
        recipe(model={"start": str(folder), "start_as_prefix": True, "start_fusion": "quiet"})


def test_the_gates_start_as_the_recipe_says():
    def spread(**model):
        gate = build_model(recipe(model=model), CLASSES).psg.blocks[0].mlp_gate
        return gate.hidden.weight.std().item()

    assert spread() == pytest.approx(0.02, rel=0.05)
    assert spread(start_gates="torch") == pytest.approx(1 / (3 * 128) ** 0.5, rel=0.05)
