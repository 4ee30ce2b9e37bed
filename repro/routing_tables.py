"""The tables of one model's routing, as Markdown, and single values of it by name for a page's text."""

from __future__ import annotations

from progresvit.table import decimals, threshold
from repro.compare import Difference, is_clear_among
from repro.formats import FULL, EqualAccuracy, GroupResult, MatchedResult, RoutingResult, SettingResult
from repro.tables import Row, each, gmacs, interval, percent, signed, table


def settings_of(result: RoutingResult) -> dict[str, SettingResult]:
    """Settings by name."""
    return {setting.name: setting for setting in result.settings}


def rules_of(result: RoutingResult) -> dict[tuple[str, float | None], EqualAccuracy]:
    """Compute at equal accuracy, by rule and allowed drop."""
    return {(rule_name(row), row.drop): row for row in result.equal_accuracy}


def rule_name(row: EqualAccuracy) -> str:
    """The name of a rule; results of version 0.1.0 call unrecoverable images hopeless."""
    return row.rule.replace("hopeless given up", "unrecoverable rejected")


def gains_of(comparison: MatchedResult) -> dict[float, Difference]:
    """Top-1 of a router minus top-1 of entropy, by the share of images that continue."""
    return {
        share: Difference(mean=router - entropy, lowest=low, highest=high)
        for share, router, entropy, low, high in zip(
            comparison.shares, comparison.router_top1, comparison.entropy_top1, comparison.lowest, comparison.highest
        )
    }


def open_gains(result: RoutingResult) -> list[Difference]:
    """The gains of all routers whose interval is not zero wide."""
    gains = [gain for comparison in result.matched for gain in gains_of(comparison).values()]
    return [gain for gain in gains if gain.lowest < gain.highest]


def router_verdict(result: RoutingResult) -> str:
    """Where routers gain or lose top-1, with the intervals corrected for their number.

    Bonferroni's correction over all open intervals of all routers, with normal intervals as wide as the bootstrap's.
    """
    intervals = len(open_gains(result))
    verdicts = []
    for comparison in result.matched:
        clear = {share: gain for share, gain in gains_of(comparison).items() if is_clear_among(gain, intervals)}
        for verb, sign in (("helps", 1), ("harms", -1)):
            shares = [percent(share, 0) for share, gain in clear.items() if sign * gain.mean > 0]
            if shares:
                verdicts.append(f"{matched_title(comparison)}: {verb} at {', '.join(shares)} %")
    if verdicts:
        return "; ".join(verdicts)
    some = any(gain.clear for gain in open_gains(result))
    return "where it helps is inconclusive" if some else "whether it helps is inconclusive"


def settings_table(result: RoutingResult) -> str:
    """Each calibrated threshold on the images it was calibrated on, between every round and round 1 alone."""
    spent = result.rounds.gmacs_paper

    def row(name: str, top1: float, cost: float, *others: str | None) -> Row:
        tau, exits, guarantee = others or (None, None, None)
        return [name, tau, percent(top1), gmacs(cost), percent(1 - cost / spent[FULL]), exits, guarantee]

    def alone(name: str, place: int) -> Row:
        return row(name, result.rounds.right[place] / result.data.val, spent[place])

    rows = [alone("every round", FULL)]
    for setting in result.settings:
        point, guarantee = setting.point, None
        if setting.epsilon is not None and setting.delta is not None:
            what = "changed" if setting.loss == "unlabelled" else "lost"
            confidence = f"{100 * (1 - setting.delta):g} % confidence"
            guarantee = f"at most {100 * setting.epsilon:g} % of answers {what}, at {confidence}"
        exits = each(point.exit_shares, " / ")
        rows.append(row(setting.name, point.top1, point.gmacs_paper, threshold(point.threshold), exits, guarantee))
    rows.append(alone("round 1 alone", 0))
    heads = ["<setting", "τ", "top-1 (%)", "GMACs", "saved (%)", "exit after each round (%)", "<guarantee"]
    return table("Thresholds, on the images they were calibrated on", heads, rows)


def halves_table(result: RoutingResult) -> str | None:
    """Thresholds from random halves of the images, measured on the other halves; None if there are none."""
    by_setting = {setting.name: setting.halves for setting in result.settings if setting.halves}
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
        for name, halves in by_setting.items()
    ]
    heads = ["<setting", "top-1 lost (points)", "from – to", "saved (%)", "from – to"]
    heads += ["right answers lost (%)", "answers changed (%)"]
    count = " or ".join(map(str, sorted({halves.number for halves in by_setting.values()})))
    title = f"Calibrated on one half of the images, measured on the other; {count} random halves"
    return table(title, heads, rows) if rows else None


