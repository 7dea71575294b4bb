"""examples/README.md and the README's path for other languages: their commands run; the table of errors is whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.languages import (
    EXAMPLES,
    ROOT,
    Missing,
    compile_go,
    go_environment,
    need,
    node_modules,
    rust_environment,
)
from tests.conformance.servers import TOKENS, Servers
from tests.conformance.test_languages import absent

PAGE = (ROOT / "examples" / "README.md").read_text("utf-8")
CLIENTS = (ROOT / "docs" / "clients.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")
CONTRACT = (ROOT / "protos" / "README.md").read_text("utf-8")
INSTALLS = ("sudo apt", "npm install", "pip install", "go install", "go mod tidy", "make demo")
TOOLS = {
    "node": ["node"],
    "typescript": ["node", "npm"],
    "go": ["protoc"],
    "rust": ["cargo", "protoc"],
    "cpp": ["g++", "protoc", "grpc_cpp_plugin", "pkg-config"],
    "python": [],
    "shell": ["jq", "buf"],
    "curl": ["buf"],
    "curl-tls": ["buf"],
}
GENERATING = ("go-module", "go-mapped", "java", "csharp")
"""Blocks that run no example."""
SLOW = ("typescript", "go", "rust", "cpp", "shell")
PREPARE = {"go": go_environment, "rust": rust_environment}
"""Where the modules of a language are found without a network."""


def _block(text: str, name: str) -> list[str]:
    """Return the commands of a block, without their comments."""
    found = re.search(rf"^```sh {name}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found is not None, name
    return [line.partition("  #")[0].rstrip() for line in found[1].splitlines()]


def _run(commands: list[str], target: str, folder: Path, **environment: str) -> str:
    """Return what the last of a block's commands prints, all run in one shell; what installs is left out."""
    kept = [command for command in commands if not command.startswith(INSTALLS)]
    last = kept[-1].replace("127.0.0.1:50051", target)
    kept[-1] = last if target in last else f"{last} {target}"
    script = "\n".join(["set -e", *kept]).replace("build/", f"{folder}/build/").replace("$PWD/", "")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=os.environ | {"PATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize(
    "language", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in TOOLS]
)
def test_the_commands_of_a_language_run(language: str, servers: Servers, tmp_path: Path) -> None:
    """As they stand on the page, but for what installs, and where the server listens."""
    try:
        for program in TOOLS[language]:
            need(program)
        if language in ("node", "typescript"):
            node_modules(language)
        environment = PREPARE.get(language, dict)()
    except Missing as missing:
        absent(missing)
    target = servers.target("secured" if language == "curl-tls" else "shipped")
    secrets = {"FERRULE_TLS_CA": str(servers.folder / "ca.pem"), "FERRULE_TOKEN": TOKENS["bob"]}
    said = _run(_block(PAGE, language), target, tmp_path, **environment, **secrets)
    assert "EXECUTOR_STATE" in said if language.startswith("curl") else said.endswith("released 3\n")


@pytest.mark.slow
def test_a_module_of_ones_own_imports_the_package(tmp_path: Path) -> None:
    """By the line on the page; the example in a module of another name is built with it."""
    try:
        compile_go("fork", EXAMPLES / "go" / "fork.go")
        environment = go_environment()
    except Missing as missing:
        absent(missing)
    shutil.copy(EXAMPLES / "go" / "fork.go", tmp_path)
    offline = Path(environment["GOFLAGS"].partition("=")[2]).read_text("utf-8")
    (tmp_path / "go.mod").write_text(offline.replace("module ferrule.internal/go", "module example.org/you"), "utf-8")
    (command,) = _block(PAGE, "go-module")
    script = f"{command.replace('examples', f'{EXAMPLES}')} && go vet . && go build -o fork ."
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment | {"GOFLAGS": ""}, check=True)


