"""Figures of docs/results/, computed again from the raw results without the code of the page.

Right and wrong answers are read digit by digit, entropies by struct, and intervals follow from closed forms instead of
a bootstrap.
"""

import base64
import json
import math
import re
import struct
import zlib
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import fmean, variance

import pytest
from scipy import stats

from repro.formats import to_json
from repro.store import read_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "repro" / "results"
PAGE = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "results").glob("*.md")))
SEEDS = (1, 2, 3)


@cache
def table_of(folder):
    return read_table(RESULTS / folder)


def read(name):
    """A measurement as its JSON file has it."""
    folder, _, name = name.rpartition("/")
    return json.loads(to_json(table_of(folder)[name]))


def answers(hexadecimal, images):
    """1 for right, 0 for wrong, image by image."""
    return [int(digit) for digit in "".join(f"{int(letter, 16):04b}" for letter in hexadecimal)[:images]]


def halves(text):
    """Floats of 16 bits."""
    raw = base64.b64decode(text)
    return struct.unpack(f"<{len(raw) // 2}e", raw)


def number(text):
    return float(text.replace("−", "-").replace(",", ""))


def cells(*start, after=""):
    """The numbers in the row of a table that starts with these cells; the first such row below a text."""
    line = next(line for line in PAGE[PAGE.index(after) :].splitlines() if line.startswith(f"| {' | '.join(start)} |"))
    found = [cell.strip() for cell in line.strip("|").split("|")]
    return [[number(value) for value in re.findall(r"[+−]?\d[\d,]*\.?\d*", cell)] for cell in found[len(start) :]]


def column(head, after):
    """The place of a column in the table below a text, counted from the first cell."""
    heads = next(line for line in PAGE[PAGE.index(after) :].splitlines() if line.startswith("| ") and head in line)
    return [cell.strip() for cell in heads.strip("|").split("|")].index(head)


def interval(table):
    """Mean and 95 % interval of differences by seed and image, from an analysis of variance."""
    seeds, images = len(table), len(table[0])
    of_seeds = [fmean(row) for row in table]
    of_images = [fmean(values) for values in zip(*table)]
    mean = fmean(of_seeds)
    flips = sum(
        (value - of_seed - of_image + mean) ** 2
        for row, of_seed in zip(table, of_seeds)
        for value, of_image in zip(row, of_images)
    ) / ((seeds - 1) * (images - 1))
    shift = max(0.0, variance(of_seeds) - flips / images)
    parts = shift / seeds, variance(of_images) / images
    uncertain = (variance(of_seeds) / seeds) ** 2 / (seeds - 1) * bool(shift) + parts[1] ** 2 / (images - 1)
    freedom = sum(parts) ** 2 / uncertain
    reach = stats.t.ppf(0.975, freedom) * sum(parts) ** 0.5
    return 100 * mean, 100 * (mean - reach), 100 * (mean + reach)


def routed(result, budget):
    """Right or wrong of a model of two rounds when as many uncertain images continue as the budget allows."""
    rounds, images = result["rounds"], result["data"]["val"]
    first, last = (answers(bits, images) for bits in rounds["bits"])
    (entropies,) = map(halves, rounds["entropy"])
    cheap, dear = rounds["gmacs_paper"]
    order = sorted(range(images), key=lambda image: -entropies[image])
    right, continuing = list(first), 0
    for _, group in groupby(order, key=lambda image: entropies[image]):  # equal entropies continue together
        together = list(group)
        if cheap + (continuing + len(together)) / images * (dear - cheap) > budget * (1 + 1e-9):
            break
        continuing += len(together)
        for image in together:
            right[image] = last[image]
    return right


FRONTIER = "# Frontier of all methods"


@pytest.mark.parametrize(
    ("run", "label", "point", "place"),
    [
        ("plain160", "plain DeiT-Tiny, 160 px", "the model", 0),
        ("plain224", "plain DeiT-Tiny, 224 px", "the model", 0),
        ("tome8", "ToMe, r = 8", "the model", 0),
        ("matformer", "MatFormer", "round 3", 2),
        ("dynabert", "DynaBERT", "round 2", 1),
        ("hydravit", "HydraViT", "round 3", 2),
        ("sortednet", "SortedNet", "round 3", 2),
    ],
)
def test_ours_and_theirs_at_equal_gmacs(run, label, point, place):
    theirs, ours = [read(f"frontier/{run}-{seed}") for seed in SEEDS], [read(f"frontier/progresvit-{s}") for s in SEEDS]
    right = [answers(one["rounds"]["bits"][place], one["data"]["val"]) for one in theirs]
    budget = theirs[0]["rounds"]["gmacs_paper"][place]
    matched = [routed(one, budget) for one in ours]
    expected = interval([[a - b for a, b in zip(*pair)] for pair in zip(matched, right)])
    row = cells(label, point, after=FRONTIER)
    shown = row[column("ours minus theirs (points)", FRONTIER) - 2]
    assert shown[0] == pytest.approx(expected[0], abs=0.00501)
    assert shown[1:] == pytest.approx(expected[1:], abs=0.06)
    top1 = row[column("top-1 (%)", FRONTIER) - 2]
    assert top1[0] == pytest.approx(100 * fmean(map(fmean, right)), abs=0.00501)
    within = expected[1] > -0.5 and expected[2] < 0.5
    verdict = "equivalent within 0.5" if within else "inconclusive"
    if expected[1] > 0 or expected[2] < 0:
        verdict = "gain" if expected[1] > 0 else "loss"
    line = next(line for line in PAGE[PAGE.index(FRONTIER) :].splitlines() if line.startswith(f"| {label} | {point} |"))
    assert line.endswith(f"| {verdict} |")


