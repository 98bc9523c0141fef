"""The Python snippets and the shell commands of README, CONTRIBUTING and docs."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Snippet:
    """A fenced block. name: its page and its number there among those of its language; line: of its first line."""

    name: str
    page: Path
    line: int
    source: str


def snippets(language: str) -> list[Snippet]:
    """All blocks of a language ("python", "sh"), page by page."""
    return [snippet for page in PAGES for snippet in _of_page(page, language)]


def _of_page(page: Path, language: str) -> Iterator[Snippet]:
    number = 0
    begin: int | None = None
    lines = page.read_text().splitlines()
    for place, line in enumerate(lines):
        if begin is not None and line.strip() == "```":
            number += 1
            yield Snippet(f"{page.stem}-{number}", page, begin + 1, "\n".join(lines[begin:place]) + "\n")
            begin = None
        elif line.strip() == f"```{language}":
            begin = place + 1
    assert begin is None, f"{page.name}: the block before line {begin} has no end"
