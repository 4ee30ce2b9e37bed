"""Studies of self-supervised models: evaluation, starts, training compute, curves and the page."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from doit.exceptions import InvalidDodoFile

from progresvit.compute import cumulative_gmacs
from progresvit.config import ModelConfig, make_rounds
from progresvit.evaluation import read_records
from progresvit.training.recipe import load_recipe
from repro import frontier_figures, page, self_supervised
from repro.blocks import Page
from repro.compare import crossed_difference, gather
from repro.equal import check_equal, dino_gmacs, training_pmacs
from repro.formats import TrainingCurves, to_json
from repro.measure import entries
from repro.measure.entries import measure_curves
from repro.measure.records import data_of, measure_probe
from repro.store import read_results
from repro.study import Places, commands_of, entries_of, load_study, read_study, reader_commands
from tests.repro.made import change
from tests.repro.made_dino import write_dino
from tests.repro.test_digits_study import carry_out
from tests.repro.test_study import write

REPRO = Path(__file__).parents[2] / "repro"
NO_MORE = {"comparisons": {}, "routing": {}, "shift": {}}
OPTIONS = "task_options={local_crops: 2, local_side: 16, prototypes: 16, hidden: 8, bottleneck: 4, k: 3}"
SMALL = ["model.resolutions=[16, 32]", "model.heads=[1, 2]", "model.patch_size=8", "model.depth=1"]
SMALL += ["optimizer.batch=16", "schedule.warmup=0", "schedule.epochs=2", "data={mode: loader, workers: 0}"]
SMALL += ["run={log_every: 1}"]
TOY = {
    "title": "Toy",
    "data": "four digits",
    "recipe": "dino_photos",
    "set": SMALL,
    "runs": {
        "ours": {"set": [OPTIONS], "task": "knn", "evaluate": ["--k", "3"], "seeds": [1]},
        "probe": {"of": "ours", "task": "linear", "evaluate": ["--epochs", "1", "--blocks", "1"]},
        "after": {"recipe": "digits", "seeds": [1], "start": "ours", "set": ["schedule.cooldown=0"]},
    },
    "frontiers": {"knn": {"title": "k-NN", "ours": "ours", "rows": {"ours": "ours"}, "margin": 1}},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Results of the study dino; no test may change them."""
    return write_dino(tmp_path_factory.mktemp("dino") / "results")


@pytest.fixture
def folder(made, tmp_path):
    """Those that a test may change."""
    return shutil.copytree(made, tmp_path / "results")


def study_with(tmp_path, runs, **changes):
    return load_study(write(tmp_path / "made.yaml", runs=runs, **NO_MORE | changes))


def entry_of(study, name):
    return next(entry for entry in entries_of(study) if entry.name == name)


def test_a_run_says_how_its_model_is_evaluated(tmp_path):
    runs = {"one": {"seeds": [1], "task": "knn"}}
    runs["probe"] = {"of": "one", "task": "linear", "evaluate": ["--epochs", "20"]}
    runs["merged"] = {"of": "one", "task": "knn", "merge": [2]}
    study = study_with(tmp_path, runs)
    commands = {name: reader_commands(study, entry_of(study, f"{name}-1")) for name in runs}
    model = "progresvit evaluate RUNS/one-1/model --data DATA"
    assert commands["one"][1] == f"{model} --task knn --out RUNS/records/one-1.parquet"
    assert commands["probe"] == (f"{model} --task linear --epochs 20 --out RUNS/records/probe-1.parquet",)
    assert commands["merged"] == (f"{model} --merge 2 --task knn --out RUNS/records/merged-1.parquet",)


