import io
from functools import partial
from itertools import combinations

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from progresvit.analysis.routing_figures import frontier_figure, reliability_figure, risk_coverage_figure
from progresvit.evaluation import PublishedPoint, PublishedSeries, reliabilities, risk_coverage_curves
from progresvit.plots import BAND, COLOURS, COLUMN, in_lines, render
from tests.evaluation.made import make_records, of_imagenet


def lines(figure):
    return {line.get_label(): line.get_xydata() for line in figure.axes[0].lines}


def test_frontiers_of_several_models_lie_over_each_other():
    models = {"two": make_records(), "three": make_records(rounds=3)}
    figure = frontier_figure(models)
    result = lines(figure)
    for name, records in models.items():
        ends = np.column_stack([records.gmacs(), 100 * records.correct.mean(axis=0)])
        assert result[f"{name}: single rounds"] == pytest.approx(ends)
        assert result[name][0] == pytest.approx(ends[-1])  # from every round ...
        assert result[name][-1] == pytest.approx(ends[0])  # ... to the first alone
    assert "GMACs" in figure.axes[0].get_xlabel()
    assert "paper" in figure.axes[0].get_xlabel()


def test_the_legend_names_each_model_and_each_kind_of_mark_once():
    models = {"two": make_records(), "other": make_records(seed=1)}
    figure = frontier_figure(models, settings={"mine": 0.5})
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["two", "other", "single rounds", "near-lossless", "mine", BAND]


def test_the_title_says_what_near_lossless_exits_save():
    records = make_records()
    figure = frontier_figure({"m": records})
    saved = 1 - lines(figure)["m: near-lossless"][0, 0] / records.gmacs()[-1]
    assert (
        figure.axes[0].get_title().replace("\u00a0", " ").startswith(f"m: near-lossless exits save {100 * saved:.0f} %")
    )


def test_a_band_holds_the_curve_and_three_rounds_have_a_logarithmic_axis():
    figure = frontier_figure({"m": make_records()})
    (band,) = figure.axes[0].collections
    curve, corners = lines(figure)["m"], band.get_paths()[0].vertices
    assert corners[:, 1].min() < curve[:, 1].min()
    assert corners[:, 1].max() > curve[:, 1].max()
    assert figure.axes[0].get_xscale() == "linear"
    assert frontier_figure({"m": make_records(rounds=3)}).axes[0].get_xscale() == "log"


def test_three_rounds_have_a_second_curve_of_thresholds_per_round_and_the_title_says_how_it_was_chosen():
    records = make_records(2000, rounds=3)
    figure = frontier_figure({"m": records})
    curve = lines(figure)["m: thresholds per round, chosen on the other half of the images"]
    ends = np.column_stack([records.gmacs(), 100 * records.correct.mean(axis=0)])
    assert curve[[0, -1]] == pytest.approx(ends[[0, -1]])
    shared = lines(figure)["m"][::-1]
    middle = curve[(curve[:, 0] > 1.5 * ends[0, 0]) & (curve[:, 0] < ends[1, 0])]
    assert (middle[:, 1] - np.interp(middle[:, 0], *shared.T)).mean() > 1
    title = " ".join(figure.axes[0].get_title().split())
    assert "with thresholds per round, chosen on the other half of the images:" in title
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[-3:] == ["per round", "near-lossless, per round", BAND]
    assert not any("per round" in name for name in lines(frontier_figure({"m": make_records()})))


def test_a_pdf_has_the_width_of_a_column_and_its_legend_fits():
    figure = frontier_figure({"a model with quite a long name": make_records()}, settings={"mine": 0.5})
    render(figure, ".pdf")
    figure.draw_without_rendering()
    assert figure.get_size_inches()[0] == COLUMN
    assert figure.legends[0].get_window_extent().width <= figure.bbox.width


def test_a_long_title_has_lines_of_about_equal_length():
    first, second = in_lines("near-lossless exits save 12 % " * 3).split("\n")
    assert abs(len(first) - len(second)) < 20
    assert "\u00a0%" in first


def test_settings_are_marks_at_what_they_give():
    records = make_records()
    result = lines(frontier_figure({"m": records}, settings={"mine": 0.5, "all": 0.0}))
    assert result["m: all"] == pytest.approx(np.array([[records.gmacs()[-1], 100 * records.correct[:, -1].mean()]]))
    assert result["m: mine"][0, 0] < records.gmacs()[-1]


def test_a_setting_named_near_lossless_replaces_the_point_of_these_images():
    records = make_records()
    result = lines(frontier_figure({"m": records}, settings={"near-lossless": 0.0}))
    assert result["m: near-lossless"] == pytest.approx(result["m: single rounds"][-1:])


def test_models_without_early_exit_are_a_line_with_labels():
    points = {"224 px": (1.25, 0.73), "160 px": (0.6, 0.65)}
    figure = frontier_figure({"m": make_records()}, fixed={"plain": points})
    assert lines(figure)["plain"] == pytest.approx(np.array([[0.6, 65], [1.25, 73]]))
    assert {text.get_text() for text in figure.axes[0].texts} == set(points)


