# Written by tools/strip_async.py from ../aio/forward.py: change that and run `make sync`.
"""Forward passes that keep no cache: rows of all positions, streamed in chunks."""

from __future__ import annotations

from collections.abc import Iterator

from ferrule.v1 import executor_pb2
from ferrule_client import _convert
from ferrule_client._messages import Reading
from ferrule_client._public import publish
from ferrule_client._retry import Attempts
from ferrule_client._timeouts import Timeout
from ferrule_client.errors import FerruleError
from ferrule_client.sync._closing import Closing
from ferrule_client.sync._connection import Connection
from ferrule_client.sync._stream_call import OpenCall
from ferrule_client.types import ForwardChunk

__all__ = ["ForwardPass"]


class ForwardPass(Iterator[ForwardChunk], Closing):
    """Rows of the positions of an input, stretch by stretch; made by ``Client.forward``.

    Nothing runs before the first ``next``. After a broken connection the input is run again, and rows that are out
    already are left out. Leave it early in ``with``, or close it: the server then stops.
    """

    def __init__(
        self,
        connection: Connection,
        request: executor_pb2.ForwardRequest,
        text: str | None,
        timeout: Timeout,
        reads: Reading,
    ) -> None:
        self._connection = connection
        self._text = text
        self._reads = reads
        self._request = request
        self._timeout = timeout
        self._call: OpenCall[executor_pb2.ForwardResponse] | None = None
        self._position = 0
        self._has_ended = False

    def __del__(self) -> None:
        if self.__dict__.get("_call") is not None:
            self._drop()

    def __next__(self) -> ForwardChunk:
        chunk = self.advance()
        if chunk is None:
            raise StopIteration
        return chunk

    def advance(self) -> ForwardChunk | None:
        """Return the next stretch, or None after the last one; what ``next`` does, without its error."""
        if self._has_ended:
            return None
        try:
            return self._receive(self._connection.attempts(self._timeout))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the pass. Closing twice changes nothing."""
        self._has_ended = True
        self._drop()

    def _receive(self, attempts: Attempts) -> ForwardChunk:
        if self._text is not None:
            ids = self._connection.encode_text(self._text, self._reads, timeout=self._timeout)
            self._request.input_ids.extend(ids)
            self._text = None
        while True:
            if self._call is None:
                self._call = self._connection.open_replies(self._connection.executor.Forward, self._request)
            reply = self._connection.receive(self._call, attempts)
            if isinstance(reply, FerruleError):
                self._drop()
                if not self._connection.restore_masks(reply, [self._request], attempts):
                    self._connection.wait(attempts, reply)
                continue
            chunk = _convert.forward_from_message(reply).behind(self._position)
            if chunk is not None:
                self._position = chunk.first_position + chunk.num_rows
                if chunk.is_last:
                    self._has_ended = True
                    self._call.close()
                return chunk

    def _drop(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()


publish(globals(), ("ForwardPass",))
