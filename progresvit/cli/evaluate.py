"""``progresvit evaluate``: a model and data in, records out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from progresvit.cli import options, output, probes
from progresvit.cli.errors import in_options

if TYPE_CHECKING:
    from progresvit.evaluation import Records, SegmentationRecords


FOR_CLASSIFICATION = ("unlabelled", "restrict_classes", "corruption", "keep_logits", "decode", "limit", "seed")
FOR_SEGMENTATION = ("stride", "scales", "flip", "labels", "ignore")


def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=options.EXPORT_HELP)],
    data: Annotated[
        str,
        typer.Option(
            help="Folder or tars with <split>/<class>/<image> or <class>/<image>; hfds/NAME; wds/FOLDER. For a "
            "segmentation model images/<split>/<image> and annotations/<split>/<mask>."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Records file to write, such as records.parquet.")],
    split: Annotated[
        str,
        typer.Option(help="Split; '.' uses all images of top-level class folders, in segmentation all under images/."),
    ] = "val",
    task: Annotated[
        str | None,
        typer.Option(
            help="What predicts: the model's head by default; knn (nearest neighbours) and linear (a linear probe, "
            "trained first) use the model's features."
        ),
    ] = None,
    unlabelled: Annotated[
        bool, typer.Option("--unlabelled", help="Images without labels, in any folder structure.")
    ] = False,
    restrict_classes: Annotated[
        bool, typer.Option("--restrict-classes", help="Predict only among the classes of the data.")
    ] = False,
    corruption: Annotated[
        str | None,
        typer.Option(help="Corrupt every image: fog/3 is fog at severity 3; your own is my_module:my_corruption/3."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Evaluate a random sample of this many images, the same for every model.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sample of --limit, 0 by default.")] = None,
    merge: Annotated[
        str | None,
        typer.Option(help="Merge this many tokens in each block (ToMe), without training: 8, or 0,8 by round."),
    ] = None,
    keep_logits: Annotated[
        bool, typer.Option("--logits", help="Store all logits; needed for temperature scaling.")
    ] = False,
    stride: Annotated[
        float | None, typer.Option(help="Segmentation: distance of windows as a share of their side, 1 by default.")
    ] = None,
    scales: Annotated[
        str | None,
        typer.Option(help="Segmentation: sizes of the image whose predictions are averaged, such as 1,1.25."),
    ] = None,
    flip: Annotated[bool, typer.Option("--flip", help="Segmentation: average with a flipped copy.")] = False,
    labels: Annotated[
        str | None,
        typer.Option(
            help="Segmentation: label file or built-in list (camvid, pets, ade20k). By default the labels of the data, "
            "else the model's classes for the mask values 0, 1, 2, …."
        ),
    ] = None,
    ignore: Annotated[
        str | None, typer.Option(help="Segmentation: mask values that count nowhere, 255 by default.")
    ] = None,
    bank_split: Annotated[
        str | None,
        typer.Option(help="knn and linear: split of the labelled images to learn from, train by default."),
    ] = None,
    k: Annotated[int | None, typer.Option("--k", help="knn: number of neighbours, 20 by default.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="knn: temperature of the weights exp(similarity / temperature), 0.07 by default."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="linear: passes over the training images, 100 by default.")] = None,
    learning_rates: Annotated[
        str | None,
        typer.Option(help="linear: learning rates to choose from, for a batch of 256, such as 0.01,0.1,1."),
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option(help="linear: last blocks whose class tokens a classifier reads, 4 by default, as in DINO."),
    ] = None,
    crop: Annotated[
        float | None,
        typer.Option(
            help="knn and linear: share of the shorter side that the evaluation crop keeps; by default the model's for "
            "knn, and 0.875 for linear, as in DINO."
        ),
    ] = None,
    in_memory: Annotated[
        bool, typer.Option("--in-memory", help="linear: decode the training images once and keep them on the device.")
    ] = False,
    precision: options.EvaluationPrecision = "fp32",
    batch: Annotated[
        int | None,
        typer.Option(
            help="Images per batch: by default 128 on a GPU, 32 on a CPU, 64 for an export, 256 for linear; for "
            "segmentation windows, 32 by default."
        ),
    ] = None,
    workers: options.DecodeProcesses = 2,
    decode: Annotated[
        str | None,
        typer.Option(
            help="Where images are decoded and cropped: cpu (exact, the default), gpu (nvJPEG; faster, differs by "
            "rounding), or auto."
        ),
    ] = None,
    device: options.Device = None,
    backend: Annotated[
        str | None, typer.Option(help="For an export: onnxruntime or openvino; by default the runtime of its format.")
    ] = None,
    overwrite: options.OverwriteRecords = False,
) -> None:
    """Run every round on every image once and write one record per image. Run it again to resume.

    Uses several GPUs under torchrun.
    """
    from progresvit import api
    from progresvit.data.augment.corruption import Corruption
    from progresvit.evaluation import DataSource, EvalOptions, evaluate_segmentation
    from progresvit.evaluation import evaluate as evaluate_head
    from progresvit.evaluation.run import WINDOWS

    if seed is not None and limit is None:
        raise ValueError("--seed draws the sample of --limit; give both, or leave it out.")
    source = DataSource(
        data=data,
        split=split,
        unlabelled=unlabelled,
        restrict_classes=restrict_classes,
        corruption=None if corruption is None else Corruption.parse(corruption),
        limit=limit,
        seed=seed or 0,
    )
    opened = options.open_model(model, precision=precision, backend=backend, device=device)
    if opened.is_export:
        options.refuse_options(context, ["task", "merge"], "for models, and this is an export")
    probe = probes.parse_probe(context, opened.model.config.task)
    run: Callable[..., Records | SegmentationRecords]
    usual: int | None
    if probe is None and opened.model.config.task == "segmentation":
        options.refuse_options(context, FOR_CLASSIFICATION, "for classification models, and this one segments images")
        windows = options.parse_windows(stride, scales, flip)
        ignored = (255,) if ignore is None else tuple(options.parse_integers(ignore, "--ignore"))
        run = partial(evaluate_segmentation, data=data, split=split, labels=labels, ignore=ignored, windows=windows)
        usual = WINDOWS
    else:
        options.refuse_options(context, FOR_SEGMENTATION, "for segmentation models, and this one classifies images")
        evaluation, usual = probe or (evaluate_head, None)
        run = partial(evaluation, source=source)
    eval_options = EvalOptions(
        precision=precision,
        batch=next(size for size in (batch, usual, opened.batch) if size is not None),
        workers=workers,
        decode=decode or "cpu",
        keep_logits=keep_logits,
        overwrite=overwrite,
    )
    if merge is not None:
        api.as_progresvit(opened.model, "--merge").set_merge(options.parse_integers(merge, "--merge"))
    with output.running(opened.device) as (processes, begin):
        progress = begin("evaluating")
        records = run(opened.model, out=out, name=model, processes=processes, options=eval_options, progress=progress)
    if processes.first:
        output.report_other_files(sum(map(Counter, source.others.values()), Counter()))
        _report(records, out)


def _report(records: Records | SegmentationRecords, out: Path) -> None:
    """Notes about the images, the accuracy of the rounds, and what to do next."""
    from progresvit.evaluation import Records

    header, split = records.header, records.header.split or ""
    if isinstance(records, Records):
        available = header.images if header.sample is None else header.sample["of"]
        output.report_drawn_split(header.data, split, images=available, drawn_from=header.drawn_from)
        if header.sample is not None:
            output.echo(
                f"note: a random sample of {header.images} of {available} images, drawn with seed "
                f"{header.sample['seed']}",
                err=True,
            )
    elif header.drawn_from is not None:  # from images without split folders, or from the training list of the Pets
        share = "the training share" if split == "train" else "a fifth"
        output.echo(
            f"note: {header.data} has no split {split} of its own; using {header.images} of {header.drawn_from} "
            f"images, {share}, selected by file name, the same split as in training",
            err=True,
        )
    if learned := header.training_images:
        reason = ": the dataset changed, and with it the split" if split == "val" else ""
        output.echo(
            f"note: {learned} of these {header.images} images {'is a' if learned == 1 else 'are'} training "
            f"{'image' if learned == 1 else 'images'} of this model, by name{reason}; train again, or evaluate on "
            "other images.",
            err=True,
        )
    for line in header.unreadable:
        output.echo(f"skipped: {in_options(line)}", err=True)
    if records.broken:
        output.echo(
            f"note: {output.count_images(records.broken)} {'has' if records.broken == 1 else 'have'} NaN or infinite "
            "logits in some round; no such image exits in that round.",
            err=True,
        )
    if not isinstance(records, Records):
        _report_masks(records)
    elif header.probe is not None:
        probes.report_accuracy(records)
    elif records.labelled:
        shares = output.round_accuracies(records.correct)
        output.echo(f"top-1 of {output.count_images(len(records))}: {shares} (95% intervals)")
    following = f": progresvit frontier {out}" if header.routable else "; its rounds are alternatives"
    output.echo(f"{out} is ready{following}")


def _report_masks(records: SegmentationRecords) -> None:
    """Print mIoU and pixel accuracy of each round, and the IoU of each class, with 95 % intervals."""
    from progresvit.evaluation import iou_table
    from progresvit.metrics.interval import Interval
    from progresvit.metrics.miou import bootstrap_ends, mean_iou, pixel_accuracy

    for name, metric in (("mIoU", mean_iou), ("pixel accuracy", pixel_accuracy)):
        ends = zip(metric(records.totals).tolist(), *(end.tolist() for end in bootstrap_ends(records.counts, metric)))
        intervals = [Interval(mean=mean, lowest=lowest, highest=highest) for mean, lowest, highest in ends]
        shares = ", ".join(f"round {s} {interval.as_percent()}" for s, interval in enumerate(intervals, start=1))
        output.echo(f"{name} of {output.count_images(len(records))}: {shares} (95% intervals)")
    output.show_table(iou_table(records))
