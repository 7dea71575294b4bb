"""A corpus, a tokenizer and a model small enough to train inside a test."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import Tokenizer

from tools.training.model import ModelShape
from tools.training.tokenizer import encode_documents, train_tokenizer
from tools.training.train import TrainingConfig

_TEXTS = [f"def add_{n}(left, right):\n    total = left + right\n    return total\n\n\n" * 8 for n in range(12)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Keep torch from spreading tiny matrices over every core."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A tokenizer of 307 entries."""
    return train_tokenizer(_TEXTS, vocab_size=307)


@pytest.fixture(scope="session")
def tokens(tokenizer: Tokenizer) -> npt.NDArray[np.uint16]:
    """uint16 [num_tokens]: twelve documents, each closed by the end-of-text token."""
    return encode_documents(tokenizer, _TEXTS)


@pytest.fixture
def shape() -> ModelShape:
    """Awkward on purpose: four queries per key, and no size a multiple of another's."""
    return ModelShape(
        vocab_size=307, hidden_size=40, intermediate_size=56, num_layers=3, num_heads=4, num_kv_heads=1, head_dim=12
    )


@pytest.fixture
def config() -> TrainingConfig:
    """Thirty small steps."""
    return TrainingConfig(minutes=None, steps=30, tokens_per_step=192, window_lengths=(32, 96), warmup_steps=2)
