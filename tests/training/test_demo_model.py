"""The model folder that ships is complete, small and better than a short training run would be."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import ferrule_server
from ferrule_server.text.chat_template import ChatTemplate, Conversation
from tools.training import export
from tools.training.corpus import collect
from tools.training.export import sample
from tools.training.model import ModelShape, TrainingModel
from tools.training.tokenizer import encode_documents
from tools.training.train import measure_loss

_FOLDER = Path(ferrule_server.__file__).parent / "demo_model"


@pytest.fixture(scope="module")
def model() -> TrainingModel:
    """The shipped weights in float32, loaded strictly."""
    model = TrainingModel(ModelShape())
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(_FOLDER / "model.safetensors").items()})
    return model


@pytest.fixture(scope="module")
def shipped_tokenizer() -> Tokenizer:
    """The shipped vocabulary."""
    return Tokenizer.from_file(str(_FOLDER / "tokenizer.json"))


def test_weights_take_at_most_eleven_megabytes() -> None:
    """A checkout stays small."""
    assert (_FOLDER / "model.safetensors").stat().st_size <= 11_000_000


def test_config_says_what_the_recipe_builds(shipped_tokenizer: Tokenizer) -> None:
    """The shape in config.json is the default shape, and the vocabulary fits it."""
    config: dict[str, Any] = json.loads((_FOLDER / "config.json").read_text())
    shape = ModelShape()
    assert (config["num_hidden_layers"], config["hidden_size"]) == (shape.num_layers, shape.hidden_size)
    assert (config["intermediate_size"], config["head_dim"]) == (shape.intermediate_size, shape.head_dim)
    assert shipped_tokenizer.get_vocab_size() == config["vocab_size"] == dataclasses.asdict(shape)["vocab_size"]


def test_files_beside_the_weights_are_what_the_recipe_writes() -> None:
    """The chat template too, and the card tells what it is worth."""
    shipped = json.loads((_FOLDER / "tokenizer_config.json").read_text())
    assert shipped == export._tokenizer_config(ModelShape())
    assert "the model has seen no conversation" in (_FOLDER / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_a_conversation_renders_as_lines(shipped_tokenizer: Tokenizer) -> None:
    """As transformers renders it, and every answer is followed by a line's end, so that the next turn only adds."""
    from transformers import AutoTokenizer

    template, theirs = ChatTemplate.load(_FOLDER), AutoTokenizer.from_pretrained(str(_FOLDER))
    assert template is not None
    messages = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi"}]
    text = template.render(Conversation(messages))
    assert text == "Be brief.\n\nUser: Hi\nAssistant:"
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    messages.append({"role": "assistant", "content": " def f(x):"})
    longer = template.render(Conversation([*messages, {"role": "user", "content": "Go on"}]))
    assert longer == text + " def f(x):\nUser: Go on\nAssistant:"
    answered = shipped_tokenizer.encode(text + " def f(x):").ids
    assert shipped_tokenizer.encode(longer).ids[: len(answered)] == answered


def test_held_out_loss_is_what_the_card_promises(model: TrainingModel, shipped_tokenizer: Tokenizer) -> None:
    """Files of the standard library that training never saw cost below 2.4 nats per token, whatever Python has them."""
    torch.set_num_threads(1)
    texts = [document.text for document in collect().held_out]
    tokens = encode_documents(shipped_tokenizer, texts)
    assert measure_loss(model, tokens, length=256, max_windows=192) < 2.4


def test_the_card_s_first_sample_is_what_the_weights_say(model: TrainingModel, shipped_tokenizer: Tokenizer) -> None:
    """Card and weights belong to the same export; the first tokens leave no room for rounding to matter."""
    text = sample(model, shipped_tokenizer, "def read_file(path):", num_tokens=8)
    assert text.rstrip() in (_FOLDER / "MODEL_CARD.md").read_text(encoding="utf-8")
