"""A cold ``classify``: fresh processes, their cost, and what they import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cold_start import run, seconds_by_package

from progresvit.engine.export.export import export

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LOG = """\
import time: self [us] | cumulative | imported package
import time:       100 |        100 |     torch._C
import time:      2000 |       2100 |   torch
import time:       700 |        700 |   numpy
some warning
import time:        50 |       2150 | progresvit
"""


def test_imports_are_added_up_by_package_slowest_first():
    seconds = seconds_by_package(LOG)
    assert list(seconds) == ["torch", "numpy", "progresvit"]
    assert seconds["torch"] == pytest.approx(0.0021)


def script(*arguments):
    """In a process of its own, which is smaller than this one: its memory counts in that of its commands."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=BENCHMARKS, capture_output=True, text=True, check=True
    ).stdout


def test_the_cost_is_that_of_the_command():
    code = """
import json, sys
from cold_start import run
work = "import sys; kept = b'1' * 2**29; sum(range(5_000_000)); print('done', file=sys.stderr)"
little, much = (run([sys.executable, "-c", command]) for command in ("pass", work))
print(json.dumps([little[0].peak_mib, much[0].peak_mib, little[0].cpu_seconds, much[0].cpu_seconds, much[1]]))
"""
    little_mib, much_mib, little_seconds, much_seconds, errors = json.loads(script("-c", code))
    assert little_mib < 256
    assert 512 < much_mib < 768
    assert little_seconds < much_seconds
    assert errors == "done\n"


def test_a_command_that_fails_is_reported():
    with pytest.raises(SystemExit, match=r"-c import nothing_like_it failed:\n(.|\n)*No module named"):
        run([sys.executable, "-c", "import nothing_like_it"])


@pytest.mark.long
def test_both_cases_are_measured_and_the_export_imports_no_torch(small_model, tmp_path):
    export(small_model, tmp_path / "export", threshold=0.5)
    words = ("--model", "nettewoof-tiny", "--export", str(tmp_path / "export"), "--runs", "1")
    printed = script("cold_start.py", *words, "--out", str(tmp_path / "cold.json"))
    assert "slowest imports" in printed
    rows = {row["case"]: row for row in json.loads((tmp_path / "cold.json").read_text())["rows"]}
    assert list(rows) == ["torch", "onnxruntime"]
    assert "torch" in rows["torch"]["imports"]
    assert "onnxruntime" in rows["onnxruntime"]["imports"]
    assert "torch" not in rows["onnxruntime"]["imports"]
    assert rows["torch"]["cost"]["peak_mib"] > rows["onnxruntime"]["cost"]["peak_mib"]
