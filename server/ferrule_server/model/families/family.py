"""The frame of a model family: names, defaults, and the allow-list that every key of config.json must pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model_files import name_of, shown

__all__ = ["Family", "check_only"]

_READ: Final = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rope_scaling", "rope_parameters",
    "eos_token_id",
})  # fmt: skip
"""Keys that ``parse_config`` reads for every family."""
_WITHOUT_EFFECT: Final = frozenset({
    "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "attention_dropout", "bos_token_id",
    "chunk_size_feed_forward", "classifier_dropout", "decoder_start_token_id", "do_sample", "dtype", "finetuning_task",
    "id2label", "initializer_range", "is_decoder", "is_llama_config", "label2id", "max_length", "min_length",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "repetition_penalty",
    "return_dict", "sep_token_id", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k",
    "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache",
})  # fmt: skip
"""Keys that do not change logits: they are about training, storage, special tokens, other tasks and sampling."""
_ONLY: Final = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1,
    "rope_interleaved": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
}
"""Keys that change logits, with the only value that the decoder computes, unless the family reads the key."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    Attributes:
        architecture: The only entry of ``architectures`` in config.json.
        model_type: The value of ``model_type`` there.
        defaults: For every setting that the family reads, sizes apart: what its configuration class in transformers
            assumes if config.json is silent. None means that it is derived from the sizes.
        rope_types: The values of ``rope_type`` that the family uses.
        has_qk_norm: Query and key heads are normalised before the rotation.
        has_qkv_bias: The projections of queries, keys and values always carry biases.
        check: Refuses what only this family can say, with a :class:`ModelError`.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    rope_types: tuple[str, ...]
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    check: Callable[[ConfigValues], None] | None = None

    def read(self, raw: Mapping[str, Any]) -> ConfigValues:
        """Return the values of config.json, in which nothing changes the computation unseen.

        A key with the value null counts as absent.

        Raises:
            ModelError: A key or a value is not on the allow-list; the message names both.
        """
        if raw.get("model_type") not in (None, self.model_type):
            found = shown(raw["model_type"])
            raise ModelError(f"config.json: model_type is {found}, {self.architecture} has {self.model_type!r}")
        for key, value in raw.items():
            if value is not None and key not in self.defaults:
                self._check_setting(key, value)
        values = ConfigValues(raw, self.defaults)
        if self.check is not None:
            self.check(values)
        return values

    def _check_setting(self, key: str, value: object) -> None:
        """Refuse a setting that the family does not read, unless it is known to change nothing."""
        if key in _ONLY:
            check_only(key, value)
        elif key not in _READ | _WITHOUT_EFFECT:
            raise ModelError(
                f"config.json: {name_of(key)} is {shown(value)}, a setting that is not supported for "
                f"{self.architecture}; if the model computes the same without it, remove it from the file"
            )


def check_only(key: str, value: object) -> None:
    """Refuse a setting with another value than the one that is supported for every family.

    Raises:
        ModelError: It has another; the message names both.
    """
    if value != _ONLY[key]:
        raise ModelError(f"config.json: {key} is {shown(value)}, which is not supported, only {_ONLY[key]!r}")
