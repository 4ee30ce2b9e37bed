"""Figures of a study show the numbers of the results, on axes that say what they are."""

import io
from itertools import combinations

import numpy as np
import pytest
from PIL import Image

from progresvit.metrics.interval import share_interval
from progresvit.plots import render
from repro import figures as draw
from repro.compare import line_up
from repro.outcomes import gather_outcomes
from repro.routing_tables import matched_title
from repro.store import read_results
from repro.study import read_study


@pytest.fixture(scope="module")
def results(made):
    return read_results(made)


@pytest.fixture(scope="module")
def compared(made, results):
    study = read_study(made / "study.yaml")
    return {name: line_up(results, study, name) for name in ("construction", "schedules")}


@pytest.fixture(scope="module")
def outcomes(tested):
    return gather_outcomes(read_results(tested), read_study(tested / "study.yaml"), "construction")


@pytest.fixture(scope="module")
def figures(results, compared, outcomes):
    routing = results.routing["routing"]
    both = {run: results.shift[f"shift_both-{run}"] for run in ("full", "plain")}
    return {
        "comparison": draw.comparison_figure(compared["schedules"]),
        "accuracy": draw.accuracy_figure(compared["construction"]),
        "accuracy of one round too": draw.accuracy_figure(compared["schedules"]),
        "tests": draw.tests_figure(outcomes),
        "thresholds": draw.routing_frontier_figure(routing),
        "gains": draw.gains_figure(routing.matched),
        "risk": draw.risk_figure(routing.abstention),
        "groups": draw.groups_figure(routing),
        "severities": draw.severity_figure(results.shift["shift"]),
        "severities beside a plain model": draw.severity_figure(both["full"], beside={"plain": both["plain"]}),
        "shifted": draw.shifted_accuracy_figure({run: (result,) for run, result in both.items()}),
    }


def lines(figure, panel=0):
    return {line.get_label(): line.get_xydata() for line in figure.axes[panel].lines}


def legend(figure):
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


def on_frontier(points):
    return np.array([[point.gmacs_paper, 100 * point.top1] for point in points])


def test_every_axis_has_a_name_and_numbers_have_units(figures):
    for name, figure in figures.items():
        for axes in figure.axes:
            if not axes.get_xlabel() and name == "gains":
                continue  # panels above others share their axis
            assert any(unit in axes.get_xlabel() for unit in ("GMACs", "(%)", "points", "severity", "nats")), name
        first = figure.axes[0]
        named = [label.get_text() for label in first.get_yticklabels()]
        assert "(%)" in first.get_ylabel() or "points" in first.get_ylabel() or not named[0].isdigit(), name


def test_every_figure_has_a_legend_that_lies_over_no_data(figures):
    for name, figure in figures.items():
        if name == "gains":
            continue  # its panels have names
        assert legend(figure), name
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
        assert box.x0 >= 0, name
        assert box.x1 <= figure.bbox.x1, name
        for axes in figure.axes:
            assert axes.get_legend() is None, name
            assert not axes.get_window_extent().overlaps(box), name


def test_frontiers_are_means_over_seeds_with_bands_and_rounds_are_those_of_each_seed(figures, results, compared):
    figure = figures["comparison"]
    found = lines(figure)
    for label, run, seeds in (("160→224", "full", (1, 2)), ("128→176→224", "three", (1,))):
        of_seeds = [results.runs[f"{run}-{seed}"] for seed in seeds]
        curve = found[f"{label}: every threshold"]
        means = [np.interp(curve[:, 0], *on_frontier(sorted(one.frontier, key=by_cost)).T) for one in of_seeds]
        assert curve[:, 1] == pytest.approx(np.mean(means, axis=0))
        stars = np.mean([on_frontier([one.near_lossless])[0] for one in of_seeds], axis=0)
        assert found[f"{label}: near-lossless"][0] == pytest.approx(stars)
        for one in of_seeds:
            rounds = found[f"{label}, seed {one.seed}: each round alone"]
            assert rounds[:, 1] == pytest.approx(np.array(one.rounds.right) / 0.4)
            assert rounds[:, 0] == pytest.approx(one.rounds.gmacs_paper, rel=0.1 if len(seeds) > 1 else 1e-9)
    apart = [found[f"160→224, seed {seed}: each round alone"][0, 0] for seed in (1, 2)]
    assert apart[0] != apart[1]  # seeds side by side
    assert "plain ViT: every threshold" not in found  # one round is a point
    assert found["plain ViT, seed 1: each round alone"].shape == (1, 2)
    assert legend(figure)[:4] == ["160→224", "128→176→224", "plain ViT", "near-lossless"]
    assert "band" in legend(figure)[4]
    saved = [100 * row.saving for row in compared["schedules"].rows if row.near_lossless and row.rounds > 1]
    assert f"save {min(saved):.0f}" in figure.axes[0].get_title()


