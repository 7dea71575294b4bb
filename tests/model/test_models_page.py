"""The tables of docs/models.md are those of the code: families, what runs them, and memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ferrule_server.executor.sizes import kv_bytes, weights_bytes
from ferrule_server.model.families import WRAPPERS
from ferrule_server.model.gguf.architectures import _ARCHITECTURES
from ferrule_server.model.gguf.blocks import BLOCKS
from ferrule_server.model_check.__main__ import size
from ferrule_server.model_check.catalogue import known_families
from tests.model.conftest import CASES
from tests.model.published_sizes import MODELS

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")


def family_rows() -> list[str]:
    """Return the rows of the families: architecture, models, differences, kernels of a GPU."""
    return [
        f"| `{family.architecture}` | {family.models} | {family.differs} | {'no' if family.gpu_kernels else 'yes'} |"
        for family in known_families()
    ]


def cases_of(architecture: str) -> str:
    """Return the cases of tests/model/conftest.py that compare a family with transformers."""
    return ", ".join(f"`{name}`" for name, case in CASES.items() if f"{case['family']}ForCausalLM" == architecture)


def memory_rows() -> list[str]:
    """Return the rows of memory in bfloat16: weights, KV of a token, and of the longest sequence."""
    rows = []
    for model in MODELS:
        network, dtype = model.network, torch.bfloat16
        per_token = network.kv_values * dtype.itemsize
        longest = network.max_positions
        sizes = weights_bytes(network, dtype), per_token, kv_bytes(network, dtype, longest)
        weights, token, all_tokens = map(size, sizes)
        rows.append(f"| {model.name} | {weights} | {token} | {all_tokens} ({longest}) |")
    return rows


def test_the_page_names_every_architecture_and_type_of_gguf_files() -> None:
    """And no other."""
    section = PAGE.partition("## GGUF files")[2].partition("| refused")[0]
    architectures, types = re.findall(r"\*\*(?:Architectures|Types)\*\*(.*?)\n\* ", f"{section}\n* ", re.DOTALL)
    names = {name.partition(" ")[0] for name in _ARCHITECTURES}
    assert set(re.findall(r"`(\w+)`", architectures)) == names
    assert re.findall(r"`(\w+)`", types) == ["F32", "F16", "BF16", *BLOCKS]


@pytest.mark.parametrize("rows", [family_rows, memory_rows])
def test_tables_are_those_of_the_code(rows: Callable[[], list[str]]) -> None:
    """If this fails because kernels run more or fewer models, copy the rows of the message into the page."""
    expected = rows()
    assert all(row in PAGE for row in expected), "docs/models.md must have:\n" + "\n".join(expected)


def test_kernels_of_the_processor_run_every_family() -> None:
    """The page has no column for them: it says so of all families."""
    assert "The processor's kernels run every family." in PAGE
    assert {
        family.architecture: family.processor_kernels for family in known_families() if family.processor_kernels
    } == {}


def test_every_family_has_a_case() -> None:
    """Without one nothing is proven."""
    assert [family.architecture for family in known_families() if not cases_of(family.architecture)] == []


def test_wrappers_are_named() -> None:
    """With what is left out."""
    for wrapper in WRAPPERS:
        assert f"`{wrapper.architecture}`" in PAGE
