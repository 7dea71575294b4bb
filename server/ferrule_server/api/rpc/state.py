"""What the wire ring knows of the server: its phase, and the parts that exist once the model is loaded."""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.requests.inputs import InputReader
from ferrule_server.api.rpc.call_counts import CallCounts
from ferrule_server.api.security.principal import Caller
from ferrule_server.engine.jobs import Job, Sink, StreamJob
from ferrule_server.engine.metrics.counters import EngineSnapshot, OwnFigures
from ferrule_server.engine.shares import Shares
from ferrule_server.errors import Draining, FerruleError, Starting
from ferrule_server.executor.base import Executor, ExecutorInfo, ExecutorState, PipelinedExecutor
from ferrule_server.kv.metrics import KvMetrics
from ferrule_server.quotas import LimitsOf, unlimited

if TYPE_CHECKING:
    from ferrule_server.text.chat_template import ChatTemplate
    from ferrule_server.text.tokenizer import Tokenizer


class EngineApi(Protocol):
    """What the wire ring uses of the engine."""

    info: ExecutorInfo

    def submit(self, entries: list[tuple[Job[object], Sink]]) -> None:
        """Hand over jobs that arrived together."""
        ...

    def resume(self, job: StreamJob[object]) -> None:
        """Let a job go on that may have found its window closed, or that was cancelled."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """Return the engine's state now, a copy."""
        ...

    def num_free_blocks(self) -> int:
        """Return the free blocks of the pool now: what most answers say, at a fraction of a snapshot's cost."""
        ...

    def own_figures(self, principal: str) -> OwnFigures:
        """Return what is counted for one principal."""
        ...

    def kv_metrics(self) -> KvMetrics:
        """Return what the KV pool counts, and how it stands now."""
        ...


class Phase(enum.Enum):
    """Where the server is in its life.

    STARTING, READY, DRAINING, CLOSING, in this order, then the process ends; FAILED in the place of any but the first.
    DRAINING refuses new prompts and serves live handles, forks of them too. CLOSING takes nothing more and answers
    what it has taken. FAILED has nothing left to answer.
    """

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    CLOSING = "closing"
    FAILED = "failed"


class Ending(Protocol):
    """Something long-lived that the server may have to end: an open stream.

    Attributes:
        caller: Who opened it.
    """

    caller: Caller

    def is_quiet(self, quiet_s: float) -> bool:
        """Whether nothing is under way or waits to be written, and nothing was for ``quiet_s`` seconds."""
        ...

    def end(self, error: FerruleError) -> None:
        """End with ``error``; further calls change nothing."""
        ...


def _no_state() -> None:
    """Return what an executor that prepares nothing has to say."""


def state_of(executor: Executor) -> Callable[[], ExecutorState | None]:
    """Return what tells how an executor is doing; of one that prepares nothing it tells None."""
    if isinstance(executor, PipelinedExecutor):
        return lambda: executor.state
    return _no_state


@dataclass(frozen=True, slots=True)
class Serving:
    """What exists once the model is loaded.

    Attributes:
        engine: Runs jobs.
        inputs: Reads requests for this model.
        tokenizer: None where the model has none.
        max_step_rows: Most rows in one step.
        chat_template: None where the model has none.
        has_prefix_cache: Prompts find the blocks of released sequences again.
        is_deterministic: Logits do not depend on what else is in a step.
        executor_state: Returns how an executor that prepares things is doing, None for one that does not; cheap.
    """

    engine: EngineApi
    inputs: InputReader
    tokenizer: Tokenizer | None
    max_step_rows: int
    chat_template: ChatTemplate | None = None
    has_prefix_cache: bool = True
    is_deterministic: bool = False
    executor_state: Callable[[], ExecutorState | None] = _no_state


@dataclass(slots=True)
class ServerState:
    """The server as its servicers see it. Changed on the event loop's thread; load progress from any.

    Invariant: in the phase READY ``serving`` is set; once set it stays the same.

    Attributes:
        instance: Name of this server, first part of every ``cache_id``.
        epoch: New with every run, second part of every ``cache_id``.
        version: Of the server.
        limits: Of the wire.
        limits_of: Quotas of each principal.
        load_progress: From 0 to 1. load_stage: what is being loaded.
        start_ns: When the process began to serve, by the wall clock. started_at_s: the same on ``time.monotonic``.
        num_active: Unary calls under way. streams: Streams under way.
        cohorts: A number for each request whose jobs are to share a step, never the same one twice.
        calls: Counts every call.
        shares: Who may work on the event loop next; the engine writes into it too.
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
        """Live sequences; none after a fault, which has lost them all."""
        if self.serving is None:
            return 0
        snapshot = self.serving.engine.snapshot()
        return 0 if snapshot.is_failed else snapshot.num_sequences

    def ready(self, serving: Serving) -> None:
        """Take calls from now on."""
        self.serving = serving
        self.phase = Phase.READY

    def use(self) -> Serving:
        """Return the parts that calls on existing sequences need.

        Raises:
            Starting: The model is not loaded yet.
            Draining: The server takes nothing any more.
        """
        serving = self.describe()
        if self.phase in (Phase.CLOSING, Phase.FAILED):
            raise Draining
        return serving

    def describe(self) -> Serving:
        """Return the parts that calls need which only look: they are answered as long as the process is there.

        Raises:
            Starting: The model is not loaded yet.
            Draining: Nor will it be.
        """
        if self.serving is None:
            raise Starting if self.phase is Phase.STARTING else Draining
        return self.serving

    def use_for_new(self) -> Serving:
        """Return the parts that new prompts need. Branches of live sequences are none: they need :meth:`use`.

        Raises:
            Starting: The model is not loaded yet.
            Draining: The server takes no new prompts any more.
        """
        if self.phase is Phase.DRAINING:
            raise Draining
        return self.use()

    def end_withdrawn_streams(self) -> None:
        """End the streams whose callers' credentials have been withdrawn, also those that nothing happens on."""
        for stream in list(self.streams):
            try:
                stream.caller.check()
            except FerruleError as error:
                stream.end(error)

    def end_streams(self, error: FerruleError) -> None:
        """End every open stream with ``error``."""
        for stream in list(self.streams):
            stream.end(error)

    def end_quiet_streams(self, quiet_s: float, error: FerruleError) -> None:
        """End the streams that have been quiet for ``quiet_s`` seconds with ``error``."""
        for stream in list(self.streams):
            if stream.is_quiet(quiet_s):
                stream.end(error)
