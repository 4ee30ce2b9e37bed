"""Throughput of the segmentation engine by threshold: python benchmarks/segmentation.py MODEL --data DATA

Images are decoded before the clock starts; resizing, windows, rounds and label maps are timed. Each threshold lets a
given share of the images exit early, by their own scores, so that the figure does not depend on a calibration.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch

import progresvit
from progresvit.data.segmentation import find_segmentation

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--images", type=int, default=512, help="images of one measurement; the data is repeated")
    parser.add_argument("--repeat", type=int, default=3, help="measurements, of which the median counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()
    engine_options = {"device": options.device, "precision": options.precision, "workers": options.workers}
    config = progresvit.load(options.model).config
    dataset = find_segmentation(options.data, options.split, default_names=config.labels)
    decoded = [dataset.read_pair(index)[0] for index in range(min(len(dataset), options.images))]
    images = [decoded[number % len(decoded)] for number in range(options.images)]
    every = progresvit.SegmentationEngine(options.model, float(np.log(config.num_classes) + 1), **engine_options)
    scores = np.array([result.score for result in every.segment(decoded)])  # of round 1, also warms up
    for share in SHARES:
        threshold = float(np.quantile(scores, share)) if share < 1 else float(scores.max()) + 1
        engine = progresvit.SegmentationEngine(options.model, 0.0 if share == 0 else threshold, **engine_options)
        engine.segment(images[:64])
        seconds = []
        for _ in range(options.repeat):
            start = time.perf_counter()
            results = engine.segment(images)
            seconds.append(time.perf_counter() - start)
        exits = np.mean([result.exit_round < len(engine.config.rounds) for result in results])
        row = {
            "exit_share": round(float(exits), 3),
            "gmacs": round(float(np.mean([result.gmacs for result in results])), 3),
            "images_per_s": round(len(images) / float(np.median(seconds)), 1),
            "spread": [round(len(images) / duration, 1) for duration in (max(seconds), min(seconds))],
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
