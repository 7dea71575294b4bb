"""``python -m tests.hostile``: attack servers, print what it costs them, and exit with 1 if a bar is missed.

Progress goes to stderr. Stdout gets a line of JSON for each attack and a summary table.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.hostile.registry import ATTACKS, chosen
from tests.hostile.servers import dirty_lines
from tests.hostile.verdicts import Attack, Campaign, Outcome, Verdict, carry_out, table

_MAX_SHOWN = 20


def main() -> int:
    """Run the attacks named on the command line; returns the exit code."""
    args = _parser().parse_args()
    if args.list:
        print("\n".join(f"{attack.name:28}{attack.promise}" for attack in ATTACKS))
        return 0
    try:
        attacks = chosen(args.only)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    folder = Path(tempfile.mkdtemp(prefix="ferrule-hostile-"))
    campaign = Campaign(folder, args.seconds, args.quick)
    verdicts = run_all(attacks, campaign, args.json)
    print(table(verdicts))
    if dirty_lines(campaign.logs):
        sys.stderr.write(f"the logs of the servers are kept in {folder}\n")
    else:
        shutil.rmtree(folder)
    return 0 if all(verdict.outcome.is_met for verdict in verdicts) else 1


def run_all(attacks: Sequence[Attack], campaign: Campaign, path: Path | None) -> list[Verdict]:
    """Carry out attacks one after another, then look through the logs of all servers."""
    logs = Attack("logs", "no attack makes the server answer INTERNAL or write a traceback", run_logs)
    verdicts = []
    for attack in (*attacks, logs):
        sys.stderr.write(f"{attack.name}: {attack.promise}\n")
        verdict = carry_out(attack, campaign)
        verdicts.append(verdict)
        sys.stderr.write(f"  {verdict.word}: {verdict.outcome.summary} (bar: {verdict.outcome.bar})\n")
        print(verdict.as_json(), flush=True)
        if path is not None:
            with path.open("a") as file:
                file.write(f"{verdict.as_json()}\n")
    return verdicts


def run_logs(campaign: Campaign) -> Outcome:
    """Count the lines of all logs that speak of internal errors."""
    lines = dirty_lines(campaign.logs)
    summary = f"{len(lines)} lines in the logs of {len(campaign.logs)} servers"
    return Outcome(summary, {"count": len(lines), "first": lines[:_MAX_SHOWN]}, "0 INTERNAL, 0 tracebacks", not lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="attacks, or kinds of them; default: all")
    parser.add_argument("--list", action="store_true", help="list the attacks and run none")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each phase of a fairness measurement")
    parser.add_argument(
        "--quick", action="store_true", help="fewer variants of each attack, in about a third of the time"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the lines of JSON to a file, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
