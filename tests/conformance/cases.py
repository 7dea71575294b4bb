"""Cases as data: read from YAML, and the references in them filled in from earlier replies."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.conformance.matching import Json

FOLDER = Path(__file__).parent / "cases"
_REFERENCE = re.compile(r"\$\{([^}]+)\}")


@dataclass(frozen=True, slots=True)
class Case:
    """One promise of the contract.

    Attributes:
        name: The promise, as a sentence.
        topic: The file it stands in.
        steps: What is called, and what is expected.
        server: Which server it talks to: a name of ``servers.PROFILES``, or ``own``.
        flags: Of its own server.
        is_slow: It waits for seconds.
    """

    name: str
    topic: str
    steps: list[dict[str, Json]]
    server: str = "plain"
    flags: list[str] = field(default_factory=list)
    is_slow: bool = False


def load() -> list[Case]:
    """Return all cases, in the order of files and places."""
    return [
        Case(
            entry["case"],
            path.stem,
            entry["steps"],
            entry.get("server", "plain"),
            entry.get("flags", []),
            "slow" in entry,
        )
        for path in sorted(FOLDER.glob("*.yaml"))
        for entry in yaml.safe_load(path.read_text("utf-8"))
    ]


def fill(value: Json, saved: Mapping[str, Json]) -> Json:
    """Return a value with what earlier steps have saved in the place of references.

    ``${p.output.kvCache}`` alone becomes what is there, of any type; inside a longer text it becomes text.
    ``{$with: X, key: value}`` is X with these keys changed, the others of :data:`_MADE` are what their functions say.

    Raises:
        LookupError: Nothing is saved there.
    """
    if isinstance(value, str):
        return _fill_text(value, saved)
    if isinstance(value, list):
        return [fill(one, saved) for one in value]
    if not isinstance(value, Mapping):
        return value
    filled = {str(key): fill(one, saved) for key, one in value.items()}
    name = next(iter(filled), "")
    if name == "$with":
        return {**filled.pop("$with"), **filled}
    return _MADE[name](filled[name]) if name in _MADE else filled


def _times(argument: list[Json]) -> list[Json]:
    """``$times: [n, X]``: n times X in a list."""
    count, one = argument
    return [one] * int(count)


def _join(lists: list[list[Json]]) -> list[Json]:
    """``$join: [X, Y]``: the entries of X, then those of Y."""
    return [one for some in lists for one in some]


def _masks(argument: list[int]) -> list[str]:
    """``$masks: [n, v]``: n masks for v tokens, each of which allows another token."""
    count, vocab_size = argument
    return [base64.b64encode((1 << token).to_bytes(vocab_size // 8, "little")).decode() for token in range(count)]


def _text(size: int) -> str:
    """``$text: n``: a text of n bytes."""
    return "x" * size


_MADE: Mapping[str, Callable[[Any], Json]] = {
    "$times": _times,
    "$join": _join,
    "$masks": _masks,
    "$text": _text,
}


def _fill_text(text: str, saved: Mapping[str, Json]) -> Json:
    whole = _REFERENCE.fullmatch(text)
    if whole is not None:
        return _look_up(whole[1], saved)
    return _REFERENCE.sub(lambda found: str(_look_up(found[1], saved)), text)


def _look_up(path: str, saved: Mapping[str, Json]) -> Json:
    found: Any = saved
    for key in path.split("."):
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found
