"""PerPrincipal: one record each, for a bounded number of principals."""

from __future__ import annotations

from dataclasses import dataclass

from ferrule_server.kv.per_principal import PerPrincipal


@dataclass
class _Count:
    value: int = 0


def test_each_principal_has_a_record_of_its_own() -> None:
    """Looking at one makes none."""
    counts = PerPrincipal(_Count)
    counts.of("a").value += 2
    counts.of("a").value += 1
    assert (counts.look("a").value, counts.look("b").value, len(counts)) == (3, 0, 1)


def test_the_record_that_was_used_longest_ago_is_dropped() -> None:
    """So memory is bounded however many principals there are over time."""
    counts = PerPrincipal(_Count, max_records=3)
    for name in "abcad":
        counts.of(name).value += 1
    assert len(counts) == 3
    assert [counts.look(name).value for name in "abcd"] == [2, 0, 1, 1]


def test_names_come_in_order_of_their_last_use() -> None:
    """The most recent one first; looking is no use."""
    counts = PerPrincipal(_Count, max_records=3)
    for name in "abca":
        counts.of(name)
    counts.look("b")
    assert counts.recent() == ["a", "c", "b"]
