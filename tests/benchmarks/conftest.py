import sys
from pathlib import Path

import pytest

import progresvit

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # the scripts import each other by name


@pytest.fixture
def folder(small_model, tmp_path):
    return str(progresvit.save(small_model, tmp_path / "model"))
