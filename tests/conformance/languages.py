"""The runners: how each is built from its sources and started, or why it cannot be."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
RUNNERS: Final = Path(__file__).parent / "runners"
BUILD: Final = ROOT / "build" / "conformance"
EXAMPLES: Final = ROOT / "examples"
INCLUDES: Final = (ROOT / "protos", ROOT / "protos" / "third_party", Path(__file__).parent / "protos")
CONTRACT: Final = tuple(
    sorted(p.relative_to(ROOT / "protos").as_posix() for p in (ROOT / "protos" / "ferrule").rglob("*.proto"))
)
DETAILS: Final = ("google/rpc/code.proto", "google/rpc/error_details.proto", "google/rpc/status.proto")
HEALTH: Final = ("grpc/health/v1/health.proto",)
DEBIAN: Final = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ferrule" / "debian"
"""Packages of a newer Debian that ``install.py`` unpacks: Go with its modules, and the crates of Rust."""


class Missing(Exception):
    """A program that a language needs is not there; the message says which."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A runner that is built.

    Attributes:
        command: Starts it.
        environment: What it needs besides this process's.
    """

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> subprocess.Popen[str]:
        """Return it running, with pipes for commands and answers."""
        environment = os.environ | dict(self.environment)
        return subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def build(language: str) -> Runner:
    """Return the runner of a language of :data:`LANGUAGES`, built if need be.

    Raises:
        Missing: A program is not installed.
        subprocess.CalledProcessError: A compiler refused it; its words went to stderr.
    """
    return LANGUAGES[language]()


def _python() -> Runner:
    return Runner([sys.executable, str(RUNNERS / "python" / "runner.py")])


def _node() -> Runner:
    protos = [str(ROOT / "protos" / name) for name in CONTRACT] + [str(INCLUDES[1] / name) for name in DETAILS]
    command = [
        need("node"),
        str(RUNNERS / "node" / "runner.js"),
        str(ROOT / "protos"),
        *protos,
        str(INCLUDES[2] / HEALTH[0]),
    ]
    return Runner(command, {"NODE_PATH": str(node_modules())})


def node_modules(example: str = "node") -> Path:
    """Return where the packages of an example for Node are installed.

    Raises:
        Missing: They are not.
    """
    folder = EXAMPLES / example / "node_modules"
    if not (folder / "@grpc" / "grpc-js").is_dir():
        raise Missing(f"examples/{example}/node_modules: npm install --prefix examples/{example}")
    return folder


def compile_typescript() -> Path:
    """Return the example in TypeScript as a program of Node; its own script makes the types and checks it by them."""
    folder = node_modules("typescript").parent
    program = folder / "dist" / "fork.js"
    if not _is_newer(program, [folder / "fork.ts", folder / "package.json", *_contract_paths()]):
        subprocess.run([need("npm"), "run", "--silent", "build"], cwd=folder, check=True)
    return program


def _go() -> Runner:
    return Runner([str(compile_go("runner", RUNNERS / "go" / "runner.go"))])


def compile_go(name: str, source: Path) -> Path:
    """Return the program made of one Go file in the module of the example, after ``go generate`` there."""
    module, program, environment = EXAMPLES / "go", BUILD / "go" / name, go_environment()
    if not _is_newer(program, [source, module / "go.mod", module / "fork.go", *_contract_paths()]):
        for command in (["generate"], ["build", "-o", str(program), str(source)]):
            subprocess.run(["go", *command], cwd=module, env=environment, check=True)
    return program


def go_environment() -> dict[str, str]:
    """Return the environment in which ``go`` finds every module of the example's ``go.mod`` among Debian's sources.

    They are of other versions than ``go.mod`` says, so a copy of it requires versions above all, and replaces them.

    Raises:
        Missing: A program or the sources are not there.
    """
    need("protoc")
    tools, sources = DEBIAN / "usr", DEBIAN / "usr" / "share" / "gocode" / "src"
    compilers = sorted(tools.glob("lib/go-*/bin/go"))
    if not compilers or not sources.is_dir():
        raise Missing(f"{tools} has no Go")
    modules = re.findall(r"^\t(\S+) v", (EXAMPLES / "go" / "go.mod").read_text("utf-8"), re.MULTILINE)
    lines = ["module ferrule.internal/go", f"go {compilers[-1].parents[1].name.removeprefix('go-')}"]
    for module in (*modules, "github.com/golang/protobuf"):  # the last one serves Debian's copy of grpc-go alone
        lines += [f"require {module} v1.999.0", f"replace {module} => {sources / module}"]
    offline = BUILD / "go" / "go.mod"
    offline.parent.mkdir(parents=True, exist_ok=True)
    offline.write_text("\n".join([*lines, ""]), "utf-8")
    path = f"{compilers[-1].parent}:{tools / 'bin'}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "GOFLAGS": f"-modfile={offline}", "GOPROXY": "off", "GOTOOLCHAIN": "local"}


def _rust() -> Runner:
    contract = BUILD / "rust" / "contract.binpb"
    runner = compile_rust("runner", RUNNERS / "rust")
    protoc(f"--descriptor_set_out={contract}", "--include_imports", *CONTRACT, *DETAILS, *HEALTH)
    return Runner([str(runner), str(contract)])


def compile_rust(name: str, crate: Path) -> Path:
    """Return a program of a crate, made with Debian's sources of the crates it needs."""
    environment = rust_environment()
    (crate / "Cargo.lock").unlink(missing_ok=True)  # names versions that were there before
    subprocess.run(["cargo", "build", "-q", "--bin", name], cwd=crate, env=environment, check=True)
    return Path(environment["CARGO_TARGET_DIR"]) / "debug" / name


