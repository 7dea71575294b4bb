"""examples/README.md: the pieces on tokens and TLS take the place they say, and what goes wrong looks as it is said."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from tests.api.certificates import Authority
from tests.conformance.languages import (
    EXAMPLES,
    ROOT,
    Missing,
    compile_cpp,
    compile_go,
    compile_rust,
    need,
    node_modules,
)
from tests.conformance.servers import TOKENS, Servers
from tests.conformance.test_clients_page import PAGE
from tests.conformance.test_languages import COMMANDS as EXAMPLE_OF
from tests.conformance.test_languages import SLOW, absent

FIRST = ("import ", "#include ", "use ")
"""Begins of what stands at the head of a file, in any of the languages."""


def _node(path: Path) -> list[str]:
    (path.parent / "node_modules").symlink_to(node_modules())
    return [need("node"), str(path)]


def _rust(path: Path) -> list[str]:
    """Build the crate of the example again, with this file in the place of its own."""
    for name in ("Cargo.toml", "build.rs", "lib.rs"):
        text = (EXAMPLES / "rust" / name).read_text("utf-8")
        (path.parent / name).write_text(text.replace("../../protos", str(ROOT / "protos")), "utf-8")
    return [str(compile_rust("fork", path.parent))]


RUN: Mapping[str, tuple[str, str, Callable[[Path], list[str]]]] = {
    "node": ("fork.js", r"^const connect = .*$", _node),
    "python": ("raw_stubs.py", r"^channel = .*$", lambda path: [sys.executable, str(path)]),
    "go": ("fork.go", r"^\tchannel := .*$", lambda path: [str(compile_go("fork-tls", path))]),
    "rust": ("fork.rs", r"^    let channel = .*$", _rust),
    "cpp": ("fork.cc", r"^  auto channel = .*$", lambda path: [str(compile_cpp("fork-tls", path))]),
}
"""The example of a language, the line of it that a piece replaces, and what makes a program of it."""
WITHOUT_TLS = {
    "node": "No connection established",
    "python": "Socket closed",
    "go": "error reading server preface",
    "rust": "tonic::transport::Error(Transport",
    "cpp": "Socket closed",
}
"""What an example reads at a port with TLS."""
COMMANDS = EXAMPLE_OF | {"python": lambda: [sys.executable, str(EXAMPLES / "python" / "raw_stubs.py")]}


def _marked(names: Iterable[str]) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


def _secured(language: str, folder: Path) -> list[str]:
    """Return the command of an example with its piece of the page."""
    name, line, build = RUN[language]
    found = re.search(rf"^```\w+ {language}-tls\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None
    heads = [each for each in found[1].splitlines() if each.startswith(FIRST)]
    piece = "\n".join(each for each in found[1].splitlines() if each not in heads)
    text, count = re.subn(line, lambda _: piece, (EXAMPLES / language / name).read_text("utf-8"), flags=re.MULTILINE)
    assert count == 1
    text = text.replace('\t"google.golang.org/grpc/credentials/insecure"\n', "")
    place = r"(?<=^package main\n)" if language == "go" else r"^(?=import |#include |use )"
    text = re.sub(place, lambda _: "\n".join([*heads, ""]), text, count=1, flags=re.MULTILINE)
    path = folder / name
    path.write_text(text.replace("../../protos", (ROOT / "protos").as_uri()), "utf-8")
    return build(path)


def _run(command: list[str], servers: Servers, **environment: str) -> subprocess.CompletedProcess[str]:
    target = servers.target("secured").replace("127.0.0.1", "localhost")
    told = {"FERRULE_TLS_CA": str(servers.folder / "ca.pem"), "FERRULE_TOKEN": TOKENS["bob"]} | environment
    return subprocess.run(
        [*command, target], env=os.environ | told, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("language", _marked(RUN))
def test_an_example_with_its_piece_is_let_in(language: str, servers: Servers, tmp_path: Path) -> None:
    """Over TLS with a token; with another token it is told so."""
    try:
        command = _secured(language, tmp_path)
    except Missing as missing:
        absent(missing)
    run = _run(command, servers)
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("released 3\n")
    assert run.stderr == ""
    assert "the token is not accepted" in _run(command, servers, FERRULE_TOKEN="wrong").stderr
    (tmp_path / "other.pem").write_bytes(Authority("another authority").cert)
    assert "certificate" in _run(command, servers, FERRULE_TLS_CA=str(tmp_path / "other.pem")).stderr.lower()


@pytest.mark.parametrize("language", _marked(WITHOUT_TLS))
def test_an_example_without_its_piece_says_what_the_page_says(language: str, servers: Servers) -> None:
    """Little: it cannot know that the port speaks TLS."""
    assert f"`{WITHOUT_TLS[language]}`" in PAGE.replace("\n", " ")
    try:
        run = _run(COMMANDS[language](), servers)
    except Missing as missing:
        absent(missing)
    assert run.returncode != 0
    assert WITHOUT_TLS[language] in run.stderr
