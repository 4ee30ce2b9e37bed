"""A study: its entries, their commands, and errors that give the nearest name."""

from pathlib import Path

import pytest
import yaml

from repro.measure.entries import check_earlier
from repro.study import (
    LEFT_OUT,
    STUDY_FILE,
    Places,
    check_data,
    commands_of,
    entries_of,
    load_study,
    options_of,
    read_study,
    reader_commands,
    with_data,
)

REPRO = Path(__file__).parents[2] / "repro"
MADE = {
    "title": "made",
    "data": "digits",
    "recipe": "digits",
    "set": ["schedule.epochs=3"],
    "runs": {"one": {"seeds": [1, 2]}, "two": {"set": ["model.psg=false", "schedule.epochs=2"]}},
    "comparisons": {"both": {"title": "Both", "rows": {"first": "one", "second": "two"}}},
    "routing": {"routing": {"model": "two"}},
    "shift": {"shift": {"models": ["one", "nettewoof-tiny"], "severities": [2]}},
}


TEST = {"label": "a gain", "ours": "two", "theirs": "one", "margin": 0.46}


PLACES = {"places": {"masks": "ADE20K", "sets": "shifted sets"}, "comparisons": {}, "routing": {}, "shift": {}}
SPEED = {
    "title": "Speed",
    "words": "bench {model} --out {out}/speed.md",
    "rows": {"ours": "two", "theirs": "timm/deit"},
}
TABLE = {"title": "A table", "words": "frontier {records[one]} {models[two]} {sets} --data {data} --out {out}/a.md"}


def write(path, **changes):
    path.write_text(yaml.safe_dump({**MADE, **changes}))
    return path


@pytest.fixture
def made(tmp_path):
    return load_study(write(tmp_path / "made.yaml"))


@pytest.mark.parametrize("name", ["digits", "paper", "photos"])
def test_the_run_lists_are_valid(name):
    study = load_study(name)
    assert entries_of(study)
    assert study.comparisons


def test_the_paper_has_every_table_and_figure():
    study = load_study("paper")
    assert {"construction", "distillation", "schedules"} <= set(study.comparisons)
    assert {"resolutions", "width", "tokens", "depth", "knn", "linear"} <= set(study.frontiers)
    shifts = {f"shift_{name}" for name in ("v2", "a", "r", "sketch", "c")}
    assert {"sweep", "speed", "memory", "throughput", "inside", *shifts} <= set(study.commands)
    used = {study.recipe_of(run)[0] for run in study.runs}
    ours = {path.stem for path in (REPRO.parent / "recipes").glob("*.yaml") if "# torchrun" in path.read_text()}
    assert ours <= used  # recipes of the paper are made for several GPUs


def test_every_command_of_the_paper_is_one_that_there_is():
    study = load_study("paper")
    places = Places(data="D", runs=Path("R"), others={"masks": "M", "shifts": "S"})
    for entry in entries_of(study):
        for command in commands_of(study, entry, places):
            options = {word for word in command.words if word.startswith("--")}
            assert options <= options_of(command.words), command.words


def test_every_seed_is_an_entry_and_further_measurements_know_who_trains_their_model(made):
    trained = {entry.name: entry.trained for entry in entries_of(made)}
    assert list(trained)[:3] == ["one-1", "two-42", "one-2"]  # the first seed of every run comes first
    runs = {name: name for name in ("one-1", "one-2", "two-42")}
    assert trained == runs | {"routing": "two-42", "shift-one": "one-1", "shift-nettewoof-tiny": None}


def test_the_last_change_of_a_key_counts(made):
    assert made.recipe_of("two") == ("digits", ("model.psg=false", "schedule.epochs=2"))
    assert made.load_recipe_of("two").schedule.epochs == 2
    assert made.load_recipe_of("one").schedule.epochs == 3


def test_changes_from_the_command_line_come_last(tmp_path):
    study = load_study(write(tmp_path / "made.yaml"), ["schedule.epochs=1"])
    assert {study.load_recipe_of(run).schedule.epochs for run in study.runs} == {1}


