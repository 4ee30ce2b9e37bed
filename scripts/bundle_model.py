"""Make a bundled model: round a trained model to float16, evaluate and calibrate it, write its card.

    python scripts/bundle_model.py imagenet-tiny RUN/model --runs RUN --data VAL --split . --budgets 1.0 \\
        --shift V2_B33 --plain deit_*.parquet --ood ood.json --unknown IMAGES --records FOLDER
    python scripts/bundle_model.py nettewoof-tiny RUN/model --runs RUN --data 'photos/*.tar' --records FOLDER

Everything is measured with the rounded weights, because a threshold is valid only for the weights it was calibrated
with. Half of the evaluation images, drawn by name, calibrate; the figures of the settings come from the other half. A
training in stages gives its run folders in order: --runs FIRST SECOND. The model's folder is replaced atomically at the
end. The plot goes to docs/figures/NAME_frontier.png.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import bundle_figures
import interpolate
import model_card
from about_models import ABOUT
from kept_records import evaluate_once

import progresvit
from progresvit import evaluation
from progresvit.evaluation import DataSource
from progresvit.io.files import replace_file, replacing_folder
from progresvit.io.model_folder import BUDGETS_FILE, BUNDLED, SETTINGS, bundled_folder

FIGURES = Path(__file__).parents[1] / "docs" / "figures"


def main(arguments: list[str] | None = None) -> None:
    """From the command line."""
    options = _parse(arguments)
    about = ABOUT[options.name]
    trained = progresvit.load(options.model)
    if trained.config.labels is None or trained.config.class_ids is None:
        raise SystemExit("error: the model's config.json has no labels or no class_ids; add them first.")
    training = [bundle_figures.describe_run(run) for run in options.runs]
    training[-1]["stopped_at"] = options.stopped_at
    if (options.model / interpolate.FILE).exists():
        training[-1]["interpolated"] = json.loads((options.model / interpolate.FILE).read_text(encoding="utf-8"))
    with replacing_folder(options.out or bundled_folder(options.name)) as staged:
        progresvit.save(trained, staged, dtype=torch.float16)
        model = progresvit.load(staged)
        kept = {"workers": options.workers, "device": options.device}
        source = DataSource(data=options.data, split=options.split)
        records = evaluate_once(model, source, options.records / f"{options.name}.parquet", **kept)
        half = records.take(bundle_figures.halves(records)[0])
        settings = bundle_figures.calibrate_all(half, max_error=options.max_error, budgets=options.budgets)
        named = {"data": f"{about.data}, {len(half):,} of {len(records):,} images, drawn by name"}
        (staged / SETTINGS).mkdir()
        for name, setting in settings.items():
            setting.model_copy(update=named).save(staged / SETTINGS / f"{name}.json")
        evaluation.measure_budgets(half).model_copy(update=named).save(staged / BUDGETS_FILE)
        figures = bundle_figures.measure(
            records,
            settings,
            training,
            name=options.name,
            data=about.data,
            selected_on=_selected_on(options, training, len(records)),
            groups=about.groups,
        ) | {"max_error": options.max_error}
        if options.shift is not None:
            source = DataSource(data=options.shift, split=".")
            shifted = evaluate_once(model, source, options.records / f"{options.name}-shift.parquet", **kept)
            figures["shift"] = bundle_figures.measure_shift(shifted, settings, data=about.shift)
        if options.plain:
            figures["plain"] = bundle_figures.measure_plain(records, [*map(evaluation.read_records, options.plain)])
        if options.ood is not None:
            figures["ood"] = json.loads(options.ood.read_text(encoding="utf-8"))
            if figures["ood"].pop("weights") != records.header.weights_sha256:
                raise SystemExit(
                    f"error: {options.ood} was measured with other weights; run scripts/measure_ood.py again."
                )
        if options.unknown:
            predictions = progresvit.Engine(staged, "careful").classify(options.unknown)
            figures["unknown"] = bundle_figures.describe_unknown(options.unknown, predictions)
        (staged / "figures.json").write_text(_dump(figures), encoding="utf-8")
        (staged / "README.md").write_text(model_card.render(figures), encoding="utf-8")
        plot = bundle_figures.draw_frontier(records, settings, figures)
    options.figures.mkdir(parents=True, exist_ok=True)
    replace_file(options.figures / f"{options.name}_frontier.png", plot)
    print(f"{options.name} is ready: read its README.md, then progresvit classify --samples --model {options.name}")


def _selected_on(given: argparse.Namespace, training: list[dict[str, Any]], images: int) -> str | None:
    """The images on which the checkpoint was selected."""
    if not given.held_out:
        return "evaluation" if given.model.name == "best" else None
    if training[-1]["held_out"] in (None, images):
        raise SystemExit(
            f"error: the last run was evaluated on {training[-1]['held_out']} images and the model on {images}, so "
            "they may be the same; leave out --held-out."
        )
    return "held-out"


def _dump(figures: dict[str, Any]) -> str:
    return json.dumps(figures, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=BUNDLED)
    parser.add_argument("model", type=Path, help="the trained model's folder")
    parser.add_argument("--data", required=True, help="evaluation images: folder or tars with <split>/<class>/<image>")
    parser.add_argument("--split", default="val", help="'.' uses all images of top-level class folders")
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="run folders of the training, in order")
    parser.add_argument("--records", type=Path, required=True, help="folder for the records; existing ones are reused")
    parser.add_argument("--stopped-at", type=int, help="the step of the weights, if the last run did not reach its end")
    parser.add_argument(
        "--held-out", action="store_true", help="the checkpoint was selected on images held out of the training images"
    )
    parser.add_argument("--budgets", nargs="+", default=[], help="GMACs for settings such as budget-1.0")
    parser.add_argument("--shift", help="folder of a second dataset, <class>/<image>, for the same settings")
    parser.add_argument("--plain", type=Path, nargs="+", help="records of plain ViTs on the same evaluation images")
    parser.add_argument("--ood", type=Path, help="JSON file of scripts/measure_ood.py")
    parser.add_argument("--unknown", type=Path, nargs="+", help="images of other classes, for the limits on the card")
    parser.add_argument("--max-error", type=float, default=0.05, help="maximum error rate of the setting careful")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the folder to write; by default the folder of the bundled model")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder of the plot")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
