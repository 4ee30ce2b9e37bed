import pytest

import progresvit
from progresvit.config import ModelConfig, make_rounds
from progresvit.model import ProgResViT


@pytest.fixture
def model(tmp_path, randomize):
    """The folder of a model for the digits."""
    config = ModelConfig(
        rounds=make_rounds([16, 32], [1, 2]), heads=2, depth=1, patch_size=8, num_classes=4, class_ids=tuple("0123")
    )
    return progresvit.save(randomize(ProgResViT(config)), tmp_path / "model")
