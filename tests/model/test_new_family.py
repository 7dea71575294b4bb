"""The README of the families: its file is a family that computes what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from ferrule_server.errors import ModelError
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.model import config_reader, families
from ferrule_server.model.families import FAMILIES
from ferrule_server.model.families.family import Family
from ferrule_server.model_check import catalogue
from tests.model.conftest import Example, randomise
from tests.model.stepping import Piece, PooledSequence, Stepper
from tests.model.test_decoder import PROMPT, assert_close

PAGE = (Path(families.__file__).parent / "README.md").read_text("utf-8")
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
FACTOR = 3.0
NewExecutor = Callable[..., TorchExecutor]


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Family:
    """The family of the page, which is added to the list as the page says."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    module = ModuleType("ferrule_server.model.families.loud")
    exec(compile(code, "README.md", "exec", dont_inherit=True), module.__dict__)
    (made,) = (value for value in vars(module).values() if isinstance(value, Family))
    for importer in (config_reader, catalogue):
        monkeypatch.setattr(importer, "FAMILIES", (*FAMILIES, made))
    return made


def write_checkpoint(folder: Path, architecture: str) -> Any:
    """Write a random checkpoint of the new family, and return a Llama of transformers that computes the same."""
    settings: dict[str, Any] = {**SIZES, "rms_norm_eps": 1e-6, "attn_implementation": "eager"}
    torch.manual_seed(11)
    oracle: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    oracle.eval()
    randomise(oracle)
    config = {**SIZES, "architectures": [architecture], "model_type": "loud", "embedding_multiplier": FACTOR}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in oracle.state_dict().items()}, folder / "model.safetensors")
    with torch.no_grad():
        oracle.model.embed_tokens.weight.mul_(FACTOR)
    return oracle


def test_the_family_of_the_page_computes_what_it_says(
    family: Family, tmp_path: Path, new_executor: NewExecutor
) -> None:
    """Logits and 64 greedy tokens are those of a Llama whose embedding is multiplied."""
    example = Example(tmp_path, write_checkpoint(tmp_path, family.architecture))
    stepper = Stepper(new_executor(tmp_path))
    logits = stepper.logits(Piece(PooledSequence(), PROMPT, num_outputs=len(PROMPT)))
    assert_close(logits, example.logits(PROMPT))
    assert logits.argmax(-1).tolist() == example.logits(PROMPT).argmax(-1).tolist()


def test_its_difference_matters(family: Family, tmp_path: Path, new_executor: NewExecutor) -> None:
    """Without the multiplier the logits are others, so the comparison can fail."""
    example = Example(tmp_path, write_checkpoint(tmp_path, family.architecture))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "embedding_multiplier": 1.0}))
    stepper = Stepper(new_executor(tmp_path))
    with pytest.raises(AssertionError):
        assert_close(stepper.logits(Piece(PooledSequence(), PROMPT, num_outputs=len(PROMPT))), example.logits(PROMPT))


def test_the_frame_refuses_what_the_file_does_not_name(family: Family) -> None:
    """And `ferrule models` lists the family as soon as it is there."""
    config = {**SIZES, "architectures": [family.architecture]}
    assert config_reader.parse_config(config, {}).embedding_scale == 1
    with pytest.raises(ModelError, match="residual_multiplier"):
        config_reader.parse_config({**config, "residual_multiplier": 0.5}, {})
    assert catalogue.known_families()[-1].architecture == family.architecture
