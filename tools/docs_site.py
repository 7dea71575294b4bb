"""A hook of MkDocs: pages of the site that lie outside ``docs/``, and links between all of them.

The pages are written for the repository: they link files beside them. On the site a link to another page becomes one
to its place there. A link to any other file of the repository becomes a link to the repository if ``mkdocs.yml`` has
its ``repo_url``, and else its text with the path. A link to a file that is not there fails the build.
"""

from __future__ import annotations

import argparse
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

__all__ = ["COMMANDS", "OUTSIDE", "REFERENCE", "TOP", "on_files", "on_page_content", "on_page_markdown", "parsers"]

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "index.md": "README.md",
    "contract.md": "protos/README.md",
    "examples.md": "examples/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "families.md": "server/ferrule_server/model/families/README.md",
    "kernels.md": "tools/kernels/README.md",
    "cuda_runner.md": "server/ferrule_server/executor/cuda/README.md",
    "changelog.md": "CHANGELOG.md",
    "security-policy.md": "SECURITY.md",
    "model-card.md": "server/ferrule_server/demo_model/MODEL_CARD.md",
}
"""Pages of the site by their place there, and the files of the repository that they are made of."""
REFERENCE = {
    "reference/ferrule.md": "ferrule",
    "reference/types.md": "ferrule.types",
    "reference/errors.md": "ferrule.errors",
    "reference/admin.md": "ferrule.admin",
}
"""Pages made of docstrings, and their modules."""
COMMANDS = "reference/commands.md"
"""The page made of the texts of ``--help``."""
_COLUMNS = "100"
TOP = (
    *("Client", "Cache", "Branches", "Stream", "Chat", "Handle", "Policy", "greedy", "sample", "logits"),
    *("AsyncClient", "FerruleError", "HandleNotFoundError"),
)
"""Names of ``ferrule`` in the order in which a reader wants them."""

_CODE = re.compile(r"^ *```.*?^ *```$|(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^( *```\w+) .*$", re.MULTILINE)  # a block has a language, and a name for the tests after it
_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s]+)\)")
_PLACES = {source: place for place, source in OUTSIDE.items()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside ``docs/``."""
    from mkdocs.structure.files import File

    for place, source in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text("utf-8")))
    for place, module in REFERENCE.items():
        files.append(File.generated(config, place, content=_reference(module)))
    files.append(File.generated(config, COMMANDS, content=_commands()))
    return files


def _commands() -> str:
    """Return a page with the help of each command."""
    with mock.patch.dict("os.environ", COLUMNS=_COLUMNS):
        texts = [(parser.prog, parser.format_help()) for parser in parsers()]
    return "# Command line\n" + "".join(f"\n## `{name}`\n\n```text\n{text.strip()}\n```\n" for name, text in texts)


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of ``ferrule``, of the server, and of each other command."""
    from ferrule_cli.app import build_parser
    from ferrule_server.arguments import build_parser as build_server_parser

    first, *others = _with_commands(build_parser())
    yield first
    yield build_server_parser()
    yield from (parser for parser in others if parser.prog != "ferrule serve")


def _with_commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its commands, and of theirs."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _with_commands(command)


def _reference(module: str) -> str:
    """Return a page of which mkdocstrings makes the reference of a module."""
    page = f"# `{module}`\n\n::: {module}\n"
    if module == "ferrule":
        names = "\n".join(f"::: ferrule.{name}\n    options: {{show_root_heading: true}}\n" for name in TOP)
        return f"{page}    options: {{members: false}}\n\n{names}"
    if module == "ferrule.errors":
        return f"{page}    options: {{inherited_members: false}}\n"
    return page


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page; docstrings end a line before code in two colons, of which one is for the reader."""
    return html.replace("::</p>", ":</p>") if page.file.src_uri in REFERENCE else html


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page with links that work on the site."""
    place = page.file.src_uri
    if place in REFERENCE or place == COMMANDS:
        return markdown
    source = OUTSIDE.get(place, f"docs/{place}")
    markdown = markdown.replace("<details>", '<details markdown="1">')
    markdown = _FENCE.sub(r"\1", markdown)
    return _outside_code(markdown, lambda text: _LINK.sub(lambda link: _moved(link, source, place, config), text))


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Return a text with a change made to all that is not code.

    A link whose text is code is one link: spans of code are hidden from the change, and put back.
    """
    codes: list[str] = []

    def hide(code: re.Match[str]) -> str:
        codes.append(code[0])
        return f"\0{len(codes) - 1}\0"

    changed = change(_CODE.sub(hide, markdown))
    return re.sub(r"\0(\d+)\0", lambda place: codes[int(place[1])], changed)


def _moved(link: re.Match[str], source: str, place: str, config: MkDocsConfig) -> str:
    """Return a link of a file of the repository as it is on the site.

    Raises:
        PluginError: The file that it names is not there.
    """
    mark, text, address = link.groups()
    if "://" in address or address.startswith(("#", "mailto:")):
        return link[0]
    path, _, anchor = address.partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (ROOT / target).exists():
        from mkdocs.exceptions import PluginError

        raise PluginError(f"{source}: {address}: there is no such file")
    inside = target.removeprefix("docs/") if target.startswith("docs/") else _PLACES.get(target)
    if inside is not None:
        found = posixpath.relpath(inside, posixpath.dirname(place) or ".")
        return f"{mark}[{text}]({found}{'#' * bool(anchor)}{anchor})"
    if config.repo_url:
        return f"{mark}[{text}]({config.repo_url.rstrip('/')}/blob/main/{target})"
    return text if target in text else f"{text} (`{target}`)"
