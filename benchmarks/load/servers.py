"""What is loaded: two servers of our own, reached in turn or through Envoy, or whatever an operator names."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.load import guarded

INSTANCES = ("ferrule-a", "ferrule-b")


@contextmanager
def own_servers(model: str, kv_memory: str, *, has_envoy: bool) -> Iterator[dict[str, list[str]]]:
    """Start two servers, and Envoy in front of them; give addresses by path, and end everything.

    They also end where this process is killed and can do nothing about it.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ferrule-load-")))
        addresses = [stack.enter_context(_server(name, model, kv_memory, folder)) for name in INSTANCES]
        paths = {"direct": addresses}
        if has_envoy:
            from benchmarks.load.envoy import GuardedEnvoy

            ports = {name: int(at.rpartition(":")[2]) for name, at in zip(INSTANCES, addresses, strict=True)}
            envoy = stack.enter_context(GuardedEnvoy(folder, ports))
            envoy.wait_for_healthy(set(ports.values()))
            paths["envoy"] = [envoy.target]
        yield paths


@contextmanager
def _server(name: str, model: str, kv_memory: str, folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "ferrule_server", "--listen", "127.0.0.1:0", "--drain-grace", "0s"]
    command += ["--instance", name, "--kv-memory", kv_memory, "--log-level", "error"]
    command += ["--executor", model] if model == "paged-reference" else ["--model", model]
    with guarded.start(command, folder, subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline().decode()
            if not ready.startswith("ready"):
                raise RuntimeError(f"the server {name} did not start: {ready!r}")
            yield next(word.removeprefix("listen=") for word in ready.split() if word.startswith("listen="))
        finally:
            guarded.end(process)


def is_local(address: str) -> bool:
    """Whether an address can only be this machine's."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
