import pytest

import progresvit
from progresvit.model import ProgResViT
from tests.factories import digits_config


@pytest.fixture
def model(tmp_path, randomize):
    """The folder of a model for the digits."""
    return progresvit.save(randomize(ProgResViT(digits_config())), tmp_path / "model")
