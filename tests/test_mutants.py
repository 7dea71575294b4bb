"""The list of mutants fits the tree: ``make mutants`` runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.mutants.catalogue import Mutant, StaleMutant, read_mutants

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = read_mutants()


def test_there_are_enough_mutants_in_enough_places() -> None:
    """At least 100 of them, in at least 60 sources of the server, the client and the command line."""
    files = {mutant.file for mutant in MUTANTS}
    assert len(MUTANTS) >= 100
    assert len(files) >= 60
    assert {name.split("/")[1] for name in files} >= {"ferrule_server", "ferrule_client", "ferrule_cli"}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_mutant_is_not_stale(mutant: Mutant) -> None:
    """Its old text occurs once in its source, the result is Python, and its tests exist."""
    mutated = mutant.apply((ROOT / mutant.file).read_text())
    compile(mutated, mutant.file, "exec")
    assert mutant.breaks.endswith(".")
    assert mutant.tests
    for test in mutant.tests:
        name, _, node = test.partition("::")
        content = (ROOT / name).read_text()
        for part in node.split("::") if node else ():
            function = part.partition("[")[0]
            assert re.search(rf"^ *(?:async def|def|class) {function}\b|^{function} = ", content, re.MULTILINE), test


@pytest.mark.parametrize("text", ["a = 2", "a = 1; a = 1"])
def test_mutant_whose_text_is_not_there_once_is_stale(text: str) -> None:
    """A list that no longer fits must not pass silently."""
    mutant = Mutant("one", "a.py", "a = 1", "a = 3", "A is one.", ("tests/test_mutants.py",))
    assert mutant.apply("b = 0\na = 1\n") == "b = 0\na = 3\n"
    with pytest.raises(StaleMutant, match="one: its old text occurs"):
        mutant.apply(text)


def test_unknown_id_is_an_error() -> None:
    """A campaign over nothing would report success."""
    with pytest.raises(ValueError, match="no mutants with these ids: none"):
        read_mutants(["none"])
