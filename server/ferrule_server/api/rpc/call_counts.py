"""Calls by method, code and reason, how long they took, and how many are under way."""

from __future__ import annotations

from typing import Final

from ferrule_server.api.rpc.observe import Call
from ferrule_server.engine.metrics.histogram import Histogram, HistogramReading, of_time

CALL_BOUNDS_S = (
    *(100e-6, 250e-6, 500e-6, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 10e-3, 20e-3, 50e-3),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Coarser than what the engine measures: each method has a histogram of its own."""

_MAIN_SERVICE: Final = "ferrule.v1.ModelExecutorService"


class CallCounts:
    """Observes every call (see ``observe.py``). Written on the event loop, read from any thread.

    Invariant: names are few. Methods are those of our services, of health and reflection; what gRPC refuses by itself,
    a method that does not exist among it, never comes here. Codes are gRPC's, reasons those of ``errors.py``.
    """

    __slots__ = ("_ended", "_in_flight", "_refused_items", "_seconds")

    def __init__(self) -> None:
        self._in_flight: dict[str, int] = {}
        self._ended: dict[tuple[str, str, str], int] = {}
        self._seconds: dict[str, Histogram] = {}
        self._refused_items: dict[str, int] = {}

    # ---- on the event loop ------------------------------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        """Count a call as under way."""
        name = name_of(call)
        self._in_flight[name] = self._in_flight.get(name, 0) + 1

    def end(self, call: Call) -> None:
        """Count a call by how it ended, and its time."""
        name = name_of(call)
        self._in_flight[name] -= 1
        assert call.code is not None, "a call has ended without a code"
        key = (name, call.code.name, call.reason)
        self._ended[key] = self._ended.get(key, 0) + 1
        seconds = self._seconds.get(name)
        if seconds is None:
            seconds = self._seconds[name] = of_time(CALL_BOUNDS_S)
        seconds.observe(call.duration_ns)

    def refuse_item(self, reason: str) -> None:
        """Count an item of a batch or stream that was refused before the engine heard of it."""
        self._refused_items[reason] = self._refused_items.get(reason, 0) + 1

    # ---- from any thread: a copy is made at one go, while going through the original might find it changed ----------

    def in_flight(self) -> dict[str, int]:
        """Return the calls under way, by method."""
        return self._in_flight.copy()

    def ended(self) -> dict[tuple[str, str, str], int]:
        """Return the calls that have ended, by method, code and reason; no reason is an empty one."""
        return self._ended.copy()

    def ended_for(self, reason: str) -> int:
        """Return how many calls have ended for a reason, whatever their method."""
        return sum(count for (_, _, why), count in self.ended().items() if why == reason)

    def ended_with(self, *codes: str) -> int:
        """Return how many calls have ended with one of these codes, whatever their method and reason."""
        return sum(count for (_, code, _), count in self.ended().items() if code in codes)

    def seconds(self) -> dict[str, HistogramReading]:
        """Return how long calls took, streams from their first to their last moment, by method."""
        return {rpc: histogram.read() for rpc, histogram in self._seconds.copy().items()}

    def refused_items(self) -> dict[str, int]:
        """Return the items refused before the engine heard of them, by reason."""
        return self._refused_items.copy()


def name_of(call: Call) -> str:
    """Return what a method is counted as: ``Prefill``, and ``TokenizerService/Encode`` for those of other services.

    Both the executor and the tokenizer have a ``Decode``.
    """
    return call.rpc if call.service == _MAIN_SERVICE else f"{call.service.rpartition('.')[2]}/{call.rpc}"