def by_cost(point):
    return point.gmacs_paper


def test_a_band_is_the_interval_of_the_images_and_many_rounds_have_a_logarithmic_axis(figures, results):
    routing = results.routing["routing"]
    (band,) = figures["thresholds"].axes[0].collections
    corners = band.get_paths()[0].vertices
    point = routing.frontier[0]
    end = share_interval(round(point.top1 * routing.data.val), routing.data.val)
    heights = corners[np.isclose(corners[:, 0], point.gmacs_paper), 1]
    assert (heights.min(), heights.max()) == pytest.approx((100 * end.lowest, 100 * end.highest))
    assert figures["comparison"].axes[0].get_xscale() == "log"
    assert figures["thresholds"].axes[0].get_xscale() == "linear"


def test_seeds_are_dots_and_differences_have_their_intervals(figures, compared):
    rows = compared["construction"].rows
    dots = lines(figures["accuracy"])
    assert dots["+ PSG: full path"][:, 0] == pytest.approx([100 * share for share in rows[1].top1_of_seeds(-1)])
    assert dots["width only: round 1"][:, 0] == pytest.approx([100 * share for share in rows[0].top1_of_seeds(0)])
    bars = {one.get_label(): one for one in figures["accuracy"].axes[1].containers}
    assert set(bars) == {"+ PSG: round 1", "+ PSG: full path"}
    difference = rows[1].less(rows[0], -1)
    data, _, (bar,) = bars["+ PSG: full path"].lines
    assert data.get_xdata() == pytest.approx([100 * difference.mean])
    assert bar.get_segments()[0][:, 0] == pytest.approx([100 * difference.lowest, 100 * difference.highest])
    assert figures["accuracy"].axes[1].get_xlabel() == "points over the row above"
    assert figures["accuracy of one round too"].axes[1].get_xlabel() == "points over 160→224"


def test_tests_have_their_intervals_and_margins(figures, outcomes):
    top1, losses = ({one.get_label(): one for one in axes.containers} for axes in figures["tests"].axes)
    names = {"PSG: round 1", "PSG: full path", "rounds: full path", "alternatives: round 1", "alternatives: full path"}
    assert set(top1) == set(losses) == names
    psg = outcomes.measured[0]
    for bars, found, scale in ((top1, psg.last.top1, 100), (losses, psg.last.log_loss, 1)):
        data, _, (bar,) = bars["PSG: full path"].lines
        assert data.get_xdata() == pytest.approx([scale * found.mean])
        assert bar.get_segments()[0][:, 0] == pytest.approx([scale * found.lowest, scale * found.highest])
    margins = [lines(figures["tests"])[f"{one.label}: margin"][0, 0] for one in outcomes.measured]
    assert margins == [0.46, 20, 1]
    assert legend(figures["tests"]) == ["round 1", "full path", "margin, full path"]


def test_rounds_that_are_alternatives_are_points_without_a_frontier(tested):
    study = read_study(tested / "study.yaml")
    drawn = lines(draw.comparison_figure(line_up(read_results(tested), study, "construction")))
    assert "width only: every threshold" in drawn
    assert not {"widths: every threshold", "widths: near-lossless"} & set(drawn)
    assert drawn["widths, seed 1: each round alone"].shape == (2, 2)


