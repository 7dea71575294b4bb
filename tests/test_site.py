"""The site of the documentation has every page, and each public name of the client once."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import ferrule
from tools import docs_site

ROOT = Path(__file__).resolve().parents[1]


class _Loader(yaml.SafeLoader):
    """Reads ``mkdocs.yml`` without importing what it names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda _loader, suffix, _node: suffix)


def _pages(nav: Any) -> Iterator[str]:
    """Yield the pages of a navigation in their order."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(part)


def _moved(text: str, place: str, repo_url: str = "") -> str:
    """Return a text of a page as it is on the site."""
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri=place))
    config: Any = SimpleNamespace(repo_url=repo_url)
    return docs_site.on_page_markdown(text, page, config, config)


def test_the_navigation_lists_every_page_once() -> None:
    """Those of docs/, those that the hook adds, and no other."""
    config = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), _Loader)
    listed = list(_pages(config["nav"]))
    below = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) == below | {*docs_site.OUTSIDE, *docs_site.REFERENCE, docs_site.COMMANDS}
    assert not below & set(docs_site.OUTSIDE)


def test_the_reference_has_every_name_of_the_client() -> None:
    """The names of the first page are listed by hand, for their order."""
    assert sorted(docs_site.TOP) == sorted(ferrule.__all__)
    assert set(docs_site.REFERENCE.values()) == {"ferrule", "ferrule.types", "ferrule.errors", "ferrule.admin"}


@pytest.mark.parametrize(
    ("place", "link", "moved"),
    [
        ("index.md", "[a](docs/handles.md#chat)", "[a](handles.md#chat)"),
        ("index.md", "![a](docs/images/hero.svg)", "![a](images/hero.svg)"),
        ("handles.md", "[the `x`](../protos/README.md#calls)", "[the `x`](contract.md#calls)"),
        ("contract.md", "[a](../docs/handles.md)", "[a](handles.md)"),
        ("handles.md", "[examples](../examples/python)", "examples (`examples/python`)"),
        ("handles.md", "[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
        ("handles.md", "`[a](nowhere.md)`", "`[a](nowhere.md)`"),
        ("handles.md", "```sh tutorial\n[a](nowhere.md)\n```", "```sh\n[a](nowhere.md)\n```"),
    ],
)
def test_links_are_those_of_the_site(place: str, link: str, moved: str) -> None:
    """Pages link pages, other files are named, and code stays as it is."""
    assert _moved(link, place) == moved


def test_files_are_linked_once_the_repository_has_an_address() -> None:
    """The setting ``repo_url`` is enough."""
    link = "[examples](../examples/python)"
    assert (
        _moved(link, "handles.md", "https://example.org/x/")
        == "[examples](https://example.org/x/blob/main/examples/python)"
    )


def test_the_site_is_built(tmp_path: Path) -> None:
    """Where the extra ``docs`` is installed: strictly, so that no link and no heading is missing."""
    pytest.importorskip("mkdocs", reason="make docs installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "reference" / "ferrule.html").read_text("utf-8")
    commands = (tmp_path / docs_site.COMMANDS.replace(".md", ".html")).read_text("utf-8")
    assert {"--kv-memory", "--max-tokens", "--grace"} <= set(re.findall(r"--[a-z-]+", commands))
    assert set(re.findall(r'<h2 id="ferrule\.(\w+)"', reference)) == set(ferrule.__all__)
