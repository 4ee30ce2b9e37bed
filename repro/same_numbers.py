"""Write the numbers that a change of the code must not change, or compare the code with numbers written before.

    python repro/same_numbers.py write FILE [--data nettewoof-val.tar]
    python repro/same_numbers.py check FILE [--data nettewoof-val.tar]

``repro/same_numbers.json`` was written when the bundled models and the sample images were replaced; until then the code
gave the numbers of version 0.1.0. ``check`` prints one line per item and exits with 1 if an item
differs. Everything runs on the CPU in one thread and takes about 2 minutes; ``--data``, a tar or a folder with
``val/<class>/<image>``, adds about 10 minutes. Floats are compared to the bit, which holds for one kind of CPU and one
version of torch: on another machine, write a file with the old code first. The script calls only the command line and
the public API, so it runs with old and new code alike (set PYTHONPATH to the code to be measured).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

import progresvit

PACKAGE = Path(progresvit.__file__).resolve().parent
BUNDLED = PACKAGE / "bundled" / "nettewoof-tiny"
SAMPLES = next(PACKAGE.glob("*/CREDITS.md")).parent
STEPS = 20


def main() -> int:
    """Write or check, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["write", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", type=Path, help="recompute top-1 and thresholds of the bundled model on this data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    baseline = json.loads(options.file.read_text()) if options.action == "check" else None
    presets = list(progresvit.config.PRESETS) if baseline is None else baseline["presets"]
    with tempfile.TemporaryDirectory() as folder:
        items = measure(Path(folder), presets, options.data)
        if baseline is not None:
            return check(baseline, items)
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in items)
    head = json.dumps({"made_with": surroundings(), "presets": presets})
    options.file.write_text(f'{head[:-1]}, "items": {{\n{lines}\n}}}}\n')
    return 0


def check(baseline: dict[str, Any], items: Iterator[tuple[str, Any]]) -> int:
    """Print a line per item; returns the exit code."""
    for key, value in surroundings().items():
        if value != baseline["made_with"][key]:
            print(f"note: {key} was {baseline['made_with'][key]} and is {value}")
    missing, wrong = dict(baseline["items"]), 0
    for name, value in items:
        if name not in missing:
            print(f"{name}: not in the file")
            continue
        found: list[str] = []
        added: list[str] = []
        compare(missing.pop(name), json.loads(json.dumps(value)), "", found, added)
        wrong += bool(found)
        more = f" (new: {', '.join(added)})" if added else ""
        print(f"{name}: {describe(found) if found else 'equal'}{more}", flush=True)
    for name in missing:
        print(f"{name}: not checked (needs --data)" if name.startswith("data ") else f"{name}: DIFFERENT, it is gone")
        wrong += not name.startswith("data ")
    print(f"{wrong} items differ" if wrong else "all that was checked is equal")
    return int(wrong > 0)


def compare(old: Any, new: Any, where: str, found: list[str], added: list[str]) -> None:
    """Collect what differs and which keys are new. A key with "picture", of version 0.1.0, is one with "image" now."""
    if isinstance(old, dict) and isinstance(new, dict):
        old, new = ({key.replace("picture", "image"): value for key, value in one.items()} for one in (old, new))
        added += [f"{where}{key}" for key in new if key not in old]
        for key, value in old.items():
            compare(value, new.get(key, "nothing"), f"{where}{key}.", found, added)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (one, other) in enumerate(zip(old, new)):
            compare(one, other, f"{where}{place}.", found, added)
    elif old != new:
        found.append(f"{where.removesuffix('.')} was {str(old)[:60]} and is {str(new)[:60]}")


def describe(found: list[str]) -> str:
    """The first difference, and the number of the others."""
    return f"DIFFERENT, {found[0]}" + (f", and {len(found) - 1} more" if len(found) > 1 else "")


def surroundings() -> dict[str, str]:
    """What floats depend on beside the code."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = f"{(names or [platform.machine()])[0]}, {torch.backends.cpu.get_cpu_capability()}"
    return {"progresvit": progresvit.__version__, "torch": torch.__version__, "cpu": cpu}


def measure(folder: Path, presets: list[str], data: Path | None) -> Iterator[tuple[str, Any]]:
    """All items, as name and plain data."""
    for path in sorted(BUNDLED.rglob("*.json")):
        yield f"bundled model, {path.relative_to(BUNDLED)}", json.loads(path.read_text())
    yield from logits()
    yield "records of the sample images", records_of_samples(folder)
    options = ("--top-k", 3, "--device", "cpu", "--json")
    for setting in ("near-lossless", "careful", "drop-0.5", "drop-1", "0"):
        lines = command("classify", "--samples", "--model", BUNDLED, *options, "--threshold", setting)
        yield f"answers to the sample images, threshold {setting}", [json.loads(line) for line in lines.splitlines()]
    for name in presets:
        yield f"info {name}", json.loads(command("info", name, "--json"))
    yield from digits(folder)
    if data is not None:
        yield from top1(folder, data.resolve())


def command(*words: object) -> str:
    """Run ``progresvit …`` with the code under test, in one thread; return what it prints."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-m", "progresvit", *map(str, words)],
        env={**os.environ, **threads, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"progresvit {' '.join(map(str, words))} failed:\n{done.stderr}")
    return done.stdout


