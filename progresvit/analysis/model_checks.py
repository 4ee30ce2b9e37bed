"""What an analysis needs of a model: blocks, a second round that builds on the first, classes."""

from __future__ import annotations

from progresvit.model.backbone import Backbone
from progresvit.model.interface import RoundModel


def need_backbone(model: RoundModel, what: str) -> Backbone:
    """The model; models without blocks are refused. ``what`` names the measurement."""
    if not isinstance(model, Backbone):
        raise ValueError(
            f"{what} are made of models with the ViT of this library, such as progresvit, thinkingvit or hydravit, not "
            f"of {type(model).__name__}."
        )
    return model


def check_handover(model: RoundModel, name: str) -> None:
    """Refuse models without a second round that sees the image and what round 1 hands on, or without classes."""
    does = f"{name} changes what round 1 hands on to round 2"
    check_rounds(model, name, does)
    if model.config.kind == "early_exit":
        raise ValueError(
            f"{does}, and the later rounds of a model of kind 'early_exit' see no image of their own; give a model of "
            "kind 'progresvit' or 'thinkingvit'."
        )


def check_rounds(model: RoundModel, name: str, does: str) -> None:
    """Refuse models without a second round that builds on the first, or without classes.

    ``does`` says why the analysis of this name needs one, as the beginning of a sentence.
    """
    config = model.config
    if len(config.rounds) < 2:
        raise ValueError(f"{does}, and this model has one round; give a model of two or more, such as imagenet-tiny.")
    if not config.routable:
        raise ValueError(
            f"{does}, and the rounds of a model of kind {config.kind!r} are alternatives; give a model whose rounds "
            "build on each other, such as one of kind 'progresvit' or 'thinkingvit'."
        )
    check_classifier(model, name)


def check_classifier(model: RoundModel, name: str) -> None:
    """Refuse models without classes to choose from."""
    if model.config.task != "classification" or not model.config.num_classes:
        what = "segments images" if model.config.task != "classification" else "has no head"
        raise ValueError(f"{name} measures the accuracy of a classifier, and this model {what}; give a classifier.")
