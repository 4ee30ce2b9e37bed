"""repro/dodo.py in this process: loaded with variables, and its tasks run by doit."""

import importlib.util
import signal
import sys
from pathlib import Path
from unittest import mock

from doit.cmd_base import ModuleTaskLoader
from doit.doit_cmd import DoitMain

DODO = Path(__file__).parents[2] / "repro" / "dodo.py"


def load(keep_signals=False, /, **variables):
    """The module as doit imports it; its signal handlers are removed again unless they are to be tested."""
    words = ["doit", *(f"{name}={value}" for name, value in variables.items())]
    spec = importlib.util.spec_from_file_location("dodo", DODO)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "argv", words), mock.patch.dict(sys.modules, {"dodo": module}):
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        spec.loader.exec_module(module)
    for number, handler in before.items() if not keep_signals else ():
        signal.signal(number, handler)
    return module


def doit(module, *words):
    """Exit code of ``doit run``."""
    return DoitMain(ModuleTaskLoader(vars(module))).run(["run", *words])
