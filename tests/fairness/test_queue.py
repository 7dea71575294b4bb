"""FairQueue: principals take turns by cost, and every item comes out once, whatever happens in between."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ferrule_server.fairness.queue import FairQueue


def order_of(queue: FairQueue[int], cost: dict[str, float], count: int) -> str:
    """Return whose items come next, a letter for each, with these costs."""
    order = ""
    for _ in range(count):
        taken = queue.take()
        assert taken is not None
        order += taken[0]
        queue.charge(taken[0], cost[taken[0]])
    return order


def test_turns_are_by_cost_and_not_by_items() -> None:
    """A principal whose items cost a quarter has four for each of the other's."""
    queue = FairQueue[int]()
    for number in range(20):
        queue.add("a", number)
        queue.add("b", number)
    assert order_of(queue, {"a": 1.0, "b": 0.25}, 10) == "abbbbabbbb"


def test_at_equal_costs_principals_alternate() -> None:
    """Equal tags are served in order of arrival."""
    queue = FairQueue[int]()
    for name in "aaabbbcc":
        queue.add(name, 0)
    assert order_of(queue, dict.fromkeys("abc", 1.0), 8) == "abcabcab"


def test_a_principal_that_comes_and_goes_is_not_ahead_of_one_that_stays() -> None:
    """Its cost is kept while others wait."""
    queue = FairQueue[int]()
    for _ in range(100):
        queue.add("stays", 0)
    taken = Counter[str]()
    for _ in range(50):
        if not any(item == 1 for item in queue):
            queue.add("comes", 1)
        principal, _ = queue.take() or ("", 0)
        queue.charge(principal, 1.0)
        taken[principal] += 1
    assert abs(taken["stays"] - taken["comes"]) <= 1


def test_tags_of_principals_that_left_are_forgotten() -> None:
    """Memory follows those that wait, however many have come and gone."""
    queue = FairQueue[int]()
    for number in range(10_000):
        queue.add("stays", number)
        queue.add(f"visitor {number}", number)
        for _ in range(2):
            principal, _ = queue.take() or ("", 0)
            queue.charge(principal, 1.0)
        queue.add("stays", number)
    assert len(queue._tags) <= 200


class FairQueueMachine(RuleBasedStateMachine):
    """Random items, costs and removals, against lists by principal and a bound on what a newcomer waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue[int]()
        self.waiting: dict[str, list[int]] = {name: [] for name in "abcd"}
        self.served: set[str] = set()
        self.overtaken: dict[str, Counter[str]] = {}
        self.uncharged: list[str] = []
        self.number = 0

    @rule(name=st.sampled_from("abcd"))
    def add(self, name: str) -> None:
        """Add an item, sometimes of a principal that had none since the queue was empty."""
        if not self.waiting[name] and name not in self.served:
            self.overtaken[name] = Counter()
        self.number += 1
        self.waiting[name].append(self.number)
        self.queue.add(name, self.number)

    @precondition(lambda self: not self.uncharged)
    @rule()
    def take(self) -> None:
        """Take the oldest item of a principal; no newcomer is overtaken twice by another principal."""
        taken = self.queue.take()
        if taken is None:
            assert not any(self.waiting.values())
            return
        name, item = taken
        assert self.waiting[name].pop(0) == item
        self.overtaken.pop(name, None)
        for overtaken in self.overtaken.values():
            overtaken[name] += 1
            assert overtaken[name] <= 1
        self.served.add(name)
        self.uncharged.append(name)

    @precondition(lambda self: self.uncharged)
    @rule(cost=st.sampled_from([0.1, 1.0, 7.0]))
    def charge(self, cost: float) -> None:
        """Charge what was taken."""
        self.queue.charge(self.uncharged.pop(), cost)
        if not any(self.waiting.values()):
            self.served.clear()

    @rule(data=st.data(), name=st.sampled_from("abcd"))
    def remove(self, data: st.DataObject, name: str) -> None:
        """Take an item out of turn, once."""
        if not self.waiting[name]:
            assert not self.queue.remove(name, 0)
            return
        item = self.waiting[name].pop(data.draw(st.integers(0, len(self.waiting[name]) - 1)))
        assert self.queue.remove(name, item)
        assert not self.queue.remove(name, item)
        if not self.waiting[name]:
            self.overtaken.pop(name, None)

    @precondition(lambda self: not self.uncharged)
    @rule()
    def drain(self) -> None:
        """Take all out."""
        assert sorted(self.queue.drain()) == sorted(item for items in self.waiting.values() for item in items)
        for items in self.waiting.values():
            items.clear()
        self.overtaken.clear()
        self.served = set("abcd")  # costs are forgotten with the next charge

    @invariant()
    def is_whole(self) -> None:
        """The queue has what was put in and not taken out, in the order of each principal."""
        self.queue.check_integrity()
        assert self.queue.num_items == sum(map(len, self.waiting.values()))
        assert sorted(self.queue) == sorted(item for items in self.waiting.values() for item in items)
        assert sorted(self.queue.heads()) == sorted(items[0] for items in self.waiting.values() if items)


TestFairQueueMachine = FairQueueMachine.TestCase
TestFairQueueMachine.settings = settings(max_examples=150, stateful_step_count=50)
