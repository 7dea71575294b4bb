"""An append that was read: its job for the engine, and how its result is written."""

from __future__ import annotations

from dataclasses import dataclass

from ferrule_server.api.requests.policy import OutputPlan
from ferrule_server.engine.jobs import AppendJob
from ferrule_server.errors import FerruleError, InvalidRequest, RequestIdReused, SeedRequired


@dataclass(eq=False, slots=True)
class PlannedAppend:
    """An append that is ready for the engine. Not frozen: that would double its cost.

    Attributes:
        job: For the engine.
        plan: How its rows are written.
        reply_bytes: Upper bound of the size of the result on the wire.
        at: Path of the input in its request, with a dot at the end.
        seq: The client's number of a stream item.
        kind: The input of a stream item that is set: ``decode``, ``verify`` or ``unified``.
    """

    job: AppendJob
    plan: OutputPlan
    reply_bytes: int
    at: str
    seq: int = 0
    kind: str = "decode"

    def refusal(self, error: FerruleError) -> FerruleError:
        """Return an error of the engine as the client gets it: with the path of the field, if it concerns one."""
        if isinstance(error, SeedRequired):
            return InvalidRequest(f"{self.at}logits_policy.sample.seed", error.message)
        if isinstance(error, RequestIdReused):
            return RequestIdReused(error.request_id, self.at)
        return error
