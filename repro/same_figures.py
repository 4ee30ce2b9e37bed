"""Whether the results pages show the same figures as before a change of their text or code.

    git worktree add BEFORE REVISION
    python repro/same_figures.py BEFORE/docs docs

The pages are results.md, inside.md and all of results/. Every row of a table before must be a row of a table after, as
often as before, and every number of the text before must be in the text or in a table after. The script prints what
is missing and what is new in tables, and exits with code 1 if anything is missing.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

NUMBER = re.compile(r"[+\N{MINUS SIGN}-]?\d[\d,]*(?:\.\d+)?")


def read_pages(docs: Path) -> str:
    """The text of all results pages, without addresses: a link may change."""
    paths = [docs / "results.md", docs / "inside.md", *sorted((docs / "results").rglob("*.md"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())
    return re.sub(r"\]\([^)]*\)|<img [^>]*>", "]", text)


def table_rows(text: str) -> Counter[str]:
    """The rows of all Markdown tables that hold a number."""
    return Counter(line.strip() for line in text.splitlines() if line.startswith("|") and NUMBER.search(line))


def text_numbers(text: str) -> set[str]:
    """The numbers of all lines that are no rows of tables."""
    return {
        number.rstrip(",") for line in text.splitlines() if not line.startswith("|") for number in NUMBER.findall(line)
    }


def main(arguments: list[str] | None = None) -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the folder docs before the change")
    parser.add_argument("after", type=Path, nargs="?", default=Path("docs"))
    options = parser.parse_args(arguments)
    before, after = read_pages(options.before), read_pages(options.after)
    lost, new = table_rows(before) - table_rows(after), table_rows(after) - table_rows(before)
    everywhere = {number.rstrip(",") for number in NUMBER.findall(after)}
    gone = sorted(text_numbers(before) - everywhere)
    print(*(f"missing: {row}" for row in lost.elements()), sep="\n", end="\n" if lost else "")
    print(*(f"new: {row}" for row in new.elements()), sep="\n", end="\n" if new else "")
    print(f"missing numbers of the text: {', '.join(gone) or 'none'}")
    print(f"{table_rows(before).total()} rows of tables and {len(text_numbers(before))} numbers of the text before")
    sys.exit(1 if lost or gone else 0)


if __name__ == "__main__":
    main()