def test_a_run_starts_from_the_model_of_another_with_the_same_seed(tmp_path):
    study = study_with(tmp_path, {"one": {"seeds": [1, 2]}, "two": {"seeds": [2], "start": "one"}})
    entry = entry_of(study, "two-2")
    words = commands_of(study, entry, Places(data="D", runs=Path("/here/runs")))[0].words
    assert "model.start=/here/runs/one-2/model" in words
    assert "--set model.start=RUNS/one-2/model --set seed=2" in reader_commands(study, entry)[0]
    assert study.load_recipe_of("two").model.start == "one"  # as results files hold it: seeds have it in common


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ({"one": {"merge": [2]}}, "name that run with of:"),
        ({"one": {}, "two": {"of": "one"}}, "add merge or task"),
        ({"one": {}, "two": {"of": "one", "task": "knn", "start": "one"}}, "remove recipe, set, seeds, start and data"),
        ({"one": {"evaluate": ["--k", "3"]}}, "add task, or remove evaluate"),
        ({"one": {"task": "knnn"}}, "runs.one.task"),
        ({"one": {"start": "two"}, "two": {"start": "one"}}, "one starts from two starts from one; start one"),
        ({"one": {"start": "onee"}}, "start: 'onee' is not a trained run, did you mean 'one'"),
        ({"one": {"seeds": [1]}, "two": {"seeds": [2], "start": "one"}}, "one is not trained with seed 2; add it"),
    ],
)
def test_runs_that_cannot_be_are_refused(tmp_path, runs, message):
    with pytest.raises(ValueError, match=message):
        entries_of(study_with(tmp_path, runs))


def test_images_without_labels_are_given_to_the_runs_of_dino_alone():
    study = load_study("dino", ["run.log_every=7"], unlabelled="/data/more")
    given = {name for name in study.runs if "task_options.unlabelled=/data/more" in study.recipe_of(name)[1]}
    assert {name for name in study.runs if study.load_recipe_of(name).task == "dino"} == given
    assert not [name for name in given if name.startswith("supervised")]
    command = reader_commands(study, entry_of(study, "progressive-1"))[0]
    assert "--set task_options.unlabelled=more" in command  # the reader has no such folder
    with pytest.raises(ValueError, match="unlabelled: digits has no run with the task dino"):
        load_study("digits", unlabelled="more")


def gmacs_of(resolutions, heads, psg=True):
    rounds = make_rounds(resolutions, heads)
    return cumulative_gmacs(ModelConfig(rounds=rounds, heads=heads[-1], psg=psg, num_classes=0))[-1]


def test_training_compute_of_dino_is_that_of_all_crops_in_all_rounds():
    options = ["task_options={local_crops: 6, local_side: 64}", "model={resolutions: [112, 160], heads: [2, 3]}"]
    recipe = yaml.safe_load(load_recipe("dino_photos", options).to_yaml())
    large, small = gmacs_of([112, 160], [2, 3]), gmacs_of([48, 64], [2, 3])  # 64 px of 160 are 45 of 112: 3 patches
    assert dino_gmacs(recipe) == pytest.approx(3 * (2 * large + 6 * small) + 2 * large)
    recipe["task_options"]["local_crops"] = 0
    assert dino_gmacs(recipe) == pytest.approx(8 * large)
    recipe["model"]["merge"] = [1, 1]  # of the evaluation; nothing is merged in training
    assert dino_gmacs(recipe) == pytest.approx(8 * large)


def test_runs_of_the_study_have_equal_training_compute(made):
    runs = read_results(made).runs
    ours, plain = training_pmacs(runs["progressive-1"]), training_pmacs(runs["plain-1"])
    assert plain / ours == pytest.approx(1, abs=0.03)
    assert training_pmacs(runs["progressive-linear-1"]) == ours
    study = read_study(made / "study.yaml")
    for frontier in study.frontiers.values():
        check_equal([runs[f"{run}-{seed}"] for run in frontier.rows.values() for seed in (1, 2)], "compute", "it")


def test_what_a_run_starts_from_is_not_counted(made):
    runs = read_results(made).runs
    assert training_pmacs(runs["supervised-dino-1"]) == training_pmacs(runs["supervised-scratch-1"])


@pytest.mark.parametrize(("others", "message"), [("progressive-linear", r"knn \(k 20.*and linear"), ("", "k 20.*k 10")])
def test_other_ways_to_predict_are_not_compared(folder, others, message):
    if not others:
        change(folder / "progressive-2.json", lambda values: values["probe"]["settings"].update(k=10))
    runs = read_results(folder).runs
    with pytest.raises(ValueError, match=message):
        check_equal([runs["progressive-1"], runs[f"{others}-1" if others else "progressive-2"]], "compute", "it")


def test_what_a_probe_chose_may_differ_between_seeds(folder):
    chosen = {"learning_rates": [9.0]}
    change(folder / "progressive-linear-2.json", lambda values: values["probe"].update(chosen=chosen))
    runs = read_results(folder).runs
    check_equal([runs["progressive-linear-1"], runs["progressive-linear-2"]], "compute", "it")