def rust_environment() -> dict[str, str]:
    """Return the environment in which ``cargo`` finds the crates among Debian's sources.

    Raises:
        Missing: A program or the sources are not there.
    """
    need("cargo")
    need("protoc")
    crates, home = DEBIAN / "usr" / "share" / "cargo" / "registry", BUILD / "rust" / "home"
    if not crates.is_dir():
        raise Missing(f"{crates} is not there")
    home.mkdir(parents=True, exist_ok=True)
    offline = {"crates-io": 'replace-with = "debian"', "debian": f'directory = "{crates}"'}
    text = "\n".join(f"[source.{name}]\n{setting}" for name, setting in offline.items())
    (home / "config.toml").write_text(f"{text}\n", "utf-8")
    places = {"CARGO_HOME": str(home), "CARGO_TARGET_DIR": str(BUILD / "rust" / "target"), "CARGO_NET_OFFLINE": "true"}
    return os.environ | places


def _cpp() -> Runner:
    return Runner([str(compile_cpp("runner", RUNNERS / "cpp" / "runner.cc"))])


def compile_cpp(name: str, source: Path) -> Path:
    """Return the program made of one C++ file and the code generated from the contract, by g++ with Debian's gRPC."""
    flags = ["-std=c++17", "-O0", "-Wall", "-pthread", f"-I{BUILD / 'cpp'}"]
    program, library = BUILD / "cpp" / name, _cpp_library(flags)
    if not _is_newer(program, [source, library]):
        whole = ["-Wl,--whole-archive", str(library), "-Wl,--no-whole-archive"]  # messages that only JSON names, too
        links = ["-Wl,--copy-dt-needed-entries", "-lgrpc++", "-lprotobuf"]
        subprocess.run([need("g++"), *flags, "-o", str(program), str(source), *whole, *links], check=True)
    return program


def _cpp_library(flags: list[str]) -> Path:
    """Return the archive of the generated code; two files compile at a time."""
    for program in ("g++", "ar", "protoc", "grpc_cpp_plugin"):
        need(program)
    folder, archive = BUILD / "cpp", BUILD / "cpp" / "contract.a"
    folder.mkdir(parents=True, exist_ok=True)
    if _is_newer(archive, _contract_paths()):
        return archive
    protoc(f"--cpp_out={folder}", *CONTRACT, *DETAILS, *HEALTH)
    services = ("ferrule/v1/executor.proto", "ferrule/v1/tokenizer.proto")
    protoc(f"--grpc_out={folder}", f"--plugin=protoc-gen-grpc={need('grpc_cpp_plugin')}", *services)
    sources = sorted(folder.rglob("*.pb.cc"))
    with ThreadPoolExecutor(2) as pool:
        compiled = [[need("g++"), *flags, "-c", str(path), "-o", str(path.with_suffix(".o"))] for path in sources]
        list(pool.map(lambda command: subprocess.run(command, check=True), compiled))
    archive.unlink(missing_ok=True)
    subprocess.run([need("ar"), "rcs", str(archive), *(str(path.with_suffix(".o")) for path in sources)], check=True)
    return archive


def _buf() -> Runner:
    buf, schemas = need("buf"), []
    for folder in (INCLUDES[0], INCLUDES[2]):
        schema = BUILD / "buf" / f"{folder.parent.name}.binpb"
        schema.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([buf, "build", str(folder), "-o", str(schema)], check=True)
        schemas.append(str(schema))
    return Runner([sys.executable, str(RUNNERS / "buf" / "runner.py"), buf, *schemas])


LANGUAGES: Final[Mapping[str, Callable[[], Runner]]] = {
    "python": _python,
    "node": _node,
    "go": _go,
    "rust": _rust,
    "cpp": _cpp,
    "buf": _buf,
}
"""Every language there is a runner for."""


def need(program: str) -> str:
    """Return the path of a program.

    Raises:
        Missing: It is not installed.
    """
    path = shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))
    if path is None:
        raise Missing(f"{program} is not installed")
    return path


def protoc(*arguments: str) -> None:
    """Run protoc over the contract's folders."""
    subprocess.run([need("protoc"), *(f"-I{folder}" for folder in INCLUDES), *arguments], check=True)


def _contract_paths() -> list[Path]:
    return [ROOT / "protos" / name for name in CONTRACT]


def _is_newer(product: Path, sources: list[Path]) -> bool:
    return product.exists() and all(product.stat().st_mtime >= path.stat().st_mtime for path in sources)
