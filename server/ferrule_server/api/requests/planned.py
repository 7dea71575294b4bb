"""Requests read: a job ready for the engine, and how what comes of it is written."""

from __future__ import annotations

from dataclasses import dataclass

from ferrule_server.api.requests.policy import OutputPlan
from ferrule_server.engine.jobs import AppendJob, ForwardJob, GenerateJob
from ferrule_server.errors import FerruleError, InvalidRequest, SeedRequired


@dataclass(eq=False, slots=True)
class PlannedAppend:
    """An append ready for the engine, and how its result is written. Not frozen: that would double its cost.

    Attributes:
        job: For the engine.
        plan: For ``outputs``.
        reply_bytes: Upper bound of what the result takes on the wire.
        at: Path of the input in its request, with a dot behind it.
        seq: The client's number of a stream item.
        kind: Which of the inputs of a stream item it is.
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
        return error


@dataclass(frozen=True, slots=True)
class PlannedGenerate:
    """A Generate ready for the engine, and how its frames are written.

    Attributes:
        job: For the engine; ``job.window`` and ``job.row_bytes`` say how far it may run ahead.
        plan: For ``outputs``.
        returns_text: Each frame brings the text that its tokens add.
        skips_special_tokens: That text leaves special tokens out.
    """

    job: GenerateJob
    plan: OutputPlan
    returns_text: bool = False
    skips_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class PlannedForward:
    """A Forward ready for the engine, and how its frames are written.

    Attributes:
        job: For the engine; ``job.window`` and ``job.row_bytes`` say how far it may run ahead.
        plan: For ``outputs``.
    """

    job: ForwardJob
    plan: OutputPlan
