"""The card of the model that ships, rendered from its figures: no number on it is typed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import Any

Figures = Mapping[str, Any]

WHAT = {
    "near-lossless": "the default: top-1 within 0.03 points of all rounds, on these pictures",
    "drop-0.5": "certified: at most 0.5 % of answers lost, at 95 % confidence",
    "drop-1": "certified: at most 1 % of answers lost, at 95 % confidence",
    "careful": "as near-lossless, and unsure answers are withheld",
}


def render(figures: Figures) -> str:
    """The card, in Markdown."""
    groups = list(figures["pictures"])
    parts = [
        _head(figures),
        _data(figures),
        _accuracy(figures, groups),
        _routed(figures, groups),
        _careful(figures, groups),
        _halves(figures),
        _training(figures),
        _limits(),
        _terms(),
    ]
    return "\n\n".join(parts) + "\n"


def _head(figures: Figures) -> str:
    sides = ", then ".join(f"{one['resolution']} px, {one['channels']} channels" for one in figures["rounds"])
    return f"""# The model that ships

A progressive vision transformer that looks at a picture in {len(figures["rounds"])} rounds and stops when it is sure:
{sides}. {figures["parameters"]:,} parameters, stored in float16 and run in float32.

```
progresvit classify photo.jpg                        # this model, with the setting near-lossless
progresvit classify photo.jpg --threshold careful    # the same, and unsure answers are withheld
```

{fill(_known(figures), 120)}

Figures below are from `figures.json` beside this card, which `scripts/ship_model.py` measured and rendered; hash of the
weights `{figures["weights"][:16]}`."""


def _known(figures: Figures) -> str:
    names = ", ".join(f"{label} ({class_id})" for label, class_id in zip(figures["classes"], figures["class_ids"]))
    return (
        f"It knows {len(figures['classes'])} things and nothing else: {names}. "
        "To measure it on pictures of your own, name the folder of each class as in brackets."
    )


def _data(figures: Figures) -> str:
    first = figures["training"][0] if figures["training"] else {"pictures": 0}
    picked = (
        " Of the training's checkpoints the best one on them was taken, which flatters."
        if figures["picked_on_them"]
        else " None of them was used to choose among checkpoints."
    )
    return f"""## Data

