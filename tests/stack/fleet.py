"""Two servers behind a real Envoy, and clients that are busy."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Final

from ferrule import Cache, Client, FerruleError, Stream, greedy
from ferrule.types import Append, Status
from tests.chaos.server_process import ServerProcess
from tools.compose.envoy import EnvoyProcess

A, B = NAMES = ("ferrule-a", "ferrule-b")
SERVER: Final = (
    *("--executor", "paged-reference", "--kv-memory", "64MiB"),
    *("--log-level", "warning", "--drain-grace", "15s"),
)


class OwnFleet:
    """Servers with flags of their own, and the shipped configuration of Envoy.

    Attributes:
        servers: By instance.
        envoy: The proxy.
    """

    def __init__(self, folder: Path) -> None:
        self.servers = {name: ServerProcess(folder / f"{name}.log", *SERVER, "--instance", name) for name in NAMES}
        self._folder = folder

    def __enter__(self) -> OwnFleet:
        with contextlib.ExitStack() as stack:
            for server in self.servers.values():
                stack.enter_context(server)
            ports = {name: server.port for name, server in self.servers.items()}
            self.envoy = stack.enter_context(EnvoyProcess(self._folder, ports))
            self.wait_for_all()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    @property
    def target(self) -> str:
        """Address of the proxy."""
        return self.envoy.target

    @property
    def targets(self) -> dict[str, str]:
        """Address of each server, by instance."""
        return {name: server.target for name, server in self.servers.items()}

    def client(self, **options: object) -> Client:
        """Return a client of the proxy."""
        return connect(self.target, **options)

    def end(self, name: str) -> int:
        """Ask a server to end and return its exit code; it must not need to be asked twice."""
        server = self.servers[name]
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(20)
        server.channel.close()
        return server.stop()

    def start(self, name: str) -> None:
        """Start a server that has ended, and wait until it is ready."""
        self.servers[name].start()

    def wait_for_all(self) -> None:
        """Wait until both get new prompts."""
        self.envoy.wait_for_healthy({server.port for server in self.servers.values()})


def connect(target: str, **options: object) -> Client:
    """Return a client of a proxy."""
    return Client(target, timeout=20, **options)  # type: ignore[arg-type]


def status_of(fleet: OwnFleet) -> dict[str, Status]:
    """Return what each server says of itself when it is asked directly, by instance."""
    found = {}
    for name, target in fleet.targets.items():
        with Client(target) as direct:
            found[name] = direct.status()
    return found


def owner(cache: Cache) -> str:
    """Return the instance that has a sequence."""
    return cache.handle.cache_id.partition(".")[0]


class Worker(threading.Thread):
    """Someone who prefills, appends one token after the other, releases, and begins anew.

    Attributes:
        appends: How many went well.
        failures: What did not.
        owners: Where its sequences were.
    """

    def __init__(self, target: str, number: int, stop: threading.Event) -> None:
        super().__init__()
        self._target, self._number, self._stop_asked = target, number, stop
        self.appends = 0
        self.failures: list[str] = []
        self.owners: Counter[str] = Counter()

    def run(self) -> None:
        """Work until it is asked to stop."""
        with connect(self._target, max_retries=1) as client, client.stream() as stream:
            while not self._stop_asked.is_set():
                try:
                    self._serve_one(client, stream if self._number % 2 else None)
                except FerruleError as error:
                    self.failures.append(f"{type(error).__name__} {error}")

    def _serve_one(self, client: Client, stream: Stream | None) -> None:
        with client.prefill([self._number, 3]) as cache:
            self.owners[owner(cache)] += 1
            for token in range(1, 21):
                if stream is None:
                    cache.append(token, policy=greedy(), pending="drop")
                else:
                    stream.run([Append(cache, token, greedy(), pending="drop")])
                self.appends += 1
                time.sleep(0.01)
            assert cache.info(token_ids=True).token_ids == (self._number, 3, *range(1, 21))
