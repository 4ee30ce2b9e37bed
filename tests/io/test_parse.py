"""Files that ask for absurd sizes are refused at once, before anything is built of them."""

import json
import time

import pytest

from progresvit.baselines.early_exit import EarlyExitConfig
from progresvit.config import PRESETS, ModelConfig
from progresvit.engine.export.manifest import Manifest
from progresvit.io.parse import count_of
from progresvit.io.yaml_files import parse_yaml
from progresvit.routing import load_setting
from progresvit.training.recipe import load_recipe
from progresvit.training.run_folder import check_folder, run_config
from tests.commands import refused

VALUES = PRESETS["progresvit_tiny_160_224"].to_dict()
NESTED = "[" * 100_000 + "]" * 100_000
DEEP_YAML = "[" * 10_000 + "]" * 10_000
LAUGHS = "a: &a [ha, ha, ha, ha, ha, ha, ha, ha, ha]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi")
)
"""A billion laughs: 9**9 values in 400 bytes."""
RECIPE = "model: {{resolutions: [16, 32], heads: [1, 2], depth: {depth}, patch_size: 8}}\nschedule: {{epochs: 1}}\n"


@pytest.fixture
def at_once():
    began = time.process_time()  # of this process, whatever else the machine does
    yield
    assert time.process_time() - began < 2  # it is milliseconds


def with_round(**changes):
    return {"rounds": [{**VALUES["rounds"][0], **changes}], "heads": 256}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"depth": 20_000}, "depth: input should be less than or equal to 512, not 20000"),
        ({"depth": 10**5000}, "number of 5001 digits; 100 are the limit"),
        ({"heads": 20_000}, "heads: input should be less than or equal to 256"),
        ({"patch_size": 10**6}, "patch_size: input should be less than or equal to 4096"),
        ({"input_resolution": 10**6}, "input_resolution: input should be less than or equal to 4096"),
        ({"position_resolution": 10**6}, "position_resolution: input should be less than or equal to 4096"),
        (with_round(resolution=10**6), "rounds.0: resolution: input should be less than or equal to 4096"),
        (with_round(heads=10**6), "rounds.0: heads: input should be less than or equal to 256"),
        ({**with_round(resolution=4096), "input_resolution": None, "patch_size": 8}, "round 1 has 262144 patch tokens"),
        ({"depth": 512, "heads": 256}, "1.6e.12 parameters; at most 1e.10 are allowed, so lower heads or depth"),
        ({"rounds": VALUES["rounds"] * 100_000}, "rounds: 200000 rounds; a model has at most 64"),
    ],
)  # fmt: skip
def test_a_config_of_absurd_size_is_refused(at_once, tmp_path, changes, why):
    text = json.dumps({**VALUES, **{key: value for key, value in changes.items() if value != 10**5000}})
    if changes.get("depth") == 10**5000:  # json writes it no more than it reads it
        text = text.replace('"depth": 12', f'"depth": 1{"0" * 5000}')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=why):
        ModelConfig.from_json(text)
    refused("config.json: ", "info", tmp_path)


def test_the_limits_hold_for_every_kind_of_model():
    values = {"rounds": [{"resolution": 224, "blocks": 20_000}], "heads": 3, "depth": 20_000}
    with pytest.raises(ValueError, match="depth: input should be less than or equal to 512"):
        EarlyExitConfig(**values)