{first["pictures"]:,} training photographs of 20 ImageNet classes, squashed to 224×224 pixels: those of Imagenette, ten
different things ("easy ten"), and of Imagewoof ("ten dogs"). Measured on {figures["pictures"]["all"]:,} validation
photographs{_counts(figures)}, which were not trained on.{picked}"""


def _counts(figures: Figures) -> str:
    apart = [f"{count:,} of the {name}" for name, count in figures["pictures"].items() if name != "all"]
    return f" ({' and '.join(apart)})" if apart else ""


def _accuracy(figures: Figures, groups: list[str]) -> str:
    rows = [
        [f"round {number}", f"{one['gmacs']:.3f}", *(_percent(one["top1"][name]) for name in groups)]
        for number, one in enumerate(figures["rounds"], start=1)
    ]
    return "## Accuracy of each round\n\nTop-1 in percent, and GMACs spent up to there.\n\n" + _table(
        ["", "GMACs", *groups], rows
    )


def _routed(figures: Figures, groups: list[str]) -> str:
    rows = []
    for name, one in figures["settings"].items():
        if "abstain" in one:
            continue
        rows.append([name, f"{one['threshold']:.4f}", *(_percent(one["top1"][group]) for group in groups)])
        rows[-1] += [f"{one['gmacs']['all']:.3f}"]
        rows[-1] += [f"{_percent(one['saving'][group])} / {_percent(one['exit_shares'][group][0])}" for group in groups]
    heads = ["setting", "τ", *(f"top-1, {name}" for name in groups), "GMACs"]
    heads += [f"saved / leave after round 1, {name}" for name in groups]
    words = "\n".join(f"- `{name}`: {WHAT[name]}." for name in figures["settings"])
    return (
        "## Stopping early\n\nA picture leaves after the first round whose top-10 entropy is below τ. In percent, but "
        "for τ and the average GMACs;\nmeasured on the pictures that τ was calibrated on.\n\n"
        f"{_table(heads, rows)}\n\n{words}\n\n`--budget-gmacs G` spends G on average, by `budgets.json`."
    )


def _careful(figures: Figures, groups: list[str]) -> str:
    one = figures["settings"].get("careful", {})
    if "abstain" not in one:
        return "## Withholding answers\n\nThe setting `careful` withholds nothing: all answers are sure enough."
    rows = [
        ["pictures with an answer", *(_percent(one["answered"][group]) for group in groups)],
        ["right, of these", *(_percent(one["top1_of_answered"][group]) for group in groups)],
    ]
    return (
        f"## Withholding answers\n\n`careful` withholds answers of an entropy of {one['abstain']:.4f} or more. In "
        f"percent:\n\n{_table(['', *groups], rows)}\n\nThat was picked on pictures of the 20 things. Nothing is "
        "promised for others: a model that never saw a cat can be sure of\na dog."
    )


def _halves(figures: Figures) -> str:
    told = figures["halves"]
    rows = []
    for name, one in told["settings"].items():
        broken = "–" if "broken" not in one else f"{one['broken']} of {told['number']}"
        rows.append([name, _range(one["drop"], 2), _range(one["saving"], 1), broken])
    heads = ["setting", "top-1 lost, points", "GMACs saved, %", "more right answers lost than promised"]
    return (
        f"## On pictures that were not calibrated on\n\nCalibrated on a random half, measured on the other, "
        f"{told['number']} times: mean, and from lowest to highest.\n\n{_table(heads, rows)}\n\n"
        "The promise counts right answers that are lost and not wrong ones that are put right, so it can break "
        "while top-1 falls\nby less."
    )


def _training(figures: Figures) -> str:
    lines = ["## Training"]
    for number, run in enumerate(figures["training"], start=1):
        stage = f"Stage {number}: " if len(figures["training"]) > 1 else ""
        teacher = f", {_distilled(run['recipe']['distillation'])}" if run["teacher"] else ""
        machines = f"{run['processes']} × {run['device']}" if run["processes"] > 1 else f"one {run['device']}"
        stopped = run.get("stopped_at")
        short = (
            f" The weights are those after step {stopped:,} of {run['steps']:,}, the last that were kept; "
            "they were not chosen by their score."
            if stopped
            else ""
        )
        told = (
            f"{stage}{run['epochs']} epochs, seed {run['seed']}{teacher}; {machines}, torch {run['torch']}, "
            f"{run['minutes']:g} minutes of optimizer steps.{short}"
        )
        lines.append(f"{fill(told, 120)}\n\n```\n{run['command']}\n```")
    lines.append("The whole recipe is in `figures.json`.")
    return "\n\n".join(lines)


def _distilled(wanted: Mapping[str, Any]) -> str:
    """How a run was distilled; runs from before there was a choice were hard."""
    if wanted.get("kind", "hard") == "hard":
        return f"hard distillation from {wanted['teacher']}"
    among = "all classes that it knows" if wanted["classes"] == "teacher" else "the classes of the data"
    places = ", for the image and for each place in it" if wanted["map_weight"] else ""
    return f"soft distillation from {wanted['teacher']} over {among}{places}"


def _limits() -> str:
    return """## What it is not good for

- Anything but its 20 classes: every picture gets one of them, also a cat, a cup or a person; no answer says "none".
- Decisions about people, medicine, safety or law. It is small, made to try the library with.
- Photographs unlike ImageNet's: drawings, night, small things far away. It was trained on squashed squares, and your
  pictures are cropped instead.
- Comparison with models of 1,000 classes: 20 are easier.
- The figures flatter it. The teacher, EfficientNet-Lite2, learned from ImageNet, where Imagenette and Imagewoof take
  their validation photographs from: most of those that measure this model have been seen by its teacher."""


def _terms() -> str:
    return """## Terms

The photographs are ImageNet's, whose terms allow non-commercial research and education; none is part of this package.
The weights come under the licence of this project (Apache 2.0), as far as that is ours to give: whether the terms of
pictures bind what was learned from them is unsettled, so take them as made for research."""


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _range(spread: Mapping[str, float], digits: int) -> str:
    mean, lowest, highest = (f"{100 * spread[key]:.{digits}f}" for key in ("mean", "lowest", "highest"))
    return f"{mean} ({lowest} to {highest})"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
