"""``benchmarks/inference.py`` with made-up rows: what is measured, kept and shown."""

import json
import sys

import inference
import pytest
import torch
from measure import make_row

from progresvit import __version__


@pytest.fixture(autouse=True)
def _made_up_device(monkeypatch):
    monkeypatch.setattr(inference, "hardware", lambda device: f"a made-up {device}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def run(monkeypatch):
    """Runs the script with made-up rows; gives the names of what was measured."""

    def run(*arguments, fails=()):
        measured = []

        def made(case, *, timeout):
            measured.append((case.name, case.batch))
            results = {"images_per_s": 100.0 + case.batch, "milliseconds": 1.0, "gmacs": 1.0, "tflops": 0.2}
            latency = {"p50_ms": 1.0, "p95_ms": 1.0, "p99_ms": 1.0} if case.measure == "latency" else {}
            where = {"hardware": inference.hardware(case.device), "torch": torch.__version__, "version": __version__}
            results = {"error": "no luck"} if case.name in fails else {**results, **latency}
            return make_row(case, **results, **where)

        monkeypatch.setattr(inference, "run_case", made)
        monkeypatch.setattr(sys, "argv", ["inference.py", *map(str, arguments)])
        inference.main()
        return measured

    return run


@pytest.mark.long
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_second_run_measures_only_what_is_missing_or_failed(run, tmp_path, device, capsys):
    arguments = ("--device", device, "--out", tmp_path / "run")
    first = run(*arguments, fails={"round by round, eager"})
    assert "round by round, eager, batch 1: failed: no luck" in capsys.readouterr().out
    again = run(*arguments)
    assert again
    assert {name for name, _ in again} == {"round by round, eager"}
    assert run(*arguments) == []
    assert len(run(*arguments, "--fresh")) == len(first)
    held = json.loads((tmp_path / "run.json").read_text())
    assert len(held["rows"]) == len(first)
    assert held["ratios"]
    assert (tmp_path / "run.png").is_file()


def test_parts_can_be_measured_alone_and_other_rows_stay(run, tmp_path):
    arguments = ("--device", "cuda", "--out", tmp_path / "run")
    assert run(*arguments, "--only", "fp8,compiled") == [("engine, routed", 512), ("torch.compile, routed", 512)]
    run(*arguments, "--only", "fp8", "--batch", "256")
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert sorted(row["batch"] for row in rows) == [256, 512, 512]


def test_rows_of_another_machine_or_model_are_kept_and_not_looked_at(run, tmp_path, monkeypatch, capsys):
    arguments = ("--device", "cuda", "--out", tmp_path / "run", "--only", "fp8,eager")
    first = run(*arguments)
    monkeypatch.setattr(inference, "hardware", lambda device: "another one")
    capsys.readouterr()
    assert run(*arguments) == first
    assert run(*arguments, "--model", "progresvit_small_160_240")
    table = capsys.readouterr().out
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert len(rows) == 3 * len(first)
    assert table.count("engine, routed fp8 is") == 2
    (tmp_path / "odd.json").write_text("{}")
    with pytest.raises(SystemExit, match="holds no rows of this benchmark"):
        run("--device", "cuda", "--out", tmp_path / "odd", "--only", "fp8")


def test_the_whole_claim_is_among_the_parts(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["inference.py"])
    cases = [case for part in inference.cuda_parts(inference.parse()).values() for case in part]
    main = {(case.name, case.precision) for case in cases if case.batch == 512}
    assert main == {
        ("timm DeiT-S 224, compiled", "bf16"),
        ("timm DeiT-S 240, compiled", "bf16"),
        ("timm DeiT-S 384, compiled", "bf16"),
        ("round by round, eager", "bf16"),
        ("engine, plain DeiT-S 224", "bf16"),
        ("engine, plain DeiT-S 240", "bf16"),
        ("engine, round 1 alone", "bf16"),
        ("engine, round 2 alone", "bf16"),
        ("engine, routed", "bf16"),
        ("engine, routed", "fp8"),
        ("torch.compile, routed", "bf16"),
    }
    assert {case.batch for case in cases if case.name == "engine, routed"} == {2**power for power in range(11)}
    assert len([case for case in cases if case.measure == "memory" and case.batch == 128]) == 3
    assert len([case for case in cases if case.measure == "latency"]) == 4


def test_an_unknown_part_is_refused(run):
    with pytest.raises(SystemExit, match="no part 'magic'; choose among deit240"):
        run("--only", "magic")


def test_a_run_with_fewer_threads_than_cores_is_resumed_too(run, tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(inference, "hardware", lambda device: f"a made-up {device}, {torch.get_num_threads()} threads")
    try:
        torch.set_num_threads(threads + 1)
        arguments = ("--device", "cpu", "--threads", "1", "--out", tmp_path / "run", "--only", "eager")
        assert run(*arguments)
        rows = json.loads((tmp_path / "run.json").read_text())["rows"]
        assert {row["hardware"] for row in rows} == {"a made-up cpu, 1 threads"}
        torch.set_num_threads(threads + 1)
        assert run(*arguments) == []
    finally:
        torch.set_num_threads(threads)


def test_without_a_gpu_the_error_names_the_remedy(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device cpu"):
        run("--device", "cuda")
