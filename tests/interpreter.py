"""Runs checks of Triton kernels in its interpreter, which must be chosen before triton is imported: a fresh process."""

import json
import os
import subprocess
import sys
import traceback

import torch


def interpret(module):
    """The error of each check by its name, empty if it passed. ``module.run_checks`` runs in a fresh process."""
    code = f"from {module} import run_checks; run_checks()"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def report(checks):
    """Run the named functions in the process of the interpreter, and print the error of each."""
    errors = {}
    for name, check in checks.items():
        torch.manual_seed(0)
        try:
            check()
            errors[name] = ""
        except Exception:
            errors[name] = traceback.format_exc()
    print(json.dumps(errors))
