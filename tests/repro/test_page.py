"""Prose with marked places, facts and claims."""

import re

import pytest
import yaml
from progresvit.report.blocks import make_blocks
from progresvit.report.claims import claims_table
from progresvit.report.facts import make_facts
from progresvit.report.page import changed_places, fill_page, find_places, new_page
from progresvit.results.compare import line_up
from progresvit.results.read import read_results
from progresvit.results.study import load_study

from tests.report.made import STUDY, change, measured

PAGE = """# Mine

Prose.

<!-- results: one -->
old
<!-- /results -->

It has <!-- fact: full.top1 -->12<!-- /fact --> % and <!-- fact: full.gmacs -->?<!-- /fact --> GMACs. <!-- a remark -->
"""
BLOCKS = {"one": "new", "two": "other"}
FACTS = {"full.top1": "88.5", "full.gmacs": "1.546"}


def test_only_what_is_marked_changes():
    filled = fill_page(PAGE, BLOCKS, FACTS, "p.md")
    assert "<!-- results: one -->\n\nnew\n\n<!-- /results -->" in filled
    assert "It has <!-- fact: full.top1 -->88.5<!-- /fact --> % and" in filled
    assert "Prose." in filled
    assert "<!-- a remark -->" in filled
    assert fill_page(filled, BLOCKS, FACTS, "p.md") == filled
    assert changed_places(PAGE, filled, "p.md") == [
        "p.md, line 5: results one",
        "p.md, line 9: fact full.top1",
        "p.md, line 9: fact full.gmacs",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("results: one", "results: ome"), "p.md, line 5: there is no block 'ome'; did you mean one?"),
        (("results: one", "results: zebra"), "there is no block 'zebra'; there are one, two."),
        (("fact: full.top1", "fact: full.top2"), "line 9: there is no measured figure 'full.top2'; the nearest"),
        (("<!-- /results -->", ""), "p.md, line 5: <!-- results: one --> is not closed"),
        (("?<!-- /fact -->", "?"), "p.md, line 9: <!-- fact: full.gmacs --> is not closed"),
        (("<!-- results: one -->", ""), "line 7: <!-- /results --> closes nothing"),
        (("<!-- results: one -->", "<!--results: one-->"), "line 5: <!--results: one--> is no marker"),
        (("<!-- results: one -->", "<!-- result: one -->"), "is no marker; write <!-- results: NAME -->"),
        (("12<!-- /fact -->", "12<!-- /facts -->"), "line 9: <!-- /facts --> is no marker"),
        (("12<!-- /fact -->", "12<!-- /results -->"), "closes nothing"),
    ],
)
def test_a_wrong_marker_is_an_error_with_its_line(change, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        fill_page(PAGE.replace(*change), BLOCKS, FACTS, "p.md")


def test_a_new_page_has_every_block_in_order():
    page = new_page("Mine", [("one", "First"), ("two", "Second")])
    assert page.startswith("# Mine\n")
    assert [(place.kind, place.name) for place in find_places(page, "p.md")] == [("results", "one"), ("results", "two")]
    assert page.index("## First") < page.index("results: one") < page.index("## Second")


@pytest.fixture(scope="module")
def facts(made):
    return make_facts(read_results(made), load_study(made / "study.yaml"))


def test_facts_of_runs_are_those_of_the_bits(facts):
    right = [measured("full", 40, seed)[1].mean(axis=0) for seed in (1, 2)]
    assert facts["full.top1"] == facts["full.round2"] == f"{50 * (right[0][1] + right[1][1]):.1f}"
    assert facts["full.round1"] == f"{50 * (right[0][0] + right[1][0]):.1f}"
    assert facts["full.each"] == ", ".join(f"{100 * one[1]:.1f}" for one in right)
    assert (facts["full.gmacs"], facts["full.gmacs1"], facts["full.seeds"]) == ("1.546", "0.286", "2")
    assert (facts["full.parameters"], facts["full.epochs"], facts["full.minutes"]) == ("7,152,980", "40", "10.0")
    assert (facts["data.val"], facts["data.train"], facts["data.classes"]) == ("40", "200", "4")


def test_facts_of_two_runs_go_both_ways(facts, made):
    compared = line_up(read_results(made), load_study(made / "study.yaml"), "construction")
    found = compared.rows[1].less(compared.rows[0], -1)
    assert facts["full-width.points"] == f"{100 * found.mean:+.1f}".replace("-", "−")
    ends = " to ".join(f"{100 * end:+.1f}" for end in (found.lowest, found.highest))
    ends = ends.replace("-", "−").replace("+0.0", "0.0")
    assert facts["full-width.diff"] == f"{facts['full-width.points']} ({ends})"
    assert facts["width-full.points"] == f"{-100 * found.mean:+.1f}".replace("-", "−")
    assert "full-plain.diff" in facts
    assert "full-plain.round1.diff" not in facts  # one round has no first one
    assert "three-width.diff" not in facts  # of no comparison


def test_facts_of_routing_and_shift(facts, made):
    results = read_results(made)
    setting = results.routing["routing"].settings[0]
    assert facts["routing.near-lossless.saving"] == f"{100 * (1 - setting.point.gmacs_paper / 1.546):.1f}"
    assert facts["routing.near-lossless.halves.drop"] == "0.08"
    assert facts["routing.drop-0.5.halves.broken"] == "1"
    assert facts["routing.ten-dogs.pictures"] == "20"
    assert facts["routing.easy-ten.near-lossless.exit1"] == (
        f"{100 * results.routing['routing'].groups[0].at[0].exit_shares[0]:.1f}"
    )
    assert facts["routing.gain.correctness.50"] == "+0.10 (−0.30 to +0.50)"
    assert facts["routing.gain.benefit-half-of-the-held-back-pictures.best"] == "+0.30 (−0.10 to +0.70)"
    assert facts["routing.risk.routed"] == "4.00"
    assert facts["routing.equal.entropy-hopeless-given-up.0.5.given-up"] == "3.00"
    sets = [one for one in results.shift["shift"].sets if one.severity == 3]
    assert facts["shift.severity3.top1"] == f"{100 * sum(one.top1[1] for one in sets) / 3:.1f}"
    assert facts["shift_both-full.clean.top1"] == f"{100 * measured('full', 40, 1)[1][:, 1].mean():.1f}"
    assert "shift.severity5.near-lossless.exit1" in facts


def test_two_figures_of_one_name_are_refused(folder):
    change(folder / "routing.json", lambda values: values["groups"][0].update(name="near-lossless"))
    with pytest.raises(ValueError, match=r"two figures are called routing\.near-lossless\.top1"):
        make_facts(read_results(folder), load_study(folder / "study.yaml"))


def test_a_comparison_may_not_take_the_name_of_another_block(folder):
    study = STUDY | {"comparisons": {"runs": STUDY["comparisons"]["construction"]}}
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    with pytest.raises(ValueError, match="two blocks of the page are called runs"):
        make_blocks(read_results(folder), load_study(folder / "study.yaml"), None)


def test_what_was_not_measured_is_said(made):
    blocks = make_blocks(read_results(made), load_study(made / "study.yaml"), None)
    assert "Not measured: + more." in blocks["construction"].to_markdown("figures")
    for name in ("later", "shift_later.severities", "shift_later.corruptions"):
        assert blocks[name].to_markdown("figures") == "Not measured."
        assert blocks[name].pictures == []


def test_every_command_stands_in_the_appendix(made):
    results = read_results(made)
    text = make_blocks(results, load_study(made / "study.yaml"), None)["runs"].to_markdown("figures")
    for one in results.runs.values():
        assert "\n".join(one.commands) in text
    assert text.count("<details>") == text.count("</details>") == 10


CLAIM = {"claim": "It is good", "paper": "82.2 %", "measured": "{full.top1} %", "verdict": "holds"}


def write_claims(path, *claims):
    path.write_text(yaml.safe_dump(list(claims)))
    return path


def test_claims_quote_what_was_measured(tmp_path):
    other = {"claim": "So\nmuch", "paper": "–", "verdict": "not measured", "why": "needs {full.gmacs} | more"}
    table = claims_table(write_claims(tmp_path / "claims.yaml", CLAIM, other), FACTS)
    assert "| It is good | 82.2 % | 88.5 % | **holds** |" in table
    assert "| So much | – | – | **not measured**: needs 1.546 \\| more |" in table


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (CLAIM | {"mood": "good"}, "claim 2: mood is no key; there are claim, paper, measured, verdict, why."),
        (CLAIM | {"verdict": "maybe"}, "claim 2: verdict should be 'holds', 'does not hold'"),
        (CLAIM | {"verdict": "does not hold"}, "claim 2: say under why the verdict is 'does not hold'"),
        (CLAIM | {"measured": "{full.top3}"}, "claim 2: there is no measured figure 'full.top3'"),
        ({key: CLAIM[key] for key in ("claim", "paper", "verdict")}, "claim 2: say under measured what was found"),
        ({key: CLAIM[key] for key in ("claim", "measured", "verdict")}, "claim 2: paper is missing"),
        ("words", "claim 2"),
    ],
)
def test_a_wrong_claim_is_an_error_with_its_number(tmp_path, claim, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        claims_table(write_claims(tmp_path / "claims.yaml", CLAIM, claim), FACTS)


@pytest.mark.parametrize("text", ["{", "claim: 1", "", "[]"])
def test_a_file_without_claims_is_refused(tmp_path, text):
    (tmp_path / "claims.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"claims\.yaml (is no YAML|should be a list of claims)"):
        claims_table(tmp_path / "claims.yaml", FACTS)
