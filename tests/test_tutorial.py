"""docs/tutorial.md keeps its word: its blocks run in their order against a real server, and print what is shown."""

from __future__ import annotations

import codeop
import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tests.tools import KERNEL_CACHE

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
BIN = Path(sys.executable).parent
ADDRESS = "127.0.0.1:50051"
SETUP = (
    "git clone REPOSITORY ferrule && cd ferrule",
    "make demo",
    ". .venv/bin/activate",
    "cd ferrule && . .venv/bin/activate",
)
"""What has happened before a test runs."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code of the page.

    Attributes:
        kind: ``python``, ``sh tutorial``, ``text`` (what the block before prints) or ``text sample`` (the same, but the
            model chose it, so that other processors may print another text).
        line: Where it begins, from 1.
    """

    kind: str
    code: str
    line: int


def blocks() -> list[Block]:
    """Return the blocks of the page in their order."""
    page = PAGE.read_text("utf-8")
    found = re.finditer(r"^```(\w.*)\n((?:(?!```).*\n)*)```$", page, re.MULTILINE)
    return [Block(one[1], one[2], page.count("\n", 0, one.start()) + 1) for one in found]


def statements(text: str, first_line: int) -> Iterator[CodeType]:
    """Yield the statements of a text as Python reads them on a terminal, where an empty line ends a block."""
    compiler, lines, start = codeop.CommandCompiler(), list[str](), first_line
    for number, line in enumerate([*text.splitlines(), ""], first_line + 1):
        lines.append(line)
        statement = compiler("\n".join(lines), f"{PAGE}:{start}", "single")
        if statement is not None:
            yield statement
            lines, start = [], number
    assert not lines, f"line {start}: the block is not complete"


@dataclass(slots=True)
class Reader:
    """Somebody who follows the page, with two terminals and a Python that stays."""

    folder: Path
    names: dict[str, Any] = field(default_factory=dict)
    server: subprocess.Popen[str] | None = None

    @property
    def target(self) -> str:
        """The address of the reader's servers, one after the other."""
        return f"unix:{self.folder}/ferrule.sock"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the reader's shell; nothing of ours but what leads to the server."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FERRULE_")}
        kept |= {"FERRULE_TARGET": self.target, "FERRULE_KERNEL_CACHE": KERNEL_CACHE}
        return kept | {"PATH": f"{BIN}:{os.environ['PATH']}", "NO_COLOR": "1", "TERM": "dumb"}

    def follow(self, block: Block) -> str:
        """Run a block and return what it prints."""
        if block.kind == "python":
            out = io.StringIO()
            code = block.code.replace(ADDRESS, self.target)
            with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "displayhook", lambda _: None)  # the page leaves out what calls return
                for statement in statements(code, block.line):
                    exec(statement, self.names)
            return out.getvalue()
        return "".join(self._type(line) for line in block.code.splitlines() if line not in SETUP)

    def _type(self, line: str) -> str:
        """Run a line of the shell; jobs are those of the first terminal."""
        if line.startswith("ferrule serve") and line.endswith(" &"):
            self._serve(line.removesuffix(" &").replace("127.0.0.1:9464", "127.0.0.1:0"))
            return ""
        if line in ("kill $!", "kill -9 $!"):
            self._kill(is_hard="-9" in line)
            return ""
        done = subprocess.run(
            ["sh", "-euc", line], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    def _serve(self, command: str) -> None:
        assert self.server is None, "the last one runs"
        command = f"exec {command} --listen {self.target} --log-level error"
        self.server = subprocess.Popen(
            ["sh", "-euc", command], cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True
        )
        assert self.server.stdout is not None
        assert self.server.stdout.readline().startswith("ready ")

    def _kill(self, *, is_hard: bool) -> None:
        assert self.server is not None
        with self.server as server:
            if is_hard:
                server.kill()
            else:
                server.terminate()
            assert (server.wait(20) == 0) is not is_hard
        self.server = None


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """A reader in a folder, whose server ends with the test."""
    reader = Reader(tmp_path)
    yield reader
    if reader.server is not None:
        reader._kill(is_hard=True)


def test_every_block_runs_and_prints_what_is_shown(reader: Reader) -> None:
    """From the first command to the last, in one session; counts are those of the page on every machine."""
    printed, num_shown = "", 0
    for block in blocks():
        if block.kind == "text":
            assert printed == block.code, f"line {block.line}"
        elif block.kind == "text sample":
            assert printed.strip(), f"line {block.line}"
            assert block.code.strip(), f"line {block.line}"
        else:
            printed = reader.follow(block)
            continue
        num_shown += 1
    assert num_shown > 10
    assert reader.server is None, "the page ends it"
