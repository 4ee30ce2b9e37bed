"""The card of a bundled model, rendered from its figures; no number on it is typed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from about_models import ABOUT, About

from progresvit.io.model_folder import DEFAULT_MODEL

Figures = Mapping[str, Any]

WHAT = {
    "near-lossless": "the default: top-1 within 0.03 points of all rounds, on the calibration images",
    "drop-0.5": "certified: at most 0.5 % of answers lost, at 95 % confidence",
    "drop-1": "certified: at most 1 % of answers lost, at 95 % confidence",
    "careful": "as near-lossless, and uncertain answers and out-of-distribution images are withheld",
}


def render(figures: Figures) -> str:
    """The card, in Markdown. Sections without figures are left out."""
    about = ABOUT[figures["name"]]
    groups = [name for name in figures["images"] if name == "all" or name in about.groups]
    parts = [
        _head(figures, about),
        _data(figures, about),
        _accuracy(figures),
        _early_exit(figures, groups),
        _certificates(figures),
        _shift(figures, about),
        _plain(figures, about),
        _abstention(figures, groups),
        _ood(figures, about),
        _training(figures),
        _limits(figures, about),
        _terms(figures, about),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(figures: Figures, about: About) -> str:
    name = figures["name"]
    sides = ", then ".join(f"{round_['resolution']} px, {round_['channels']} channels" for round_ in figures["rounds"])
    model = "" if name == DEFAULT_MODEL else f" --model {name}"
    uses = {
        f"progresvit classify photo.jpg{model}": "with the setting near-lossless",
        f"progresvit classify photo.jpg{model} --threshold careful": "uncertain answers are withheld",
        f"progresvit evaluate {name} --data DATA --split . --out records.parquet": "on your labelled images",
    }
    width = max(map(len, uses))
    commands = "\n".join(f"{command:<{width}}    # {what}" for command, what in uses.items())
    rounds = fill(
        f"A progressive vision transformer with {len(figures['rounds'])} rounds ({sides}) and "
        f"{figures['parameters']:,} parameters, stored in float16 and run in float32.",
        120,
    )
    made = fill(
        "`scripts/bundle_model.py` measured the figures below (`figures.json`) and rendered this card. SHA-256 of the "
        f"weights: `{figures['weights'][:16]}…`.",
        120,
    )
    return f"# {name}\n\n{rounds}\n\n```\n{commands}\n```\n\n{fill(_known(figures, about), 120)}\n\n{made}"


def _known(figures: Figures, about: About) -> str:
    names = ", ".join(f"{label} ({class_id})" for class_id, label in figures["classes"].items())
    folders = "as in brackets" if names else "by WordNet id (n01440764)"
    listed = f"{': ' if names else ''}{names}. To evaluate it on your own images, name the class folders {folders}."
    return f"It knows {figures['num_classes']:,} {about.classes}{listed}"


def _data(figures: Figures, about: About) -> str:
    counts = [f"{run['images']:,}" for run in figures["training"]]
    stages = f" in {len(counts)} stages" if len(counts) > 1 else ""
    sources = "\n".join(_bullet(f"{source}{';' if n < len(about.sources) else '.'}") for n, source in
                        enumerate(about.sources, start=1))  # fmt: skip
    images = figures["images"]
    apart = [f"{count:,} of the {name}" for name, count in images.items() if name in about.groups]
    of_groups = f" ({' and '.join(apart)})" if apart else ""
    selected = " ".join(filter(None, (_selected(figures, about), about.seen_note)))
    evaluated = (
        f"Evaluated on {figures['data']}: {images['all']:,} images{of_groups} that were not used for training. "
        f"{selected} The settings were calibrated on {images['calibration half']:,} of the evaluation "
        f"images, drawn by name; figures of settings come from the other {images['test half']:,}."
    )
    return (
        f"## Data\n\nTrained on {' and '.join(counts)} images{stages}:\n\n{sources}\n\n{fill(evaluated, 120)}\n\n"
        f"{fill(_seen(figures), 120)}"
    )


def _selected(figures: Figures, about: About) -> str:
    if figures["selected_on"] == "evaluation":
        return "The checkpoint was selected by its accuracy on them, so the figures are too optimistic."
    if figures["selected_on"] == "held-out":
        held_out = figures["training"][-1]["held_out"]
        return f"{about.chosen} by accuracy on {held_out:,} other images, held out of the training images."
    return "They were not used to select the checkpoint."


def _seen(figures: Figures) -> str:
    seen = figures["in_imagenet_training_set"]
    pretrained = [run["recipe"].get("model", {}).get("start") for run in figures["training"]]
    teachers = sorted({name for run in figures["training"] for name in _teachers(run["teacher"])})
    others = [*(["the pretrained start"] if any(pretrained) else []), *(f"the teacher {name}" for name in teachers)]
    listed = ", ".join([*others[:-2], " and ".join(others[-2:])])
    if not others:
        return "It was trained from scratch and without a teacher."
    text = f"ImageNet's training set was used to train {listed}. "
    if not seen["images"]:
        return text + "By their file names, none of the evaluation images is part of it."
    text += (
        f"By their file names, {seen['images']:,} of the evaluation images are part of it: the figures are optimistic."
    )
    if not seen["others"]:
        return text
    tops = ", ".join(f"{_interval(top1)} in round {s}" for s, top1 in enumerate(seen["top1_of_others"], start=1))
    return f"{text} Top-1 on the other {seen['others']:,}: {tops}."


def _accuracy(figures: Figures) -> str:
    columns = list(figures["images"])
    rows = [
        [f"round {number}", f"{figure['gmacs']:.3f}", _interval(figure["top1"]["all"])]
        + [_percent(figure["top1"][name]["mean"]) for name in columns[1:]]
        for number, figure in enumerate(figures["rounds"], start=1)
    ]
    return (
        "## Accuracy of each round\n\nTop-1 in percent (with its 95 % interval), and cumulative GMACs in the paper's "
        f"convention.\n\n{_table(['', 'GMACs', *columns], rows)}"
    )


def _early_exit(figures: Figures, groups: list[str]) -> str:
    routed = {name: setting for name, setting in figures["settings"].items() if name != "careful"}
    first, full = figures["rounds"][0], figures["rounds"][-1]
    rows = [["all rounds", "–", _interval(full["top1"]["test half"]), "–", f"{full['gmacs']:.3f}", "–", "–"]]
    for name, setting in routed.items():
        rows.append([f"`{name}`", _threshold(setting["threshold"]), _interval(setting["top1"]["all"])])
        rows[-1] += [
            _interval(setting["difference"], 2),
            f"{setting['gmacs']['all']:.3f}",
            _percent(setting["saving"]["all"]),
        ]
        rows[-1] += [" / ".join(map(_percent, setting["exit_shares"]["all"][:-1]))]
    saved = 1 - first["gmacs"] / full["gmacs"]
    top1 = _interval(first["top1"]["test half"])
    rows.append(["round 1 only", "–", top1, "–", f"{first['gmacs']:.3f}", _percent(saved), "100.0"])
    heads = ["setting", "τ", "top-1", "difference to all rounds, points", "GMACs", "saved", "early exits"]
    parts = [
        "## Early exit",
        fill(
            "An image exits after the first round whose top-10 entropy is below τ. In percent, with 95 % intervals, on "
            f"the {figures['images']['test half']:,} images that were not used for calibration.",
            120,
        ),
        _table(heads, rows),
    ]
    if len(groups) > 1:
        parts.append(_by_group(routed, groups[1:]))
    parts.append("\n".join(f"- `{name}`: {_what(name, setting)}." for name, setting in figures["settings"].items()))
    parts.append(
        "`--budget-gmacs G` selects the next threshold of a grid, `budgets.json`, that spends at most G on average."
    )
    parts.append(
        f"![Accuracy against GMACs on the test half](../../../docs/figures/{figures['name']}_frontier.png)",
    )
    return "\n\n".join(parts)


def _by_group(routed: Mapping[str, Any], groups: list[str]) -> str:
    rows = [
        [f"`{name}`", *(_percent(setting["top1"][group]["mean"]) for group in groups)]
        + [
            f"{_percent(setting['saving'][group])} / {_percent(1 - setting['exit_shares'][group][-1])}"
            for group in groups
        ]
        for name, setting in routed.items()
    ]
    heads = ["setting", *(f"top-1, {name}" for name in groups), *(f"saved / early exits, {name}" for name in groups)]
    return f"The groups separately:\n\n{_table(heads, rows)}"


def _what(name: str, setting: Figures) -> str:
    if setting["rule"] == "budget":
        return f"{name.removeprefix('budget-')} GMACs on average, on the calibration images"
    return WHAT[name]


def _certificates(figures: Figures) -> str:
    checks = figures["certificates"]
    rows = []
    for name, setting in checks["settings"].items():
        exceeded = f"{setting['exceeded']} of {checks['draws']} ({_percent(setting['exceeded'] / checks['draws'])})"
        lost = figures["settings"][name]["lost"]
        rows.append([f"`{name}`", _percent(setting["epsilon"], 2), _interval(lost, 2), exceeded])
        rows[-1] += [_percent(setting["delta"]), _percent(setting["harm"]["mean"], 2), _percent(setting["saving"])]
    heads = ["setting", "bound", "lost, test half", "draws beyond the bound", "allowed", "mean harm", "mean saving"]
    text = (
        "A certificate bounds the correct answers that an early exit loses; errors that it corrects do not count. To "
        f"check it, {checks['images']:,} calibration images were drawn from all {figures['images']['all']:,} with "
        f"replacement, {checks['draws']} times; each time a threshold was certified and the share of all images that "
        "it harms was counted. In percent:"
    )
    seen = figures["in_imagenet_training_set"]["images"] / figures["images"]["all"]
    note = (
        f"{_percent(seen)} % of these images were in the training set of the start and the teachers: for new images "
        "the bounds, and the limits of `careful`, are not certified."
    )
    noted = f"\n\n{fill(note, 120)}" if seen else ""
    return f"## Check of the certificates\n\n{fill(text, 120)}\n\n{_table(heads, rows)}{noted}"


def _shift(figures: Figures, about: About) -> str:
    if "shift" not in figures:
        return ""
    shift = figures["shift"]
    full = shift["rounds"][-1]["gmacs"]
    rows = [
        [f"round {number}", _interval(round_["top1"]), f"{round_['gmacs']:.3f}", _percent(1 - round_["gmacs"] / full)]
        for number, round_ in enumerate(shift["rounds"], start=1)
    ]
    for name, setting in shift["settings"].items():
        if name != "careful":
            rows.append([f"`{name}`", _interval(setting["top1"]["all"]), f"{setting['gmacs']['all']:.3f}"])
            rows[-1] += [_percent(setting["saving"]["all"])]
    text = (
        f"{shift['images']:,} images of {shift['data']}, with the same thresholds. The certificates do not hold here. "
        f"{about.shift_note}"
    )
    heads = ["", "top-1", "GMACs", "saved"]
    return f"## Distribution shift\n\n{fill(text.strip(), 120)}\n\n{_table(heads, rows)}"


def _plain(figures: Figures, about: About) -> str:
    if "plain" not in figures:
        return ""
    rows = [
        [
            f"{vit['resolution']} px" + (", as published" if vit["published"] else ""),
            f"{vit['gmacs']:.3f}",
            *(_interval(vit["top1"][key]) for key in ("all", "test half")),
            "–" if vit["routed"] is None else f"{_percent(vit['routed']['top1'])} at {vit['routed']['gmacs']:.3f}",
        ]
        for vit in figures["plain"]
    ]
    text = (
        f"DeiT-Tiny, {about.plain_note}one model for each resolution. The plot above shows them beside the frontier. "
        f"{figures['name']} has all budgets in one model; at these resolutions it is not more accurate than the plain "
        "model of that budget."
    )
    heads = ["resolution", "GMACs", "top-1, all", "top-1, test half", f"{figures['name']} at that budget, test half"]
    return f"## Plain DeiT-Tiny\n\n{fill(text, 120)}\n\n{_table(heads, rows)}"


def _abstention(figures: Figures, groups: list[str]) -> str:
    one = figures["settings"]["careful"]
    withheld, rows = [], []
    if "abstain" in one:
        withheld.append(f"answers with an entropy of {one['abstain']:.4f} or more")
        rows.append(["answered images", *(_percent(one["answered"][group]) for group in groups)])
        rows.append(["top-1 among answered images", *(_percent(one["top1_of_answered"][group]) for group in groups)])
    if "ood" in one:
        withheld.append(
            f"images whose {one['ood']['score']} is below {one['ood']['limit']:.4f}, which are called "
            f"out-of-distribution ({_percent(one['ood']['share'], 0)} % of the calibration images)"
        )
        rows.append(["out-of-distribution", *(_percent(one["out_of_distribution"][group]) for group in groups)])
    text = (
        f"`careful` withholds {', and '.join(withheld) or 'no answer'}. The first limit was chosen for an error "
        f"rate of at most {_percent(figures['max_error'], 0)} % among answered calibration images. In percent, "
        "on the test half:"
    )
    return (
        f"## Abstention\n\n{fill(text, 120)}\n\n{_table(['', *groups], rows)}\n\n"
        "The limits were calibrated on images of the model's classes alone."
    )


def _ood(figures: Figures, about: About) -> str:
    if "ood" not in figures:
        return ""
    ood = figures["ood"]
    rows = [
        [score["answers"], score["score"], f"{score['auroc']:.3f}", _percent(score["fpr95"])] for score in ood["scores"]
    ]  # fmt: skip
    text = (
        f"{ood['known_images']:,} images of known classes against {ood['unknown_images']:,} images of "
        f"{len(ood['unknown_classes']):,} unknown classes. {about.ood_note} FPR95 is the share (in percent) of "
        "unknown images that are accepted when 95 % of the known images are accepted; chance is an AUROC of 0.5 and "
        "an FPR95 of 95."
    )
    calibrated, removed = ood["calibrated"], ood["known_classes"] < figures["num_classes"]
    limit = (
        f"{'With the remaining classes, a' if removed else 'A'} limit on {calibrated['score']} that was calibrated on "
        f"{ood['calibration_images']:,} other known images, "
        f"to reject {_percent(calibrated['share'], 0)} % of them, rejects {_percent(calibrated['known_rejected'])} % "
        f"of the known and {_percent(calibrated['unknown_rejected'])} % of the unknown images."
    )
    table = _table(["answers", "score", "AUROC", "FPR95"], rows)
    return f"## Out-of-distribution images\n\n{fill(text, 120)}\n\n{table}\n\n{fill(limit, 120)}"


def _training(figures: Figures) -> str:
    lines = ["## Training"]
    for number, run in enumerate(figures["training"], start=1):
        stage = f"Stage {number}: " if len(figures["training"]) > 1 else ""
        teacher = f", {_distilled(run['recipe']['distillation'])}" if run["teacher"] else ""
        start = run["recipe"].get("model", {}).get("start")
        begun = f", begun from {start}" if start else ""
        machines = f"{run['processes']} × {run['device']}" if run["processes"] > 1 else f"one {run['device']}"
        stopped = run.get("stopped_at")
        short = f" The weights were saved after step {stopped:,} of {run['steps']:,}." if stopped else ""
        if "interpolated" in run:
            trained = run["interpolated"]["trained"]
            short += (
                f" The weights are {trained:g} × the trained weights + {1 - trained:g} × the weights of the "
                "start (WiSE-FT, `scripts/interpolate.py`)."
            )
        values = (
            f"{stage}{run['images']:,} images, {run['epochs']} epochs, seed {run['seed']}{begun}{teacher}; {machines}, "
            f"torch {run['torch']}, {run['minutes']:g} minutes of optimizer steps.{short}"
        )
        lines.append(f"{fill(values, 120)}\n\n```\n{run['command']}\n```")
    lines.append(
        "`deit_tiny` and `deit_tiny.safetensors` are local copies of timm's `deit_tiny_patch16_224.fb_in1k`. The whole "
        "recipe is in\n`figures.json`."
    )
    return "\n\n".join(lines)


def _distilled(wanted: Mapping[str, Any]) -> str:
    """The kind of distillation; old runs without the key are hard."""
    names = " and ".join(_teachers(wanted["teacher"]))
    if wanted.get("kind", "hard") == "hard":
        return f"hard distillation from {names}"
    among = "all classes of the first" if wanted["classes"] == "teacher" else "the classes of the data"
    places = ", for the image and for each position" if wanted["map_weight"] else ""
    return f"soft distillation from {names} over {among}{places}"


def _teachers(names: str | Sequence[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _limits(figures: Figures, about: About) -> str:
    limits = [
        f"It knows only its {figures['num_classes']:,} classes and assigns one of them to every image.",
        "It is a small model. Do not use it for decisions about people, medicine, safety or law.",
        *about.limits,
    ]
    text = "## Limits\n\n" + "\n".join(_bullet(limit) for limit in limits)
    if "unknown" not in figures:
        return text
    flags = ("abstained", "out_of_distribution")
    rows = [
        [
            row["image"],
            row["answer"],
            _percent(row["probability"]),
            f"{row['exit_round']}",
            *(_yes(row[f]) for f in flags),
        ]
        for row in figures["unknown"]
    ]
    table = _table(["image", "answer", "probability", "round", "withheld", "out-of-distribution"], rows)
    return f"{text}\n\nImages that show none of its classes, with the setting `careful` (in percent):\n\n{table}"


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _terms(figures: Figures, about: About) -> str:
    starts = [run["recipe"].get("model", {}).get("start") or "" for run in figures["training"]]
    from_deit = any("deit" in start for start in starts)
    deit = " The pretrained start, DeiT-Tiny, is under Apache 2.0 too." if from_deit else ""
    text = (
        f"{about.terms}; none of the images is part of this package. The weights are under the licence of this project "
        f"(Apache 2.0), to the extent that the project can license them.{deit} Whether the terms of images extend to "
        "models trained on them is unsettled, so treat the weights as intended for research."
    )
    return f"## Terms\n\n{fill(text, 120)}"


def _bullet(text: str) -> str:
    return fill(text, 120, initial_indent="- ", subsequent_indent="  ")


def _threshold(value: float | Sequence[float]) -> str:
    return f"{value:.4f}" if isinstance(value, float) else " / ".join(f"{part:.4f}" for part in value)


def _percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f}"


def _interval(spread: Mapping[str, float], digits: int = 1) -> str:
    mean, lowest, highest = (f"{100 * spread[key]:.{digits}f}" for key in ("mean", "lowest", "highest"))
    return f"{mean} (none differs)" if lowest == highest else f"{mean} ({lowest} to {highest})"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
