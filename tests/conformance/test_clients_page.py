"""examples/README.md and the README's path for other languages: their commands run; the table of errors is whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from ferrule.v1 import executor_pb2, executor_pb2_grpc
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


def _piece(language: str) -> str:
    """Return the piece of the page of errors that reads the reason of one."""
    found = re.search(rf"^```\w+ {language}-reason\n(.*?)^```", CLIENTS, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_reason_of_an_error_is_read_in_python(servers: Servers) -> None:
    """As on the page: of a call, of an item, and of an error that has none."""
    names: dict[str, Any] = {}
    exec(_piece("python"), names)
    prompt = executor_pb2.PrefillInput(input_ids=[10**6])
    with grpc.insecure_channel(servers.target("shipped")) as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        (item,) = stub.BatchPrefill(executor_pb2.BatchPrefillRequest(inputs=[prompt]), timeout=30).results
        with pytest.raises(grpc.RpcError) as refused:
            stub.Prefill(executor_pb2.PrefillRequest(input=prompt), timeout=30)
    assert [names["reason_of"](one) for one in (item.error, refused.value)] == ["TOKEN_OUT_OF_VOCAB"] * 2
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        with pytest.raises(grpc.RpcError) as failed:
            stub.Prefill(executor_pb2.PrefillRequest(), timeout=30)
    assert names["reason_of"](failed.value) == ""


def test_the_reason_of_an_error_is_read_in_node(servers: Servers, tmp_path: Path) -> None:
    """With the lines of the example before it."""
    try:
        (tmp_path / "node_modules").symlink_to(node_modules())
        node = need("node")
    except Missing as missing:
        absent(missing)
    example = (EXAMPLES / "node" / "fork.js").read_text("utf-8").replace("../../protos", (ROOT / "protos").as_uri())
    head = example[: example.index("const { tokenIds }")]
    calls = """
const wrong = { inputIds: [1000000] };
const { results } = await call(executor, "BatchPrefill", { inputs: [wrong] });
const error = await call(executor, "Prefill", { input: wrong }).catch((error) => error);
console.log(reasonOf(results[0].error.details), reasonOf(detailsOf(error)));
executor.close(), tokenizer.close();
"""
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "reason.js").write_text(head + _piece("node") + calls)
    command = [node, str(tmp_path / "reason.js"), servers.target("shipped")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "TOKEN_OUT_OF_VOCAB TOKEN_OUT_OF_VOCAB\n"


def test_the_reason_of_an_error_is_read_in_the_shell(servers: Servers, tmp_path: Path) -> None:
    """Of what ``buf curl`` says."""
    try:
        need("jq"), need("buf")
    except Missing as missing:
        absent(missing)
    method = f"http://{servers.target('shipped')}/ferrule.v1.ModelExecutorService/Prefill"
    options = "--schema protos --protocol grpc --http2-prior-knowledge"
    script = f"""buf curl {options} -d '{{"input": {{"inputIds": [1000000]}}}}' {method} 2> {tmp_path}/error.json\n"""
    script += _piece("shell").replace("error.json", f"{tmp_path}/error.json")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True
    )
    assert run.stdout == "TOKEN_OUT_OF_VOCAB\n"


def test_every_language_has_a_piece_that_reads_the_reason() -> None:
    """Each of those with an example."""
    for language in ("python", "node", "typescript", "go", "rust", "cpp", "shell"):
        assert "ErrorInfo" in _piece(language) or "error_info" in _piece(language)


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