def test_results_of_earlier_versions_are_written_as_they_were():
    text = to_json(read_results(REPRO / "results").runs["full-42"])
    assert '"probe"' not in text
    assert '"curves"' not in text


def test_curves_without_a_value_for_each_epoch_are_refused():
    with pytest.raises(ValueError, match="a value for each of the epochs"):
        TrainingCurves(epochs=(1.0,), losses=(), teacher_entropy=(), mean_entropy=(), centre_entropy=())


@pytest.mark.parametrize(("steps", "kept"), [(7, 7), (60, 60), (1000, 60)])
def test_curves_keep_the_first_and_the_last_of_up_to_60_steps(steps, kept):
    keys = ("losses", "teacher_entropy", "mean_entropy", "centre_entropy")
    lines = [
        {"event": "train", "step": step + 1, "epoch": 0} | {key: [step, 0.1] for key in keys} for step in range(steps)
    ]
    curves = measure_curves([*lines, {"event": "evaluation", "step": steps, "epoch": 3}])
    assert len(curves.epochs) == kept
    assert curves.epochs[-1] == 4
    assert [curves.losses[place][0] for place in (0, -1)] == [0, steps - 1]
    assert np.diff(curves.epochs).min() > 0


def test_a_run_that_logged_no_entropies_has_no_curves():
    assert measure_curves([{"event": "train", "step": 1, "losses": [1.0]}, {"event": "evaluation", "step": 1}]) is None


def test_classes_of_a_model_without_head_are_those_of_the_probe():
    probe = {"task": "knn", "k": 3, "classes": ["a", "b", "c"], "images": 9}
    header = SimpleNamespace(probe=probe, probe_result=None)

    class Made(SimpleNamespace):
        def __len__(self):
            return 2

    records = Made(header=header, config=SimpleNamespace(num_classes=0), ids=np.array(["x", "y"]))
    assert data_of(records, name="made").classes == 3
    found = measure_probe(records, ("--k", "3"))
    assert (found.task, found.words, found.settings) == ("knn", ("--k", "3"), {"k": 3, "images": 9})
    header.probe = None
    assert data_of(records, name="made").classes == 0
    assert measure_probe(records, ()) is None


def test_another_evaluation_beside_earlier_results_is_refused(folder, tmp_path):
    study = load_study("dino")
    entries.check_earlier(study, folder, Places(data="D", runs=tmp_path))
    change(folder / "progressive-1.json", lambda values: values["probe"].update(words=["--k", "10"]))
    with pytest.raises(ValueError, match=r"progressive-1\.json was made differently.*other evaluation"):
        entries.check_earlier(study, folder, Places(data="D", runs=tmp_path))


def test_the_papers_study_crops_for_neighbours_as_dino_does():
    study = read_study("paper")
    words = {run.probe_words for run in study.runs.values() if run.task == "knn"}
    assert words == {("--task", "knn", "--crop", "0.875")}


def test_a_linear_probe_of_before_read_one_block(folder, tmp_path):
    study, places = load_study("dino"), Places(data="D", runs=tmp_path)
    words = ["--in-memory", "--epochs", "20"]
    change(folder / "plain-linear-1.json", lambda values: values["probe"].update(words=words, settings={}))
    entries.check_earlier(study, folder, places)
    change(folder / "plain-linear-1.json", lambda values: values["probe"].update(settings={"blocks": 4}))
    with pytest.raises(ValueError, match=r"plain-linear-1\.json was made differently.*other evaluation"):
        entries.check_earlier(study, folder, places)


def test_another_start_beside_earlier_results_is_refused(folder, tmp_path):
    change(folder / "supervised-dino-2.json", lambda values: values["recipe"]["model"].update(start="plain"))
    with pytest.raises(ValueError, match=r"supervised-dino-2\.json was made differently.*model\.start"):
        entries.check_earlier(load_study("dino"), folder, Places(data="D", runs=tmp_path))


def test_two_probes_of_one_kind_have_no_common_row(made):
    study = read_study(made / "study.yaml")
    runs = study.runs | {"plain-linear": study.runs["plain-linear"].model_copy(update={"task": "knn"})}
    with pytest.raises(ValueError, match="plain and plain-linear are both knn of one run"):
        self_supervised.probed_runs(read_results(made), study.model_copy(update={"runs": runs}))


