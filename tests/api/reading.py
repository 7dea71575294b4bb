"""A reader of requests without a server, for the tests of what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.requests.inputs import InputReader
from ferrule_server.engine.masks import MaskRegistry
from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import ModelDescription
from ferrule_server.model.config import LayerKind, ModelConfig
from ferrule_server.text.tokenizer import Tokenizer


def make_reader(
    vocab_size: int = 97,
    *,
    max_context: int = 512,
    limits: ApiLimits | None = None,
    eos_ids: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
    is_durable: bool = False,
) -> InputReader:
    """Return a reader for a model of these sizes, whose steps have 32 rows; durable: of a server with a journal."""
    config = ModelConfig(
        architecture="A",
        hidden_size=24,
        num_heads=1,
        vocab_size=vocab_size,
        max_positions=max_context,
        layers=(LayerKind(head_dim=24, num_kv_heads=1),),
        eos_ids=tuple(eos_ids),
    )
    model = ModelDescription(
        config=config,
        model_id="m",
        num_parameters=1,
        max_context=max_context,
        dtype="float32",
        fingerprint=bytes(32),
    )
    return InputReader(
        model,
        limits or ApiLimits(),
        max_step_rows=32,
        masks=MaskRegistry(),
        tokenizer=tokenizer,
        is_durable=is_durable,
    )


def field_refused(name: str, read: Callable[[], object]) -> str:
    """Return the field that reading a request is refused for; ``name`` says whether a vocabulary is the reason."""
    with pytest.raises(FerruleError) as caught:
        read()
    assert caught.value.reason == ("TOKEN_OUT_OF_VOCAB" if "vocabulary" in name else "INVALID_FIELD")
    return str(caught.value.metadata["field"])
