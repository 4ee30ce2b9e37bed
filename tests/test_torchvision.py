"""The one case that is mended, and that everything else is left alone."""

import subprocess
import sys

import pytest

FAKE = """
import sys, types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
import torch

class Fake(MetaPathFinder, Loader):
    tries = 0
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "torchvision" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        Fake.tries += 1
        {behaviour}

sys.meta_path.insert(0, Fake())
"""


def run(behaviour, then):
    code = FAKE.format(behaviour=behaviour) + then
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_torchvision_that_imports_is_left_alone():
    result = run("pass", "import progresvit._torchvision as fix; assert not fix._declared and Fake.tries == 1")
    assert result.returncode == 0, result.stderr


def test_missing_operators_are_declared_and_the_import_tried_again():
    missing = 'if Fake.tries == 1: raise RuntimeError("operator torchvision::nms does not exist")'
    then = "import progresvit._torchvision as fix; assert fix._declared and Fake.tries == 2; torch.ops.torchvision.qnms"
    result = run(missing, then)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("error", ['RuntimeError("CUDA error")', 'ImportError("no torchvision")'])
def test_any_other_failure_is_passed_on(error):
    result = run(f"raise {error}", "import progresvit._torchvision")
    assert result.returncode != 0
    assert error.split("(")[0] in result.stderr
