import pytest

import progresvit
from progresvit.model import ProgResViT
from tests.evaluation.made_segmentation import make_model
from tests.factories import digits_config


@pytest.fixture
def model(tmp_path, randomize):
    """The folder of a model for the digits."""
    return progresvit.save(randomize(ProgResViT(digits_config())), tmp_path / "model")


@pytest.fixture
def segmenter(tmp_path, randomize):
    """The folder of a segmentation model for the images of ``tests/evaluation/made_segmentation.py``."""
    return progresvit.save(make_model(randomize), tmp_path / "segmenter")
