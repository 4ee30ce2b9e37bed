import numpy as np
import pytest

from progresvit.analysis.shift_figure import shift_figure
from progresvit.evaluation.shift import ShiftedAnswers, ShiftSummary
from progresvit.plots import render


def summary(model, suite, full, routed=None, **fields):
    def answers(pair):
        return ShiftedAnswers(top1=pair[0], gmacs=pair[1])

    return ShiftSummary(
        model=model,
        suite=suite,
        **{"sets": (suite,), "images": 400, "names_sha256": "n", "threshold": 0.35, **fields},
        full=answers(full),
        routed=None if routed is None else answers(routed),
    )


OURS = "runs/ours/model"  # the model folder of a run has its name in the figure
FOGS = {"sets": ("fog_1", "fog_4")}
RESULTS = [
    summary(OURS, "imagenet-c", (0.6, 6.0), (0.59, 4.5), **FOGS),
    summary(OURS, "imagenet-v2", (0.7, 6.0), (0.7, 4.2)),
    summary("hub/deit", "imagenet-v2", (0.68, 4.6)),
    summary("hub/deit", "imagenet-c", (0.56, 4.6), **FOGS),
]


def places(axes):
    """The marks of a panel: x and y of each, by colour and whether it is open."""
    marks = {}
    for line in axes.lines:
        if line.get_marker() in ("o", "s"):
            filled = line.get_markerfacecolor() == line.get_color()
            marks.setdefault((line.get_marker(), filled), []).append(line.get_xydata()[0])
    return {key: np.array(sorted(points, key=lambda point: point[1])) for key, points in marks.items()}


def test_models_and_suites_are_beside_each_other_full_and_routed():
    figure = shift_figure(RESULTS)
    top1, gmacs = figure.axes
    assert [text.get_text() for text in top1.get_yticklabels()] == ["ImageNet-V2", "ImageNet-C"]
    assert {key: points[:, 0].round(6).tolist() for key, points in places(top1).items()} == {
        ("o", True): [70, 60],
        ("o", False): [70, 59],
        ("s", True): [68, 56],
    }
    shown = places(gmacs)
    assert {key: points[:, 0].round(6).tolist() for key, points in shown.items()} == {
        ("o", True): [6, 6],
        ("o", False): [4.2, 4.5],
        ("s", True): [4.6, 4.6],
    }
    rows = np.concatenate(list(shown.values()))[:, 1]
    assert len(set(rows)) == 6  # marks of a row do not overlap
    assert sorted(rows.round()) == [0, 0, 0, 1, 1, 1]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["ours", "ours, routed at τ = 0.35", "deit"]
    title = " ".join(figure.get_suptitle().replace("\u00a0", " ").split())
    assert title == "Under shift, routing changes top-1 by -1.00 to +0.00 points and saves 25 to 30 % of the GMACs"


def test_single_sets_have_intervals_and_means_over_sets_have_none():
    bars = shift_figure(RESULTS).axes[0].containers
    assert len(bars) == 3
    assert {round(bar.lines[0].get_ydata()[0]) for bar in bars} == {0}


def test_a_model_may_lack_a_suite_and_routing():
    figure = shift_figure([*RESULTS[1:3], summary("other/deit", "imagenet-a", (0.2, 4.6))])
    assert sum(map(len, places(figure.axes[1]).values())) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()][2:] == ["hub/deit", "other/deit"]
    figure = shift_figure(RESULTS[2:])
    assert "deit: top-1 of 56 to 68" in figure.get_suptitle()
    assert render(figure, ".pdf").startswith(b"%PDF")


def test_results_twice_or_on_other_images_are_refused():
    with pytest.raises(ValueError, match="runs/ours/model on imagenet-c is given twice"):
        shift_figure([RESULTS[0], *RESULTS])
    for other in ({"names_sha256": "m"}, {"images": 399}):
        with pytest.raises(ValueError, match="runs/ours/model and b were evaluated on different images of imagenet-v2"):
            shift_figure([*RESULTS, summary("b", "imagenet-v2", (0.7, 6.0), **other)])
