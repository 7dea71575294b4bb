"""Graphs of steps: which exist, which are wanted, and the capture of one between two steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ferrule_server.executor.cuda.choices import OutputKind
from ferrule_server.executor.cuda.gpu import Gpu, GpuError, Graph, Operation

__all__ = ["GraphKey", "GraphStore"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What decides the operations of a step; everything else is in its buffers.

    Attributes:
        num_rows: Rows of the bucket.
        is_decode: Every sequence has one row.
        kind: What its output rows want.
        has_outputs: There are output rows; without, only KV is written.
    """

    num_rows: int
    is_decode: bool
    kind: OutputKind
    has_outputs: bool = True


class GraphStore:
    """Puts steps into the stream: by replaying their graph, or launch by launch as long as they have none.

    Only what was launched before is captured, which is the promise :meth:`Gpu.capture` asks for: kernels are loaded
    and torch has its workspaces by then.

    Invariant: a key is captured or wanted or was never put; ``taken_bytes`` is what captures took from the memory.

    Args:
        gpu: What runs them.
        operations_of: Returns the operations of a key, prepared; asked once per key.
        memory_bytes: Once graphs have taken so much, no more are captured.
    """

    def __init__(
        self, gpu: Gpu, operations_of: Callable[[GraphKey], Sequence[Operation]], *, memory_bytes: int
    ) -> None:
        self._gpu = gpu
        self._operations_of = operations_of
        self._memory_bytes = memory_bytes
        self._graphs: dict[GraphKey, Graph] = {}
        self._launches: dict[GraphKey, Sequence[Operation]] = {}
        self._num_launched: dict[GraphKey, int] = {}
        self.taken_bytes = 0

    @property
    def captured(self) -> tuple[GraphKey, ...]:
        """The keys that have graphs, oldest first."""
        return tuple(self._graphs)

    @property
    def num_wanted(self) -> int:
        """Keys that were launched and are to be captured."""
        return len(self._launches) if self.taken_bytes < self._memory_bytes else 0

    def is_settled(self, key: GraphKey) -> bool:
        """Whether a key has its graph, or will never get one."""
        return key in self._graphs or self.taken_bytes >= self._memory_bytes

    def put(self, key: GraphKey) -> bool:
        """Put the operations of a key into the stream and return whether that was one replay.

        Raises:
            GpuError: It was refused; part of it may be in the stream. Or its operations cannot be prepared.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            self._gpu.replay(graph)
            return True
        if key not in self._launches:
            self._launches[key] = self._prepared(key)
        self._gpu.launch(self._launches[key])
        self._num_launched[key] = self._num_launched.get(key, 0) + 1
        return False

    def capture_next(self) -> bool:
        """Capture the key that was launched most often; return whether more are wanted. Only between steps.

        Raises:
            GpuError: It was refused.
        """
        if self.num_wanted:
            self._capture(max(self._num_launched, key=self._num_launched.__getitem__))
        return self.num_wanted > 0

    def close(self) -> None:
        """Give every graph back; none is in the stream any more.

        Raises:
            GpuError: The GPU refuses one; the others are given back all the same.
        """
        refused: GpuError | None = None
        while self._graphs:
            try:
                self._graphs.popitem()[1].close()
            except GpuError as error:
                refused = error
        self._launches.clear()
        self._num_launched.clear()
        if refused is not None:
            raise refused

    def _prepared(self, key: GraphKey) -> Sequence[Operation]:
        try:
            return self._operations_of(key)
        except GpuError:
            raise
        except Exception as error:
            # Whatever it is, it would be the same again at every step of this key.
            raise GpuError(f"the kernels of a step of {key.num_rows} rows cannot be launched: {error}") from error

    def _capture(self, key: GraphKey) -> None:
        begun, free_bytes = time.monotonic(), self._gpu.free_bytes()
        self._graphs[key] = self._gpu.capture(self._launches[key])
        del self._launches[key], self._num_launched[key]
        self.taken_bytes += max(0, free_bytes - self._gpu.free_bytes())
        _log.debug("event=graph_captured key=%s ms=%.1f", key, 1e3 * (time.monotonic() - begun))
        if self.taken_bytes >= self._memory_bytes:
            _log.info(
                "event=no_more_graphs num=%d bytes=%d allowed=%d",
                len(self._graphs),
                self.taken_bytes,
                self._memory_bytes,
            )