def test_thresholds_lie_where_they_lead_and_equal_ones_share_a_mark(figures, results):
    found = lines(figures["thresholds"])
    settings = {one.name: one.point for one in results.routing["routing"].settings}
    assert found["near-lossless, careful"] == pytest.approx(on_frontier([settings["near-lossless"]]))
    assert found["drop-1"] == pytest.approx(on_frontier([settings["drop-1"]]))


def test_gains_risks_and_groups_are_those_of_the_results(figures, results):
    routing = results.routing["routing"]
    bars = {one.get_label(): one for axes in figures["gains"].axes for one in axes.containers}
    titles = [axes.get_title().replace("\n", " ") for axes in figures["gains"].axes if axes.containers]
    assert titles == list(bars) == [matched_title(one) for one in routing.matched]  # a panel for each
    one = routing.matched[1]
    data, _, (bar,) = bars[matched_title(one)].lines
    assert data.get_ydata() == pytest.approx(100 * (np.array(one.router_top1) - np.array(one.entropy_top1)))
    assert [segment[:, 1].tolist() for segment in bar.get_segments()] == [
        pytest.approx([100 * low, 100 * high]) for low, high in zip(one.lowest, one.highest)
    ]
    curve = routing.abstention[0]
    risks = lines(figures["risk"])["round 1"]
    assert risks == pytest.approx(100 * np.column_stack([curve.coverage, curve.risk]))
    assert "round 1 (mean 6.00 %)" in legend(figures["risk"])
    group = routing.groups[0]
    assert lines(figures["groups"])["easy ten"][:, 0] == pytest.approx([100 * at.exit_shares[0] for at in group.at])


def test_severities_are_those_of_the_results(figures, results):
    shift = results.shift["shift"]
    found = lines(figures["severities"])
    for one in shift.severities:
        name = f"severity {one.severity}" if one.severity else "clean"
        assert found[name] == pytest.approx(on_frontier(one.frontier))
    at = [one.at[0] for one in shift.sets if one.severity == 2]
    assert found["severity 2: near-lossless"] == pytest.approx(on_frontier(at).mean(axis=0, keepdims=True))
    shifted = lines(figures["shifted"])
    plain = results.shift["shift_both-plain"]
    means = [100 * np.mean([one.top1[0] for one in plain.sets if one.severity == level]) for level in (0, 1, 3)]
    assert shifted["plain: full path"] == pytest.approx(np.column_stack([[0, 1, 3], means]))
    assert "full: near-lossless" in shifted
    assert "plain: near-lossless" not in shifted


def test_a_plot_holds_the_hash_of_its_data(figures):
    content = render(figures["risk"], ".png", metadata={"progresvit-data": "abc"})
    assert Image.open(io.BytesIO(content)).info["progresvit-data"] == "abc"


def test_a_plain_model_stands_beside_each_severity(results, figures):
    plain = results.shift["shift_both-plain"]
    drawn = lines(figures["severities beside a plain model"])
    for severity in {one.severity for one in plain.sets}:
        top1 = np.mean([one.top1[-1] for one in plain.sets if one.severity == severity])
        name = f"severity {severity}" if severity else "clean"
        np.testing.assert_allclose(drawn[f"{name}: plain"], [[plain.gmacs_paper[-1], 100 * top1]])
    assert "plain" in legend(figures["severities beside a plain model"])


@pytest.mark.parametrize("name", ["gains", "tests", "accuracy"])
def test_titles_and_labels_of_panels_do_not_meet_in_a_column(name, results, compared, outcomes):
    figure = {
        "gains": lambda: draw.gains_figure(results.routing["routing"].matched),
        "tests": lambda: draw.tests_figure(outcomes),
        "accuracy": lambda: draw.accuracy_figure(compared["construction"]),
    }[name]()
    render(figure, ".pdf")
    figure.draw_without_rendering()
    texts = [text for axes in figure.axes for text in (axes.title, axes.xaxis.label) if text.get_text()]
    boxes = [text.get_window_extent() for text in (*texts, *figure.texts)]
    assert not any(one.overlaps(two) for one, two in combinations(boxes, 2))
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