def test_the_figure_of_curves_has_a_line_for_each_run_round_and_seed(made):
    runs = self_supervised.runs_with_curves(read_results(made), ("progressive", "plain", "random"))
    assert {one.run for one in runs} == {"progressive", "plain"}  # random weights have no training to show
    figure = self_supervised.curves_figure(runs)
    for axes, title in zip(figure.axes, self_supervised.PANELS.values()):
        assert (axes.get_title(), axes.get_ylabel()) == (title, "nats")
        lines = {line.get_label() for line in axes.lines}
        assert {"progressive, round 2, seed 1", "plain, seed 2"} <= lines
        assert len(lines) == 6 + (title != "loss")
    assert [axes.get_xlabel() for axes in figure.axes[2:]] == ["epochs", "epochs"]


def test_information_is_what_entropies_differ_by_at_the_end(folder):
    def collapse(values):
        values["curves"]["teacher_entropy"][-1][1] = values["curves"]["mean_entropy"][-1][1]

    change(folder / "progressive-2.json", collapse)
    results = read_results(folder)
    first, second = self_supervised.information(self_supervised.runs_with_curves(results, ("progressive",)))
    assert (first, second) == (pytest.approx(3.5), 0)


def test_random_weights_are_compared_without_equal_training_compute(made):
    crossed = Page(made, {}).crossed
    ours, theirs = (gather(read_results(made), run).correct_of_seeds() for run in ("progressive", "random"))
    assert crossed("progressive", "random", equal=None).mean == crossed_difference(ours, theirs).mean
    with pytest.raises(ValueError, match="equal training compute"):
        crossed("progressive", "random")


@pytest.mark.slow
def test_a_study_of_dino_goes_from_its_run_list_to_its_page(digits, tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(TOY))
    (tmp_path / "more").mkdir()
    for number, image in enumerate(sorted(digits.glob("train/*/*"))[:3]):
        shutil.copy(image, tmp_path / "more" / f"{number}{image.suffix}")
    given = {"unlabelled": tmp_path / "more"}
    code, printed = carry_out(path, digits, **given)
    assert code == 0, printed
    folder = tmp_path / "runs" / "results"
    runs = read_results(folder).runs
    ours, probe, after = (runs[f"{name}-1"] for name in ("ours", "probe", "after"))
    labelled = len(list(digits.glob("train/*/*")))
    assert (ours.data.train, ours.data.classes, after.data.train) == (labelled + 3, 4, labelled)
    assert (ours.probe.settings["k"], probe.probe.settings["epochs"], after.probe) == (3, 1, None)
    assert ours.history[-1][0] == 2
    assert ours.history == probe.history
    assert len(ours.curves.losses[0]) == 2
    assert ours.curves.epochs[-1] == 2
    assert after.recipe["model"]["start"] == "ours"
    assert after.history[-1][1] == tuple(right / after.data.val for right in after.rounds.right)
    records = read_records(tmp_path / "runs" / "records" / "ours-1.parquet")
    assert ours.rounds.right == tuple(records.correct.sum(axis=0))
    assert training_pmacs(ours) == pytest.approx(dino_gmacs(ours.recipe) * 2 * (labelled + 3) / 1e6)
    assert str(tmp_path) not in "".join(path.read_text() for path in folder.glob("*.json"))
    page.main([str(folder)])
    assert carry_out(path, digits, **given) == (0, "")
    toy = TOY | {"runs": TOY["runs"] | {"probe": TOY["runs"]["probe"] | {"evaluate": ["--epochs", "2"]}}}
    path.write_text(yaml.safe_dump(toy))
    with pytest.raises(InvalidDodoFile) as error:
        carry_out(path, digits, **given)
    assert "probe-1.json was made differently from what the study says (other evaluation)" in str(error.value)


def test_a_narrow_range_of_weak_models_has_ticks_too():
    figure, axes = frontier_figures._new_figure("made", "GMACs")
    rows = [SimpleNamespace(top1=top1, top1_interval=None) for top1 in (0.42, 0.49)]
    curve = frontier_figures.Curve("made", [], rows, {})
    frontier_figures._finish(figure, axes, rows, [curve])
    assert len(axes.get_yticks()) >= 3
