"""Writes the sync client, `ferrule_client.sync`, from the asyncio one, or checks that it is up to date.

The asyncio modules are the source. The sync ones are the same text without `async` and `await`, and with the names of
the sync world. Only what touches the network or the clock is written twice, by hand: `_wire`, `_stream_call`, `_lease`.

    python -m tools.strip_async            writes the modules
    python -m tools.strip_async --check    exits 1 with the names of the modules that differ from a fresh run
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CLIENT = Path(__file__).resolve().parents[1] / "client" / "ferrule_client"
SOURCE, TARGET = CLIENT / "aio", CLIENT / "sync"
BY_HAND = ("__init__", "_lease", "_opening", "_stream_call", "_wire")

_HEADER = "# Written by tools/strip_async.py from ../aio/{name}: change that and run `make sync`.\n"
_BRACKETS = r"\[((?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*)\]"

REPLACED = (
    (r"^from ferrule_client\.aio\._opening .*\n", ""),
    (r"^    @opening\n", ""),
    (rf"\b(?:Awaitable|Opening){_BRACKETS}", r"\1"),
    (r"\b(?:async def|async with|async for)\b", lambda found: found[0].removeprefix("async ")),
    (r"\bawait ", ""),
    (r"\ban Async(?=[A-Z])", "a "),
    (r"\bAsync(?=[A-Z])", ""),
    (r"__a(enter|exit|next|iter)__", r"__\1__"),
    (r"StopAsyncIteration", "StopIteration"),
    (r"ferrule_client\.aio\b", "ferrule_client.sync"),
    (r"grpc\.aio\.", "grpc."),
    (r"^import grpc\.aio\n", ""),
    (r"\b(the|the keep-alive|a|per|[Aa]nother|several|two) task(s?)\b", r"\1 thread\2"),
    (r"\b([Aa]) cancellation\b", "Ctrl-C"),
)


def stripped(text: str) -> str:
    """Return the sync text of an asyncio module, without the finer points of format."""
    text = _without_brackets(text)
    for pattern, new in REPLACED:
        text = re.sub(pattern, new, text, flags=re.MULTILINE)
    return text


def _without_brackets(text: str) -> str:
    """Take the brackets away that only an `await` needs: `(await f(x)).y` becomes `f(x).y`."""
    while (start := text.find("(await ")) >= 0:
        end = _closing(text, start)
        is_call = text[start - 1].isidentifier()
        inner = text[start + len("(await ") : end]
        text = text[:start] + (f"({inner})" if is_call else inner) + text[end + 1 :]
    return text


def _closing(text: str, start: int) -> int:
    """Return the place of the bracket that closes the one at `start`; those in texts do not count."""
    depth, is_text = 0, False
    for place, letter in enumerate(text[start:], start):
        is_text = letter != "\n" and is_text != (letter == '"')
        depth += 0 if is_text else {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return place
    raise ValueError(f"no bracket closes this one: {text[start : start + 40]!r}")


def generate() -> dict[str, str]:
    """Return the text of every generated module by file name, formatted."""
    paths = [path for path in sorted(SOURCE.glob("*.py")) if path.stem not in BY_HAND]
    with tempfile.TemporaryDirectory() as folder:
        for path in paths:
            Path(folder, path.name).write_text(
                _HEADER.format(name=path.name) + stripped(path.read_text("utf-8")), "utf-8"
            )
        options = ["--quiet", "--no-cache", "--config", "pyproject.toml", folder]
        for command in (["check", "--fix-only", "--select", "F401,I,UP034", "--exit-zero"], ["format"]):
            subprocess.run([sys.executable, "-m", "ruff", *command, *options], cwd=CLIENT.parents[1], check=True)
        return {path.name: Path(folder, path.name).read_text("utf-8") for path in paths}


def main() -> int:
    """Write or check the modules; return 1 if `--check` finds a difference, else 0."""
    parser = argparse.ArgumentParser(description="Writes the sync client from the asyncio one.")
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 with the names of what differs")
    is_check = parser.parse_args().check
    differing = []
    for name, text in generate().items():
        path = TARGET / name
        if not path.exists() or path.read_text("utf-8") != text:
            differing.append(name)
            if not is_check:
                path.write_text(text, "utf-8")
    if not is_check:
        return 0
    for name in differing:
        sys.stderr.write(f"sync/{name} differs from aio/{name}; run `make sync`\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
