"""A server in a process of its own, as people run it: what can be killed, frozen, watched and restarted."""

from __future__ import annotations

import contextlib
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import psutil

from ferrule.v1 import executor_pb2, executor_pb2_grpc, info_pb2
from tests.chaos.raw_clients import open_channel

_START_S = 300.0
_STOP_S = 20.0


class ServerProcess:
    """``python -m ferrule_server``. Enter it to start and wait until it is ready, leave it to end it.

    Args:
        log: Where its stderr goes.
        arguments: Of the command line, apart from ``--listen``.
        port: 0 lets the system choose; a restart needs the old one.
        program: Module to run in place of the server's.
    """

    def __init__(self, log: Path, *arguments: str, port: int = 0, program: str = "ferrule_server") -> None:
        self.log = log
        self._command = [sys.executable, "-m", program, *arguments]
        self.port = port

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.channel.close()
        self.stop()

    def start(self) -> None:
        """Start the process and wait until it serves; again after its end."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*self._command, "--listen", f"127.0.0.1:{self.port}"], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        is_ready, _, _ = select.select([self.process.stdout], [], [], _START_S)
        line = self.process.stdout.readline() if is_ready else ""
        found = re.search(r"^ready .*\blisten=127\.0\.0\.1:(\d+)", line)
        if found is None:
            self.kill()
            raise AssertionError(f"the server did not become ready: {line!r}\n{self.log.read_text()[-3000:]}")
        self.port = int(found[1])
        self.channel = open_channel(self.target)
        self.stub = executor_pb2_grpc.ModelExecutorServiceStub(self.channel)

    def stop(self) -> int:
        """Ask it to end (twice if need be) and return its exit code."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(_STOP_S if number is signal.SIGTERM else None)
        return self._reap()

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self._reap()

    def _reap(self) -> int:
        code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    @property
    def target(self) -> str:
        """Its address for clients."""
        return f"127.0.0.1:{self.port}"

    @property
    def watched(self) -> psutil.Process:
        """What the system knows of the process."""
        return psutil.Process(self.process.pid)

    def status(self) -> info_pb2.ExecutorStatus:
        """Return what it says about itself."""
        return self.stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=20).status

    @property
    def used_blocks(self) -> int:
        """Blocks of the pool that sequences hold."""
        capabilities = self.stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest(), timeout=20).capabilities
        return capabilities.total_blocks - self.status().free_blocks


def wait_for(what: str, holds: object, timeout_s: float, poll_s: float = 0.05) -> float:
    """Wait until ``holds()`` is true and return how many seconds that took."""
    assert callable(holds)
    started = time.monotonic()
    while not holds():
        waited = time.monotonic() - started
        assert waited < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(poll_s)
    return time.monotonic() - started
