"""The file of a trained model is taken from a package that is not imported, and only if it is the right one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tools.real_models.smollm2 import find_file

CONTENT = b"weights"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package with a file; an import of it fails."""
    folder = tmp_path / "package_with_weights"
    folder.mkdir()
    (folder / "__init__.py").write_text("import an_engine_that_is_not_installed")
    (folder / "model.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(tmp_path)
    return folder.name


def test_the_file_is_found_without_an_import(package: str) -> None:
    """The package requires an engine that is not there."""
    assert find_file(package, "model.gguf", SHA256).read_bytes() == CONTENT


def test_a_file_with_another_digest_is_refused(package: str) -> None:
    """Both digests are named."""
    with pytest.raises(ValueError, match=f"SHA-256 {SHA256}, not {'0' * 64}"):
        find_file(package, "model.gguf", "0" * 64)


@pytest.mark.parametrize("name", ["package_with_weights", "no_such_package"])
def test_what_is_not_installed_is_named(package: str, name: str) -> None:
    """With the target that installs it."""
    with pytest.raises(FileNotFoundError, match=f"{name} is not installed; run make test-models"):
        find_file(name, "other.gguf", SHA256)
