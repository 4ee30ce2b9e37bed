"""A results folder of made-up models: easy images are right early, hard ones late or never."""

import json
import shutil

import numpy as np
import yaml

from progresvit.routing import frontier, near_lossless
from repro.formats import KINDS

CORRUPTIONS = ("gaussian_noise", "motion_blur", "fog")
MEASUREMENT = {
    "format": 1,
    "seconds": 600.0,
    "date": "2026-01-02",
    "revision": "abc1234",
    "machine": {"device": "Made GPU", "processes": 1, "jobs": 2, "python": "3.11.9", "torch": "2.13.0"},
    "precision": "fp32",
}
STUDY = {
    "title": "A made-up study",
    "data": "Made-up images",
    "recipe": "digits",
    "runs": {
        "width": {"seeds": [1, 2]},
        "full": {"seeds": [1, 2]},
        "three": {},
        "plain": {},
        "never": {},
        "nowhere": {},
    },
    "comparisons": {
        "construction": {"title": "Construction", "rows": {"width only": "width", "+ PSG": "full", "+ more": "never"}},
        "schedules": {
            "title": "Schedules",
            "rows": {"160→224": "full", "128→176→224": "three", "plain ViT": "plain"},
            "against": "full",
        },
        "later": {"title": "Later", "rows": {"one day": "nowhere"}},
    },
    "groups": {"easy ten": ["a"], "ten dogs": ["b"]},
    "routing": {"routing": {"model": "full"}},
    "shift": {
        "shift": {"models": ["full"]},
        "shift_both": {"models": ["full", "plain"], "severities": [1, 3]},
        "shift_later": {"models": ["nowhere"]},
    },
}
TESTED = {
    "title": "A study of seeds",
    "data": "Made-up images",
    "recipe": "digits",
    "runs": {
        "width": {"seeds": [1, 2, 3]},
        "full": {"seeds": [1, 2, 3]},
        "plain": {"seeds": [1, 2, 3]},
        "widths": {"seeds": [1, 2, 3]},
        "never": {"seeds": [1, 2, 3]},
    },
    "comparisons": {
        "construction": {
            "title": "Construction",
            "rows": {"width only": "width", "+ PSG": "full", "widths": "widths", "plain ViT": "plain"},
            "tests": [
                {"label": "PSG", "ours": "full", "theirs": "width", "margin": 0.46, "paper": 0.46},
                {"label": "rounds", "ours": "full", "theirs": "plain", "margin": 20},
                {"label": "alternatives", "ours": "widths", "theirs": "full", "margin": 1},
                {"label": "one day", "ours": "never", "theirs": "full", "margin": 1},
            ],
        }
    },
}
"""A comparison that declares tests; its runs are written by ``write_tested``."""
RUNS = {  # resolutions, heads, GMACs, and how well each round does
    "width": ((224, 224), (2, 3), (0.561, 1.821), (0.9, 1.5)),
    "full": ((160, 224), (2, 3), (0.286, 1.546), (1.0, 1.8)),
    "three": ((128, 176, 224), (1, 2, 3), (0.06, 0.4, 1.66), (0.3, 1.0, 1.7)),
    "plain": ((224,), (3,), (1.26,), (1.7,)),
    "widths": ((224, 224), None, (0.561, 1.26), (0.8, 1.3)),  # alternatives
}


def data(images):
    return {"name": "made", "train": 5 * images, "val": images, "classes": 4, "names": "n" * 8, "learned": "l" * 8}


def measured(run, images, seed, hardness=0.0):
    """Entropies and what is right: (N, S), (N, S)."""
    skill = np.array(RUNS[run][3])
    shared, own = np.random.default_rng(7), np.random.default_rng([seed, *run.encode()])
    ease = shared.normal(0.9, 1.3, images)[:, None] - hardness
    margin = ease + skill + own.normal(0, 0.25, (images, len(skill)))
    return np.exp(-np.clip(margin, -2, None)), margin + own.normal(0, 0.3, margin.shape) > 0.6


def point(found, run):
    executed = float(np.dot(found.exit_shares, RUNS[run][2])) * 0.98
    kept = {"threshold": found.threshold, "top1": found.top1, "exit_shares": found.exit_shares}
    return kept | {"gmacs_paper": found.gmacs, "gmacs_executed": executed}


def points(scores, right, run, number=60):
    every = np.quantile(scores[:, 0], np.linspace(0, 1, number)) * 1.0001
    thresholds = [0.0, *np.unique(every)]
    found = frontier(scores, right, RUNS[run][2], thresholds if scores.shape[1] > 1 else [0.0])
    return [point(one, run) for one in found][::-1]


