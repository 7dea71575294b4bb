"""Graphs of steps: which exist, which are wanted, and the capture of one between two steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from ferrule_server.executor.cuda.choices import OutputKind
from ferrule_server.executor.cuda.gpu import Gpu, GpuError, GpuLost, Graph, Operation

NODE_BYTES: Final = 64 << 10
"""Of the GPU's memory for one captured launch: an estimate on the safe side. No graph of ours was measured yet; others
report 6 to 28 MiB for graphs of some 300 to 500 launches. The driver allocates at the first replay, so that what is
free around a capture does not tell."""

FIRST_GRAPH_BYTES: Final = 32 << 20
"""What comes with the first graph besides, or now and then with another: the pool that all of them share."""

_MOST_TIMES: Final = 4
"""Graphs take so many times what is planned for them at most, and beyond the plan only what nobody needs."""

_SPARE_BYTES: Final = 1 << 30
"""Stays free of what nobody needs: for prompts in torch, and for others."""

_LEAST_FREE_BYTES: Final = 256 << 20
"""With less than that free nothing is captured, planned or not: it would fail, and torch might next."""

_LOOK_AGAIN_AFTER: Final = 64
"""Launches of a key without room, until memory is looked at again."""

_MOST_FAILURES: Final = 3
"""Captures that fail in a row, after which none is tried any more."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What decides the operations of a step; everything else is in its buffers.

    Attributes:
        num_rows: Rows of the bucket.
        kind: What the output rows that kernels choose for want.
        has_outputs: There are output rows; without, only KV is written.
        keeps_rows: Logits and the rows after the final norm are looked at after the step.
    """

    num_rows: int
    kind: OutputKind
    has_outputs: bool = True
    keeps_rows: bool = False

    @property
    def stores_logits(self) -> bool:
        """Whether logits are stored; the best token of each row is then in ``greedy`` of the results."""
        return self.kind is not OutputKind.GREEDY or self.keeps_rows


@dataclass(slots=True)
class _Launched:
    """A key that has no graph: its operations, how often they were launched, and whether its capture has failed."""

    operations: Sequence[Operation]
    num: int = 0
    has_failed: bool = False


class GraphStore:
    """Puts steps into the stream: by replaying their graph, or launch by launch as long as they have none.

    Only what was launched before is captured, which is the promise :meth:`Gpu.capture` asks for: torch has its
    workspaces by then. Graphs take the memory that is planned for them, then what nobody needs, in
    bounds; where that ends, and where a capture fails, a key is launched for ever, which takes the host longer and
    gives the same bits.

    Invariant: a key is captured or launched or was never put; ``taken_bytes`` is the estimate for the graphs that
    exist.

    Args:
        gpu: What runs them.
        operations_of: Returns the operations of a key, prepared; asked once for each.
        memory_bytes: What is planned for graphs.
        is_enabled: Capture graphs at all.

    Attributes:
        captured: The graphs, oldest first.
        taken_bytes: By graphs.
        num_wanted: Keys that were launched and are to be captured; may be read by any thread.
    """

    def __init__(
        self,
        gpu: Gpu,
        operations_of: Callable[[GraphKey], Sequence[Operation]],
        *,
        memory_bytes: int,
        is_enabled: bool = True,
    ) -> None:
        self._gpu = gpu
        self._operations_of = operations_of
        self._memory_bytes = memory_bytes
        self.captured: dict[GraphKey, Graph] = {}
        self._launched: dict[GraphKey, _Launched] = {}
        self._num_failures = 0 if is_enabled else _MOST_FAILURES
        self._is_full = self._has_warned = False
        self.taken_bytes = 0
        self.num_wanted = 0

    def is_settled(self, key: GraphKey) -> bool:
        """Whether a key has its graph, or will get none for now."""
        if key in self.captured:
            return True
        launched = self._launched.get(key)
        is_refused = launched is not None and launched.has_failed
        return is_refused or self._is_full or self._num_failures >= _MOST_FAILURES

    def put(self, key: GraphKey) -> bool:
        """Put the operations of a key into the stream and return whether that was one replay.

        Raises:
            GpuError: The operations cannot be prepared, or were refused; part of them may be in the stream.
        """
        if key in self.captured:
            self._gpu.replay(self.captured[key])
            return True
        launched = self._launched.get(key)
        if launched is None:
            launched = self._launched[key] = _Launched(self._prepared(key))
        self._gpu.launch(launched.operations)
        launched.num += 1
        if self._is_full and launched.num % _LOOK_AGAIN_AFTER == 0:
            self._is_full = not self._has_room()
        self._count()
        return False

    def capture_next(self) -> bool:
        """Capture the wanted key that was launched most often; return whether more are wanted. Only between steps.

        A key whose capture fails is not tried again.

        Raises:
            GpuError: The stream works no more, not only the capture.
        """
        if self._wanted():
            self._is_full = not self._has_room()
        wanted = self._wanted()
        if wanted:
            self._capture(max(wanted, key=lambda key: self._launched[key].num))
        self._count()
        return self.num_wanted > 0

    def close(self) -> None:
        """Give every graph back; none is in the stream any more.

        Raises:
            GpuError: The GPU refuses one; the others are given back all the same.
        """
        with ExitStack() as closing:
            for graph in self.captured.values():
                closing.callback(graph.close)
            self.captured.clear()
            self._launched.clear()
            self.taken_bytes = 0
            self._count()

    def _prepared(self, key: GraphKey) -> Sequence[Operation]:
        try:
            return self._operations_of(key)
        except GpuError:
            raise
        except Exception as error:
            # Whatever it is, it would be the same again at every step of this key.
            raise GpuError(f"the kernels of a step of {key.num_rows} rows cannot be launched: {error}") from error

    def _wanted(self) -> list[GraphKey]:
        """Return the keys to be captured."""
        if self._is_full or self._num_failures >= _MOST_FAILURES:
            return []
        return [key for key, launched in self._launched.items() if not launched.has_failed]

    def _has_room(self) -> bool:
        """Return whether another graph may be captured."""
        free_bytes = self._gpu.free_bytes()
        if self.taken_bytes < self._memory_bytes:
            return free_bytes >= _LEAST_FREE_BYTES
        return free_bytes >= _SPARE_BYTES and self.taken_bytes < _MOST_TIMES * self._memory_bytes

    def _count(self) -> None:
        """Note how many are wanted, and say once that others will not be captured."""
        self.num_wanted = len(self._wanted())
        if not self._is_full or self._has_warned or not self._launched:
            return
        self._has_warned = True
        _log.warning(
            "event=no_room_for_graphs num=%d bytes=%d planned=%d free=%d further sizes of steps are launched kernel by "
            "kernel; a lower --kv-memory or --gpu-memory-fraction gives room",
            len(self.captured),
            self.taken_bytes,
            self._memory_bytes,
            self._gpu.free_bytes(),
        )

    def _capture(self, key: GraphKey) -> None:
        begun, operations = time.monotonic(), self._launched[key].operations
        try:
            graph = self._gpu.capture(operations)
        except GpuLost:
            raise
        except Exception as error:  # noqa: BLE001 - launches may go on all the same
            self._note_failure(key, error)
            return
        self._num_failures = 0
        self.captured[key] = graph
        del self._launched[key]
        self.taken_bytes += NODE_BYTES * len(operations)
        self._is_full = not self._has_room()
        took_ms = 1e3 * (time.monotonic() - begun)
        _log.debug("event=graph_captured key=%s launches=%d ms=%.1f", key, len(operations), took_ms)

    def _note_failure(self, key: GraphKey, error: Exception) -> None:
        """Never capture a key again, or nothing at all after some in a row; the stream must have survived.

        Raises:
            GpuError: It has not.
        """
        self._launched[key].has_failed = True
        self._num_failures += 1
        then = "no more is tried" if self._num_failures == _MOST_FAILURES else "it is launched kernel by kernel"
        reason = str(error).partition("\n")[0]
        _log.warning("event=graph_not_captured key=%s reason=%r %s", key, reason, then, exc_info=error)
        self._gpu.synchronize()
