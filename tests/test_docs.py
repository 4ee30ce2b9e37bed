"""The pages: the reference is that of the code, the map shows every file, and links lead somewhere."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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
