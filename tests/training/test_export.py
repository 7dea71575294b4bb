"""What is exported is what transformers loads and computes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from tools.training.export import TrainingRecord, export_model, round_weights, sample
from tools.training.model import ModelShape, TrainingModel
from tools.training.train import Progress, Trainer, TrainingConfig

_RECORD = TrainingRecord(
    config=TrainingConfig(window_lengths=(32, 64)),
    progress=Progress(step=30, elapsed_s=6.0, num_tokens=5760, train_loss=1.5),
    num_train_files=12,
    num_held_out_files=1,
    num_train_tokens=3000,
    held_out_losses=((32, 2.0),),
    held_out_bytes_per_token=3.0,
)


@pytest.fixture
def trained(config: TrainingConfig, shape: ModelShape, tokens: npt.NDArray[np.uint16]) -> TrainingModel:
    """A model after ten steps: far enough from its initial values that every weight matters."""
    trainer = Trainer(config, shape, tokens)
    for _ in range(10):
        trainer.step()
    return trainer.model


@pytest.fixture
def folder(trained: TrainingModel, tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """The exported model folder."""
    export_model(tmp_path / "model", trained, tokenizer, _RECORD)
    return tmp_path / "model"


def test_transformers_computes_the_same_logits(folder: Path, trained: TrainingModel) -> None:
    """Qwen3ForCausalLM, loaded strictly from the folder, agrees with the training model to 1e-4."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    theirs, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    round_weights(trained)
    token_ids = torch.randint(0, 307, (2, 97), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(theirs(token_ids).logits, trained(token_ids), atol=1e-4, rtol=1e-4)


def test_transformers_loads_the_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """AutoTokenizer encodes alike and knows the end of text."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    text = "def add_3(left, right):\n    return left\n"
    assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
    assert theirs.eos_token_id == json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


def test_weights_are_bfloat16_without_a_second_embedding(folder: Path, trained: TrainingModel) -> None:
    """The file holds each parameter once, two bytes each."""
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        assert {weights.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert names == set(trained.state_dict())
    assert "lm_head.weight" not in names


def test_card_names_corpus_licence_and_loss(folder: Path) -> None:
    """Who reads the card learns what the model was made from and how good it is."""
    card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    for part in ("standard library", "PSF License", "2.000 nats per token", "0.962 bits per byte", "## Limits"):
        assert part in card


def test_sample_is_greedy_at_zero_and_repeatable_above(trained: TrainingModel, tokenizer: Tokenizer) -> None:
    """The temperature decides between the most likely token and seeded draws."""
    greedy = sample(trained, tokenizer, "def add", num_tokens=5)
    assert greedy == sample(trained, tokenizer, "def add", num_tokens=5, seed=7)
    assert greedy.startswith("def add")
    drawn = [sample(trained, tokenizer, "def add", num_tokens=9, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
