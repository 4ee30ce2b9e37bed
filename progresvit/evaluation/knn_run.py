"""Evaluation by k nearest neighbours: class tokens in, the votes of labelled images out, as records.

Class tokens of every round are extracted once, of the labelled images (the bank) and of the images to classify, each
into a folder of parts next to the records, so a run that was stopped continues. The logarithms of the votes take the
place of logits in the records, so that the entropy of the votes is the score of a round, and whatever reads records
reads these.

Letters: N images, S rounds, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from progresvit.distributed import Processes
from progresvit.evaluation.features import (
    LabelledSplits,
    check_features,
    extract_features,
    find_labelled,
    read_features,
)
from progresvit.evaluation.header import Header
from progresvit.evaluation.parts import CHUNK, Parts
from progresvit.evaluation.record_files import read_records, write_records
from progresvit.evaluation.records import Records
from progresvit.evaluation.run import (
    DataSource,
    EvalOptions,
    ProgressCallback,
    check_run,
    finished,
    record_columns,
    source_header,
)
from progresvit.metrics.knn import check_knn, knn_votes, vote_logits
from progresvit.model.interface import RoundModel


def evaluate_knn(
    model: RoundModel,
    source: DataSource,
    out: Path,
    *,
    name: str,
    processes: Processes,
    k: int = 20,
    temperature: float = 0.07,
    bank_split: str = "train",
    options: EvalOptions | None = None,
    progress: ProgressCallback | None = None,
) -> Records:
    """Write the records of weighted k-NN votes on a model's class tokens, and return them.

    The classes are those of the data; the model needs no head. Labels and predictions are indices of
    ``header.probe["classes"]``. GMACs are those of the model; the search is not counted.

    Args:
        model: It is moved to the device of the processes and set to evaluation mode.
        source: The images to classify; a corruption applies to them and not to the bank.
        out: The file to write.
        name: The model's name in the header.
        processes: Processes that share the extraction, and their device.
        k: Number of neighbours.
        temperature: Of the weights exp(similarity / temperature).
        bank_split: Split of the same data with the labelled images.
        options: Precision, batch size and so on.
        progress: Called after each batch.
    """
    options, device = options or EvalOptions(), processes.device
    check_features(model, source)
    check_run(out, options, device)
    splits = find_labelled(source, bank_split)
    check_knn(len(splits.bank), k=k, temperature=temperature)
    model = model.to(device).eval()
    extract = partial(extract_features, model, name=name, options=options, processes=processes)
    clean, bank_out = replace(source, split=bank_split, corruption=None), out.with_name(out.name + ".bank")
    total = len(splits.bank) + len(splits.images)
    with Parts(bank_out, splits.bank) as bank, Parts(out, splits.images) as queries:
        extract(clean, bank, progress=_after(0, total, progress))
        extract(source, queries, progress=_after(len(splits.bank), total, progress))
        if processes.first:
            header = source_header(model, source, splits.images, name=name, options=options, device=device)
            about = {"task": "knn", "k": k, "temperature": temperature, **splits.describe(bank_split)}
            rounds = range(len(model.config.rounds))
            votes = [_votes(bank, queries, splits, s, k, temperature, device) for s in rounds]
            header = finished(replace(header, probe=about), bank.skipped() + queries.skipped())
            write_records(_records(votes, queries, header, options.keep_logits), out)
            bank.remove()
            queries.remove()
        processes.wait()
    return read_records(out)


def _after(before: int, total: int, progress: ProgressCallback | None) -> ProgressCallback | None:
    """Progress over several datasets, of which ``before`` images are done."""
    return None if progress is None else lambda done, _: progress(before + done, total)


def _votes(
    bank: Parts, queries: Parts, splits: LabelledSplits, s: int, k: int, temperature: float, device: torch.device
) -> Tensor:
    """The votes of round s: (N, K). The features of one round are in memory at a time, those of the bank on the CPU."""
    targets = torch.tensor(splits.bank.targets)[torch.from_numpy(bank.column("index"))]
    classes = len(splits.bank.class_ids)
    return knn_votes(
        read_features(queries, s).to(device),
        read_features(bank, s),
        targets,
        classes=classes,
        k=k,
        temperature=temperature,
    )


def _records(votes: Sequence[Tensor], queries: Parts, header: Header, keep_logits: bool) -> Records:
    """Records from the votes of all rounds, S times (N, K)."""
    order = queries.column("index")
    labels = np.array(queries.dataset.targets, np.int64)[order]
    chunks = []
    for rows in torch.arange(len(order)).split(CHUNK):
        logits = [vote_logits(of_round[rows]) for of_round in votes]
        targets = torch.from_numpy(labels)[rows].to(votes[0].device)
        chunks.append(record_columns(logits, None, targets, keep_logits=keep_logits))
    return Records(
        header=header,
        ids=np.array([queries.dataset.entries[index].name for index in order], dtype=np.str_),
        labels=labels,
        **{name: torch.cat([chunk[name] for chunk in chunks]).cpu().numpy() for name in chunks[0]},
    )
