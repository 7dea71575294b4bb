"""Two servers behind Envoy without Docker: the block ``local`` of docs/scaling.md, as it stands."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

from ferrule import Client, FerruleError, greedy
from tests.chaos.server_process import wait_for
from tests.commands import in_page
from tools.compose.envoy import CONFIG, ROOT, free_ports

BIN = Path(sys.executable).parent


def test_the_block_of_the_page_brings_up_two_servers(tmp_path: Path) -> None:
    """Its ports apart: each server answers by its name, and a handle is served where it lives."""
    text = (ROOT / "docs" / "scaling.md").read_text("utf-8")
    numbers = ("50061", "50062", "50051", "9901", "9464")
    ports = dict(zip(numbers, map(str, free_ports(5)), strict=True))
    (tmp_path / "deploy").mkdir()
    config = CONFIG.read_text("utf-8")
    for host, number in (("0.0.0.0", "50051"), ("127.0.0.1", "9901"), ("0.0.0.0", "9464")):
        config = config.replace(f"{host}, port_value: {number}", f"{host}, port_value: {ports[number]}")
    (tmp_path / "deploy" / "envoy.yaml").write_text(config)
    commands = [command.text for command in in_page("docs/scaling.md", text) if command.block == "local"]
    assert len(commands) == 3
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FERRULE_")}
    quick = {"FERRULE_EXECUTOR": "paged-reference", "FERRULE_KV_MEMORY": "1MiB", "FERRULE_DRAIN_GRACE": "0s"}
    environment = kept | quick | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    with contextlib.ExitStack() as stack:
        for count, command in enumerate(commands):
            here = re.sub(r"(127\.0\.0\.1:|port_value: )(5006\d)", lambda found: found[1] + ports[found[2]], command)
            shell = ["sh", "-euc", f"exec {here.replace('.venv/bin/', f'{BIN}/')}"]
            log = stack.enter_context((tmp_path / f"{count}.log").open("wb"))
            process = subprocess.Popen(shell, cwd=tmp_path, env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        target = f"127.0.0.1:{ports['50051']}"
        for name in ("ferrule-a", "ferrule-b"):
            with Client(target, instance=name, timeout=20) as client:
                wait_for(name, lambda client=client: _is_served(client), 30)
                assert client.status().instance == name
                with client.prefill([1, 2], policy=greedy()) as cache:
                    assert cache.handle.cache_id.startswith(f"{name}.")
                    assert len(cache.step().tokens) == 1


def _is_served(client: Client) -> bool:
    try:
        client.status()
    except FerruleError:
        return False
    return True
