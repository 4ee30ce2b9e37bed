"""Move a fine-tuned model part of the way back to its start: weights = w · trained + (1 - w) · start.

    python scripts/interpolate.py RUN --weight 0.7 --start deit_tiny_patch16_224.fb_in1k --out MODEL

A model that was fine-tuned on few images loses some of what its start knew; a mean of both weights keeps more of it
(WiSE-FT, Wortsman et al., 2022, arXiv:2109.01903). The start is made again from the recipe and the seed of the run, so
that its new parts, such as gates, have the same random weights. Choose the weight on images that are held out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import cast

import torch
from torch import nn

import progresvit
from progresvit.data.sampler import Draw, seed_all
from progresvit.model import RoundModel
from progresvit.training.build import build_model, start_model
from progresvit.training.recipe import load_recipe
from progresvit.training.run_folder import RECIPE_FILE

FILE = "interpolation.json"
"""File in the model folder that holds the weight of the trained model."""


def main(arguments: list[str] | None = None) -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the training run")
    parser.add_argument("--weight", type=float, required=True, help="of the trained weights, between 0 and 1")
    parser.add_argument("--start", help="initial weights, instead of model.start of the recipe")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write, in float16")
    options = parser.parse_args(arguments)
    if not 0 < options.weight <= 1:
        parser.error(f"--weight is above 0 and at most 1, not {options.weight:g}")
    if not (options.run / "model").is_dir() or not (options.run / RECIPE_FILE).is_file():
        parser.error(
            f"{options.run} is not a finished run (no model/ in it); give the --out folder of progresvit train"
        )
    trained = progresvit.load(options.run / "model")
    mixed = interpolate(trained, make_start(options.run, trained, options.start), options.weight)
    progresvit.save(mixed, options.out, dtype=torch.float16)
    (options.out / FILE).write_text(json.dumps({"trained": options.weight}) + "\n", encoding="utf-8")
    print(f"wrote {options.out}")


def make_start(run: Path, trained: RoundModel, start: str | None = None) -> RoundModel:
    """The model before the first step of a run."""
    recipe = load_recipe(str(run / RECIPE_FILE), [] if start is None else [f"model.start={start}"], stored=True)
    if recipe.distillation is not None and recipe.distillation.classes == "teacher":
        raise SystemExit("error: the run trained with more classes than it saved, so its start cannot be made again.")
    seed_all(Draw.START, recipe.seed)
    model = build_model(recipe, trained.config.class_ids or ())
    start_model(model, recipe)
    return model


def interpolate(trained: RoundModel, start: RoundModel, weight: float) -> RoundModel:
    """Changes ``trained`` and returns it."""
    module, before = cast(nn.Module, trained), cast(nn.Module, start).state_dict()
    mixed = {name: weight * value + (1 - weight) * before[name] for name, value in module.state_dict().items()}
    module.load_state_dict(mixed)
    return trained


if __name__ == "__main__":
    main()
