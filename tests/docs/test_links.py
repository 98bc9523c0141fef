"""Links of README, CONTRIBUTING, CHANGELOG and docs lead somewhere, and the index by task leads to every page."""

import re
from pathlib import Path

from .snippets import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
INDEX = ROOT / "docs" / "index.md"

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return _FENCED.sub("", text)


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(prose(text)))
    return {heading.strip().replace(" ", "-") for heading in headings}


def targets(page: Path) -> list[tuple[Path, str]]:
    """The files, with the headings there or "", to which a page's links lead, other sites' left out."""
    found = (link.partition("#") for link in _LINK.findall(prose(page.read_text())) if "://" not in link)
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in found]


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    return [
        f"{page.name}: {path.name}#{anchor}"
        for path, anchor in targets(page)
        if not path.exists() or (anchor and anchor not in anchors(path.read_text()))
    ]


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A rank's `x`\n[a](#a-ranks-x) [b\nc](b.md) ![d](page.md#d) [e](https://e/f)\n```\n[g](h)\n```\n")
    assert broken(page) == ["page.md: b.md#", "page.md: page.md#d"]


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    assert sum(len(targets(page)) for page in PAGES) > 50
    assert not [link for page in PAGES for link in broken(page)]


def test_the_index_leads_to_every_page_and_pages_show_every_picture() -> None:
    in_docs = {path for path in (ROOT / "docs").iterdir() if path != INDEX}
    linked = {path for path, _ in targets(INDEX)}
    assert not [page.name for page in in_docs if page.suffix == ".md" and page not in linked]
    shown = {path for page in PAGES for path, _ in targets(page)}
    assert not [path.name for path in in_docs - shown if path.suffix != ".md"]


def test_the_readme_is_read_at_one_go() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
