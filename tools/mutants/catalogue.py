"""The list of mutants: reads ``rooms/*.toml`` and applies a mutant to the text of a source."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Mutant", "StaleMutant", "read_mutants"]

ROOMS: Final = Path(__file__).parent / "rooms"


class StaleMutant(Exception):
    """The source has changed: the old text of a mutant does not occur exactly once."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault.

    Attributes:
        id: Its name, unique in the list.
        file: The source, relative to the root of the tree.
        old: Text that occurs exactly once in the source. new: what replaces it.
        breaks: The promise that no longer holds, in one sentence.
        tests: Test files or test nodes that fail with it.
        hangs: A run that exceeds its time limit counts as a failure.
        limit_s: Time limit of the run; 0: that of the campaign.
    """

    id: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    hangs: bool = False
    limit_s: float = 0.0

    def apply(self, text: str) -> str:
        """Return the text of the source with the fault.

        Raises:
            StaleMutant: The old text does not occur exactly once, or the new one is the same.
        """
        count = text.count(self.old)
        if count != 1 or self.old == self.new:
            raise StaleMutant(f"{self.id}: its old text occurs {count} times in {self.file}, not once")
        return text.replace(self.old, self.new)


def read_mutants(only: Collection[str] = ()) -> list[Mutant]:
    """Return the mutants in the order of the list.

    Args:
        only: Their ids; empty: all of them.

    Raises:
        ValueError: An id occurs twice, or a requested one does not occur.
    """
    mutants = [_mutant(values) for room in sorted(ROOMS.glob("*.toml")) for values in _values(room)]
    ids = [mutant.id for mutant in mutants]
    if repeated := {each for each in ids if ids.count(each) > 1}:
        raise ValueError(f"these ids occur more than once: {', '.join(sorted(repeated))}")
    if unknown := set(only) - set(ids):
        raise ValueError(f"there are no mutants with these ids: {', '.join(sorted(unknown))}")
    return [mutant for mutant in mutants if not only or mutant.id in only]


def _values(room: Path) -> list[dict[str, object]]:
    values: list[dict[str, object]] = tomllib.loads(room.read_text())["mutant"]
    return values


def _mutant(values: dict[str, object]) -> Mutant:
    tests = values.pop("tests")
    assert isinstance(tests, list)
    return Mutant(**values, tests=tuple(tests))  # type: ignore[arg-type]
