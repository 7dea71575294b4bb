"""The campaign: apply each mutant to a copy of the tree, run its tests, and report which ones they do not kill.

Exit status: 0 all are killed, 1 some are not, 2 the named tests do not pass without a mutant.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from queue import SimpleQueue
from typing import Final, NamedTuple

from tools.mutants.catalogue import Mutant, read_mutants
from tools.mutants.worker import Outcome, Worker

_LIMIT_S: Final = 120.0
_BAR: Final = 30


class Verdict(NamedTuple):
    """What became of a mutant, and the first test that failed; empty: none, or the process crashed or hung."""

    outcome: Outcome
    killer: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign and return the exit status."""
    asked = _arguments(arguments)
    mutants = read_mutants(asked.only)
    began = time.monotonic()
    workers = [Worker(asked.limit_s) for _ in range(max(1, min(asked.jobs, len(mutants))))]
    try:
        for worker in workers:
            worker.check()
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        if not asked.no_baseline:
            print(f"{len(tests)} test files and nodes without a mutant ...", file=sys.stderr, flush=True)
            if not workers[0].passes(tests):
                print(workers[0].output, "\nerror: the tests do not pass without a mutant", file=sys.stderr)
                return 2
        verdicts = _judge_all(mutants, workers)
    finally:
        for worker in workers:
            worker.close()
    return _report(mutants, verdicts, time.monotonic() - began, is_json=asked.json)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="these mutants only")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="copies of the tree (default: 1)")
    parser.add_argument("--limit-s", type=float, default=_LIMIT_S, metavar="S", help="time limit of each mutant")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a mutant first")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line on stdout")
    return parser.parse_args(arguments)


def _judge_all(mutants: Sequence[Mutant], workers: Sequence[Worker]) -> dict[str, Verdict]:
    """Return what became of each mutant by id; show the progress on stderr."""
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def judge(mutant: Mutant) -> tuple[Mutant, Verdict, float, str]:
        worker, began = free.get(), time.monotonic()
        try:
            verdict = Verdict(worker.judge(mutant), worker.killer)
            return mutant, verdict, time.monotonic() - began, worker.output
        finally:
            free.put(worker)

    verdicts: dict[str, Verdict] = {}
    with ThreadPoolExecutor(len(workers)) as pool:
        for done in as_completed([pool.submit(judge, mutant) for mutant in mutants]):
            mutant, verdict, took_s, output = done.result()
            verdicts[mutant.id] = verdict
            bar = "#" * (_BAR * len(verdicts) // len(mutants))
            what = f"{verdict.outcome.value:8} {took_s:5.1f} s"
            print(
                f"[{bar:.<{_BAR}}] {len(verdicts)}/{len(mutants)} {what}  {mutant.id}",
                file=sys.stderr,
                flush=True,
            )
            if verdict.outcome is Outcome.BROKEN:
                print(output, file=sys.stderr)
    return verdicts


def _report(mutants: Sequence[Mutant], verdicts: dict[str, Verdict], took_s: float, *, is_json: bool) -> int:
    """Print the result, and return the exit status."""
    for mutant in mutants:
        if (outcome := verdicts[mutant.id].outcome) is not Outcome.KILLED:
            print(f"{outcome.value}: {mutant.id} ({mutant.file}): {mutant.breaks}", file=sys.stderr)
    counts = Counter(verdict.outcome.value for verdict in verdicts.values())
    print(f"{counts['killed']} of {len(mutants)} mutants killed in {took_s / 60:.1f} minutes", file=sys.stderr)
    if is_json:
        by_id = {each.id: [verdicts[each.id].outcome.value, verdicts[each.id].killer] for each in mutants}
        print(json.dumps({"mutants": len(mutants), "took_s": round(took_s, 1), **counts, "outcomes": by_id}))
    return 0 if counts["killed"] == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
