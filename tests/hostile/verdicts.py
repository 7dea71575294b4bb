"""What an attack measured, whether it met its bar, and how both are printed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one attack.

    Attributes:
        summary: The decisive figures in a few words.
        figures: All figures.
        bar: What the figures are held against.
        is_met: Whether they meet it.
    """

    summary: str
    figures: Any
    bar: str
    is_met: bool


@dataclass
class Campaign:
    """Settings of a run, and the server logs that it left.

    Attributes:
        folder: Where servers put their files and logs.
        seconds: Length of one phase of a measurement.
        is_quick: Run fewer variants of each attack.
        logs: Logs of all servers started so far.
    """

    folder: Path
    seconds: float = 2.0
    is_quick: bool = False
    logs: list[Path] = field(default_factory=list)

    def progress(self, text: str) -> None:
        """Print a line for people to stderr."""
        sys.stderr.write(f"  {text}\n")
        sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        name: Its name on the command line.
        promise: The promise that it tests.
        run: Carries it out.
    """

    name: str
    promise: str
    run: Callable[[Campaign], Outcome]


@dataclass(frozen=True, slots=True)
class Verdict:
    """An attack and its outcome."""

    attack: Attack
    outcome: Outcome
    seconds: float

    @property
    def word(self) -> str:
        """The verdict in one word."""
        return "holds" if self.outcome.is_met else "MISSED"

    def as_json(self) -> str:
        """Return one line of JSON."""
        line = {
            "attack": self.attack.name,
            "promise": self.attack.promise,
            "summary": self.outcome.summary,
            "figures": self.outcome.figures,
            "bar": self.outcome.bar,
            "verdict": self.word,
            "seconds": round(self.seconds, 1),
        }
        return json.dumps(line, default=str)


def carry_out(attack: Attack, campaign: Campaign) -> Verdict:
    """Run an attack; a failure of the attack itself is a missed bar, so that the other attacks still run."""
    began_s = time.monotonic()
    try:
        outcome = attack.run(campaign)
    except Exception as error:  # noqa: BLE001 - whatever broke is reported as the outcome
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        outcome = Outcome(
            f"not measured: {reason[:120]}", {"error": reason[:2000]}, "the attack can be measured", False
        )
    return Verdict(attack, outcome, time.monotonic() - began_s)


def table(verdicts: Sequence[Verdict]) -> str:
    """Return the summary of a run as a Markdown table."""
    lines = ["| attack | figure | bar | verdict |", "| --- | --- | --- | --- |"]
    for each in verdicts:
        cells = (each.attack.name, each.outcome.summary, each.outcome.bar, each.word)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)
