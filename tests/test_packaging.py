"""What users install: a light client, a server beside it, and all that they need in their wheels."""

import importlib
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from deploy import install_torch
from tests.conformance import run as conformance
from tests.conformance.cases import load
from tests.conformance.languages import RUNNERS, Runner
from tests.conformance.servers import Servers
from tests.tools import tool

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "ferrule": [ROOT / "protos" / "ferrule", ROOT / "client" / "ferrule_client", ROOT / "client" / "ferrule_cli"],
    "ferrule-server": [ROOT / "server" / "ferrule_server"],
}
"""What each distribution holds."""
HEAVY = (
    "torch",
    "numba",
    "safetensors",
    "tokenizers",
    "transformers",
    "rich",
    "prometheus_client",
    "huggingface_hub",
    "cryptography",
    "google_crc32c",
    "opentelemetry",
    "ferrule_server",
)


OLDEST = {"protobuf": "6.33.5", "grpcio-health-checking": "1.81.1"}
"""The lowest versions that the client accepts of what it generates code for; the others are those of the tests."""


def modules_after(code: str) -> set[str]:
    """Return the names of the top-level packages a fresh interpreter has imported after running ``code``."""
    script = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_client_imports_nothing_heavy() -> None:
    """An application that imports the client pays for gRPC and numpy only."""
    assert modules_after("from ferrule import Client").isdisjoint(HEAVY)


def test_server_rings_import_without_torch() -> None:
    """Wire, host and paged reference start at once; torch comes with the torch executor."""
    code = "import ferrule_server.api.serve, ferrule_server.engine.engine, ferrule_server.loading"
    assert modules_after(code).isdisjoint({"torch", "numba", "transformers", "ferrule_client"})


def project_of(path: Path) -> dict[str, Any]:
    """Return the table ``project`` of a project file."""
    project: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return project