def test_commands_are_written_down_with_the_readers_folders(made):
    entries = {entry.name: entry for entry in entries_of(made)}
    assert reader_commands(made, entries["one-2"]) == (
        "progresvit train digits --data DATA --out RUNS/one-2 --set schedule.epochs=3 --set seed=2",
        "progresvit evaluate RUNS/one-2/model --data DATA --out RUNS/records/one-2.parquet",
    )
    assert reader_commands(made, entries["routing"]) == (
        "progresvit evaluate RUNS/two-42/model --data DATA --out RUNS/records/routing.parquet",
        "progresvit evaluate RUNS/two-42/model --data DATA --split train --out RUNS/records/routing-train.parquet",
    )
    assert reader_commands(made, entries["shift-nettewoof-tiny"])[1] == (
        "progresvit shift nettewoof-tiny --suite generated --data DATA --out RUNS/shift/shift-nettewoof-tiny "
        "--severities 2"
    )


def test_shift_over_seeds_measures_the_model_of_every_seed_on_the_same_corrupted_images(tmp_path):
    shift = {"models": ["one", "nettewoof-tiny"], "severities": [2], "seeds": [1, 2], "budget": 1.253, "cache": True}
    study = load_study(write(tmp_path / "made.yaml", shift={"shift": shift}))
    entries = {entry.name: entry for entry in entries_of(study) if entry.kind == "shift"}
    assert {name: (entry.seed, entry.trained) for name, entry in entries.items()} == {
        "shift-one-1": (1, "one-1"),
        "shift-nettewoof-tiny": (None, None),
        "shift-one-2": (2, "one-2"),
    }
    assert list(entries)[-1] == "shift-one-2"  # the first seed of every model comes first
    assert reader_commands(study, entries["shift-one-2"]) == (
        "progresvit evaluate RUNS/one-2/model --data DATA --out RUNS/records/shift-one-2.parquet",
        "progresvit shift RUNS/one-2/model --suite generated --data DATA --out RUNS/shift/shift-one-2 --severities 2 "
        "--cache RUNS/corrupted",
    )
    single = {"models": ["one"], "seeds": [2, 3]}
    study = load_study(write(tmp_path / "made.yaml", shift={"shift": single}))
    with pytest.raises(ValueError, match=r"shift\.shift: seed 3 of one is not trained; add it"):
        entries_of(study)


def test_a_command_runs_for_each_row_or_once(tmp_path):
    study = load_study(write(tmp_path / "made.yaml", **PLACES | {"commands": {"speed": SPEED, "table": TABLE}}))
    entries = {entry.name: entry for entry in entries_of(study)}
    assert reader_commands(study, entries["speed-ours"]) == (
        "progresvit bench RUNS/two-42/model --out RUNS/made/speed-ours/speed.md",
    )
    assert reader_commands(study, entries["speed-theirs"]) == (
        "progresvit bench timm/deit --out RUNS/made/speed-theirs/speed.md",
    )
    assert reader_commands(study, entries["table"]) == (
        "progresvit frontier RUNS/records/one-1.parquet RUNS/two-42/model SETS --data DATA --out RUNS/made/table/a.md",
    )
    assert entries["table"].uses == ("two-42",)
    assert dict(entries["table"].records) == {"one": "one-1"}


def test_runs_of_one_study_may_have_other_data(tmp_path):
    runs = {"one": {}, "of": {"of": "one", "task": "knn"}, "mask": {"data": "masks", "start": "one"}}
    plan = {"title": "x", "val": "v", "test": "v", "ours": "mask", "rows": {"a": "mask"}, "margin": 1, "max_drop": 1}
    study = load_study(write(tmp_path / "made.yaml", **PLACES | {"runs": runs, "segmentation": plan}))
    entries = {entry.name: entry for entry in entries_of(study)}
    places = Places(data="D", runs=Path("R"), others={"masks": "M"})
    sources = {
        name: [command.words[command.words.index("--data") + 1] for command in commands_of(study, entry, places)]
        for name, entry in entries.items()
    }
    assert sources == {"one-42": ["D", "D"], "of-42": ["D"], "mask-42": ["M", "M"]}  # one split, evaluated once
    assert (study.data_name("data"), study.data_name("masks")) == ("digits", "ADE20K")


