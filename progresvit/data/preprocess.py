"""From a picture to the square, normalised image that a model takes."""

from collections.abc import Callable

from PIL.Image import Image
from timm.data import create_transform
from torch import Tensor

from progresvit.config import ModelConfig


def evaluation_transform(config: ModelConfig, *, as_bytes: bool = False) -> Callable[[Image], Tensor]:
    """Resize, centre crop and normalise at the config's input resolution: an RGB picture -> (C, r, r).

    As bytes it is not normalised yet.
    """
    transform: Callable[[Image], Tensor] = create_transform(
        input_size=(config.in_channels, config.input_side, config.input_side),
        is_training=False,
        interpolation="bicubic",
        crop_pct=config.crop,
        mean=config.mean,
        std=config.std,
        normalize=not as_bytes,
    )
    return transform
