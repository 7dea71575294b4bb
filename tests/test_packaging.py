"""What users install: a light client, exact public names, and a wheel with everything in it."""

import importlib
import importlib.metadata
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    ROOT / "protos" / "ferrule",
    ROOT / "server" / "ferrule_server",
    ROOT / "client" / "ferrule_client",
    ROOT / "client" / "ferrule_cli",
)
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


def modules_after(code: str) -> set[str]:
    """Return the names of the top-level packages a fresh interpreter has imported after running ``code``."""
    script = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_client_imports_nothing_heavy() -> None:
    """An application that imports the client pays for gRPC and numpy only."""
    assert modules_after("from ferrule import Client").isdisjoint(HEAVY)


def test_server_rings_import_without_torch() -> None:
    """Wire, host and paged reference start at once; torch comes with the torch executor."""
    code = "import ferrule_server.api.serve, ferrule_server.engine.engine, ferrule_server.loading"
    assert modules_after(code).isdisjoint({"torch", "numba", "transformers", "ferrule_client"})


def test_version_is_the_same_everywhere() -> None:
    """The project file, the server and the installed distribution agree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    server = importlib.import_module("ferrule_server")
    assert project["version"] == server.__version__ == importlib.metadata.version("ferrule")


def test_base_dependencies_are_the_clients() -> None:
    """Nothing the client does not import is in the base of the distribution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not [name for name in project["dependencies"] if name.startswith(HEAVY)]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Build the wheel from the working tree, without a network, and return the names of its files."""
    pytest.importorskip("hatchling", reason="the build backend is not installed beside the tests")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_file_of_the_three_packages(wheel_names: set[str]) -> None:
    """Stubs with their types and protos, typing markers and the model that ships; caches stay out."""
    expected = {
        str(path.relative_to(package.parent))
        for package in PACKAGES
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected - wheel_names == set()
    assert not [name for name in wheel_names if "__pycache__" in name or name.startswith("tests/")]


@pytest.mark.parametrize(
    "name",
    [
        "ferrule/v1/executor.proto",
        "ferrule/v1/executor_pb2.py",
        "ferrule/v1/executor_pb2.pyi",
        "ferrule/v1/executor_pb2_grpc.py",
        "ferrule_client/py.typed",
        "ferrule_server/py.typed",
        "ferrule_server/api/web/page/index.html",
        "ferrule_server/api/web/page/main.js",
        "ferrule_server/demo_model/config.json",
        "ferrule_server/demo_model/model.safetensors",
        "ferrule_server/demo_model/tokenizer.json",
    ],
)
def test_wheel_holds(wheel_names: set[str], name: str) -> None:
    """The files that go missing first when a build setting changes."""
    assert name in wheel_names


def test_wheel_carries_its_licence_and_command(wheel_names: set[str]) -> None:
    """The Apache licence travels along, and the ``ferrule`` command is declared."""
    version = importlib.metadata.version("ferrule")
    assert f"ferrule-{version}.dist-info/licenses/LICENSE" in wheel_names
    assert f"ferrule-{version}.dist-info/entry_points.txt" in wheel_names
