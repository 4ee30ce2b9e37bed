import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from progresvit.config import PRESETS, ModelConfig, Round, make_rounds, plain_vit, preset


@st.composite
def configs(draw):
    patch = draw(st.sampled_from([4, 7, 8, 16]))
    count = draw(st.integers(1, 4))
    grids = sorted(draw(st.lists(st.integers(1, 6), min_size=count, max_size=count)))
    heads = sorted(draw(st.lists(st.integers(1, 3), min_size=count, max_size=count)))
    classes = draw(st.integers(0, 20))
    names = tuple(f"class {index}" for index in range(classes))
    depth = draw(st.integers(1, 3))
    config = ModelConfig(
        rounds=make_rounds([grid * patch for grid in grids], heads),
        heads=draw(st.integers(heads[-1], 4)),
        depth=depth,
        patch_size=patch,
        num_classes=classes,
        position_resolution=draw(st.none() | st.integers(1, 6).map(lambda grid: grid * patch)),
        psg=draw(st.booleans()),
        layer_scale=draw(st.none() | st.just(1e-6)),
        labels=draw(st.none() | st.just(names)),
    )
    return config.with_merge([draw(st.integers(0, grid**2 // (depth + 1))) for grid in grids])


@given(configs())
def test_config_survives_json(config):
    assert ModelConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("name", PRESETS)
def test_preset_name_spells_its_resolutions(name):
    resolutions = [str(round_.resolution) for round_ in preset(name).rounds]
    assert name.endswith("_" + "_".join(resolutions))


def test_position_grid_is_stored_for_the_highest_resolution_unless_told():
    assert preset("progresvit_small_192_240").position_resolution == 240
    assert preset("progresvit_small_192_240", position_resolution=224).stored_grid == 14
    rounds = make_rounds([192, 288], [3, 6])
    assert preset("progresvit_small_192_240", rounds=rounds).position_resolution == 288


def test_every_block_can_merge_as_many_tokens_as_a_config_allows():
    config = small().with_merge([11, 17])  # of 144 and 225 patches, 12 times
    for round_ in config.rounds:
        left = config.grid(round_) ** 2
        for _ in range(config.depth):
            assert round_.merge <= left // 2
            left -= round_.merge
        assert round_.merge + 1 > (config.grid(round_) ** 2 - (config.depth - 1) * (round_.merge + 1)) // 2


def test_the_json_names_merging_only_if_it_is_on():
    """Configs, records and unfinished runs from before merging existed stay equal to new ones."""
    rounds = small().with_merge([0, 8]).to_dict()["rounds"]
    assert rounds == [{"resolution": 192, "heads": 3}, {"resolution": 240, "heads": 6, "merge": 8}]


def test_equal_rounds_are_allowed():
    config = ModelConfig(rounds=make_rounds([224, 224], [3, 3]), heads=6)
    assert config.resolution == 224


def test_plain_vit_is_one_full_round_without_gates():
    config = plain_vit(resolution=224, heads=6)
    assert (len(config.rounds), config.rounds[0].width, config.psg) == (1, 384, False)


def test_timm_keys_are_passed_over():
    values = {**preset("progresvit_tiny_160_224").to_dict(), "architecture": "x", "pretrained_cfg": {"url": ""}}
    assert ModelConfig.from_dict(values) == preset("progresvit_tiny_160_224")


def small(**changes):
    return ModelConfig(**{"rounds": make_rounds([192, 240], [3, 6]), "heads": 6, **changes})


@pytest.mark.parametrize(
    ("build", "remedy"),
    [
        (lambda: small(rounds=make_rounds([192, 230], [3, 6])), "the nearest are 224 and 240"),
        (lambda: small(rounds=make_rounds([8], [3])), "the nearest is 16"),
        (lambda: small(position_resolution=230), "the nearest are 224 and 240"),
        (lambda: small(input_resolution=224), "give at least 240, or null"),
        (lambda: small(rounds=make_rounds([192, 240], [3, 7])), "use at most 6 or build a model with heads=7"),
        (lambda: small(rounds=make_rounds([192, 240], [6, 3])), "order the rounds from narrow to wide"),
        (lambda: small(rounds=make_rounds([240, 192], [3, 6])), "order the rounds from coarse to fine"),
        (lambda: small(rounds=()), "at least one round"),
        (lambda: small(rounds=[(192, 3)]), "rounds.0: input should be a valid dictionary or instance of Round"),
        (lambda: small(rounds="192"), "rounds: a list is needed"),
        (lambda: make_rounds([192, 240], [6]), "one of each per round"),
        (lambda: Round(resolution=192.0, heads=3), "resolution: input should be a valid integer"),
        (lambda: small(depth=0), "depth: input should be greater than or equal to 1"),
        (lambda: small(heads=True), "heads: input should be a valid integer"),
        (lambda: small(psg="yes"), "psg: unknown value 'yes'"),
        (lambda: small(layer_scale=-1.0), "layer_scale is a start value above 0"),
        (lambda: small(mean=(0.5,)), "mean needs 3 numbers"),
        (lambda: small(std=(0.2, 0.0, 0.2)), "must be above 0"),
        (lambda: small(std=(0.2, float("inf"), 0.2)), "std.1: must be a finite number"),
        (lambda: small(mean=(0.2, float("nan"), 0.2)), "mean.1: must be a finite number"),
        (lambda: small(layer_scale=float("inf")), "layer_scale: must be a finite number"),
        (lambda: small(depth=10**330), "depth: input should be less than or equal to 512"),
        (lambda: preset(None), "choose one of"),
        (lambda: small(crop=1.5), "above 0 and at most 1"),
        (lambda: small(labels=("cat", "dog")), "2 labels for 1000 classes; give one per class"),
        (lambda: small(num_classes=2, class_ids=("cat", 3)), "class_ids.1: input should be a valid string"),
        (lambda: preset("progresvit_smal_192_240"), "progresvit_small_192_240"),
        (lambda: preset("resnet50"), "progresvit_tiny_160_224"),
        (lambda: preset("progresvit_tiny_160_224", num_clases=3), "did you mean 'num_classes'"),
        (lambda: small(kind="resnet"), "kind: "),
        (lambda: small().with_merge([0, 18]), "round 2 has 225 .* cannot merge 18 in each; set merge to 17"),
        (lambda: small().with_merge([0, -1]), "merge: input should be greater than or equal to 0"),
        (lambda: small().with_merge([8]), "1 numbers of merged tokens for 2 rounds; give one per round"),
    ],
)
def test_a_wrong_config_is_refused_with_the_remedy(build, remedy):
    with pytest.raises(ValueError, match=remedy):
        build()


@pytest.mark.parametrize("key", sorted(set(preset("progresvit_tiny_160_224").to_dict()) - ModelConfig.optional_keys))
def test_config_without_a_key_is_refused(key):
    values = preset("progresvit_tiny_160_224").to_dict()
    del values[key]
    with pytest.raises(ValueError, match=f"lacks {key}"):
        ModelConfig.from_dict(values)


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"dept": 12}, "dept: unknown key; did you mean 'depth'"),
        ({"zzz": 1}, "zzz: unknown key; choose one of class_ids, crop, depth"),
        ({"rounds": [{"resolution": 160}]}, "rounds.0: heads: Field required"),
        ({"depth": "12"}, "depth: input should be a valid integer"),
    ],
)
def test_config_json_with_a_wrong_key_or_value_is_refused(values, remedy):
    text = json.dumps({**preset("progresvit_tiny_160_224").to_dict(), **values})
    with pytest.raises(ValueError, match=remedy):
        ModelConfig.from_json(text)


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "[" * 100_000])
def test_config_that_is_no_json_object_is_refused(text):
    with pytest.raises(ValueError, match=r"not JSON|JSON object"):
        ModelConfig.from_json(text)


def test_a_config_json_without_a_kind_is_of_a_progresvit():
    values = preset("progresvit_tiny_160_224").to_dict()
    assert values.pop("kind") == "progresvit"
    assert ModelConfig.from_dict(values) == preset("progresvit_tiny_160_224")


def test_equal_configs_have_equal_hashes_and_no_config_changes():
    config = preset("progresvit_tiny_160_224")
    assert hash(config) == hash(ModelConfig.from_json(config.to_json()))
    assert config != config.replace(crop=0.8)
    with pytest.raises(ValueError, match="frozen"):
        config.crop = 0.8


def test_a_number_is_written_as_it_was_given():
    """The hash of the preprocessing is of the JSON text, in which 1 and 1.0 differ."""
    values = plain_vit(resolution=224, heads=3, crop=1, std=(1, 1.0, 2)).to_dict()
    assert [repr(number) for number in (values["crop"], *values["std"])] == ["1", "1", "1.0", "2"]
