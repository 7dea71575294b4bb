"""The perplexity of a text is that of its windows, each after the tokens that the tokenizer puts before a text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from benchmarks.bench_quantised import WINDOW
from benchmarks.perplexity import perplexities, read_windows
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.model.weights import load_model
from tests.model.small_model import SHIPPED
from tests.model.stepping import Piece, PooledSequence, Stepper

TEXT = "def area(width, height):\n    return width * height\n"


def test_windows_follow_the_begin_token(tmp_path: Path) -> None:
    """The begin token is not part of a window, and no window is longer than the limit."""
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="a $A", special_tokens=[("a", 5)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "long.txt"
    path.write_text(TEXT * 200)
    begin, windows = read_windows(tmp_path, [path], 2)
    ids = tokenizer.encode(path.read_text(), add_special_tokens=False).ids
    assert begin == [5]
    assert windows == {"long.txt": [ids[:WINDOW], ids[WINDOW : 2 * WINDOW]]}


@pytest.mark.parametrize("begin", [[], [5]])
def test_every_token_after_another_counts_once(begin: list[int]) -> None:
    """Beside the logits of one step."""
    ids = Tokenizer.from_file(str(SHIPPED / "tokenizer.json")).encode(TEXT).ids
    found = perplexities("torch-float32", SHIPPED, begin, {"text": [ids]})["text"]
    tokens = [*begin, *ids]
    executor = TorchExecutor(load_model(SHIPPED, dtype="float32"), kv_memory_bytes=4 << 20, max_context=WINDOW)
    piece = Piece(PooledSequence(), tokens[:-1], num_outputs=len(tokens) - 1)
    rows = Stepper(executor).logits(piece).astype(np.float64)
    executor.close()
    logprobs = rows - np.logaddexp.reduce(rows, axis=-1, keepdims=True)
    losses = -logprobs[np.arange(len(rows)), tokens[1:]]
    assert found == pytest.approx(float(np.exp(losses.mean())), rel=1e-5)
