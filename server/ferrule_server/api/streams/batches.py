"""BatchPrefill, BatchDecode and UnifiedDecode: many items, submitted and answered together.

An item that is invalid, or that the engine refuses, has its error in its own result. If the reply as a whole could be
too large, the call is refused before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ferrule.v1 import executor_pb2
from ferrule_server.api.requests.planned import PlannedAppend
from ferrule_server.api.rpc.calls import Context, admit_new, run_jobs
from ferrule_server.api.rpc.refusals import Refusals
from ferrule_server.api.rpc.reply_limit import check_reply
from ferrule_server.api.rpc.state import ServerState, Serving
from ferrule_server.api.rpc.status import to_status
from ferrule_server.api.security.principal import principal_of
from ferrule_server.engine.jobs import AppendResult
from ferrule_server.errors import FerruleError
from ferrule_server.fairness.turns import Turns

Read = Callable[[Any, str, str], PlannedAppend]
"""Returns the job of an input, from its message, its path with a dot at the end, and the principal."""
Fill = Callable[[Any, AppendResult, PlannedAppend], None]
"""Writes the output of an input that ran."""
_RESULT_BYTES: Final = 512
"""Size of an error in a reply; the size of an output is known from its request."""

_Response = TypeVar(
    "_Response",
    executor_pb2.BatchPrefillResponse,
    executor_pb2.BatchDecodeResponse,
    executor_pb2.UnifiedDecodeResponse,
)


@dataclass(frozen=True, slots=True)
class Batch:
    """The items of one call.

    Attributes:
        rpc: The method.
        field: Path of the items in the request.
        items: PrefillInput, DecodeInput or UnifiedBatchItem messages; Any, since they have no type in common.
        read: Returns the job of an item.
        fill: Writes its output.
        is_cohort: The items are to run in one step.
    """

    rpc: str
    field: str
    items: Sequence[Any]
    read: Read
    fill: Fill
    is_cohort: bool = True

    async def run(self, state: ServerState, serving: Serving, context: Context, response: _Response) -> _Response:
        """Run the items and return ``response`` with one result for each item, in item order.

        Raises:
            ReplyTooLarge: All results together could be larger than the client accepts; nothing was run.
        """
        principal = principal_of(context)
        planned = await self._plan(state, principal)
        appends = [each for each in planned if isinstance(each, PlannedAppend)]
        if appends:
            largest = max(appends, key=lambda each: each.reply_bytes)
            num_bytes = sum(each.reply_bytes for each in appends) + _RESULT_BYTES * (len(planned) - len(appends))
            check_reply(context, num_bytes, f"{largest.at}logits_policy", state.limits.max_reply_bytes)
        jobs = [each.job for each in appends]
        if self.is_cohort:
            state.as_cohort(jobs)
        outcomes = iter(await run_jobs(serving.engine, jobs))
        refusals = Refusals(self.rpc, principal)
        turns = Turns()
        for each in planned:
            outcome = next(outcomes) if isinstance(each, PlannedAppend) else each
            self._write(response.results.add(), each, outcome, refusals)
            await turns.pause()
        refusals.log()
        response.free_blocks = serving.engine.num_free_blocks()
        return response

    async def _plan(self, state: ServerState, principal: str) -> list[PlannedAppend | FerruleError]:
        """Read the items; an invalid item is replaced by its error."""
        planned: list[PlannedAppend | FerruleError] = []
        turns = Turns()
        for index, item in enumerate(self.items):
            await turns.pause()
            try:
                each = self.read(item, f"{self.field}[{index}].", principal)
                admit_new(state, each.job)
            except FerruleError as error:
                state.calls.refuse_item(error.reason)
                planned.append(error)
            else:
                planned.append(each)
        return planned

    def _write(self, result: Any, planned: PlannedAppend | FerruleError, outcome: object, refusals: Refusals) -> None:
        """Write the result of one item."""
        if isinstance(outcome, FerruleError):
            error = planned.refusal(outcome) if isinstance(planned, PlannedAppend) else outcome
            refusals.add(error)
            result.error.CopyFrom(to_status(error))
        else:
            assert isinstance(planned, PlannedAppend)
            assert isinstance(outcome, AppendResult)
            self.fill(result.output, outcome, planned)
