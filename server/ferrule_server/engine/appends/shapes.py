"""Forks and truncates: they take their turn in the lane of a sequence, and touch no device.

Both judge leases at ``at``, the job's time of arrival on the store's clock, and raise:

    HandleUnknown, HandleExpired, EpochChanged, WrongInstance     The handle names no sequence here.
    HandleStale, TruncateBeyond, KvGivenBack                      The request does not fit the sequence.
    QuotaExceeded, BlocksExhausted                                There is no room; nothing changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ferrule_server.engine.jobs import ForkJob, ForkResult, TruncateJob, TruncateResult
from ferrule_server.errors import FerruleError
from ferrule_server.kv.append_rule import check_handle
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.sequence_store import SequenceStore


@dataclass(frozen=True, slots=True)
class Shapes:
    """Forks and truncates the sequences of one store.

    Args:
        store: The sequences; called from the engine thread only.
    """

    store: SequenceStore

    def repeat_fork(self, job: ForkJob, handles: tuple[Handle, ...], at: float) -> ForkResult:
        """Answer a fork again with the handles that it created, and renew the leases of the live ones.

        Each lease keeps its duration.

        Raises:
            HandleUnknown, HandleExpired: None of them is live; this is the error of the first one.
        """
        granted: list[float] = []
        gone: list[FerruleError] = []
        for handle in handles:
            try:
                granted.append(self.store.renew(self.store.resolve(handle, job.principal, at)))
            except FerruleError as error:
                gone.append(error)
        if not granted:
            raise gone[0]
        return ForkResult(handles, min(granted), replayed=True)

    def fork(self, job: ForkJob, at: float) -> ForkResult:
        """Create new sequences that share the first tokens of one."""
        sequence = self.store.resolve(job.handle, job.principal, at)
        check_handle(sequence, job.handle)
        branches = self.store.fork(sequence, job.length, job.count, job.ttl_s)
        return ForkResult(tuple(branch.handle_at() for branch in branches), branches[0].ttl_s)

    def truncate(self, job: TruncateJob, at: float) -> TruncateResult:
        """Shorten a sequence."""
        sequence = self.store.resolve(job.handle, job.principal, at)
        freed_blocks = self.store.truncate(sequence, job.handle, job.new_length)
        return TruncateResult(sequence.handle_at(), freed_blocks)
