"""Claims of the paper beside what was measured: claims.yaml in, a table out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from progresvit.evaluation.table import Column, Table
from progresvit.io.yaml_files import read_yaml
from progresvit.report.facts import find_fact

CLAIMS_FILE = "claims.yaml"


class Claim(BaseModel):
    """One claim. ``measured`` and ``why`` may quote figures, such as {full.top1}."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    claim: str
    paper: str
    """What the paper reports."""
    measured: str | None = None
    """What was found here; may be missing if nothing was measured."""
    verdict: Literal["holds", "does not hold", "cannot be told", "not measured"]
    why: str | None = None
    """May be missing if the claim holds."""


def claims_table(path: Path, facts: Mapping[str, str]) -> str:
    """The table in Markdown, every quoted figure filled in."""
    rows = []
    for number, claim in enumerate(read_claims(path), start=1):
        where = f"{path}, claim {number}"
        measured, why = (_fill(words, facts, where) for words in (claim.measured, claim.why))
        verdict = f"**{claim.verdict}**" + (f": {why}" if why else "")
        rows.append({"claim": claim.claim, "paper": claim.paper, "measured": measured, "verdict": verdict})
    columns = [
        Column("claim", "claim", _one_line, left=True),
        Column("paper", "the paper", _one_line, left=True),
        Column("measured", "measured here", _one_line, left=True),
        Column("verdict", "verdict", _one_line, left=True),
    ]
    return Table("The paper's claims beside what was measured", columns, rows).to_markdown()


def read_claims(path: Path) -> list[Claim]:
    """All claims, checked."""
    values = read_yaml(path)
    if not isinstance(values, list) or not values:
        raise ValueError(f"{path} should be a list of claims, each with {', '.join(Claim.model_fields)}.")
    return [_check(value, f"{path}, claim {number}") for number, value in enumerate(values, start=1)]


def _check(value: object, where: str) -> Claim:
    try:
        claim = Claim.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            raise ValueError(f"{where}: {place} is no key; there are {', '.join(Claim.model_fields)}.") from error
        if problem["type"] == "missing":
            raise ValueError(f"{where}: {place} is missing.") from error
        raise ValueError(f"{where}: {place} {problem['msg'].removeprefix('Input ')}".rstrip(".") + ".") from error
    if claim.measured is None and claim.verdict != "not measured":
        raise ValueError(f"{where}: say under measured what was found, or that it was not measured under verdict.")
    if claim.why is None and claim.verdict != "holds":
        raise ValueError(f"{where}: say under why the verdict is '{claim.verdict}'.")
    return claim


def _fill(words: str | None, facts: Mapping[str, str], where: str) -> str | None:
    if words is None:
        return None
    return re.sub(r"\{([^{}]*)\}", lambda found: find_fact(facts, found[1], where), words)


def _one_line(words: str) -> str:
    return " ".join(words.split())