@pytest.mark.slow
def test_a_package_of_ones_own_has_messages_and_services(tmp_path: Path) -> None:
    """All files are in one package, which compiles."""
    try:
        environment = go_environment()
    except Missing as missing:
        absent(missing)
    script = "\n".join(["set -e", *_block(PAGE, "go-mapped")]).replace("build/", f"{tmp_path}/build/")
    subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, check=True)
    module = tmp_path / "build" / "go"
    assert {path.name for path in module.iterdir()} == {"ferrule"}
    assert len(list(module.glob("ferrule/*_grpc.pb.go"))) == 3
    offline = Path(environment["GOFLAGS"].partition("=")[2]).read_text("utf-8")
    (module / "go.mod").write_text(offline.replace("module ferrule.internal/go", "module example.org/you"), "utf-8")
    subprocess.run(["go", "build", "./ferrule"], cwd=module, env=environment | {"GOFLAGS": ""}, check=True)


@pytest.mark.parametrize(
    ("language", "file", "line"),
    [
        ("java", "ferrule/v1/PrefillRequest.java", "package ferrule.v1;"),
        ("csharp", "Executor.cs", "namespace Ferrule.V1 {"),
    ],
)
def test_code_is_generated_as_the_page_says(language: str, file: str, line: str, tmp_path: Path) -> None:
    """In the package that the page names; no compiler of these languages is asked."""
    try:
        need("protoc")
    except Missing as missing:
        absent(missing)
    assert line.split()[1].rstrip(";") in PAGE
    script = "\n".join(["set -e", *_block(PAGE, language)]).replace("build/", f"{tmp_path}/")
    subprocess.run(["bash", "-c", script], cwd=ROOT, check=True)
    assert line in (tmp_path / language / file).read_text("utf-8").splitlines()


@pytest.mark.slow
def test_the_path_of_a_newcomer_leads_there(tmp_path: Path) -> None:
    """The server starts as it stands in the README, on a free port, and the example forks there."""
    commands = _block(README, "newcomer")
    try:
        node_modules()
        node = need("node")
    except Missing as missing:
        absent(missing)
    serve = next(command for command in commands if "ferrule serve" in command)
    program = [str(Path(sys.executable).parent / "ferrule"), *serve.split()[1:], "--listen", "127.0.0.1:0"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=log, text=True)
    with server:
        assert server.stdout is not None
        found = re.search(r"^ready .*\blisten=(\S+)", server.stdout.readline())
        assert found is not None, (tmp_path / "log").read_text()
        command = [node, *commands[-1].split()[1:], found[1]]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        server.terminate()
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("released 3\n")


def test_every_reason_has_an_answer() -> None:
    """Each reason of the contract stands once in the table of what to do, with its code."""
    table = CLIENTS[CLIENTS.index("## What to do about an error") : CLIENTS.index("## Proving")]
    advice = {
        reason: code
        for reasons, code in re.findall(r"^\| (`.*?) \| ([A-Z_]+) \|", table, re.MULTILINE)
        for reason in re.findall(r"`([A-Z_]+)`", reasons)
    }
    quotas = re.search(r"The quotas are (.*?)\.", CONTRACT, re.DOTALL)
    assert quotas is not None
    contract = dict.fromkeys(re.findall(r"QUOTA_\w+", quotas[1]), "RESOURCE_EXHAUSTED")
    for code, reasons in re.findall(r"^\| ([A-Z_]+) \| (`.*?) \|", CONTRACT, re.MULTILINE):
        contract |= dict.fromkeys(re.findall(r"`([A-Z_]+)`", reasons), code)
    assert advice == contract


def test_packages_of_node_are_pinned() -> None:
    """Exact versions and no lock file, which would name a registry."""
    assert "Node 18 or newer" in PAGE
    for example in ("node", "typescript"):
        folder = EXAMPLES / example
        told = json.loads((folder / "package.json").read_text("utf-8"))
        assert told["engines"] == {"node": ">=18"}
        versions = told["dependencies"] | told.get("devDependencies", {})
        assert {"@grpc/grpc-js", "@grpc/proto-loader"} <= versions.keys()
        assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions.values())
        assert "package-lock=false" in (folder / ".npmrc").read_text("utf-8")
        assert not (folder / "package-lock.json").exists()
