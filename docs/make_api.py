"""Writes docs/api.md from signatures and docstrings: ``make docs``.

The source is read and not imported, so the page does not depend on what is installed, and signatures stand there as
they are written.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "api.md"

SECTIONS: dict[str, tuple[str, ...] | None] = {
    "progresvit": None,
    "progresvit.compute": ("RoundMacs", "average_gmacs", "cumulative_gmacs", "parameters", "round_macs"),
    "progresvit.routing": None,
    "progresvit.engine": None,
    "progresvit.evaluation": None,
    "progresvit.model": None,
    "progresvit.data": None,
    "progresvit.data.dataset": ("Entry", "ImageDataset", "find_images", "find_unlabelled"),
    "progresvit.training.recipe": (
        *("Recipe", "Model", "Data", "Augmentation", "Mixing", "Optimizer", "Schedule", "Distillation", "Run"),
        *("load_recipe", "make_recipe", "shipped_recipes"),
    ),
    "progresvit.training.loop": ("Interrupted", "train"),
    "progresvit.distributed": ("Processes", "end_processes", "start_processes"),
    "progresvit.analysis.routing_figures": ("frontier_figure", "reliability_figure", "risk_coverage_figure"),
    "progresvit.interop": None,
}
"""Where a user's names come from, in the page's order; None: all that the package exports."""

HEAD = """\
# API reference

Made from the signatures and docstrings by `make docs`; change those and not this page. What the words mean is in
[method.md](method.md), and which file does what in [code.md](code.md).
"""

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Found:
    """A public name where it is defined."""

    name: str
    module: str
    node: Definition
    doc: str | None

    @property
    def path(self) -> Path:
        """Of the file that defines it, from the top of the repository."""
        return module_path(self.module).relative_to(ROOT)


def module_path(module: str) -> Path:
    """The file of a module or of a package."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def parse(module: str) -> ast.Module:
    """The module's tree."""
    return ast.parse(module_path(module).read_text(encoding="utf-8"))


def exported(module: str) -> list[str]:
    """What a package lists in ``__all__``."""
    for node in parse(module).body:
        if isinstance(node, ast.Assign) and _targets(node) == ["__all__"]:
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise ValueError(f"{module} has no __all__; list its names in SECTIONS.")


def find(module: str, name: str) -> Found | None:
    """The definition of a name, through as many re-exports as there are; None if it is a module itself."""
    tree = parse(module)
    for node, after in zip(tree.body, [*tree.body[1:], None]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return Found(name, module, node, ast.get_docstring(node))
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
            return Found(name, module, node, _text(after))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            assert node.module is not None
            return None if module_path(f"{node.module}.{name}").exists() else find(node.module, name)
    raise ValueError(f"{module}.{name} is exported and defined nowhere.")


def public_names() -> dict[str, dict[str, Found]]:
    """The names of each section; a name that an earlier section has is not told again."""
    told: set[tuple[str, str]] = set()
    sections: dict[str, dict[str, Found]] = {}
    for section, names in SECTIONS.items():
        sections[section] = {}
        for name in sorted(names or exported(section), key=str.lower):
            found = find(section, name)
            if found is not None and (found.module, name) not in told:
                told.add((found.module, name))
                sections[section][name] = found
    return sections


def make_page() -> str:
    """The whole page."""
    sections = public_names()
    parts = [
        text
        for section, names in sections.items()
        for text in (
            f"## `{section}`\n\n{_markdown(ast.get_docstring(parse(section)))}\n",
            *(describe(section, found) for found in names.values()),
        )
    ]
    links = iter(anchors(HEAD + "\n".join(parts))[1:])  # the first is the page's own title
    index = [
        f"- [`{section}`](#{next(links)}): " + ", ".join(f"[`{name}`](#{next(links)})" for name in names)
        for section, names in sections.items()
    ]
    return "\n".join([HEAD, "\n".join(index) + "\n", *parts])


def anchors(page: str) -> list[str]:
    """GitHub's links to the headings of a page, in order; one that is taken gets a number."""
    found: list[str] = []
    seen: dict[str, int] = {}
    prose = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ +(.*?)\s*$", prose, flags=re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w -]", "", plain.lower()).replace(" ", "-")
        found.append(f"{anchor}-{seen[anchor]}" if anchor in seen else anchor)
        seen[anchor] = seen.get(anchor, 0) + 1
    return found


