"""An engine in this process, without gRPC: what the benchmarks compare the service with.

The engine, the KV store and the executor are those of the server, put together as it does; jobs are handed over and
waited for from this thread, one after the other.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from ferrule_server.engine.engine import Engine
    from ferrule_server.engine.jobs import AppendJob, AppendResult, Job, Outcome
    from ferrule_server.executor.base import Executor, OutputSpec
    from ferrule_server.kv.handle import Handle

PRINCIPAL = "benchmark"

_R = TypeVar("_R")


@dataclass(eq=False, slots=True)
class Inbox:
    """A sink that keeps outcomes until they are asked for."""

    outcomes: queue.SimpleQueue[tuple[Job[object], Outcome]] = field(default_factory=queue.SimpleQueue)

    def deliver(self, job: Job[object], outcome: Outcome) -> None:
        """Take the outcome of one job."""
        self.outcomes.put((job, outcome))

    def flush(self) -> None:
        """Nothing waits for the end of a step."""


class InProcess:
    """Runs jobs on an engine of this process and waits for them.

    Args:
        engine: Started, its ``post`` calling at once.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, jobs: Sequence[Job[_R]]) -> list[_R]:
        """Hand over jobs together and return their results in their order; raises what a job was refused with."""
        inbox = Inbox()
        self.engine.submit([(job, inbox) for job in jobs])
        outcomes = dict(inbox.outcomes.get() for _ in jobs)
        results = [outcomes[job] for job in jobs]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return cast("list[_R]", results)

    def append(self, jobs: Sequence[AppendJob]) -> list[AppendResult]:
        """Hand over appends together and return their results."""
        return self.run(jobs)

    def timed(self, jobs: Sequence[AppendJob]) -> tuple[list[AppendResult], float]:
        """Hand over appends together; return their results and the seconds until the last one came."""
        started = time.perf_counter()
        results = self.append(jobs)
        return results, time.perf_counter() - started

    def release(self, handles: Sequence[Handle]) -> None:
        """Give sequences back."""
        from ferrule_server.engine import host_calls

        self.run([host_calls.release(PRINCIPAL, tuple(handles))])


def append_job(tokens: Sequence[int], handle: Handle | None, spec: OutputSpec | None, **more: object) -> AppendJob:
    """Return an append of ``tokens`` that returns ``spec`` of its last row."""
    from ferrule_server.engine.jobs import AppendJob, OutputRequest

    return AppendJob(PRINCIPAL, tuple(tokens), handle, OutputRequest(spec), **more)  # type: ignore[arg-type]


def load_executor(folder: Path, *, kv_bytes: int, max_context: int, dtype: str = "auto") -> Executor:
    """Return the executor that the server would choose for a model folder, with as many threads as it would use."""
    from ferrule_server.config import ServerConfig
    from ferrule_server.loading import create_executor
    from ferrule_server.model.config_reader import read_config

    context = min(max_context, read_config(folder).max_positions)
    config = ServerConfig(model=str(folder), kv_memory_bytes=kv_bytes, max_context=context, dtype=dtype)
    return create_executor(config, lambda _stage, _share: None).executor


@contextmanager
def in_process(executor: Executor, *, max_step_rows: int = 512) -> Iterator[InProcess]:
    """Run an engine over ``executor``; closed at the end."""
    from ferrule_server.engine.assembly.assemble import Setup
    from ferrule_server.engine.engine import Engine
    from ferrule_server.engine.settings import EngineSettings
    from ferrule_server.kv.block_pool import BlockPool
    from ferrule_server.kv.sequence_store import SequenceStore

    info = executor.info
    store = SequenceStore(
        BlockPool(info.num_blocks, info.block_size),
        instance="benchmark",
        epoch="1",
        max_context=info.model.max_context,
        max_ttl_s=3600.0,
    )
    engine = Engine(Setup(executor, store, EngineSettings(max_step_rows=max_step_rows), lambda call: call()))
    engine.start()
    try:
        yield InProcess(engine)
    finally:
        engine.close()
