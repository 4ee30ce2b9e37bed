"""The table of own_images.json: models fine-tuned on 3 classes of 20 images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).with_name("own_images.json")
EXIT_SHARE = 0.5

Result = dict[str, Any]


def own_images_table() -> str:
    """The table of the tracked results."""
    return table(json.loads(RESULTS.read_text(encoding="utf-8")))


def table(results: Sequence[Result]) -> str:
    """Markdown: a row per start and draw, then the means of each start."""
    rounds = max((len(result["top1"]) for result in results), default=0)
    heads = [f"round {number + 1}" for number in range(rounds)]
    lines = [f"| start | classes | seconds | images | {' | '.join(heads)} | exit share {EXIT_SHARE:g} | saved |"]
    lines.append("|" + " --- |" * (rounds + 6))
    for start in dict.fromkeys(result["start"] for result in results):
        rows = sorted((result for result in results if result["start"] == start), key=lambda result: result["draw"])
        for result in rows:
            classes = ", ".join(name.replace("_", " ") for name in result["classes"])
            lines.append(_row(start, classes, [result], rounds))
        if len(rows) > 1:
            lines.append(_row(start, f"mean of {len(rows)} draws", rows, rounds))
    return "\n".join(lines)


def _row(start: str, classes: str, results: Sequence[Result], rounds: int) -> str:
    shares = [
        _percent(fmean(result["top1"][s] for result in results), 1) if s < len(results[0]["top1"]) else ""
        for s in range(rounds)
    ]
    routed = fmean(result["routed"]["top1"] for result in results)
    saved = fmean(1 - result["routed"]["gmacs"] / result["gmacs"][-1] for result in results)
    cells = [start, classes, f"{fmean(result['seconds'] for result in results):.0f}"]
    cells += [f"{sum(result['images'] for result in results)}", *shares, _percent(routed, 1), _percent(saved, 0)]
    return f"| {' | '.join(cells)} |"


def _percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f} %"
