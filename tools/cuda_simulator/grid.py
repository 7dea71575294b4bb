"""One launch: threads that take turns, the warps and CTAs they wait for each other in."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

from tools.cuda_simulator.clocks import Clocks, ThreadClock
from tools.cuda_simulator.errors import Deadlock, Divergence, SimulationError, WaitMissing
from tools.cuda_simulator.memory import PAGE_BITS, Memory, Page, views
from tools.cuda_simulator.races import CTA_BITS, SHARED_BIT, check
from tools.cuda_simulator.translate import Program
from tools.cuda_simulator.warps import WARP_OPERATIONS

__all__ = ["Cta", "Grid", "Thread"]

Copy = tuple[int, bytearray, tuple[int, ...]]
"""An asynchronous copy under way: offset in shared memory, bytes, accesses to log again when it arrives."""

_MOST_TURNS = 2_000_000
_NO_PAGES: dict[int, Page] = {}


class Cta:
    """Threads that share memory and see global memory through one view.

    ``pages`` holds what this CTA has seen of global memory since its last fence, its own stores included; ``pending``
    are the stores that nobody else has seen.
    """

    def __init__(self, grid: Grid, index: int, x: int, y: int, shared_bytes: int) -> None:
        self.grid, self.x, self.y = grid, x, y
        self.shared = bytearray(b"\xff" * shared_bytes)
        self.views = views(memoryview(self.shared))
        self.pages: dict[int, Page] = {}
        self.immutable: dict[int, Page] = {}
        self.writable: dict[int, Page] = {}
        self.pending: dict[int, int] = {}
        self.shared_base = SHARED_BIT + (index << CTA_BITS)
        self.threads: list[Thread] = []
        self.at_barrier: list[Thread] = []
        self.num_left = 0

    def open(self, index: int, page: Page) -> Page:
        """Return this CTA's view of a mutable page, as of now."""
        if index not in self.pages:
            self.pages[index] = self.writable[index] = page.copy()
        return self.pages[index]

    def publish(self) -> None:
        """Let everybody see this CTA's stores, and forget what it saw of others."""
        for address, size in self.pending.items():
            self._write_back(address, size)
        self.pending.clear()
        self.writable.clear()
        self.pages.clear()
        self.pages.update(self.immutable)

    def publish_near(self, address: int) -> None:
        """Publish the stores to the 16 bytes around an address."""
        line = address & ~15
        for place in range(line, line + 16, 2):
            size = self.pending.pop(place, 0)
            if size:
                self._write_back(place, size)

    def mirror(self, address: int, size: int, page: Page) -> None:
        """Show a change of memory itself in this CTA's view."""
        own = self.writable.get(address >> PAGE_BITS)
        if own is not None:
            place = address - page.base
            own.bytes[place : place + size] = page.bytes[place : place + size]

    def _write_back(self, address: int, size: int) -> None:
        own, page = self.writable[address >> PAGE_BITS], self.grid.memory.page(address)
        place = address - page.base
        page.bytes[place : place + size] = own.bytes[place : place + size]


class Thread:
    """One thread; ``loads`` and ``stores`` are the pages it may touch without asking."""

    __slots__ = (
        "clock", "cta", "generator", "groups", "has_waited", "loads", "log", "open_copies", "reply", "request", "send",
        "shared", "shared_base", "stores", "thread_id", "warp",
    )  # fmt: skip

    def __init__(self, cta: Cta, warp: Warp, thread_id: int, index: int) -> None:
        self.cta, self.warp, self.thread_id = cta, warp, thread_id
        self.loads, self.stores = _NO_PAGES, _NO_PAGES
        self.shared, self.shared_base = cta.views, cta.shared_base
        self.clock = ThreadClock(index, [])
        self.log = self.clock.codes.append
        self.open_copies: list[Copy] = []
        self.groups: list[list[Copy]] = []
        self.has_waited = False
        self.request: tuple[Any, ...] | None = None
        self.reply: Any = None

    def begin(self, generator: Generator[Any, Any, None]) -> None:
        """Take the code to run."""
        self.generator, self.send = generator, generator.send

    def line(self) -> int:
        """Return the line of the source at which it lost its turn."""
        return int(self.generator.gi_frame.f_lineno)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return f"thread {self.thread_id} of CTA ({self.cta.x}, {self.cta.y})"


class Warp:
    """32 threads and those of them that wait at an instruction of the warp."""

    __slots__ = ("num_arrived", "threads")

    def __init__(self) -> None:
        self.threads: list[Thread] = []
        self.num_arrived = 0


