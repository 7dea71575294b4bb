"""What a run of tests has left out and why, as a short table: one row for each reason.

``python -m tests.skips FILE MARKERS`` prints one table for all runs that had this file in the variable ``TEST_SKIPS``
and chose their tests by this expression of markers.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

VARIABLE = "TEST_SKIPS"
_MAX_FILES = 3


class Skip(NamedTuple):
    """A test that was not run.

    Attributes:
        node_id: As pytest names it; that of a file if the whole file was skipped.
        reason: As the test gives it.
    """

    node_id: str
    reason: str


def skip_of(node_id: str, longrepr: object) -> Skip:
    """Return the skip that a report of pytest stands for; ``longrepr`` is its (path, line, reason)."""
    said = longrepr[2] if isinstance(longrepr, tuple) else longrepr
    return Skip(node_id, " ".join(str(said).removeprefix("Skipped: ").split()))


def table(skips: Iterable[Skip], *, left_out: str = "") -> list[str]:
    """Return the lines, the most frequent reason first.

    Args:
        skips: Each test counts once.
        left_out: The expression of markers that chose the tests.
    """
    by_reason: dict[str, set[str]] = defaultdict(set)
    for node_id, reason in skips:
        by_reason[reason].add(node_id)
    rows = sorted(by_reason.items(), key=lambda row: (-len(row[1]), row[0]))
    lines = [f"{len(names):>6}  {reason}  ({_files(names)})" for reason, names in rows]
    if left_out:
        lines.append(f"   and  every test that is not ({left_out})")
    return lines or ["  none"]


def _files(node_ids: Iterable[str]) -> str:
    names = sorted({node_id.partition("::")[0] for node_id in node_ids})
    more = len(names) - _MAX_FILES
    return ", ".join(names[:_MAX_FILES]) + (f" and {more} more" if more > 0 else "")


def keep(path: Path, skips: Iterable[Skip]) -> None:
    """Append skips to a file, so that several runs make one table."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(skip) + "\n" for skip in skips)


def kept(path: Path) -> list[Skip]:
    """Return the skips of a file."""
    return [Skip(*json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def main(path: str, left_out: str) -> None:
    """Print the table of a file."""
    skips = kept(Path(path))
    sys.stdout.write("\n".join([f"== skipped: {len(set(skips))}", *table(skips, left_out=left_out)]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