def rounds(run, right):
    resolutions, heads, gmacs, _ = RUNS[run]
    executed = [round(0.98 * value, 4) for value in gmacs]
    return {
        "resolutions": resolutions,
        "heads": heads,
        "gmacs_paper": gmacs,
        "gmacs_executed": executed,
        "right": [int(count) for count in right.sum(axis=0)],
        "bits": list(right.T),
    }


def run_result(run, seed, images):
    scores, right = measured(run, images, seed)
    return MEASUREMENT | {
        "kind": "run",
        "name": f"{run}-{seed}",
        "run": run,
        "seed": seed,
        "commands": [f"progresvit train digits --set seed={seed} --out runs/{run}", "progresvit evaluate …"],
        "data": data(images),
        "recipe": {"seed": seed, "ema": 0.998},
        "epochs": 40,
        "parameters": 7_152_980,
        "rounds": rounds(run, right),
        "frontier": points(scores, right, run),
        "near_lossless": point(near_lossless(scores, right, RUNS[run][2]), run),
        "history": [(20, tuple(right.mean(axis=0))), (40, tuple(right.mean(axis=0)))],
    }


def spread(mean, reach):
    return {"mean": mean, "lowest": mean - reach, "highest": mean + reach}


def setting(name, scores, right, tau, *, promise=None, loss="labelled", abstain=None):
    found = point(frontier(scores, right, RUNS["full"][2], [tau])[0], "full")
    halves = {
        "number": 20,
        "drop": spread(0.0008, 0.004),
        "saving": spread(0.34, 0.06),
        "wrong": spread(0.05, 0.02),
        "harm": spread(0.002, 0.001),
        "disagreement": spread(0.006, 0.001),
    }
    draws = {"draws": 500, "images": 400, "exceeded": 23, "mean": 0.003, "highest": 0.0071, "saving": 0.31}
    return {
        "name": name,
        "point": found,
        "epsilon": promise,
        "delta": promise and 0.05,
        "loss": loss if promise else None,
        "abstain": abstain,
        "answered": 1.0 if abstain is None else 0.85,
        "top1_of_answered": found["top1"] if abstain is None else 0.95,
        "halves": halves,
        "draws": draws if promise else None,
    }


def matched(router, fitted_on, gain):
    shares = np.linspace(0, 1, 11)
    entropy = 0.82 + 0.065 * (1 - (1 - shares) ** 3)
    router_top1 = entropy + gain * shares * (1 - shares)
    return {
        "router": router,
        "fitted_on": fitted_on,
        "fits": 5,
        "shares": shares.tolist(),
        "gmacs_paper": (0.286 + 1.26 * shares).tolist(),
        "entropy_top1": entropy.tolist(),
        "router_top1": router_top1.tolist(),
        "lowest": (router_top1 - entropy - 0.004).tolist(),
        "highest": (router_top1 - entropy + 0.004).tolist(),
    }


def risk(name, level):
    coverage = np.linspace(0.01, 1, 100)
    return {"name": name, "coverage": coverage.tolist(), "risk": (level * coverage**2).tolist(), "area": level / 3}


