"""The arrows between packages never reverse: each package imports only what the table allows it.

    ferrule.v1 <- client
    ferrule.v1 <- api -> engine -> {kv, durability, executor.base}
    executor -> model -> kernels
    errors and config are leaves; server and client never import each other.

The walk is over the syntax tree, so imports inside functions and under TYPE_CHECKING count too. The standard library is
open to all. A package without a row in the table fails, so that a new one gets its place here first.

The *rooms* of a package are the modules and packages directly in it. :data:`ROOMS` bounds how many there are, how many
arrows join them (ordered pairs of rooms where one imports the other) and the longest chain of arrows. :data:`BUDGET`
bounds the code lines of each product. Whoever raises a bound of rooms says why in the same commit.
"""

import ast
import dataclasses
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from ferrule_server.api.requests.planned import PlannedAppend
from ferrule_server.engine.appends.records import AppendRecord
from ferrule_server.engine.appends.running import RunningAppend
from ferrule_server.engine.jobs import AppendJob, AppendResult, OutputRequest
from ferrule_server.kv.new_sequence import NewSequence
from ferrule_server.kv.reservation import Reservation
from tools.code_lines import SERVER, count_below, numbers, product_lines

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (ROOT / "server", ROOT / "client")

WIRE = ("ferrule.v1", "google", "grpc", "grpc_health", "grpc_reflection", "grpc_status")
VERSION = "ferrule_server.__version__"
HOST_ONLY = ("numpy", "ferrule_server.errors", "ferrule_server.quotas", "ferrule_server.executor.base")
DEVICE = ("numpy", "numba", "safetensors", "torch")

