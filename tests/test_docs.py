"""The pages: links lead somewhere, commands exist, the reference and the map are complete, figures are measured."""

import ast
import functools
import json
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest
import typer

import progresvit
from progresvit.cli import app
from progresvit.data.samples import samples_folder
from progresvit.io.model_folder import BUNDLED, bundled_folder
from tests.test_bundle_model import load_script
from tests.test_layout import FLOORS

ROOT = Path(__file__).parent.parent
CARDS = sorted((ROOT / "progresvit" / "bundled").glob("*/README.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *CARDS]
FENCE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """GitHub's links to the headings of a page. The site makes the same."""
    headings = re.findall(r"^#+ +(.*?)\s*$", FENCE.sub("", page), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page):
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
    broken = []
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (heading and heading not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    assert broken == []


def typed_commands(page):
    """What a page types at ``progresvit``: the command, and the options that follow it up to a comment."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    code = [*FENCE.findall(text), *re.findall(r"`([^`]+)`", FENCE.sub("", text))]
    for command, rest in re.findall(r"(?<!import )\bprogresvit ([a-z][a-z-]*)\b(?![.(])([^#\n]*)", "\n".join(code)):
        yield command, re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", rest)


def command_options():
    """The options of each command, and those ahead of any command; a group has those of its commands."""
    group = typer.main.get_command(app)
    options = {"progresvit": {text for p in group.params for text in p.opts}}
    for name, command in group.commands.items():
        commands = (command, *getattr(command, "commands", {}).values())
        options[name] = {text for command in commands for p in command.params for text in p.opts}
    return options


def named_options(path):
    """The options in the messages of a module, with the text before each.

    Docstrings are no messages, and neither is a constant without a space, such as an argument of a subprocess.
    """
    module = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            for match in re.finditer(r"(?<![\w-])--[a-z][a-z0-9-]*", node.value) if " " in node.value else ():
                yield match[0], node.value[: match.start()]


def test_no_message_outside_the_command_line_names_an_option():
    """It names the argument, ``overwrite=True``, and the command prints its option (``cli/errors.py``)."""
    package = ROOT / "progresvit"
    paths = [path for path in sorted(package.rglob("*.py")) if path.parent.name != "cli"]
    assert len(paths) > 100
    named = [(path.relative_to(package).as_posix(), *option) for path in paths for option in named_options(path)]
    assert named == []


def test_every_option_that_a_command_names_is_one_of_its_own():
    """An option of another command follows the name of that one, as in evaluate --logits."""
    options = command_options()
    count, unknown = 0, []
    for path in sorted((ROOT / "progresvit" / "cli").glob("*.py")):
        own = path.stem.replace("_", "-")
        for option, before in named_options(path):
            count += 1
            clause = re.split(r"[.,;:()]", before)[-1]
            named = {word for word in re.findall(r"[a-z-]+", clause) if word in options}
            if len(named) > 1:
                named.discard("progresvit")  # progresvit evaluate --logits
            if own in options:
                named.add(own)
            if not any(option in options[name] for name in named or options):
                unknown.append(f"{path.name}: {option} after {before!r}")
    assert count > 50
    assert unknown == []


def test_every_command_and_option_that_a_page_types_exists():
    options = command_options()
    typed = [(page, *words) for page in PAGES for words in typed_commands(page) if page.name != "CHANGELOG.md"]
    assert len(typed) > 50
    assert [f"{page.name}: {name}" for page, name, _ in typed if name not in options] == []
    unknown = [
        f"{page.name}: {name} {option}"
        for page, name, words in typed
        for option in words
        if option not in {*options[name], "--help"}
    ]
    assert unknown == []


def test_every_install_command_works_without_a_package_index_that_has_progresvit():
    """It installs from a clone, with extras that exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [*PAGES, *(ROOT / "progresvit").rglob("*.py"), *(ROOT / "requirements").glob("*.txt")]
    lines = [line for path in texts for line in path.read_text(encoding="utf-8").splitlines()]
    commands = [words for line in lines for words in re.findall(r"(?:pip|uv|pipx) (?:install|add) ([^`#\n]*)", line)]
    assert len(commands) > 10
    assert [command for command in commands if re.search(r"(?<![/\w.-])progresvit\b", command)] == []
    named = re.findall(r"'\.\[([\w,-]+)\]'", "\n".join(commands))
    assert named
    assert {extra for names in named for extra in names.split(",")} <= set(extras)


def reference():
    """The names that the pages of the reference are made of."""
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md")]
    return re.findall(r"^::: (\S+)$", "\n".join(pages), flags=re.MULTILINE)


def test_every_name_of_the_reference_exists():
    for name in reference():
        pkgutil.resolve_name(name)


def test_every_public_name_is_in_the_reference():
    """A room shows all of its ``__all__``, except for a function that has the name of its module."""
    names = set(reference())
    assert {f"progresvit.{name}" for name in progresvit.__all__} <= names
    for room in names & {f"progresvit.{name}" for name in progresvit.__all__}:
        for name in getattr(pkgutil.resolve_name(room), "__all__", ()):
            if (ROOT.joinpath(*room.split(".")) / f"{name}.py").exists():
                assert f"{room}.{name}.{name}" in names


def test_the_map_shows_every_file_of_the_package():
    page = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
    assert page == load_script("code_map").rewritten(page), "docs/code.md is outdated; run python scripts/code_map.py"
    floors = re.search(r"^    config, compute.*?\n\n", page, flags=re.MULTILINE | re.DOTALL)[0].split("←")
    floors = [set(re.findall(r"\w+", floor)) for floor in floors]
    assert floors == list(FLOORS[1:])  # below them only _torchvision
    rooms = {path.parent.name for path in (ROOT / "progresvit").glob("*/__init__.py")}
    assert rooms <= set(re.findall(r"^## `(\w+)/`$", page, flags=re.MULTILINE)), "a room has no heading in docs/code.md"


@pytest.mark.parametrize("model", BUNDLED)
def test_the_pages_show_the_measured_figures_of_the_bundled_models(model):
    """The table of the default model is in README.md, that of the other and the comparison in docs/models.md."""
    figures = json.loads((bundled_folder(model) / "figures.json").read_text(encoding="utf-8"))
    first, last = figures["rounds"]
    rows = {
        name: (figure["top1"]["test half"]["mean"], figure["gmacs"])
        for name, figure in (("round 1 only", first), ("all rounds", last))
    }
    for name, setting in figures["settings"].items():
        if name != "careful":
            rows[f"`{name}`"] = (setting["top1"]["all"]["mean"], setting["gmacs"]["all"])
    readme, models = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/models.md"))
    page = readme if model == "imagenet-tiny" else models
    section = page[page.index(f"| `{model}`, ") :]
    table = section[: section.index("\n\n")]
    for name, (top1, gmacs) in rows.items():
        saved = 1 - gmacs / last["gmacs"]
        cells = [f"{100 * top1:.1f} %", f"{gmacs:.3f}", f"{100 * saved:.1f} %" if saved else "–"]
        assert f"| {name} | {' | '.join(cells)} |" in table
    for plain in figures.get("plain", ()):
        shown = f"{100 * plain['top1']['test half']['mean']:.1f} %"
        if plain["published"]:
            assert f"as published, without fine-tuning on these few images, {shown}" in " ".join(models.split())
        elif plain["resolution"] > 128:
            assert f"{shown} at {plain['gmacs']:.3f}" in " ".join(models.split())
    images = figures["images"]["test half"]
    assert f"on {images:,}" in section.lower()
    seen = figures["in_imagenet_training_set"]
    if seen["images"]:
        top1 = [f"{100 * seen['top1_of_others'][-1][key]:.1f}" for key in ("mean", "lowest", "highest")]
        share = f"{100 * seen['images'] / figures['images']['all']:.0f} %"
        text = " ".join(section.split())
        assert f"were trained on {share} of these images" in text
        assert f"on the {seen['others']} others, all rounds have {top1[0]} % ({top1[1]} to {top1[2]})" in text
    if model == "imagenet-tiny":
        published = next(plain["gmacs"] for plain in figures["plain"] if plain["published"])
        saved = [1 - figures["settings"][name]["gmacs"]["all"] / published for name in ("near-lossless", "budget-1.0")]
        expected = f"`near-lossless` saves {100 * saved[0]:.0f} % and `budget-1.0` {100 * saved[1]:.0f} %"
        assert expected in " ".join(section.split())


def test_the_readme_shows_what_the_first_command_prints():
    """All but the last digits, which another machine may round another way."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    block = page[page.index("$ progresvit classify ") :].split("```")[0]
    header, *rows = [cells for line in block.splitlines() if len(cells := re.split(r"\s*[│┃]\s*", line)) > 2]
    names = re.search(r"samples/\{([\w,]+)\}\.jpg", block)[1].split(",")
    paths = [samples_folder() / f"{name}.jpg" for name in names]
    assert len(rows) == len(paths) == 4
    for path, row, prediction in zip(paths, rows, progresvit.Engine().classify(paths)):
        cells = dict(zip(header, row))
        assert cells["image"] == path.relative_to(ROOT).as_posix()
        assert (cells["answer"], int(cells["round"])) == (prediction.label, prediction.exit_round)
        assert float(cells["probability %"]) == pytest.approx(100 * prediction.probability, abs=0.2)
        assert float(cells["entropy"]) == pytest.approx(prediction.entropy, abs=2e-3)
        assert float(cells["GMACs"]) == pytest.approx(prediction.gmacs, abs=1e-3)


def test_the_readme_names_every_command_in_at_most_130_lines():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 130
    named = set(re.findall(r"`(?:progresvit )?([a-z-]+)[` ]", page))
    assert typer.main.get_command(app).commands.keys() - named == set()


def test_every_test_file_that_a_page_names_exists():
    named = {file for page in PAGES for file in re.findall(r"tests/[\w/]+\.py", page.read_text(encoding="utf-8"))}
    assert len(named) > 10
    assert [file for file in sorted(named) if not (ROOT / file).exists()] == []


def test_every_function_that_a_page_names_exists():
    """``engine/fold.py::FoldedRound.forward`` is a file of the package and a name in it."""
    named = [
        (page.name, file, name)
        for page in sorted((ROOT / "docs").glob("*.md"))
        for file, name in re.findall(r"`([\w/]+\.py)::([\w.]+)`", page.read_text(encoding="utf-8"))
        if not file.startswith("tests/")
    ]
    assert len(named) > 40
    missing = [f"{page}: {file}::{name}" for page, file, name in named if name not in _names_in(file)]
    assert missing == []


@functools.cache
def _names_in(file):
    names = set()
    for node in ast.parse((ROOT / "progresvit" / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names