@pytest.mark.parametrize(
    "text", [NESTED, json.dumps(VALUES)[:-1] + f', "x": {NESTED}}}', '{"x":' * 60 + "1" + "}" * 60]
)
def test_a_nested_config_is_refused(at_once, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    refused("more than 50 levels deep, which is the limit", "info", tmp_path)


def test_a_config_with_a_million_unknown_keys_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**VALUES, **{f"x{number}": 1 for number in range(100_000)}}))
    refused("and 99980 more", "info", tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (RECIPE.format(depth=20_000), "model.depth: input should be less than or equal to 512, not 20000"),
        (RECIPE.format(depth="9" * 5000), "it has a number of 5000 digits; 100 are the limit"),
        (RECIPE.format(depth="0x" + "f" * 5000), "it has a number of 5002 digits"),
        (RECIPE.format(depth="1" + ":59" * 3000), "it has a number of 9001 digits"),
        (RECIPE.format(depth=2).replace("[16, 32]", str([16] * 100)), "model.resolutions: "),
        (RECIPE.format(depth=2).replace("[1, 2]", "[1, 20000]"), "model.heads.1: input should be less than or equal"),
        (RECIPE.format(depth=2).replace("epochs: 1", "epochs: 99999999999999999999"), "schedule.epochs: input should"),
        (RECIPE.format(depth=2) + "data: {workers: 1000000}", "data.workers: input should be less than or equal to"),
        (f"model: {DEEP_YAML}", "more than 50 levels deep, which is the limit"),
        ("model:\n" + "".join(f"{' ' * n}a:\n" for n in range(1, 300)), "more than 50 levels deep"),
        (LAUGHS + "model: *i\n", "it has more than 10000 values, aliases included, which is the limit"),
        ("model: &a {fields: *a}", "the alias .a is within what it stands for"),
        (f"model: {NESTED}", "it has more than 0.1 MB, which is the limit"),
    ],
)
def test_a_recipe_of_absurd_size_is_refused(at_once, tmp_path, text, why):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=why) as error:
        load_recipe(str(path))
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("model.depth=20000", "model.depth: input should be less than or equal to 512"),
        (f"model.fields={DEEP_YAML}", "more than 50 levels deep"),
    ],
)
def test_an_override_of_absurd_size_is_refused(at_once, override, why):
    with pytest.raises(ValueError, match=why):
        load_recipe("192_240", [override]).model.config(num_classes=3, class_ids=None, labels=None)


def test_anchors_of_usual_size_are_read():
    assert parse_yaml("a: &a [1, 2]\nb: [*a, *a]\nc: {<<: {d: 1}}") == {
        "a": [1, 2],
        "b": [[1, 2], [1, 2]],
        "c": {"d": 1},
    }


def test_a_nested_setting_is_refused(at_once, tmp_path):
    (tmp_path / "setting.json").write_text(NESTED)
    with pytest.raises(ValueError, match=r"setting.json is not a valid setting.* more than 50 levels deep"):
        load_setting(tmp_path / "setting.json")


def test_a_nested_description_of_an_export_is_refused(at_once, tmp_path):
    (tmp_path / "export.json").write_text(NESTED)
    with pytest.raises(ValueError, match=r"export.json: .* more than 50 levels deep"):
        Manifest.read(tmp_path)


def test_a_huge_file_is_not_read_to_its_end(at_once, tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(10**12)
    refused("it has more than 16 MB, which is the limit", "info", tmp_path)


@pytest.mark.parametrize("content", [DEEP_YAML, LAUGHS])
def test_the_recipe_of_a_run_folder_is_limited(at_once, tmp_path, content):
    (tmp_path / "recipe.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"recipe.yaml is damaged .* which is the limit"):
        check_folder(tmp_path, load_recipe("digits"), resume=True, overwrite=False)


def test_the_description_of_a_run_folder_is_limited(at_once, tmp_path):
    (tmp_path / "run.json").write_text(NESTED)
    with pytest.raises(ValueError, match=r"run.json is damaged .* more than 50 levels deep"):
        run_config(tmp_path)


@pytest.mark.parametrize("value", ["1:" * 400 + "1.0", "!!int ''", "!!float ''", "!!bool x", "!!timestamp x"])
def test_a_tag_with_a_value_of_another_kind_is_refused(tmp_path, value):
    (tmp_path / "recipe.yaml").write_text(f"model: {value}\n")
    with pytest.raises(ValueError, match=r"recipe.yaml is not a recipe"):
        load_recipe(tmp_path / "recipe.yaml")


def test_a_count_has_its_noun_in_singular_or_plural():
    assert [count_of(number, "image") for number in (0, 1, 2)] == ["0 images", "1 image", "2 images"]
    assert [count_of(number, "class") for number in (1, 20)] == ["1 class", "20 classes"]
    assert count_of(18494, "image", ",") == "18,494 images"
