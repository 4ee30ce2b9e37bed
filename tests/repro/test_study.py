"""A study: what is asked for, which commands it means, and that unknown names are refused with the nearest."""

from pathlib import Path

import pytest
import yaml
from progresvit.results.carry_out import reader_commands
from progresvit.results.measures import check_earlier
from progresvit.results.plan import Places, plan, steps
from progresvit.results.study import STUDY_FILE, Study, load_study, read_study, shipped_studies, write_study

MADE = {
    "title": "made",
    "data": "digits",
    "recipe": "digits",
    "set": ["schedule.epochs=3"],
    "runs": {"one": {"seeds": [1, 2]}, "two": {"set": ["model.psg=false", "schedule.epochs=2"]}},
    "comparisons": {"both": {"title": "Both", "rows": {"first": "one", "second": "two"}}},
    "routing": {"routing": {"model": "two"}},
    "shift": {"shift": {"models": ["one", "shipped"], "severities": [2]}},
}


def write(path, **changes):
    path.write_text(yaml.safe_dump({**MADE, **changes}))
    return path


@pytest.fixture
def made(tmp_path):
    return load_study(write(tmp_path / "made.yaml"))


@pytest.mark.parametrize("name", shipped_studies())
def test_shipped_studies_are_valid(name):
    study = load_study(name)
    assert plan(study)
    assert study.comparisons


def test_the_studies_of_the_issue_ship():
    assert {"photos", "imagenet"} <= set(shipped_studies())


def test_imagenet_asks_for_the_papers_tables():
    study = load_study("imagenet")
    assert {"construction", "distillation", "schedules"} <= set(study.comparisons)
    recipes = {study.recipe_of(run)[0] for run in study.runs}
    assert {"width_only", "width_resolution", "192_240", "192_240_kd", "160_240", "160_384", "128_192_240"} <= recipes


def test_every_seed_is_a_task_and_models_are_trained_before_they_are_measured(made):
    names = [task.name for task in plan(made)]
    assert names == ["one-1", "one-2", "two-42", "routing", "shift-one", "shift-shipped"]
    needs = {task.name: task.needs for task in plan(made)}
    assert needs["routing"] == "two-42"
    assert needs["shift-one"] == "one-1"
    assert needs["shift-shipped"] is None


def test_the_last_change_of_a_key_counts(made):
    assert made.recipe_of("two") == ("digits", ("model.psg=false", "schedule.epochs=2"))
    assert made.load_recipe_of("two").schedule.epochs == 2
    assert made.load_recipe_of("one").schedule.epochs == 3


def test_changes_from_the_command_line_come_last(tmp_path):
    study = load_study(write(tmp_path / "made.yaml"), ["schedule.epochs=1"])
    assert {study.load_recipe_of(run).schedule.epochs for run in study.runs} == {1}


def test_commands_are_written_down_with_the_readers_folders(made):
    tasks = {task.name: task for task in plan(made)}
    assert reader_commands(made, tasks["one-2"]) == (
        "progresvit train digits --data DATA --out RUNS/one-2 --set schedule.epochs=3 --set seed=2",
        "progresvit evaluate RUNS/one-2/model --data DATA --out RUNS/records/one-2.parquet",
    )
    assert reader_commands(made, tasks["routing"]) == (
        "progresvit evaluate RUNS/two-42/model --data DATA --out RUNS/records/routing.parquet",
        "progresvit evaluate RUNS/two-42/model --data DATA --split train --out RUNS/records/routing-train.parquet",
    )
    assert reader_commands(made, tasks["shift-shipped"])[1] == (
        "progresvit shift shipped --suite generated --data DATA --out RUNS/shift/shift-shipped --severities 2"
    )


def test_what_a_step_makes_lies_where_its_command_puts_it(made, tmp_path):
    places = Places(data="D", runs=tmp_path)
    for task in plan(made):
        for step in steps(made, task, places):
            out = step.arguments[step.arguments.index("--out") + 1]
            assert str(step.makes).startswith(out)


