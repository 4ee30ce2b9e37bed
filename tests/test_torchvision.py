"""The one case that is mended, and that everything else is left alone."""

import runpy
import subprocess
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import progresvit

MEND = Path(progresvit.__file__).with_name("_torchvision.py")


class FakeTorchvision(MetaPathFinder, Loader):
    """Raises the errors of a list at its imports, one each; then it imports."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.tries = 0

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "torchvision" else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture
def install(monkeypatch):
    def put(*errors):
        fake = FakeTorchvision(*errors)
        monkeypatch.setattr(sys, "meta_path", [fake, *sys.meta_path])
        monkeypatch.delitem(sys.modules, "torchvision")
        return fake

    return put


def test_a_torchvision_that_imports_is_left_alone(install):
    fake = install()
    assert not runpy.run_path(MEND)["_declared"]
    assert fake.tries == 1


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), ImportError("no torchvision")])
def test_any_other_failure_is_passed_on(install, error):
    fake = install(error)
    with pytest.raises(type(error), match=str(error)):
        runpy.run_path(MEND)
    assert fake.tries == 1


@pytest.mark.slow
def test_missing_operators_are_declared_and_the_import_tried_again():
    """In a process of its own, in which no torchvision has declared them."""
    code = """
import sys
import torch
from tests.test_torchvision import FakeTorchvision, MEND, runpy
fake = FakeTorchvision(RuntimeError("operator torchvision::nms does not exist"))
sys.meta_path.insert(0, fake)
assert runpy.run_path(MEND)["_declared"] and fake.tries == 2
torch.ops.torchvision.qnms
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
