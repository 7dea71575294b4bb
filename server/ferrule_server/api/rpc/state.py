"""The state of the server that all calls share: its phase, and the parts that exist once the model is loaded."""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.requests.inputs import InputReader
from ferrule_server.api.rpc.call_counts import CallCounts
from ferrule_server.api.security.principal import Caller
from ferrule_server.engine.engine import Engine
from ferrule_server.engine.jobs import AppendJob
from ferrule_server.errors import Draining, FerruleError, Starting
from ferrule_server.executor.base import Executor, ExecutorState, ReportingExecutor
from ferrule_server.fairness.turns import Shares
from ferrule_server.quotas import LimitsOf, unlimited

if TYPE_CHECKING:
    from ferrule_server.text.chat_template import ChatTemplate


class Phase(enum.Enum):
    """The phase of the server.

    The phases are STARTING, READY, DRAINING and CLOSING, in this order; then the process ends. FAILED can replace each
    of them but the first. A server that is DRAINING refuses new prompts and serves live handles and their forks. One
    that is CLOSING takes no more calls and answers those it has taken. One that has FAILED has nothing left to answer.
    """

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    CLOSING = "closing"
    FAILED = "failed"


class Ending(Protocol):
    """An open stream, which the server may have to end.

    Attributes:
        caller: The caller that opened it.
    """

    caller: Caller

    def is_quiet(self, quiet_s: float) -> bool:
        """Whether the stream has had nothing to do and nothing to write for ``quiet_s`` seconds."""
        ...

    def end(self, error: FerruleError) -> None:
        """End the stream with ``error``; further calls change nothing."""
        ...


def state_of(executor: Executor) -> Callable[[], ExecutorState | None]:
    """Return a function that reads the state of an executor; it returns None if that never changes."""
    return (lambda: executor.state) if isinstance(executor, ReportingExecutor) else lambda: None


@dataclass(frozen=True, slots=True)
class Serving:
    """The parts that exist once the model is loaded.

    Attributes:
        engine: Runs jobs.
        inputs: Reads requests for this model.
        chat_template: None if the model has none.
        has_prefix_cache: Prompts share the blocks of released sequences.
        is_deterministic: The server runs only while logits do not depend on the other rows of a step.
        executor_state: Returns the state of an executor whose state changes, None for any other; cheap.
    """

    engine: Engine
    inputs: InputReader
    chat_template: ChatTemplate | None = None
    has_prefix_cache: bool = True
    is_deterministic: bool = False
    executor_state: Callable[[], ExecutorState | None] = lambda: None


@dataclass(slots=True)
class ServerState:
    """The server as its servicers see it. Changed on the thread of the event loop; load progress from any thread.

    Invariant: ``serving`` is set in the phase READY, and never changes once it is set.

    Attributes:
        instance: Name of this server, first part of every ``cache_id``.
        epoch: New with every run, second part of every ``cache_id``.
        version: Version of the server.
        limits: Limits of messages and streams.
        limits_of: Quotas of each principal.
        load_progress: From 0 to 1.
        load_stage: What is being loaded.
        start_ns: When the process began to serve, by the wall clock.
        started_at_s: The same time on ``time.monotonic``.
        num_active: Unary calls under way.
        streams: Streams under way.
        cohorts: A unique number for each request whose jobs run in one step.
        calls: Counts every call.
        shares: The work of each principal on the event loop; the engine adds to it too.
    """

    instance: str
    epoch: str
    version: str
    limits: ApiLimits
    limits_of: LimitsOf = unlimited
    phase: Phase = Phase.STARTING
    serving: Serving | None = None
    load_progress: float = 0.0
    load_stage: str = "starting"
    start_ns: int = field(default_factory=time.time_ns)
    started_at_s: float = field(default_factory=time.monotonic)
    num_active: int = 0
    streams: set[Ending] = field(default_factory=set)
    cohorts: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    calls: CallCounts = field(default_factory=CallCounts)
    shares: Shares = field(default_factory=Shares)

    @property
    def num_sequences(self) -> int:
        """Live sequences; 0 after a fault, which loses them all."""
        if self.serving is None:
            return 0
        snapshot = self.serving.engine.snapshot()
        return 0 if snapshot.is_failed else snapshot.num_sequences

    @property
    def num_ending(self) -> int:
        """Live sequences that end with the process, so a drain waits for them.

        Durable ones continue in the next, unless the journal is lost: then only this process has what they are.
        """
        if self.serving is None:
            return 0
        snapshot = self.serving.engine.snapshot()
        num_kept = 0 if self.serving.engine.is_journal_lost else snapshot.num_durable
        return 0 if snapshot.is_failed else snapshot.num_sequences - num_kept

    def ready(self, serving: Serving) -> None:
        """Enter the phase READY."""
        self.serving = serving
        self.phase = Phase.READY

    def use(self) -> Serving:
        """Return the parts that calls on existing sequences need.

        Raises:
            Starting: The model is not loaded yet.
            Draining: The server takes no more calls.
        """
        serving = self.describe()
        if self.phase in (Phase.CLOSING, Phase.FAILED):
            raise Draining
        return serving

    def describe(self) -> Serving:
        """Return the parts that read-only calls need; these are answered for as long as the process runs.

        Raises:
            Starting: The model is not loaded yet.
            Draining: The model will not be loaded.
        """
        if self.serving is None:
            raise Starting if self.phase is Phase.STARTING else Draining
        return self.serving

    def use_for_new(self) -> Serving:
        """Return the parts that new prompts need. Forks of live sequences need :meth:`use` only.

        Raises:
            Starting: The model is not loaded yet.
            Draining: The server takes no more prompts.
        """
        if self.phase is Phase.DRAINING:
            raise Draining
        return self.use()

    def as_cohort(self, jobs: Iterable[AppendJob]) -> None:
        """Mark jobs that the client has scheduled together: they run in one step while no other principal decodes."""
        cohort = next(self.cohorts)
        for job in jobs:
            job.cohort = cohort

    def end_withdrawn_streams(self) -> None:
        """End the streams whose callers' credentials have been withdrawn, including idle ones."""
        for stream in list(self.streams):
            try:
                stream.caller.check()
            except FerruleError as error:
                stream.end(error)

    def end_streams(self, error: FerruleError, quiet_s: float | None = None) -> None:
        """End every stream, or those that have had nothing to do and nothing to write for ``quiet_s`` seconds."""
        for stream in list(self.streams):
            if quiet_s is None or stream.is_quiet(quiet_s):
                stream.end(error)