def test_entries_without_data_are_named_or_left_out(tmp_path):
    runs = {"one": {}, "mask": {"data": "masks"}, "more": {"start": "mask"}}
    changes = {"runs": runs, "commands": {"table": TABLE | {"words": "frontier {records[more]} --out {out}/a.md"}}}
    study = load_study(write(tmp_path / "made.yaml", **PLACES | changes))
    entries = entries_of(study)
    with pytest.raises(ValueError, match=r"^mask-42, more-42, table need ADE20K; say where it is with masks=FOLDER"):
        with_data(study, entries, Places(data="D", runs=Path("R")))
    kept = with_data(study, entries, Places(data="D", runs=Path("R")), measured=["mask-42", "more-42", "table"])
    assert kept == entries
    kept = with_data(study, entries, Places(data="D", runs=Path("R"), others={"masks": LEFT_OUT}))
    assert [entry.name for entry in kept] == ["one-42"]
    places = Places(data="*.yaml", runs=Path("R"), others={"masks": "there"})
    with pytest.raises(ValueError, match=r"^there are no images at there, which mask-42 need\.$"):
        check_data(study, entries, places, tmp_path)
    (tmp_path / "there").mkdir()
    check_data(study, entries, places, tmp_path)


def test_a_sample_of_the_training_images_fits_routers(tmp_path):
    routing = {"routing": {"model": "two", "learned_images": 7}}
    study = load_study(write(tmp_path / "made.yaml", routing=routing))
    (entry,) = [entry for entry in entries_of(study) if entry.kind == "routing"]
    assert " --split train --limit 7 --seed 0 " in reader_commands(study, entry)[1]


def test_what_a_command_makes_lies_where_it_puts_it(made, tmp_path):
    places = Places(data="D", runs=tmp_path)
    for entry in entries_of(made):
        for command in commands_of(made, entry, places):
            out = command.words[command.words.index("--out") + 1]
            assert str(command.makes).startswith(out)


def test_a_written_study_reads_as_the_same(made, tmp_path):
    (tmp_path / STUDY_FILE).write_text(made.to_yaml())
    assert load_study(tmp_path / STUDY_FILE) == made


def test_declared_tests_are_written_with_the_study(tmp_path):
    comparison = MADE["comparisons"]["both"] | {"tests": [TEST, TEST | {"label": "b", "paper": 0.3}]}
    study = load_study(write(tmp_path / "made.yaml", comparisons={"both": comparison}))
    assert [(test.margin, test.paper) for test in study.comparisons["both"].tests] == [(0.46, None), (0.46, 0.3)]
    (tmp_path / STUDY_FILE).write_text(study.to_yaml())
    assert load_study(tmp_path / STUDY_FILE) == study


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"comparisons": {"both": {"title": "x", "rows": {"a": "ones"}}}}, "unknown run 'ones', did you mean 'one'"),
        (
            {"comparisons": {"both": MADE["comparisons"]["both"] | {"tests": [TEST | {"theirs": "tow"}]}}},
            "comparisons.both: unknown run 'tow', did you mean 'two'",
        ),
        (
            {"comparisons": {"both": MADE["comparisons"]["both"] | {"tests": [TEST | {"margin": 0}]}}},
            r"tests.*margin: input should be greater than 0",
        ),
        ({"runs": {"one": {"set": ["schedule.epoch=2"]}}, "comparisons": {}}, "runs.one: .*epochs"),
        ({"runs": {"one": {"recipe": "digit"}}, "comparisons": {}}, "runs.one: .*digits"),
        ({"runs": {"one": {"seed": 3}}, "comparisons": {}}, "runs.one.seed: unknown key; did you mean 'seeds'"),
        ({"colour": "red"}, "colour: unknown key"),
        ({"runs": {"one": {"seeds": []}}, "comparisons": {}}, "runs.one.seeds"),
        ({"shift": {"shift": {"models": ["one"], "corruptions": ["foggy"]}}}, "'foggy' is unknown, did you mean 'fog'"),
        ({"shift": {"shift": {"models": ["one"], "severities": [9]}}}, "9 is unknown, choose one of 1, 2"),
        ({"routing": {"a/b": {"model": "one"}}}, "'a/b' names files"),
        ({"runs": {"one": {"data": "mask"}}, **PLACES}, "runs.one: data: unknown place 'mask', did you mean 'masks'"),
        ({"places": {"data": "x"}}, "places: data means something else"),
        ({"commands": {"a": SPEED | {"words": "bench {model}"}}}, "commands.a.*nothing of this command is kept"),
        ({"commands": {"a": SPEED | {"rows": {}}}}, "commands.a.*belong together"),
        ({"commands": {"a": SPEED | {"words": "bench {model} {oot} --out {out}"}}}, "{oot}, did you mean 'out'"),
        (
            {"commands": {"a": SPEED, "b": TABLE | {"words": "x {made[a-our]} {out}"}}},
            "did you mean 'a-ours'",
        ),
        ({"commands": {"a": TABLE | {"words": "x {made[a]} {out}"}}}, "no command above makes 'a', there are none"),
        ({"commands": {"a": TABLE | {"words": "frontier {records[tow]} --out {out}"}}}, "'tow', did you mean 'two'"),
    ],
)
def test_a_study_that_cannot_run_is_refused_before_it_begins(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_study(write(tmp_path / "made.yaml", **changes))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"routing": {"same": {"model": "one"}}, "shift": {"same": {"models": ["one"]}}}, "same"),
        ({"runs": {"one": {"seeds": [1, 1]}, "two": {}}}, "one-1"),
    ],
)
def test_two_entries_of_one_name_are_refused(tmp_path, changes, name):
    with pytest.raises(ValueError, match=rf"2 entries of the study would write {name}\.json"):
        entries_of(load_study(write(tmp_path / "made.yaml", **changes)))


