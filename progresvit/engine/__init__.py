"""Inference: the engine, its backends and exports.

Importing this needs no torch; an export runs without it, a model imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from progresvit._lazy import lazily

if TYPE_CHECKING:
    from progresvit.engine.batcher import MemoryWarning
    from progresvit.engine.embedding import Embedding, EmbeddingEngine
    from progresvit.engine.engine import Engine
    from progresvit.engine.prediction import Candidate, Prediction
    from progresvit.engine.scheduler import Counts, EngineFull
    from progresvit.engine.segmentation import Segmentation, SegmentationEngine

__all__ = [
    "Candidate",
    "Counts",
    "Embedding",
    "EmbeddingEngine",
    "Engine",
    "EngineFull",
    "MemoryWarning",
    "Prediction",
    "Segmentation",
    "SegmentationEngine",
]

if not TYPE_CHECKING:  # a checker shall see the names above and no others
    __getattr__, __dir__ = lazily(
        __name__,
        homes={
            "Candidate": "prediction",
            "Counts": "scheduler",
            "Embedding": "embedding",
            "EmbeddingEngine": "embedding",
            "Engine": "engine",
            "EngineFull": "scheduler",
            "MemoryWarning": "batcher",
            "Prediction": "prediction",
            "Segmentation": "segmentation",
            "SegmentationEngine": "segmentation",
        },
    )
