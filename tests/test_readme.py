"""The README keeps its word: its examples run, its links lead somewhere, its table is true."""

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

from ferrule.v1 import admin_pb2, executor_pb2, tokenizer_pb2
from ferrule_client import Client
from ferrule_client._status import error_from_call

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
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
    with Client.connect(shipped_target) as client:
        assert list(client.list_caches()) == []


def test_first_example_has_five_lines() -> None:
    """Five at most, as short as promised."""
    assert len([line for line in EXAMPLES[0].splitlines() if line]) <= 5


def test_two_commands_come_first() -> None:
    """A stranger sees what to type before anything else."""
    first_block = README[README.index("```") :]
    assert first_block.startswith("```\nmake demo")
    assert first_block.splitlines()[2].startswith("make test")


def test_table_of_calls_is_true(mortal_target: str) -> None:
    """Every call of the contract is in the table once; what is said to come later is refused, the rest is not."""
    promised: dict[str, str] = {}
    for names, status in re.findall(r"^\| ([A-Z][^|]+) \| (served|later) \|$", README, re.MULTILINE):
        service = names.partition(": ")[0] if ": " in names else "ModelExecutorService"
        for name in names.rpartition(": ")[2].split(", "):
            assert f"{service}.{name}" not in promised
            promised[f"{service}.{name}"] = status
    found: dict[str, str] = {}
    with grpc.insecure_channel(mortal_target) as channel:
        for service in SERVICES:
            for method in service.methods:
                call: grpc.StreamStreamMultiCallable[bytes, bytes]
                call = channel.stream_stream(f"/{service.full_name}/{method.name}")
                found[f"{service.name}.{method.name}"] = _status_of(call(iter([b""]), timeout=20))
    assert promised == found


def _status_of(replies: Iterator[object]) -> str:
    """Return whether a call with an empty request is refused as unsupported."""
    try:
        list(replies)
    except grpc.RpcError as error:
        return "later" if error_from_call(error).reason == "FEATURE_UNSUPPORTED" else "served"
    return "served"


def test_flags_are_those_of_the_server() -> None:
    """The table of flags and ``ferrule serve --help`` name the same ones."""
    command = [sys.executable, "-m", "ferrule_server", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    flags = set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", text, re.MULTILINE)) - {"--help", "--version"}
    assert set(re.findall(r"^\| `(--[a-z-]+)", README, re.MULTILINE)) == flags


def test_links_lead_to_files() -> None:
    """No dead ends inside the repository."""
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert {"docs/handles.md", "docs/architecture.md", "protos/README.md"} <= set(links)
    for link in links:
        assert (ROOT / link).exists(), link