class Grid:
    """A launch under way."""

    def __init__(
        self,
        memory: Memory,
        program: Program,
        arguments: tuple[Any, ...],
        *,
        grid: tuple[int, int],
        num_threads: int,
        shared_bytes: int,
        seed: int,
    ) -> None:
        assert num_threads % 32 == 0, num_threads
        self.memory, self.program, self.num_ctas = memory, program, grid[0]
        self.num_cycles = 0
        self._random = random.Random(seed)
        self._ctas = [Cta(self, y * grid[0] + x, x, y, shared_bytes) for y in range(grid[1]) for x in range(grid[0])]
        self._threads: list[Thread] = []
        self.clocks = Clocks(len(self._ctas) * num_threads)
        for cta in self._ctas:
            self._fill(cta, num_threads, arguments)
        self._ready = list(self._threads)
        self._random.shuffle(self._ready)
        self._waiting: list[Thread] = []
        self._num_left = len(self._threads)

    def _fill(self, cta: Cta, num_threads: int, arguments: tuple[Any, ...]) -> None:
        for first in range(0, num_threads, 32):
            warp = Warp()
            for thread_id in range(first, first + 32):
                thread = Thread(cta, warp, thread_id, len(self._threads) + thread_id)
                self.clocks.begin(thread.clock)
                thread.begin(self.program.start(thread, *arguments))
                warp.threads.append(thread)
                cta.threads.append(thread)
        cta.num_left = num_threads
        self._threads += cta.threads

    def run_to_wait(self) -> None:
        """Run every thread as far as it gets without passing ``grid_wait``."""
        self._run()

    def run_to_end(self) -> None:
        """Pass ``grid_wait`` and run every thread to its end."""
        for thread in self._waiting:
            thread.loads, thread.stores, thread.has_waited = thread.cta.pages, thread.cta.writable, True
            thread.request = None
        for cta in self._ctas:
            cta.pages.update(cta.immutable)
        self._resume(self._waiting)
        self._waiting = []
        self._run()
        if self._num_left:
            raise self._stuck()
        clocks = [thread.clock for thread in self._threads]
        check(self.program, self.clocks, clocks, self.memory, len(self._ctas[0].threads))

    def _resume(self, threads: list[Thread]) -> None:
        first = int(self._random.random() * len(threads))
        self._ready += threads[first:] + threads[:first]

    def _run(self) -> None:
        ready, pick = self._ready, self._random.random
        left, turns = 1, 0
        while ready:
            thread = ready.pop()
            send, reply = thread.send, thread.reply
            try:
                while True:
                    request = send(reply)
                    if request is not None:
                        break
                    reply = thread
                    left -= 1
                    if left <= 0:
                        left = int(pick() * 8) + 1
                        turns += 1
                        if turns > _MOST_TURNS:
                            raise self._endless(thread, turns)
                        thread.reply = thread
                        ready.append(thread)
                        other = int(pick() * len(ready))
                        ready[other], ready[-1] = thread, ready[other]
                        break
            except StopIteration:
                self._finish(thread)
                continue
            except SimulationError as error:
                error.add_note(f"{self.program.name}: {thread}")
                raise
            if request is not None:
                thread.reply = None
                thread.request = request
                self._arrive(thread, request)

    def _arrive(self, thread: Thread, request: tuple[Any, ...]) -> None:
        name = request[0]
        if name == "barrier":
            self._arrive_at_barrier(thread)
        elif name == "grid_wait":
            if thread.has_waited or thread in self._waiting:
                raise WaitMissing(f"{self.program.name}: {thread} waits twice")
            self._waiting.append(thread)
        else:
            warp = thread.warp
            warp.num_arrived += 1
            if warp.num_arrived == 32:
                self._together(warp, name)

    def _together(self, warp: Warp, name: str) -> None:
        requests: list[Any] = [thread.request for thread in warp.threads]
        if len({request[1] for request in requests}) > 1:
            raise Divergence(f"lanes of a warp are at different instructions: {self._where(warp.threads)}")
        warp.num_arrived = 0
        if name == "warp_barrier":
            self.clocks.join(thread.clock for thread in warp.threads)
        for thread, reply in zip(warp.threads, WARP_OPERATIONS[name](requests), strict=True):
            thread.reply, thread.request = reply, None
        self._ready += warp.threads

    def _arrive_at_barrier(self, thread: Thread) -> None:
        cta = thread.cta
        cta.at_barrier.append(thread)
        if len(cta.at_barrier) < len(cta.threads):
            return
        if len({other.request[1] for other in cta.threads if other.request}) > 1:
            raise Divergence(f"threads are at different barriers: {self._where(cta.threads)}")
        cta.at_barrier = []
        self.clocks.join(other.clock for other in cta.threads)
        for other in cta.threads:
            other.request = None
        self._resume(cta.threads)

    def _finish(self, thread: Thread) -> None:
        if not thread.has_waited:
            raise WaitMissing(f"{self.program.name}: {thread} ended without grid_wait")
        if thread.open_copies or any(thread.groups):
            raise WaitMissing(f"{self.program.name}: {thread} ended before its copies to shared memory arrived")
        self._num_left -= 1
        cta = thread.cta
        cta.num_left -= 1
        if cta.num_left == 0:
            cta.publish()

    def _where(self, threads: list[Thread]) -> str:
        """Return where threads wait of which none can run."""
        counts: dict[str, int] = {}
        for thread in threads:
            place = str(self.program.sites[thread.request[1]]) if thread.request else ""
            counts[place] = counts.get(place, 0) + 1
        return ", ".join(f"{count} at {place}" if place else f"{count} ended" for place, count in counts.items())

    def _endless(self, thread: Thread, turns: int) -> Deadlock:
        place = self.program.place(thread.line())
        return Deadlock(f"{self.program.name}: no end after {turns} turns: {thread} is on {place}")

    def _stuck(self) -> SimulationError:
        """Return why nothing moves: some of those that must arrive at an instruction are gone or elsewhere."""
        for cta in self._ctas:
            for first in range(0, len(cta.threads), 32):
                warp = cta.threads[first].warp
                if warp.num_arrived:
                    return Divergence(f"{self.program.name}: not all lanes arrive: {self._where(warp.threads)}")
            if cta.num_left:
                return Divergence(f"{self.program.name}: not all threads arrive: {self._where(cta.threads)}")
        return Deadlock(f"{self.program.name}: {self._where(self._threads)}")