# The longest matching name decides. `executor` is the device ring but for the modules that must start at once, and
# `loading`, which composes it. The server's version is open to all of the server.
ALLOWED: dict[str, tuple[str, ...]] = {
    "ferrule_client": ("ferrule_client", "numpy", *WIRE),
    "ferrule_cli": ("ferrule", "ferrule_cli", "ferrule_client", "numpy", "rich", *WIRE),
    "ferrule_server": (),
    "ferrule_server.__main__": ("ferrule_server",),
    "ferrule_server.composition": ("ferrule_server",),
    "ferrule_server.console": ("ferrule_server", "rich"),
    "ferrule_server.process": ("ferrule_server.config", "ferrule_server.log_format"),
    "ferrule_server.errors": (),
    "ferrule_server.quotas": ("ferrule_server.settings",),
    "ferrule_server.suffixes": (),
    "ferrule_server.settings": ("ferrule_server.errors",),
    "ferrule_server.addresses": ("ferrule_server.settings", "ferrule_server.errors"),
    "ferrule_server.arguments": (
        "ferrule_server.config",
        "ferrule_server.config_file",
        "ferrule_server.errors",
        "ferrule_server.settings",
    ),
    "ferrule_server.config_file": ("ferrule_server.errors", "ferrule_server.settings"),
    "ferrule_server.log_format": (),
    "ferrule_server.config": (
        "ferrule_server.addresses",
        "ferrule_server.errors",
        "ferrule_server.named_models",
        "ferrule_server.quotas",
        "ferrule_server.settings",
    ),
    # Turns, places and rates of principals, without knowledge of what these do.
    "ferrule_server.fairness": ("ferrule_server.fairness", "ferrule_server.errors"),
    "ferrule_server.kv": ("ferrule_server.kv", "ferrule_server.errors", "ferrule_server.quotas", "numpy"),
    "ferrule_server.engine": (
        "ferrule_server.engine",
        "ferrule_server.durability",
        "ferrule_server.fairness",
        "ferrule_server.kv",
        "ferrule_server.suffixes",
        *HOST_ONLY,
    ),
    "ferrule_server.api": (
        "ferrule_server.api",
        "ferrule_server.engine",
        "ferrule_server.fairness",
        "ferrule_server.kv",
        "ferrule_server.text",
        "ferrule_server.addresses",
        "ferrule_server.config",
        "ferrule_server.host",
        "ferrule_server.log_format",
        "ferrule_server.settings",
        *HOST_ONLY,
        *WIRE,
    ),
    # The journal knows records and disks, and nothing of what the records stand for.
    "ferrule_server.durability": ("ferrule_server.durability", "ferrule_server.errors", "google_crc32c"),
    "ferrule_server.durability.__main__": ("ferrule_server.durability", "ferrule_server.errors", "rich"),
    "ferrule_server.api.security.client_certificate": ("cryptography",),
    "ferrule_server.api.telemetry.tracing": ("ferrule_server.api", "ferrule_server.engine", "opentelemetry"),
    "ferrule_server.api.telemetry.metrics": (
        "ferrule_server.api",
        "ferrule_server.engine",
        "prometheus_client",
        "ferrule.v1",
    ),
    "ferrule_server.host": (),
    "ferrule_server.model_files": ("ferrule_server.errors",),
    "ferrule_server.named_models": ("ferrule_server.errors",),
    # Texts and configuration are read alike from a folder and from a GGUF file.
    "ferrule_server.model_folder": ("ferrule_server.model.gguf", "ferrule_server.model_files"),
    "ferrule_server.text": (
        "ferrule_server.text",
        "ferrule_server.model_files",
        "ferrule_server.model_folder",
        "ferrule_server.suffixes",
        "ferrule_server.errors",
        "jinja2",
        "tokenizers",
    ),
    "ferrule_server.executor": (
        "ferrule_server.executor",
        "ferrule_server.model",
        "ferrule_server.kernels",
        "ferrule_server.host",
        "ferrule_server.errors",
        *DEVICE,
    ),
    "ferrule_server.executor.host_plan": ("ferrule_server.host", "ferrule_server.errors"),
    "ferrule_server.executor.base": ("ferrule_server.model.config", "numpy"),
    # The frame of every fast path: it knows neither CUDA nor the kernels.
    "ferrule_server.executor.fallback": (
        "ferrule_server.executor.fallback",
        "ferrule_server.executor.base",
        "ferrule_server.errors",
        "numpy",
        "torch",
    ),
    "ferrule_server.executor.sampling": ("ferrule_server.executor.sampling", "ferrule_server.executor.base", "numpy"),
    "ferrule_server.executor.sampling.exponential": ("ferrule_server.kernels.cpu.doubles", "numba", "numpy"),
    "ferrule_server.executor.sampling.device*": (
        "ferrule_server.executor.sampling",
        "ferrule_server.executor.base",
        "numpy",
        "torch",
    ),
    "ferrule_server.executor.reference": (
        "ferrule_server.executor.sampling",
        "ferrule_server.model.config",
        *HOST_ONLY,
    ),
    "ferrule_server.loading": (
        "ferrule_server.executor",
        "ferrule_server.kernels",
        "ferrule_server.kernel_builder",
        "ferrule_server.model_files",
        "ferrule_server.named_models",
        "ferrule_server.model",
        "ferrule_server.text",
        "ferrule_server.config",
        "ferrule_server.host",
        "ferrule_server.errors",
        *DEVICE,
    ),
    # It composes, as `loading` does, and stops before anything is read.
    "ferrule_server.model_check": (
        "ferrule_server.model_check",
        "ferrule_server.loading",
        "ferrule_server.executor",
        "ferrule_server.kernels",
        "ferrule_server.model_files",
        "ferrule_server.named_models",
        "ferrule_server.model",
        "ferrule_server.arguments",
        "ferrule_server.config",
        "ferrule_server.errors",
        "torch",
    ),
    "ferrule_server.model": (
        "ferrule_server.model",
        "ferrule_server.model_files",
        "ferrule_server.model_folder",
        "ferrule_server.kernels",
        "ferrule_server.errors",
        *DEVICE,
    ),
    "ferrule_server.model.hub": (
        "ferrule_server.model",
        "ferrule_server.model_files",
        "ferrule_server.errors",
        "huggingface_hub",
    ),
    "ferrule_server.kernels": ("ferrule_server.kernels", *DEVICE),
    # The kernels of the processor write some LLVM code themselves.
    "ferrule_server.kernels.cpu": (
        "ferrule_server.kernels.matrix_kinds",
        "ferrule_server.kernels.cpu",
        "llvmlite",
        "numba",
        "numpy",
    ),
    "ferrule_server.kernel_builder": (
        "ferrule_server.kernel_builder",
        "ferrule_server.kernels",
        "ferrule_server.executor.cuda",
        "llvmlite",
        "numba",
    ),
    # The GPU kernels know neither their compiler (kernel_builder) nor the driver: a port replaces one module each.
    "ferrule_server.kernels.cuda": ("ferrule_server.kernels.cuda", "numpy", "torch"),
    "ferrule_server.executor.cuda.driver": ("ferrule_server.kernels.cuda", "cuda"),
    "ferrule_server.executor.cuda.bundle": ("ferrule_server.kernels", "ferrule_server.errors"),
}

