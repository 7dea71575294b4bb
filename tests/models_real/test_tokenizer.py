"""Text becomes the tokens that llama.cpp makes of it, by the vocabulary of the same file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferrule_server.text.tokenizer import Tokenizer
from tests.models_real.record_ids import recorded

pytestmark = pytest.mark.real_model


def test_ids_are_those_of_llama_cpp(path: Path) -> None:
    """Of 1 000 texts, in which nothing is a control token."""
    tokenizer = Tokenizer.load(path)
    assert tokenizer is not None
    rows = recorded()
    ours = [tokenizer.encode(row.text, parse_special_tokens=False) for row in rows]
    assert len(rows) == 1000
    assert [row.text for row, ids in zip(rows, ours, strict=True) if ids != row.token_ids] == []


def test_the_text_of_the_ids_is_the_text(path: Path) -> None:
    """Byte by byte: no space is cleaned up, and no character is replaced."""
    tokenizer = Tokenizer.load(path)
    assert tokenizer is not None
    assert [row.text for row in recorded() if tokenizer.decode(row.token_ids) != row.text] == []
