"""Studies of segmentation: results files, points, intervals, the page, and runs that cannot be compared."""

import shutil
from itertools import pairwise

import numpy as np
import pytest

from progresvit.metrics.miou import ClassCounts, influence_values, mean_iou
from repro.formats import SegmentationResult, read_measurement
from repro.segmentation import FIRST, FULL, SegmentationStudy
from repro.segmentation_tables import frontier_figure
from repro.store import read_results
from repro.study import commands_of, entries_of, load_study, read_study
from tests.repro.made import change, write_result
from tests.repro.made_segmentation import LABELS, RUNS, SEEDS, STUDY, result, write_segmentation

from repro.study import Places  # isort: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Results of the study; no test may change them."""
    return write_segmentation(tmp_path_factory.mktemp("made") / "results")


@pytest.fixture
def folder(made, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(made, tmp_path / "results")


def study_of(folder):
    return SegmentationStudy(read_results(folder), read_study(folder / "study.yaml"))


@pytest.fixture(scope="module")
def study(made):
    return study_of(made)


def naive_miou(counts, exits):
    """Pixel by pixel sums over images and classes."""
    ious = []
    for k in range(len(LABELS)):
        both = sum(counts.intersection[i, s, k] for i, s in enumerate(exits))
        union = sum(counts.labelled[i, s, k] + counts.predicted[i, s, k] for i, s in enumerate(exits)) - both
        ious.append(both / union)
    return sum(ious) / len(ious)


def test_counts_and_scores_survive_the_file(folder):
    read = read_measurement(folder / "ours-1.json")
    assert isinstance(read, SegmentationResult)
    counts = read.test.counts()
    assert counts.labelled.shape == (60, 2, 3)
    assert (counts.labelled.sum(axis=-1) == 1000).all()
    assert (counts.predicted.sum(axis=-1) == 1000).all()
    assert (counts.intersection <= np.minimum(counts.labelled, counts.predicted)).all()
    assert read.test.score_array().shape == (60, 2)
    assert set(read.test.windows) == {1, 2}


def test_the_mean_of_influence_values_is_the_miou_and_their_spread_that_of_a_bootstrap():
    random = np.random.default_rng(0)
    labelled = random.multinomial(500, (0.5, 0.3, 0.2, 0.0), 300)
    right = random.binomial(labelled, random.uniform(0.5, 1, 300)[:, None])
    counts = ClassCounts(right, labelled, right + np.roll(labelled - right, 1, axis=1))
    values = influence_values(counts)
    assert values.mean() == pytest.approx(float(mean_iou(ClassCounts(*(part.sum(axis=0) for part in counts)))))
    weights = random.multinomial(300, np.full(300, 1 / 300), 3000)  # (draws, N)
    drawn = mean_iou(ClassCounts(*(weights @ part for part in counts)))
    assert values.std() / 300**0.5 == pytest.approx(float(drawn.std()), rel=0.06)


def test_the_bands_of_the_plot_end_at_the_intervals_of_the_table(study):
    figure = frontier_figure(study)
    (axes,) = figure.axes
    bars = [part for one in axes.containers for part in one.lines[2]]  # of models of one round
    bands = [one for one in axes.collections if one not in bars]
    assert len(bands) == len(study.routed_runs)
    for run, band in zip(study.routed_runs, bands):
        corners = band.get_paths()[0].vertices
        for point, end in ((FIRST, corners[:, 0].min()), (FULL, corners[:, 0].max())):
            heights, row = corners[corners[:, 0] == end, 1], study.row(run, point)
            assert end == pytest.approx(row.gmacs)
            assert (heights.min(), heights.max()) == pytest.approx((100 * row.miou.lowest, 100 * row.miou.highest))
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(names) == len(set(names)) == len(study.runs) + 2
    assert names[-1].endswith(", ".join(study.drawn))


def test_points_are_those_of_a_naive_count(study):
    for run, seeds in study.runs.items():
        for one in seeds:
            exits = np.full(60, one.rounds - 1)
            assert one.full.miou == pytest.approx(naive_miou(one.test.counts, exits))
            assert one.full.gmacs == pytest.approx(1.5 * RUNS[run][0][-1])
            if one.rounds == 1:
                continue
            assert one.first.miou == pytest.approx(naive_miou(one.test.counts, 0 * exits))
            exits = np.where(one.test.scores[:, 0] < 0.3, 0, 1)
            point = one.at(0.3)
            assert point.miou == pytest.approx(naive_miou(one.test.counts, exits))
            spent = one.test.gmacs[np.arange(60), exits].mean()
            assert point.gmacs == pytest.approx(spent)
            assert point.exit_share == pytest.approx((exits == 0).mean())


def test_the_routed_threshold_is_chosen_on_the_validation_images(study):
    for one in study.ours:
        threshold = one.routed(0.01).threshold
        scores = np.sort(one.val.scores[:, 0])
        candidates = [0.0, *(sum(pair) / 2 for pair in pairwise(scores)), scores[-1] + 1]
        full = naive_miou(one.val.counts, np.ones(40, int))
        best, cheapest = 0.0, np.inf
        for candidate in candidates:
            exits = np.where(one.val.scores[:, 0] < candidate, 0, 1)
            spent = one.val.gmacs[np.arange(40), exits].sum()
            if naive_miou(one.val.counts, exits) >= full - 0.01 and spent < cheapest:
                best, cheapest = candidate, spent
        assert threshold == pytest.approx(best, rel=1e-6)
        assert 0 < one.routed(0.01).exit_share < 1


def test_ours_is_compared_at_the_gmacs_of_the_other(study):
    row = study.row("wide", "round 1")
    assert row.ours_gmacs <= row.gmacs == pytest.approx(3.0)
    plain = study.row("plain", "the model")
    differences = [one.within(7.5).miou - other.full.miou for one, other in zip(study.ours, study.runs["plain"])]
    assert plain.difference.mean == pytest.approx(np.mean(differences))
    assert plain.difference.lowest < plain.difference.mean < plain.difference.highest
    assert study.row("ours", "every round").difference is None


def test_blocks_of_frames_widen_intervals_and_keep_means(folder):
    plain = study_of(folder).row("plain", "the model")
    text = (folder / "study.yaml").read_text()
    (folder / "study.yaml").write_text(text.rstrip() + "\n  block: 7\n")
    study = study_of(folder)
    blocks = study.row("plain", "the model")
    assert study.drawn == ("seeds", "blocks of 7 images")
    assert blocks.miou.mean == pytest.approx(plain.miou.mean)
    assert blocks.difference.mean == pytest.approx(plain.difference.mean)
    assert blocks.miou.highest != pytest.approx(plain.miou.highest)


def test_the_order_of_exits_lies_between_chance_and_labels(study):
    order = study.exit_order("ours", 0.3)
    assert order.saving == pytest.approx(0.3, abs=0.03)
    assert order.by_chance < order.by_score.mean < order.by_error
    assert 0 < order.correlation < 1
    assert order.gap == pytest.approx(
        study.row("ours", "round 1").miou.mean - study.row("ours", "every round").miou.mean
    )


def test_certificates_bound_the_growth_of_the_pixel_error(study):
    certified = study.certified("ours", 0.2, 0.1)
    assert certified.images == 40
    assert 0 < certified.exit_share < 1
    assert 0 < certified.loss < 0.2
    assert certified.beyond == 0
    assert study.certified("ours", 0.05, 0.1).exit_share < certified.exit_share


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda values: values["test"].update(names="others"), "plain-2 were measured on other test images"),
        (lambda values: values["val"].update(names="others"), "plain-2 were measured on other val images"),
        (lambda values: values["data"].update(classes=7), "differ in data.classes"),
        (lambda values: values.update(precision="bf16"), "differ in precision"),
    ],
)
def test_runs_of_other_images_or_precisions_are_refused(folder, edit, message):
    change(folder / "plain-2.json", edit)
    with pytest.raises(ValueError, match=message):
        study_of(folder)