ROOMS = {
    # package: rooms, rooms in the longest chain, arrows
    "ferrule_server.engine": (15, 5, 42),
    "ferrule_server.api": (14, 7, 37),
}
MAX_FILES = 10
"""In each room of these packages."""
MAX_FILE_LINES = 400
"""Code lines of a file."""
LONGER_FILES: dict[str, int] = {}
MAX_CONSTRUCTOR_LINES = 25
"""Code lines of a constructor of the engine."""
RECORDS = (
    *(PlannedAppend, AppendJob, OutputRequest, NewSequence),
    *(Reservation, RunningAppend, AppendResult, AppendRecord),
)
"""What is said of an append on its way."""
MAX_RECORD_FIELDS = 77
"""Of all these together."""
BUDGET: dict[str, int] = {
    "server": 35790,  # packed matrices and GGUF: 1 400; mixtures of experts: 1 200
    "client": 11796,
    "tools": 5520,  # the training of the bundled model came from the server with 650
}
"""Code lines of each product (``python -m tools.code_lines``). A sum rises only by what an issue grants."""


def is_below(name: str, package: str) -> bool:
    """Whether a dotted name is the package itself or lies in it; a star at the end stands for any ending."""
    if package.endswith("*"):
        return name.startswith(package[:-1])
    return name == package or name.startswith(package + ".")


def imports_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import; a relative one as the dots it is written with."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def violations(module: str, source: str) -> list[str]:
    """Return a sentence for each import of a module that the table does not allow."""
    rows = [package for package in ALLOWED if is_below(module, package) and package != "ferrule_server"]
    if not rows and module != "ferrule_server":
        return [f"{module} has no row in the table of tests/test_architecture.py"]
    allowed = ALLOWED[max(rows, key=len, default="ferrule_server")]
    if is_below(module, "ferrule_server"):
        allowed = (*allowed, VERSION)
    return [
        f"{module}, line {line}: imports {name}; allowed: {', '.join(allowed)}"
        for line, name in imports_of(source)
        if name.split(".")[0] not in sys.stdlib_module_names and not any(is_below(name, part) for part in allowed)
    ]


def modules() -> dict[str, Path]:
    """Return every module of server and client by dotted name."""
    paths = {path: root for root in SOURCES for path in sorted(root.rglob("*.py"))}
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path, root in paths.items()
    }


def test_every_import_follows_the_arrows() -> None:
    """Names each module and import that breaks a ring."""
    broken = [
        sentence for name, path in modules().items() for sentence in violations(name, path.read_text(encoding="utf-8"))
    ]
    assert not broken, "\n".join(broken)


