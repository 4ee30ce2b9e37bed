"""``progresvit evaluate``: a model and data in, records out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from progresvit.cli import options, output, probes
from progresvit.cli.errors import in_options

if TYPE_CHECKING:
    from progresvit.evaluation import Records, SegmentationRecords


NOT_FOR_EXPORTS = "for models, and this is an export"
NOT_FOR_SEGMENTATION = "for classification models, and this one segments images"
NOT_FOR_CLASSIFICATION = "for segmentation models, and this one classifies images"


def evaluate(
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
    in_memory: Annotated[
        bool, typer.Option("--in-memory", help="linear: decode the training images once and keep them on the device.")
    ] = False,
    precision: Annotated[str, typer.Option(help=options.PRECISION_HELP)] = "fp32",
    batch: Annotated[
        int | None,
        typer.Option(
            help="Images per batch: by default 128 on a GPU, 32 on a CPU, 64 for an export, 256 for linear; for "
            "segmentation windows, 32 by default."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help=options.DECODE_HELP)] = 2,
    decode: Annotated[
        str | None,
        typer.Option(
            help="Where images are decoded and cropped: cpu (exact, the default), gpu (nvJPEG; faster, differs by "
            "rounding), or auto."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help=options.DEVICE_HELP)] = None,
    backend: Annotated[
        str | None, typer.Option(help="For an export: onnxruntime or openvino; by default the runtime of its format.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing records.")] = False,
) -> None:
    """Run every round on every image once and write one record per image. Run it again to resume.

    Uses several GPUs under torchrun.
    """
    from progresvit import api
    from progresvit.data.augment.corruption import Corruption
    from progresvit.distributed import choose_device, end_processes, start_processes
    from progresvit.engine.array_backend import GRAPH_BATCH
    from progresvit.engine.export.manifest import is_export
    from progresvit.evaluation import DataSource, EvalOptions, evaluate_segmentation
    from progresvit.evaluation import evaluate as run
    from progresvit.evaluation.run import WINDOWS
    from progresvit.evaluation.source import default_batch

    source = DataSource(
        data=data,
        split=split,
        unlabelled=unlabelled,
        restrict_classes=restrict_classes,
        corruption=None if corruption is None else Corruption.parse(corruption),
    )
    loaded, folder, device = options.open_model(model, precision=precision, backend=backend, device=device)
    exported = is_export(model)
    if exported:
        options.refuse_options({"--task": task, "--merge": merge}, NOT_FOR_EXPORTS)
    probe = probes.parse_probe(
        task, loaded.config.task, k=k, temperature=temperature, bank_split=bank_split, epochs=epochs,
        learning_rates=learning_rates, in_memory=in_memory,
    )  # fmt: skip
    segments = loaded.config.task == "segmentation" and not probe
    usual = WINDOWS if segments else probe.batch if probe else GRAPH_BATCH if exported else None
    eval_options = EvalOptions(
        precision=precision,
        batch=next(size for size in (batch, usual, default_batch(choose_device(device))) if size is not None),
        workers=workers,
        decode=decode or "cpu",
        keep_logits=keep_logits,
        overwrite=overwrite,
    )
    others: dict[str, object]
    if segments:
        others = {"--unlabelled": unlabelled, "--restrict-classes": restrict_classes, "--corruption": corruption}
        others |= {"--logits": keep_logits, "--decode": decode}
        options.refuse_options(others, NOT_FOR_SEGMENTATION)
        windows = options.parse_windows(stride, scales, flip)
        ignored = (255,) if ignore is None else tuple(options.parse_integers(ignore, "--ignore"))
    else:
        others = {"--stride": stride, "--scales": scales, "--flip": flip, "--labels": labels, "--ignore": ignore}
        options.refuse_options(others, NOT_FOR_CLASSIFICATION)
    if probe:
        others = {"--unlabelled": unlabelled, "--restrict-classes": restrict_classes}
        options.refuse_options(others, probes.NOT_FOR_PROBES)
    if merge is not None:
        api.as_progresvit(loaded, "--merge").set_merge(options.parse_integers(merge, "--merge"))
    processes = start_processes(device)
    records: Records | SegmentationRecords
    try:
        with output.stoppable(wanted=processes.first), output.progress_bars(wanted=processes.first) as begin:
            progress = begin("evaluating") if begin else None
            if segments:
                records = evaluate_segmentation(
                    loaded, data=data, split=split, out=out, name=model, processes=processes, labels=labels,
                    ignore=ignored, windows=windows, options=eval_options, progress=progress,
                )  # fmt: skip
            else:
                records = (probe.evaluate if probe else run)(
                    loaded, source, out, name=model, processes=processes, options=eval_options, progress=progress
                )
    finally:
        end_processes()
    if processes.first:
        output.report_other_files(sum(map(Counter, source.others.values()), Counter()))
        _report(records, out, folder)


def _report(records: Records | SegmentationRecords, out: Path, folder: Path | None) -> None:
    """Notes about the images, the accuracy of the rounds, and what to do next."""
    from progresvit.data.split import count_training_images
    from progresvit.evaluation import Records

    header, split = records.header, records.header.split or ""
    if isinstance(records, Records):
        output.report_drawn_split(header.data, split, images=header.images, drawn_from=header.drawn_from)
    elif header.drawn_from is not None:  # from images without split folders, or from the training list of the Pets
        share = "the training share" if split == "train" else "a fifth"
        typer.echo(
            f"note: {header.data} has no split {split} of its own; using {header.images} of {header.drawn_from} "
            f"images, {share}, selected by file name, the same split as in training",
            err=True,
        )
    if folder is not None and (learned := count_training_images(folder, records.ids)):
        reason = ": the dataset changed, and with it the split" if split == "val" else ""
        typer.echo(
            f"note: {learned} of these {len(records)} images are training images of this model, by name{reason}; "
            "train again, or evaluate on other images.",
            err=True,
        )
    for line in header.unreadable:
        typer.echo(f"skipped: {in_options(line)}", err=True)
    if records.broken:
        typer.echo(
            f"note: {records.broken} images have NaN or infinite logits in some round; they do not exit in that round.",
            err=True,
        )
    if not isinstance(records, Records):
        _report_masks(records)
    elif header.probe is not None:
        probes.report_accuracy(records)
    elif records.labelled:
        shares = output.round_accuracies(records.correct)
        typer.echo(f"top-1 of {len(records)} images: {shares} (95% intervals)")
    following = f": progresvit frontier {out}" if header.routable else "; its rounds are alternatives"
    typer.echo(f"{out} is ready{following}")


def _report_masks(records: SegmentationRecords) -> None:
    """Print mIoU and pixel accuracy of each round, and the IoU of each class, with 95 % intervals."""
    from progresvit.evaluation import iou_table
    from progresvit.metrics.interval import Interval
    from progresvit.metrics.miou import bootstrap_ends, mean_iou, pixel_accuracy

    for name, metric in (("mIoU", mean_iou), ("pixel accuracy", pixel_accuracy)):
        ends = zip(metric(records.totals).tolist(), *(end.tolist() for end in bootstrap_ends(records.counts, metric)))
        intervals = [Interval(mean=mean, lowest=lowest, highest=highest) for mean, lowest, highest in ends]
        shares = ", ".join(f"round {s} {interval.as_percent()}" for s, interval in enumerate(intervals, start=1))
        typer.echo(f"{name} of {len(records)} images: {shares} (95% intervals)")
    output.show_table(iou_table(records))
