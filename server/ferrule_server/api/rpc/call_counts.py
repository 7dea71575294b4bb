"""Counts calls by method, code and reason, their durations, and the calls under way."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final

from ferrule_server.api.rpc.observe import Call
from ferrule_server.engine.metrics.timings import Histogram, HistogramReading, of_time

CALL_BOUNDS_S = (
    *(100e-6, 250e-6, 500e-6, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 10e-3, 20e-3, 50e-3),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Coarser than the bounds of the engine: each method has a histogram."""

_MAIN_SERVICE: Final = "ferrule.v1.ModelExecutorService"


class CallCounts:
    """Observes every call (see ``observe.py``). Written on the event loop, read from any thread.

    Invariant: the number of names is bounded. Methods are those of our services, of health and of reflection. Calls
    that gRPC refuses by itself, such as to methods that do not exist, never get here. Codes are gRPC's, and reasons
    those of ``errors.py``.
    """

    def __init__(self) -> None:
        self._in_flight: Counter[str] = Counter()
        self._ended: Counter[tuple[str, str, str]] = Counter()
        self._seconds: defaultdict[str, Histogram] = defaultdict(lambda: of_time(CALL_BOUNDS_S))
        self._refused_items: Counter[str] = Counter()

    # ---- on the event loop ------------------------------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        """Count a call as under way."""
        self._in_flight[name_of(call)] += 1

    def end(self, call: Call) -> None:
        """Count a call by its code and reason, and its duration."""
        name = name_of(call)
        self._in_flight[name] -= 1
        assert call.code is not None, "a call has ended without a code"
        self._ended[name, call.code.name, call.reason] += 1
        self._seconds[name].observe(call.duration_ns)

    def refuse_item(self, reason: str) -> None:
        """Count an item of a batch or stream that was refused before it reached the engine."""
        self._refused_items[reason] += 1

    # ---- from any thread: a copy is made without interruption, while the original may change during a loop ----------

    def in_flight(self) -> dict[str, int]:
        """Return the calls under way, by method."""
        return dict(self._in_flight)

    def ended(self) -> dict[tuple[str, str, str], int]:
        """Return the calls that have ended, by method, code and reason; the reason may be empty."""
        return dict(self._ended)

    def ended_for(self, reason: str) -> int:
        """Return how many calls of all methods have ended for a reason."""
        return sum(count for (_, _, why), count in self.ended().items() if why == reason)

    def ended_with(self, *codes: str) -> int:
        """Return how many calls of all methods have ended with one of these codes."""
        return sum(count for (_, code, _), count in self.ended().items() if code in codes)

    def seconds(self) -> dict[str, HistogramReading]:
        """Return the durations of calls by method, streams from begin to end."""
        return {rpc: histogram.read() for rpc, histogram in dict(self._seconds).items()}

    def refused_items(self) -> dict[str, int]:
        """Return the items refused before they reached the engine, by reason."""
        return dict(self._refused_items)


def name_of(call: Call) -> str:
    """Return the name that a method is counted by: ``Prefill``, but ``TokenizerService/Tokenize`` for other services.

    So methods of two services are counted apart even if they have the same name.
    """
    return call.rpc if call.service == _MAIN_SERVICE else f"{call.service.rpartition('.')[2]}/{call.rpc}"
