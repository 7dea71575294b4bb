"""Generate and Forward: calls that are answered piece by piece, as fast as the client reads and no faster.

    engine thread -- deliver --> replies (merge waiting frames) -- writer --> client
          ^                                                           |
          '------------- resume, once the window is open again -------'

The engine may run ahead of the client by the window of the job. ``Window.sent_bytes`` counts delivered rows,
``Window.taken_bytes`` counts rows that gRPC has taken. gRPC itself buffers a few MiB before a write has to wait. A
client that stops reading parks its own call and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message

from ferrule_server.api.rpc.calls import Context, cancel
from ferrule_server.api.rpc.observe import current_call
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.api.rpc.status import fault_of
from ferrule_server.api.streams.replies import Frame, Replies
from ferrule_server.api.streams.writer import Writer
from ferrule_server.engine.engine import Engine
from ferrule_server.engine.jobs import Job, Outcome, StreamJob
from ferrule_server.errors import FerruleError


class AnswerStream:
    """One call of Generate or Forward; also the sink of its job.

    Invariant: until the call has ended, each delivered row waits in ``replies`` or is written and counted in
    ``Window.taken_bytes``. After that nothing more is delivered, and a job that is not over is cancelled.

    Args:
        rpc: The method.
        state: The server.
        engine: Runs the job.
        context: The call.
        job: The request.
        replies: Turns the frames of the job into messages.
    """

    def __init__(
        self,
        rpc: str,
        state: ServerState,
        engine: Engine,
        context: Context,
        *,
        job: StreamJob[object],
        replies: Replies,
    ) -> None:
        self._rpc = rpc
        self._engine = engine
        self._job = job
        self._replies = replies
        self._writer = Writer(rpc, state, context)
        self.caller = self._writer.caller
        self._call = current_call()
        self._is_over = False
        self._failure: FerruleError | None = None

    async def run(self) -> None:
        """Serve the call until everything is written or an error ends it; see :meth:`Writer.run`."""
        if self._call is not None:
            self._call.record_job(self._job)
        self._engine.submit([(self._job, self)])
        await self._writer.run(self)

    def end(self, error: FerruleError | None) -> None:
        """End the call with ``error``, or with OK if it is None. Later calls change nothing."""
        self._writer.end(error)

    def is_quiet(self, quiet_s: float) -> bool:  # noqa: ARG002  (the job is under way until the call ends)
        """Return False: a call with one request is never idle."""
        return False

    def messages(self) -> Iterator[Message | None]:
        """Yield the replies, then raise the error of the job if it failed."""
        while True:
            reply = self._replies.next()
            if reply is not None:
                self.caller.check()
                yield reply.message
                self._take(reply.num_rows)
            elif not self._is_over:
                yield None
            elif self._failure is not None:
                raise self._failure
            else:
                return

    def abandon(self) -> None:
        """Cancel the job unless it is over: it stops within a step."""
        if not self._is_over:
            cancel(self._job)
            self._engine.resume(self._job)  # a parked job must learn of it
        self._replies.refusals.log(is_last=True)

    # ---- engine side ------------------------------------------------------------------------------------------------

    def deliver(self, job: Job[object], outcome: Outcome) -> None:  # noqa: ARG002  (there is one job)
        """Take the next frame, or the error that ends the call once the frames before it are written."""
        if self._writer.is_ended:
            self._is_over = self._is_over or not isinstance(outcome, Frame) or outcome.is_last
            return
        try:
            if isinstance(outcome, FerruleError):
                self._is_over, self._failure = True, outcome
            else:
                assert isinstance(outcome, Frame)
                self._replies.add(outcome)
                if self._call is not None:
                    self._call.record_outcome(outcome)
                self._is_over = outcome.is_last
        except Exception as failure:  # noqa: BLE001  (fault_of logs it)
            self.end(fault_of(failure, self._rpc))

    def flush(self) -> None:
        """Wake the writer."""
        self._replies.refusals.log(is_last=self._is_over)
        self._writer.has_news.set()

    # ---- client side ------------------------------------------------------------------------------------------------

    def _take(self, num_rows: int) -> None:
        """Count rows as taken; resume the job if it may have found the window closed.

        The engine adds to ``sent_bytes`` before it checks the window. Here ``taken_bytes`` changes before
        ``sent_bytes`` is read. So at least one of the two sides sees the change of the other.
        """
        window = self._job.window
        taken_before = window.taken_bytes
        window.taken_bytes = taken_before + num_rows * self._job.row_bytes
        if window.sent_bytes - taken_before >= window.limit_bytes and window.is_open:
            self._engine.resume(self._job)
