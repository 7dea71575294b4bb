"""The README keeps its word: its examples run, its table is true, and it is short."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ferrule import Client
from ferrule.v1 import admin_pb2, executor_pb2, tokenizer_pb2
from ferrule_client._status import error_from_call
from tools.docs_site import parsers

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
START = (ROOT / "docs" / "start.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README + START, re.DOTALL | re.MULTILINE)
OTHER_FLAGS = {
    f"--{figure}-metric" for figure in ("total-queued-requests", "total-running-requests", "kv-cache-usage-percentage")
}
"""Flags of an endpoint picker, in docs/metrics.md."""
SERVICES = [
    executor_pb2.DESCRIPTOR.services_by_name["ModelExecutorService"],
    tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"],
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: text.splitlines()[2][:30])
def test_examples_run(example: str, shipped_target: str) -> None:
    """Each block runs as it stands, against a real server, and leaves nothing behind."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(example.replace("127.0.0.1:50051", shipped_target), "README.md", "exec"), {})
    assert len(out.getvalue()) > 5
    with Client(shipped_target) as client:
        assert list(client.list_caches()) == []


def test_examples_are_typed(tmp_path: Path) -> None:
    """Each block is clean under mypy strict, without an assert or a cast."""
    paths = [tmp_path / f"block_{place}.py" for place in range(len(EXAMPLES))]
    for path, example in zip(paths, EXAMPLES, strict=True):
        path.write_text(example)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout


def test_the_page_before_a_first_program_is_short() -> None:
    """Who needs more finds it behind a link."""
    assert len(START.split()) <= 900


def test_every_call_is_served(mortal_target: str) -> None:
    """As the page says: none is refused as unsupported."""
    assert "Every call of the [contract]" in README
    refused: list[str] = []
    with grpc.insecure_channel(mortal_target) as channel:
        for service in SERVICES:
            for method in service.methods:
                call: grpc.StreamStreamMultiCallable[bytes, bytes]
                call = channel.stream_stream(f"/{service.full_name}/{method.name}")
                if not _is_served(call(iter([b""]), timeout=20)):
                    refused.append(method.full_name)
    assert refused == []


def _is_served(replies: Iterator[object]) -> bool:
    """Return whether a call with an empty request is not refused as unsupported."""
    try:
        list(replies)
    except grpc.RpcError as error:
        return error_from_call(error).reason != "FEATURE_UNSUPPORTED"
    return True


def test_flags_of_the_pages_are_those_of_a_command() -> None:
    """A code span that begins with a flag has one that ``ferrule serve`` or another command knows."""
    known = {flag for parser in parsers() for action in parser._actions for flag in action.option_strings}
    pages = [README, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))]
    named = {flag for page in pages for flag in re.findall(r"`(--[a-z-]+[a-z])\b", page)}
    assert named - known == OTHER_FLAGS
    assert len(named & known) > 40
