"""The race detector against the definition: all pairs of accesses, order as paths in the graph of events."""

from __future__ import annotations

import ast
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from tools.cuda_simulator import Memory, Race, Uninitialised
from tools.cuda_simulator.clocks import Clocks, ThreadClock
from tools.cuda_simulator.races import SHARED_BIT, check
from tools.cuda_simulator.translate import Program, Site
from tools.cuda_simulator.twins import SITE_BITS, size_of

NUM_THREADS = 5
NAMES = (
    "store_u16", "store_f32", "store_v4", "load_u16", "load_f32", "load_v4", "load_relaxed_u32",
    "atomic_increment_wrapping",
)  # fmt: skip
STRONG = ("load_relaxed_u32", "atomic_increment_wrapping")


@dataclass(slots=True)
class History:
    """Random accesses of threads that meet at random, told to the detector and kept as a graph.

    Events are numbered; ``before[e]`` are those that directly happen before e.
    """

    rng: random.Random
    base: int
    clocks: Clocks = field(default_factory=lambda: Clocks(NUM_THREADS))
    threads: list[ThreadClock] = field(default_factory=lambda: [ThreadClock(i, []) for i in range(NUM_THREADS)])
    before: list[set[int]] = field(default_factory=list)
    last: list[int | None] = field(default_factory=lambda: [None] * NUM_THREADS)
    accesses: list[tuple[int, int, int, str]] = field(default_factory=list)
    released: dict[int, int] = field(default_factory=dict)
    seen: list[set[int]] = field(default_factory=lambda: [set() for _ in range(NUM_THREADS)])
    location: dict[int, set[int]] = field(default_factory=dict)

    def event(self, *threads: int) -> int:
        """Add an event after the last ones of some threads."""
        number = len(self.before)
        self.before.append({last for thread in threads if (last := self.last[thread]) is not None})
        for thread in threads:
            self.last[thread] = number
        return number

    def step(self) -> None:
        """Let something happen."""
        what = self.rng.choices((self.access, self.fence, self.barrier, self.message), (2, 1, 1, 1))[0]
        what()

    def access(self, thread: int | None = None, name: str = "", place: int | None = None) -> None:
        """Let a thread touch one of a few places."""
        thread = self.rng.randrange(NUM_THREADS) if thread is None else thread
        name = name or self.rng.choice(NAMES)
        address = self.base + (self.rng.randrange(0, 16, size_of(name)) if place is None else place)
        self.threads[thread].codes.append(address << SITE_BITS | NAMES.index(name))
        event = self.event(thread)
        self.accesses.append((event, thread, address, name))
        if name in STRONG:
            self.seen[thread] |= self.location.get(address, set())
        if name == "load_relaxed_u32":
            self.clocks.observe(self.threads[thread], address)
        if name == "atomic_increment_wrapping":
            self.clocks.exchange(self.threads[thread], address)
            if thread in self.released:
                self.location.setdefault(address, set()).add(self.released[thread])

    def message(self) -> None:
        """Let two threads store and raise one flag or two, a third see it and load; now and then a fence is missing."""
        flags = (16, self.rng.choice((16, 20)))
        *senders, receiver = self.rng.sample(range(NUM_THREADS), 3)
        for place, sender in enumerate(senders):
            self.access(sender, "store_f32", 4 * place)
            if self.rng.random() < 0.9:
                self.fence(sender)
            self.access(sender, "atomic_increment_wrapping", flags[place])
        for flag in set(flags):
            self.access(receiver, self.rng.choice(STRONG), flag)
        if self.rng.random() < 0.9:
            self.fence(receiver)
        for place in range(len(senders)):
            self.access(receiver, "load_f32", 4 * place)

    def fence(self, thread: int | None = None) -> None:
        """Let a thread execute a fence."""
        thread = self.rng.randrange(NUM_THREADS) if thread is None else thread
        self.clocks.fence(self.threads[thread])
        event = self.event(thread)
        self.before[event] |= self.seen[thread]
        self.seen[thread] = set()
        self.released[thread] = event

    def barrier(self) -> None:
        """Let some threads meet."""
        members = self.rng.sample(range(NUM_THREADS), self.rng.randint(2, NUM_THREADS))
        self.clocks.join(self.threads[member] for member in members)
        self.event(*members)

    def has_race(self) -> bool:
        """Return whether any pair of conflicting accesses has no path between them."""
        past: list[set[int]] = []
        for direct in self.before:
            past.append(set(direct).union(*(past[event] for event in direct)))
        return any(
            _conflict(one, other) and one[0] not in past[other[0]]
            for index, other in enumerate(self.accesses)
            for one in self.accesses[:index]
        )


def _conflict(one: tuple[int, int, int, str], other: tuple[int, int, int, str]) -> bool:
    (_, thread, address, name), (_, other_thread, other_address, other_name) = one, other
    overlap = address < other_address + size_of(other_name) and other_address < address + size_of(name)
    is_write = any(part.startswith(("store", "atomic")) for part in (name, other_name))
    is_strong = all("relaxed" in part or "atomic" in part for part in (name, other_name))
    return thread != other_thread and overlap and is_write and not is_strong


@pytest.mark.parametrize("seed", range(4))
def test_finds_a_race_exactly_where_the_definition_has_one(seed: int) -> None:
    """In hundreds of short histories, a good part of them with a race."""
    rng = random.Random(seed)
    sites = tuple(Site("file.py", line, name) for line, name in enumerate(NAMES))
    program = Program("random", "", sites, iter, ast.Module([], []))
    verdicts = []
    for _ in range(150):
        memory = Memory()
        base = memory.put("x", np.zeros(64, np.uint8), mutable=True) if rng.random() < 0.5 else SHARED_BIT
        history = History(rng, base)
        for thread in history.threads:
            history.clocks.begin(thread)
        for _ in range(rng.randint(1, 6)):
            history.step()
        verdicts.append(history.has_race())
        try:
            check(program, history.clocks, history.threads, memory, NUM_THREADS)
            found = False
        except Race:
            found = True
        except Uninitialised:  # which is looked for after races
            found = False
        assert found == verdicts[-1]
    assert 30 < sum(verdicts) < 120
