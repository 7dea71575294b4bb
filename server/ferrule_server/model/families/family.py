"""The frame of a model family: names, defaults, and the allow-list that every key of config.json must pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.families.rotary import ROPE_KEYS
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model_files import name_of, shown

__all__ = ["Family", "Wrapper", "check_only"]

_READ: Final = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "eos_token_id", *ROPE_KEYS,
})  # fmt: skip
"""Keys that are read for every family."""
_WITHOUT_EFFECT: Final = frozenset({
    "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "attention_dropout", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "classifier_dropout", "decoder_start_token_id", "do_sample",
    "dtype", "embd_pdrop", "embedding_dropout", "finetuning_task", "id2label", "initializer_range", "is_decoder",
    "is_llama_config", "label2id", "max_length", "min_length", "output_attentions", "output_hidden_states",
    "pad_token_id", "pretraining_tp", "problem_type", "repetition_penalty", "resid_pdrop", "residual_dropout",
    "return_dict", "sep_token_id", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k",
    "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache",
})  # fmt: skip
"""Keys that do not change logits: they are about training, storage, special tokens, other tasks and sampling."""
_ONLY: Final = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "use_sliding_window": False,
    "rope_interleaved": False,
    "is_causal": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "use_bidirectional_attention": False,
}
"""Keys that change logits, with the only value that the decoder computes, unless the family reads the key."""


def _unchanged(config: ModelConfig, _values: ConfigValues) -> ModelConfig:
    return config


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    Attributes:
        architecture: The only entry of ``architectures`` in config.json.
        model_type: The value of ``model_type`` there.
        defaults: For every setting that the family reads, and for sizes that files leave out: what its configuration
            class in transformers assumes if config.json is silent. None means that it is derived from the sizes.
        refine: Returns the network, given one as of Llama with the sizes, biases and plain rotation that config.json
            states; refuses what only this family can say, with a :class:`ModelError`.
        norm_eps_key: The setting that is added to the mean square or the variance in every norm.
        only: Settings with the only value that the decoder computes for this family.
        tensors: For each part of a layer that a checkpoint of this family names unlike Llama: the names of the tensors
            that follow each other in it, without ``model.layers.N.``; see ``weights.py``.
        without_effect: Settings of this family that do not change logits.
        rope_extra: Settings inside those of rotary positions that ``refine`` reads.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    refine: Callable[[ModelConfig, ConfigValues], ModelConfig] = _unchanged
    norm_eps_key: str = "rms_norm_eps"
    only: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    rope_extra: frozenset[str] = frozenset()

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
        return ConfigValues(raw, self.defaults)

    def _check_setting(self, key: str, value: object) -> None:
        """Refuse a setting that the family does not read, unless it is known to change nothing."""
        only = {**_ONLY, **self.only}
        if key in only:
            check_only(key, value, only[key])
        elif key not in _READ | _WITHOUT_EFFECT | self.without_effect:
            raise ModelError(
                f"config.json: {name_of(key)} is {shown(value)}, a setting that is not supported for "
                f"{self.architecture}; if the model computes the same without it, remove it from the file"
            )


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model of several modalities around the text model of a family, which is all that is loaded.

    Attributes:
        architecture: The only entry of ``architectures`` in config.json; the text model is in ``text_config`` there.
        model_types: The values of ``model_type`` in ``text_config`` that it may hold; the first if there is none.
        renamed: What the names of tensors begin with in the checkpoint, and with what those of the text model begin.
        left_out: What the names of the tensors begin with that are not loaded.
    """

    architecture: str
    model_types: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]

    def parts_left_out(self, names: Collection[str] | None = None) -> tuple[str, ...]:
        """Return the parts that are not loaded: those with tensors among these names; None: all that there may be."""
        parts = [part for part in self.left_out if names is None or any(name.startswith(part) for name in names)]
        return tuple(dict.fromkeys(part.rstrip(".").rpartition(".")[2] for part in parts))


def check_only(key: str, value: object, only: object) -> None:
    """Refuse a setting with another value than the one that is supported.

    Raises:
        ModelError: It has another; the message names both.
    """
    if value != only:
        raise ModelError(f"config.json: {key} is {shown(value)}, which is not supported, only {only!r}")