def certificates_table(result: RoutingResult) -> str | None:
    """Guarantees on bootstrap draws, beside what chance allows; None if there are none."""
    rows: list[Row] = []
    first = None
    for setting in result.settings:
        draws, epsilon, delta = setting.draws, setting.epsilon, setting.delta
        if not draws or not epsilon or not delta:
            continue
        first = first or draws
        by_chance = delta + 2 * (delta * (1 - delta) / draws.draws) ** 0.5
        rows.append(
            [
                setting.name,
                "answers changed" if setting.loss == "unlabelled" else "right answers lost",
                percent(epsilon),
                percent(draws.mean, 2),
                percent(draws.highest, 2),
                percent(draws.saving),
                percent(draws.exceeded / draws.draws),
                f"{percent(delta)} ({percent(by_chance)})",
            ]
        )
    if first is None:
        return None
    heads = ["<setting", "<bounds", "bound (%)", "mean (%)", "highest (%)", "saved (%)"]
    heads += [f"beyond the bound (% of {first.draws} draws)", "allowed (with 2 standard errors of chance, %)"]
    title = f"Guarantees of {first.draws} bootstrap draws of {first.images:,} images, with all images as the population"
    return table(title, heads, rows)


def matched_title(comparison: MatchedResult) -> str:
    """A router and its training images. Files of format 1 say pictures and held-back."""
    images = comparison.fitted_on.replace("pictures", "images").replace("held-back", "held-out")
    return f"{comparison.router}, fitted on {images}"


def matched_table(comparison: MatchedResult) -> str:
    """A router against entropy when the same share of images continues."""
    rows = [
        [percent(share, 0), gmacs(cost), percent(entropy, 2), percent(router, 2), interval(gain, 2)]
        for (share, gain), cost, entropy, router in zip(
            gains_of(comparison).items(), comparison.gmacs_paper, comparison.entropy_top1, comparison.router_top1
        )
    ]
    heads = ["continue (%)", "GMACs", "entropy, top-1 (%)", "router, top-1 (%)", "gain (points)"]
    fits = f"; mean of {comparison.fits} fits" if comparison.fits > 1 else ""
    return table(f"Entropy and router: {matched_title(comparison)}{fits}", heads, rows)


def withheld_table(result: RoutingResult) -> str | None:
    """Settings that withhold answers; None if there are none."""
    rows: list[Row] = []
    for setting in result.settings:
        if setting.abstain is not None:
            wrong = setting.halves.wrong if setting.halves else None
            spread = f"{percent(wrong.mean)} ({percent(wrong.lowest)} to {percent(wrong.highest)})" if wrong else None
            shares = percent(setting.answered), percent(setting.top1_of_answered)
            rows.append([setting.name, decimals(setting.abstain), *shares, spread])
    heads = ["<setting", "withheld from an entropy of", "answered (%)", "top-1 of answered images (%)"]
    heads += ["error rate among them, calibrated on other halves (%)"]
    return table("Withheld answers", heads, rows) if rows else None


def risk_table(result: RoutingResult) -> str | None:
    """Area under each curve of risk and coverage."""
    rows = [[curve.name, percent(curve.area, 2)] for curve in result.abstention]
    heads = ["<answers of", "mean risk over all coverages (%)"]
    return table("Risk when uncertain answers are withheld", heads, rows) if rows else None


def equal_accuracy_means(result: RoutingResult) -> str | None:
    """Compute of the rules when each may lose the same: means over the splits of ``equal_accuracy_table``."""
    rows = [
        [
            rule_name(row),
            None if row.drop is None else f"{100 * row.drop:g}",
            percent(row.top1, 2),
            gmacs(row.gmacs_paper),
            percent(row.saving),
            None if row.given_up is None else percent(row.given_up, 2),
            None if row.given_up_wrong is None else percent(row.given_up_wrong),
            None if row.errors_added is None else interval(row.errors_added, 2),
            None if row.saving_added is None else interval(row.saving_added, 2),
        ]
        for row in result.equal_accuracy
    ]
    if not rows:
        return None
    heads = ["<rule", "allowed drop (points)", "top-1 (%)", "GMACs", "saved (%)", "rejected (%)"]
    heads += ["of them wrong in every round (%)", "errors added (points)", "saving added (points)"]
    splits = result.equal_accuracy[0].splits
    title = f"Compute at equal accuracy, thresholds chosen on other images; means over {splits} random splits"
    return table(title, heads, rows)


def rejection_table(result: RoutingResult) -> str | None:
    """Top-1 that rejection adds to entropy when the same share of images continues; None if there is none."""
    if not result.rejection:
        return None
    first = result.rejection[0]
    rows: list[Row] = []
    for number, share in enumerate(first.shares):
        if share in (0, 1):  # no image continues, or every one
            continue
        gains = [interval(gains_of(comparison)[share], 2) for comparison in result.rejection]
        start = [percent(share, 0), gmacs(first.gmacs_paper[number]), percent(first.entropy_top1[number], 2)]
        rows.append([*start, *gains])
    heads = ["continue (%)", "GMACs", "entropy, top-1 (%)"]
    heads += [f"{comparison.router} (points)" for comparison in result.rejection]
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
        answered = percent(at.answered) if at.answered < 1 else None
        top1_of_answered = percent(at.top1_of_answered) if answered and at.top1_of_answered is not None else None
        rows.append(row(at.setting, at.top1, at.gmacs_paper, percent(at.exit_shares[0]), answered, top1_of_answered))
    return [*rows, row("round 1 alone", group.top1[0], spent[0])]
