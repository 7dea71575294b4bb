"""Links inside the repository lead somewhere: each file is there, and each heading that a link names."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not {"node_modules", "build"} & {*path.relative_to(ROOT).parts}
    and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)


def _prose(path: Path) -> str:
    """Return a page without its blocks and spans of code."""
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(`+)(?:(?!\1).)*\1", "`code`", text)


@cache
def _anchors(path: Path) -> frozenset[str]:
    """Return the anchors of the headings of a page, as GitHub names them; the second of a name gets ``-1``."""
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    seen: dict[str, int] = {}
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        anchors.add(f"{name}-{seen[name]}" if name in seen else name)
        seen[name] = seen.get(name, -1) + 1
    return frozenset(anchors)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    """Files and folders are there, and a page that is linked at a heading has it."""
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page}: {link}"
        assert target.is_relative_to(ROOT), f"{page}: {link} leads out of the repository"
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target), f"{page}: {link}: no such heading"


def test_links_lead_to_what_is_in_the_repository() -> None:
    """Not to a file that only this checkout has."""
    known = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if known.returncode != 0:
        pytest.skip("no checkout of git")
    files = {ROOT / name for name in known.stdout.split("\0")}
    folders = {folder for path in files for folder in path.parents}
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", _prose(page)):
            if "://" not in link and page in files:
                assert (page.parent / link).resolve() in files | folders, f"{page}: {link}"


def test_every_page_can_be_found() -> None:
    """From the README, directly or by another page."""
    reached, pending = set[Path](), [ROOT / "README.md"]
    while pending:
        page = pending.pop()
        if page not in reached and page.suffix == ".md" and page.exists():
            reached.add(page)
            links = re.findall(r"\]\(([^)#\s]+)", _prose(page))
            pending += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert {page for page in PAGES if page.parent.name == "docs"} <= reached