def test_gates_in_round_1():
    differences = []
    for seed in range(1, 9):
        with_gates, without = (read(f"construction/{run}-{seed}") for run in ("psg", "resolution"))
        images = with_gates["data"]["val"]
        pair = [answers(one["rounds"]["bits"][0], images) for one in (with_gates, without)]
        differences.append([a - b for a, b in zip(*pair)])
    expected = interval(differences)
    shown = cells("PSG − no gates", after="Construction from DeiT-Tiny: the same differences in round 1")[1]
    assert shown[0] == pytest.approx(expected[0], abs=0.00501)
    assert shown[1:] == pytest.approx(expected[1:], abs=0.03)


def test_imagenet_tiny_beside_deit_tiny():
    sets = {(one["data"], one["model"]): one for one in json.loads((ROOT / "repro" / "imagenet.json").read_text())}
    for data, name in (("val", "ImageNet validation"), ("b-33", "ImageNetV2 matched-frequency (b-33)")):
        ours, theirs = sets[data, "imagenet-tiny"], sets[data, "deit-tiny"]
        kept = answers(ours["held_out"], ours["images"])
        (at,) = (one for one in ours["at"] if one["setting"] == "near-lossless")
        columns = at["bits"], theirs["bits"][0], at["exits"][0], ours["held_out"]
        rows = [row[:3] for row in zip(*(answers(bits, ours["images"]) for bits in columns)) if row[3]]
        assert len(rows) == sum(kept)
        gained = sum(a > b for a, b, _ in rows)
        lost = sum(a < b for a, b, _ in rows)
        mean = (gained - lost) / len(rows)
        reach = 1.96 * (((gained + lost) / len(rows) - mean**2) / (len(rows) - 1)) ** 0.5
        cheap, dear = ours["gmacs_paper"]
        early = sum(exit_ for *_, exit_ in rows) / len(rows)
        start = name, f"{len(rows):,} of {ours['complete']:,}", "imagenet-tiny", "near-lossless"
        gmacs, top1, difference, _ = cells(*start, after="# ImageNet's own images")
        assert gmacs == [pytest.approx(early * cheap + (1 - early) * dear, abs=0.000501)]
        assert top1[0] == pytest.approx(100 * fmean(a for a, *_ in rows), abs=0.00501)
        assert difference == pytest.approx([100 * mean, 100 * (mean - reach), 100 * (mean + reach)], abs=0.00501)


def numbers(text, kind):
    """Compressed numbers of four bytes."""
    raw = zlib.decompress(base64.b64decode(text))
    return struct.unpack(f"<{len(raw) // 4}{kind}", raw)


def class_counts(result, s):
    """Intersection, labelled and predicted pixels of each class of each test image in a round: N times K triples."""
    test, classes = result["test"], len(result["labels"])
    columns = [numbers(text, "i") for text in (test["intersection"][s], test["labelled"], test["predicted"][s])]
    return list(batched(zip(*columns), classes))


def batched(values, size):
    values = list(values)
    return (values[first : first + size] for first in range(0, len(values), size))


def total(images):
    """Sums over images: K triples."""
    return [[sum(parts) for parts in zip(*(image[k] for image in images))] for k in range(len(images[0]))]


def miou(counts):
    return fmean(both / (labelled + predicted - both) for both, labelled, predicted in counts)


def test_ours_at_the_gmacs_of_the_plain_vit_follows_from_scores_and_counts():
    differences = []
    for seed in SEEDS:
        ours, plain = read(f"pets/progressive-{seed}"), read(f"pets/plain384-{seed}")
        rounds = [class_counts(ours, s) for s in (0, 1)]
        scores, count = numbers(ours["test"]["scores"][0], "f"), ours["test"]["images"]
        first, full = ours["gmacs_paper"]
        most = plain["gmacs_paper"][0]  # one window in both
        exits = math.ceil(count * (full - most) / (full - first) - 1e-6)
        order = sorted(range(count), key=lambda index: scores[index])
        early = set(order[:exits])
        routed = total([rounds[0 if index in early else 1][index] for index in range(count)])
        differences.append(miou(routed) - miou(total(class_counts(plain, 0))))
    shown = cells("plain ViT, 384, 3 heads", "the model", after="## Oxford-IIIT Pets")
    assert 100 * fmean(differences) == pytest.approx(shown[5][0], abs=0.006)
