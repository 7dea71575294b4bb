"""The command line of the hostile tests, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hostile.registry import ATTACKS, chosen
from tests.hostile.servers import dirty_lines
from tests.hostile.verdicts import Attack, Campaign, Outcome, carry_out, table

PAGE = Path(__file__).resolve().parents[2] / "tests" / "hostile" / "README.md"


def test_the_page_has_a_row_for_each_attack() -> None:
    """By its name on the command line, which no other attack has."""
    page = PAGE.read_text()
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert [attack.name for attack in ATTACKS if f"| `{attack.name}` |" not in page] == []


def test_attacks_are_chosen_by_name_or_by_kind() -> None:
    """An unknown name is an error that says so."""
    assert chosen([]) == list(ATTACKS)
    assert [attack.name for attack in chosen(["text_queue"])] == ["text_queue"]
    assert {attack.name.partition(".")[0] for attack in chosen(["strangers"])} == {"strangers"}
    with pytest.raises(ValueError, match="no attack is called nonsense"):
        chosen(["text_queue", "nonsense"])


def test_an_attack_that_breaks_misses_its_bar_and_says_why(tmp_path: Path) -> None:
    """The attacks after it still run."""

    def run(campaign: Campaign) -> Outcome:
        raise RuntimeError("the\nserver | is gone")

    verdict = carry_out(Attack("broken", "nothing", run), Campaign(tmp_path))
    line = json.loads(verdict.as_json())
    assert line["verdict"] == "MISSED"
    assert line["summary"] == "not measured: RuntimeError: the server | is gone"
    assert table([verdict]).splitlines()[-1].count("|") == 5


def test_internal_errors_and_tracebacks_in_logs_are_found(tmp_path: Path) -> None:
    """And nothing else is."""
    log = tmp_path / "log"
    log.write_text("INFO ready\nWARNING refused code=INTERNAL\nTraceback (most recent call last):\nINFO done\n")
    assert len(dirty_lines([log, tmp_path / "absent"])) == 2
