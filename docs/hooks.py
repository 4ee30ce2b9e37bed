"""Hooks of the site: README.md is the first page, and a linked file outside docs/ becomes a page.

The first page also has buttons and a screenshot of the server's page (``draw_screenshot.py``).

The links of the repository therefore work on the site too, offline and without the address of a repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
LARGEST = 100_000
"""Bytes of the longest file that is shown as a page. A longer one is copied as it is."""
LINK = re.compile(r'(\]\(|src=")([^)\s"#]+)')
FENCE = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)
LEXERS = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".cff": "yaml"}

OPENING = """
[Get started](docs/quickstart.md){ .md-button .md-button--primary }
[Your own images](docs/own_images.md){ .md-button }
[Serve](docs/serve.md){ .md-button }

<img class="screenshot" alt="The server's page: an image exits after round 1"
  src="docs/figures/page_light.webp#only-light">
<img class="screenshot" alt="The server's page: an image exits after round 1"
  src="docs/figures/page_dark.webp#only-dark">

`progresvit serve` shows what each round sees and where an image exits at a threshold. The photographs are the
[sample images](progresvit/samples/CREDITS.md) of the package, with their authors and licences.

"""
"""Follows the first paragraph of README.md."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for README.md and for every file outside docs/ that a page links to."""
    repository = Path(config.config_file_path).parent
    waiting = [repository / name for name in PAGES]
    for file in files.documentation_pages():
        waiting += _outside(file.content_string, repository / "docs" / file.src_uri, repository)
    added: set[str] = set()
    for source in waiting:  # grows: a page that is added has links too
        uri = _uri(source, repository)
        if uri in added:
            continue
        added.add(uri)
        if uri.endswith(".md"):
            content = _content(source, repository)
            waiting += _outside(content, source, repository)
            files.append(File.generated(config, uri, content=_relink(content, source, uri, repository)))
        else:
            files.append(File.generated(config, uri, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page in docs/ to files outside into links to their pages."""
    if page.file.generated_by is not None:
        return markdown
    repository = Path(config.config_file_path).parent
    return _relink(markdown, repository / "docs" / page.file.src_uri, page.file.src_uri, repository)


def _uri(source: Path, repository: Path) -> str:
    """Where a file of the repository is on the site, as MkDocs names it."""
    path = source.relative_to(repository).as_posix()
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if source.is_dir():
        return f"files/{path}/index.md"
    return f"files/{path}" if source.suffix == ".md" or not _is_text(source) else f"files/{path}.md"


def _content(source: Path, repository: Path) -> str:
    """The page of a file or a folder outside docs/."""
    if source.is_dir():
        names = sorted(path.name for path in source.iterdir() if not path.name.startswith((".", "__")))
        body = "\n".join(f"- [{name}]({source.name}/{name})" for name in names)
    elif source.suffix == ".md":
        text = source.read_text(encoding="utf-8")
        return text.replace("\n<img ", OPENING + "<img ", 1) if source == repository / "README.md" else text
    else:
        body = f"````{LEXERS.get(source.suffix, 'text')}\n{source.read_text(encoding='utf-8')}\n````"
    return f"---\nsearch:\n  exclude: true\n---\n\n# `{source.relative_to(repository)}`\n\n{body}\n"


def _is_text(source: Path) -> bool:
    """Whether a file is shown as a page."""
    content = source.read_bytes()
    return len(content) <= LARGEST and b"\0" not in content


def _targets(text: str, source: Path, repository: Path) -> dict[str, Path]:
    """The files of the repository that a page links to, by link."""
    prose = "".join(FENCE.split(text)[::2])
    targets = {}
    for _, link in LINK.findall(prose):
        path = Path(os.path.normpath(source.parent / link))
        if path.is_relative_to(repository) and path.exists():
            targets[link] = path / "README.md" if (path / "README.md").exists() else path
    return targets


def _outside(text: str, source: Path, repository: Path) -> list[Path]:
    """The linked files that are no part of docs/."""
    targets = _targets(text, source, repository).values()
    return [path for path in targets if not path.is_relative_to(repository / "docs")]


def _relink(text: str, source: Path, uri: str, repository: Path) -> str:
    """The page with links as the site needs them; code blocks stay as they are."""
    targets = _targets(text, source, repository)

    def relink(match: re.Match[str]) -> str:
        start, link = match.groups()
        if link not in targets:
            return match[0]
        return start + os.path.relpath(_uri(targets[link], repository), os.path.dirname(uri))

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(relink, part) for part in parts[::2]]
    return "".join(parts)
