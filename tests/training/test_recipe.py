import pytest
import torch
import yaml

from progresvit.config import plain_vit, preset
from progresvit.distributed import Processes
from progresvit.io.model_folder import find_folder
from progresvit.model import registry
from progresvit.training.recipe import Recipe, bundled_recipes, load_recipe
from progresvit.training.tasks.registry import make_task

NAMES = {"num_classes": 1000, "class_ids": None, "labels": None}


def test_the_bundled_recipes_are_complete():
    assert set(bundled_recipes()) == {
        "192_240", "160_240", "160_384", "128_192_240", "192_240_kd", "160_384_kd",
        "width_only", "width_resolution", "deit_small_224", "deit_small_240", "deit_small_384",
        "photos_tiny", "photos_tiny_kd", "photos_tiny_soft", "photos_tiny_pretrained",
        "photos_small", "photos_small_kd", "imagenet_tiny", "nettewoof_tiny", "own_images", "own_masks", "digits",
        "thinkingvit", "hydravit", "sortednet", "matformer", "dynabert", "early_exit",
        "camvid", "pets", "segmenter_448_576", "dino_192_240", "dino_small_224", "dino_small_240", "dino_photos",
    }  # fmt: skip


@pytest.mark.parametrize("name", bundled_recipes())
def test_every_recipe_is_valid_and_opens_with_its_command(name):
    recipe = load_recipe(name)
    start = registry.read_config(find_folder(recipe.model.start)) if recipe.model.is_of_start else None
    assert recipe.model.config(**NAMES, start=start).num_classes == 1000
    head = [line for line in bundled_recipes()[name].read_text().splitlines() if line.startswith("#")]
    assert any(f"progresvit train {name} --data" in line for line in head)


@pytest.mark.parametrize("name", ["192_240", "160_240", "160_384", "128_192_240"])
def test_the_papers_recipe_is_that_of_the_method(name):
    recipe = load_recipe(name)
    assert recipe.model.config(**NAMES) == preset(f"progresvit_small_{name}")
    assert recipe.model.start == "deit_small_patch16_224.fb_in1k"
    assert recipe.model.drop_path == 0.1
    assert recipe.run.precision == "tf32"
    assert (recipe.ema, recipe.seed, recipe.epochs) == (0.99996, 42, 310)
    assert recipe.optimizer.model_dump() == {
        "name": "adamw", "lr": 5e-4, "lr_batch": 512, "weight_decay": 0.05, "betas": (0.9, 0.999), "eps": 1e-8,
        "momentum": 0.9, "batch": 1024, "accumulate": 1, "lr_scale": {}, "clip": None, "clip_each": False, "freeze": (),
        "freeze_epochs": {},
    }  # fmt: skip
    assert recipe.schedule.model_dump() == {
        "name": "cosine", "by": "epoch", "epochs": 300, "cooldown": 10, "warmup": 5, "warmup_prefix": False,
        "warmup_lr": 1e-6, "min_lr": 1e-5, "power": 0.9, "weight_decay_end": None,
    }  # fmt: skip
    assert recipe.mixing.model_dump() == {
        "mixup": 0.8, "cutmix": 1.0, "probability": 1.0, "switch": 0.5, "smoothing": 0.1,
    }  # fmt: skip
    assert recipe.augment.rand_augment == "rand-m9-mstd0.5-inc1"
    assert (recipe.augment.erasing, recipe.augment.flip, recipe.augment.crop_scale) == (0.25, 0.5, (0.08, 1.0))
    assert (recipe.augment.early_erasing, recipe.augment.late_erasing) == (0.0, 0.25)


@pytest.mark.parametrize("name", ["192_240_kd", "160_384_kd"])
def test_distilled_recipes_are_those_of_the_method(name):
    recipe = load_recipe(name)
    config = recipe.model.config(**NAMES)
    assert config == preset(f"progresvit_small_{name.removesuffix('_kd')}", layer_scale=1e-6, input_resolution=384)
    assert recipe.model.start == "deit3_small_patch16_384.fb_in22k_ft_in1k"
    wanted = recipe.distillation
    assert (wanted.teacher, wanted.kind, wanted.weight) == ("deit3_base_patch16_384.fb_in22k_ft_in1k", "hard", 0.5)
    assert recipe.run.precision == "bf16"
    assert config.input_side == 384


