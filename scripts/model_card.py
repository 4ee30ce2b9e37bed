"""The card of the bundled model, rendered from its figures; no number on it is typed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import Any

Figures = Mapping[str, Any]

WHAT = {
    "near-lossless": "the default: top-1 within 0.03 points of all rounds, on these images",
    "drop-0.5": "certified: at most 0.5 % of answers lost, at 95 % confidence",
    "drop-1": "certified: at most 1 % of answers lost, at 95 % confidence",
    "careful": "as near-lossless, and uncertain answers are withheld",
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
    return f"""# The bundled model

A progressive vision transformer with {len(figures["rounds"])} rounds ({sides}).
{figures["parameters"]:,} parameters, stored in float16 and run in float32.

```
progresvit classify photo.jpg                        # this model, with the setting near-lossless
progresvit classify photo.jpg --threshold careful    # the same, and uncertain answers are withheld
```

{fill(_known(figures), 120)}

`scripts/ship_model.py` measured the figures below (`figures.json`) and rendered this card. SHA-256 of the weights:
`{figures["weights"][:16]}…`."""


def _known(figures: Figures) -> str:
    names = ", ".join(f"{label} ({class_id})" for label, class_id in zip(figures["classes"], figures["class_ids"]))
    return (
        f"It knows {len(figures['classes'])} classes: {names}. "
        "To evaluate it on your own images, name the class folders as in brackets."
    )


def _data(figures: Figures) -> str:
    first = figures["training"][0] if figures["training"] else {"pictures": 0}
    picked = (
        " The checkpoint was selected by its accuracy on these images, so the figures are too optimistic."
        if figures["picked_on_them"]
        else " They were not used to select the checkpoint."
    )
    text = (
        f"{first['pictures']:,} training images of 20 ImageNet classes, squashed to 224×224 pixels: Imagenette, ten "
        f'different objects ("easy ten"), and Imagewoof ("ten dogs"). Evaluated on {figures["pictures"]["all"]:,} '
        f"validation images{_counts(figures)} that were not used for training.{picked}"
    )
    return f"## Data\n\n{fill(text, 120)}"


def _counts(figures: Figures) -> str:
    apart = [f"{count:,} of the {name}" for name, count in figures["pictures"].items() if name != "all"]
    return f" ({' and '.join(apart)})" if apart else ""


def _accuracy(figures: Figures, groups: list[str]) -> str:
    rows = [
        [f"round {number}", f"{one['gmacs']:.3f}", *(_percent(one["top1"][name]) for name in groups)]
        for number, one in enumerate(figures["rounds"], start=1)
    ]
    return "## Accuracy of each round\n\nTop-1 in percent, and cumulative GMACs.\n\n" + _table(
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
    heads += [f"saved / exit after round 1, {name}" for name in groups]
    words = "\n".join(f"- `{name}`: {WHAT[name]}." for name in figures["settings"])
    return (
        "## Early exit\n\nAn image exits after the first round whose top-10 entropy is below τ. "
        "Figures are in percent, except τ and the average\nGMACs. They are measured on the calibration images.\n\n"
        f"{_table(heads, rows)}\n\n{words}\n\n`--budget-gmacs G` selects a threshold from "
        "`budgets.json` that spends G on average."
    )


def _careful(figures: Figures, groups: list[str]) -> str:
    one = figures["settings"].get("careful", {})
    if "abstain" not in one:
        return "## Abstention\n\nThe setting `careful` withholds no answer."
    rows = [
        ["answered images", *(_percent(one["answered"][group]) for group in groups)],
        ["top-1 among answered images", *(_percent(one["top1_of_answered"][group]) for group in groups)],
    ]
    return (
        f"## Abstention\n\n`careful` withholds answers with an entropy of {one['abstain']:.4f} or more. In "
        f"percent:\n\n{_table(['', *groups], rows)}\n\nThe limit was calibrated on images of the 20 classes. It "
        "does not hold for out-of-distribution images."
    )


def _halves(figures: Figures) -> str:
    values = figures["halves"]
    rows = []
    for name, one in values["settings"].items():
        broken = "–" if "broken" not in one else f"{one['broken']} of {values['number']}"
        rows.append([name, _range(one["drop"], 2), _range(one["saving"], 1), broken])
    heads = ["setting", "top-1 lost, points", "GMACs saved, %", "splits in which the bound was exceeded"]
    return (
        f"## On other images than the calibration images\n\nCalibrated on a random half, measured on the other half, "
        f"{values['number']} times: mean (lowest to highest).\n\n{_table(heads, rows)}\n\n"
        "The bound counts correct answers that are lost and ignores errors that are corrected, so it can be exceeded "
        "while top-1\ndrops by less."
    )


def _training(figures: Figures) -> str:
    lines = ["## Training"]
    for number, run in enumerate(figures["training"], start=1):
        stage = f"Stage {number}: " if len(figures["training"]) > 1 else ""
        teacher = f", {_distilled(run['recipe']['distillation'])}" if run["teacher"] else ""
        machines = f"{run['processes']} × {run['device']}" if run["processes"] > 1 else f"one {run['device']}"
        stopped = run.get("stopped_at")
        short = (
            f" The weights are those after step {stopped:,} of {run['steps']:,}, the last checkpoint; "
            "they were not selected by their score."
            if stopped
            else ""
        )
        values = (
            f"{stage}{run['epochs']} epochs, seed {run['seed']}{teacher}; {machines}, torch {run['torch']}, "
            f"{run['minutes']:g} minutes of optimizer steps.{short}"
        )
        lines.append(f"{fill(values, 120)}\n\n```\n{run['command']}\n```")
    lines.append("The whole recipe is in `figures.json`.")
    return "\n\n".join(lines)


def _distilled(wanted: Mapping[str, Any]) -> str:
    """The kind of distillation; old runs without the key are hard."""
    if wanted.get("kind", "hard") == "hard":
        return f"hard distillation from {wanted['teacher']}"
    among = "all its classes" if wanted["classes"] == "teacher" else "the classes of the data"
    places = ", for the image and for each position" if wanted["map_weight"] else ""
    return f"soft distillation from {wanted['teacher']} over {among}{places}"


def _limits() -> str:
    return """## Limits

- It knows only its 20 classes and assigns one of them to every image. It is confidently wrong on some
  out-of-distribution images: of the sample images, it calls the rocket and the temple a church, and the flower a golf
  ball.
- It is a small model for trying the library. Do not use it for decisions about people, medicine, safety or law.
- Expect lower accuracy on images unlike ImageNet's: drawings, night scenes, small distant objects. It was trained on
  squashed squares, while your images are cropped.
- Its accuracy is not comparable with models of 1,000 classes: 20 are easier.
- The figures are optimistic. The teacher, EfficientNet-Lite2, was trained on ImageNet, the source of the validation
  images of Imagenette and Imagewoof, so it has seen most of them."""


def _terms() -> str:
    return """## Terms

The images are ImageNet's, whose terms allow non-commercial research and education; none is part of this package. The
weights are under the licence of this project (Apache 2.0), to the extent that the project can license them. Whether
the terms of images extend to models trained on them is unsettled, so treat the weights as made for research."""


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _range(spread: Mapping[str, float], digits: int) -> str:
    mean, lowest, highest = (f"{100 * spread[key]:.{digits}f}" for key in ("mean", "lowest", "highest"))
    return f"{mean} ({lowest} to {highest})"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
