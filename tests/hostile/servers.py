"""Servers under attack: how they are started, how much memory they take, and what they logged."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol

import psutil

from ferrule.v1 import executor_pb2, executor_pb2_grpc, info_pb2, policy_pb2, types_pb2
from tests.chaos.server_process import ServerProcess
from tests.hostile.verdicts import Campaign

ATTACKER = "mallory"
VICTIMS = ("alice", "bob")
PROBER = "carol"
ATTACKER_QUOTAS = "handles=64 kv_tokens=20000 queued_rows=2048 prefill_rate=20000 retained=16MiB mask_bytes=64MiB"
NOTHING = policy_pb2.LogitsReturnPolicy()
MIB = 1 << 20
_BASE = ("--executor=torch", "--dtype=float32", "--kv-memory=128MiB", "--max-ttl=1h")
_DIRTY = re.compile(r"\b(Traceback \(most recent call last\)|INTERNAL|ENGINE_FAULT)")


class Server(Protocol):
    """What is under attack: a server, or what stands in front of one.

    Attributes:
        stub: For calls of the measuring process.
    """

    stub: executor_pb2_grpc.ModelExecutorServiceStub

    @property
    def target(self) -> str:
        """Its address for clients."""


def bearer(principal: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a principal, whose token is its name."""
    return (("authorization", f"Bearer {principal}"),)


def token_file(folder: Path, attacker_quotas: str = ATTACKER_QUOTAS) -> Path:
    """Write a token file with the victims, without quotas, and the attacker, with quotas."""
    path = folder / f"tokens-{hashlib.sha256(attacker_quotas.encode()).hexdigest()[:8]}"
    quotas = {ATTACKER: attacker_quotas, **dict.fromkeys((*VICTIMS, PROBER), "")}
    lines = (f"{hashlib.sha256(name.encode()).hexdigest()} {name} {line}".rstrip() for name, line in quotas.items())
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(0o600)
    return path


@contextmanager
def serving(campaign: Campaign, name: str, *arguments: str, base: Sequence[str] = _BASE) -> Iterator[ServerProcess]:
    """Run a server of its own for an attack; its log is kept. It is killed at the end, whatever it is busy with."""
    log = campaign.folder / f"{name}-{len(campaign.logs)}.log"
    campaign.logs.append(log)
    server = ServerProcess(log, *base, *arguments)
    server.start()
    try:
        yield server
    finally:
        server.channel.close()
        server.kill()


def capabilities(server: ServerProcess, principal: str) -> info_pb2.ExecutorCapabilities:
    """Return what the server tells this principal that it can do."""
    request = executor_pb2.GetCapabilitiesRequest()
    return server.stub.GetCapabilities(request, metadata=bearer(principal), timeout=20).capabilities


def prefill(
    server: Server, principal: str, token_ids: Sequence[int], timeout_s: float = 20.0
) -> types_pb2.KvCacheHandle:
    """Make a sequence that lives as long as the server allows."""
    message = executor_pb2.PrefillInput(input_ids=token_ids, logits_policy=NOTHING)
    message.cache.ttl.FromSeconds(3600)
    request = executor_pb2.PrefillRequest(input=message)
    return server.stub.Prefill(request, metadata=bearer(principal), timeout=timeout_s).output.kv_cache


class MemoryWatch:
    """Samples the resident size of a process while it is entered.

    Args:
        process: Whom to watch.
        limit_bytes: The process is killed when it grows by more than this, to spare the machine.
        before_kill: Called just before that.

    Attributes:
        was_killed: Whether that happened.
    """

    def __init__(
        self, process: psutil.Process, limit_bytes: int = 3 << 30, before_kill: Callable[[], None] | None = None
    ) -> None:
        self._process = process
        self._limit_bytes = limit_bytes
        self._before_kill = before_kill or (lambda: None)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.first_bytes = self.largest_bytes = process.memory_info().rss
        self.was_killed = False

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(0.02):
            try:
                self.largest_bytes = max(self.largest_bytes, self._process.memory_info().rss)
                if self.largest_bytes - self.first_bytes > self._limit_bytes:
                    self._before_kill()
                    self._process.kill()
                    self.was_killed = True
                    return
            except psutil.NoSuchProcess:
                return

    @property
    def grown_bytes(self) -> int:
        """By how much the process grew at most."""
        return int(self.largest_bytes - self.first_bytes)

    @property
    def grown_mib(self) -> float:
        """The same in MiB."""
        return round(self.grown_bytes / MIB, 1)


def dirty_lines(logs: Sequence[Path]) -> list[str]:
    """Return the lines of logs that speak of an internal error or begin a traceback."""
    return [
        f"{path.name}: {line[:200]}"
        for path in logs
        if path.exists()
        for line in path.read_text(errors="replace").splitlines()
        if _DIRTY.search(line)
    ]


def sleep_until(when_s: float) -> None:
    """Sleep until a time of the monotonic clock."""
    time.sleep(max(0.0, when_s - time.monotonic()))
