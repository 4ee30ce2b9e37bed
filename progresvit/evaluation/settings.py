"""From records to a setting: the threshold that a rule picks, bound to the model and the way it saw the images."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from progresvit import compute
from progresvit.evaluation.abstention import abstain_entropy, routed_answers
from progresvit.evaluation.records import Records
from progresvit.routing import (
    HIGHEST,
    NEAR_LOSSLESS_DROP,
    Router,
    certified_thresholds,
    near_lossless,
    needed_images,
    threshold_for_budget,
    threshold_for_exit_share,
)
from progresvit.routing.calibrate import OutOfReachError, spread_points
from progresvit.routing.decide import exit_rounds
from progresvit.routing.frontier import frontier
from progresvit.routing.router import router_hash
from progresvit.routing.settings import Budgets, Loss, Setting


def calibrate_near_lossless(
    records: Records,
    *,
    max_drop: float = NEAR_LOSSLESS_DROP,
    router: Router | None = None,
    convention: compute.Convention = "paper",
) -> Setting:
    """Lowest compute with top-1 within ``max_drop`` of the full path on these images. An observation, no guarantee."""
    point = near_lossless(records.scores(router), records.correct, records.gmacs(convention), max_drop)
    return _setting(records, point.threshold, router, convention, rule="near-lossless")


def calibrate_budget(
    records: Records, budget: float, *, router: Router | None = None, convention: compute.Convention = "paper"
) -> Setting:
    """The most refinement that an average of ``budget`` GMACs allows."""
    threshold = threshold_for_budget(records.scores(router), records.gmacs(convention), budget)
    return _setting(records, threshold, router, convention, rule="budget")


def calibrate_exit_share(
    records: Records, share: float, *, router: Router | None = None, convention: compute.Convention = "paper"
) -> Setting:
    """At least this share of the images leaves before the last round."""
    return _setting(
        records, threshold_for_exit_share(records.scores(router), share), router, convention, rule="exit-share"
    )


def calibrate_guarantee(
    records: Records,
    *,
    epsilon: float,
    delta: float,
    loss: Loss = "labelled",
    router: Router | None = None,
    convention: compute.Convention = "paper",
    seed: int = 0,
) -> Setting:
    """A drop of at most ``epsilon``, with probability 1 - ``delta`` over the draw of these images."""
    seen = 0 if router is None else router.count_seen(records.ids)
    if seen:
        raise ValueError(
            f"the router was fitted on {seen} of these images, so they cannot certify it; fit it on others."
        )
    last = records.predictions[:, -1:]
    disagree = records.predictions != last  # (N, S)
    harms = ~records.correct & records.correct[:, -1:] if loss == "labelled" else disagree
    highest = HIGHEST if router is None else 1.0
    found = certified_thresholds(
        records.scores(router), harms, records.gmacs(convention), epsilon, delta, highest=highest, seed=seed
    )
    if found.too_few:
        beside = f" beside the {found.design_images} that order the thresholds" if found.design_images else ""
        raise OutOfReachError(
            f"{found.images} images are too few to certify a drop of {epsilon:.6g} at {1 - delta:.6g}: at least "
            f"{needed_images(epsilon, delta):,} are needed{beside}, and as many suffice only without a single loss. "
            "Evaluate on more images, or ask for less."
        )
    evidence = {
        "epsilon": epsilon,
        "delta": delta,
        "n": found.images,
        "k": found.harmed,
        "loss": loss,
        "p_value": found.p_value,
    }
    return _setting(records, found.threshold, router, convention, rule="guarantee", **evidence)


def with_abstention(records: Records, setting: Setting, max_error: float, *, router: Router | None = None) -> Setting:
    """The same threshold, and the least sure answers withheld: of those given, at most ``max_error`` are wrong here.

    An observation on these images, no guarantee.
    """
    unsure, wrong = routed_answers(records, exit_rounds(records.scores(router), setting.threshold))
    limit = abstain_entropy(unsure, wrong, max_error)
    given = unsure < (float("inf") if limit is None else limit)
    seen = {"coverage": float(given.mean()), "answered_top1": float(1 - wrong[given].mean())}
    return setting.model_copy(update={"abstain": limit, "expected": {**setting.expected, **seen}})


def measure_budgets(records: Records) -> Budgets:
    """What thresholds spend on these images, for any budget to be looked up later. Labels add the accuracy."""
    _refuse_some_classes(records)
    header, correct = records.header, records.correct if records.labelled else None
    return Budgets(
        rounds=records.rounds,
        weights=header.weights,
        preprocessing=header.preprocessing_hash,
        precision=header.precision,
        n=len(records),
        points=spread_points(records.scores(), correct, records.gmacs()),
        data=_data(records),
        date=_now(),
    )


def _setting(
    records: Records,
    threshold: float | tuple[float, ...],
    router: Router | None,
    convention: compute.Convention,
    **known: Any,
) -> Setting:
    _refuse_some_classes(records)
    correct = records.correct if records.labelled else None
    points = frontier(records.scores(router), correct, records.gmacs(convention), [threshold])
    full = records.gmacs(convention)[-1]
    expected = {
        **{key: value for key, value in asdict(points[0]).items() if value is not None and key != "threshold"},
        "exit_shares": list(points[0].exit_shares),
        "full_gmacs": full,
        "saving": 1 - points[0].gmacs / full,
        "convention": convention,
    }
    if correct is not None:
        expected["full_top1"] = float(correct[:, -1].mean())
    header = records.header
    return Setting(
        threshold=threshold,
        rounds=records.rounds,
        weights=header.weights,
        preprocessing=header.preprocessing_hash,
        precision=header.precision,
        router=None if router is None else router_hash(router),
        expected=expected,
        data=_data(records),
        date=_now(),
        **{"n": len(records), **known},
    )


def _refuse_some_classes(records: Records) -> None:
    if records.header.classes is not None:
        raise ValueError(
            "these records choose among some of the classes and a running model among all; evaluate without "
            "--restrict-classes to calibrate."
        )


def _data(records: Records) -> str:
    header = records.header
    return header.data if header.corruption is None else f"{header.data} ({header.corruption})"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
