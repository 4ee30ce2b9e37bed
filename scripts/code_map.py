"""Write the lists of files in docs/code.md: each file with the first sentence of its docstring.

    python scripts/code_map.py

Headings, prose and the order of files in the page are written by hand and kept. A new file is added at the end of the
list of its room, and a file that is gone is removed. tests/test_docs.py checks that the page is up to date.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "code.md"
HEADING = re.compile(r"^## `([\w/]+)/`$")
ENTRY = re.compile(r"^- `([\w/]+\.py)`: ")


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, as Markdown."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<!et al)(?<!e\.g)\.(?=\s|$)", paragraph)[0]
    sentence = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", sentence)
    return sentence.replace("``", "`").replace("<", "&lt;")


def entries(room: str, order: list[str]) -> list[str]:
    """A line for each file of a room or a folder: first the files of ``order``, then the others by name.

    The files of ``progresvit`` itself are those beside the rooms.
    """
    folder = ROOT / "progresvit" / room if (ROOT / "progresvit" / room).is_dir() else ROOT / room
    paths = sorted(folder.glob("*.py") if room == "progresvit" else folder.rglob("*.py"))
    files = {path.relative_to(folder).as_posix(): path for path in paths if not path.name.startswith("__")}
    names = [name for name in order if name in files]
    names += [name for name in files if name not in order]
    return [f"- `{name}`: {first_sentence(files[name])}" for name in names]


def rewritten(page: str) -> str:
    """The page, with a list of files at the end of each section whose heading names a room or a folder."""
    sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    for number, section in enumerate(sections):
        lines = section.rstrip("\n").split("\n")
        if heading := HEADING.match(lines[0]):
            order = [entry[1] for line in lines if (entry := ENTRY.match(line))]
            prose = "\n".join(line for line in lines if not ENTRY.match(line)).rstrip("\n")
            sections[number] = "\n\n".join([prose, "\n".join(entries(heading[1], order))]).rstrip("\n") + "\n\n"
    return "".join(sections).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
