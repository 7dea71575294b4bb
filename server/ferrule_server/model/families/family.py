"""The frame of a model family: names, defaults, and the allow-list that every key of config.json must pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model.config import CheckpointNames, ModelConfig
from ferrule_server.model.families.harmless import has_experts, is_harmless
from ferrule_server.model.families.rotary import ROPE_KEYS, rope_problems
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model_files import listed, name_of, shown

_ASSUMED: Final[Mapping[str, Any]] = {"head_dim": None, "rope_theta": 10_000.0, "tie_word_embeddings": False}
"""What most configuration classes assume; see ``Family.defaults``, which wins."""
_READ: Final = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "original_max_position_embeddings",
    "eos_token_id", *ROPE_KEYS,
})  # fmt: skip
"""Keys that are read for every family."""
_SILU: Final = ("silu", "swish")
_ONLY: Final[Mapping[str, Any]] = {
    "hidden_act": _SILU, "hidden_activation": _SILU, "activation": ("swiglu", *_SILU), "mlp_bias": False,
    "use_sliding_window": False, "use_qk_norm": False, "use_rms_norm": True, "scale_attn_weights": True,
    "position_embedding_type": ("rope", "rotary"), "use_rope": True, "rope_interleaved": False, "rotary_pct": 1.0,
    "is_causal": True, "is_encoder_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False,
    "pruned_heads": {}, "use_bidirectional_attention": False,
}  # fmt: skip
"""Keys that change logits, with the only value that the decoder computes, or a tuple of those, which all mean the same.

The lists of a family win over this one."""


def _unchanged(config: ModelConfig, _values: ConfigValues) -> ModelConfig:
    return config


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    Attributes:
        architecture: The only entry of ``architectures`` in config.json.
        model_type: The value of ``model_type`` there.
        defaults: For every setting that the family reads, and for sizes that files leave out: what its configuration
            class in transformers assumes if config.json is silent, unless that is what most assume. None means that it
            is derived from the sizes.
        refine: Returns the network, given one as of Llama with the sizes, biases and plain rotation that config.json
            states, and the fields of ``network``; refuses what only this family can say, with a :class:`ModelError`.
        network: Fields of :class:`ModelConfig` that have the same value in every model of the family.
        is_interleaved: As in :class:`Rope`.
        norm_eps_key: The setting that is added to the mean square or the variance in every norm.
        only: Settings with the only value that the decoder computes for this family, or a tuple of such values.
        tensors: As in :class:`CheckpointNames`.
        without_effect: Settings of this family that do not change logits.
        rope_extra: Settings inside those of rotary positions that ``refine`` reads.
        has_scaled_length: ``max_position_embeddings`` counts linear scaling already; see :func:`longest_sequence`.
        models: Names of its models, for people.
        differs: What they need that Llama does not, for people.
        example: One that loads, as the hub names it; empty if none has been published with this architecture.
        usual: What config.json of the newest ones says that decides which kernels run them.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    refine: Callable[[ModelConfig, ConfigValues], ModelConfig] = _unchanged
    network: Mapping[str, Any] = field(default_factory=dict)
    is_interleaved: bool = False
    norm_eps_key: str = "rms_norm_eps"
    only: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    rope_extra: frozenset[str] = frozenset()
    has_scaled_length: bool = False
    models: str = ""
    differs: str = ""
    example: str = ""
    usual: Mapping[str, Any] = field(default_factory=dict)

    @property
    def assumed(self) -> dict[str, Any]:
        """What config.json means if it is silent: ``defaults``, and what most families assume."""
        return {**_ASSUMED, **self.defaults}

    def read(self, raw: Mapping[str, Any]) -> ConfigValues:
        """Return the values of config.json, in which nothing changes the computation unseen.

        A key with the value null counts as absent.

        Raises:
            ModelError: Some keys or values are not on the allow-lists; the message names all of them.
        """
        if raw.get("model_type") not in (None, self.model_type):
            found = shown(raw["model_type"])
            raise ModelError(f"config.json: model_type is {found}, {self.architecture} has {self.model_type!r}")
        values = ConfigValues(raw, self.assumed)
        lacks_experts = has_experts(raw) is False
        problems = [problem for key in raw if (problem := self._problem_of(key, raw, lacks_experts=lacks_experts))]
        problems += rope_problems(values, self.rope_extra)
        if problems:
            raise ModelError(
                f"config.json: not supported for {self.architecture}: {listed(sorted(problems))}; if the model "
                "computes the same without a setting, ignore it with --ignore-config-key NAME"
            )
        return values

    def _problem_of(self, key: str, raw: Mapping[str, Any], *, lacks_experts: bool) -> str:
        """Return what is wrong with a setting, for people; empty if it is read, or if it changes nothing."""
        value = raw[key]
        if value is None or key in self.assumed:
            return ""
        if key in self.only:
            return _problem_of_value(key, value, self.only[key])
        if key in self.without_effect or key in _READ:
            return ""
        if key in _ONLY:
            return _problem_of_value(key, value, _ONLY[key])
        return "" if is_harmless(key, raw, lacks_experts=lacks_experts) else f"{name_of(key)} is {shown(value)}"


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model of several modalities around the text model of a family, which is all that is loaded.

    Attributes:
        architecture: The only entry of ``architectures`` in config.json; the text model is in ``text_config`` there.
        model_types: The values of ``model_type`` in ``text_config`` that it may hold; the first if there is none.
        names: What surrounds the text model in the checkpoint.
    """

    architecture: str
    model_types: tuple[str, ...]
    names: CheckpointNames


def _problem_of_value(key: str, value: object, only: object) -> str:
    known = only if isinstance(only, tuple) else (only,)
    return "" if value in known else f"{key} is {shown(value)} (only {' or '.join(map(repr, known))})"
