"""``progresvit quickstart``: the whole story in a minute, told by the commands that real data will see."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from progresvit import __version__

ABOUT_FILE = "quickstart.json"
"""Marks a folder as a quickstart's."""
CALIBRATED, CERTIFIED = "calibrated", "certified"
"""The two settings, and their rows in the frontier."""


def quickstart(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="The folder for everything that is made.")] = Path("quickstart"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train anew, whatever was trained there.")] = False,
) -> None:
    """Train a micro model on handwritten digits, evaluate, calibrate, plot the frontier, classify. No GPU needed.

    Each command is printed as it runs. Run it again after a stop: training goes on, the rest is quick and done again.
    """
    started = time.monotonic()
    require_extra()
    claim(out)
    import torch

    from progresvit.data.digits import SPLITS, write_digits

    torch.set_num_threads(1)  # the model is too small to share out, and threads that wait for each other are slow
    write_digits(out / "digits")
    counts = ", ".join(f"{count} in {split}" for split, count in SPLITS.items())
    typer.echo(f"wrote scikit-learn's handwritten digits to {out / 'digits'}: {counts}")
    for why, words in story(out, overwrite=overwrite):
        command = [str(word) for word in words]
        typer.echo(f"\n# {why}\n$ progresvit {shlex.join(command)}")
        code = context.find_root().command.main(command, prog_name="progresvit", standalone_mode=False)
        if code:
            typer.echo("stopped; run quickstart again to go on, or --overwrite trains anew.", err=True)
            raise typer.Exit(code=code)
    typer.echo()
    for line in summary(out):
        typer.echo(line)
    seconds = time.monotonic() - started
    typer.echo(f"everything is in {out}, the plot in {out / 'frontier.png'}; it took {seconds:.0f} s")


def require_extra() -> None:
    """Said before anything is written."""
    missing = [name for module, name in (("sklearn", "scikit-learn"), ("matplotlib",) * 2) if not find_spec(module)]
    if missing:
        raise ValueError(f"quickstart needs {' and '.join(missing)}: pip install 'progresvit[quickstart]'.")


def claim(out: Path) -> None:
    """Make the folder, or see that the one there is a quickstart's: files of its kind are replaced, no others."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give the name of a folder with --out.")
    if not (out / ABOUT_FILE).is_file() and out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} holds other files and no quickstart; name a new folder with --out.")
    from progresvit.io.files import replace_file

    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / ABOUT_FILE, json.dumps({"progresvit": __version__}) + "\n")


def story(out: Path, *, overwrite: bool) -> Iterator[tuple[str, list[str | Path]]]:
    """What each command is for, and its words. Later ones name what earlier ones have made."""
    data, run, cpu = out / "digits", out / "run", ("--device", "cpu")
    calibrated, certified = (out / f"{name}.json" for name in (CALIBRATED, CERTIFIED))
    again = ["--overwrite" if overwrite else "--resume"] if (run / "recipe.yaml").is_file() else []
    why = "train two rounds at once, a coarse narrow look and a fine wide one"
    yield why, ["train", "digits", "--data", data, "--out", run, *cpu, *again]
    for split, use in (("val", "to calibrate on"), ("test", "held back, to report on")):
        records = out / f"{split}.parquet"
        again = ["--overwrite"] if records.is_file() else []
        why = f"what both rounds say of each digit of {split}, {use}"
        pictures = ("--data", data, "--split", split, "--workers", "0")
        yield why, ["evaluate", run / "model", *pictures, "--out", records, *cpu, *again]
    why = "how sure must round 1 be, so that on val nothing is lost by stopping there?"
    yield why, ["calibrate", out / "val.parquet", "--near-lossless", "--out", calibrated]
    why = "and so that on digits to come at most 2 points are lost, with 95 % confidence?"
    yield why, ["calibrate", out / "val.parquet", "--max-drop", "0.02", "--confidence", "0.95", "--out", certified]
    files = ("--out", out / "frontier.png", "--out", out / "frontier.json")
    why = "accuracy against compute on the digits held back, with both thresholds marked"
    yield why, ["frontier", out / "test.parquet", "--setting", calibrated, "--setting", certified, *files]
    some = [min(folder.glob("*.png")) for folder in sorted((data / "test").iterdir())]
    why = "ten digits held back: easy ones leave after round 1"
    yield why, ["classify", *some, "--model", run / "model", "--threshold", calibrated, *cpu]


def summary(out: Path) -> list[str]:
    """What the thresholds that were calibrated on val gave on test."""
    rows = json.loads((out / "frontier.json").read_text(encoding="utf-8"))["rows"]
    full = next(row for row in rows if row["threshold"] == 0)
    lines = [f"on the digits held back, every round: top-1 {full['top1']:.2%}"]
    for name in (CALIBRATED, CERTIFIED):
        row = next(row for row in rows if row["note"] == name)
        lines.append(f"{name} on others: top-1 {row['top1']:.2%}, {row['saving']:.1%} of the MACs saved")
    return lines
