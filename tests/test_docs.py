"""The pages: the reference is the code's, the map shows every file, links lead somewhere, figures are measured."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

import progresvit
from progresvit.data.samples import samples_folder

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "repro" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def make_api():
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its data classes look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_reference_is_that_of_the_code(make_api):
    written = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert written == make_api.make_page(), "run 'make docs'"


def test_every_public_name_has_a_docstring(make_api):
    found = [found for names in make_api.public_names().values() for found in names.values()]
    assert len(found) > 80
    assert [f"{one.module}.{one.name}" for one in found if not one.doc] == []


def test_the_reference_shows_signatures_fields_and_methods_as_they_are_written(make_api):
    page = make_api.make_page()
    assert "def load(source: Source | None = None, *, revision: str | None = None) -> ProgResViT\n" in page
    assert "class Engine(\n    model: ProgResViT | PathLike | None = None,\n" in page
    assert "- `resolution: int`: Image side in pixels, a multiple of the patch size." in page
    assert "- `classify(images: Pictures) -> list[Prediction]`: A prediction for each picture, in order." in page
    assert not re.search(r"\((self|cls)\b", page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_that_exist(make_api, page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
    broken = []
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (heading and heading not in make_api.anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    assert broken == []


def test_the_map_shows_every_file_of_the_package():
    words = set(re.findall(r"[\w/]+\.py|[\w]+/", (ROOT / "docs" / "code.md").read_text(encoding="utf-8")))
    package = ROOT / "progresvit"
    files = [path for path in package.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    missing = [
        path.relative_to(package).as_posix()
        for path in files
        if path.name not in words and path.parent.name != "cli"  # a file per command
    ]
    assert missing == []
    assert {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()} <= words


def test_the_readme_says_of_the_shipped_model_what_was_measured():
    figures = json.loads((ROOT / "progresvit" / "shipped" / "figures.json").read_text(encoding="utf-8"))
    first, last = figures["rounds"]
    told = {"round 1 alone": (first["top1"], first["gmacs"]), "all rounds": (last["top1"], last["gmacs"])}
    for name in ("near-lossless", "drop-0.5", "drop-1"):
        told[f"`{name}`"] = (figures["settings"][name]["top1"], figures["settings"][name]["gmacs"]["all"])
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, (top1, gmacs) in told.items():
        saved = 1 - gmacs / last["gmacs"]
        cells = [f"{100 * top1[group]:.1f} %" for group in ("all", "easy ten", "ten dogs")]
        cells += [f"{gmacs:.3f}", f"{100 * saved:.1f} %" if saved else "–"]
        assert f"| {name} | {' | '.join(cells)} |" in page
    halves = figures["halves"]["settings"]["near-lossless"]
    lost, saved = (100 * halves[key]["mean"] for key in ("drop", "saving"))
    assert f"lost {lost:.2f} points and saved\n{saved:.1f} %" in page


def test_the_readme_shows_what_the_first_command_prints():
    """All but the last digits, which another machine may round another way."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    block = page[page.index("$ progresvit classify --samples") :].split("```")[0]
    shown = {cells[1]: cells for line in block.splitlines() if len(cells := re.split(r"\s*│\s*", line)) == 9}
    engine = progresvit.Engine(top_k=2)
    paths = sorted(samples_folder().glob("*.jpg"))
    assert set(shown) == {path.name for path in paths}
    for path, found in zip(paths, engine.classify(paths)):
        _, _, answer, probability, _, round_, entropy, gmacs, _ = shown[path.name]
        assert (answer, int(round_)) == (found.label, found.exit_round)
        assert float(probability) == pytest.approx(100 * found.probability, abs=0.2)
        assert float(entropy) == pytest.approx(found.entropy, abs=2e-3)
        assert float(gmacs) == pytest.approx(found.gmacs, abs=1e-3)
