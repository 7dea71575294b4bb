"""Write a GGUF file of the Llama architecture as a folder that transformers and the server load, in float32.

The quantised weights are computed by the package ``gguf``, so the folder holds exactly the numbers of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from tools.real_models.tokenizer import Fields, write_tokenizer

_Matrix = npt.NDArray[np.float32]

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
"""Matrices whose rows a GGUF file has in another order, and the field with the number of their heads."""


def convert(path: Path, folder: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and the files of the tokenizer.

    Args:
        path: The GGUF file.
        folder: An existing folder.

    Raises:
        ValueError: The file has another architecture, or a tokenizer that is not known here.
    """
    from gguf import GGUFReader

    reader = GGUFReader(path)

    def fields(name: str) -> Any:  # Any: see Fields
        field = reader.get_field(name)
        return None if field is None else field.contents()

    if (architecture := fields("general.architecture")) != "llama":
        raise ValueError(f"{path} has the architecture {architecture}; only llama is known")
    tensors = dict(_tensors(reader, fields))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _configuration(fields, is_tied="lm_head.weight" not in tensors).save_pretrained(folder)
    write_tokenizer(fields, folder)


def _tensors(reader: Any, fields: Fields) -> Iterator[tuple[str, _Matrix]]:  # Any: gguf is not always installed
    """Yield each tensor in float32, by the name that transformers gives it."""
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        values: _Matrix = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name in _OUTER:
            yield _OUTER[tensor.name], values
            continue
        _, layer, part, kind = tensor.name.split(".")
        if part in _HEADS:
            values = _halves_apart(values, fields(f"llama.{_HEADS[part]}"))
        yield f"model.layers.{layer}.{_INNER[part]}.{kind}", values


def _halves_apart(values: _Matrix, num_heads: int) -> _Matrix:
    """Return the rows of each head in the order of transformers.

    A rotation turns pairs of rows. In a GGUF file the rows of a pair are neighbours. In transformers, the first rows of
    all pairs of a head come before the second ones.

    Args:
        values: float32 [num_heads * head_dim, hidden_size].
        num_heads: Heads that the rows belong to.
    """
    pairs = values.reshape(num_heads, -1, 2, values.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))


def _configuration(fields: Fields, *, is_tied: bool) -> Any:  # Any: transformers has no types
    """Return the configuration with every key that transformers itself writes for such a file, needed or not."""
    from transformers import AutoConfig

    of_llama: Callable[[str], Any] = lambda name: fields(f"llama.{name}")  # noqa: E731
    return AutoConfig.for_model(
        "llama",
        _model_name_or_path=fields("general.name"),
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=of_llama("vocab_size"),
        hidden_size=of_llama("embedding_length"),
        intermediate_size=of_llama("feed_forward_length"),
        num_hidden_layers=of_llama("block_count"),
        num_attention_heads=of_llama("attention.head_count"),
        num_key_value_heads=of_llama("attention.head_count_kv"),
        max_position_embeddings=of_llama("context_length"),
        rms_norm_eps=of_llama("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": of_llama("rope.freq_base")},
        tie_word_embeddings=is_tied,
        bos_token_id=fields("tokenizer.ggml.bos_token_id"),
        eos_token_id=fields("tokenizer.ggml.eos_token_id"),
        pad_token_id=fields("tokenizer.ggml.padding_token_id"),
        unk_token_id=fields("tokenizer.ggml.unknown_token_id"),
    )
