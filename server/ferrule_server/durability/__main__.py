"""``python -m ferrule_server.durability``, the command ``ferrule durable``: ``inspect`` and ``verify``.

They show what a journal contains, and whether anything in it is damaged.

Both only read, and take no lock, so that they work on a copy and beside a running server. Tokens, secrets and names of
requests are never shown; a sequence is named by its handle_id.

Exit codes of ``verify``: 0 nothing is damaged (a torn frame was never confirmed), 1 something is damaged. Of both: 2
the directory is not a journal, or it has another format version; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from ferrule_server.durability.directory import list_segments
from ferrule_server.durability.files import Files
from ferrule_server.durability.frames import Tail
from ferrule_server.durability.reader import Journal, OnProgress, SegmentReport, survey
from ferrule_server.durability.replay import JournalState
from ferrule_server.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

_TRIES: Final = 5
"""How often the directory is read again because a server deleted a segment meanwhile."""
_COMMANDS: Final = {"inspect": "show what a journal contains", "verify": "read every frame; exit 1 if one is damaged"}
_COUNTS: Final = ("num_sequences", "num_tokens", "num_creations", "num_tombstones", "num_masks")
_SHOWN: Final = ("instance", "epoch", "fingerprint", "dtype", "block_size", "generation")
"""What is shown of an identity: not its secret key."""
_PATIENCE_S: Final = 1.0
"""A reading that takes longer shows a bar."""
_WIDTH_OF_A_PIPE: Final = 1000
"""No table is wider, so none is cut where nobody has said how wide the lines may be."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = argparse.ArgumentParser(prog="ferrule durable", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, does in _COMMANDS.items():
        command = commands.add_parser(name, help=does, description=does, allow_abbrev=False)
        command.add_argument("directory", metavar="DIR", type=Path)
        command.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    try:
        journal = _survey(args.directory)
    except KeyboardInterrupt:
        return 130
    except (ConfigError, OSError) as error:
        message = f"{args.directory} is not a readable journal: {error}"
        line = json.dumps({"error": message, "reason": "JOURNAL_UNREADABLE"}) if args.json else f"error: {message}"
        sys.stderr.write(f"{line}\n")
        return 2
    facts = facts_of(journal)
    if args.json:
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        _show(facts)
    return 1 if args.command == "verify" and facts["damaged"] else 0


def facts_of(journal: Journal) -> dict[str, Any]:
    """Return what a journal contains, as values of JSON."""
    state, identity = journal.state, journal.identity
    return {
        "identity": {name: getattr(identity, name) for name in _SHOWN} | {"fingerprint": identity.fingerprint.hex()},
        "segments": [asdict(each) for each in journal.segments],
        "principals": _principal_facts(state),
        **{name: sum(count.values()) for name, count in _counts_of(state).items()},
        "torn": [_place(each) for each in journal.segments if each.tail is Tail.TORN],
        "damaged": _damage_facts(journal),
    }


def _place(report: SegmentReport) -> dict[str, object]:
    return {"segment": report.number, "offset": report.used_bytes, "reason": report.reason}


def _damage_facts(journal: Journal) -> list[dict[str, object]]:
    """Return the damage that ends the state, and that of segments which it does not need."""
    damage = journal.damage
    places = [_place(each) for each in journal.segments if each.tail is Tail.DAMAGED]
    if damage is None:
        return [each | {"lost": "nothing, the segment is not needed"} for each in places]
    at = {"segment": damage.segment, "offset": damage.offset, "reason": damage.reason}
    first = at | {"lost": damage.lost, "touched": list(damage.touched), "num_frames_after": damage.num_frames_after}
    others = [each | {"lost": "see the first damage"} for each in places if each != at]
    return [first, *others]


def _principal_facts(state: JournalState) -> dict[str, dict[str, int]]:
    """Return what each principal has."""
    counts = _counts_of(state)
    names = sorted(set().union(*counts.values()))
    return {name: {what: count[name] for what, count in counts.items()} for name in names}


def _counts_of(state: JournalState) -> dict[str, Counter[str]]:
    """Return for each of _COUNTS how many each principal has."""
    sequences = state.sequences.values()
    num_tokens: Counter[str] = Counter()
    for each in sequences:
        num_tokens[each.principal] += len(each.token_ids)
    counters = (
        Counter(each.principal for each in sequences),
        num_tokens,
        Counter(principal for principal, _ in state.creations),
        Counter(state.tombstones.values()),
        Counter(principal for principal, _ in state.masks),
    )
    return dict(zip(_COUNTS, counters, strict=True))


def _survey(path: Path, num_tries: int = _TRIES) -> Journal:
    """Read a directory, again if a server has deleted a segment meanwhile."""
    list_segments(path, Files())
    try:
        with _bar() as show:
            return survey(path, Files(), show)
    except FileNotFoundError as error:
        if num_tries == 1 or str(error.filename).endswith("identity.json"):
            raise
    return _survey(path, num_tries - 1)


@contextmanager
def _bar() -> Iterator[OnProgress]:
    """Yield a callable that shows a bar on a terminal, if reading takes longer than _PATIENCE_S."""
    from rich.console import Console
    from rich.progress import Progress

    begun = monotonic()
    progress = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    task = progress.add_task("reading", total=1.0)

    def show(part: float) -> None:
        progress.update(task, completed=part)
        if monotonic() - begun > _PATIENCE_S:
            progress.start()

    try:
        yield show
    finally:
        progress.stop()


def _show(facts: dict[str, Any]) -> None:
    """Print the facts as tables."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE
    console = Console(highlight=False, markup=False, width=width)
    console.print(_table("identity", ("name", "value"), facts["identity"].items()))
    columns = ("number", "role", "size_bytes", "used_bytes", "num_frames", "num_records", "tail")
    console.print(_table("segments", columns, [[each[name] for name in columns] for each in facts["segments"]]))
    rows = [[name, *counts.values()] for name, counts in facts["principals"].items()]
    total = {name: facts[name] for name in _COUNTS}
    console.print(_table("principals", ("principal", *_COUNTS), [*rows, ["all", *total.values()]]))
    console.print("\n".join(_verdict(facts)), soft_wrap=True)


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Return a table; names of principals are not read as markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))
    return table


def _verdict(facts: dict[str, Any]) -> Iterator[str]:
    """Yield a line for everything that is torn or damaged."""
    for each in facts["torn"]:
        yield f"torn: segment {each['segment']}, offset {each['offset']}: {each['reason']}; never confirmed, ignored"
    for each in facts["damaged"]:
        yield f"DAMAGED: segment {each['segment']}, offset {each['offset']}: {each['reason']}; {each['lost']}"
    if not facts["damaged"]:
        yield "nothing is damaged"


if __name__ == "__main__":
    sys.exit(main())
