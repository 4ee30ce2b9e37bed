"""Figures by name, as a page and its claims quote them.

Top-1, shares and savings are in percent, differences in points, all without a unit; GMACs are the paper's.

- ``data.val``, ``data.train``, ``data.classes``, if all measurements are of the same data; ``saving.lowest`` and
  ``saving.highest``, near-lossless, of all runs.
- A run R: ``R.top1`` (full path), ``R.round1``, ``R.round2``, …, ``R.gmacs``, ``R.gmacs1``, …,
  ``R.near-lossless.top1``, ``.gmacs``, ``.exit1``, ``R.saving`` (near-lossless), ``R.seeds`` (how many), ``R.each``
  (full path of each seed), ``R.spread`` (seeds apart, points), the same of a round ``R.round1.each``, ``.spread``,
  ``R.epochs``, ``R.minutes``, ``R.parameters``.
- Two runs A and B of one comparison, either way round: ``A-B.diff`` (A less B, full path, with its interval),
  ``A-B.points`` (the same without), ``A-B.round1.diff``, ``A-B.round1.points``, ``A-B.saving`` (compute that A's
  near-lossless threshold saves of B's full path), ``A-B.gmacs-at-top1`` and ``A-B.saving-at-top1`` (what A spends to
  be as right as B's full path, if it ever is).
- A routing measurement M: ``M.top1``, ``M.round1``, …, ``M.gmacs``, …; a setting S: ``M.S.threshold``, ``.top1``,
  ``.gmacs``, ``.saving``, ``.exit1``, ``.answered``, ``.answered-top1``, ``.halves.drop``, ``.halves.saving``,
  ``.halves.broken``, ``.halves.number``; a group G: ``M.G.pictures``, ``.top1``, ``.round1``, and at a setting
  ``M.G.S.top1``, ``.gmacs``, ``.saving``, ``.exit1``; a router: ``M.gain.ROUTER.50`` (half of the pictures go on) and
  ``M.gain.ROUTER.best``; ``M.gains`` (intervals of all routers that are not zero wide) and ``M.clear-gains`` (those
  that leave out zero); ``M.risk.CURVE`` (mean risk); ``M.equal.RULE.0.5.saving``, ``.top1``, ``.gmacs``,
  ``.given-up``, ``.given-up-wrong`` (0.5 points may be lost).
- A shift measurement, by the name of its file F: ``F.clean.top1``, ``F.severity3.top1``, ``.round1``, and at a setting
  ``F.severity3.S.top1``, ``.gmacs``, ``.saving``, ``.exit1``.

In names of settings, groups, routers and rules, hyphens stand for all but letters, digits, dots and underscores. A
router that was fitted more than once is called by its name and what it was fitted on.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import permutations

from progresvit.report import shift_tables
from progresvit.report.routing_tables import gains
from progresvit.report.wording import gmacs, key, percent, signed, with_interval
from progresvit.results.compare import FULL, ComparedRun, gather, line_up
from progresvit.results.format import Rounds, RunResult
from progresvit.results.format_routing import MatchedResult, RoutingResult
from progresvit.results.format_shift import ShiftResult
from progresvit.results.read import Results
from progresvit.results.study import Study

Found = Iterator[tuple[str, str]]


def make_facts(results: Results, study: Study) -> dict[str, str]:
    """Every figure that can be quoted."""
    facts: dict[str, str] = {}
    for name, value in _all(results, study):
        if facts.setdefault(name, value) != value:
            raise ValueError(f"two figures are called {name}; rename a run, a setting or a measurement.")
    return facts


def find_fact(facts: Mapping[str, str], name: str, where: str) -> str:
    """A figure by name; an error names the nearest."""
    if name in facts:
        return facts[name]
    near = difflib.get_close_matches(name, facts, n=2, cutoff=0.4)
    hint = f"the nearest are {' and '.join(near)}" if near else "progresvit/report/facts.py tells the names"
    raise ValueError(f"{where}: there is no measured figure {name!r}; {hint}.")


def _all(results: Results, study: Study) -> Found:
    everything = [*results.runs.values(), *results.routing.values(), *results.shift.values()]
    for field in ("val", "train", "classes"):
        values = {getattr(one.data, field) for one in everything} - {None}
        if len(values) == 1:
            yield f"data.{field}", f"{values.pop():,}"
    for run in dict.fromkeys(result.run for result in results.runs.values()):
        yield from _of_run(gather(results, run, run))
    routed = [one for one in results.runs.values() if len(one.rounds.bits) > 1]
    savings = [1 - one.near_lossless.gmacs_paper / one.rounds.gmacs_paper[FULL] for one in routed]
    if savings:
        yield "saving.lowest", percent(min(savings))
        yield "saving.highest", percent(max(savings))
    for name in study.comparisons:
        compared = line_up(results, study, name)
        rows = {row.run: row for row in (*compared.rows, *([compared.against] if compared.against else []))}
        for ours, theirs in permutations(rows.values(), 2):
            yield from _of_pair(ours, theirs)
    for measured in results.routing.values():
        yield from _of_routing(measured)
    for shifted in results.shift.values():
        yield from _of_shift(shifted)


def _of_rounds(name: str, rounds: Rounds) -> Found:
    yield f"{name}.gmacs", gmacs(rounds.gmacs_paper[FULL])
    for number, spent in enumerate(rounds.gmacs_paper, start=1):
        yield f"{name}.gmacs{number}", gmacs(spent)


def _of_run(run: ComparedRun) -> Found:
    name, full = run.run, run.top1_of_seeds(FULL)
    yield f"{name}.top1", percent(run.top1(FULL))
    for place in range(run.rounds):
        yield f"{name}.round{place + 1}", percent(run.top1(place))
    yield from _of_rounds(name, run.first.rounds)
    yield f"{name}.near-lossless.top1", percent(run.mean(lambda one: one.near_lossless.top1))
    yield f"{name}.near-lossless.gmacs", gmacs(run.mean(lambda one: one.near_lossless.gmacs_paper))
    yield f"{name}.near-lossless.exit1", percent(run.mean(lambda one: one.near_lossless.exit_shares[0]))
    yield f"{name}.saving", percent(run.saving)
    yield f"{name}.seeds", str(len(run.seeds))
    yield f"{name}.each", ", ".join(percent(one) for one in full)
    yield f"{name}.spread", percent(max(full) - min(full))
    for place in range(run.rounds):
        tops = run.top1_of_seeds(place)
        yield f"{name}.round{place + 1}.each", ", ".join(percent(one) for one in tops)
        yield f"{name}.round{place + 1}.spread", percent(max(tops) - min(tops))
    yield f"{name}.epochs", str(run.first.epochs)
    yield f"{name}.minutes", f"{run.mean(lambda one: one.seconds / 60):.1f}"
    yield f"{name}.parameters", f"{run.first.parameters:,}"


def _of_pair(ours: ComparedRun, theirs: ComparedRun) -> Found:
    name = f"{ours.run}-{theirs.run}"
    found = ours.less(theirs, FULL)
    yield f"{name}.diff", with_interval(found)
    yield f"{name}.points", signed(found.mean)
    if ours.rounds > 1 and theirs.rounds > 1:
        found = ours.less(theirs, 0)
        yield f"{name}.round1.diff", with_interval(found)
        yield f"{name}.round1.points", signed(found.mean)
    full = theirs.first.rounds.gmacs_paper[FULL]
    yield f"{name}.saving", percent(ours.mean(lambda one: 1 - one.near_lossless.gmacs_paper / full))
    reached = [_cheapest(one, theirs.top1(FULL)) for one in ours.seeds]
    known = [spent for spent in reached if spent is not None]
    if len(known) == len(reached):
        yield f"{name}.gmacs-at-top1", gmacs(sum(known) / len(known))
        yield f"{name}.saving-at-top1", percent(1 - sum(known) / len(known) / full)


def _cheapest(run: RunResult, top1: float) -> float | None:
    """GMACs from which on a frontier is nowhere below an accuracy; None if its end is."""
    low = [place for place, point in enumerate(run.frontier) if point.top1 < top1]
    place = low[-1] + 1 if low else 0
    return run.frontier[place].gmacs_paper if place < len(run.frontier) else None


def _of_routing(result: RoutingResult) -> Found:
    name, full = result.name, result.rounds.gmacs_paper[FULL]
    shares = [right / result.data.val for right in result.rounds.right]
    yield f"{name}.top1", percent(shares[FULL])
    for number, share in enumerate(shares, start=1):
        yield f"{name}.round{number}", percent(share)
    yield from _of_rounds(name, result.rounds)
    for one in result.settings:
        start, limits = f"{name}.{key(one.name)}", one.point.threshold
        several = limits if isinstance(limits, tuple) else (limits,)
        yield f"{start}.threshold", " / ".join(f"{limit:.4g}" for limit in several)
        yield from _at(start, one.point.top1, one.point.gmacs_paper, full, one.point.exit_shares[0])
        yield f"{start}.answered", percent(one.answered)
        yield f"{start}.answered-top1", percent(one.top1_of_answered)
        if one.halves is not None:
            yield f"{start}.halves.drop", percent(one.halves.drop.mean, 2)
            yield f"{start}.halves.saving", percent(one.halves.saving.mean)
            yield f"{start}.halves.number", str(one.halves.number)
            if one.halves.broken is not None:
                yield f"{start}.halves.broken", str(one.halves.broken)
    for group in result.groups:
        start = f"{name}.{key(group.name)}"
        yield f"{start}.pictures", f"{group.pictures:,}"
        yield f"{start}.top1", percent(group.top1[FULL])
        for number, share in enumerate(group.top1, start=1):
            yield f"{start}.round{number}", percent(share)
        for at in group.at:
            yield from _at(f"{start}.{key(at.setting)}", at.top1, at.gmacs_paper, full, at.exit_shares[0])
    yield from _of_routers(result)
    for curve in result.abstention:
        yield f"{name}.risk.{key(curve.name)}", percent(curve.area, 2)
    for rule in result.equal_accuracy:
        start = f"{name}.equal.{key(rule.rule)}" + ("" if rule.drop is None else f".{100 * rule.drop:g}")
        yield f"{start}.top1", percent(rule.top1)
        yield f"{start}.gmacs", gmacs(rule.gmacs_paper)
        yield f"{start}.saving", percent(rule.saving)
        if rule.given_up is not None:
            yield f"{start}.given-up", percent(rule.given_up, 2)
        if rule.given_up_wrong is not None:
            yield f"{start}.given-up-wrong", percent(rule.given_up_wrong)


def _of_routers(result: RoutingResult) -> Found:
    fitted = Counter(one.router for one in result.matched)

    def called(one: MatchedResult) -> str:
        return key(one.router if fitted[one.router] == 1 else f"{one.router} {one.fitted_on}")

    open_ = [gain for one in result.matched for gain in gains(one) if gain.lowest < gain.highest]
    yield f"{result.name}.gains", str(len(open_))
    yield f"{result.name}.clear-gains", str(sum(gain.lowest > 0 or gain.highest < 0 for gain in open_))
    for one in result.matched:
        found = gains(one)
        for share, gain in zip(one.shares, found):
            yield f"{result.name}.gain.{called(one)}.{100 * share:g}", with_interval(gain, 2)
        best = max(range(len(found)), key=lambda place: found[place].mean)
        yield f"{result.name}.gain.{called(one)}.best", with_interval(found[best], 2)


def _of_shift(result: ShiftResult) -> Found:
    models = {result.model: result}
    full = result.gmacs_paper[FULL]
    for severity in shift_tables.severities_of(models):
        sets = shift_tables.sets_of(result, severity)
        start = f"{result.name}.severity{severity}" if severity else f"{result.name}.clean"
        yield f"{start}.top1", percent(shift_tables.mean_top1(sets, FULL))
        for place in range(len(result.gmacs_paper)):
            yield f"{start}.round{place + 1}", percent(shift_tables.mean_top1(sets, place))
        for setting in shift_tables.settings_of(models):
            at = shift_tables.mean_at(sets, setting)
            if at is not None:
                yield from _at(f"{start}.{key(setting)}", at["top1"], at["gmacs"], full, at["exit1"])


def _at(start: str, top1: float, spent: float, full: float, exit1: float) -> Found:
    yield f"{start}.top1", percent(top1)
    yield f"{start}.gmacs", gmacs(spent)
    yield f"{start}.saving", percent(1 - spent / full)
    yield f"{start}.exit1", percent(exit1)