def make_published(count=12):
    point = partial(PublishedPoint, gmacs=0.02)
    crowd = [point(label=f"r = {number}", top1=60 + number / 100) for number in range(count)]
    sweep = [point(label="round 1", top1=50), PublishedPoint(label="τ = 0", top1=70, gmacs=0.05)]
    about = {"source": "a README", "comparisons": ("made",)}
    return (
        PublishedSeries(method="ToMe", points=tuple(crowd[: count // 2]), **about),
        PublishedSeries(method="ToMe", points=tuple(crowd[count // 2 :]), **about),
        PublishedSeries(method="sweep", points=tuple(sweep[::-1]), one_model=True, **about),
    )


def test_published_results_have_a_mark_for_each_method_and_labels_that_do_not_overlap():
    figure = frontier_figure({"m": of_imagenet(make_records())}, published=make_published())
    axes = figure.axes[0]
    assert lines(figure)["sweep"] == pytest.approx(np.array([[0.02, 50], [0.05, 70]]))
    marks = {(line.get_color(), line.get_marker()) for line in axes.lines if line.get_label() == "ToMe"}
    assert len(marks) == 1
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[-3:] == [BAND, "ToMe", "sweep"]
    assert "published points: GMACs as in their sources" in axes.get_xlabel()
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without lines to their points
    assert 0 < len(boxes) < 12  # some of a crowd have no place
    assert {text.get_text() for text in axes.texts} <= {f"r = {number}" for number in range(12)}
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert len(frontier_figure({"m": of_imagenet(make_records())}, published=make_published(2)).axes[0].texts) == 2


def test_more_methods_than_colours_are_distinguishable():
    sweep = make_published()[2]
    published = [sweep.model_copy(update={"method": f"method {number}"}) for number in range(2 * len(COLOURS))]
    figure = frontier_figure({"m": of_imagenet(make_records())}, published=published)
    looks = {(line.get_color(), line.get_marker()) for line in figure.axes[0].lines if "method" in line.get_label()}
    assert len(looks) == len(published)
    (measured,) = {line.get_color() for line in figure.axes[0].lines if line.get_label() == "m"}
    assert measured not in {colour for colour, _ in looks}


def test_a_label_is_nearest_to_its_point_or_has_a_line_to_it():
    spread = [(0.9, 71.7), (0.89, 71.6), (0.88, 71.8), (0.87, 71.5), (0.7, 71)]
    points = tuple(PublishedPoint(label=f"r = {gmacs}", top1=top1, gmacs=gmacs) for gmacs, top1 in spread)
    series = PublishedSeries(method="ToMe", source="a README", comparisons=("made",), points=points)
    figure = frontier_figure({"m": of_imagenet(make_records())}, published=[series])
    axes = figure.axes[0]
    figure.draw_without_rendering()
    at = {text.get_text(): axes.transData.transform(text.xy) for text in axes.texts}
    assert len(at) > 2
    with_line = [text for text in axes.texts if text.arrow_patch.get_visible()]
    assert 0 < len(with_line) < len(at)
    for text in set(axes.texts) - set(with_line):
        box = Text.get_window_extent(text)
        away = {name: np.hypot(*(point - point.clip(box.min, box.max))) for name, point in at.items()}
        assert min(away, key=away.get) == text.get_text()


def test_the_other_figures_show_their_numbers():
    records = make_records()
    curves = risk_coverage_curves(records, 0.5)
    result = lines(risk_coverage_figure(curves))
    label = f"routed (area {100 * curves['routed'].area:.2f} %)"
    assert result[label][-1] == pytest.approx([100, 100 * curves["routed"].risk[-1]])
    bins = reliabilities(records, threshold=0.5)
    label = f"round 2 (calibration error {100 * bins['round 2'].error:.2f} %)"
    figure = reliability_figure(bins)
    assert label in lines(figure)
    assert len(figure.axes[0].collections) == len(bins) + 1  # a band of each, and one in the legend
    errors = [100 * curve.error for curve in bins.values()]
    title = figure.axes[0].get_title().replace("\u00a0", " ")
    assert f"{min(errors):.2f} %" in title
    assert f"{max(errors):.2f} %" in title
    few, everyone = (100 * np.interp(share, curves["routed"].coverage, curves["routed"].risk) for share in (0.8, 1))
    title = risk_coverage_figure(curves).axes[0].get_title().replace("\n", " ")
    assert f"from {everyone:.1f} to {few:.1f}" in title


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_figures_are_rendered_in_every_format(suffix):
    content = render(frontier_figure({"m": make_records(60)}), f".{suffix}")
    assert {"png": b"PNG", "svg": b"<svg", "pdf": b"%PDF"}[suffix] in content[:1000]
    if suffix == "png":
        assert Image.open(io.BytesIO(content)).size[0] > 900
