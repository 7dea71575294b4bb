"""What the pages say of the stack: each command is one that compose and the files understand, each figure adds up."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tools import tool
from tools.compose.compose_file import ON_TOP, PLAIN, ROOT, load, started

PAGE = (ROOT / "docs" / "operations.md").read_text()
FILES = [PLAIN, *ON_TOP, *sorted((ROOT / "deploy").glob("*.env"))]
SOURCES = [PLAIN, *ON_TOP, ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "deploy" / "Dockerfile"]
OF_COMPOSE = {"COMPOSE_PROFILES", "COMPOSE_FILE"}


def compose_commands() -> list[str]:
    """Return every ``docker compose`` command of files and pages, with the variables in front of it."""
    found: set[str] = set()
    for path in SOURCES:
        for line in path.read_text().splitlines():
            found |= {inner for inner in re.findall(r"`([^`]*)`", line) if "docker compose " in inner}
            plain = re.sub(r"^# +", "", line)
            if re.match(r"([A-Z_]+=\S+ )*docker compose ", plain):
                found.add(re.split(r" {3,}", plain)[0])
    return sorted(found)


def arguments_of(words: list[str]) -> argparse.Namespace:
    """Return what compose makes of its arguments, as far as the pages use them."""
    parser = argparse.ArgumentParser(prog="docker compose", exit_on_error=False)
    parser.add_argument("-f", dest="files", action="append", default=[])
    parser.add_argument("--profile", dest="profiles", action="append", default=[])
    actions = parser.add_subparsers(dest="action", required=True)
    up = actions.add_parser("up")
    for flag in ("-d", "--wait", "--no-deps", "--build"):
        up.add_argument(flag, action="store_true")
    up.add_argument("services", nargs="*")
    for name in ("build", "down", "restart", "stop", "kill", "logs", "ps"):
        actions.add_parser(name).add_argument("services", nargs="*")
    run = actions.add_parser("run")
    run.add_argument("--rm", action="store_true")
    run.add_argument("--no-deps", action="store_true")
    run.add_argument("--entrypoint")
    execute = actions.add_parser("exec")
    execute.add_argument("-e", dest="variables", action="append", default=[])
    for one in (run, execute):
        one.add_argument("service")
        one.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args(words)


@pytest.mark.parametrize("command", compose_commands())
def test_a_command_of_the_pages_is_understood(command: str) -> None:
    """Files, profiles, services and variables are there, and a service that is named starts with what it needs."""
    words = shlex.split(command)
    start = words.index("docker")
    variables = dict(word.split("=", 1) for word in words[:start])
    assert words[start + 1] == "compose"
    arguments = arguments_of(words[start + 2 :])
    project = load([ROOT / name for name in arguments.files] or [PLAIN], variables)
    assert all(name in (*_variables(), *OF_COMPOSE) for name in variables)
    profiles = {one for s in project["services"].values() for one in s.get("profiles", [])}
    assert set(arguments.profiles) <= {*profiles, "*"}
    if arguments.action == "up":
        assert started(project, arguments.profiles, arguments.services)
    else:
        assert {*getattr(arguments, "services", [getattr(arguments, "service", None)])} <= set(project["services"])


def test_there_are_commands_to_test() -> None:
    """The pages are read as they are meant to be."""
    assert len(compose_commands()) > 12


def _variables() -> set[str]:
    """Return the variables that compose fills in, in any of the files."""
    texts = [re.sub(r"^ *#.*$", "", path.read_text(), flags=re.MULTILINE) for path in FILES]
    filled = {name for text in texts for name in re.findall(r"\$\{(\w+)", text)}
    return filled | {
        name for text in texts for name in re.findall(r"^ +(\w+):(?: +#.*)?$", text, re.MULTILINE) if name.isupper()
    }


def test_the_example_of_variables_lists_them_all() -> None:
    """With the defaults that the files have."""
    lines = (ROOT / ".env.example").read_text().splitlines()
    matches = (re.match(r"(?:# )?([A-Z_]+)=(\S*)$", line) for line in lines)
    listed = {found[1]: found[2] for found in matches if found}
    assert set(listed) == _variables() | {"COMPOSE_FILE"}
    assert all((ROOT / name).exists() for name in listed["COMPOSE_FILE"].split(":"))
    texts = "".join(path.read_text() for path in FILES)
    for name, value in listed.items():
        defaults = set(re.findall(rf"\${{{name}:?-([^}}]*)}}", texts))
        assert not defaults or value in defaults or name == "MODELS", name


def test_secrets_that_the_pages_make_are_in_no_commit(tmp_path: Path) -> None:
    """A checkout is where most people type the commands."""
    git = tool("git")
    subprocess.run([git, "init", "-q", str(tmp_path)], check=True, timeout=20)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    names = ["tokens", "alice.token", "secrets/tokens", "secrets-envoy/key.pem", "key.pem", "certificates/ca-key.pem"]
    names += [".env", "ferrule.env"]
    command = [git, "-C", str(tmp_path), "check-ignore", *names]
    found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.split()
    assert found == names


def test_the_sizes_of_the_page_add_up() -> None:
    """The formula, its table, and its example."""
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) KiB \|", PAGE, re.MULTILINE)
    per_token = {name: int(kib) for name, *_, kib in rows}
    assert set(per_token) == {"the bundled model", "Qwen3-0.6B", "Qwen3-8B"}
    for name, layers, heads, size, kib in rows:
        assert 2 * int(layers) * int(heads) * int(size) * 2 == int(kib) * 1024, name
    config = json.loads((ROOT / "server" / "ferrule_server" / "demo_model" / "config.json").read_text())
    shipped = (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"])
    assert tuple(map(int, rows[0][1:4])) == shipped
    assert pytest.approx(11.1, abs=0.05) == 81_000 * 144 / 1024**2
    assert pytest.approx(392_000, rel=0.002) == 53.88 * 1024**2 / 144
