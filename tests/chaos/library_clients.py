"""The client library as an appender: what breaks is its affair alone."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule import Client
from ferrule.v1 import executor_pb2
from tests.chaos.raw_clients import Breaks, Input, Output

_TIMEOUT_S = 60.0
_NUM_RETRIES = 1000


class LibraryAppender:
    """A client of the library.

    Args:
        target: Where to connect to.
        breaks: Counts replays; breaks are not seen out here.
    """

    def __init__(self, target: str, breaks: Breaks) -> None:
        self._client = Client(target, timeout=_TIMEOUT_S, max_retries=_NUM_RETRIES)
        self._breaks = breaks

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class LibraryStreamAppender(LibraryAppender):
    """The library's stream, below its caches: one frame for all inputs."""

    def __init__(self, target: str, breaks: Breaks) -> None:
        super().__init__(target, breaks)
        self._stream = self._client.stream()

    def append(self, inputs: Sequence[Input]) -> Sequence[Output]:
        """Return the outputs in the order of the inputs."""
        outputs: list[Output] = []
        exchange = self._stream._exchange
        for result in exchange.run(inputs, (), exchange.attempts(inputs)):
            if isinstance(result, Exception):
                raise result
            assert not isinstance(result, executor_pb2.PrefillOutput)
            self._breaks.replayed += result.replayed
            outputs.append(result)
        return outputs

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()
        super().close()


class LibraryUnaryAppender(LibraryAppender):
    """The library's unary calls, below its caches: one Decode or ForwardVerify for each input."""

    def append(self, inputs: Sequence[Input]) -> Sequence[Output]:
        """Return the outputs in the order of the inputs."""
        return [self._append(one) for one in inputs]

    def _append(self, one: Input) -> Output:
        connection = self._client._connection
        output: Output
        if isinstance(one, executor_pb2.DecodeInput):
            request = executor_pb2.DecodeRequest(input=one)
            output = connection.unary(connection.executor.Decode, request, timeout=_TIMEOUT_S).output
        else:
            verify = executor_pb2.ForwardVerifyRequest(input=one)
            output = connection.unary(connection.executor.ForwardVerify, verify, timeout=_TIMEOUT_S).output
        self._breaks.replayed += output.replayed
        return output
