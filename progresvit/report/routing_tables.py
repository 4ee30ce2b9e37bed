"""The tables of one model's routing: settings, routers against entropy, withheld answers, groups of classes."""

from __future__ import annotations

from progresvit.evaluation.table import Column, Row, Table, decimals, threshold
from progresvit.report.wording import from_to, gmacs, percent, shares, signed, with_interval
from progresvit.results.compare import Difference
from progresvit.results.format_routing import MatchedResult, RoutingResult, SettingResult, Spread


def settings_table(result: RoutingResult) -> Table:
    """Each calibrated threshold on the pictures that it was calibrated on, between every round and the first alone."""
    rounds, full = result.rounds, result.rounds.gmacs_paper[-1]
    rows = [_round_row("every round", result, -1)]
    rows += [
        {
            "setting": one.name,
            "threshold": one.point.threshold,
            "top1": one.point.top1,
            "gmacs": one.point.gmacs_paper,
            "saving": 1 - one.point.gmacs_paper / full,
            "shares": one.point.exit_shares,
            "promise": _promise(one),
        }
        for one in result.settings
    ]
    if len(rounds.resolutions) > 1:
        rows.append(_round_row("round 1 alone", result, 0))
    columns = [
        Column("setting", "setting", left=True),
        Column("threshold", "τ", threshold),
        Column("top1", "top-1 (%)", percent),
        Column("gmacs", "GMACs", gmacs),
        Column("saving", "saved (%)", percent),
        Column("shares", "leave after each round (%)", shares),
        Column("promise", "guarantee", left=True),
    ]
    return Table("Thresholds, on the pictures that they were calibrated on", columns, rows)


def _round_row(label: str, result: RoutingResult, place: int) -> Row:
    spent = result.rounds.gmacs_paper
    row: Row = {"setting": label, "threshold": None, "top1": result.rounds.right[place] / result.data.val}
    return row | {"gmacs": spent[place], "saving": 1 - spent[place] / spent[-1], "shares": None, "promise": None}


def _promise(one: SettingResult) -> str | None:
    if one.epsilon is None or one.delta is None:
        return None
    return f"at most {100 * one.epsilon:g} % of answers lost, at {100 * (1 - one.delta):g} % confidence"


def halves_table(result: RoutingResult) -> Table | None:
    """The same thresholds from random halves of the pictures, measured on the other halves; None if nobody did."""
    rows: list[Row] = [
        {
            "setting": one.name,
            "drop": one.halves.drop.mean,
            "drop_range": (one.halves.drop.lowest, one.halves.drop.highest),
            "saving": one.halves.saving.mean,
            "saving_range": (one.halves.saving.lowest, one.halves.saving.highest),
            "broken": None if one.halves.broken is None else f"{one.halves.broken} of {one.halves.number}",
        }
        for one in result.settings
        if one.halves is not None
    ]
    if not rows:
        return None
    columns = [
        Column("setting", "setting", left=True),
        Column("drop", "lost (points)", lambda share: percent(share, 2)),
        Column("drop_range", "from – to", lambda ends: from_to(ends, 2)),
        Column("saving", "saved (%)", percent),
        Column("saving_range", "from – to", from_to),
        Column("broken", "guarantee broken on"),
    ]
    halves = {one.halves.number for one in result.settings if one.halves is not None}
    count = " or ".join(map(str, sorted(halves)))
    return Table(f"Calibrated on one half of the pictures, measured on the other; {count} random halves", columns, rows)


def matched_title(one: MatchedResult) -> str:
    """A router and what it learned from."""
    return f"{one.router}, fitted on {one.fitted_on}"


def gains(one: MatchedResult) -> list[Difference]:
    """Router less entropy, at each share."""
    return [
        Difference(mean=router - entropy, lowest=low, highest=high)
        for router, entropy, low, high in zip(one.router_top1, one.entropy_top1, one.lowest, one.highest)
    ]


def matched_table(one: MatchedResult) -> Table:
    """A router against entropy, the same share of the pictures going on."""
    rows: list[Row] = [
        {"share": share, "gmacs": spent, "entropy": entropy, "router": router, "gain": gain}
        for share, spent, entropy, router, gain in zip(
            one.shares, one.gmacs_paper, one.entropy_top1, one.router_top1, gains(one)
        )
    ]
    columns = [
        Column("share", "go on (%)", lambda share: percent(share, 0)),
        Column("gmacs", "GMACs", gmacs),
        Column("entropy", "entropy, top-1 (%)", lambda share: percent(share, 2)),
        Column("router", "router, top-1 (%)", lambda share: percent(share, 2)),
        Column("gain", "gain (points)", lambda gain: with_interval(gain, 2)),
    ]
    fits = f"; mean of {one.fits} fits" if one.fits > 1 else ""
    return Table(f"Entropy and the router: {matched_title(one)}{fits}", columns, rows)


