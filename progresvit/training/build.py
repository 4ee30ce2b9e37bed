"""From a recipe to a model with its initial weights."""

from __future__ import annotations

from timm.data import ImageNetInfo

from progresvit.config import OFFICIAL_MODELS, BaseConfig, ModelTask
from progresvit.interop import start_from
from progresvit.interop.official import is_official_file
from progresvit.io.model_folder import BUNDLED, find_folder, is_local
from progresvit.io.parse import did_you_mean
from progresvit.model import registry
from progresvit.model.interface import RoundModel
from progresvit.training.recipe import Recipe


def build_model(
    recipe: Recipe, class_ids: tuple[str, ...], start: BaseConfig | None = None, *, task: ModelTask = "classification"
) -> RoundModel:
    """The recipe's model for these classes, with random weights.

    Args:
        recipe: What to train.
        class_ids: The classes of the data; empty for a model without a head.
        start: If the recipe takes the network from ``model.start``, the config to use when a run resumes; by default
            the config of the start.
        task: What the head predicts.
    """
    count = len(class_ids)
    classes = recipe.model.num_classes or count
    if classes < count:
        raise ValueError(f"the data has {count} classes and the head {classes}; set model.num_classes={count} or null.")
    if start is None and recipe.model.is_of_start:
        start = _start_config(recipe)
    named = bool(class_ids) and classes == count
    try:
        config = recipe.model.config(
            num_classes=classes,
            class_ids=class_ids if named else None,
            labels=_labels(class_ids) if named else None,
            task=task,
            start=start,
        )
    except ValueError as error:
        raise ValueError(f"model: {error}") from error
    options = {"start_gates": recipe.model.start_gates} if config.kind == registry.DEFAULT_KIND else {}
    return registry.build(config, drop_path=recipe.model.drop_path, **options)


def start_model(model: RoundModel, recipe: Recipe) -> str | None:
    """Load the weights that the model starts from. Returns a line that says what was not copied."""
    start = recipe.model.start
    if start is None:
        if getattr(model.config, "frozen", False):
            raise ValueError(
                f"a model of the kind {model.config.kind} trains only its heads on a frozen backbone; name a trained "
                "one as model.start, or set model.fields.frozen=false."
            )
        return None
    fresh = start_from(model, start, fusion=recipe.model.start_fusion, as_prefix=recipe.model.start_as_prefix)
    parts = ", ".join(dict.fromkeys(name.partition(".")[0] for name in fresh))
    prefix = " as the leading channels" if recipe.model.start_as_prefix else ""
    return f"start: {start}{prefix}; not copied: {parts or 'nothing'}"


def _start_config(recipe: Recipe) -> BaseConfig:
    """The config of the model folder that the recipe starts from."""
    start = recipe.model.start
    assert start is not None, "a recipe without rounds has a start"
    if not is_local(start) and (start in OFFICIAL_MODELS or is_official_file(start)):
        rounds = OFFICIAL_MODELS[start].rounds if start in OFFICIAL_MODELS else ()
        resolutions, heads = ([getattr(round_, name) for round_ in rounds] for name in ("resolution", "heads"))
        own = f" (its own are {resolutions} and {heads})" if rounds else ""
        raise ValueError(
            f"model.start={start} is a checkpoint of the authors, from which only weights are read, not rounds; set "
            f"model.resolutions and model.heads{own}, or model.preset."
        )
    if not is_local(start):
        raise ValueError(
            f"model.start={start} is neither a model folder nor a bundled model, so the rounds are unknown; "
            f"{did_you_mean(start, BUNDLED)} Or set model.preset, or model.resolutions and model.heads."
        )
    return registry.read_config(find_folder(start))


def _labels(class_ids: tuple[str, ...]) -> tuple[str, ...]:
    """ImageNet's words for its folder names; other folder names are labels themselves."""
    info = ImageNetInfo()
    synsets = set(info.label_names())
    return tuple(info.label_name_to_description(name).split(",")[0] if name in synsets else name for name in class_ids)
