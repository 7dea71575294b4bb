"""The arrows between packages never reverse: each package imports only what the table allows it.

    ferrule.v1 <- client
    ferrule.v1 <- api -> engine -> {kv, executor.base}
    executor -> model -> kernels
    errors and config are leaves; server and client never import each other.

The walk is over the syntax tree, so imports inside functions and under TYPE_CHECKING count too. The standard library is
open to all. A package without a row in the table fails, so that a new one gets its place here first.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (ROOT / "server", ROOT / "client")

WIRE = ("ferrule.v1", "google", "grpc", "grpc_health", "grpc_reflection", "grpc_status")
VERSION = "ferrule_server.__version__"
HOST_ONLY = ("numpy", "ferrule_server.errors", "ferrule_server.quotas", "ferrule_server.executor.base")
CHOICE = tuple(f"ferrule_server.executor.{module}" for module in ("philox", "ranking", "shaping", "laws", "drafts"))
DEVICE = ("numpy", "numba", "safetensors", "torch")

# The longest matching name decides. `executor` is the device ring but for the modules that must start at once, and
# `executor.select`, which composes it. The server's version is open to all of the server.
ALLOWED: dict[str, tuple[str, ...]] = {
    "ferrule_client": ("ferrule_client", "numpy", *WIRE),
    "examples": WIRE,  # the one of client/examples that is in Python: no library
    "generate_aio": ("source_edits",),
    "source_edits": (),
    "ferrule_cli*": ("ferrule_cli", "ferrule_client"),
    "ferrule_client.cli*": ("ferrule_client", "numpy", "rich", *WIRE),
    "ferrule_client.demo*": ("ferrule_client", "numpy", "rich", *WIRE),
    "ferrule_server": (),
    "ferrule_server.__main__": ("ferrule_server", "rich"),
    "ferrule_server.errors": (),
    "ferrule_server.quotas": (),
    "ferrule_server.suffixes": (),
    "ferrule_server.arguments": (),
    "ferrule_server.log_format": (),
    "ferrule_server.config": ("ferrule_server.arguments", "ferrule_server.errors", "ferrule_server.quotas"),
    "ferrule_server.kv": ("ferrule_server.kv", "ferrule_server.errors", "ferrule_server.quotas", "numpy"),
    "ferrule_server.engine": ("ferrule_server.engine", "ferrule_server.kv", "ferrule_server.suffixes", *HOST_ONLY),
    "ferrule_server.api": (
        "ferrule_server.api",
        "ferrule_server.engine",
        "ferrule_server.kv",
        "ferrule_server.text",
        "ferrule_server.config",
        "ferrule_server.log_format",
        *HOST_ONLY,
        *WIRE,
    ),
    "ferrule_server.api.client_certificate": ("cryptography",),
    "ferrule_server.api.tracing": ("ferrule_server.api", "ferrule_server.engine", "opentelemetry"),
    "ferrule_server.api.metrics": ("ferrule_server.api", "ferrule_server.engine", "prometheus_client", "ferrule.v1"),
    "ferrule_server.model_files": ("ferrule_server.errors",),
    "ferrule_server.text": (
        "ferrule_server.text",
        "ferrule_server.model_files",
        "ferrule_server.suffixes",
        "ferrule_server.errors",
        "jinja2",
        "tokenizers",
    ),
    "ferrule_server.executor": (
        "ferrule_server.executor",
        "ferrule_server.model",
        "ferrule_server.kernels",
        "ferrule_server.errors",
        *DEVICE,
    ),
    "ferrule_server.executor.base": ("numpy",),
    "ferrule_server.executor.philox": (),
    **{
        f"ferrule_server.executor.{module}": (*CHOICE, "ferrule_server.executor.base", "numpy")
        for module in ("ranking", "shaping", "laws", "drafts", "sampling")
    },
    "ferrule_server.executor.paged_reference": ("ferrule_server.executor.sampling", *HOST_ONLY),
    "ferrule_server.executor.select": (
        "ferrule_server.executor",
        "ferrule_server.model_files",
        "ferrule_server.model",
        "ferrule_server.text",
        "ferrule_server.config",
        "ferrule_server.errors",
        *DEVICE,
    ),
    "ferrule_server.model": (
        "ferrule_server.model",
        "ferrule_server.model_files",
        "ferrule_server.kernels",
        "ferrule_server.errors",
        *DEVICE,
    ),
    "ferrule_server.model.hub": ("ferrule_server.model", "ferrule_server.errors"),
    "ferrule_server.model.hub_client": ("ferrule_server.model", "ferrule_server.errors", "huggingface_hub"),
    "ferrule_server.model.hub_cache": ("ferrule_server.model_files", "ferrule_server.errors"),
    "ferrule_server.model.hub_fetch": ("ferrule_server.model.hub_cache", "ferrule_server.errors"),
    "ferrule_server.kernels": ("ferrule_server.kernels", *DEVICE),
    # The GPU kernels know neither their compiler nor the driver: a port replaces one module each.
    "ferrule_server.kernels.cuda": ("ferrule_server.kernels.cuda", "numpy", "torch"),
    "ferrule_server.kernels.cuda.toolchain": ("ferrule_server.kernels.cuda", "numpy", "rich"),
    "ferrule_server.kernels.cuda.toolchain.compile": ("ferrule_server.kernels.cuda", "llvmlite", "numba"),
    "ferrule_server.kernels.cuda.toolchain.driver": ("ferrule_server.kernels.cuda", "cuda"),
    "ferrule_server.training": ("ferrule_server.training", "rich", "tokenizers", *DEVICE),
}


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
        ("ferrule_server.engine.engine", "def f():\n    from ferrule_server.executor.paged_reference import X"),
        ("ferrule_server.engine.engine", "from ferrule_server import api"),
        ("ferrule_server.kv.store", "from ferrule_server.executor.base import NO_SLOT"),
        ("ferrule_server.kv.store", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("ferrule_server.errors", "from ferrule_server.kv import handle"),
        ("ferrule_server.errors", "from . import kv"),
        ("ferrule_server.config", "import numpy"),
        ("ferrule_server.executor.sampling", "import torch"),
        ("ferrule_server.executor.paged_reference", "from ferrule_server.executor.buffers import X"),
        ("ferrule_server.model.decoder", "from ferrule_server.executor.base import StepBatch"),
        ("ferrule_server.kernels.reference", "from ferrule.v1 import types_pb2"),
        ("ferrule_server.api.status", "import ferrule_client"),
        ("ferrule_client.cache", "import ferrule_server.errors"),
        ("ferrule_client.cli", "from ferrule_server import __version__"),
        ("ferrule_client.cache", "import torch.nn"),
        ("ferrule_client.cache", "import rich"),
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
        ("ferrule_server.executor.torch_executor", "import torch.nn.functional as F"),
        ("ferrule_client.cli_top", "from rich.table import Table"),
        ("ferrule_server.__main__", "from ferrule_server.executor.paged_reference import PagedReferenceExecutor"),
    ],
)
def test_arrow_in_its_direction_passes(module: str, source: str) -> None:
    """What the table allows is not reported."""
    assert violations(module, source) == []
