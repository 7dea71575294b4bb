"""BatchPrefill, BatchDecode and UnifiedDecode: many items handed over together, answered together, failing alone.

What is wrong with an item, or refused by the engine, is in that item's result. What would make the reply as a whole
too large is refused before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ferrule_server.api.receiving.turns import Turns
from ferrule_server.api.requests.planned import PlannedAppend
from ferrule_server.api.rpc.calls import admit_new, run_jobs
from ferrule_server.api.rpc.refusals import Refusals
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.api.rpc.status import to_status
from ferrule_server.engine.engine import Engine
from ferrule_server.engine.jobs import AppendResult
from ferrule_server.errors import FerruleError, ReplyTooLarge

_RESULT_BYTES: Final = 512
"""What an error takes in a reply; the reader counts what an output takes."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The items of one call, and how they are read and answered.

    Attributes:
        rpc: The method.
        field: Path of the items in the request.
        items: PrefillInput, DecodeInput or UnifiedBatchItem messages; Any, since they have no type in common.
        results: Where results are added, one for each item, in item order.
        read: Makes the job of an item, from the message and its path with a dot behind it.
        fill: Writes the output of an item that ran.
    """

    rpc: str
    field: str
    items: Sequence[Any]
    results: Any
    read: Callable[[Any, str], PlannedAppend]
    fill: Callable[[Any, AppendResult, PlannedAppend], None]

    async def run(self, state: ServerState, engine: Engine, principal: str) -> None:
        """Run the items and write their results.

        Raises:
            ReplyTooLarge: All results together would pass the limit of one message; nothing was run.
        """
        planned = await self._plan(state)
        self._check_reply(planned, state.limits.max_reply_bytes)
        jobs = [each.job for each in planned if isinstance(each, PlannedAppend)]
        cohort = next(state.cohorts)
        for job in jobs:
            job.cohort = cohort
        outcomes = iter(await run_jobs(engine, jobs))
        refusals = Refusals(self.rpc, principal)
        turns = Turns()
        for index, each in enumerate(planned):
            outcome = next(outcomes) if isinstance(each, PlannedAppend) else each
            self._write(index, each, outcome, refusals, state.limits.max_request_id_bytes)
            await turns.pause()
        refusals.log()

    async def _plan(self, state: ServerState) -> list[PlannedAppend | FerruleError]:
        """Read the items; what is wrong with one stands in its place."""
        planned: list[PlannedAppend | FerruleError] = []
        turns = Turns()
        for index, item in enumerate(self.items):
            await turns.pause()
            try:
                each = self.read(item, f"{self.field}[{index}].")
                admit_new(state, each.job)
            except FerruleError as error:
                state.calls.refuse_item(error.reason)
                planned.append(error)
            else:
                planned.append(each)
        return planned

    def _check_reply(self, planned: Sequence[PlannedAppend | FerruleError], limit_bytes: int) -> None:
        reply_bytes = sum(each.reply_bytes if isinstance(each, PlannedAppend) else _RESULT_BYTES for each in planned)
        if reply_bytes > limit_bytes:
            raise ReplyTooLarge(self.field, reply_bytes, limit_bytes)

    def _write(
        self,
        index: int,
        planned: PlannedAppend | FerruleError,
        outcome: object,
        refusals: Refusals,
        max_id_bytes: int,
    ) -> None:
        """Write the result of one item."""
        request_id = self.items[index].request_id
        is_echoed = len(request_id.encode()) <= max_id_bytes
        result = self.results.add(seq=index, request_id=request_id if is_echoed else "")
        if isinstance(outcome, FerruleError):
            error = planned.refusal(outcome) if isinstance(planned, PlannedAppend) else outcome
            refusals.add(error)
            result.error.CopyFrom(to_status(error))
        else:
            assert isinstance(planned, PlannedAppend)
            assert isinstance(outcome, AppendResult)
            self.fill(result.output, outcome, planned)