def describe(section: str, found: Found) -> str:
    """One name: signature, docstring, and of a class its fields and methods."""
    source = (ROOT / found.path).read_text(encoding="utf-8")
    node = found.node
    code = _value(source, node) if isinstance(node, ast.Assign | ast.AnnAssign) else _signature(source, node)
    lines = [f"### `{section}.{found.name}`", "", "```python", code, "```", "", _markdown(found.doc), ""]
    if isinstance(node, ast.ClassDef):
        members = [*_fields(source, node), *_methods(source, node)]
        lines += [*members, ""] if members else []
    lines += [f"<sub>[{found.path.as_posix()}](../{found.path.as_posix()})</sub>", ""]
    return "\n".join(lines)


def _signature(source: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """What a caller writes: a function's head, or a class with what its constructor takes."""
    if isinstance(node, ast.FunctionDef):
        return _head(source, node)
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            head = _head(source, part).replace("def __init__(", f"class {node.name}(", 1)
            head = re.sub(
                r"\(\s*self(,\s*|(?=\)))", lambda match: "(\n    " if "\n" in match[0] else "(", head, count=1
            )
            return head.removesuffix(" -> None")
    bases = ", ".join(base.id for base in node.bases if isinstance(base, ast.Name) and not base.id.startswith("_"))
    return f"class {node.name}" + (f"({bases})" if bases else "")


def _head(source: str, node: ast.FunctionDef) -> str:
    """From ``def`` to ahead of the colon, as it is written."""
    lines = source.splitlines()[node.lineno - 1 : node.body[0].lineno]
    text = "\n".join(line[node.col_offset :] for line in lines)
    end = node.returns
    assert end is not None, f"{node.name} does not say what it returns"
    assert end.end_lineno is not None
    assert end.end_col_offset is not None
    head = text.splitlines()[: end.end_lineno - node.lineno + 1]
    head[-1] = head[-1][: end.end_col_offset - node.col_offset]
    return "\n".join(line.split("  # ")[0].rstrip() for line in head)


def _value(source: str, node: ast.Assign | ast.AnnAssign) -> str:
    text = ast.get_source_segment(source, node) or ""
    return text if text.count("\n") < 10 else f"{text.splitlines()[0]} …"


def _fields(source: str, node: ast.ClassDef) -> list[str]:
    """The fields of a data class, a named tuple or a recipe's section, with what is said below each."""
    lines = []
    for part, after in zip(node.body, [*node.body[1:], None]):
        if isinstance(part, ast.AnnAssign) and not _targets(part)[0].startswith("_"):
            doc = _text(after)
            code = " ".join((ast.get_source_segment(source, part) or "").split())
            lines.append(f"- `{code}`" + (f": {_one_line(doc)}" if doc else ""))
    return lines


def _methods(source: str, node: ast.ClassDef) -> list[str]:
    """Public methods and properties, each with the first paragraph of its docstring."""
    lines = []
    for part in node.body:
        if not isinstance(part, ast.FunctionDef) or part.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator) for decorator in part.decorator_list}
        head = (
            " ".join(_head(source, part).removeprefix("def ").split())
            .replace("( ", "(")
            .replace(", )", ")")
            .replace(" )", ")")
        )
        head = re.sub(r"\((self|cls)(, |(?=\)))", "(", head, count=1)
        if decorators & {"property", "cached_property"}:
            head = head.replace("() -> ", ": ")
        doc = ast.get_docstring(part)
        lines.append(f"- `{head}`" + (f": {_one_line(doc.split(chr(10) * 2)[0])}" if doc else ""))
    return lines


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _text(node: ast.stmt | None) -> str | None:
    """The string below a field or constant."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return None


def _markdown(doc: str | None) -> str:
    """Docstrings mark code as Sphinx does."""
    return re.sub(r"(?::\w+:)?`{1,2}([^`]+)`{1,2}", r"`\1`", doc or "")


def _one_line(doc: str) -> str:
    return " ".join(_markdown(doc).split())


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
