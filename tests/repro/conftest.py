import shutil

import pytest

from tests.repro.made import write_results, write_tested
from tests.repro.made_frontier import write_frontier


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A results folder that no test may change."""
    return write_results(tmp_path_factory.mktemp("made") / "results")


@pytest.fixture(scope="session")
def tested(tmp_path_factory):
    """Results of a comparison that declares tests; no test may change them."""
    return write_tested(tmp_path_factory.mktemp("tested") / "results")


@pytest.fixture(scope="session")
def frontier_folder(tmp_path_factory):
    """Results of a frontier with costs; no test may change them."""
    return write_frontier(tmp_path_factory.mktemp("frontier") / "results")


@pytest.fixture
def folder(made, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(made, tmp_path / "results")
