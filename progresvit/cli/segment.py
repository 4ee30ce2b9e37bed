"""``progresvit segment``: images in, their segmentations out, drawn over the images and as label maps."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from progresvit.cli import options, output
from progresvit.io.parse import parse_limit

if TYPE_CHECKING:
    from PIL.Image import Image

    from progresvit.data.dataset import Entry
    from progresvit.engine import Segmentation, SegmentationEngine

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
"""Image formats of an overlay, by suffix."""
NAMED = 4
"""Classes in the line of an image."""


def segment(
    images: Annotated[list[str], typer.Argument(help="Image files, folders, tars.")],
    out: Annotated[Path, typer.Option(help="Overlay of one image (.png, .jpg), or a folder for several overlays.")],
    model: Annotated[str, typer.Option(help="Folder or hub id of a segmentation model; the bundled models classify.")],
    threshold: options.Limit = None,
    mask: Annotated[
        Path | None, typer.Option(help="Also write the label map: a .png whose values are the classes, or a folder.")
    ] = None,
    stride: Annotated[
        float | None, typer.Option(help="Distance of windows as a share of their side, 1 by default.")
    ] = None,
    scales: Annotated[
        str | None, typer.Option(help="Sizes of the image whose predictions are averaged, such as 1,1.25.")
    ] = None,
    flip: Annotated[bool, typer.Option("--flip", help="Average with a flipped copy.")] = False,
    device: options.Device = None,
    precision: options.TorchPrecision = "fp32",
    batch: Annotated[int | None, typer.Option(help="Windows per batch.")] = None,
    workers: options.FewWorkers = 2,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing output files.")] = False,
) -> None:
    """Segment images; those with a score below the threshold exit early.

    Unreadable files are reported and skipped (exit code 1).
    """
    jobs, bad = _plan(images, out, mask)
    _check_outputs(jobs, overwrite=overwrite)
    from progresvit.engine import SegmentationEngine

    with output.setting_notes():
        engine = SegmentationEngine(
            model, parse_limit(threshold), windows=options.parse_windows(stride, scales, flip), device=device,
            precision=precision, batch=batch, workers=workers,
        )  # fmt: skip
    results = []
    for job, result in zip(jobs, engine.stream(job.content() for job in jobs)):
        error = result.error or _write(job, result, engine)
        if error is None:
            results.append(result)
        else:
            bad.append((job.entry.name, error))
    if len(results) > 1:
        _report(results, engine)
    output.report_setting(engine.setting if results else None, engine.thresholds)
    output.report_skipped(bad)
    if bad:
        raise typer.Exit(code=1)


@dataclass(frozen=True)
class _Job:
    """An image and where its outputs go."""

    entry: Entry
    overlay: Path
    mask: Path | None

    def content(self) -> str | bytes:
        """Its path, or its bytes in a tar."""
        return self.entry.path if self.entry.size < 0 else self.entry.read()


def _plan(arguments: list[str], out: Path, mask: Path | None) -> tuple[list[_Job], list[tuple[str, str]]]:
    """The images, and the arguments that name none, each with the reason."""
    entries: list[tuple[Entry, str]] = []  # with the name of the output
    bad: list[tuple[str, str]] = []
    for argument in arguments:
        images, unknown = options.find_images([argument])
        bad += unknown
        entries += [(entry, Path(argument).name if entry.name == argument else entry.name) for entry in images]
    is_single = len(arguments) == len(entries) == 1 and entries[0][0].name == arguments[0]
    for option, path, suffixes in (("--out", out, tuple(FORMATS)), ("--mask", mask, (".png",))):
        if path is None or not entries:
            continue
        is_file = path.suffix.lower() in suffixes and not path.is_dir()
        if is_single and not is_file:
            raise ValueError(f"{option} {path}: for one image it is a file ({', '.join(suffixes)}), not a folder.")
        if not is_single and (is_file or path.is_file()):
            raise ValueError(f"{option} {path}: for several images it is a folder, not a file.")
    if is_single:
        return [_Job(entries[0][0], out, mask)], bad
    return [_Job(entry, _inside(out, name), mask and _inside(mask, name)) for entry, name in entries], bad


def _inside(folder: Path, name: str) -> Path:
    """The output for the image of that name, within the folder."""
    return folder.joinpath(*(part for part in PurePosixPath(name).parts if part not in ("/", ".."))).with_suffix(".png")


def _check_outputs(jobs: list[_Job], *, overwrite: bool) -> None:
    """Refuse outputs of two images in one file, over an image, or over existing files."""
    sources = {Path(job.entry.path).resolve() for job in jobs}
    written: dict[Path, str] = {}
    for name, path in [(job.entry.name, path) for job in jobs for path in (job.overlay, job.mask) if path is not None]:
        place = path.resolve()
        if place in sources:
            raise ValueError(f"{path} is one of the images; write the output to another place.")
        if place in written:
            raise ValueError(
                f"{path} would be written twice, for {written[place]} and for {name}; give images different names, and "
                "--out and --mask different places."
            )
        if path.exists() and not overwrite:
            raise ValueError(f"{path} already exists; use --overwrite to replace it, or name another file.")
        written[place] = name


def _write(job: _Job, result: Segmentation, engine: SegmentationEngine) -> str | None:
    """Write the overlay and the mask and print a line; returns why the image cannot be read again, if it cannot."""
    from progresvit.analysis.overlay import class_shares, draw_overlay, mask_image, short_percent
    from progresvit.engine.images import open_image

    labels, config = result.labels, engine.config
    assert labels is not None
    names = config.labels or config.class_ids or tuple(f"class {index}" for index in range(config.num_classes))
    gmacs = f"{result.gmacs:.{1 if result.gmacs >= 1 else 3}f} GMACs"
    answered = f"round {result.exit_round} of {len(engine.gmacs)}"
    title = f"{answered} · score {result.score:.2f} · {gmacs}"
    overlay = open_image(job.content(), lambda image: draw_overlay(image, labels, names, title))
    if isinstance(overlay, str):
        return overlay
    _save(overlay, job.overlay)
    if job.mask is not None:
        _save(mask_image(labels), job.mask)
    main = [f"{item.name} {short_percent(item.share)}" for item in class_shares(labels, names)[:NAMED]]
    output.echo(f"{job.entry.name}: {answered}, score {result.score:.3f}, {gmacs}: {', '.join(main)}")
    return None


def _save(image: Image, path: Path) -> None:
    from progresvit.io.files import replace_file

    buffer = io.BytesIO()
    image.save(buffer, FORMATS[path.suffix.lower()])
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, buffer.getvalue())


def _report(results: list[Segmentation], engine: SegmentationEngine) -> None:
    exits = [sum(result.exit_round == s + 1 for result in results) for s in range(len(engine.gmacs))]
    spent = sum(result.gmacs for result in results) / len(results)
    full = sum(engine.gmacs[-1] * result.windows for result in results) / len(results)  # rounded like spent
    output.echo(output.describe_exits(exits, spent, full))
