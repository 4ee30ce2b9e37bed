"""``progresvit calibrate``: records in, a threshold out, written to the settings of their model."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from progresvit.cli import options, output
from progresvit.compute import Convention
from progresvit.io.model_folder import BUDGETS_FILE

if TYPE_CHECKING:
    from progresvit.evaluation import Header, Records
    from progresvit.routing import Router, Setting
    from progresvit.routing.settings import Loss


RULES = ("near_lossless", "budget_gmacs", "exit_share", "max_drop", "budgets")
FOR_CLASSIFICATION = ("budgets", "router", "unlabelled", "max_error", "per_round", "ood_share", "entropies")
FEW = 300
"""Images below which a near-lossless threshold gets a note: one image is more than ten times its tolerance."""
CERTIFIED = {
    "labelled": "drop in accuracy",
    "unlabelled": "share of answers that differ from the full path's",
    "pixel-error": "mean increase of an image's pixel error",
}
"""What a certificate bounds, by the loss."""


def calibrate(
    context: typer.Context,
    records: options.RecordsFile,
    near_lossless: Annotated[
        bool,
        typer.Option(
            "--near-lossless", help="Lowest compute with top-1 (or mIoU) within 0.03 points of the full path."
        ),
    ] = False,
    budget_gmacs: Annotated[float | None, typer.Option(help="Average GMACs per image.")] = None,
    exit_share: Annotated[float | None, typer.Option(help="Share of images that exit early, such as 0.4.")] = None,
    budgets: Annotated[
        bool, typer.Option("--budgets", help="Write a table of thresholds for any budget, MODEL/budgets.json.")
    ] = False,
    per_round: Annotated[
        bool,
        typer.Option(
            "--per-round",
            help="With --near-lossless or --budget-gmacs: the best threshold of each round; three or more rounds only.",
        ),
    ] = False,
    max_drop: Annotated[
        float | None,
        typer.Option(
            help="Certified bound on the drop in accuracy, in segmentation on the mean growth of the pixel error of an "
            "image: 0.005 for 0.5 %."
        ),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Confidence of the certificate.")] = 0.95,
    unlabelled: Annotated[
        bool, typer.Option("--unlabelled", help="Certify by disagreement between rounds; needs no labels.")
    ] = False,
    max_error: Annotated[
        float | None, typer.Option(help="Maximum error rate among answered images; uncertain answers are withheld.")
    ] = None,
    ood_share: Annotated[
        float | None,
        typer.Option(
            help="Reject out-of-distribution images with a limit that rejects this share of the images in the records, "
            "such as 0.05."
        ),
    ] = None,
    ood_score: Annotated[
        str | None, typer.Option(help="Out-of-distribution score: energy (the default), max-logit, msp or entropy.")
    ] = None,
    entropies: Annotated[
        bool,
        typer.Option("--entropies", help="Store quantiles of the round-1 entropies, from which drift is measured."),
    ] = False,
    router: Annotated[Path | None, typer.Option(help="Calibrate a threshold for this router's probabilities.")] = None,
    convention: Annotated[Convention, typer.Option(help="Convention for counting GMACs.")] = "paper",
    seed: Annotated[int, typer.Option(help="Seed of the split that orders thresholds; three or more rounds only.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Setting file to write, such as threshold.json; by default a file in the settings of the model, named "
            "by the rule."
        ),
    ] = None,
) -> None:
    """Choose a threshold: --near-lossless, --budget-gmacs, --exit-share, or --max-drop with a certificate.

    The setting is written to MODEL/settings/NAME.json, NAME being near-lossless, budget-1.0, exit-0.5 or drop-0.5 (in
    percent), and used by name: classify --threshold NAME. near-lossless is used by default.
    If the model of the records is elsewhere or a bundled one, it is printed.

    --budgets writes a table for all budgets instead, MODEL/budgets.json.
    """
    used = options.used_options(context, RULES)
    if len(used) != 1:
        rules = ", ".join(f"--{name.replace('_', '-')}" for name in RULES)
        raise ValueError(f"choose one of {rules}, not {' and '.join(used) or 'none'}.")
    if not 0.5 <= confidence < 1:
        raise ValueError(
            f"--confidence is at least 0.5 and below 1 (0.95 for 95 %), not {confidence:g}: a certificate that fails "
            "more often than it holds says nothing."
        )
    if max_drop is not None and not 0 < max_drop < 1:
        raise ValueError(f"--max-drop is between 0 and 1 (0.005 for 0.5 %), not {max_drop:g}.")
    if unlabelled and max_drop is None:
        raise ValueError("--unlabelled applies to the certificate; give --max-drop too.")
    if per_round and max_drop is not None:
        raise ValueError("--max-drop has a threshold for each round of three or more already; leave out --per-round.")
    if per_round and not near_lossless and budget_gmacs is None:
        raise ValueError(
            f"--per-round is for --near-lossless and --budget-gmacs, which use labels, not for {used[0]}; leave it out."
        )
    if ood_score is not None and ood_share is None:
        raise ValueError("--ood-score needs --ood-share, the share of known images that may be rejected: 0.05 for 5 %.")
    if out is not None and out.suffix != ".json":
        raise ValueError(f"{out}: a setting is a .json file; use --out {out}.json.")
    from progresvit import evaluation
    from progresvit.evaluation.calibrate import check_rounds

    table = evaluation.read_routed_records(records)
    check_rounds(table)
    is_classification = isinstance(table, evaluation.Records)
    if not is_classification:
        options.refuse_options(context, FOR_CLASSIFICATION, options.NOT_FOR_SEGMENTATION_RECORDS)
    if budgets:
        _write_budgets(context, cast("Records", table), out)
        return
    fitted = options.open_router(router, table.header, table.ids)
    shared: dict[str, Any] = {"router": fitted, "convention": convention}
    if budget_gmacs is not None:
        setting = evaluation.calibrate_budget(table, budget_gmacs, per_round=per_round, **shared)
    elif exit_share is not None:
        setting = evaluation.calibrate_exit_share(table, exit_share, **shared)
    elif max_drop is not None:
        delta = round(1 - confidence, 12)  # 0.05, not 0.05000000000000004
        loss: Loss | None = "unlabelled" if unlabelled else None
        setting = evaluation.calibrate_guarantee(table, epsilon=max_drop, delta=delta, loss=loss, seed=seed, **shared)
    else:
        setting = evaluation.calibrate_near_lossless(table, per_round=per_round, **shared)
    if isinstance(table, evaluation.Records):
        setting = _extend(setting, table, fitted, context.params)
    folder, why = (None, "") if out is not None else _model_folder(table.header)
    if folder is not None:
        _write_to_model(setting, folder, _name(context.params), table.header, router)
    elif out is not None:
        _write(setting, out, engine="Engine" if is_classification else "SegmentationEngine", router=router)
    else:
        typer.echo(setting.to_json())
        output.echo(f"note: {why}, so the setting is only printed; --out FILE.json writes it.", err=True)


def _extend(setting: Setting, records: Records, router: Router | None, values: Mapping[str, Any]) -> Setting:
    """The setting with the rules of --max-error and --ood-share, and the quantiles of --entropies."""
    from progresvit import evaluation
    from progresvit.routing.calibrate import entropy_quantiles
    from progresvit.routing.scores import DEFAULT_OOD_SCORE

    if values["max_error"] is not None:
        setting = evaluation.with_abstention(records, setting, values["max_error"], router=router)
    if values["ood_share"] is not None:
        score = values["ood_score"] or DEFAULT_OOD_SCORE
        setting = evaluation.with_ood(records, setting, values["ood_share"], score=score, router=router)
    if values["entropies"]:
        setting = setting.model_copy(update={"entropy_quantiles": entropy_quantiles(records.top10_entropy[:, 0])})
    return setting


def _model_folder(header: Header) -> tuple[Path | None, str]:
    """The folder of the model of the records, or None and why a setting is not written there."""
    from progresvit.engine.export.manifest import Manifest, is_export
    from progresvit.io.model_folder import BUNDLED, bundled_folder, is_bundled

    folder = Path(header.model).expanduser()
    bundled = folder.resolve() in [bundled_folder(name).resolve() for name in BUNDLED]
    if bundled or not folder.is_dir():
        place = "a bundled model" if bundled or is_bundled(header.model) else "not a folder on this machine"
        return None, f"the model of these records, {header.model}, is {place}"
    if header.probe is not None:
        return None, f"these are predictions of a probe on the features of {folder}, not of its head"
    if header.corruption is not None:
        return None, f"these are records of corrupted images ({header.corruption})"
    if header.training_images:
        return None, f"{folder} was trained on these images"
    weights_sha256: str | None
    graphs_sha256 = None
    try:
        if is_export(folder):
            manifest = Manifest.read(folder)
            weights_sha256, graphs_sha256 = manifest.weights_sha256, manifest.graphs_sha256
        else:
            _, weights_sha256 = options.config_and_hash(folder)
    except ValueError as error:
        return None, f"the model of these records cannot be read ({error})"
    if weights_sha256 is None:
        return None, f"the weights in {folder} are missing or cannot be compared with those of the records"
    if (weights_sha256, graphs_sha256) != (header.weights_sha256, header.graphs_sha256):
        return None, f"{folder} has other weights than the model of these records"
    return folder, ""


def _name(values: Mapping[str, Any]) -> str:
    """The name of a setting by its rule, as the bundled models have them; every other choice adds to it."""
    from progresvit.routing.settings import DEFAULT

    if values["budget_gmacs"] is not None:
        name = f"budget-{values['budget_gmacs']}"
    elif values["exit_share"] is not None:
        name = f"exit-{values['exit_share']}"
    elif values["max_drop"] is not None:
        name = f"drop-{100 * values['max_drop']:g}"
    else:
        name = DEFAULT
    certified = values["max_drop"] is not None
    added = {
        "per-round": values["per_round"],
        f"confidence-{values['confidence']}": certified and values["confidence"] != 0.95,
        "unlabelled": values["unlabelled"],
        f"router-{Path(values['router'] or '').stem}": values["router"] is not None,
        f"error-{values['max_error']}": values["max_error"] is not None,
        f"ood-{values['ood_share']}": values["ood_share"] is not None,
        str(values["ood_score"]): values["ood_score"] is not None,
        values["convention"]: values["convention"] != "paper",
    }
    return "-".join([name, *(text for text, is_used in added.items() if is_used)])


def _write_to_model(setting: Setting, folder: Path, name: str, header: Header, router: Path | None) -> None:
    """Write a setting to the folder of its model, and print how it is used."""
    from progresvit.engine.export.manifest import Manifest, is_export
    from progresvit.model.registry import DEFAULT_KIND
    from progresvit.routing.settings import DEFAULT, SettingWarning, load_setting, setting_path

    out, before = setting_path(folder, name), ""
    if out.is_file():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SettingWarning)
                old = load_setting(out)
            before = f" (replaced {old.evidence}, of {old.date or 'an unknown date'})"
        except ValueError:
            old, before = None, " (replaced a setting that could not be read)"
        if old is not None and old.is_certified and not setting.is_certified:
            raise ValueError(f"{out} is {old.evidence}; use --out FILE.json for a setting that is not, or delete it.")
    out.parent.mkdir(exist_ok=True)
    setting.save(out)
    _report(setting)
    output.echo(f"wrote {out}{before}")
    if header.config["kind"] != DEFAULT_KIND:  # no engine runs it
        return
    command = "classify" if header.masks is None else "segment"
    words = ["progresvit", command, "IMAGES", "--model", header.model]
    is_default = name == (Manifest.read(folder).default_name if is_export(folder) else DEFAULT)
    if not is_default:
        words += ["--threshold", name]
    if router is not None:
        words += ["--router", str(router)]
    output.echo(f"use it{' by default' if is_default else ''}: {shlex.join(words)}")


def _write(setting: Setting, out: Path, *, engine: str, router: Path | None = None) -> None:
    """Write the setting and print a summary."""
    out.parent.mkdir(parents=True, exist_ok=True)
    setting.save(out)
    _report(setting)
    with_router = "" if router is None else f', router="{router}"'
    output.echo(f'{out} is ready: progresvit.{engine}(model, threshold="{out}"{with_router})')


def _write_budgets(context: typer.Context, table: Records, out: Path | None) -> None:
    from progresvit import evaluation

    others = options.used_options(context, ("router", "max_error", "ood_share", "entropies"))
    folder, why = (None, "") if out is not None else _model_folder(table.header)
    if folder is not None:
        out = folder / BUDGETS_FILE
    if out is None or others or context.params["convention"] != "paper":
        because = f" because {why}" if why else ""
        raise ValueError(
            f"--budgets needs --out MODEL/budgets.json{because}. It uses entropies and the paper's GMACs; leave out "
            "--router, --max-error, --ood-share, --entropies and --convention."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    replaced = " (it replaced another table)" if out.is_file() else ""
    evaluation.measure_budgets(table).save(out)
    output.echo(f"{out} is ready{replaced}: progresvit classify IMAGES --model {out.parent} --budget-gmacs G")


def _report(setting: Setting) -> None:
    expected = setting.expected
    names = [(key, name) for key, name in (("top1", "top-1"), ("miou", "mIoU")) if key in expected]
    accuracy = "".join(f", {name} {expected[key]:.3%} against {expected[f'full_{key}']:.3%}" for key, name in names)
    output.echo(
        f"τ = {setting.threshold}: {expected['gmacs']:.3f} of {expected['full_gmacs']:.3f} GMACs on average "
        f"({expected['convention']} convention), {expected['saving']:.1%} saved{accuracy}"
    )
    from progresvit.evaluation.per_round import OTHER_HALF

    if setting.rule == "near-lossless" and setting.n < FEW:
        output.echo(
            f"note: chosen on {output.count_images(setting.n)}, which is few: top-1 may drop on others. --exit-share "
            "needs no labels, and --max-drop certifies a bound.",
            err=True,
        )

    if (other := expected.get(OTHER_HALF)) is not None:
        output.echo(
            "thresholds chosen on one half of the images and measured on the other, both ways: "
            f"{other['gmacs']:.3f} GMACs, top-1 {other['top1']:.3%}"
        )
    if setting.epsilon is not None and setting.delta is not None:
        mean = "" if setting.mean_loss is None else f"; on these images it is {setting.mean_loss:.3g}"
        output.echo(
            f"certified: with probability {1 - setting.delta:.6g} over the draw of the "
            f"{output.count_images(setting.n)}, the {CERTIFIED[setting.loss or 'labelled']} is at most "
            f"{setting.epsilon:.6g} ({setting.k} of them {'was' if setting.k == 1 else 'were'} harmed{mean})"
        )
        if setting.choices is not None:
            output.echo(
                f"tested at {1 - setting.delta / setting.choices:.6g}: the training chose this model among "
                f"{setting.choices} evaluations on these images"
            )
        if setting.copies is None:
            output.echo(
                "note: the records do not say which images are copies, since an earlier version made them or the "
                "images are corrupted; the certificate holds if there are none.",
                err=True,
            )
        elif setting.copies:
            output.echo(f"left out: {output.count_images(setting.copies)} with the same pixels as another image")
    if "coverage" in expected:
        limit = "none" if setting.abstain is None else f"entropy of {setting.abstain:.4g} or more"
        output.echo(
            f"withheld: {limit}; {expected['coverage']:.1%} of the images are answered, "
            f"{expected['answered_top1']:.3%} of the answers are correct"
        )
    if setting.ood is not None:
        output.echo(
            f"out-of-distribution: {setting.ood.score} below {setting.ood.limit:.4g}; "
            f"{expected['out_of_distribution']:.1%} of these images are rejected"
        )
