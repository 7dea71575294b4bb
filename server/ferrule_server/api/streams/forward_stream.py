"""Forward: stretches of rows of the engine to messages, one for each."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from ferrule.v1 import executor_pb2, types_pb2
from ferrule_server.api.requests.policy import OutputPlan
from ferrule_server.api.responses.outputs import fill_rows
from ferrule_server.api.streams.answer_stream import Frame, Reply
from ferrule_server.engine.jobs import ForwardFrame
from ferrule_server.executor.base import Float32Array

_LITTLE_ENDIAN_FLOAT32: Final = np.dtype("<f4")


class ForwardReplies:
    """Frames of one Forward on their way to the client.

    Args:
        plan: How rows are written.
        request_id: The request's.
    """

    def __init__(self, plan: OutputPlan, request_id: str) -> None:
        self._plan = plan
        self._request_id = request_id
        self._waiting: deque[ForwardFrame] = deque()

    def add(self, frame: Frame) -> None:
        """Take the next frame of the engine."""
        assert isinstance(frame, ForwardFrame)
        self._waiting.append(frame)

    def next(self) -> Reply | None:
        """Return the message of the next frame; None: none waits."""
        if not self._waiting:
            return None
        frame = self._waiting.popleft()
        timing = frame.timing
        response = executor_pb2.ForwardResponse(
            request_id=self._request_id,
            first_position=frame.first_position,
            timing=types_pb2.Timing(queue_ns=timing.queue_ns, run_ns=timing.run_ns, step_rows=timing.step_rows),
            is_last=frame.is_last,
        )
        if frame.rows:
            fill_rows(response.outputs, frame.rows, frame.seed, self._plan)
        if frame.pooled is not None:
            response.pooled_hidden_state.CopyFrom(_vector(frame.pooled))
        return Reply(response, len(frame.rows))


def _vector(values: Float32Array) -> types_pb2.Tensor:
    """Return one vector as it is sent."""
    data = values.astype(_LITTLE_ENDIAN_FLOAT32, copy=False).tobytes()
    return types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=[len(values)], data=data)
