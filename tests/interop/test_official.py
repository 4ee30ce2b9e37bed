"""The authors' checkpoints, made under their key names with every weight random."""

import argparse
import contextlib
import pickle
import random

import pytest
import torch

import progresvit
from progresvit.config import PRESETS
from progresvit.interop import import_official
from tests.interop.authors import Trap, authors_forward, authors_state

CASES = {
    "two rounds": {"resolutions": [192, 240], "widths": [64, 128], "layer_scale": False},
    "layer scale": {"resolutions": [160, 384], "widths": [64, 128], "layer_scale": True},
    "three rounds": {"resolutions": [128, 192, 240], "widths": [64, 128, 192], "layer_scale": False},
}


def make_state(case, *, depth=2, classes=11):
    last = case["resolutions"][-1]
    return authors_state(
        width=case["widths"][-1],
        widths=case["widths"],
        depth=depth,
        patch_size=16,
        grid=last // 16,
        classes=classes,
        layer_scale=case["layer_scale"],
    )


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def test_imported_model_gives_the_logits_of_the_original_formula(case, tmp_path):
    state = make_state(case)
    path = tmp_path / f"progresvit_{'_'.join(map(str, case['resolutions']))}.pth.tar"
    torch.save({"epoch": 3, "state_dict_ema": state}, path)
    progresvit.save(import_official(path), tmp_path / "model")
    model = progresvit.load(tmp_path / "model")
    images = torch.randn(2, 3, model.config.resolution, model.config.resolution)
    expected = authors_forward(state, images, resolutions=case["resolutions"], widths=case["widths"])
    with torch.no_grad():
        outputs = model(images)
    assert len(outputs) == len(expected)
    for output, logits in zip(outputs, expected):
        assert logits.std() > 0.1
        assert (output.logits - logits).abs().max() <= 1e-4


@pytest.mark.slow
def test_a_model_of_the_papers_size_is_read_off_its_weights(tmp_path):
    state = authors_state(width=384, widths=[192, 384], depth=12, patch_size=16, grid=15, classes=1000)
    torch.save({"state_dict_ema": state}, tmp_path / "checkpoint.pth.tar")
    config = import_official(tmp_path / "checkpoint.pth.tar").config
    names = {"class_ids": config.class_ids, "labels": config.labels}
    assert config == progresvit.preset("progresvit_small_192_240", **names)
    assert len(config.labels) == 1000


@pytest.mark.parametrize(
    "wrap",
    [
        lambda good, bad: {"state_dict_ema": good, "model_ema": bad, "state_dict": bad, "model": bad},
        lambda good, bad: {"model_ema": good, "state_dict": bad, "model": bad},
        lambda good, bad: {"state_dict": good, "model": bad},
        lambda good, bad: {"model": good, "optimizer": {"state": {}}},
        lambda good, bad: good,
        lambda good, bad: {"state_dict_ema": {f"module.{key}": value for key, value in good.items()}},
        lambda good, bad: {"state_dict_ema": None, "state_dict": good},
    ],
)
def test_the_best_weights_of_a_checkpoint_are_taken(wrap, tmp_path):
    good, bad = (make_state(CASES["two rounds"], depth=1) for _ in range(2))
    torch.save(wrap(good, bad), tmp_path / "file.pth.tar")
    model = import_official(tmp_path / "file.pth.tar")
    assert torch.equal(model.head.weight, good["head.weight"])


def test_a_checkpoint_of_timms_training_script_opens(tmp_path):
    state = make_state(CASES["two rounds"], depth=1)
    options = argparse.Namespace(model="progresvit", lr=1e-3, opt_betas=None)
    torch.save({"args": options, "state_dict_ema": state}, tmp_path / "file.pth.tar")
    assert import_official(tmp_path / "file.pth.tar").config.num_classes == 11


@pytest.mark.parametrize(
    ("name", "grid", "resolutions", "expected"),
    [
        ("progresvit_192_240.pth.tar", 15, None, [192, 240]),
        ("progresvit-deit-s-160-384-kd.pth.tar", 24, None, [160, 384]),
        ("progresvit_160_240.pth.tar", 15, None, [160, 240]),
        ("model_best.pth.tar", 15, None, [192, 240]),
        ("model_best.pth.tar", 24, None, [160, 384]),
        ("model_best.pth.tar", 14, [192, 224], [192, 224]),
        ("progresvit_192_240.pth.tar", 15, [160, 240], [160, 240]),
        ("run_2026_11_15.pth.tar", 15, None, [192, 240]),
        ("run_64_128.pth.tar", 15, None, [192, 240]),
        ("progresvit_deit_small_patch16_224.pth.tar", 15, None, [192, 240]),
        ("ckpt_2026_11.pth.tar", 24, None, [160, 384]),
        ("progresvit_192_240.pth.tar", 14, None, [192, 240]),
    ],
)
def test_resolutions_come_from_the_option_the_name_or_the_grid(tmp_path, name, grid, resolutions, expected):
    state = authors_state(width=128, widths=[64, 128], depth=1, patch_size=16, grid=grid, classes=3)
    torch.save(state, tmp_path / name)
    config = import_official(tmp_path / name, resolutions=resolutions).config
    assert [round_.resolution for round_ in config.rounds] == expected
    assert config.position_resolution == grid * 16


