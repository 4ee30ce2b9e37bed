"""``progresvit quickstart``: train, evaluate, calibrate and classify on handwritten digits, by the usual commands."""

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
from progresvit.cli import output
from progresvit.io.extras import not_installed

ABOUT_FILE = "quickstart.json"
"""Marks a folder as the output of quickstart."""
CALIBRATED, CERTIFIED = "calibrated", "certified"
"""The two settings, and their rows in the frontier."""


def quickstart(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("quickstart"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train again from the start.")] = False,
) -> None:
    """Train a micro model on handwritten digits, evaluate, calibrate, plot the frontier, classify. No GPU needed.

    Each command is printed before it runs. Run it again to resume: training continues, the other steps are repeated.
    """
    started = time.monotonic()
    require_extra()
    prepare_folder(out)
    import torch

    from progresvit.data.digits import SPLITS, write_digits

    torch.set_num_threads(1)  # the model is too small to profit from several threads
    write_digits(out / "digits")
    counts = ", ".join(f"{count} in {split}" for split, count in SPLITS.items())
    output.echo(f"wrote scikit-learn's handwritten digits to {out / 'digits'}: {counts}")
    for purpose, arguments in steps(out, overwrite=overwrite):
        command = [str(argument) for argument in arguments]
        output.echo()
        output.echo(f"# {purpose}")
        output.echo(f"$ progresvit {shlex.join(command)}")
        code = context.find_root().command.main(command, prog_name="progresvit", standalone_mode=False)
        if code:
            output.echo(
                "stopped; run quickstart again to resume, or use --overwrite to train from the start.", err=True
            )
            raise typer.Exit(code=code)
    output.echo()
    for line in summary(out):
        output.echo(line)
    seconds = time.monotonic() - started
    output.echo(f"results are in {out}, the plot in {out / 'frontier.png'}; it took {seconds:.0f} s")


def require_extra() -> None:
    """Check for optional packages before anything is written."""
    missing = [name for module, name in (("sklearn", "scikit-learn"), ("matplotlib",) * 2) if not find_spec(module)]
    if missing:
        raise ValueError(f"quickstart needs more: {not_installed(' and '.join(missing), 'quickstart')}")


def prepare_folder(out: Path) -> None:
    """Create the folder, or check that an existing one belongs to quickstart."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give the name of a folder with --out.")
    if not (out / ABOUT_FILE).is_file() and out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} holds other files; name a new folder with --out.")
    from progresvit.io.files import replace_file

    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / ABOUT_FILE, json.dumps({"progresvit": __version__}) + "\n")


def steps(out: Path, *, overwrite: bool) -> Iterator[tuple[str, list[str | Path]]]:
    """Purpose and arguments of each command. Lazy: later commands name files that earlier ones wrote."""
    data, run, cpu = out / "digits", out / "run", ("--device", "cpu")
    calibrated, certified = (out / f"{name}.json" for name in (CALIBRATED, CERTIFIED))
    again = ["--overwrite" if overwrite else "--resume"] if (run / "recipe.yaml").is_file() else []
    purpose = "train both rounds jointly"
    yield purpose, ["train", "digits", "--data", data, "--out", run, *cpu, *again]
    for split, use in (("val", "for calibration"), ("test", "for reporting")):
        records = out / f"{split}.parquet"
        again = ["--overwrite"] if records.is_file() else []
        purpose = f"record the predictions of both rounds on {split}, {use}"
        source = ("--data", data, "--split", split, "--workers", "0")
        yield purpose, ["evaluate", run / "model", *source, "--out", records, *cpu, *again]
    purpose = "choose the threshold at which no accuracy is lost on val"
    yield purpose, ["calibrate", out / "val.parquet", "--near-lossless", "--out", calibrated]
    purpose = "choose a threshold that loses at most 2 points on future digits, at 95 % confidence"
    yield purpose, ["calibrate", out / "val.parquet", "--max-drop", "0.02", "--confidence", "0.95", "--out", certified]
    files = ("--out", out / "frontier.png", "--out", out / "frontier.json")
    purpose = "plot accuracy against compute on test, with both thresholds"
    yield purpose, ["frontier", out / "test.parquet", "--setting", calibrated, "--setting", certified, *files]
    files_to_classify = [min(folder.glob("*.png")) for folder in sorted((data / "test").iterdir())]
    purpose = "classify ten test digits; easy ones exit after round 1"
    yield purpose, ["classify", *files_to_classify, "--model", run / "model", "--threshold", calibrated, *cpu]


def summary(out: Path) -> list[str]:
    """Results on test of the thresholds calibrated on val."""
    rows = json.loads((out / "frontier.json").read_text(encoding="utf-8"))["rows"]
    full = next(row for row in rows if row["threshold"] == 0)
    lines = [f"test, all rounds: top-1 {full['top1']:.2%}"]
    for name in (CALIBRATED, CERTIFIED):
        row = next(row for row in rows if row["note"] == name)
        lines.append(f"test, {name} on val: top-1 {row['top1']:.2%}, {row['saving']:.1%} of the MACs saved")
    return lines
