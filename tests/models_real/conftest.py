"""SmolLM2-135M-Instruct with its trained weights: the file, its texts, a server. `make test-models` runs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ferrule_server.named_models import NAMED_MODELS
from ferrule_server.text.tokenizer import Tokenizer
from tests.model.conftest import one_thread

__all__ = ["one_thread"]

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 500
"""Of each text that is scored; there are two, so 1 000 together."""


@pytest.fixture(scope="session")
def path() -> Path:
    """The GGUF file."""
    return NAMED_MODELS["smollm2"]()


@pytest.fixture(scope="session")
def tokenizer(path: Path) -> Tokenizer:
    """As the server loads it."""
    loaded = Tokenizer.load(path)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def texts(tokenizer: Tokenizer) -> list[list[int]]:
    """The first tokens of a license and of a page, one more than are scored."""
    pages = [ROOT / "LICENSE", ROOT / "docs" / "handles.md"]
    return [tokenizer.encode(page.read_text("utf-8"))[: NUM_TOKENS + 1] for page in pages]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with the model, on the kernels of the processor; it ends with 0."""
    place = tmp_path_factory.mktemp("real_model")
    address = f"unix:{place}/ferrule.sock"
    command = [sys.executable, "-m", "ferrule_server", "--model", "smollm2", "--executor", "numba-cpu"]
    command += ["--listen", address, "--kv-memory", "256MiB", "--drain-grace", "0s"]
    with (place / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready"), (place / "log").read_text()
        yield address
        process.terminate()
        assert process.wait(30) == 0
