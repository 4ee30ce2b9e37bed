"""``progresvit bench`` as a user types it. But for one test, cases are measured here and not in fresh processes."""

import csv
import json

import pytest
from typer.testing import CliRunner

from progresvit.cli import app
from progresvit.cli.bench import MEMORY_BATCH, Wanted, plan
from progresvit.config import preset
from progresvit.engine import bench
from progresvit.engine.bench_case import Case, make_row
from progresvit.engine.bench_measure import measure


@pytest.fixture
def here(monkeypatch):
    """Measure in this process."""
    monkeypatch.setattr(bench, "run_cases", lambda cases: map(measure, cases))


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def works(*arguments):
    result = run(*arguments, "--seconds", 0.01, "--batch", 4)
    assert result.exit_code == 0, result.output
    return result.output


def refused(match, *arguments):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    last = result.output.strip().splitlines()[-1]
    assert last.startswith("error: "), result.output
    assert match in last
    assert "Traceback" not in result.output


def rows_of(path):
    return json.loads(path.read_text())["rows"]


@pytest.mark.slow
def test_a_quick_run_in_fresh_processes(model, tmp_path):
    output = works(model, "--quick", "--out", tmp_path / "b.json")
    assert "engine, routed" in output
    assert "times as fast as round by round, eager" in output
    engine, eager = rows_of(tmp_path / "b.json")
    assert (engine["subject"], eager["subject"]) == ("engine", "eager")
    assert engine["share_continuing"] == eager["share_continuing"] == pytest.approx(0.664, abs=1 / 32)
    assert engine["hardware"] == eager["hardware"]
    assert engine["torch"]


@pytest.mark.slow
def test_rows_rounds_curve_and_every_format(model, tmp_path, here):
    outs = [tmp_path / f"b.{suffix}" for suffix in ("json", "csv", "md", "png")]
    arguments = [part for path in outs for part in ("--out", path)]
    works(model, "--batches", "1,2", "--latency", *arguments)
    rows = rows_of(outs[0])
    assert [row["name"] for row in rows[:3]] == ["engine, routed", "engine, round 1 alone", "engine, round 2 alone"]
    curve = [row["share_continuing"] for row in rows[3:8]]
    assert curve == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=1 / 32)
    assert [row["batch"] for row in rows[8:10]] == [1, 2]
    assert [row["subject"] for row in rows if row["measure"] == "latency"] == ["engine", "eager"]
    assert len(list(csv.DictReader(outs[1].open()))) == len(rows)
    assert "| engine, routed |" in outs[2].read_text()
    assert outs[3].read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_real_pictures_give_an_accuracy(model, digits, tmp_path, here):
    output = works(model, "--quick", "--data", digits, "--thresholds", "0,inf", "--out", tmp_path / "b.json")
    assert "top-1" in output
    everyone, nobody, eager = rows_of(tmp_path / "b.json")
    assert [row["share_continuing"] for row in (everyone, nobody, eager)] == [1, 0, 1]
    assert everyone["images"] % 24 == 0
    assert everyone["top1"] == eager["top1"]
    assert everyone["case"]["pictures"] == f"{digits} (val)"


def test_memory_rows_have_processes_of_their_own_on_a_cpu():
    main = Case(subject="engine", model="progresvit_small_192_240", continuing=0.5)
    wanted = Wanted(batches=[], thresholds=[], shares=[], rounds=False, against=True, latency=True, memory=True)
    config = preset("progresvit_small_192_240")
    groups = plan(main, config, wanted)
    assert [case.name for case in groups[2]] == ["timm DeiT-S 224, eager"] * 2
    assert [(len(group), group[0].batch, group[0].memory) for group in groups[5:]] == [(1, MEMORY_BATCH, True)] * 5
    on_gpu = plan(Case(**{**main.to_dict(), "device": "cuda", "precision": "fp8"}), config, wanted)
    assert [len(group) for group in on_gpu] == [3] * 5
    assert {case.precision for group in on_gpu[1:] for case in group} == {"bf16"}


def test_what_fails_is_told_and_the_rest_goes_on(model, monkeypatch):
    def half(cases):
        return (make_row(case, error="no luck") if case.subject == "eager" else measure(case) for case in cases)

    monkeypatch.setattr(bench, "run_cases", half)
    output = works(model, "--quick")
    assert "failed: round by round, eager, batch 4: no luck" in output
    assert "engine, routed" in output
    monkeypatch.setattr(bench, "run_cases", lambda cases: (make_row(case, error="no luck") for case in cases))
    refused("nothing could be measured: no luck", model)


def test_wrong_arguments_are_refused_before_anything_is_measured(model, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "run_cases", lambda cases: pytest.fail("measured"))
    cpu = ("--device", "cpu")
    refused("the nearest are progresvit_tiny_160_224", "progresvit_tiny_160")
    refused("one image at least, not 0", model, *cpu, "--batch", 0)
    refused("one image at least, not 0", model, *cpu, "--batches", "4,0")
    refused("from 0 to 1, not 1.5", model, *cpu, "--continuing", 1.5)
    refused("from 0 to 1, not -0.1", model, *cpu, "--shares", "0.5,-0.1")
    refused("use one of them", model, "--continuing", 0.5, "--thresholds", 0.5)
    refused("fp8 needs a GPU; use fp32 or bf16", model, *cpu, "--precision", "fp8")
    refused("unknown backend 'magic'; choose", model, *cpu, "--backend", "magic")
    refused("there is no data at", model, *cpu, "--data", tmp_path / "nothing")
    refused("use .csv, .json", model, "--out", "x.doc")
    refused("no DeiT of 2 heads", model, *cpu, "--against")
