"""Make the bundled model: round a trained model to float16, measure and calibrate it, write its card.

    python scripts/ship_model.py RUN/model --runs RUN --data 'photos/*.tar'

Everything is measured with the rounded weights, because a threshold is valid only for the weights it was
calibrated with. A training in stages gives its run folders in order: --runs FIRST SECOND. The folder is
replaced atomically at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import model_card
import ship_figures

import progresvit
from progresvit import evaluation
from progresvit.api import bundled_folder
from progresvit.distributed import Processes
from progresvit.evaluation import DataSource, EvalOptions, Records
from progresvit.io.files import replacing_folder
from progresvit.io.model_folder import BUDGETS_FILE, SETTINGS
from progresvit.io.weights import weights_hash
from progresvit.model import RoundModel

DATA_NAME = "Imagenette and Imagewoof, validation"


def main(arguments: list[str] | None = None) -> None:
    """From the command line."""
    given = _parse(arguments)
    trained = progresvit.load(given.model)
    if trained.config.labels is None or trained.config.class_ids is None:
        raise SystemExit("error: the model's config.json has no labels or no class_ids; add them first.")
    with replacing_folder(given.out) as staged:
        progresvit.save(trained, staged, dtype=torch.float16)
        model = progresvit.load(staged)
        records = _evaluate(model, given)
        settings = ship_figures.calibrate_all(records, given.max_error)
        (staged / SETTINGS).mkdir()
        for name, setting in settings.items():
            setting.model_copy(update={"data": DATA_NAME}).save(staged / SETTINGS / f"{name}.json")
        evaluation.measure_budgets(records).model_copy(update={"data": DATA_NAME}).save(staged / BUDGETS_FILE)
        training = [ship_figures.describe_run(run) for run in given.runs]
        training[-1]["stopped_at"] = given.stopped_at
        figures = ship_figures.measure(records, settings, training, picked=given.model.name == "best")
        (staged / "figures.json").write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        (staged / "README.md").write_text(model_card.render(figures), encoding="utf-8")
    print(f"{given.out} is ready: read its README.md, then progresvit classify --samples")


def _evaluate(model: RoundModel, given: argparse.Namespace) -> Records:
    """The records of this model: existing ones, or new ones."""
    if given.records is not None and given.records.exists():
        records = evaluation.read_records(given.records)
        if records.header.weights != weights_hash(model) or records.header.precision != "fp32":
            raise SystemExit(f"error: {given.records} is of other weights or of another precision; delete it first.")
        return records
    source = DataSource(data=given.data, split=given.split)
    processes = Processes(0, 1, torch.device(given.device))
    with tempfile.TemporaryDirectory() as scratch:
        out = given.records or Path(scratch) / "records.parquet"
        options = EvalOptions(precision="fp32", workers=given.workers)
        return evaluation.evaluate(model, source, out, name="nettewoof-tiny", processes=processes, options=options)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the trained model's folder")
    parser.add_argument("--data", required=True, help="folder or tars with <split>/<class>/<image>")
    parser.add_argument("--split", default="val")
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="run folders of the training, in order")
    parser.add_argument("--stopped-at", type=int, help="the step of the weights, if the last run did not reach its end")
    parser.add_argument("--records", type=Path, help="where to keep the records; existing records are reused")
    parser.add_argument("--max-error", type=float, default=0.05, help="maximum error rate of the setting careful")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=bundled_folder("nettewoof-tiny"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
