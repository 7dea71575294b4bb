"""Every command that the pages and ``--help`` show, as a reader would type it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Final

from tools.docs_site import parsers

ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final = tuple(
    str(path.relative_to(ROOT))
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "protos" / "README.md",
        ROOT / "tools" / "kernels" / "README.md",
        ROOT / "server" / "ferrule_server" / "executor" / "cuda" / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "examples").glob("*/README.md")),
        *sorted((ROOT / "examples").glob("*.md")),
    )
)
LANGUAGES: Final = ("", "sh", "console")
"""Of a block that is commands, first word; the rest is its name. Pictures and output say ``text``."""

_VARIABLES: Final = re.compile(r"(?:[A-Z_]+=(?:\$\([^)]*\)|\S*) +)*")
_COMMENT: Final = re.compile(r"(?:^|\s+)# .*$")


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """One line that a shell takes.

    Attributes:
        page: Where it stands: ``docs/operations.md``, or ``ferrule serve --help``.
        heading: The one above it.
        line: Its number there, from 1.
        text: Without comment; lines that end in a backslash are one.
        block: Name of its block; mostly there is none.
    """

    page: str
    heading: str
    line: int
    text: str
    block: str = ""

    @property
    def program(self) -> str:
        """The text without variables and the folder of programs in front."""
        return re.sub(rf"^{_VARIABLES.pattern}(\.venv/bin/)?", "", self.text)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def in_page(page: str, text: str | None = None) -> list[Command]:
    """Return the commands of the blocks of a page, in its order.

    Args:
        page: Its path from the root of the repository.
        text: Of the page; None: what the file has.
    """
    found: list[Command] = []
    heading, fence, before = "", None, ""
    for number, line in enumerate((text or (ROOT / page).read_text("utf-8")).splitlines(), 1):
        if line.startswith("```"):
            fence = line[3:].strip() if fence is None else None
        elif fence is None and line.startswith("#"):
            heading = line.lstrip("# ")
        elif fence is not None and fence.partition(" ")[0] in LANGUAGES:
            joined = before + _COMMENT.sub("", line).strip().removeprefix("$ ")
            before = joined.removesuffix("\\").rstrip() + " " if joined.endswith("\\") else ""
            if joined and not before:
                found.append(Command(page, heading, number, joined, fence.partition(" ")[2]))
    return found


def in_sentences(page: str) -> list[Command]:
    """Return the commands that stand between backquotes in the text of a page."""
    prose = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"(?<!`)`((?:[A-Z_]+=\S+ )*(?:ferrule|make|pip|python) [^`]+)`", prose)
    return [Command(page, "", 0, " ".join(span.split())) for span in spans]


def in_help() -> list[Command]:
    """Return the examples at the end of every ``--help``."""
    helps = {f"{parser.prog} --help": parser.epilog for parser in parsers()}
    lines = [(page, *numbered) for page, text in helps.items() for numbered in enumerate((text or "").splitlines(), 1)]
    examples = re.compile(r"  ((?:\S+ )*(?:\| )?ferrule .*?)(?: {2,}.*)?$")
    return [
        Command(page, "", number, found[1].strip())
        for page, number, line in lines
        if (found := examples.match(line)) is not None
    ]
