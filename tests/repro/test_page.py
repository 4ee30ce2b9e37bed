"""The page of a results folder: built, checked, and that of this repository."""

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from repro.compare import marginal_rows
from repro.frontier import frontier_rows
from repro.page import GENERIC, PAGES, Built, build, drawn_from, main
from repro.segmentation import SegmentationStudy
from repro.store import read_results
from repro.study import read_study
from tests.repro.made import STUDY, change, run_result, write_result

ROOT = Path(__file__).parents[2]


def fails(capsys, *arguments):
    """Exit code, and what was printed."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return stop.value.code, printed.out + printed.err


def refused(capsys, folder, message):
    code, printed = fails(capsys, folder)
    assert code == 2
    assert printed.startswith("error: ")
    assert message in printed


@pytest.fixture(scope="session")
def built_once(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "results"
    shutil.copytree(made, folder)
    main([str(folder)])
    return folder


@pytest.fixture
def built(built_once, tmp_path):
    """A results folder with its page and plots."""
    return shutil.copytree(built_once, tmp_path / "results")


@pytest.mark.long
def test_the_page_of_this_repository_is_that_of_its_results(capsys):
    main(["--check"])
    assert "14 pages, with 30 plots, agree with" in capsys.readouterr().out


def test_a_page_without_a_template_is_outdated(tmp_path):
    made = Built(tmp_path, {}, {})
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "old.md").write_text("# Old")
    assert made.outdated() == [str(tmp_path / "results" / "old.md")]


@pytest.mark.parametrize("call", ["difference", "widened", "crossed"])
def test_single_differences_are_of_comparable_runs_too(folder, capsys, call):
    (folder / "results.md.j2").write_text("{{ " + call + "('full', 'width') | interval }}")
    change_both(folder, lambda values: values.update(epochs=80))
    refused(capsys, folder, "full minus width compares runs of equal")
    change_both(folder, lambda values: values["data"].update(classes=7))
    refused(capsys, folder, "differ in data.classes")
    (folder / "results.md.j2").write_text("{{ " + call + "('full', 'never') | interval }}")
    refused(capsys, folder, "never was not measured")


def change_both(folder, edit):
    for seed in (1, 2):
        change(folder / f"width-{seed}.json", edit)


def test_a_difference_with_run_shifts_is_wider(folder):
    calls = ("difference('full', 'width')", "widened('full', 'width')")
    template = " ".join("{{ '%.6f' % " + call + ".half_width }}" for call in calls)
    (folder / "results.md.j2").write_text(template + " {{ run_shift().deviation }}")
    main([str(folder)])
    plain, wide, deviation = map(float, (folder / "results.md").read_text().split())
    assert deviation > 0
    assert wide > plain


def test_the_text_on_the_frontier_says_what_its_rows_do():
    folder = ROOT / "repro" / "results" / "frontier"
    rows = frontier_rows(read_results(folder), read_study(folder / "study.yaml"), "all")
    verdicts = {(row.run, row.point): row.verdict for row in rows if row.verdict}
    of_slices = {"thinkingvit", "hydravit", "sortednet", "matformer", "dynabert"}
    full = [("thinkingvit", "every round"), *((run, "round 3") for run in ("hydravit", "sortednet"))]
    full += [(run, "round 4") for run in ("matformer", "dynabert")]
    below = [row for row in rows if row.run in of_slices and row.verdict and (row.run, row.point) not in full]
    assert {row.verdict for row in below} == {"gain"}
    below.sort(key=lambda row: row.difference.mean)
    assert [(row.run, row.point) for row in (below[0], below[-1])] == [
        ("thinkingvit", "75 %"),
        ("matformer", "round 1"),
    ]
    plain = {run: verdict for (run, _), verdict in verdicts.items() if run.startswith(("plain", "tome"))}
    assert plain == dict.fromkeys(("plain160", "plain192", "plain224", "tome4", "tome8", "tome13"), "loss")
    exits = [verdicts["early_exit", point] for point in ("round 1", "25 %", "50 %", "75 %", "every round")]
    assert exits == ["gain", "loss", "loss", "inconclusive", "gain"]
    marginal = {(row.run, row.point) for row in marginal_rows(rows)}
    assert marginal >= {("early_exit", "25 %"), ("early_exit", "every round"), ("plain224", "the model")}
    assert not marginal & {("early_exit", "round 1"), ("early_exit", "50 %"), ("plain160", "the model")}


@cache
def segmentation_study(name):
    """Of this repository."""
    folder = ROOT / "repro" / "results" / name
    return SegmentationStudy(read_results(folder), read_study(folder / "study.yaml"))


def test_the_text_on_segmentation_says_what_its_rows_do():
    studies = {name: segmentation_study(name) for name in ("camvid", "pets")}
    for study in studies.values():
        full = {run: study.row(run, "every round" if run != "plain384" else "the model") for run in study.runs}
        mious = [row.miou.mean for row in full.values()]
        assert max(mious) - min(mious) < 0.01  # near each other
        assert min(full, key=lambda run: full[run].gmacs) == "plain384"
        assert full["plain384"].verdict == "loss"
        assert all(study.exit_order(run, 0.15).by_score.mean < -0.003 for run in study.routed_runs)  # not reached
        assert study.exit_order("progressive", 0.15).gap < -0.1
        assert all(abs(study.compute(run) - 1) < 0.06 for run in study.runs)
        assert {window for one in study.ours for window in one.result.test.windows} in ({1}, {2})
    pets, scenes = (studies[name].exit_order("resolution", 0.15).by_score for name in ("pets", "camvid"))
    assert pets.mean > -0.0035  # near
    assert -0.0031 < pets.highest < -0.003  # just excluded
    assert scenes.lowest < -0.003 < scenes.highest  # not excluded
    for run in studies["pets"].routed_runs:
        for certified in (studies["pets"].certified(run, epsilon, 0.05) for epsilon in (0.005, 0.01, 0.02)):
            assert certified.beyond == 0
            assert certified.loss < certified.epsilon / 2  # by far
    change = iou_changes(studies["camvid"].runs["resolution"])
    assert set(sorted(change, key=change.get)[:4]) <= {"sign", "pedestrian", "bicyclist", "fence"}  # thin or small
    kept = [study.row(run, "routed").drop.mean for study in studies.values() for run in study.routed_runs]
    assert sum(drop < -0.003 for drop in kept) == 5  # of 6: mostly exceeded
    assert marginal_rows(studies["camvid"].rows) == []
    assert marginal_rows(studies["pets"].rows)
    change = iou_changes(studies["pets"].runs["resolution"])
    assert min(change, key=change.get) == "border"


def iou_changes(seeds):
    """IoU of round 1 minus that of round 2 by class, mean over seeds."""
    changes = [dict(zip(one.result.labels, one.class_iou(0) - one.class_iou(1))) for one in seeds]
    return {label: fmean(change[label] for change in changes) for label in changes[0]}


def test_the_text_on_speed_says_what_was_measured():
    folder = ROOT / "repro" / "results" / "frontier"
    results = read_results(folder)
    top1 = {(r.run, r.point): r.top1 for r in frontier_rows(results, read_study(folder / "study.yaml"), "all")}
    speed = {(point.run, point.point): point.images_per_s for point in results.cost["cost"].points}
    full = [("hydravit", "round 3"), ("sortednet", "round 3"), ("matformer", "round 4"), ("dynabert", "round 4")]
    assert min(full, key=speed.get) == ("sortednet", "round 3")
    assert max(full, key=speed.get) == ("dynabert", "round 4")
    assert min(full, key=top1.get) == ("dynabert", "round 4")
    assert max(full, key=top1.get) == ("sortednet", "round 3")
    for point in full:
        assert speed[point] == pytest.approx(speed["progresvit", "25 %"], rel=0.02)
    for values in (speed, top1):
        assert values["plain160", "the model"] > values["progresvit", "round 1"]
    engine = {
        point.point: point.engine_images_per_s for point in results.cost["cost"].points if point.run == "progresvit"
    }
    assert engine["75 %"] == pytest.approx(engine["50 %"], rel=0.01)  # not in order
    of_cpu = {(point.run, point.point) for point in results.cost["cost_cpu"].points}
    assert of_cpu == {(run, point) for run, point in top1 if run != "three" and not point.endswith("per round")}
    assert "the cost of three rounds" in " ".join((ROOT / "docs" / "results" / "frontier.md").read_text().split())
    assert len(of_cpu) - len(speed) == 7


def test_any_results_folder_has_a_page_of_everything(built, capsys):
    page = (built / "results.md").read_text()
    assert page.startswith("# A made-up study\n")
    names = sorted(path.name for path in (built / "figures" / "results").iterdir())
    assert len(names) == 11
    assert all(f'src="figures/results/{name}"' in page for name in names)
    assert "\n\n\n" not in page
    main([str(built), "--check"])
    assert "results.md, with 11 plots, agree with" in capsys.readouterr().out


def test_what_was_not_measured_is_said(built):
    page = (built / "results.md").read_text()
    assert "Not measured: + more." in page
    assert "## Later\n\nNot measured.\n" in page
    assert "## Under corruption: shift_later\n\nNot measured.\n\nNot measured.\n" in page


def test_one_changed_number_fails_the_check_which_writes_nothing(built, capsys):
    change(built / "routing.json", lambda values: values["settings"][0]["point"].update(top1=0.5))
    before = {path: path.read_bytes() for path in built.rglob("*") if path.is_file()}
    code, printed = fails(capsys, built, "--check")
    assert code == 1
    assert f"outdated: {built / 'results.md'}" in printed
    assert "routing-settings.png" in printed
    assert "construction" not in printed
    assert f"rebuild with: python repro/page.py {built}" in printed
    assert {path: path.read_bytes() for path in built.rglob("*") if path.is_file()} == before
    main([str(built)])
    main([str(built), "--check"])


def test_an_edited_page_fails_the_check(built, capsys):
    page = built / "results.md"
    page.write_text(page.read_text().replace("| width only |", "| width mostly |"))
    assert fails(capsys, built, "--check")[0] == 1
    page.unlink()
    assert fails(capsys, built, "--check")[0] == 1


@pytest.mark.parametrize("harm", ["another plot", "no plot", "nothing"])
def test_a_missing_or_wrong_plot_fails_the_check(built, capsys, harm):
    path, other = (built / "figures" / "results" / f"construction-{name}.png" for name in ("accuracy", "frontier"))
    assert drawn_from(path) != drawn_from(other)
    path.unlink()
    if harm != "nothing":
        path.write_bytes(other.read_bytes() if harm == "another plot" else b"no PNG")
    code, printed = fails(capsys, built, "--check")
    assert (code, printed.count("outdated: ")) == (1, 1)
    assert "construction-accuracy.png" in printed


TEMPLATE = """# Mine

