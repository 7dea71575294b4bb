"""Whether the figures are the server's or the generator's own: its processor time, and how late its loop wakes up."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ferrule_cli.load.records import percentile

__all__ = ["Watch", "watching"]

_TICK_S = 0.01
_MOST_CPU = 0.8
"""A Python process has one core; beyond this share of it requests wait for the generator."""
_MOST_LAG_MS = 20.0


@dataclass(slots=True)
class Watch:
    """What the generator itself took.

    Attributes:
        cpu_share: Processor seconds per second, of all its threads.
        lag_p99_ms: How late its loop wakes up; that much of a latency may be the generator's.
    """

    cpu_share: float = 0.0
    lag_p99_ms: float = 0.0

    @property
    def limit(self) -> str:
        """Why the figures may be those of the generator or of a busy machine; empty: they are the server's."""
        reasons = []
        if self.cpu_share > _MOST_CPU:
            reasons.append(f"its processor time, {self.cpu_share:.0%} of a core")
        if self.lag_p99_ms > _MOST_LAG_MS:
            reasons.append(f"its loop, {self.lag_p99_ms:.0f} ms late")
        return " and ".join(reasons)


@dataclass(slots=True)
class _Ticks:
    """Ticks of the loop and how late each was.

    A loop that stands still misses many ticks. Each of them counts, as late as it would have been: otherwise a stall of
    a second would be one sample among hundreds, which no percentile shows (coordinated omission).
    """

    due_s: float
    lags_s: list[float] = field(default_factory=list)

    def note(self) -> None:
        """Note the tick that is due now, and those that were missed since."""
        late_s = time.monotonic() - self.due_s
        self.lags_s += (late_s - missed * _TICK_S for missed in range(max(1, math.ceil(late_s / _TICK_S))))
        self.due_s += late_s + _TICK_S

    async def run(self) -> None:
        """Tick until this is cancelled."""
        while True:
            await asyncio.sleep(self.due_s - time.monotonic())
            self.note()


@asynccontextmanager
async def watching() -> AsyncIterator[Watch]:
    """Give a watch that is filled in when the body ends."""
    watch, ticks = Watch(), _Ticks(time.monotonic() + _TICK_S)
    ticking = asyncio.create_task(ticks.run())
    wall_s, cpu_s = time.monotonic(), time.process_time()
    try:
        yield watch
    finally:
        watch.cpu_share = (time.process_time() - cpu_s) / max(1e-9, time.monotonic() - wall_s)
        if time.monotonic() > ticks.due_s:
            ticks.note()
        watch.lag_p99_ms = 1e3 * percentile(sorted(ticks.lags_s), 0.99) if ticks.lags_s else 0.0
        ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking
