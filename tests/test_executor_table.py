"""docs/executor.md: every method of the trait has a row, and every test that a row names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_TEXT = (_ROOT / "docs" / "executor.md").read_text()
_TRAIT = (
    "info",
    "supports_native_unified_decode",
    "kv_capacity",
    "reserve_kv_slots",
    "kv_slot_capacity_snapshot",
    "recurrent_state_spec",
    "prefill",
    "batch_prefill",
    "decode",
    "batch_decode",
    "unified_decode",
    "forward",
    "truncate_kv",
    "forward_verify",
    "capabilities",
    "status",
    "cache_metrics_snapshot",
    "lora_metrics_snapshot",
    "warmup",
    "shutdown",
    "release_cache",
)
_NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", _TEXT)))


def test_every_method_of_the_trait_has_one_row() -> None:
    """No row is missing and none is there twice."""
    rows = re.findall(r"^\| `(\w+)` \|", _TEXT.split("Of the traits beside it")[0], re.MULTILINE)
    assert sorted(rows) == sorted(_TRAIT)


@pytest.mark.parametrize(("file", "name"), _NAMED)
def test_every_test_that_is_named_exists(file: str, name: str) -> None:
    """A renamed test must not leave a promise without its proof."""
    text = (_ROOT / file).read_text()
    assert not name or re.search(rf"^\s*(async )?def {name}\(", text, re.MULTILINE), f"{file} has no {name}"
