"""The reasons with which each call may be refused, as the comments of the contract say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import grpc
import pytest

from ferrule_server.api.rpc.observe import Call

PROTOS: Final = Path(__file__).resolve().parents[1] / "protos"
_SERVICES: Final = ("admin", "executor", "tokenizer")
_ANY_CALL: Final = "Any call can answer"


@cache
def table() -> frozenset[str]:
    """Return the reasons of the table of errors, each quota by its own name."""
    text = (PROTOS / "README.md").read_text("utf-8")
    cells = [line.split("|")[2] for line in text.splitlines() if re.match(r"\| [A-Z_]+ \| `", line)]
    quotas = re.findall(r"QUOTA_[A-Z_]+[A-Z]", text)
    return frozenset(re.findall(r"`([A-Z_]+)`", "".join(cells))) | frozenset(quotas)


@cache
def documented() -> dict[str, frozenset[str]]:
    """Return the reasons of each call by its name, those that any call can answer included."""
    comments: dict[str, str] = {}
    everywhere = ""
    for service in _SERVICES:
        comment = of_service = ""
        for line in (PROTOS / "ferrule" / "v1" / f"{service}.proto").read_text("utf-8").splitlines():
            if found := re.match(r"\s*// ?(.*)", line):
                comment += found[1] + "\n"
                continue
            if found := re.match(r"\s*rpc (\w+)", line):
                comments[found[1]] = of_service + comment
            elif line.startswith("service "):
                everywhere += comment.partition(_ANY_CALL)[2].partition("\n\n")[0]
                of_service = comment
            comment = ""

    def reasons(name: str, seen: frozenset[str]) -> frozenset[str]:
        others = {other for other in re.findall(r"\bas(?: in)? ([A-Z]\w+)", comments[name]) if other in comments} - seen
        return _named(comments[name]).union(*(reasons(other, seen | others) for other in others))

    return {name: reasons(name, frozenset({name})) | _named(everywhere) for name in comments}


def _named(text: str) -> frozenset[str]:
    """Return the reasons that a text names; ``HANDLE_*`` stands for all that begin so."""
    words = set(re.findall(r"\b[A-Z][A-Z_]+\*?", text))
    return frozenset(
        reason
        for reason in table()
        for word in words
        if reason == word or (word.endswith("*") and reason.startswith(word[:-1]))
    )


@pytest.fixture(autouse=True)
def reasons_are_documented(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No server of this process refuses a call with a reason that the comments of the contract do not name."""
    seen: set[tuple[str, str]] = set()
    record = Call.record_refusal

    def noted(self: Call, code: grpc.StatusCode, reason: str, handle_id: str = "") -> None:
        seen.add((self.rpc, reason))
        record(self, code, reason, handle_id)

    monkeypatch.setattr(Call, "record_refusal", noted)
    yield
    reasons = documented()
    assert {(rpc, reason) for rpc, reason in seen if reason and rpc in reasons and reason not in reasons[rpc]} == set()
