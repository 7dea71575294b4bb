"""Kernels that no bundle has are built at the start of a server, once, by a process of its own."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from ferrule_server.executor.cuda.bundle import Bundle, source_hash
from ferrule_server.executor.cuda.gpu import GpuError
from ferrule_server.executor.cuda.kernel_choice import shape_of, specs_needed
from ferrule_server.kernel_builder import at_start
from ferrule_server.kernel_builder.at_start import built_bundle
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES
from tests.executor.cuda.tiny_model import tiny_config

SHAPE = next(iter(MODEL_SHAPES.values()))
HOPPER = (9, 0)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_start, "_PROGRAM", "tests.executor.cuda.compiler_stand_in")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def built(cache: Path, capability: tuple[int, int] = HOPPER) -> tuple[Path, list[float]]:
    """Return the bundle, and the progress that was told."""
    shares: list[float] = []
    return built_bundle(SHAPE, capability, cache=cache, on_progress=shares.append), shares


@pytest.mark.usefixtures("_stand_in")
def test_a_bundle_is_built_once_and_found_afterwards(tmp_path: Path) -> None:
    """By sources, shape and architecture; the progress is that of the process, whatever else it prints."""
    path, shares = built(tmp_path)
    assert shares == [0.25, 1.0]
    assert path.parent == tmp_path / "gpu-kernels"
    assert path.name.startswith(f"{source_hash()}-")
    assert path.name.endswith("-sm_90a.bundle")
    assert "sm_90a" in path.read_text()
    assert built(tmp_path) == (path, [])
    other = built_bundle(list(MODEL_SHAPES.values())[1], HOPPER, cache=tmp_path, on_progress=lambda _: None)
    assert other != path
    assert built(tmp_path, (8, 9))[0].name.endswith("-sm_89.bundle")


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize(("name", "message"), [("refusing", "numba refuses embed"), ("silent", "exit code 0")])
def test_a_compiler_that_fails_says_why_and_is_asked_again(tmp_path: Path, name: str, message: str) -> None:
    """Nothing of it is taken for a bundle."""
    for _ in range(2):
        with pytest.raises(GpuError, match=f"compiling the kernels ended with .*{message}"):
            built(tmp_path / name)


def test_without_the_compiler_one_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(GpuError, match=r"not installed .*pip install 'ferrule-server\[cuda\]'"):
        built(tmp_path)
    assert list(tmp_path.rglob("*.bundle")) == []


def test_a_gpu_without_kernels_is_not_compiled_for(tmp_path: Path) -> None:
    """Turing has none of the instructions."""
    with pytest.raises(GpuError, match=r"no kernels for compute capability 7\.5"):
        built(tmp_path, (7, 5))


@pytest.mark.slow
def test_the_compiler_builds_what_a_model_needs(tmp_path: Path) -> None:
    """The real one, in its own process: each kernel of the model is in the bundle."""
    shape = shape_of(tiny_config())
    shares: list[float] = []
    path = built_bundle(shape, HOPPER, cache=tmp_path, on_progress=shares.append)
    specs = specs_needed(shape, is_deterministic=False)
    assert set(Bundle.open(path).read(specs)) == set(specs)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