def withheld_table(result: RoutingResult) -> Table | None:
    """Settings that withhold answers; None if there are none."""
    rows: list[Row] = [
        {
            "setting": one.name,
            "abstain": one.abstain,
            "answered": one.answered,
            "top1": one.top1_of_answered,
            "halves": one.halves and one.halves.wrong,
        }
        for one in result.settings
        if one.abstain is not None
    ]
    if not rows:
        return None
    columns = [
        Column("setting", "setting", left=True),
        Column("abstain", "withheld from an entropy of", decimals),
        Column("answered", "answered (%)", percent),
        Column("top1", "top-1 of the answers (%)", percent),
        Column("halves", "wrong among them, calibrated on other halves (%)", _spread),
    ]
    return Table("Withheld answers", columns, rows)


def _spread(found: Spread) -> str:
    return f"{percent(found.mean)} ({from_to((found.lowest, found.highest))})"


def risk_table(result: RoutingResult) -> Table | None:
    """Area under each curve of risk and coverage."""
    rows: list[Row] = [{"curve": one.name, "area": one.area} for one in result.abstention]
    columns = [
        Column("curve", "answers of", left=True),
        Column("area", "mean risk over all coverages (%)", lambda share: percent(share, 2)),
    ]
    return Table("Risk when unsure answers are withheld", columns, rows) if rows else None


def equal_accuracy_table(result: RoutingResult) -> Table | None:
    """Compute of the rules when each may lose the same."""
    rows: list[Row] = [
        {
            "rule": one.rule,
            "drop": None if one.drop is None else f"{100 * one.drop:g}",
            "top1": one.top1,
            "gmacs": one.gmacs_paper,
            "saving": one.saving,
            "given_up": one.given_up,
            "wrong": one.given_up_wrong,
        }
        for one in result.equal_accuracy
    ]
    columns = [
        Column("rule", "rule", left=True),
        Column("drop", "may lose (points)"),
        Column("top1", "top-1 (%)", lambda share: percent(share, 2)),
        Column("gmacs", "GMACs", gmacs),
        Column("saving", "saved (%)", percent),
        Column("given_up", "given up (%)", lambda share: percent(share, 2)),
        Column("wrong", "of them wrong in every round (%)", percent),
    ]
    if not rows:
        return None
    splits = result.equal_accuracy[0].splits
    title = f"Compute at equal accuracy, thresholds chosen on other pictures; means over {splits} random halves"
    return Table(title, columns, rows)


def groups_table(result: RoutingResult) -> Table | None:
    """The groups of classes by themselves: every round, and each setting."""
    full, several = result.rounds.gmacs_paper[-1], len(result.rounds.gmacs_paper) > 1
    rows: list[Row] = []
    for group in result.groups:
        rows.append(
            {"group": group.name, "pictures": group.pictures, "setting": "every round", "top1": group.top1[-1]}
            | {"change": None, "gmacs": full, "saving": 0.0, "exit1": None, "answered": None, "answered_top1": None}
        )
        for at in group.at:
            withholds = at.answered < 1
            rows.append(
                {
                    "group": group.name,
                    "pictures": group.pictures,
                    "setting": at.setting,
                    "top1": at.top1,
                    "change": at.top1 - group.top1[-1],
                    "gmacs": at.gmacs_paper,
                    "saving": 1 - at.gmacs_paper / full,
                    "exit1": at.exit_shares[0],
                    "answered": at.answered if withholds else None,
                    "answered_top1": at.top1_of_answered if withholds else None,
                }
            )
        if several:
            spent = result.rounds.gmacs_paper[0]
            rows.append(
                {"group": group.name, "pictures": group.pictures, "setting": "round 1 alone", "top1": group.top1[0]}
                | {"change": group.top1[0] - group.top1[-1], "gmacs": spent, "saving": 1 - spent / full, "exit1": None}
                | {"answered": None, "answered_top1": None}
            )
    columns = [
        Column("group", "classes", left=True),
        Column("pictures", "pictures", lambda count: f"{count:,}"),
        Column("setting", "setting", left=True),
        Column("top1", "top-1 (%)", percent),
        Column("change", "points", signed),
        Column("gmacs", "GMACs", gmacs),
        Column("saving", "saved (%)", percent),
        Column("exit1", "leave after round 1 (%)", percent),
        Column("answered", "answered (%)", percent),
        Column("answered_top1", "top-1 of the answers (%)", percent),
    ]
    return Table("Groups of classes by themselves", columns, rows) if rows else None