def test_a_missing_seed_is_refused(folder):
    (folder / "wide-3.json").unlink()
    with pytest.raises(ValueError, match="wide lacks seed 3, which ours has"):
        study_of(folder)


def test_another_training_compute_is_refused(folder):
    for seed in SEEDS:
        write_result(folder, result("plain", seed) | {"epochs": 20})
    with pytest.raises(ValueError, match="Train plain-1 for about 10"):
        study_of(folder)


def test_a_run_that_was_not_measured_is_named(folder):
    for seed in SEEDS:
        (folder / f"wide-{seed}.json").unlink()
    assert study_of(folder).missing == ["ThinkingViT"]


def test_damaged_counts_are_refused(folder):
    change(folder / "ours-1.json", lambda values: values["test"]["scores"].clear())
    with pytest.raises(ValueError, match="scores are of each round but the last"):
        read_results(folder)


def test_a_study_evaluates_validation_and_test_images(tmp_path):
    study = load_study("camvid")
    entry = entries_of(study)[0]
    words = [command.words for command in commands_of(study, entry, Places(data="D", runs=tmp_path))]
    assert [line[0] for line in words] == ["train", "evaluate", "evaluate"]
    assert "--split" not in words[1]
    assert words[2][words[2].index("--split") + 1] == "test"


def test_unknown_runs_of_a_study_are_refused(tmp_path):
    import yaml

    wrong = STUDY | {"segmentation": STUDY["segmentation"] | {"rows": {"ours": "ours", "one": "nowhere"}}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(wrong))
    with pytest.raises(ValueError, match="segmentation: unknown run 'nowhere'"):
        read_study(tmp_path / "study.yaml")
    wrong = STUDY | {"segmentation": STUDY["segmentation"] | {"ours": "nowhere"}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(wrong))
    with pytest.raises(ValueError, match="'nowhere' is not among the rows"):
        read_study(tmp_path / "study.yaml")
