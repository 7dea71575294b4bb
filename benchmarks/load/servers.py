"""What is loaded: two servers of our own, reached in turn or through Envoy, or whatever an operator names."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

INSTANCES = ("ferrule-a", "ferrule-b")
_STOP_S = 30


@contextmanager
def own_servers(model: str, kv_memory: str, *, has_envoy: bool) -> Iterator[dict[str, list[str]]]:
    """Start two servers, and Envoy in front of them; give addresses by path, and end everything."""
    with ExitStack() as stack:
        addresses = [stack.enter_context(_server(name, model, kv_memory)) for name in INSTANCES]
        paths = {"direct": addresses}
        if has_envoy:
            from tests.stack.envoy import EnvoyProcess

            ports = {name: int(at.rpartition(":")[2]) for name, at in zip(INSTANCES, addresses, strict=True)}
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            envoy = stack.enter_context(EnvoyProcess(folder, ports))
            envoy.wait_for_healthy(set(ports.values()))
            paths["envoy"] = [envoy.target]
        yield paths


@contextmanager
def _server(name: str, model: str, kv_memory: str) -> Iterator[str]:
    command = [sys.executable, "-m", "ferrule_server", "--listen", "127.0.0.1:0", "--drain-grace", "0s"]
    command += ["--instance", name, "--kv-memory", kv_memory, "--log-level", "error"]
    command += ["--executor", model] if model == "paged-reference" else ["--model", model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            if not ready.startswith("ready"):
                raise RuntimeError(f"the server {name} did not start: {ready!r}")
            yield next(word.removeprefix("listen=") for word in ready.split() if word.startswith("listen="))
        finally:
            process.terminate()
            try:
                process.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def is_local(address: str) -> bool:
    """Whether an address can only be this machine's."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
