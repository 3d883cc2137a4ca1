"""The Markdown pages, and the links between them."""

import re
from collections import Counter
from pathlib import Path

from helpers import ROOT

GUIDES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
PAGES = (*GUIDES, ROOT / "CHANGELOG.md")  # which may name commands that are gone


def without_blocks(page: Path) -> str:
    """The text of a page outside of its code blocks."""
    return re.sub(r"^\s*```.*?^\s*```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ +(.+?)\s*$", without_blocks(page), flags=re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken_links(page: Path) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading of it."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken
