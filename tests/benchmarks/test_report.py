import json
from pathlib import Path

import pytest
from measure import Case, make_row
from report import bench_table, bench_title, inset_far, ratio_lines, ratios, throughput_figure

from progresvit.plots import new_figure, render

TRACKED = Path(__file__).parents[2] / "docs" / "figures" / "inference_h200.json"


def row(subject, rate, share=None, *, gmacs=1.0, error=None, p50=None, **fields):
    fields = {"model": "m", "batch": 8, "continuing": share, **fields}
    if subject == "deit":
        fields = {**fields, "model": "deit_small_patch16_224", "resolution": 224}
    return make_row(
        Case(subject=subject, **fields),
        images_per_s=rate,
        milliseconds=None if error else 8000 / rate,
        share_continuing=share,
        gmacs=gmacs,
        p50_ms=p50,
        error=error,
        hardware="a device",
        torch="2",
    )


ENGINE = [row("engine", 100 - 50 * share, share, gmacs=1 + share) for share in (0.664, 0.0, 0.5, 1.0)]
DEIT, EAGER = row("deit", 20.0, gmacs=4.6), row("eager", 25.0, 0.5, gmacs=1.5)


def test_a_routed_yardstick_is_compared_at_its_own_share_and_another_with_the_first_row():
    found = {one["yardstick"]: one["ratio"] for one in ratios([*ENGINE, DEIT, EAGER])}
    assert found == pytest.approx({"timm DeiT-S 224, eager fp32": 66.8 / 20, "round by round, eager fp32": 75 / 25})
    assert "3.34 times as fast as timm DeiT-S 224" in ratio_lines([*ENGINE, DEIT])[0]


def test_the_speed_is_divided_into_routing_and_kernels():
    plain = row("plain", 40.0, gmacs=4.6, model="progresvit_small_192_240", resolution=224)
    lines = ratio_lines([*ENGINE[:1], plain, DEIT])
    assert lines[-1] == "66.4% continuing, batch 8: routing: 1.67 against plain 224 in the same engine; kernels: 2.00"
    assert not any("routing" in line for line in ratio_lines([*ENGINE, DEIT]))


def test_latencies_are_compared_with_latencies_and_other_batches_and_failures_with_nothing():
    single = {"measure": "latency", "batch": 1}
    rows = [
        row("engine", 10.0, 0.5, p50=4.0, **single),
        row("eager", 10.0, 0.5, p50=6.0, **single),
        row("engine", 10.0, 0.5, batch=64),
        row("eager", None, 0.5, batch=64, error="out of memory"),
        row("eager", 9.0, 0.5, batch=64, measure="memory"),
    ]
    assert [one["ratio"] for one in ratios(rows)] == [1.5]


def test_each_backend_and_precision_has_its_own_ratio():
    rows = [row("engine", 50.0, 0.5, backend="openvino", precision=one) for one in ("fp32", "bf16")]
    assert [one["engine"] for one in ratios([*rows, EAGER])] == [
        "engine, routed, openvino fp32",
        "engine, routed, openvino bf16",
    ]


def test_the_table_leaves_out_empty_columns():
    rows = [*ENGINE, DEIT, row("eager", None, 0.5, error="no luck")]
    title = bench_title("m", rows)
    assert title.startswith("m (random weights) on a device, torch 2")
    heads, cells = bench_table(title, rows).cells()
    assert "p50, ms" not in heads
    assert "failed" in heads
    assert cells[0][:6] == ["engine, routed", "throughput", "fp32", "8", "66.8", "120"]


def test_speed_is_drawn_against_compute_for_one_batch():
    figure = throughput_figure([EAGER, *ENGINE, DEIT, row("engine", 3.0, 0.5, batch=1)], title="m")
    (axes,) = figure.axes
    curve, eager, deit = axes.lines
    assert curve.get_xdata() == pytest.approx([1, 1.5, 1.664, 2])
    assert curve.get_ydata() == pytest.approx([100, 75, 66.8, 50])
    assert (deit.get_xydata().tolist(), eager.get_xydata().tolist()) == ([[4.6, 20]], [[1.5, 25]])
    assert b"PNG" in render(figure, ".png")[:8]


def test_the_tracked_rows_give_the_published_ratios_and_their_figure():
    held = json.loads(TRACKED.read_text())
    rows = held["rows"]
    assert ratios(rows) == held["ratios"]
    assert len(throughput_figure(rows, title="m").axes[0].lines) == 9


def test_a_far_point_is_in_an_inset_and_a_near_one_is_not():
    _, axes = new_figure(title="", x="x", y="y")
    axes.plot([1, 2, 3], [1, 2, 3])
    axes.plot([4], [1], "o")
    assert inset_far(axes, bounds=(0.6, 0.6, 0.3, 0.3)) is None
    axes.plot([15], [7], "s")
    inset = inset_far(axes, bounds=(0.6, 0.6, 0.3, 0.3))
    assert [line.get_xydata().tolist() for line in inset.lines] == [[[15, 7]]]
    assert axes.get_xlim()[1] < 5
