"""The tables of one model's routing, as Markdown, and single values of it by name for a page's text."""

from __future__ import annotations

from progresvit.table import decimals, threshold
from repro.compare import Difference, is_clear_among
from repro.formats import FULL, EqualAccuracy, GroupResult, MatchedResult, RoutingResult, SettingResult, Spread
from repro.tables import Row, each, gmacs, interval, percent, signed, table


def settings_of(result: RoutingResult) -> dict[str, SettingResult]:
    """Settings by name."""
    return {one.name: one for one in result.settings}


def rules_of(result: RoutingResult) -> dict[tuple[str, float | None], EqualAccuracy]:
    """Compute at equal accuracy, by rule and allowed drop."""
    return {(rule_name(one), one.drop): one for one in result.equal_accuracy}


def rule_name(one: EqualAccuracy) -> str:
    """The name of a rule; results of version 0.1.0 call unrecoverable images hopeless."""
    return one.rule.replace("hopeless given up", "unrecoverable rejected")


def gains_of(one: MatchedResult) -> dict[float, Difference]:
    """Top-1 of a router minus that of entropy, by the share of images that continue."""
    return {
        share: Difference(mean=router - entropy, lowest=low, highest=high)
        for share, router, entropy, low, high in zip(
            one.shares, one.router_top1, one.entropy_top1, one.lowest, one.highest
        )
    }


def open_gains(result: RoutingResult) -> list[Difference]:
    """The gains of all routers whose interval is not zero wide."""
    return [gain for one in result.matched for gain in gains_of(one).values() if gain.lowest < gain.highest]


def router_verdict(result: RoutingResult) -> str:
    """Where routers gain or lose top-1, with the intervals corrected for their number.

    Bonferroni's correction over all open intervals of all routers, with normal intervals as wide as the bootstrap's.
    """
    intervals = len(open_gains(result))
    verdicts = []
    for one in result.matched:
        clear = {share: gain for share, gain in gains_of(one).items() if is_clear_among(gain, intervals)}
        for verb, sign in (("helps", 1), ("harms", -1)):
            shares = [percent(share, 0) for share, gain in clear.items() if sign * gain.mean > 0]
            if shares:
                verdicts.append(f"{matched_title(one)}: {verb} at {', '.join(shares)} %")
    if verdicts:
        return "; ".join(verdicts)
    some = any(gain.clear for gain in open_gains(result))
    return "where it helps cannot be told" if some else "whether it helps cannot be told"


def settings_table(result: RoutingResult) -> str:
    """Each calibrated threshold on the images it was calibrated on, between every round and round 1 alone."""
    spent = result.rounds.gmacs_paper

    def row(name: str, top1: float, cost: float, *others: str | None) -> Row:
        tau, exits, guarantee = others or (None, None, None)
        return [name, tau, percent(top1), gmacs(cost), percent(1 - cost / spent[FULL]), exits, guarantee]

    def alone(name: str, place: int) -> Row:
        return row(name, result.rounds.right[place] / result.data.val, spent[place])

    rows = [alone("every round", FULL)]
    for one in result.settings:
        point, guarantee = one.point, None
        if one.epsilon is not None and one.delta is not None:
            what = "changed" if one.loss == "unlabelled" else "lost"
            guarantee = f"at most {100 * one.epsilon:g} % of answers {what}, at {100 * (1 - one.delta):g} % confidence"
        exits = each(point.exit_shares, " / ")
        rows.append(row(one.name, point.top1, point.gmacs_paper, threshold(point.threshold), exits, guarantee))
    rows.append(alone("round 1 alone", 0))
    heads = ["<setting", "τ", "top-1 (%)", "GMACs", "saved (%)", "exit after each round (%)", "<guarantee"]
    return table("Thresholds, on the images they were calibrated on", heads, rows)