def test_some_of_it_by_run_by_comparison_and_by_task(made):
    def names(*only):
        return [task.name for task in plan(made, only)]

    assert names("one") == ["one-1", "one-2"]
    assert names("one-2", "routing") == ["one-2", "routing"]
    assert names("both") == ["one-1", "one-2", "two-42"]
    assert names("shift") == ["shift-one", "shift-shipped"]
    with pytest.raises(ValueError, match="nothing called 'shft'; did you mean shift"):
        names("shft")


def test_a_written_study_reads_as_the_same(made, tmp_path):
    write_study(made, tmp_path / "results")
    assert load_study(tmp_path / "results" / STUDY_FILE) == made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"comparisons": {"both": {"title": "x", "rows": {"a": "ones"}}}}, "the run ones.*did you mean one"),
        ({"runs": {"one": {"set": ["schedule.epoch=2"]}}, "comparisons": {}}, "runs.one: .*epochs"),
        ({"runs": {"one": {"recipe": "digit"}}, "comparisons": {}}, "runs.one: .*digits"),
        ({"runs": {"one": {"seed": 3}}, "comparisons": {}}, "runs.one.seed: is no key of a study"),
        ({"colour": "red"}, "colour: is no key of a study"),
        ({"runs": {"one": {"seeds": [1, 1]}}, "comparisons": {}}, "each seed is given once"),
        ({"runs": {"one": {"seeds": []}}, "comparisons": {}}, "runs.one.seeds"),
        ({"shift": {"shift": {"models": ["one"], "corruptions": ["foggy"]}}}, "no corruption foggy; choose from gau"),
        ({"shift": {"shift": {"models": ["one"], "severities": [9]}}}, "no severity 9; choose from 1, 2"),
        ({"routing": {"a/b": {"model": "one"}}}, "'a/b' names files"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_before_it_begins(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_study(write(tmp_path / "made.yaml", **changes))


def test_two_tasks_of_one_name_are_refused(tmp_path):
    same = {"routing": {"same": {"model": "one"}}, "shift": {"same": {"models": ["one"]}}}
    with pytest.raises(ValueError, match=r"2 tasks of the study would write same\.json"):
        plan(load_study(write(tmp_path / "made.yaml", **same)))


def test_models_with_slashes_make_plain_file_names(tmp_path):
    shift = {"shift": {"models": ["one", "/models/mine", "someone/model"]}}
    names = [task.name for task in plan(load_study(write(tmp_path / "made.yaml", shift=shift)), ["shift"])]
    assert names == ["shift-one", "shift-models-mine", "shift-someone-model"]


def test_a_whole_section_from_the_command_line_comes_after_its_parts(tmp_path):
    changes = ["distillation={teacher: shipped, weight: 0.5}"]
    runs = {"one": {"set": ["distillation.weight=0.3"]}}
    path = write(tmp_path / "made.yaml", set=changes, runs=runs, comparisons={}, routing={}, shift={})
    assert load_study(path, ["distillation=null"]).load_recipe_of("one").distillation is None


def test_who_only_reads_results_needs_no_recipes(tmp_path):
    runs = {"one": {"recipe": "mine_alone.yaml"}}
    path = write(tmp_path / "made.yaml", runs=runs, comparisons={}, routing={}, shift={})
    assert read_study(path).runs["one"].recipe == "mine_alone.yaml"
    with pytest.raises(ValueError, match=r"mine_alone\.yaml"):
        load_study(path)


def test_the_results_of_this_repository_are_those_of_the_study_that_ships():
    root = Path(__file__).parent.parent.parent
    assert load_study(root / "results" / STUDY_FILE) == load_study("photos")
    check_earlier(load_study("photos"), root / "results", Places(data="D", runs=Path("nowhere")))


def test_an_unknown_study_names_those_that_ship():
    with pytest.raises(ValueError, match=r"no study 'photo'.*photos"):
        load_study("photo")


def test_no_yaml_and_no_mapping_are_refused(tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="is no YAML"):
        load_study(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- a")
    with pytest.raises(ValueError, match="is no study"):
        load_study(tmp_path / "list.yaml")


def test_study_is_plain_data():
    assert Study.model_validate(MADE).runs["one"].seeds == (1, 2)
