"""Text models inside models of several modalities, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ferrule_server.errors import ModelError
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.weights import load_model
from tests.model.conftest import randomise
from tests.model.stepping import Piece, PooledSequence, Stepper
from tests.model.test_decoder import PROMPT, assert_close

TEXT: dict[str, Any] = {
    "vocab_size": 103, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 5,
    "bos_token_id": 2, "sliding_window": 9,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "head_dim": 8,
}  # fmt: skip


def new(kind: Any, config: Any) -> Any:
    """Return a random model of a class."""
    return kind._from_config(config, attn_implementation="eager")


def gemma3() -> Any:
    """Return a random Gemma 3 with eyes."""
    text = transformers.Gemma3TextConfig(**TEXT, query_pre_attn_scalar=20)
    vision = transformers.SiglipVisionConfig(**{key: value for key, value in VISION.items() if key != "head_dim"})
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return new(transformers.Gemma3ForConditionalGeneration, config)


def gemma4() -> Any:
    """Return a random Gemma 4 with eyes, which shares K and V among layers."""
    sizes: dict[str, Any] = {"global_head_dim": 24, "vocab_size_per_layer_input": 103, "hidden_size_per_layer_input": 8}
    types = ["sliding_attention", "full_attention", "full_attention"]
    text = transformers.Gemma4TextConfig(**TEXT, **sizes, num_kv_shared_layers=1, layer_types=types)
    vision = transformers.Gemma4VisionConfig(
        **{
            key: VISION[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        },
        head_dim=8,
    )
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    return new(transformers.Gemma4ForConditionalGeneration, config)


def mistral3(text: Any) -> Any:
    """Return a random Mistral 3 with eyes around a text model."""
    vision = transformers.PixtralVisionConfig(**VISION)
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_index=10)
    return new(transformers.Mistral3ForConditionalGeneration, config)


MODELS: dict[str, Callable[[], Any]] = {
    "gemma3": gemma3,
    "gemma4": gemma4,
    "mistral": lambda: mistral3(transformers.MistralConfig(**TEXT)),
    "ministral3": lambda: mistral3(transformers.Ministral3Config(**TEXT)),
}


@pytest.fixture(params=MODELS)
def oracle(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A random model that was saved to the folder of the test."""
    torch.manual_seed(20)
    model = MODELS[request.param]().eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    return model


def logits_of(folder: Path) -> np.ndarray[Any, Any]:
    """Return our logits of every position of the prompt."""
    executor = TorchExecutor(load_model(folder, dtype="float32"), kv_memory_bytes=4 << 20, max_context=512)
    logits = Stepper(executor).logits(Piece(PooledSequence(), PROMPT, num_outputs=len(PROMPT)))
    executor.close()
    return logits


def theirs(model: Any) -> np.ndarray[Any, Any]:
    """Return transformers' logits of every position of the prompt."""
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0].float().numpy()  # type: ignore[no-any-return]


def test_the_text_model_alone_is_loaded(oracle: Any, tmp_path: Path) -> None:
    """Its logits are those of the whole model for a text, under the names that transformers writes."""
    assert read_config(tmp_path).num_layers == 3
    assert_close(logits_of(tmp_path), theirs(oracle))


def test_names_of_tensors_of_both_versions_load(oracle: Any, tmp_path: Path) -> None:
    """Transformers 4 wrote language_model.model., and version 5 has model.language_model. in memory."""
    tensors = load_file(tmp_path / "model.safetensors")
    first = load_model(tmp_path, dtype="float32").num_parameters
    for old, new in (
        ("language_model.model.", "model.language_model."),
        ("model.language_model.", "language_model.model."),
    ):
        renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        save_file(renamed, tmp_path / "model.safetensors")
        assert load_model(tmp_path, dtype="float32").num_parameters == first
        assert_close(logits_of(tmp_path), theirs(oracle))


def test_a_tensor_under_two_of_its_names_is_refused(oracle: Any, tmp_path: Path) -> None:
    """Which of the two was read hung on their order in the file."""
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.0.mlp.down_proj.weight"))
    inner = name[name.index("layers.0.") :]
    names = [f"{prefix}{inner}" for prefix in ("language_model.model.", "model.language_model.")]
    save_file({**tensors, **{each: tensors[name].clone() for each in names}}, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"model.layers.0.mlp.down_proj.weight is stored twice, once as .*language_model"
    ):
        load_model(tmp_path, dtype="float32")


def test_what_is_missing_or_unknown_is_refused(oracle: Any, tmp_path: Path) -> None:
    """Only what belongs to other modalities is left out."""
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.depth_tower.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"depth_tower.weight .* is unexpected"):
        load_model(tmp_path, dtype="float32")
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "qwen3_moe"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="text_config has model_type 'qwen3_moe'"):
        read_config(tmp_path)


def test_a_quantised_checkpoint_is_refused(oracle: Any, tmp_path: Path) -> None:
    """The setting stands outside the text model."""
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match=r"quantised by 'fp8'.*--weights int8"):
        read_config(tmp_path)