def routing_result(images):
    scores, right = measured("full", images, 1)
    settings = [
        setting("near-lossless", scores, right, 0.1),
        setting("drop-0.5", scores, right, 0.2, promise=0.005),
        setting("drop-1", scores, right, 0.4, promise=0.01),
        setting("careful", scores, right, 0.1, abstain=0.9),
        setting("drop-1-unlabelled", scores, right, 0.3, promise=0.01, loss="unlabelled"),
    ]
    groups = []
    for name, part in {"easy ten": slice(None, None, 2), "ten dogs": slice(1, None, 2)}.items():
        extra = 0.0 if name == "easy ten" else 0.5
        at = []
        for one in settings[:4]:
            found = frontier(scores[part] + extra / 8, right[part], RUNS["full"][2], [one["point"]["threshold"]])[0]
            kept = {"top1": found.top1, "gmacs_paper": found.gmacs, "exit_shares": found.exit_shares}
            withheld = {"answered": one["answered"], "top1_of_answered": one["top1_of_answered"]}
            at.append({"setting": one["name"], **kept, **withheld})
        shares = right[part].mean(axis=0)
        groups.append({"name": name, "pictures": len(right[part]), "top1": shares.tolist(), "at": at})
    equal = {"rule": "entropy", "splits": 20, "drop": 0.005, "top1": 0.88, "gmacs_paper": 0.8, "saving": 0.48}
    return MEASUREMENT | {
        "kind": "routing",
        "name": "routing",
        "commands": ["progresvit evaluate …"],
        "seed": 0,
        "data": data(images),
        "model": "full",
        "weights": "w" * 16,
        "rounds": rounds("full", right),
        "frontier": points(scores, right, "full"),
        "settings": settings,
        "groups": groups,
        "matched": [
            matched("benefit", "training pictures", -0.004),
            matched("benefit", "half of the held-back pictures", 0.012),
            matched("correctness", "half of the held-back pictures", 0.004),
        ],
        "abstention": [risk("round 1", 0.18), risk("routed", 0.12), risk("full path", 0.115)],
        "equal_accuracy": [
            equal | {"given_up": None, "given_up_wrong": None},
            equal
            | {"rule": "entropy, hopeless given up", "given_up": 0.03, "given_up_wrong": 0.8}
            | {"errors_added": spread(0.004, 0.003), "saving_added": spread(0.02, 0.01)},
        ],
        "rejection": [matched(f"entropy, {share} % rejected", "other held-back pictures", -0.01) for share in (2, 5)],
    }


def shift_result(name, run, images, severities, corruptions=CORRUPTIONS):
    sets, frontiers = [], []
    for severity in (0, *severities):
        kinds = corruptions if severity else (None,)
        together = []
        for number, kind in enumerate(kinds):
            scores, right = measured(run, images, 1, hardness=0.4 * severity + 0.15 * number * bool(severity))
            together.append((scores, right))
            at = []
            if scores.shape[1] > 1:
                for limit, tau in (("near-lossless", 0.1), ("drop-1", 0.4)):
                    found = frontier(scores, right, RUNS[run][2], [tau])[0]
                    kept = {"top1": found.top1, "gmacs_paper": found.gmacs, "exit_shares": found.exit_shares}
                    at.append({"setting": limit, **kept})
            top1 = right.mean(axis=0).tolist()
            sets.append({"corruption": kind, "severity": severity, "pictures": images, "top1": top1, "at": at})
        scores, right = (np.concatenate(parts) for parts in zip(*together))
        curve = points(scores, right, run)
        frontiers.append({"severity": severity, "pictures": len(right), "frontier": curve})
    return MEASUREMENT | {
        "kind": "shift",
        "name": name,
        "commands": ["progresvit shift …"],
        "seed": None,
        "data": data(images),
        "model": run,
        "weights": "w" * 16,
        "gmacs_paper": RUNS[run][2],
        "sets": sets,
        "severities": frontiers,
    }


def all_results(images, corruptions=CORRUPTIONS):
    runs = [run_result(run, seed, images) for run in ("width", "full") for seed in (1, 2)]
    runs += [run_result(run, 1, images) for run in ("three", "plain")]
    shifts = [shift_result("shift", "full", images, (1, 2, 3, 4, 5), corruptions)]
    shifts += [shift_result(f"shift_both-{run}", run, images, (1, 3)) for run in ("full", "plain")]
    return [*runs, routing_result(images), *shifts]


def write_result(folder, result):
    """Validated, then written."""
    text = KINDS[result["kind"]].model_validate(result).model_dump_json(indent=1)
    (folder / f"{result['name']}.json").write_text(text)


def write_results(folder, images=40, study=STUDY):
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False, allow_unicode=True))
    for result in all_results(images):
        write_result(folder, result)
    return folder


def log_losses(run, images, seed):
    """(N, S)"""
    return np.log1p(measured(run, images, seed)[0])


def tested_result(run, seed, images):
    """Of a run with log-losses; the rounds of ``widths`` are alternatives without heads."""
    result = run_result(run, seed, images)
    result["rounds"]["log_loss"] = list(log_losses(run, images, seed).T)
    if run == "widths":
        result |= {"frontier": [], "near_lossless": None}
    return result


def write_tested(folder, images=200):
    folder.mkdir(parents=True)
    (folder / "study.yaml").write_text(yaml.safe_dump(TESTED, sort_keys=False))
    for run in ("width", "full", "plain", "widths"):
        for seed in TESTED["runs"][run]["seeds"]:
            write_result(folder, tested_result(run, seed, images))
    return folder


def change(path, edit):
    """Rewrites a JSON file after ``edit`` has changed its values."""
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))
