"""Every quota can be set, is told to whom it binds, and has a reason that the contract knows."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from ferrule.v1 import info_pb2
from ferrule_cli.commands import token as cli_token
from ferrule_client.types import Quotas
from ferrule_server.api.security import token_file
from ferrule_server.quotas import QuotaLimits
from ferrule_server.settings import settings_of

ROOT = Path(__file__).resolve().parents[2]
FIELDS = [field.name for field in dataclasses.fields(QuotaLimits)]


def test_every_quota_has_a_flag_and_a_word_in_the_token_file() -> None:
    """By the same word, and no word sets what is no quota."""
    words = token_file._QUOTAS
    assert [name for name, _ in words.values()] == FIELDS
    flags = [setting.name for setting in settings_of(QuotaLimits)]
    assert sorted(flags) == sorted(f"quota_{word}" for word in words)
    assert list(cli_token._QUOTAS) == list(words)
    docstring = token_file.__doc__ or ""
    assert all(f"[{word}=" in docstring for word in words)


def test_every_quota_is_on_the_wire_and_in_the_client() -> None:
    """In the same order, rates spelled out."""
    on_the_wire = [field.name for field in info_pb2.QuotaLimits.DESCRIPTOR.fields]
    assert on_the_wire == [re.sub("_per_s$", "_per_second", name) for name in FIELDS]
    assert [field.name for field in dataclasses.fields(Quotas)] == on_the_wire


def test_every_reason_that_is_raised_is_in_the_contract() -> None:
    """And the contract names none that is not; what is kept for replay is dropped, so it has no reason."""
    sources = [path.read_text() for path in (ROOT / "server" / "ferrule_server").rglob("*.py")]
    raised = {name for text in sources for name in re.findall(r'(?:QuotaExceeded|Meter)\(\s*"([A-Z_]+)"', text)}
    raised |= {name for text in sources for name in re.findall(r'^\s+\("([A-Z_]+)", held\.', text, re.MULTILINE)}
    contract = (ROOT / "protos" / "README.md").read_text()
    listed = re.search(r"The quotas are (.*?)\.", contract, re.DOTALL)
    assert listed is not None
    assert {f"QUOTA_{name}" for name in raised} == set(re.findall(r"QUOTA_\w+", listed[1]))
    assert len(raised) == len(FIELDS) - 1
    told = (ROOT / "protos" / "ferrule" / "v1" / "info.proto").read_text()
    assert all(f"QUOTA_{name}" in told for name in raised)