def test_ablation_and_plain_recipes_are_what_they_say():
    width_only, with_resolution = (
        load_recipe(name).model.config(**NAMES) for name in ("width_only", "width_resolution")
    )
    assert [round_.resolution for round_ in width_only.rounds] == [224, 224]
    assert with_resolution == preset("progresvit_small_192_240", psg=False)
    assert load_recipe("deit_small_240").model.config(**NAMES) == plain_vit(resolution=240, heads=6)


@pytest.mark.parametrize("name", ["thinkingvit", "hydravit", "sortednet", "matformer"])
def test_a_baseline_is_trained_like_deit_s(name):
    recipe, plain = load_recipe(name), load_recipe("deit_small_224")
    assert recipe.model.kind == name
    for section in ("data", "augment", "mixing", "optimizer", "schedule", "ema", "seed", "run"):
        assert getattr(recipe, section) == getattr(plain, section)
    assert recipe.model.drop_path == plain.model.drop_path
    narrow = "deit_tiny_patch16_224.fb_in1k" if name == "thinkingvit" else None
    assert recipe.model.start == (narrow or plain.model.start)
    assert recipe.model.start_as_prefix == (narrow is not None)
    _, task = make_task(recipe)
    with torch.device("meta"):
        model = registry.build(recipe.model.config(**NAMES))
    task.setup(model, None, recipe, Processes(rank=0, count=1, device=torch.device("cpu")))
    assert model.config.resolution == 224
    assert round(model.gmacs()[-1], 3) == (5.896 if name == "thinkingvit" else 4.599)


def test_baselines_are_trained_by_their_own_rules():
    rules = {name: load_recipe(name).task_options for name in ("hydravit", "sortednet", "matformer")}
    assert rules["hydravit"] == {"per_step": 1, "reduction": "mean"}
    assert rules["sortednet"] == {"per_step": 3, "reduction": "mean"}
    assert rules["matformer"] == {"per_step": "all", "reduction": "sum"}
    heads = [[round_.heads for round_ in load_recipe(name).model.config(**NAMES).rounds] for name in list(rules)[:2]]
    assert heads == [[3, 4, 5, 6], [3, 4, 5, 6]]
    matformer = load_recipe("matformer").model.config(**NAMES)
    assert [matformer.hidden(round_) for round_ in matformer.rounds] == [192, 384, 768, 1536]


def test_overrides_change_nested_values():
    recipe = load_recipe("192_240", ["optimizer.batch=256", "run.precision=bf16", "optimizer.lr=1e-3", "ema=0.9"])
    assert (recipe.optimizer.batch, recipe.run.precision) == (256, "bf16")
    assert (recipe.optimizer.lr, recipe.ema) == (1e-3, 0.9)
    assert load_recipe("photos_tiny_kd", ["distillation=null"]).distillation is None
    assert load_recipe("photos_tiny", ["distillation.teacher=efficientnet-lite2"]).distillation.weight == 0.5
    soft = load_recipe("photos_tiny_kd", ["distillation.kind=soft", "distillation.temperature=2"])
    assert soft.distillation.temperature == 2
    assert load_recipe("digits", ["data.in_memory_cache=cache", "data.mode=in_memory"]).data.in_memory_cache == "cache"


@pytest.mark.parametrize("name", ["192_240", "width_resolution"])
def test_a_recipe_may_merge_tokens(name):
    config = load_recipe(name, ["model.merge=[0, 8]"]).model.config(**NAMES)
    assert config == load_recipe(name).model.config(**NAMES).with_merge([0, 8])
    with pytest.raises(ValueError, match="give one per round"):
        load_recipe(name, ["model.merge=[8]"]).model.config(**NAMES)


