"""Places and Company: who may take how many, and that every place comes back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ferrule_server.fairness.places import Company, Places

NAMES = st.sampled_from("abc")
TOTAL = 40


@pytest.mark.parametrize(("num_floods", "headroom", "free"), [(1, 1, 45), (2, 1, 30), (1, 8, 10), (1, float("inf"), 0)])
def test_floods_leave_a_part_of_the_places(num_floods: int, headroom: float, free: int) -> None:
    """A half, a third, a ninth, or nothing, of 90."""
    places = Places(90)
    for _ in range(90):
        for name in "ab"[:num_floods]:
            if places.has_room(name, headroom=headroom):
                places.take(name)
    assert places.num_free == free


def test_one_piece_that_fits_is_always_allowed() -> None:
    """For a principal that holds nothing, however large the piece is."""
    places = Places(10)
    assert places.has_room("a", 10)
    assert not places.has_room("a", 11)
    places.take("a", 4)
    assert not places.has_room("a", 3)
    assert places.has_room("b", 6)
    assert not places.has_room("b", 7)
    assert [places.bound("a", 3, 1), places.bound("b", 7, 1)] == [(4, 6), (4, 10)]


def test_nothing_is_given_while_the_total_is_exceeded() -> None:
    """The real size of a request may exceed it; the next one waits until enough is returned."""
    places = Places(10)
    places.take("a", 12)
    assert places.num_free == -2
    assert not places.has_room("b")
    places.give_back("a", 12)
    assert places.has_room("b", 10)


def test_others_count_as_active_for_a_minute() -> None:
    """A principal is alone before another one was seen, and again a minute after both were."""
    company = Company()
    assert [company.joins(name, now) for name, now in (("a", 0.0), ("a", 1.0), ("b", 2.0), ("a", 3.0))] == [
        False,
        False,
        True,
        True,
    ]
    assert company.joins("a", 62.9)
    assert not company.joins("a", 63.1)


class PlacesMachine(RuleBasedStateMachine):
    """Principals that take and give back, against counts of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.places = Places(TOTAL)
        self.held = dict.fromkeys("abc", 0)

    @rule(name=NAMES, num_places=st.integers(1, TOTAL), headroom=st.sampled_from([1, 2, 8, float("inf")]))
    def take(self, name: str, num_places: int, headroom: float) -> None:
        """Take places if there is room, which must not pass the threshold or the total."""
        num_free, held = TOTAL - sum(self.held.values()), self.held[name]
        fits = num_places <= num_free and (held == 0 or held + num_places <= headroom * num_free)
        assert self.places.has_room(name, num_places, headroom) == fits
        if fits:
            self.places.take(name, num_places)
            self.held[name] += num_places

    @rule(data=st.data(), name=NAMES)
    def give_back(self, data: st.DataObject, name: str) -> None:
        """Give back some of them."""
        num_places = data.draw(st.integers(0, self.held[name]))
        if num_places:
            self.places.give_back(name, num_places)
        self.held[name] -= num_places

    @invariant()
    def is_whole(self) -> None:
        """What is counted is what is held, and never more than all."""
        self.places.check_integrity()
        assert self.places.held == {name: held for name, held in self.held.items() if held}
        assert self.places.num_held == sum(self.held.values()) <= TOTAL
        assert all(self.places.of(name) == held for name, held in self.held.items())


TestPlacesMachine = PlacesMachine.TestCase
TestPlacesMachine.settings = settings(max_examples=100, stateful_step_count=40)
