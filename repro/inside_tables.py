"""Inside the models on the page: effects, gates and similarities of the reports, from inside.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from progresvit.metrics.interval import Interval, share_interval
from repro.compare import Difference
from repro.outcomes import verdict_of

RESULTS = Path(__file__).with_name("inside.json")
SCRATCH = "from-scratch"
MODELS = {
    "nettewoof-tiny": "`nettewoof-tiny`",
    "imagenet-tiny": "`imagenet-tiny`",
    SCRATCH: "the model from scratch",
}
MARGIN = 0.5
"""Points of top-1 within which an effect is called none."""

Row = dict[str, Any]
Reports = dict[str, dict[str, Any]]
"""Reports by model: the lines ``about`` and the rows of each table."""


def read_reports(path: Path) -> Reports:
    """The reports in a file, which holds its tables column by column; files of earlier versions hold rows."""
    reports = json.loads(path.read_text(encoding="utf-8"))
    return {model: {name: _rows(part) for name, part in report.items()} for model, report in reports.items()}


def _rows(part: Any) -> list[Any]:
    return part if isinstance(part, list) else [dict(zip(part, values)) for values in zip(*part.values())]


def to_json(reports: Reports) -> str:
    """The text of a file, with a line for each table."""
    models = []
    for model, report in reports.items():
        columns = {
            name: part if name == "about" else {key: [row[key] for row in part] for key in (part[0] if part else ())}
            for name, part in report.items()
        }
        lines = [f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in columns.items()]
        models.append(f" {json.dumps(model)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(models) + "\n}\n"


class Inside:
    """The results of inside.py for a page."""

    def __init__(self, path: Path = RESULTS) -> None:
        if not path.is_file():
            raise ValueError(f"{path} does not exist; run repro/inside.py.")
        self.models = list(MODELS)
        self.results = read_reports(path)
        missing = [name for name in MODELS if name not in self.results]
        if missing:
            raise ValueError(f"{path} has no results of {', '.join(missing)}; run repro/inside.py again.")

    def label(self, model: str) -> str:
        """The name of a model in the text."""
        return MODELS[model]

    def about(self, model: str) -> Sequence[str]:
        """Lines on the images and on the machine."""
        lines: Sequence[str] = self.results[model]["about"]
        return lines

    def row(self, model: str, table: str, **wanted: Any) -> Row:
        """The one row with these values."""
        rows = self.rows(model, table, **wanted)
        if len(rows) != 1:
            raise ValueError(f"{table} of {model} has {len(rows)} rows with {wanted}.")
        return rows[0]

    def rows(self, model: str, table: str, **wanted: Any) -> list[Row]:
        """The rows with these values."""
        rows: list[Row] = self.results[model][table]
        return [row for row in rows if all(row[key] == value for key, value in wanted.items())]

    def interval(self, model: str, table: str, column: str, **wanted: Any) -> Difference:
        """A column of the one row with these values, and the ends of its interval."""
        row = self.row(model, table, **wanted)
        return Difference(mean=row[column], lowest=row[f"{column}_low"], highest=row[f"{column}_high"])

    def effect(self, model: str, table: str, measure: str = "accuracy", **wanted: Any) -> Difference:
        """The change of the last round's accuracy or confidence under an intervention."""
        return self.interval(model, table, f"{measure}_change", **wanted)

    def verdict(self, model: str, table: str, **wanted: Any) -> str:
        """Verdict on the change of the accuracy."""
        return verdict_of(self.effect(model, table, **wanted), MARGIN)

    def largest(self, table: str, models: Sequence[str]) -> float:
        """The largest change of the accuracy in a table, in either direction."""
        rows = [row for model in models for row in self.rows(model, table) if row["accuracy_change"] is not None]
        return max(abs(float(row["accuracy_change"])) for row in rows)

    def change(self, model: str, tokens: str) -> Difference:
        """Change of the similarity from the last block output of round 1 to the first of round 2."""
        return self.interval(model, "similarity", "change", tokens=tokens, round=2, block=1)

    def similarity(self, model: str, tokens: str, **place: int) -> float:
        """Cosine to the last block output of the last round."""
        value: float = self.row(model, "similarity", tokens=tokens, **place)["similarity"]
        return value

    def last_block(self, model: str) -> int:
        """Number of the last block."""
        return max(int(row["block"]) for row in self.results[model]["similarity"])

    def separation(self, model: str, number: int) -> Difference:
        """Separation of the classes at the end of a round."""
        return self.interval(model, "trajectories", "separation", round=number, block=self.last_block(model))

    def separation_gain(self, model: str) -> Difference:
        """Gain in separation of round 2 over round 1, at their ends."""
        return self.interval(model, "trajectories", "separation_change", round=2, block=self.last_block(model))

    def gate_differences(self, model: str, branch: str) -> list[float]:
        """RMS difference of the rounds, block by block."""
        return [row["rms_difference_to_next_round"] for row in self.rows(model, "gate-depth", round=1, branch=branch)]

    def strongest_block(self, model: str, branch: str) -> int:
        """The block, from 1, at which the rounds differ most."""
        values = self.gate_differences(model, branch)
        return 1 + values.index(max(values))

    def static_share(self, model: str, branch: str, *, last: bool = True) -> float:
        """Share of the squared deviation of the gates from 1 that both rounds have in common, with the last block."""
        static = changing = 0.0
        rows = self.rows(model, "gate-depth", round=1, branch=branch)
        for row in rows if last else rows[:-1]:
            static += row["rms_static"] ** 2
            changing += row["rms_difference_to_next_round"] ** 2 / 4
        return static / (static + changing)

    def exit_counts(self, model: str, exit_round: int) -> dict[str, int]:
        """Images that exit after a round, by what round 2 makes of them."""
        names = {(False, True): "repaired", (True, False): "broken", (True, True): "right", (False, False): "wrong"}
        counts = dict.fromkeys(names.values(), 0)
        for row in self.rows(model, "exits", exit_round=exit_round):
            counts[names[row["correct_round1"], row["correct_round2"]]] += row["images"]
        return counts

    def exit_share(self, model: str, outcome: str, exit_round: int) -> Interval:
        """Share of the images of an exit round with an outcome, with a Wilson interval."""
        counts = self.exit_counts(model, exit_round)
        return share_interval(counts[outcome], sum(counts.values()))

    def sign_verdict(self, difference: Difference) -> str:
        """Whether a change is above or below 0."""
        return "inconclusive" if not difference.clear else "more" if difference.mean > 0 else "less"

    def order_verdict(self, model: str) -> str:
        """The two parts of the claim: patch tokens matter more than the class token, and of the same class it least."""
        patches, shuffled, other, same = (
            self.effect(model, "token-swap", tokens=tokens, donor=donor)
            for tokens, donor in (
                ("patch tokens", "other class"),
                ("patch tokens", "shuffled in space"),
                ("class token", "other class"),
                ("class token", "same class"),
            )
        )
        first = max(patches.highest, shuffled.highest) < other.lowest
        second = max(abs(same.lowest), abs(same.highest)) < -other.highest
        words = {True: "holds", False: "does not hold"}
        return (
            f"patch tokens more than the class token: {words[first]}; least with one of the same class: {words[second]}"
        )

    def restarts(self) -> str:
        """Which tokens fall below half of their similarity at the transition, model by model."""
        restarting = []
        for model in self.models:
            tokens = [tokens for tokens in ("class", "patch") if self._falls(model, tokens)]
            restarting += [f"{' and '.join(tokens)} tokens of {self.label(model)}"] if tokens else []
        return ", ".join(restarting) if restarting else "none"

    def _falls(self, model: str, tokens: str) -> bool:
        before = self.similarity(model, tokens, round=1, block=self.last_block(model))
        return self.similarity(model, tokens, round=2, block=1) < before / 2

    def refines_verdict(self) -> str:
        """Whether the class token keeps rising at the transition, and which tokens restart."""
        kept = [self.label(model) for model in self.models if self.change(model, "class").highest >= 0]
        rises = f"the class token keeps rising in {', '.join(kept)}" if kept else "the class token falls in every model"
        return f"{rises}; below half of the similarity: {self.restarts()}"

    def gate_means(self, model: str) -> list[float]:
        """Mean multiplier of each branch of each block in each round."""
        return [row["mean"] for row in self.rows(model, "gate-depth")]

    def fusion_gate(self, model: str, stream: str) -> float:
        """Mean multiplier of a stream at the transition to round 2."""
        value: float = self.row(model, "fusion-gates", round=2, stream=stream)["mean"]
        return value

    def largest_spread(self, table: str, models: Sequence[str]) -> float:
        """Largest spread of the timed runs of a point, as a share of their median."""
        return max(float(row["spread"]) for model in models for row in self.rows(model, table))

    def excludes(self, table: str, loss: float, models: Sequence[str], **wanted: Any) -> bool:
        """Whether the intervals of all these models lie above a loss."""
        return all(self.effect(model, table, **wanted).lowest > -loss for model in models)

    def final_block_verdict(self) -> str:
        """The branches and models in which the rounds differ most in the last block."""
        strongest = []
        for model in self.models:
            branches = [
                branch
                for branch in ("attention", "MLP", "output")
                if self.strongest_block(model, branch) == self.last_block(model)
            ]
            strongest += [f"{' and '.join(branches)} in {self.label(model)}"] if branches else []
        return ", ".join(strongest) if strongest else "none"