def test_fields_of_the_config_can_be_set_by_name():
    assert load_recipe("192_240", ["model.fields={crop: 1.0}"]).model.config(**NAMES).crop == 1.0
    with pytest.raises(ValueError, match="crpo"):
        load_recipe("192_240", ["model.fields={crpo: 1.0}"]).model.config(**NAMES)


def test_a_recipe_survives_yaml():
    recipe = load_recipe("photos_tiny_kd")
    assert Recipe.model_validate(yaml.safe_load(recipe.to_yaml())) == recipe


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["optimizer.bacth=256"], r"optimizer\.bacth: unknown key; did you mean 'batch'"),
        (["optimiser.batch=256"], "did you mean 'optimizer'"),
        (["augment.mixup=1"], "unknown key; choose one of colour, crop_ratio"),
        (["distillation.techer=x"], "did you mean 'teacher'"),
        (["optimizer.batch=many"], r"optimizer\.batch"),
        (["optimizer.batch=0"], "greater than or equal to 1"),
        (["run.precision=fp64"], "unknown value 'fp64'; did you mean 'fp16' or 'fp32'"),
        (["optimizer.batch"], "is changed by key=value"),
        (["optimizer.betas=[1"], "is not a YAML value"),
        (["augment.rand_augment=foo"], "such as rand-m9-mstd0.5-inc1"),
        (["augment.crop_scale=[1, 0.5]"], "from small to large"),
        (["model.preset=null", "model.resolutions=[]", "model.heads=[]"], "either preset, or resolutions and heads"),
        (["model.resolutions=[224]"], "either preset, or resolutions and heads"),
        (["data.in_memory_cache=cache"], "in_memory_cache is for mode: in_memory"),
        (
            ["distillation={teacher: x, temperature: 2, map_weight: 1}"],
            "temperature and map_weight are for soft distillation; add kind: soft",
        ),
        (
            ["distillation={teacher: x, kind: soft, classes: teacher}", "model.num_classes=20"],
            r"remove model\.num_classes",
        ),
        (["optimizer.name=adam"], r"optimizer\.name: unknown value 'adam'; did you mean 'adamw'"),
        (["optimizer.name=lion"], "choose one of adamw, sgd"),
        (["schedule.name=cosin"], "did you mean 'cosine'"),
        (["schedule.by=iteration"], "choose one of epoch, step"),
        (["optimizer.momentum=0.8"], "momentum belong to sgd; set name: sgd or remove them"),
        (["optimizer={name: sgd, betas: [0.8, 0.9]}"], "betas belong to adamw"),
        (["schedule.power=0.5"], "power belong to poly"),
        (["optimizer.clip=0"], "greater than 0"),
        (["optimizer.lr_scale={psg.*: 0}"], "greater than 0"),
        (["optimizer.freeze_epochs={head.*: 0}"], "greater than 0"),
        (["model.kind=progresvitt"], r"model\.kind: .*progresvitt.*did you mean 'progresvit'"),
    ],
)
def test_a_wrong_override_is_refused_with_a_suggestion(overrides, remedy):
    with pytest.raises(ValueError, match=remedy):
        load_recipe("192_240", overrides)


@pytest.mark.parametrize(
    ("text", "remedy"), [("- a", "is not a recipe"), ("model: [", "is not YAML"), ("seed: 1", "model")]
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text, remedy):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match=remedy):
        load_recipe(str(tmp_path / "recipe.yaml"))


def test_an_unknown_recipe_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean '192_240'"):
        load_recipe("192_24")


def test_names_of_version_0_1_0_are_read():
    recipe = load_recipe("digits", ["data.mode=resident", "data.resident_side=24"])
    assert (recipe.data.mode, recipe.data.in_memory_side) == ("in_memory", 24)
    assert load_recipe("own_pictures") == load_recipe("own_images")


def test_digits_alone_erases_before_mixing_as_when_it_was_measured():
    assert [name for name in bundled_recipes() if load_recipe(name).augment.early_erasing] == ["digits"]
