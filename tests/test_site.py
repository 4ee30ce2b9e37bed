"""The documentation site: its first page, and every page in a browser, where nothing is cut off."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CUT_OFF = """
() => {
  const cut = [];
  for (const element of document.querySelectorAll("article *")) {
    const { left, right, width } = element.getBoundingClientRect();
    if (width < 2 || element.closest("svg") || getComputedStyle(element).visibility === "hidden") continue;
    let box = element.parentElement;
    while (box !== document.body && getComputedStyle(box).overflowX === "visible") box = box.parentElement;
    const overflow = getComputedStyle(box).overflowX;
    if (["auto", "scroll"].includes(overflow)) continue;
    const end = box === document.body ? innerWidth : box.getBoundingClientRect().right;
    if (right > end + 1 || left < -1) cut.push(`${element.tagName} ${element.textContent.trim().slice(0, 60)}`);
  }
  const { scrollWidth } = document.documentElement;
  if (scrollWidth > innerWidth) cut.push(`the page is ${scrollWidth} wide`);
  for (const image of document.querySelectorAll("article img")) {
    if (image.complete && image.naturalWidth === 0) cut.push(`${image.src} is no image`);
  }
  return cut;
}
"""
"""What leaves the window, or a box that cannot be scrolled."""


def test_the_first_page_has_a_button_and_small_screenshots():
    hooks = pytest.importorskip("mkdocs") and load_hooks()
    page = hooks._content(ROOT / "README.md", ROOT)
    before = page[: page.index("## ")]
    assert re.search(r"\[Get started\]\((\S+)\)\{ \.md-button", before)[1] == "docs/quickstart.md"
    images = re.findall(r'<img class="screenshot"[^>]*src="([^"#]+)', before)
    assert len(images) == 2
    assert all(0 < (ROOT / image).stat().st_size <= 150_000 for image in images)
    relinked = hooks._relink(page, ROOT / "README.md", "index.md", ROOT)
    assert 'src="figures/page_dark.webp#only-dark"' in relinked


def load_hooks():
    import importlib.util

    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.mark.long
def test_nothing_is_cut_off_on_a_screen_or_a_phone(browser, site):
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    assert len(pages) > 50
    tab, wrong = browser.new_page(), {}
    for path in pages:
        tab.goto(path.as_uri())
        for width in (1280, 390):
            tab.set_viewport_size({"width": width, "height": 900})
            if problems := tab.evaluate(CUT_OFF):
                wrong[f"{path.relative_to(site)} at {width}"] = problems[:5]
    assert wrong == {}
