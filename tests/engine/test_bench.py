import json
import math
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import progresvit
from progresvit import compute
from progresvit.config import make_rounds
from progresvit.engine import bench, bench_measure, bench_subjects
from progresvit.engine.bench import FreshProcess, run_case, run_cases
from progresvit.engine.bench_case import RESULTS, Case, deit_name, make_row
from progresvit.engine.bench_measure import measure, tflops
from progresvit.engine.bench_pool import find_model, split
from progresvit.engine.bench_subjects import deit_gmacs, folded_gmacs, open_subject
from progresvit.engine.fold import fold
from progresvit.model import ProgResViT

pytestmark = pytest.mark.slow

QUICK = {"seconds": 0.01, "batch": 4}


@pytest.fixture
def folder(small_model, tmp_path):
    return str(progresvit.save(small_model, tmp_path / "model"))


@pytest.fixture
def three_rounds(small_config, randomize, tmp_path):
    config = small_config.replace(rounds=make_rounds([16, 24, 32], [1, 1, 2]))
    return str(progresvit.save(randomize(ProgResViT(config)), tmp_path / "three"))


def routed(folder, **fields):
    return Case(**{"subject": "engine", "model": folder, "continuing": 0.664, "images": 40, **QUICK, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"subject": "eager"},
        {"subject": "eager", "precision": "bf16"},
        {"subject": "round", "round": 2, "continuing": None},
        {"measure": "latency", "batch": 1},
        {"subject": "eager", "measure": "latency", "batch": 1},
        {"subject": "round", "round": 1, "continuing": None, "measure": "latency", "batch": 1},
        {"memory": True},
    ],
    ids=str,
)
def test_rows_have_every_field_and_their_arithmetic_agrees(folder, small_config, fields):
    case = routed(folder, **fields)
    row = measure(case)
    assert set(RESULTS) < set(row)
    assert Case.from_dict(row["case"]) == case
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert row["error"] is None
    assert row["tflops"] == pytest.approx(2e9 * row["gmacs"] * row["images_per_s"] / 1e12)
    assert row["milliseconds"] == pytest.approx(1000 * case.batch / row["images_per_s"])
    gmacs = compute.cumulative_gmacs(small_config, "executed")
    if case.subject == "round":
        assert row["gmacs"] == pytest.approx(counted_gmacs(folder)[case.round - 1])
        assert row["share_continuing"] is None
    else:
        share = row["share_continuing"]
        assert row["exit_shares"] == pytest.approx([1 - share, share])
        if case.subject == "engine":
            gmacs = np.cumsum(counted_gmacs(folder)).tolist()
        assert row["gmacs"] == pytest.approx((1 - share) * gmacs[0] + share * gmacs[1])
    if case.measure == "latency":
        assert row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
    else:
        assert row["p50_ms"] is None
    assert (row["peak_gib"] is not None) == case.memory


def counted_gmacs(folder):
    """Of each round as the engine runs it, counted while it runs."""
    model, tokens, found = progresvit.load(folder), None, []
    for folded in fold(model):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            tokens = folded(torch.zeros(1, 3, 32, 32), tokens).tokens
        found.append(counter.get_total_flops() / 2e9)
    return found


@pytest.mark.parametrize("subject", ["engine", "eager"])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.664, 1.0])
def test_as_many_images_go_on_as_were_asked_for(folder, subject, share):
    row = measure(routed(folder, subject=subject, continuing=share))
    assert row["share_continuing"] == pytest.approx(share, abs=1.01 / 40)


def test_with_three_rounds_the_share_goes_on_after_each(three_rounds):
    row = measure(routed(three_rounds, continuing=0.5))
    assert row["exit_shares"] == pytest.approx([0.5, 0.25, 0.25])
    assert len(row["threshold"]) == 2
    assert measure(routed(three_rounds, continuing=0.5, subject="eager"))["exit_shares"] == row["exit_shares"]


def test_a_model_of_one_round_has_nobody_going_on(small_config, randomize, tmp_path):
    config = small_config.replace(rounds=make_rounds([32], [2]))
    one = str(progresvit.save(randomize(ProgResViT(config)), tmp_path / "one"))
    for subject in ("engine", "eager"):
        row = measure(routed(one, subject=subject))
        assert (row["exit_shares"], row["share_continuing"]) == ([1.0], None)


def test_a_given_threshold_is_used(folder):
    row = measure(routed(folder, continuing=None, threshold=(math.inf,)))
    assert (row["share_continuing"], row["threshold"]) == (0.0, ["inf"])
    assert Case.from_dict(row["case"]).threshold == (math.inf,)


def test_accuracy_is_that_of_the_given_pictures(folder, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (10, 3, 32, 32), dtype=np.uint8)
    found = progresvit.Engine(folder, 0.0).classify(pixels)
    labels = np.array([one.index for one in found])
    labels[-4:] = 99
    np.savez(tmp_path / "p.npz", pixels=pixels, labels=labels)
    for subject in ("engine", "eager"):
        row = measure(routed(folder, subject=subject, continuing=1.0, images=None, pictures=str(tmp_path / "p.npz")))
        assert row["top1"] == pytest.approx(8 / 12)  # two come again, to fill the last batch


def test_compiled_rounds_keep_the_share_over_many_batches(folder, small_config, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda work, **options: work)
    row = measure(routed(folder, subject="compiled"))
    share = row["share_continuing"]
    assert share == pytest.approx(0.664, abs=0.5 / bench_subjects.MIX + 1e-9)
    first, second = counted_gmacs(folder)
    assert folded_gmacs(small_config) == pytest.approx([first, second])
    assert row["gmacs"] == pytest.approx(first + share * second)
    alone = measure(routed(folder, subject="compiled", round=2, continuing=None))
    assert alone["gmacs"] == pytest.approx(second)


