"""Plays every case in every language against real servers and prints the table; exits 1 unless all of it passed.

python -m tests.conformance.run                       every language there is a runner for
python -m tests.conformance.run --language node,go    some
python -m tests.conformance.run --case 'replay'       cases whose name has this
python -m tests.conformance.run --require             a language that cannot be built fails, instead of being skipped
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.conformance.cases import Case, load
from tests.conformance.languages import LANGUAGES, Missing, build
from tests.conformance.play import Conversation, Failed, Play, Unable
from tests.conformance.servers import Servers

PASSED: Final = "ok"
UNABLE: Final = "n/a"
FAILED: Final = "FAILED"
SKIPPED: Final = "skipped"

Result = tuple[str, str]
"""One of the words above, and why."""


def play_all(
    language: str, cases: Sequence[Case], servers: Servers, shared: dict[str, object], *, is_verbose: bool = False
) -> dict[str, Result]:
    """Return what became of each case in one language, by the case's name."""
    try:
        runner = build(language)
    except Missing as missing:
        return {case.name: (SKIPPED, str(missing)) for case in cases}
    except subprocess.CalledProcessError as refused:
        return {case.name: (FAILED, f"{refused.cmd[0]} refused the runner") for case in cases}
    process = runner.start()
    results: dict[str, Result] = {}
    for case in cases:
        if process.poll() is not None:
            process = runner.start()
        began = time.monotonic()
        results[case.name] = _play(case, process, servers, shared)
        if is_verbose:
            sys.stderr.write(f"{language} {time.monotonic() - began:6.2f} s {results[case.name][0]} {case.name}\n")
    process.communicate()
    return results


def _play(case: Case, process: subprocess.Popen[str], servers: Servers, shared: dict[str, object]) -> Result:
    try:
        Play(case, Conversation(process), servers, shared).run()
    except Failed as failed:
        return FAILED, str(failed)
    except Unable as unable:
        return UNABLE, str(unable)
    return PASSED, ""


def table(cases: Sequence[Case], results: Mapping[str, Mapping[str, Result]]) -> str:
    """Return the cases as lines, the languages as columns, the totals below."""
    width = max(len(case.name) for case in cases)
    lines, topic = [" " * width + "".join(f"{language:>9}" for language in results)], ""
    for case in cases:
        if case.topic != topic:
            topic = case.topic
            lines.append(f"{topic}:")
        words = "".join(f"{column[case.name][0]:>9}" for column in results.values())
        lines.append(f"{case.name:{width}}{words}")
    for word in (PASSED, UNABLE, SKIPPED, FAILED):
        counts = [sum(result[0] == word for result in column.values()) for column in results.values()]
        lines.append(f"{word:{width}}{''.join(f'{count:9}' for count in counts)}")
    return "\n".join(lines)


def by_topic(cases: Sequence[Case], results: Mapping[str, Mapping[str, Result]]) -> str:
    """Return the table in short, as Markdown: how many cases of each topic passed, and how many else."""
    lines = [f"| topic | cases | {' | '.join(results)} |", "| --- |" + " --: |" * (1 + len(results))]
    for topic in dict.fromkeys(case.topic for case in cases):
        names = [case.name for case in cases if case.topic == topic]
        cells = [_counted([column[name][0] for name in names]) for column in results.values()]
        lines.append(f"| {topic.partition('-')[2]} | {len(names)} | {' | '.join(cells)} |")
    totals = [_counted([word for word, _ in column.values()]) for column in results.values()]
    return "\n".join([*lines, f"| together | {len(cases)} | {' | '.join(totals)} |"])


def _counted(words: Sequence[str]) -> str:
    """Return the number of those that passed, and of the others by their word."""
    others = [f"{words.count(word)} {word}" for word in (UNABLE, SKIPPED, FAILED) if word in words]
    return ", ".join([str(words.count(PASSED)), *others])


def reasons(results: Mapping[str, Mapping[str, Result]]) -> list[str]:
    """Return why things were not passed, each reason of a language once."""
    seen: dict[str, None] = {}
    for language, column in results.items():
        for name, (word, why) in column.items():
            if word != PASSED:
                seen[f"{language} {word}: {why}" if word != FAILED else f"{language} {word}: {name}: {why}"] = None
    return list(seen)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, print, and return the exit code."""
    parser = argparse.ArgumentParser(description="Plays the conformance cases in every language.")
    parser.add_argument("--language", default=",".join(LANGUAGES), help="names with commas between them")
    parser.add_argument("--case", default="", help="play only cases whose name has this text")
    parser.add_argument("--require", action="store_true", help="fail where a language cannot be built")
    parser.add_argument("--by-topic", action="store_true", help="print the table in short, as Markdown")
    parser.add_argument("--verbose", action="store_true", help="tell each case on stderr as it ends, with its time")
    options = parser.parse_args(arguments)
    cases = [case for case in load() if options.case in case.name]
    shared: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder, Servers(Path(folder)) as servers:
        languages = options.language.split(",")
        results = {
            language: play_all(language, cases, servers, shared, is_verbose=options.verbose) for language in languages
        }
    told = by_topic(cases, results) if options.by_topic else table(cases, results)
    sys.stdout.write("\n".join([told, *reasons(results)]) + "\n")
    words = {result[0] for column in results.values() for result in column.values()}
    return int(FAILED in words or (options.require and SKIPPED in words))


if __name__ == "__main__":
    sys.exit(main())
