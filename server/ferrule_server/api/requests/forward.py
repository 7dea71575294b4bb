"""Reads ForwardRequest: tokens whose rows are wanted, in chunks that fit into messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ferrule.v1 import executor_pb2
from ferrule_server.api.requests.fields import FieldReader
from ferrule_server.api.requests.planned import PlannedForward
from ferrule_server.api.requests.policy import NO_ROWS, OutputPlan, PolicyReader, is_empty
from ferrule_server.engine.jobs import ForwardJob, Pooling, Window
from ferrule_server.errors import InvalidRequest

_POOLINGS: Final[Mapping[int, Pooling]] = {
    executor_pb2.HIDDEN_POOLING_UNSPECIFIED: Pooling.NONE,
    executor_pb2.HIDDEN_POOLING_MEAN: Pooling.MEAN,
    executor_pb2.HIDDEN_POOLING_LAST: Pooling.LAST,
}


class ForwardReader:
    """Turns requests for rows without a cache into jobs.

    Args:
        fields: Reads what they have in common with others.
        policies: Reads what comes with each row.
        max_step_rows: Most rows in one step.
    """

    def __init__(self, fields: FieldReader, policies: PolicyReader, max_step_rows: int) -> None:
        self._fields = fields
        self._policies = policies
        self._max_step_rows = max_step_rows

    def read(self, request: executor_pb2.ForwardRequest, principal: str) -> PlannedForward:
        """Return the job of a Forward.

        Raises:
            InvalidRequest, TokenOutOfVocab, ReplyTooLarge, ContextExceeded: A field is out of its range.
            MaskUnknown: A mask is not registered.
        """
        token_ids = self._fields.token_ids(request.input_ids, "", "input_ids")
        if not token_ids:
            raise InvalidRequest("input_ids", "needs at least one token")
        self._fields.check_request_id(request.request_id, "")
        pooling = _POOLINGS.get(request.hidden_pooling)
        if pooling is None:
            raise InvalidRequest("hidden_pooling", f"{request.hidden_pooling} is no HiddenPooling")
        plan = self._plan(request, pooling, principal)
        chunk_rows = self._chunk_rows(plan.row_bytes, len(token_ids))
        window = Window(max(self._fields.limits.stream_window_bytes, 2 * chunk_rows * plan.row_bytes))
        job = ForwardJob(
            principal,
            token_ids,
            plan.output,
            window,
            chunk_rows,
            plan.row_bytes,
            pooling,
            request.request_id,
        )
        return PlannedForward(job, plan)

    def _plan(self, request: executor_pb2.ForwardRequest, pooling: Pooling, principal: str) -> OutputPlan:
        """Return what comes with each row: nothing, where the pooled vector is all that is asked for."""
        policy = request.logits_policy
        if pooling is Pooling.NONE:
            if policy.none:
                raise InvalidRequest("logits_policy.none", "nothing is kept and nothing would be returned")
        elif policy.none or is_empty(policy):
            self._policies.read(policy, "", principal)
            return OutputPlan(replace(NO_ROWS.output, all_positions=True), NO_ROWS.dtype, 0)
        plan = self._policies.read(policy, "", principal, all_positions=True)
        self._fields.check_reply(self._fields.reply_bytes(1, plan.row_bytes, request.request_id), "logits_policy")
        return plan

    def _chunk_rows(self, row_bytes: int, num_tokens: int) -> int:
        """Return the most rows of one frame: one at least, however large a row is."""
        fitting = self._fields.limits.max_stream_frame_bytes // max(1, row_bytes)
        return max(1, min(fitting, self._max_step_rows, num_tokens))
