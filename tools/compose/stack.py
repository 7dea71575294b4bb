"""The services of docker-compose.yml without Docker: each one's very command, variables, files and health check.

Three things are put in the place of what only containers have, and nothing else is changed:

* an address (``0.0.0.0:50051`` of a service, ``ferrule-a:9464`` in a file of another) by a free port of 127.0.0.1;
  there, unlike in a container, callers without credentials have the role admin;
* a path that is mounted by its copy or by the folder it is mounted from;
* an image by the program of it that is installed here: ours, Envoy's and Prometheus's. Grafana's is not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import yaml

from tools.compose.compose_file import PLAIN, RECIPE, ROOT, image_variables, load, started, variables_of

NO_PROGRAM: Final = ("grafana/grafana",)
"""Images whose program cannot be had here."""
_BIN: Final = Path(sys.executable).parent


@dataclasses.dataclass(slots=True)
class Ports:
    """The port of 127.0.0.1 that stands for a port of a service."""

    services: Sequence[str]
    taken: dict[tuple[str, int], int] = dataclasses.field(default_factory=dict)

    def of(self, service: str, port: int) -> int:
        """Return it; the first one to ask chooses."""
        if (service, port) not in self.taken:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.taken[service, port] = probe.getsockname()[1]
        return self.taken[service, port]

    def replaced(self, text: str, service: str) -> str:
        """Return a text of a service in which addresses are of this machine."""
        names = "|".join(map(re.escape, sorted(self.services, key=len, reverse=True)))
        text = re.sub(r"(?<![\d.])(?:0\.0\.0\.0|127\.0\.0\.1)([:/])(\d+)", rf"{service}\1\2", text)
        return re.sub(
            rf"(?<![\w.-])({names})([:/])(\d+)(?!\d)",
            lambda found: f"127.0.0.1{found[2]}{self.of(found[1], int(found[3]))}",
            text,
        )

    def replaced_in(self, document: Any, service: str) -> Any:
        """Return a YAML document of a service in which addresses are of this machine."""
        if isinstance(document, list):
            return [self.replaced_in(inner, service) for inner in document]
        if not isinstance(document, dict):
            return self.replaced(document, service) if isinstance(document, str) else document
        return {key: self.replaced_in(inner, service) for key, inner in document.items()}

    def replaced_of_envoy(self, text: str, service: str) -> str:
        """Return a configuration of Envoy in which addresses are of this machine, and comments are kept."""

        def here(found: re.Match[str]) -> str:
            owner = found[1] if found[1] in self.services else service
            return f"{{ address: 127.0.0.1, port_value: {self.of(owner, int(found[2]))} }}"

        text, count = re.subn(r"\{ address: ([\w.-]+), port_value: (\d+) \}", here, text)
        assert count == text.count("socket_address:")
        return text


class Stack:
    """What one ``docker compose [-f ...] [--profile ...] up -d --wait NAME ...`` starts; left, it is stopped in order.

    Args:
        folder: For logs, volumes and files; a file ferrule.env there is read as the one beside docker-compose.yml.
        names: Services to start, with what they depend on; none: those of the profiles.
        profiles: Active ones.
        on_top: Files after docker-compose.yml.
        environment: Variables of the shell that compose runs in.
        settings: Variables that every server gets besides, to make a test quick; None: one that it does not get.
        scrape_interval: In the place of Prometheus's.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = (),
        *,
        profiles: Sequence[str] = (),
        on_top: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        settings: Mapping[str, str | None] | None = None,
        scrape_interval: str | None = None,
    ) -> None:
        self.folder = folder
        self.project = load([PLAIN, *on_top], environment or {})
        self.names = started(self.project, profiles, names)
        self.left_out = [name for name in self.names if self._image(name) in NO_PROGRAM]
        self.ports = Ports(tuple(self.project["services"]))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._passed_through = environment or {}
        self._settings = settings or {}
        self._scrape_interval = scrape_interval

    def __enter__(self) -> Self:
        """Start every service, each behind those that it waits for, until all are healthy."""
        try:
            for name in self.names:
                if name not in self.left_out:
                    self.start(name)
                    self.wait_until_healthy(name)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Leave no process behind."""
        self.kill()

    def start(self, name: str) -> None:
        """Start one service, as ``docker compose up`` and ``restart`` do."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self.command(name), env=self._environment(name), stdout=log, stderr=log, cwd=self.folder
            )

    def stop(self, name: str) -> int:
        """Stop one as ``docker compose stop`` does and return its exit code; 137 if it did not end in its time."""
        process = self.processes.pop(name)
        process.terminate()
        try:
            return process.wait(int(self.project["services"][name]["stop_grace_period"].removesuffix("s")))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return 137

    def stop_all(self) -> dict[str, int]:
        """Stop all, what others depend on last, and return their exit codes."""
        return {name: self.stop(name) for name in reversed(list(self.processes))}

    def kill(self) -> None:
        """End what still runs."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.processes.clear()

    def address(self, name: str, port: int) -> str:
        """Return where a port of a service is to be found."""
        return f"127.0.0.1:{self.ports.of(name, port)}"

    def log(self, name: str) -> str:
        """Return what a service has written."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def command(self, name: str) -> list[str]:
        """Return what the container of a service runs."""
        command = self.project["services"][name].get("command", [])
        return [*self._entry_point(name), *(self._here(word, name) for word in command)]

    def is_healthy(self, name: str) -> bool:
        """Run the health check of a service once."""
        check = self.project["services"][name]["healthcheck"]
        kind, *command = check["test"]
        assert kind == "CMD"
        command = [self._here(word, name) for word in command]
        environment = self._environment(name) | {"FERRULE_TARGET": self.address(name, 50051)}
        try:
            checked = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                timeout=int(check["timeout"].removesuffix("s")),
                check=False,
            )
        except subprocess.TimeoutExpired:  # as Docker sees it
            return False
        return checked.returncode == 0

    def wait_until_healthy(self, name: str, timeout_s: float = 90) -> None:
        """Ask until the health check of a service is content."""
        end = time.monotonic() + timeout_s
        while not self.is_healthy(name):
            code = self.processes[name].poll()
            assert code is None, f"{name} ended with {code}:\n{self.log(name)}"
            assert time.monotonic() < end, f"{name} is not healthy:\n{self.log(name)}"
            time.sleep(0.1)

    def _image(self, name: str) -> str:
        return str(self.project["services"][name]["image"].partition(":")[0])

    def _entry_point(self, name: str) -> list[str]:
        image = self._image(name)
        if image.startswith("ferrule"):
            found = re.search(r"^ENTRYPOINT (\[.*\])$", RECIPE.read_text(), re.MULTILINE)
            assert found is not None
            program, *arguments = json.loads(found[1])
            return [str(_BIN / program), *arguments]
        return ["prometheus"] if image == "prom/prometheus" else []

    def _environment(self, name: str) -> dict[str, str]:
        """Return the variables of a container: those of its image and its service, and a home."""
        service = self.project["services"][name]
        values: dict[str, str | None] = {**variables_of(service, self.folder, self._passed_through)}
        if self._image(name).startswith("ferrule"):
            values = {**image_variables(), **values, **self._settings}
        path = f"{_BIN}:{os.environ['PATH']}"
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        found = {key: self._here(value, name) for key, value in values.items() if value is not None}
        return {"PATH": path, "HOME": str(home), "HF_HOME": self._here("/var/cache/ferrule/huggingface", name)} | found

    def _here(self, word: str, name: str) -> str:
        """Return a word of a command with addresses and paths of this machine."""
        for source, target in self._mounts(name).items():
            word = re.sub(rf"(?<![\w.]){re.escape(target)}(?![\w.-])", str(self._mounted(source, target, name)), word)
        return self.ports.replaced(word, name)

    def _mounts(self, name: str) -> dict[str, str]:
        volumes = self.project["services"][name].get("volumes", [])
        return {source: target for source, target, *_ in (entry.split(":") for entry in volumes)}

    def _mounted(self, source: str, target: str, name: str) -> Path:
        """Return what lies here at a path of a container."""
        if not source.startswith((".", "/")):
            path = self.folder / "volumes" / source
            path.mkdir(parents=True, exist_ok=True)
            return path
        original = Path(os.path.normpath(ROOT / source))
        if original.is_dir():
            return original
        copy = self.folder / name / target.lstrip("/")
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.touch()  # it is there for those that name it
            self._write(original, copy, name)
        return copy

    def _write(self, original: Path, copy: Path, name: str) -> None:
        if name == "prometheus" and original.name != "prometheus.yml":
            shutil.copy(original, copy)  # rules have no addresses
            return
        if name == "envoy":
            copy.write_text(self.ports.replaced_of_envoy(self._here(original.read_text(), name), name))
            return
        document = self.ports.replaced_in(yaml.safe_load(original.read_text()), name)
        if name == "prometheus" and self._scrape_interval is not None:
            interval = self._scrape_interval
            document["global"] = dict.fromkeys(document["global"], interval)
        copy.write_text(yaml.safe_dump(document, sort_keys=False))
