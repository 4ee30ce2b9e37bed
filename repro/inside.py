"""Inside the models: the numbers behind docs/inside.md, from the reports of ``progresvit analyze all``.

    progresvit analyze all nettewoof-tiny --data photos --images 5000 --out runs/inside/nettewoof-tiny
    progresvit analyze all imagenet-tiny --data imagenet --images 5000 --out runs/inside/imagenet-tiny
    git archive 5968df7 progresvit/shipped | tar x -C runs
    progresvit analyze all runs/progresvit/shipped --data photos --images 5000 --out runs/inside/from-scratch
    progresvit analyze throughput nettewoof-tiny --device cpu --data photos \\
        --out runs/inside/nettewoof-tiny/throughput-cpu.png
    progresvit analyze throughput imagenet-tiny --device cpu --data imagenet \\
        --out runs/inside/imagenet-tiny/throughput-cpu.png
    python repro/inside.py runs/inside

Without a folder, the figures that need no images are drawn again from inside.json and the bundled models.

The reports were made on a GPU. ``photos`` holds val/<class>/<image> of the 20 classes, ``imagenet`` five validation
images of each of ImageNet's classes. The third model was bundled before: it is the model of nettewoof-tiny trained from
scratch. The script writes inside.json and the figures of the page to docs/figures/inside: those of exits and
trajectories show images or tokens and are copied from the reports, the others drawn (``inside_figures.py``).
"""

from __future__ import annotations

import argparse
import csv
import html
import math
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from progresvit.analysis.page import INDEX
from progresvit.io.files import replace_file
from progresvit.plots import few_colours, render
from repro.inside_figures import of_gates, of_tables
from repro.inside_tables import MODELS, RESULTS, SCRATCH, read_reports, to_json

TABLES = (
    "gate-depth",
    "similarity",
    "trajectories",
    "low-pass",
    "token-swap",
    "noise-replacement",
    "exits",
    "memory",
    "throughput-cpu",
)
OF_ALL = ("token-swap", "noise-replacement", "low-pass", "similarity", "trajectories")
"""Figures of every model on the page."""
OF_BUNDLED = ("gates", "gate-distributions", "gate-depth", "exits", "throughput-cpu", "memory")
FIGURES = Path(__file__).parents[1] / "docs" / "figures" / "inside"
DIGITS = 6
MOST_BYTES = 150_000
"""Largest size of a figure with photographs."""


def main(arguments: list[str] | None = None) -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="?", help="a folder with a report for each model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--figures", type=Path, default=FIGURES)
    options = parser.parse_args(arguments)
    if options.reports is None:
        results = read_reports(options.out)
    else:
        missing = [name for name in MODELS if not (options.reports / name / INDEX).is_file()]
        if missing:
            parser.error(f"{options.reports} has no report of {', '.join(missing)}; see --help for the commands")
        results = {name: collect(options.reports / name) for name in MODELS}
        replace_file(options.out, to_json(results))
    options.figures.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        draw(name, results[name], options.reports, options.figures)
    print(f"wrote {'the figures in' if options.reports is None else f'{options.out} and'} {options.figures}")


def draw(name: str, results: dict[str, Any], reports: Path | None, folder: Path) -> None:
    """The figures of a model on the page; figures that show images are copied, if there is a report."""
    drawn = of_tables(results) | ({} if name == SCRATCH else of_gates(name))
    for figure in OF_ALL if name == SCRATCH else (*OF_ALL, *OF_BUNDLED):
        if figure in drawn:
            replace_file(folder / f"{figure}_{name}.png", render(drawn[figure](), ".png"))
        elif reports is not None:
            replace_file(
                folder / f"{figure}_{name}.png",
                few_colours((reports / name / f"{figure}.png").read_bytes(), MOST_BYTES),
            )


def collect(report: Path) -> dict[str, Any]:
    """What the page of a report says about the images and the machine, and the rows of its tables."""
    page = (report / INDEX).read_text(encoding="utf-8")
    about = [html.unescape(line) for line in re.findall(r"<p>(.*?)</p>", page)[:2]]
    tables = {name: read_rows(path) for name in TABLES if (path := report / f"{name}.csv").is_file()}
    tables["exits"] = count_exits(tables["exits"])
    tables["fusion-gates"] = average_fusion(read_rows(report / "gates.csv"))
    first = tables["trajectories"][0]["class"]
    paths = [row for row in tables["trajectories"] if row["class"] == first]  # separation belongs to the block
    tables["trajectories"] = [{key: row[key] for key in row if key not in ("class", "pc1", "pc2")} for row in paths]
    return {"about": about, **tables}


def average_fusion(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean multiplier of each stream of a transition over the channels."""
    streams: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        if str(row["branch"]).startswith("fusion "):
            stream = row["branch"].removeprefix("fusion ")
            streams.setdefault((row["round"], stream), []).append(row["multiplier"])
    return [
        {"round": number, "stream": stream, "mean": round(sum(values) / len(values), DIGITS)}
        for (number, stream), values in streams.items()
    ]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a table, numbers rounded and empty cells as None."""
    with path.open(encoding="utf-8") as file:
        return [{key: parse(value) for key, value in row.items()} for row in csv.DictReader(file)]


def parse(text: str) -> Any:
    """A number, true or false, None, or the text."""
    if text in ("", "True", "False"):
        return {"": None, "True": True, "False": False}[text]
    try:
        number = float(text)
    except ValueError:
        return text
    if not math.isfinite(number):
        return text  # as JSON files of this repository write it
    return int(number) if number.is_integer() and "." not in text else round(number, DIGITS)


def count_exits(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many images have each exit round and each outcome of the rounds."""
    counts: dict[tuple[int, bool, bool], int] = {}
    for row in rows:
        key = (row["exit_round"], row["correct_round1"], row["correct_round2"])
        counts[key] = counts.get(key, 0) + 1
    names = ("exit_round", "correct_round1", "correct_round2")
    return [dict(zip(names, key), images=count) for key, count in sorted(counts.items())]


if __name__ == "__main__":
    main()