def test_version_is_the_same_everywhere() -> None:
    """Both projects, what is installed, and the client that the server requires."""
    client, server = project_of(ROOT / "pyproject.toml"), project_of(ROOT / "server" / "pyproject.toml")
    version = client["version"]
    assert server["version"] == importlib.import_module("ferrule_server").__version__ == version
    assert {importlib.metadata.version(name) for name in PACKAGES} == {version}
    assert f"ferrule[cli]=={version}" in server["dependencies"]
    assert (ROOT / "server" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_base_dependencies_are_the_clients() -> None:
    """Nothing the client does not import is in the base of its distribution."""
    names = project_of(ROOT / "pyproject.toml")["dependencies"]
    assert not [name for name in names if name.startswith(HEAVY)]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build both wheels from source distributions of the working tree; returns their paths by distribution."""
    pytest.importorskip("hatchling", reason="the build backend is not installed beside the tests")
    folder = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t"]
    for project in (ROOT, ROOT / "server"):
        subprocess.run([*build, "sdist"], cwd=project, check=True, capture_output=True, timeout=300)
    for path in folder.glob("*.tar.gz"):
        subprocess.run(["tar", "-xf", str(path), "-C", str(folder)], check=True, timeout=300)
        source = folder / path.name.removesuffix(".tar.gz")
        subprocess.run([*build, "wheel"], cwd=source, check=True, capture_output=True, timeout=300)
    return {path.name.partition("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}


def names_in(wheel: Path) -> set[str]:
    """Return the names of a wheel's files."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize("distribution", PACKAGES)
def test_wheel_holds_its_packages_and_nothing_else(wheels: dict[str, Path], distribution: str) -> None:
    """Stubs with their types and protos, typing markers, the page, the model that ships, and the licence."""
    expected = {
        str(path.relative_to(package.parent))
        for package in PACKAGES[distribution]
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = names_in(wheels[distribution])
    about = {name for name in names if ".dist-info/" in name}
    assert names - about == expected
    assert [name for name in about if name.endswith("/licenses/LICENSE")]


def test_client_is_small(wheels: dict[str, Path]) -> None:
    """Below a megabyte: no model, no server."""
    assert wheels["ferrule"].stat().st_size < 1_000_000


def environment_of(folder: Path, wheels: Iterable[Path]) -> Path:
    """Make a virtual environment with some of our wheels; returns the folder of its programs.

    What they require comes from the environment of the tests, whose own installation of Ferrule is not seen: it is
    editable, by ``.pth`` files, and those of a folder that is itself named in one are not read.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=300)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q", "--no-compile"]
    subprocess.run([*pip, "--no-index", "--no-deps", *map(str, wheels)], check=True, timeout=300)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "required.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


@pytest.fixture(scope="module")
def client(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the client alone; the folder of its programs."""
    return environment_of(tmp_path_factory.mktemp("client"), [wheels["ferrule"]])


@pytest.fixture(scope="module")
def server(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with both; the folder of its programs."""
    return environment_of(tmp_path_factory.mktemp("server"), wheels.values())


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the ``ferrule`` of an environment, outside the repository."""
    command = [str(folder / "ferrule"), *words]
    return subprocess.run(
        command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=100, check=False
    )


def clean_environment() -> dict[str, str]:
    """Return the variables of this process without a path to the sources."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.parametrize("command", ["demo", "serve", "check"])
def test_client_alone_says_what_a_server_requires(client: Path, command: str) -> None:
    """The name of the distribution to install."""
    done = run(client, command, *(["."] if command == "check" else []))
    assert done.returncode == 2, done.stdout
    assert "pip install ferrule-server" in done.stderr


def test_client_generates_on_an_installed_server(client: Path, server: Path) -> None:
    """Each from its own environment."""
    check_generates(client, server, "torch")


def check_generates(client: Path, server: Path, executor: str) -> None:
    """Start a server of an environment and talk to it from another."""
    command = [str(server / "ferrule"), "serve", "--listen", "127.0.0.1:0", "--executor", executor]
    with subprocess.Popen(command, cwd=server, env=clean_environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            (address,) = re.findall(r"ready listen=(\S+)", process.stdout.readline())
            done = run(client, "generate", "def area(", "--target", address, "--max-tokens", "8")
            assert done.returncode == 0, done.stderr
            assert len(done.stdout) > 8
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0


def test_demo_runs_from_the_wheels(server: Path) -> None:
    """With the model in the wheel."""
    done = run(server, "demo", "--executor", "torch")
    assert done.returncode == 0, done.stderr
    assert "blocks leaked                0" in done.stdout


@pytest.mark.parametrize(
    ("options", "local", "places"),
    [
        ([], ["filelock", "sympy"], ["--no-index", "its requirements"]),
        ([], ["nvidia-cublas; platform_system == 'Linux'"], ["uv", "its requirements"]),
        (["--index", "http://127.0.0.1:1"], [], ["--index-url", "its requirements"]),
        (["--build", "cuda"], [], ["pip", "its requirements"]),
    ],
)
def test_pytorch_comes_without_cuda(
    options: list[str], local: list[str], places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a local wheel that needs none, else by uv; an index is asked for PyTorch alone."""
    calls: list[str] = []

    def call(command: list[str], **_: object) -> int:
        if "--target" not in command:  # that installs uv
            assert ("--no-deps" in command) == (not calls), command
            named = [word for word in ("--no-index", "--index-url") if word in command]
            way = "uv" if command[0].endswith("uv") else [*named, "pip"][0]
            calls.append(way if not calls else "its requirements")
        return 0

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(install_torch, "is_installed", lambda *_: False)
    monkeypatch.setattr(install_torch, "found_locally", lambda *_: local)
    monkeypatch.setattr(subprocess, "call", call)
    assert install_torch.main(options) == 0
    assert calls == places


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fresh_environments_from_an_index(wheels: dict[str, Path], tmp_path: Path) -> None:
    """As a user installs them: pip brings what they require, and PyTorch comes without CUDA."""
    folders = {}
    for name, projects in (("client", ["ferrule"]), ("server", ["ferrule", "ferrule-server"])):
        python = tmp_path / name / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", str(tmp_path / name)], check=True, timeout=300)
        if name == "server":
            script = str(ROOT / "deploy" / "install_torch.py")
            subprocess.run([str(python), script], check=True, timeout=600, capture_output=True)
        pip = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, *(str(wheels[project]) for project in projects)], check=True, timeout=600)
        listed = subprocess.run([*pip[:3], "list"], check=True, timeout=300, capture_output=True, text=True).stdout
        assert not re.search(r"^(nvidia|cuda|triton|envoy|transformers)", listed, re.MULTILINE), listed
        folders[name] = python.parent
    assert run(folders["client"], "demo").returncode == 2
    assert run(folders["server"], "demo").returncode == 0
    check_generates(folders["client"], folders["server"], "auto")


@pytest.fixture(scope="module")
def with_protobuf_6(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment that pip has resolved for the client with the oldest protobuf it accepts.

    The server, without its reflection, which requires protobuf 7, and the tools of the tests are beside it.
    """
    folder = tmp_path_factory.mktemp("protobuf6")
    python, pins = folder / "bin" / "python", folder / "constraints.txt"
    text = (ROOT / "constraints.txt").read_text("utf-8")
    for name, version in OLDEST.items():
        text, num_replaced = re.subn(rf"^{name}==.*$", f"{name}=={version}", text, flags=re.MULTILINE)
        assert num_replaced == 1, name
    pins.write_text(text)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=300)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    subprocess.run([*pip, "-c", str(pins), str(wheels["ferrule"])], check=True, timeout=300)
    subprocess.run([*pip, "--no-index", "--no-deps", str(wheels["ferrule-server"])], check=True, timeout=300)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "required.pth").write_text(sysconfig.get_path("purelib"))  # what is installed above comes first
    return python


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_client_passes_its_tests_beside_protobuf_6(with_protobuf_6: Path) -> None:
    """Its wheel, with servers in the same environment: both sides run on protobuf 6.33."""
    said = "import google.protobuf, ferrule_client; print(google.protobuf.__version__, ferrule_client.__file__)"
    done = subprocess.run(
        [str(with_protobuf_6), "-c", said], capture_output=True, text=True, check=True, env=clean_environment()
    )
    version, place = done.stdout.split()
    assert version == OLDEST["protobuf"]
    assert Path(place).is_relative_to(with_protobuf_6.parents[1])
    command = [str(with_protobuf_6), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
    done = subprocess.run(
        [*command, "tests/client"], cwd=ROOT, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stubs_beside_protobuf_6_talk_to_a_server_beside_7(
    with_protobuf_6: Path, shipped_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example without the library, and every case of the contract by the Python runner."""
    command = [str(with_protobuf_6), str(ROOT / "examples" / "python" / "raw_stubs.py"), shipped_target]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("released 3\n")
    runner = Runner([str(with_protobuf_6), str(RUNNERS / "python" / "runner.py")], {"PYTHONPATH": ""})
    monkeypatch.setattr(conformance, "build", lambda _: runner)
    with Servers(tmp_path) as servers:
        results = conformance.play_all("python", load(), servers, {})
    assert {name: result for name, result in results.items() if result[0] != conformance.PASSED} == {}


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["aarch64-apple-darwin", "aarch64-unknown-linux-gnu", "x86_64-manylinux_2_28"])
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_wheels_exist_for(wheels: dict[str, Path], platform: str, python: str) -> None:
    """Pinned versions of all that the server requires, by a resolution for a platform (macOS 14 on Apple silicon)."""
    command = [
        "uv",
        "pip",
        "compile",
        "-",
        "--only-binary",
        ":all:",
        "-c",
        str(ROOT / "constraints.txt"),
        "--no-header",
    ]
    command += [
        "--python-platform",
        platform,
        "--python-version",
        python,
        "--find-links",
        str(wheels["ferrule"].parent),
    ]
    environment = clean_environment() | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
    done = subprocess.run(
        [tool(command[0]), *command[1:]],
        input="ferrule[cli]\nferrule-server[otel]\n",
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "torch==" in done.stdout
    assert "darwin" not in platform or not re.search("nvidia|triton|cuda", done.stdout)