def test_models_with_slashes_make_plain_file_names(tmp_path):
    shift = {"shift": {"models": ["one", "/models/mine", "someone/model"]}}
    entries = entries_of(load_study(write(tmp_path / "made.yaml", shift=shift)))
    names = [entry.name for entry in entries if entry.kind == "shift"]
    assert names == ["shift-one", "shift-models-mine", "shift-someone-model"]


def test_a_whole_section_from_the_command_line_comes_after_its_parts(tmp_path):
    changes = ["distillation={teacher: nettewoof-tiny, weight: 0.5}"]
    runs = {"one": {"set": ["distillation.weight=0.3"]}}
    path = write(tmp_path / "made.yaml", set=changes, runs=runs, comparisons={}, routing={}, shift={})
    assert load_study(path, ["distillation=null"]).load_recipe_of("one").distillation is None


def test_reading_results_needs_no_recipes(tmp_path):
    runs = {"one": {"recipe": "mine_alone.yaml"}}
    path = write(tmp_path / "made.yaml", runs=runs, comparisons={}, routing={}, shift={})
    assert read_study(path).runs["one"].recipe == "mine_alone.yaml"
    with pytest.raises(ValueError, match=r"mine_alone\.yaml"):
        load_study(path)


def test_the_tracked_results_are_those_of_the_study_photos():
    assert load_study(REPRO / "results" / STUDY_FILE) == load_study("photos")
    check_earlier(load_study("photos"), REPRO / "results", Places(data="D", runs=Path("nowhere")))


@pytest.mark.parametrize("name", sorted(path.parent.name for path in (REPRO / "results").glob(f"*/{STUDY_FILE}")))
def test_stored_results_agree_with_the_run_list(name):
    """Starts and images without labels were files on the machine that measured them."""
    given = {"unlabelled": "unlabelled.tar"}
    if name != "dino":
        given = {"changes": ["model.start=deit_tiny_patch16_224.safetensors"]}
    check_earlier(load_study(name, **given), REPRO / "results" / name, Places(data="D", runs=Path("nowhere")))


def test_an_unknown_study_gives_the_nearest_name():
    with pytest.raises(ValueError, match=r"no study 'photo'.*photos"):
        load_study("photo")


def test_no_yaml_and_no_mapping_are_refused(tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="is not YAML"):
        load_study(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- a")
    with pytest.raises(ValueError, match="is not a study"):
        load_study(tmp_path / "list.yaml")
