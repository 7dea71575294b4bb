"""Frames of ``ferrule top`` that stay: as text, and as an SVG that needs nothing from anywhere."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ferrule_cli.top.parts import ASCII, UNICODE, Glyphs

__all__ = ["glyphs_of", "print_lines", "write_svg"]

_ELSEWHERE = re.compile(r"\s*@font-face \{\{.*?\n\s*\}\}|\s*<!--.*?-->", re.DOTALL)
"""Fonts of the template that would be fetched, and who made it."""


def glyphs_of(console: Console) -> Glyphs:
    """Return characters that the console can show."""
    return UNICODE if console.encoding.lower().startswith("utf") else ASCII


def print_lines(console: Console, lines: Sequence[Text]) -> None:
    """Print lines, none of which is broken; without colours where the console has none."""
    for line in lines:
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def write_svg(path: Path, lines: Sequence[Text], width: int) -> None:
    """Write lines as a picture of a terminal, ``width`` cells wide, in whatever fixed-width font the reader has.

    Raises:
        OSError: The file cannot be written.
    """
    from rich._export_format import CONSOLE_SVG_FORMAT  # no public name: here it can only keep a picture from being

    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    print_lines(console, lines)
    template = _ELSEWHERE.sub("", CONSOLE_SVG_FORMAT).replace("Fira Code", "monospace")
    path.write_text(console.export_svg(title="ferrule top", code_format=template, unique_id="ferrule"), "utf-8")