def exact(values: Any) -> dict[str, Any]:
    """The SHA-256 of the float32 bytes, and rounded values for people."""
    array = np.ascontiguousarray(values, dtype=np.float32)
    rounded = array.astype(np.float64).round(4).tolist()
    return {"sha256": hashlib.sha256(array.tobytes()).hexdigest(), "rounded": rounded}


def logits() -> Iterator[tuple[str, Any]]:
    """The bundled model on the sample images, cropped here and not by the package."""
    model = progresvit.load(BUNDLED)
    paths = sorted(SAMPLES.glob("*.jpg"))
    images = torch.stack([crop(path, model.config) for path in paths])
    with torch.inference_mode():
        outputs = model(images)
    for number, output in enumerate(outputs, start=1):
        rows = dict(zip((path.name for path in paths), output.logits.numpy()))
        yield f"logits of round {number}", {name: exact(row) for name, row in rows.items()}


def crop(path: Path, config: Any) -> torch.Tensor:
    """The evaluation crop with Pillow: an image file -> (3, r, r)."""
    image = Image.open(path).convert("RGB")
    side, shorter = config.input_side, math.floor(config.input_side / config.crop)
    longer = int(shorter * max(image.size) / min(image.size))
    size = (shorter, longer) if image.width <= image.height else (longer, shorter)
    left, top = (round((length - side) / 2) for length in size)
    image = image.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + side, top + side))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255  # (r, r, 3) -> (3, r, r)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (config.mean, config.std))
    return (pixels - mean) / std


def records_of_samples(folder: Path) -> dict[str, Any]:
    """The same through the package's own crop and evaluation."""
    options = ("--unlabelled", "--logits", "--workers", 0, "--device", "cpu")
    command("evaluate", BUNDLED, "--data", SAMPLES, "--out", folder / "samples.parquet", *options)
    records = progresvit.evaluation.read_records(folder / "samples.parquet")
    return {
        "images": records.ids.tolist(),
        "logits": exact(records.logits),
        "top10_entropy": exact(records.top10_entropy),
        "statistics": exact(records.statistics)["sha256"],
    }


def digits(folder: Path) -> Iterator[tuple[str, Any]]:
    """The losses of the recipe ``digits`` as it is, with the seed that it has."""
    write_digits(folder / "digits")
    command(
        *("train", "digits", "--data", folder / "digits", "--out", folder / "run", "--device", "cpu"),
        *("--set", "run.log_every=1"),
    )
    log = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    steps = [line for line in log if line["event"] == "train"]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    yield f"digits, losses of the first {STEPS} steps", [line["losses"] for line in steps[:STEPS]]
    values = [[*line["losses"], line["lr"]] for line in steps]
    whole = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    yield f"digits, losses and rates of all {len(steps)} steps", {"sha256": whole, "last": values[-1]}
    yield "digits, top-1 of the rounds", [line["top1"] for line in log if line["event"] == "evaluation"]


def write_digits(folder: Path) -> None:
    """scikit-learn's digits as ``progresvit quickstart`` of version 0.1.0 writes them."""
    from sklearn.datasets import load_digits

    data = load_digits()
    splits = np.repeat(["train", "val", "test"], [1097, 400, 300])
    place = np.empty(len(splits), dtype=np.int64)
    place[np.random.default_rng(0).permutation(len(splits))] = np.arange(len(splits))
    for number, (pixels, digit) in enumerate(zip(data.images, data.target)):
        path = folder / splits[place[number]] / str(digit) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray((pixels * (255 / 16)).round().astype(np.uint8))
        ImageOps.expand(small.resize((32, 32), Image.Resampling.BICUBIC), 2).save(path)


def top1(folder: Path, data: Path) -> Iterator[tuple[str, Any]]:
    """Right answers of each round, and the thresholds that the rules of the bundled settings pick on this data."""
    out = folder / "data.parquet"
    command("evaluate", BUNDLED, "--data", data, "--out", out, "--workers", 0, "--device", "cpu")
    records = progresvit.evaluation.read_records(out)
    yield f"data {data.name}, right answers", {"images": len(records), "rounds": records.correct.sum(axis=0).tolist()}
    yield f"data {data.name}, entropies", hashlib.sha256(records.top10_entropy.tobytes()).hexdigest()
    rules: dict[str, tuple[object, ...]] = {
        "near-lossless": ("--near-lossless",),
        "drop-0.5": ("--max-drop", 0.005),
        "drop-1": ("--max-drop", 0.01),
        "careful": ("--near-lossless", "--max-error", 0.05),
    }
    for name, words in rules.items():
        setting = json.loads(command("calibrate", out, *words))
        yield f"data {data.name}, setting {name}", {key: setting[key] for key in setting if key not in ("date", "data")}


if __name__ == "__main__":
    sys.exit(main())