def halves_table(result: RoutingResult) -> str | None:
    """Thresholds from random halves of the images, measured on the other halves; None if there are none."""
    found = {one.name: one.halves for one in result.settings if one.halves}
    rows = [
        [
            name,
            percent(halves.drop.mean, 2),
            f"{percent(halves.drop.lowest, 2)} to {percent(halves.drop.highest, 2)}",
            percent(halves.saving.mean),
            f"{percent(halves.saving.lowest)} to {percent(halves.saving.highest)}",
            None if halves.harm is None else percent(halves.harm.mean, 2),
            None if halves.disagreement is None else percent(halves.disagreement.mean, 2),
        ]
        for name, halves in found.items()
    ]
    heads = ["<setting", "top-1 lost (points)", "from – to", "saved (%)", "from – to"]
    heads += ["right answers lost (%)", "answers changed (%)"]
    count = " or ".join(map(str, sorted({halves.number for halves in found.values()})))
    title = f"Calibrated on one half of the images, measured on the other; {count} random halves"
    return table(title, heads, rows) if rows else None


def certificates_table(result: RoutingResult) -> str | None:
    """Guarantees on bootstrap draws, beside what chance allows; None if there are none."""
    rows: list[Row] = []
    checked = [(one, one.draws) for one in result.settings if one.draws and one.epsilon and one.delta]
    for one, draws in checked:
        assert one.epsilon is not None
        assert one.delta is not None
        by_chance = one.delta + 2 * (one.delta * (1 - one.delta) / draws.draws) ** 0.5
        rows.append(
            [
                one.name,
                "answers changed" if one.loss == "unlabelled" else "right answers lost",
                percent(one.epsilon),
                percent(draws.mean, 2),
                percent(draws.highest, 2),
                percent(draws.saving),
                percent(draws.exceeded / draws.draws),
                f"{percent(one.delta)} ({percent(by_chance)})",
            ]
        )
    if not rows:
        return None
    first = checked[0][1]
    heads = ["<setting", "<bounds", "bound (%)", "mean (%)", "highest (%)", "saved (%)"]
    heads += [f"beyond the bound (% of {first.draws} draws)", "allowed (with 2 standard errors of chance, %)"]
    title = f"Guarantees of {first.draws} bootstrap draws of {first.images:,} images, with all images as the population"
    return table(title, heads, rows)


def matched_title(one: MatchedResult) -> str:
    """A router and its training images. Files of format 1 say pictures and held-back."""
    return f"{one.router}, fitted on {one.fitted_on}".replace("pictures", "images").replace("held-back", "held-out")


def matched_table(one: MatchedResult) -> str:
    """A router against entropy when the same share of images continues."""
    rows = [
        [percent(share, 0), gmacs(cost), percent(entropy, 2), percent(router, 2), interval(gain, 2)]
        for (share, gain), cost, entropy, router in zip(
            gains_of(one).items(), one.gmacs_paper, one.entropy_top1, one.router_top1
        )
    ]
    heads = ["continue (%)", "GMACs", "entropy, top-1 (%)", "router, top-1 (%)", "gain (points)"]
    fits = f"; mean of {one.fits} fits" if one.fits > 1 else ""
    return table(f"Entropy and router: {matched_title(one)}{fits}", heads, rows)


def withheld_table(result: RoutingResult) -> str | None:
    """Settings that withhold answers; None if there are none."""
    rows: list[Row] = []
    for one in result.settings:
        if one.abstain is not None:
            wrong = one.halves.wrong if one.halves else None
            spread = f"{percent(wrong.mean)} ({percent(wrong.lowest)} to {percent(wrong.highest)})" if wrong else None
            rows.append([one.name, decimals(one.abstain), percent(one.answered), percent(one.top1_of_answered), spread])
    heads = ["<setting", "withheld from an entropy of", "answered (%)", "top-1 of answered images (%)"]
    heads += ["error rate among them, calibrated on other halves (%)"]
    return table("Withheld answers", heads, rows) if rows else None


