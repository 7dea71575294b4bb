"""A reader of the pages: a folder, a shell in it, and the servers that the commands of a page start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.commands import ROOT
from tests.stack.test_pages import arguments_of
from tests.tools import KERNEL_CACHE
from tools.compose.compose_file import load

BIN: Final = Path(sys.executable).parent
DEMO: Final = ROOT / "server" / "ferrule_server" / "demo_model"
QUICK: Final = {
    "FERRULE_KV_MEMORY": "16MiB",
    "FERRULE_DRAIN_GRACE": "0s",
    "FERRULE_LISTEN": "127.0.0.1:0",
    "FERRULE_KERNEL_CACHE": KERNEL_CACHE,
}
"""Of every server that is started here; flags go before them."""


class Story:
    """A reader in a folder of its own, who types the commands of a page one after the other.

    Args:
        folder: Empty.
        shipped: Address of the server that is there unless the page has started another under the same heading.
    """

    def __init__(self, folder: Path, shipped: str) -> None:
        self.folder = folder
        self.target = self._shipped = shipped
        self.metrics = ""
        self.prelude = ""
        self.kv_cache: str | None = None
        self._server: subprocess.Popen[str] | None = None
        (folder / "models").mkdir()
        for name in ("Qwen3-0.6B", "Qwen3-8B"):
            (folder / "models" / name).symlink_to(DEMO)
        (folder / "prompt.txt").write_text("import os\n\ndef main(")

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its shell; nothing of ours but what leads to the server."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FERRULE_", "HF_"))}
        kept |= {"HOME": str(self.folder), "PATH": f"{BIN}:{os.environ['PATH']}", "NO_COLOR": "1", "TERM": "dumb"}
        return kept | {"FERRULE_TARGET": self.target, "no_proxy": "127.0.0.1"}

    def here(self, text: str) -> str:
        """Return a command with addresses and sizes of this machine."""
        for pattern, place in {
            r"curl http://127\.0\.0\.1:9464": f"curl -sS http://{self.metrics}",
            r"(?:0\.0\.0\.0|127\.0\.0\.1):(?:50051|9464)": "127.0.0.1:0",
            r"unix:/tmp/": f"unix:{self.folder}/",
            r"(server\.example\.org:50051|unix:/run/ferrule\.sock)": self.target,
            r"--kv-memory 4GiB": "--kv-memory 16MiB",
            r"ferrule top": "ferrule top --interval 0.1",
            r"watch (ferrule \w+)": r"\1",
        }.items():
            text = re.sub(pattern, place, text)
        return text

    def shell(self, text: str) -> str:
        """Run a line and return what it prints; it must succeed."""
        done = subprocess.run(
            ["sh", "-euc", text],
            cwd=self.folder,
            env=self.environment,
            input="Hi\n",
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout

    def serve(self, text: str, variables: Mapping[str, str]) -> None:
        """Start a server, which is the one to talk to until the next heading."""
        self.end_section()
        with (self.folder / "server.log").open("w") as log:
            self._server = subprocess.Popen(
                ["sh", "-euc", f"exec {text}"],
                cwd=self.folder,
                env={**self.environment, **QUICK, **variables},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line.startswith("ready "), f"{text}\n{line}{(self.folder / 'server.log').read_text()}"
        values = dict(part.split("=", 1) for part in line.split()[1:])
        self.target, self.metrics = values["listen"], values.get("metrics_listen", "")

    def need_a_server_of_its_own(self) -> None:
        """Start one, unless there is one: that may be drained, and has metrics."""
        if self._server is None:
            self.serve("ferrule serve --metrics-listen 127.0.0.1:0", {"FERRULE_EXECUTOR": "paged-reference"})

    def compose(self, words: list[str]) -> None:
        """Start a server with the credentials that files on top of docker-compose.yml give it, without Docker.

        Behind Envoy it has the certificate that Envoy has there. tests/docker starts what compose starts.
        """
        arguments = arguments_of(words)
        project = load([ROOT / name for name in arguments.files], {})
        behind_envoy = "envoy" in arguments.services
        variables = project["services"]["ferrule"]["environment"]
        secrets = {name: value for name, value in variables.items() if str(value).startswith("/run/ferrule/")}
        for name, value in secrets.items():
            folder = "secrets-envoy" if behind_envoy and name.startswith("FERRULE_TLS_") else "secrets"
            secrets[name] = value.replace("/run/ferrule", folder)
        secrets |= {name: value for name, value in variables.items() if name == "FERRULE_ADMINS"}
        self.serve("ferrule serve --executor paged-reference", secrets)

    def end_section(self) -> None:
        """End what was started; a server must end as asked, and nothing of ours stays on the one that all share."""
        if self.kv_cache is not None:
            self.shell(f"{self.prelude}\ncall ModelExecutorService/ReleaseCache '{{\"kvCaches\": [{self.kv_cache}]}}'")
            self.kv_cache = None
        if self._server is not None:
            with self._server as server:
                server.terminate()
                assert server.wait(20) == 0
            self._server = None
        self.target, self.metrics = self._shipped, ""
