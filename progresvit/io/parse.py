"""Values from a file, validated by pydantic: errors name the key, and for an unknown one the nearest known.

JSON has no infinity, and a threshold may be infinite: it is written as the string "inf", which pydantic and ``float``
read.
"""

from __future__ import annotations

import difflib
import json
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

Parsed = TypeVar("Parsed", bound=BaseModel)

MAX_BYTES = 16_000_000
"""Of a JSON file. The labels of 20,000 classes take 1 MB."""
MAX_NESTING = 50
"""Lists and mappings within each other, in JSON and YAML."""
MAX_DIGITS = 100
"""Of a whole number."""
MAX_PROBLEMS = 20
"""The most problems that one error explains."""

TOO_DEEP = f"it has lists or mappings within each other more than {MAX_NESTING} levels deep, which is the limit"
_FAR = 0.25
"""How much less similar a second suggestion may be than the nearest."""


class Section(BaseModel):
    """Base of everything that is parsed from a file: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    def by_key(self) -> dict[str, Any]:
        """The fields by their keys in files."""
        return {file_key(type(self), name): value for name, value in self}


def file_key(section: type[BaseModel], name: str) -> str:
    """The key in files of a field, which is the name of the field unless it has a validation alias."""
    alias = section.model_fields[name].validation_alias
    return alias if isinstance(alias, str) else name


def former_name(name: str) -> property:
    """A read-only attribute that earlier versions had under another name."""
    return property(operator.attrgetter(name))


def count_of(number: int, noun: str, spec: str = "") -> str:
    """The number with its noun in singular or plural: ``1 image``, ``12 images``; ``spec`` formats the number."""
    plural = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:{spec}} {noun}{plural}"


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """The end of an error message about an unknown name: ``did you mean 'depth'?`` or ``choose one of a, b.``"""
    names = list(choices)
    nearest = difflib.get_close_matches(str(name), names, n=2, cutoff=0.5)
    if nearest:
        best = difflib.SequenceMatcher(None, nearest[0], str(name)).ratio()
        nearest = difflib.get_close_matches(str(name), nearest, n=2, cutoff=best - _FAR)
        return f"did you mean {' or '.join(map(repr, nearest))}?"
    return f"choose one of {', '.join(names)}." if names else "there are none to choose from; remove it."


def parse(model: type[Parsed], values: object, *, origin: str) -> Parsed:
    """Validate ``values``; every problem is reported in one ``ValueError`` that begins with ``origin``."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{origin}: {explain_all(error, model)}") from error


def read_text(path: str | Path, most: int = MAX_BYTES) -> str:
    """The text of a file. Only its beginning is read if it has more than ``most`` bytes, which is an error."""
    with Path(path).open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most / 1e6:g} MB, which is the limit")
    return content.decode("utf-8")


def parse_json(text: str) -> Any:
    """The values in JSON; nesting and numbers are limited, so that no later step has to expect more."""
    try:
        values = json.loads(text, parse_int=_parse_int)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    level, nesting = [values], 0
    while level := [part for value in level for part in _parts(value)]:
        nesting += 1
        if nesting > MAX_NESTING:
            raise ValueError(TOO_DEEP)
    return values


def check_digits(number: str) -> None:
    """Refuse a whole number of more than ``MAX_DIGITS`` digits."""
    if len(number) > MAX_DIGITS:
        raise ValueError(f"it has a number of {len(number)} digits; {MAX_DIGITS} are the limit")


def _parse_int(number: str) -> int:
    check_digits(number)
    return int(number)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def read_json(model: type[Parsed], path: str | Path, *, what: str, remedy: str) -> Parsed:
    """Parse a JSON file that holds a ``what``; errors name the file and end with the remedy."""
    try:
        values = parse_json(read_text(path))
    except FileNotFoundError:
        raise ValueError(f"there is no {what} at {path}; {remedy}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a valid {what} ({error}); {remedy}") from error
    try:
        return parse(model, values, origin=f"{path} is not a valid {what}")
    except ValueError as error:
        why = str(error).rstrip(".")
        raise ValueError(f"{why}{' ' if why.endswith('?') else '; '}{remedy}") from error


def explain_all(error: ValidationError, model: type[BaseModel]) -> str:
    """The problems of a ``ValidationError``; of more than ``MAX_PROBLEMS`` the first."""
    problems = error.errors()
    inside = {problem["loc"][:depth] for problem in problems for depth in range(len(problem["loc"]))}
    problems = [  # pydantic counts the valid items of a list only
        problem for problem in problems if problem["type"] != "too_short" or problem["loc"] not in inside
    ]
    lines = [explain(problem, model) for problem in problems[:MAX_PROBLEMS]]
    return "; ".join([*lines, *([f"and {len(problems) - len(lines)} more"] if len(problems) > len(lines) else [])])


def explain(problem: Mapping[str, Any], model: type[BaseModel]) -> str:
    """One problem of a ``ValidationError``, as ``key: what is wrong``."""
    location: Sequence[Any] = problem["loc"]
    key = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown key; {did_you_mean(location[-1], _known_keys(model, location[:-1]))}"
    if problem["type"] == "literal_error":
        values = [text or word for text, word in re.findall(r"'([^']*)'|\b(True|False)\b", problem["ctx"]["expected"])]
        return f"{key}: unknown value {problem['input']!r:.60}; {did_you_mean(problem['input'], values)}"
    if problem["type"] in ("tuple_type", "list_type"):
        return f"{key}: a list is needed, such as [{problem['input']!s:.60}], not {problem['input']!r:.60}"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if problem["type"] not in ("value_error", "assertion_error", "missing"):  # pydantic's own: show the value
        message = f"{message[:1].lower()}{message[1:]}, not {problem['input']!r:.60}"
    return f"{key}: {message}" if key else message


def dump_json(values: Any, *, indent: int | None = 2) -> str:
    """JSON text in which an infinity is the string "inf"; NaN is refused."""
    return json.dumps(_without_infinity(values), indent=indent, allow_nan=False)


def _without_infinity(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: _without_infinity(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(part) for part in value]
    return value


def _known_keys(model: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """Keys of the section that ``path`` leads to; unions and containers are searched for their sections."""
    sections: list[type[BaseModel]] = [model]
    for part in path:
        children: list[type[BaseModel]] = []
        for section in sections:
            fields = {file_key(section, name): field for name, field in section.model_fields.items()}
            if isinstance(part, str) and part in fields:
                children += _sections(fields[part].annotation)
        sections = children or sections  # an index into a list, a key of a mapping or the tag of a union
    return sorted({file_key(section, name) for section in sections for name in section.model_fields})


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections(part)]


def printable(text: str) -> str:
    """The text on one line, as a terminal can show it: line breaks, control characters and bad bytes are escaped."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def parse_limit(text: str | None) -> str | float | tuple[float, ...] | None:
    """Parse a number or comma-separated numbers; other text names a setting and is returned unchanged."""
    if text is None:
        return None
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        return text
    return numbers[0] if len(numbers) == 1 else numbers
