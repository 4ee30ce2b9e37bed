"""Settings from records: a threshold chosen by a rule, bound to the model's weights, preprocessing and precision."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from progresvit import compute
from progresvit.evaluation.header import Header
from progresvit.evaluation.ood import OOD_SHARE, ood_limit, rejected_share
from progresvit.evaluation.per_round import OTHER_HALF, cross_fitted, find_thresholds, need_classification
from progresvit.evaluation.records import Records, RoutedRecords
from progresvit.evaluation.selective import abstain_entropy, routed_answers
from progresvit.routing import (
    NEAR_LOSSLESS_DROP,
    CertifiedThreshold,
    Router,
    certified_thresholds,
    needed_images,
    threshold_for_budget,
    threshold_for_exit_share,
)
from progresvit.routing.calibrate import OutOfReachError, check_budget, spread_points
from progresvit.routing.decide import OODRule, Threshold, at_exit, exit_rounds, route_records
from progresvit.routing.per_round import Choice, PerRoundFrontier, within_or_cheapest
from progresvit.routing.router import router_hash
from progresvit.routing.scores import DEFAULT_OOD_SCORE, OODScore, recorded_ood_score
from progresvit.routing.settings import Budgets, Loss, Setting, expected_results, now


def calibrate_near_lossless(
    records: RoutedRecords,
    *,
    max_drop: float = NEAR_LOSSLESS_DROP,
    router: Router | None = None,
    convention: compute.Convention = "paper",
    per_round: bool = False,
) -> Setting:
    """Lowest compute with an accuracy within ``max_drop`` of the full path on these images: an observation, no
    guarantee.

    The accuracy is top-1, or the mIoU of a segmentation model. ``per_round`` gives one threshold for each round of a
    classification model, from :func:`routing.per_round.per_round_frontier`, and the accuracy and compute of this choice
    on other images: chosen on one half of these images and measured on the other, both ways.
    """
    check_rounds(records)
    if per_round:
        table = need_classification(records)
        threshold = find_thresholds(table, router, convention).near_lossless(max_drop)
        choice = partial(PerRoundFrontier.near_lossless, max_drop=max_drop)
        return _per_round_setting(table, threshold, choice, router, convention, rule="near-lossless")
    point = records.near_lossless(router, convention, max_drop)
    return _setting(records, point.threshold, router, convention, rule="near-lossless")


def calibrate_budget(
    records: RoutedRecords,
    budget: float,
    *,
    router: Router | None = None,
    convention: compute.Convention = "paper",
    per_round: bool = False,
) -> Setting:
    """The most refinement that an average of ``budget`` GMACs per image allows; in segmentation of all its windows.

    ``per_round`` gives the most accurate vector of one threshold for each round instead, which needs labels.
    """
    check_rounds(records)
    if per_round:
        table = need_classification(records)
        vectors, gmacs = find_thresholds(table, router, convention), table.gmacs(convention)
        check_budget(budget, gmacs[0], gmacs[-1])
        choice = partial(within_or_cheapest, budget=max(budget, gmacs[0]))
        vector = vectors.within(max(budget, gmacs[0]))
        return _per_round_setting(table, vector, choice, router, convention, rule="budget")
    threshold = threshold_for_budget(records.exit_scores(router), records.gmacs(convention), budget)
    return _setting(records, threshold, router, convention, rule="budget")


def calibrate_exit_share(
    records: RoutedRecords, share: float, *, router: Router | None = None, convention: compute.Convention = "paper"
) -> Setting:
    """At least this share of the images exits before the last round."""
    check_rounds(records)
    threshold = threshold_for_exit_share(records.exit_scores(router), share)
    return _setting(records, threshold, router, convention, rule="exit-share")


def calibrate_guarantee(
    records: RoutedRecords,
    *,
    epsilon: float,
    delta: float,
    loss: Loss | None = None,
    router: Router | None = None,
    convention: compute.Convention = "paper",
    seed: int = 0,
    choices: int = 1,
) -> Setting:
    """A loss of at most ``epsilon``, with probability 1 - ``delta`` over the draw of these images.

    Records of training images are refused. Of copies of an image only the first counts, if the records say which images
    are copies. If the training chose the model among several evaluations on these images, they count as ``choices``:
    ``delta`` is divided by the number of choices for the test, so that the guarantee holds whichever was chosen.

    In classification the loss is a drop in accuracy. The mIoU is not a mean over images, so in segmentation the
    guarantee is about the mean pixel error: early exits add at most ``epsilon`` to it.

    Args:
        records: Images that neither the model nor the router was fitted on.
        epsilon: The largest loss, as a share of the images, or of the pixels of an image.
        delta: The probability that the guarantee fails.
        loss: ``labelled``, the default in classification, counts errors that the full path does not make;
            ``unlabelled`` counts disagreement with the full path; ``pixel-error`` is for segmentation.
        router: Compare thresholds with its probabilities instead of entropies.
        convention: Convention of the GMACs.
        seed: Seed of the part that orders the thresholds of three rounds and more.
        choices: Number of routers, losses, seeds and other settings that you try on these images, to keep one.
    """
    check_rounds(records)
    records.header.check_not_trained_on()
    seen = 0 if router is None else router.count_seen(records.ids)
    if seen:
        raise ValueError(
            f"the router was fitted on {seen} of these images, so they cannot certify it; fit it on others."
        )
    copies = None if records.image_hash is None else len(records) - len(records.distinct())
    records = records.distinct()
    loss = loss or records.default_loss
    certified = certified_thresholds(
        records.exit_scores(router),
        records.losses(loss),
        list(records.header.gmacs[convention]),  # in segmentation of a window; any order of the thresholds is valid
        epsilon,
        delta,
        highest=records.highest_score(router),
        seed=seed,
        fractional=loss == "pixel-error",
        choices=choices * (records.header.evaluations or 1),
    )
    evidence = certificate(certified, loss, copies)
    if loss == "pixel-error":
        evidence["mean_loss"] = certified.mean_loss
    return _setting(records, certified.threshold, router, convention, rule="guarantee", **evidence)


def certificate(certified: CertifiedThreshold, loss: Loss, copies: int | None = None) -> dict[str, Any]:
    """The evidence of a guarantee as a setting holds it; an error if there are too few images for any."""
    epsilon, delta, choices = certified.epsilon, certified.delta, certified.choices
    if certified.too_few:
        chosen = f" for one of {choices} choices on these images" if choices > 1 else ""
        without = f" ({copies} copies of others are left out)" if copies else ""
        beside = f" beside the {certified.design_images} that order the thresholds" if certified.design_images else ""
        raise OutOfReachError(
            f"{certified.images} images{without} are too few to certify a drop of {epsilon:.6g} at {1 - delta:.6g}"
            f"{chosen}: at least {needed_images(epsilon, delta, choices):,} are needed{beside}, and these suffice only "
            "without a single loss. Evaluate on more images, or ask for less."
        )
    return {
        "epsilon": epsilon,
        "delta": delta,
        "n": certified.images,
        "k": certified.harmed,
        "loss": loss,
        "p_value": certified.p_value,
        "copies": copies,
        "choices": choices if choices > 1 else None,
    }


def with_abstention(records: Records, setting: Setting, max_error: float, *, router: Router | None = None) -> Setting:
    """A setting that also withholds the most uncertain predictions, for an error rate of at most ``max_error``.

    An observation on these images, no guarantee.
    """
    entropy, wrong = routed_answers(records, exit_rounds(records.exit_scores(router), setting.threshold))
    limit = abstain_entropy(entropy, wrong, max_error)
    return _with_coverage(records, setting.model_copy(update={"abstain": limit}), router)


def with_ood(
    records: Records,
    setting: Setting,
    share: float = OOD_SHARE,
    *,
    score: OODScore = DEFAULT_OOD_SCORE,
    router: Router | None = None,
) -> Setting:
    """A setting that also has a limit below which images count as out-of-distribution.

    No out-of-distribution images are needed. All rounds share one limit, on the score of the round after which an image
    exits: most out-of-distribution images run all rounds, so a limit per round would reject confident early exits
    instead.

    Args:
        records: In-distribution images that the model was not trained on. Of copies of an image only the first counts.
        setting: A setting for these records.
        share: The share of in-distribution images that is rejected by mistake.
        score: One of ``routing.scores.OOD_SCORES``.
        router: The router of the setting's threshold.
    """
    records.header.check_not_trained_on()
    distinct = records.distinct()
    rounds = exit_rounds(distinct.exit_scores(router), setting.threshold)
    scores = recorded_ood_score(score, at_exit(distinct.statistics, rounds))
    rule = OODRule(score=score, limit=ood_limit(scores, share), share=share)
    limited = setting.model_copy(update={"ood": rule})
    observed = {"out_of_distribution": rejected_share(records, limited, router)}
    limited = limited.model_copy(update={"expected": {**limited.expected, **observed}})
    return _with_coverage(records, limited, router) if "coverage" in limited.expected else limited


def _with_coverage(records: Records, setting: Setting, router: Router | None) -> Setting:
    """The setting with the share of answered images, and how many of the answers are correct."""
    routed = route_records(setting.policy(router), records.top10_entropy, records.statistics)
    _, wrong = routed_answers(records, routed.rounds)
    answered = ~routed.abstained
    if not answered.any():
        raise OutOfReachError("every answer would be withheld; allow more errors, or reject a smaller share.")
    observed = {"coverage": float(answered.mean()), "answered_top1": float(1 - wrong[answered].mean())}
    return setting.model_copy(update={"expected": {**setting.expected, **observed}})


def measure_budgets(records: Records) -> Budgets:
    """GMACs of thresholds on these images, to look up the threshold of a budget later. Labels add the accuracy."""
    check_rounds(records)
    identity = _identity(records.header)
    points = spread_points(records.exit_scores(), records.correct if records.labelled else None, records.gmacs())
    return Budgets(n=len(records), points=points, **identity)


def check_rounds(records: RoutedRecords) -> None:
    """Refuse a model of one round."""
    if records.rounds == 1:
        raise ValueError(
            "a model of one round has no threshold to calibrate: every image runs it. Evaluate it and use it as it is."
        )


def _per_round_setting(
    records: Records,
    threshold: tuple[float, ...],
    choice: Choice,
    router: Router | None,
    convention: compute.Convention,
    **about: Any,
) -> Setting:
    """The setting of thresholds that were chosen on all images, with the results of the choice on other images."""
    setting = _setting(records, threshold, router, convention, **about)
    (other,) = cross_fitted(records, [choice], router, convention)
    observed = {"top1": other.top1, "gmacs": other.gmacs, "exit_shares": list(other.exit_shares)}
    return setting.model_copy(update={"expected": {**setting.expected, OTHER_HALF: observed}})


def _setting(
    records: RoutedRecords, threshold: Threshold, router: Router | None, convention: compute.Convention, **about: Any
) -> Setting:
    """The setting of a threshold, with its accuracy and compute on these images."""
    identity = _identity(records.header)
    (point,) = records.frontier([threshold], router, convention)
    rounds = records.metric.single_rounds()
    shown = {name: values for name, values in rounds.items() if name != "top5"}
    expected = expected_results(asdict(point), shown, full_gmacs=records.full_gmacs(convention), convention=convention)
    if router is not None:
        about["router_sha256"] = router_hash(router)
    return Setting(**{"threshold": threshold, "expected": expected, "n": len(records), **identity, **about})


def _identity(header: Header) -> dict[str, Any]:
    """The fields that bind a setting to the model and the preprocessing of records, and name the data and the date."""
    if header.classes is not None:
        raise ValueError(
            "predictions of these records are restricted to some classes, and a running model chooses among all; "
            "evaluate with restrict_classes=False to calibrate."
        )
    names = ("rounds", "weights_sha256", "preprocessing_sha256", "precision", "backend", "graphs_sha256")
    data = header.data if header.corruption is None else f"{header.data} ({header.corruption})"
    return {**{name: getattr(header, name) for name in names}, "data": data, "date": now()}


calibrate_segmentation_near_lossless = calibrate_near_lossless
calibrate_segmentation_budget = calibrate_budget
calibrate_segmentation_exit_share = calibrate_exit_share
calibrate_segmentation_guarantee = calibrate_guarantee