def risk_table(result: RoutingResult) -> str | None:
    """Area under each curve of risk and coverage."""
    rows = [[one.name, percent(one.area, 2)] for one in result.abstention]
    heads = ["<answers of", "mean risk over all coverages (%)"]
    return table("Risk when uncertain answers are withheld", heads, rows) if rows else None


def equal_accuracy_means(result: RoutingResult) -> str | None:
    """Compute of the rules when each may lose the same: means over the splits of ``equal_accuracy_table``."""
    rows = [
        [
            rule_name(one),
            None if one.drop is None else f"{100 * one.drop:g}",
            percent(one.top1, 2),
            gmacs(one.gmacs_paper),
            percent(one.saving),
            None if one.given_up is None else percent(one.given_up, 2),
            None if one.given_up_wrong is None else percent(one.given_up_wrong),
            _added(one.errors_added),
            _added(one.saving_added),
        ]
        for one in result.equal_accuracy
    ]
    if not rows:
        return None
    heads = ["<rule", "allowed drop (points)", "top-1 (%)", "GMACs", "saved (%)", "rejected (%)"]
    heads += ["of them wrong in every round (%)", "errors added (points)", "saving added (points)"]
    splits = result.equal_accuracy[0].splits
    title = f"Compute at equal accuracy, thresholds chosen on other images; means over {splits} random splits"
    return table(title, heads, rows)


def _added(spread: Spread | None) -> str | None:
    if spread is None:
        return None
    return interval(Difference(mean=spread.mean, lowest=spread.lowest, highest=spread.highest), 2)


def rejection_table(result: RoutingResult) -> str | None:
    """Top-1 that rejection adds to entropy when the same share of images continues; None if there is none."""
    if not result.rejection:
        return None
    first = result.rejection[0]
    rows: list[Row] = []
    for number, share in enumerate(first.shares):
        if share in (0, 1):  # no image continues, or every one
            continue
        gains = [interval(gains_of(one)[share], 2) for one in result.rejection]
        start = [percent(share, 0), gmacs(first.gmacs_paper[number]), percent(first.entropy_top1[number], 2)]
        rows.append([*start, *gains])
    heads = ["continue (%)", "GMACs", "entropy, top-1 (%)", *(f"{one.router} (points)" for one in result.rejection)]
    title = f"Top-1 that rejection adds at equal compute, routers cross-fitted on held-out images; {first.fits} fits"
    return table(title, heads, rows)


def groups_table(result: RoutingResult) -> str | None:
    """The groups of classes separately: every round, each setting, round 1 alone."""
    rows = [row for group in result.groups for row in _group_rows(result, group)]
    heads = ["<classes", "images", "<setting", "top-1 (%)", "points", "GMACs", "saved (%)", "exit after round 1 (%)"]
    heads += ["answered (%)", "top-1 of answered images (%)"]
    return table("Groups of classes separately", heads, rows) if rows else None


def _group_rows(result: RoutingResult, group: GroupResult) -> list[Row]:
    spent = result.rounds.gmacs_paper

    def row(setting: str, top1: float, cost: float, *others: str | None) -> Row:
        change = None if setting == "every round" else signed(top1 - group.top1[FULL])
        start = [group.name, f"{group.pictures:,}", setting, percent(top1), change, gmacs(cost)]
        return [*start, percent(1 - cost / spent[FULL]), *(others or (None, None, None))]

    rows = [row("every round", group.top1[FULL], spent[FULL])]
    for at in group.at:
        given = percent(at.answered) if at.answered < 1 else None
        top1_of_given = percent(at.top1_of_answered) if given and at.top1_of_answered is not None else None
        rows.append(row(at.setting, at.top1, at.gmacs_paper, percent(at.exit_shares[0]), given, top1_of_given))
    return [*rows, row("round 1 alone", group.top1[0], spent[0])]
