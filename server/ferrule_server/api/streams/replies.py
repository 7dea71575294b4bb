"""Replies of Generate and Forward: from frames of the engine to messages.

Frames of Generate that are delivered together, or while a write is in flight, are merged: the rows of a branch become
one output with many rows and the newest of its handles. Frames of Forward become a message each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from google.protobuf.message import Message

from ferrule.v1 import executor_pb2, types_pb2
from ferrule_server.api.limits import LOOP_SLICE
from ferrule_server.api.requests.policy import OutputPlan
from ferrule_server.api.responses.outputs import encoded, fill_handle, fill_rows
from ferrule_server.api.rpc.refusals import Refusals
from ferrule_server.api.rpc.status import to_status
from ferrule_server.engine.jobs import BranchFrame, Finish, ForwardFrame, GenerateFrame, StepTiming
from ferrule_server.executor.base import RowOutput
from ferrule_server.text.drawn_text import BranchText

FINISH_REASONS: Final[Mapping[Finish, executor_pb2.FinishReason]] = {
    each: getattr(executor_pb2, f"FINISH_REASON_{each.name}") for each in Finish
}

_OUTPUT_BYTES: Final = 512
"""Size of an output without its rows: a handle, and perhaps an error."""

Frame = GenerateFrame | ForwardFrame


class Reply(NamedTuple):
    """A message to write, and the number of the engine's rows in it."""

    message: Message
    num_rows: int


@dataclass(eq=False, slots=True)
class GenerateReplies:
    """The replies of one Generate.

    Invariant: each branch's frames are written in their order; every row added is in exactly one reply.

    Attributes:
        plan: The requested fields of each row.
        request_id: The id of the request.
        max_reply_bytes: Rows are merged up to this size; a single output may be larger.
        refusals: Collects the errors of branches.
        new_text: Makes the text of a branch; None: no text is requested.
    """

    plan: OutputPlan
    request_id: str
    max_reply_bytes: int
    refusals: Refusals
    new_text: Callable[[], BranchText] | None = None
    _texts: dict[int, BranchText] = field(default_factory=dict)
    _waiting: deque[tuple[BranchFrame, StepTiming]] = field(default_factory=deque)

    def add(self, frame: Frame) -> None:
        """Take the next frame of the engine."""
        assert isinstance(frame, GenerateFrame)
        for branch in frame.branches:
            self._waiting.append((branch, frame.timing))
            if branch.error is not None:
                self.refusals.add(branch.error)

    def next(self) -> Reply | None:
        """Return a message with as many frames as fit; None: no frame waits."""
        if not self._waiting:
            return None
        response = executor_pb2.GenerateResponse(request_id=self.request_id)
        branches, num_rows = self._take(response.timing)
        for frames in branches.values():
            self._fill(response.outputs.add(), frames)
        return Reply(response, num_rows)

    def _take(self, timing: types_pb2.Timing) -> tuple[dict[int, list[BranchFrame]], int]:
        """Take the frames that fit into one message, by branch, and add up the times of their steps."""
        branches: dict[int, list[BranchFrame]] = {}
        num_bytes = num_rows = 0
        last: StepTiming | None = None
        waiting, row_bytes = self._waiting, self.plan.row_bytes
        while waiting:
            branch, measured = waiting[0]
            num_added = len(branch.rows)
            num_bytes += num_added * row_bytes + _OUTPUT_BYTES
            if branches and (num_bytes > self.max_reply_bytes or num_rows + num_added > LOOP_SLICE):
                break
            num_rows += num_added
            waiting.popleft()
            branches.setdefault(branch.index, []).append(branch)
            if measured is not last:
                _add_timing(timing, measured, is_first=last is None)
                last = measured
        return branches, num_rows

    def _fill(self, output: executor_pb2.GenerateOutput, frames: list[BranchFrame]) -> None:
        """Write the frames of one branch, from one or several steps."""
        first, newest = frames[0], frames[-1]
        output.index = first.index
        rows, handle = first.rows, first.handle
        if len(frames) > 1:
            rows = tuple(row for frame in frames for row in frame.rows)
            handle = next((frame.handle for frame in reversed(frames) if frame.handle is not None), None)
        if handle is not None:
            fill_handle(output.resume_from, handle)
        if rows:
            fill_rows(output.outputs, rows, first.seed, self.plan)
        if self.new_text is not None:
            output.text = self._text(first.index, rows, newest.finish)
        if first.cached_tokens:
            output.cached_tokens = first.cached_tokens
        if first.replayed:
            output.replayed = True
        if newest.finish is not None:
            output.finish_reason = FINISH_REASONS[newest.finish]
        if newest.error is not None:
            output.error.CopyFrom(to_status(newest.error))

    def _text(self, index: int, rows: tuple[RowOutput, ...], finish: Finish | None) -> str:
        """Return the text that rows add to a branch. A token that ends it adds none: it is not part of the answer."""
        assert self.new_text is not None
        if finish in (Finish.EOS, Finish.STOP_TOKEN):
            rows = rows[:-1]
        text = self._texts.get(index)
        if text is None:
            text = self._texts[index] = self.new_text()
        for row in rows:
            if row.token is not None:
                text.push(row.token)
        if finish is None:
            return text.take()
        del self._texts[index]
        return text.end(is_stopped=finish is Finish.STOP_SEQUENCE)


@dataclass(eq=False, slots=True)
class ForwardReplies:
    """The replies of one Forward: a message for each frame.

    Attributes:
        plan: The requested fields of each row.
        request_id: The id of the request.
        refusals: Stays empty: there are no branches.
    """

    plan: OutputPlan
    request_id: str
    refusals: Refusals
    _waiting: deque[ForwardFrame] = field(default_factory=deque)

    def add(self, frame: Frame) -> None:
        """Take the next frame of the engine."""
        assert isinstance(frame, ForwardFrame)
        self._waiting.append(frame)

    def next(self) -> Reply | None:
        """Return the message of the next frame; None: no frame waits."""
        if not self._waiting:
            return None
        frame = self._waiting.popleft()
        response = executor_pb2.ForwardResponse(
            request_id=self.request_id, first_position=frame.first_position, is_last=frame.is_last
        )
        _add_timing(response.timing, frame.timing, is_first=True)
        if frame.rows:
            fill_rows(response.outputs, frame.rows, frame.seed, self.plan)
        if (pooled := frame.pooled) is not None:
            tensor = response.pooled_hidden_state
            tensor.dtype = types_pb2.DATA_TYPE_FLOAT32
            tensor.shape.append(len(pooled))
            tensor.data = encoded(pooled, types_pb2.DATA_TYPE_FLOAT32)
        return Reply(response, len(frame.rows))


# Every member has
#   refusals: Refusals         the errors of branches, which are logged after each step
#   add(frame) -> None         takes the next frame of the engine, which is of the member's own kind
#   next() -> Reply | None     returns the next message, with as many waiting frames as fit; None: no frame waits
# None of them raises an error of ours.
Replies = GenerateReplies | ForwardReplies
"""Turns frames of the engine into messages. Used on the event loop only."""


def _add_timing(timing: types_pb2.Timing, measured: StepTiming, *, is_first: bool) -> None:
    """Add the times of one step to those of a message."""
    if is_first:
        timing.queue_ns = measured.queue_ns
    timing.run_ns += measured.run_ns
    timing.step_rows = measured.step_rows