def test_folded_rounds_are_traced_in_one_graph(folder, monkeypatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda work, **options: real(work, backend="eager", **options))
    assert measure(routed(folder, subject="compiled"))["error"] is None


def test_timms_vit_is_counted_as_the_plain_vit_of_its_resolution():
    assert deit_gmacs(224, 6) == pytest.approx(4.6, abs=0.01)
    assert tflops(deit_gmacs(224, 6), 1000) == pytest.approx(2 * 4.6, abs=0.02)
    row = measure(Case(subject="deit", model=deit_name(3), resolution=64, batch=2, seconds=0.01))
    assert row["gmacs"] == pytest.approx(deit_gmacs(64, 3))
    assert row["name"] == "timm DeiT-Ti 64, eager"


def test_thresholds_split_between_two_images():
    entropies = [0.4, 0.1, 0.3, 0.2]
    assert [split(entropies, share) for share in (0, 0.25, 0.5, 1)] == [math.inf, pytest.approx(0.35), 0.25, 0.0]


def test_random_weights_are_the_same_each_time():
    first, second = (find_model("progresvit_tiny_160_224").state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_every_stretch_is_a_whole_number_of_passes(folder, monkeypatch):
    subject = open_subject(routed(folder))
    subject.build()
    ran = []
    monkeypatch.setattr(subject, "run", ran.append)
    monkeypatch.setattr(bench_measure, "_timed", lambda subject, passes, case: ran.append(passes) or 0.001 * passes)
    found = bench_measure.throughput(subject, routed(folder, seconds=0.1))
    assert found["images"] == 20 * 40  # a fifth of the seconds
    assert found["images_per_s"] == pytest.approx(40 / 0.001)
    assert ran[:3] == [1, 1, 20]
    assert set(ran[3:]) == {20}


def test_fresh_processes_give_rows_and_say_why_one_failed(folder):
    cases = [routed(folder), routed(folder + "-gone"), routed(folder, batch=2)]
    good, bad, after = run_cases(cases)
    assert (good["error"], after["error"]) == (None, None)
    assert good["images_per_s"] > 0
    assert after["batch"] == 2
    assert "gone" in bad["error"]
    assert bad["images_per_s"] is None
    assert bad["case"] == cases[1].to_dict()


def test_a_process_that_dies_or_takes_too_long_is_a_row_that_says_so(folder, monkeypatch):
    monkeypatch.setattr(bench.sys, "executable", "/bin/false")
    assert "ended with code 1" in run_case(routed(folder))["error"]
    with FreshProcess(timeout=0.2) as process:
        process._process = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert "took more than 0 s" in process.measure(routed(folder))["error"]


def test_running_out_of_memory_is_said_plainly(folder):
    case = routed(folder, batch=1024)
    assert bench._reason(torch.OutOfMemoryError("CUDA out of memory ..."), case).startswith(
        "out of memory with a batch of 1024"
    )
    assert bench._reason(RuntimeError(""), case) == "RuntimeError: no reason given"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"subject": "magic"}, "unknown subject 'magic'; choose engine"),
        ({"measure": "heat"}, "choose throughput, latency"),
        ({"precision": "fp4"}, "unknown precision"),
        ({"precision": "fp8"}, "fp8 needs a GPU; use fp32 or bf16"),
        ({"precision": "fp8", "device": "cuda", "subject": "eager"}, "fp8 is the engine's alone"),
        ({"device": "tpu"}, "choose cpu or cuda"),
        ({"device": "cuda", "backend": "openvino"}, "runs on the CPU"),
        ({"subject": "eager", "backend": "openvino"}, "torch's own"),
        ({"batch": 0}, "one image at least, not 0"),
        ({"measure": "latency"}, "use batch 1, not 4"),
        ({"threads": 0}, "threads are 1 or more"),
        ({"images": 0}, "one image at least"),
        ({"seconds": 0}, "above 0"),
        ({"continuing": 1.2}, "from 0 to 1, not 1.2"),
        ({"continuing": None}, "or a threshold"),
        ({"threshold": (0.5,)}, "one of the two"),
        ({"round": 1}, "counted from 1"),
        ({"resolution": 224}, "models have their own"),
    ],
    ids=str,
)
def test_cases_that_cannot_be_are_refused_with_a_remedy(changes, match):
    with pytest.raises(ValueError, match=match):
        routed("m", **changes)


def test_a_round_that_is_not_there_is_refused(folder):
    with pytest.raises(ValueError, match="rounds 1 to 2"):
        measure(routed(folder, subject="round", round=3, continuing=None))
    with pytest.raises(ValueError, match="no DeiT of 2 heads"):
        deit_name(2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_remedy_is_named(folder):
    with pytest.raises(ValueError, match="--device cpu"):
        measure(routed(folder, device="cuda"))


def test_a_case_is_known_again_whatever_its_seconds(folder):
    case = routed(folder, threshold=(math.inf,), continuing=None)
    row = json.loads(json.dumps(make_row(case)))
    assert case.same_as(row["case"])
    assert replace(case, seconds=9).same_as(row["case"])
    assert not replace(case, batch=5).same_as(row["case"])


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{}, {"subject": "eager"}, {"subject": "round", "round": 2, "continuing": None}])
def test_on_a_gpu_memory_is_measured(folder, fields):
    row = measure(routed(folder, device="cuda", precision="bf16", **fields))
    assert row["peak_gib"] > 0
    assert row["images_per_s"] > 0