{{ comparison("construction") }}

{{ run.full.top1() | percent }} % at {{ run.full.gmacs() | gmacs }} GMACs,
{{ difference("full", "width") | interval }} points.
{% for one in claims() %}
{{ one.claim }}: {{ one.measured }}
{% endfor %}
"""


def test_a_template_of_ones_own_shows_what_it_asks_for(folder):
    (folder / "results.md.j2").write_text(TEMPLATE)
    (folder / "claims.yaml.j2").write_text("- claim: Good\n  measured: {{ savings | max | percent }} %\n")
    main([str(folder)])
    page = (folder / "results.md").read_text()
    assert sorted(path.name for path in (folder / "figures" / "results").iterdir()) == [
        "construction-accuracy.png",
        "construction-frontier.png",
    ]
    assert " % at 1.546 GMACs,\n" in page
    assert "\nGood: " in page


def test_a_comparison_without_a_measured_test_says_so(tested, tmp_path):
    folder = shutil.copytree(tested, tmp_path / "results")
    for path in folder.glob("*-[234].json"):
        path.unlink()
    made = build(folder, folder, {Path("results.md"): PAGES / GENERIC})
    page = made.texts[Path("results.md")]
    assert "Tests that were not measured on two seeds: PSG, rounds, alternatives, one day." in page
    assert "construction-tests.png" not in made.plots


def test_a_page_shows_the_study_of_a_folder_below_its_results(folder, tested, capsys):
    shutil.copytree(tested, folder / "seeds")
    (folder / "results.md.j2").write_text(
        """{{ comparison("construction") }}
{% set seeds = sub_study("seeds") %}
# {{ seeds.study.title }}
{{ seeds.comparison("construction") }}
{{ seeds.run.full.seeds | length }} seeds against {{ run.full.seeds | length }}
"""
    )
    main([str(folder)])
    page = (folder / "results.md").read_text()
    names = [f"{name}.png" for name in ("construction-accuracy", "construction-frontier")]
    names += [f"seeds-construction-{name}.png" for name in ("frontier", "tests")]
    assert sorted(path.name for path in (folder / "figures" / "results").iterdir()) == names
    assert all(f'src="figures/results/{name}"' in page for name in names)
    assert "# A study of seeds\n" in page
    assert "\n3 seeds against 2\n" in page
    main([str(folder), "--check"])
    change(folder / "seeds" / "full-1.json", lambda values: values["rounds"].pop("log_loss"))
    capsys.readouterr()
    code, printed = fails(capsys, folder, "--check")
    assert code == 1
    assert "seeds-construction-tests.png" in printed
    assert f"{Path('results') / 'construction-accuracy.png'}" not in printed
    main([str(folder / "seeds")])  # and has a page of its own
    assert (folder / "seeds" / "results.md").read_text().startswith("# A study of seeds\n")


def test_a_folder_below_without_results_is_an_error(folder, capsys):
    (folder / "results.md.j2").write_text('{{ sub_study("nowhere").about() }}')
    refused(capsys, folder, f"{folder / 'nowhere'} holds no results")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('comparison("construction")', "comparisson()"), "results.md.j2, line 3: 'comparisson' is undefined"),
        (("run.full.top1", "run.fulll.top1"), "results.md.j2, line 5: 'dict object' has no attribute 'fulll'"),
        (("{% endfor %}", ""), "Unexpected end of template"),
        (('"width"', '"nowhere"'), "nowhere was not measured"),
    ],
)
def test_a_wrong_template_is_an_error_with_its_line(folder, capsys, change, message):
    (folder / "results.md.j2").write_text(TEMPLATE.replace(*change))
    (folder / "claims.yaml.j2").write_text("[]")
    refused(capsys, folder, message)
    assert not (folder / "results.md").exists()


def test_what_is_wrong_is_one_line_and_nothing_is_written(folder, capsys, tmp_path):
    refused(capsys, tmp_path / "nowhere", "holds no results")
    change(folder / "width-1.json", lambda values: values["data"].update(names="others"))
    refused(capsys, folder, "compares width-1 and width-2, which differ in data.names")
    write_result(folder, run_result("width", 1, 40))
    change(folder / "full-1.json", lambda values: values.update(format=0))
    refused(capsys, folder, "full-1.json has format 0 and this version reads format 1; delete it and measure again")
    write_result(folder, run_result("full", 1, 40))
    change(folder / "shift_both-plain.json", lambda values: values["data"].update(classes=5))
    refused(capsys, folder, "the shift entry shift_both compares")
    change(folder / "shift_both-plain.json", lambda values: (values["data"].update(classes=4), values["sets"].pop()))
    refused(capsys, folder, "compares models under different corruptions: full, plain")
    (folder / "study.yaml").write_text("title: only\n")
    refused(capsys, folder, "study.yaml: data: Field required")
    (folder / "study.yaml").unlink()
    refused(capsys, folder, "has no study.yaml")
    assert not (folder / "results.md").exists()
    assert not (folder / "figures").exists()


def test_two_plots_of_one_name_are_refused(folder, capsys):
    study = STUDY | {"comparisons": STUDY["comparisons"] | {"shift_both": STUDY["comparisons"]["schedules"]}}
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    refused(capsys, folder, "two plots of the page are called shift_both-accuracy; rename an entry in study.yaml")


def test_a_page_needs_no_torch():
    code = "import sys, repro.page; print([name for name in ('torch', 'timm') if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["camvid", "pets"])
def test_the_scores_of_segmentation_recipes_are_those_of_the_results(name):
    study = segmentation_study(name)
    score = {
        (run, point): f"{100 * study.row(run, point).miou.mean:.1f}"
        for run, point in [(run, point) for run in study.routed_runs for point in ("round 1", "every round")]
    }
    recipe = " ".join((ROOT / "recipes" / f"{name}.yaml").read_text().replace("\n# ", " ").split())
    both = score["progressive", "round 1"], score["progressive", "every round"]
    assert "mIoU {} % (round 1), {} % (round 2)".format(*both) in recipe
    assert f"{score['resolution', 'round 1']} and {score['resolution', 'every round']} %" in recipe
    assert f"{100 * study.row('plain384', 'the model').miou.mean:.1f} %" in recipe
    page = (ROOT / "docs" / "segmentation.md").read_text()
    assert "{} / {} %".format(*both) in page
    assert score["resolution", "round 1"] in page