@pytest.mark.parametrize(("grid", "rounds"), [(14, 2), (15, 3)])
def test_resolutions_that_cannot_be_read_must_be_given(tmp_path, grid, rounds):
    state = authors_state(width=128, widths=[64, 128, 128][:rounds], depth=1, patch_size=16, grid=grid, classes=3)
    torch.save(state, tmp_path / "model.pth")
    with pytest.raises(ValueError, match=r"resolutions=\(192, 240\)"):
        import_official(tmp_path / "model.pth")


def test_weights_that_are_missing_or_foreign_are_named(tmp_path):
    state = make_state(CASES["two rounds"], depth=1)
    del state["blocks.0.gate_out.net.2.bias"]
    state["blocks.0.attn.rope"] = torch.zeros(1)
    torch.save(state, tmp_path / "model.pth")
    with pytest.raises(ValueError, match=r"lack psg\.blocks\.0\.out_gate\.delta\.bias.*unknown blocks\.0\.attn\.rope"):
        import_official(tmp_path / "model.pth")


@pytest.mark.parametrize("protocol", ["torch", "pickle"])
def test_a_pickle_that_runs_code_is_refused_and_runs_none(tmp_path, protocol):
    sprung, file = tmp_path / "sprung", tmp_path / "progresvit_192_240.pth.tar"
    content = {"state_dict_ema": make_state(CASES["two rounds"], depth=1), "args": Trap(sprung)}
    if protocol == "torch":
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps({"args": Trap(sprung)}, protocol=2))
    with pytest.raises(ValueError, match="could run code"):
        import_official(file)
    assert not sprung.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"not a checkpoint", b"PK\x03\x04 cut short", b"<html>404</html>", pickle.dumps({"a": 1}, protocol=4)],
)
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "model.pth").write_bytes(content)
    with pytest.raises(ValueError, match="download it again") as caught:
        import_official(str(tmp_path / "model.pth"))
    assert "weights_only" not in str(caught.value)  # torch's own advice is to switch it off


@pytest.mark.slow
def test_bytes_changed_at_random_never_escape_as_anything_but_a_clear_error(tmp_path):
    torch.save(make_state(CASES["two rounds"], depth=1), tmp_path / "whole.pth")
    whole, chance = (tmp_path / "whole.pth").read_bytes(), random.Random(0)
    for _ in range(60):
        changed = bytearray(whole)
        for place in chance.sample(range(len(whole)), 200):
            changed[place] ^= 1 << chance.randrange(8)
        (tmp_path / "model.pth").write_bytes(changed[: chance.choice([len(whole), len(whole) // 2])])
        with contextlib.suppress(ValueError):
            import_official(tmp_path / "model.pth", resolutions=[192, 240])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cls_token", torch.zeros(())),
        ("pos_embed", torch.zeros(3)),
        ("head.weight", torch.zeros(4)),
        ("norm.weight", torch.eye(4).to_sparse()),
        ("token_projectors.0.prefix_proj.weight", torch.zeros(3)),
        ("blocks.foo.x", torch.zeros(3)),
    ],
)
def test_malformed_weights_are_refused(tmp_path, key, value):
    torch.save({**make_state(CASES["two rounds"], depth=1), key: value}, tmp_path / "progresvit_192_240.pth")
    with pytest.raises(ValueError, match=r"damaged|do not fit|resolutions="):
        import_official(tmp_path / "progresvit_192_240.pth")


def test_a_truncated_checkpoint_is_refused(tmp_path):
    torch.save(make_state(CASES["two rounds"], depth=1), tmp_path / "model.pth")
    whole = (tmp_path / "model.pth").read_bytes()
    (tmp_path / "model.pth").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="download it again"):
        import_official(tmp_path / "model.pth")


@pytest.mark.parametrize(
    "content", [{"fc.weight": torch.zeros(2)}, {"state_dict": {"fc.weight": torch.zeros(2)}}, [1, 2], {"epoch": 3}]
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "resnet.pth")
    with pytest.raises(
        ValueError,
        match=r"not a checkpoint of a known project: .*Known are ProgResViT, ThinkingViT, HydraViT|holds no weights",
    ):
        import_official(tmp_path / "resnet.pth")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        import_official(tmp_path / "nothing.pth.tar")


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_at_its_full_size_gives_the_logits_of_the_original_formula(name, tmp_path):
    config = PRESETS[name]
    resolutions, widths = ([getattr(round_, key) for round_ in config.rounds] for key in ("resolution", "width"))
    sizes = {"patch_size": config.patch_size, "grid": resolutions[-1] // config.patch_size, "classes": 1000}
    state = authors_state(width=config.width, widths=widths, depth=config.depth, **sizes)
    path = tmp_path / f"progresvit_{'_'.join(map(str, resolutions))}.pth.tar"
    torch.save({"state_dict_ema": state}, path)
    model = import_official(path)
    assert [(round_.resolution, round_.heads) for round_ in model.config.rounds] == [
        (round_.resolution, round_.heads) for round_ in config.rounds
    ]
    images = torch.randn(1, 3, config.resolution, config.resolution)
    expected = authors_forward(state, images, resolutions=resolutions, widths=widths)
    with torch.no_grad():
        for output, logits in zip(model(images), expected, strict=True):
            assert logits.std() > 0.1
            assert (output.logits - logits).abs().max() <= 1e-4 * logits.abs().max()
