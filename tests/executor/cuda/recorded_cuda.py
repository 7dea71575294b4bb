"""A double of ``torch.cuda``: every call is checked against the signature of the real one and recorded."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["POOL", "STREAM", "RecordedCuda"]

STREAM, OTHER_STREAM = 0xBEEF, 0
POOL = (0, 1)


@dataclass
class RecordedCuda:
    """Answers as the module would with one GPU.

    Attributes:
        calls: Names and what is worth knowing of the arguments, in order.
        failures: By name (``CUDAGraph.replay``): what the call raises.
        stream_now: Handle of the stream that torch's work goes to.
        is_capturing: Between begin and end of a capture.
        graphs: All that were made, whether or not anybody still has them.
    """

    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    failures: dict[str, Exception] = field(default_factory=dict)
    stream_now: int = OTHER_STREAM
    is_capturing: bool = False
    graphs: list[weakref.ref[RecordedGraph]] = field(default_factory=list)

    def called(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Record a call, or let it fail.

        Raises:
            TypeError: The real one does not take these arguments.
        """
        inspect.signature(real).bind(*args, **kwargs)
        self.calls.append((name, (*args, *kwargs.values())))
        if name in self.failures:
            raise self.failures[name]

    def names(self) -> list[str]:
        """Return the names of all calls."""
        return [name for name, _ in self.calls]

    def set_device(self, device: object) -> None:
        """Choose the device of a thread."""
        self.called("set_device", torch.cuda.set_device, device)

    def mem_get_info(self, device: object) -> tuple[int, int]:
        """Return free and total bytes."""
        self.called("mem_get_info", torch.cuda.mem_get_info, device)
        return 60 << 30, 80 << 30

    def graph_pool_handle(self) -> tuple[int, int]:
        """Return a pool."""
        self.called("graph_pool_handle", torch.cuda.graph_pool_handle)
        return POOL

    def current_stream(self, device: object) -> RecordedStream:
        """Return the stream that torch uses."""
        self.called("current_stream", torch.cuda.current_stream, device)
        return RecordedStream(self, self.stream_now)

    @contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        """Have torch use a stream."""
        self.called("stream", torch.cuda.stream, stream)
        before, self.stream_now = self.stream_now, stream.cuda_stream
        try:
            yield
        finally:
            self.stream_now = before

    def Stream(self, *args: object, **kwargs: object) -> RecordedStream:  # noqa: N802
        """Return the stream of an executor."""
        self.called("Stream", torch.cuda.Stream.__new__, torch.cuda.Stream, *args, **kwargs)
        return RecordedStream(self, STREAM)

    def Event(self, *args: object, **kwargs: object) -> RecordedEvent:  # noqa: N802
        """Return an event."""
        inspect.signature(torch.cuda.Event.__new__).bind(torch.cuda.Event, *args, **kwargs)
        return RecordedEvent(self)

    def CUDAGraph(self, *args: object, **kwargs: object) -> RecordedGraph:  # noqa: N802
        """Return a graph."""
        inspect.signature(torch.cuda.CUDAGraph.__new__).bind(torch.cuda.CUDAGraph, *args, **kwargs)
        graph = RecordedGraph(self)
        self.graphs.append(weakref.ref(graph))
        return graph


@dataclass
class RecordedStream:
    """A stream."""

    cuda: RecordedCuda
    cuda_stream: int

    def wait_stream(self, *args: Any) -> None:
        """Order what comes here behind another stream."""
        self.cuda.called("Stream.wait_stream", torch.cuda.Stream.wait_stream, self, *args)


@dataclass
class RecordedEvent:
    """An event."""

    cuda: RecordedCuda

    def record(self, *args: Any) -> None:
        """Mark a place."""
        self.cuda.called("Event.record", torch.cuda.Event.record, self, *args)

    def synchronize(self) -> None:
        """Wait for it."""
        self.cuda.called("Event.synchronize", torch.cuda.Event.synchronize, self)


@dataclass
class RecordedGraph:
    """A graph; captures as torch does: on a stream that is not the default one, ended by whoever began."""

    cuda: RecordedCuda

    def capture_begin(self, **kwargs: Any) -> None:
        """Begin."""
        self.cuda.called("CUDAGraph.capture_begin", torch.cuda.CUDAGraph.capture_begin, self, **kwargs)
        assert self.cuda.stream_now == STREAM, "a capture needs a stream of its own"
        self.cuda.is_capturing = True

    def capture_end(self) -> None:
        """End."""
        assert self.cuda.is_capturing
        self.cuda.is_capturing = False
        self.cuda.called("CUDAGraph.capture_end", torch.cuda.CUDAGraph.capture_end, self)

    def replay(self) -> None:
        """Replay, on the current stream."""
        assert self.cuda.stream_now == STREAM
        self.cuda.called("CUDAGraph.replay", torch.cuda.CUDAGraph.replay, self)

    def reset(self) -> None:
        """Give the memory back."""
        self.cuda.called("CUDAGraph.reset", torch.cuda.CUDAGraph.reset, self)
