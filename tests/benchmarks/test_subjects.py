"""The subjects of the inference benchmark, measured in this process."""

import json

import pytest
import torch
from measure import RESULTS, Case, case_key, deit_name, measure, run_case
from subjects import MIX, deit_gmacs, folded_gmacs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from progresvit import compute
from progresvit.engine.fold import fold


def case(folder, **fields):
    routed = {"subject": "engine", "model": folder, "continuing": 0.664, "images": 40, "seconds": 0.01, "batch": 4}
    return Case(**{**routed, **fields})


@pytest.fixture
def counted_gmacs(small_model):
    """Of each round as the engine runs it, counted while it runs."""
    tokens, found = None, []
    for folded in fold(small_model):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            tokens = folded(torch.zeros(1, 3, 32, 32), tokens).tokens
        found.append(counter.get_total_flops() / 2e9)
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"subject": "eager", "precision": "bf16"},
        {"subject": "round", "round": 2, "continuing": None},
        {"measure": "latency", "batch": 1},
        {"subject": "round", "round": 1, "continuing": None, "measure": "latency", "batch": 1},
    ],
    ids=str,
)
def test_rows_have_every_field_and_their_arithmetic_agrees(folder, small_config, counted_gmacs, fields):
    wanted = case(folder, **fields)
    row = measure(wanted)
    assert set(RESULTS) < set(row)
    assert row["error"] is None
    assert Case(**json.loads(json.dumps(row))["case"]) == wanted
    assert row["tflops"] == pytest.approx(2e9 * row["gmacs"] * row["images_per_s"] / 1e12)
    assert row["milliseconds"] == pytest.approx(1000 * wanted.batch / row["images_per_s"])
    assert (row["p50_ms"] is not None) == (wanted.measure == "latency")
    if wanted.subject == "round":
        assert row["gmacs"] == pytest.approx(counted_gmacs[wanted.round - 1])
        assert row["share_continuing"] is None
        return
    share = row["share_continuing"]
    assert row["exit_shares"] == pytest.approx([1 - share, share])
    first, last = compute.cumulative_gmacs(small_config, "executed")
    if wanted.subject == "engine":
        first, last = counted_gmacs[0], sum(counted_gmacs)
    assert row["gmacs"] == pytest.approx((1 - share) * first + share * last)


def test_compiled_rounds_keep_the_share_over_many_batches(folder, small_config, counted_gmacs, monkeypatch):
    real = torch.compile  # traced whole, but not built
    monkeypatch.setattr(torch, "compile", lambda work, **options: real(work, backend="eager", **options))
    row = measure(case(folder, subject="compiled"))
    share = row["share_continuing"]
    assert share == pytest.approx(0.664, abs=0.5 / MIX + 1e-9)
    assert folded_gmacs(small_config) == pytest.approx(counted_gmacs)
    assert row["gmacs"] == pytest.approx(counted_gmacs[0] + share * counted_gmacs[1])


def test_timms_vit_is_counted_as_the_plain_vit_of_its_resolution():
    assert deit_gmacs(224, 6) == pytest.approx(4.6, abs=0.01)
    row = measure(Case(subject="deit", model=deit_name(3), resolution=64, batch=2, seconds=0.01))
    assert row["gmacs"] == pytest.approx(deit_gmacs(64, 3))
    assert row["name"] == "timm DeiT-Ti 64, eager"
    with pytest.raises(ValueError, match="no DeiT of 2 heads"):
        deit_name(2)


def test_a_fresh_process_that_fails_or_is_late_gives_a_row_with_the_reason(folder):
    gone = run_case(case(folder + "-gone"), timeout=200)
    assert "-gone" in gone["error"]
    assert gone["images_per_s"] is None
    assert "took more than 0 s" in run_case(case(folder), timeout=0.01)["error"]


def test_a_case_is_recognised_whatever_its_duration_and_in_rows_of_an_earlier_version(folder):
    old = {"subject": "engine", "model": folder, "continuing": 0.664, "images": 40, "batch": 4, "memory": False}
    old |= {"measure": "throughput", "device": "cpu", "precision": "fp32", "kernels": None, "seconds": 9.0}
    assert case(folder).key == case_key(old)
    assert case(folder, batch=5).key != case_key(old)
    assert case(folder, continuing=0.0).key != case(folder, continuing=None).key


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{}, {"subject": "eager"}, {"subject": "round", "round": 2, "continuing": None}])
def test_on_a_gpu_memory_is_measured(folder, fields):
    row = measure(case(folder, device="cuda", precision="bf16", **fields))
    assert row["peak_gib"] > 0
    assert row["images_per_s"] > 0