def test_table_names_only_what_exists() -> None:
    """A row for a module that is gone is a promise nobody keeps."""
    names = modules()
    assert [package for package in ALLOWED if not any(is_below(name, package) for name in names)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ferrule_server.engine.engine", "import grpc"),
        ("ferrule_server.engine.engine", "def f():\n    from ferrule_server.executor.reference import X"),
        ("ferrule_server.engine.engine", "from ferrule_server import api"),
        ("ferrule_server.kv.sequence_store", "from ferrule_server.executor.base import NO_SLOT"),
        ("ferrule_server.kv.sequence_store", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("ferrule_server.errors", "from ferrule_server.kv import handle"),
        ("ferrule_server.errors", "from . import kv"),
        ("ferrule_server.config", "import numpy"),
        ("ferrule_server.executor.sampling.selection", "import torch"),
        ("ferrule_server.executor.reference", "from ferrule_server.executor.torch import X"),
        ("ferrule_server.executor.fallback.executor", "from ferrule_server.executor.cuda.gpu import Gpu"),
        ("ferrule_server.executor.fallback.split", "from ferrule_server.kernels.cuda.gemm import MAX_TOKENS"),
        ("ferrule_server.executor.fallback.device", "import numba"),
        ("ferrule_server.model.decoder", "from ferrule_server.executor.base import StepBatch"),
        ("ferrule_server.kernels.reference", "from ferrule.v1 import types_pb2"),
        ("ferrule_server.api.rpc.status", "import ferrule_client"),
        ("ferrule_client.sync.cache", "import ferrule_server.errors"),
        ("ferrule_cli.app", "from ferrule_server import __version__"),
        ("ferrule_client.sync.cache", "import torch.nn"),
        ("ferrule_client.sync.cache", "import rich"),
        ("ferrule_server", "import numpy"),
        ("ferrule_server.novelty.thing", "import os"),
    ],
)
def test_reversed_arrow_is_caught(module: str, source: str) -> None:
    """The walk itself works: one violation of each kind, named with module and import."""
    found = violations(module, source)
    assert len(found) == 1
    assert found[0].startswith(module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ferrule_server.engine.engine", "from ferrule_server.executor import base\nimport numpy as np, os.path"),
        ("ferrule_server.executor.torch", "import torch.nn.functional as F"),
        ("ferrule_cli.top.command", "from rich.table import Table"),
        ("ferrule_server.__main__", "from ferrule_server.executor.reference import PagedReferenceExecutor"),
    ],
)
def test_arrow_in_its_direction_passes(module: str, source: str) -> None:
    """What the table allows is not reported."""
    assert violations(module, source) == []


def test_the_package_of_the_contract_lends_the_names_of_the_client() -> None:
    """The one exception: ``ferrule`` and its public modules import the client, ``ferrule.v1`` nothing of it."""
    for path in sorted((ROOT / "protos" / "ferrule").rglob("*.py")):
        foreign = {name.split(".")[0] for _, name in imports_of(path.read_text("utf-8"))} - sys.stdlib_module_names
        is_public = path.parent.name == "ferrule"
        assert foreign <= {"ferrule_client"} if is_public else "ferrule_client" not in foreign, path


@pytest.mark.parametrize("folder", ["benchmarks", "tools"])
def test_programs_import_no_tests(folder: str) -> None:
    """Only the plugin that runs tests on a GPU knows them."""
    files = [path for path in (ROOT / folder).rglob("*.py") if path != ROOT / "tools" / "gpu" / "plugin.py"]
    imported = {path: [name for _, name in imports_of(path.read_text(encoding="utf-8"))] for path in files}
    assert imported
    assert [path for path, names in imported.items() if any(is_below(name, "tests") for name in names)] == []


# ---- rooms ----------------------------------------------------------------------------------------------------------


def inner_imports(names: Mapping[str, Path], name: str) -> set[str]:
    """Return the modules of ours that a module imports; ``from package import module`` is an import of the module."""
    found = (imported for _, imported in imports_of(names[name].read_text(encoding="utf-8")))
    return {whole for it in found if (whole := it if it in names else it.rpartition(".")[0]) in names}


