"""A model card, made of what the config says; a training adds its results."""

from __future__ import annotations

from collections.abc import Sequence

from progresvit.io.parse import count_of
from progresvit.model.interface import RoundModel

GENERATED = "Weights (SHA-256): "
"""Begins a line of the cards that a training writes. It tells the cards of other weights, and cards written by hand."""
CARD_NAME = "MODEL"
"""The model in the code of such a card, which knows no hub id."""
_PIPELINES = {"classification": "image-classification", "segmentation": "image-segmentation"}
_ENGINES = {"classification": "Engine", "segmentation": "SegmentationEngine"}


def make_card(
    model: RoundModel,
    repo_id: str,
    settings: Sequence[str] = (),
    *,
    title: str | None = None,
    about: Sequence[str] = (),
) -> str:
    """The README.md of a hub repository or a model folder.

    Args:
        model: The model of the repository.
        repo_id: The hub id or the folder, for the lines that load it.
        settings: Names of its calibrated settings.
        title: The heading; by default the name in the hub id.
        about: Lines about the model instead of the line about its settings.
    """
    config = model.config
    pipeline = _PIPELINES[config.task] if config.num_classes else "image-feature-extraction"
    engine = _ENGINES[config.task] if config.num_classes else "EmbeddingEngine"
    rows = [f"| {s} | {gmacs:.3f} |" for s, gmacs in enumerate(model.gmacs(), 1)]
    usage = [f'model = progresvit.load("{repo_id}")']
    if config.kind == "progresvit":
        usage.append(f'engine = progresvit.{engine}("{repo_id}")')
    named = f"Calibrated settings: {', '.join(settings)}.\n" if settings else "It has no calibrated settings.\n"
    lines = [
        "---",
        "library_name: progresvit",
        f"pipeline_tag: {pipeline}",
        "---",
        f"# {title or repo_id.rpartition('/')[2]}",
        "",
        f"A model of kind `{config.kind}` with {count_of(config.num_classes, 'class')}, for images of "
        f"{config.input_side} pixels.",
        "",
        "| round | cumulative GMACs |",
        "| --- | --- |",
        *rows,
        "",
        "```python",
        "import progresvit",
        "",
        *usage,
        "```",
        "",
        *(about or [named]),
    ]
    return "\n".join(lines)
