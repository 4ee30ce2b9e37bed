"""Inference for real."""

import progresvit._torchvision  # noqa: F401  (ahead of timm)
from progresvit.engine.engine import Engine
from progresvit.engine.prediction import Prediction

__all__ = ["Engine", "Prediction"]