def room_of(name: str, package: str) -> str:
    """Return the room of a module: the first part of its name behind that of the package."""
    return name.removeprefix(f"{package}.").partition(".")[0]


def rooms_of(package: str) -> dict[str, set[str]]:
    """Return the rooms of a package, each with those that it imports."""
    names = modules()
    rooms: dict[str, set[str]] = defaultdict(set)
    for name in names:
        if name.startswith(f"{package}."):
            room = room_of(name, package)
            targets = {it for it in inner_imports(names, name) if it.startswith(f"{package}.")}
            rooms[room] |= {room_of(it, package) for it in targets} - {room}
    return dict(rooms)


def longest_chain(arrows: Mapping[str, Set[str]]) -> int:
    """Return how many rooms stand in the longest chain of arrows, of which there must be no cycle."""

    @cache
    def length(room: str) -> int:
        return 1 + max(map(length, arrows[room]), default=0)

    return max(map(length, arrows))


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_are_few_and_in_layers(package: str) -> None:
    """No more rooms, layers and arrows than planned, and no cycle among them."""
    rooms = rooms_of(package)
    try:
        TopologicalSorter(rooms).prepare()
    except CycleError as error:
        pytest.fail(f"rooms import each other: {' <- '.join(error.args[1])}")
    assert len(rooms) <= ROOMS[package][0]
    assert longest_chain(rooms) <= ROOMS[package][1]
    assert sum(map(len, rooms.values())) <= ROOMS[package][2]


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_are_small(package: str) -> None:
    """A room is read from its map."""
    folder = ROOT / "server" / package.replace(".", "/")
    files = {room: len(list(room.glob("*.py"))) - 1 for room in folder.iterdir() if (room / "__init__.py").exists()}
    assert {room.name: number for room, number in files.items() if number > MAX_FILES} == {}


def test_no_modules_import_each_other() -> None:
    """Not in a larger circle either."""
    names = {name: path for name, path in modules().items() if name.startswith("ferrule_server")}
    graph = {name: inner_imports(names, name) - {name} for name in names}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1]
        assert all(before in graph[after] for before, after in pairwise(circle))
        pytest.fail(" <- ".join(circle))


def test_packages_have_maps() -> None:
    """A package of more than five modules names each of them, and its packages, in the docstring of its __init__."""
    for init in SERVER.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        files = [path.name for path in init.parent.glob("*.py") if path.name != "__init__.py"]
        folders = [f"{path.name}/" for path in init.parent.iterdir() if (path / "__init__.py").exists()]
        if len(files) > 5 and init.parent != SERVER:
            assert [name for name in files + folders if name not in text] == [], init.parent


# ---- lines ----------------------------------------------------------------------------------------------------------


def test_code_stays_within_its_budget() -> None:
    """A feature pays for itself: what is new is made room for by what it generalises."""
    assert {name: lines for name, lines in product_lines().items() if lines > BUDGET[name]} == {}


def test_an_append_is_said_in_few_fields() -> None:
    """Each thing once; a new field of one takes the place of another."""
    assert sum(len(dataclasses.fields(record)) for record in RECORDS) <= MAX_RECORD_FIELDS


def test_constructors_of_the_engine_are_short() -> None:
    """Parts are made by an assembly and not by each other."""
    long: dict[str, int] = {}
    for path in (SERVER / "engine").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        code = numbers(source)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__post_init__"):
                lines = len(code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
                long |= {f"{path.name}:{node.lineno}": lines} if lines > MAX_CONSTRUCTOR_LINES else {}
    assert long == {}


def test_files_are_not_long() -> None:
    """Nor is one an exception that need not be."""
    lines = {path.relative_to(SERVER).as_posix(): number for path, number in count_below([SERVER]).items()}
    assert {name: number for name, number in lines.items() if number > LONGER_FILES.get(name, MAX_FILE_LINES)} == {}
    assert {name for name in LONGER_FILES if lines.get(name, 0) <= MAX_FILE_LINES} == set()
