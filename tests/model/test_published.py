"""Configurations as published load; settings that change no logits are accepted, all others are named together."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, Final

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from ferrule_server.errors import ModelError
from ferrule_server.model.config_reader import parse_config
from ferrule_server.model.families import FAMILIES, WRAPPERS
from tests.model.published import PUBLISHED, config_json

_GENERATION: Final = transformers.GenerationConfig()  # type: ignore[no-untyped-call]
LLAMA: Final = config_json("Llama 2")
PLAIN: Final = parse_config(LLAMA, {})
HARMLESS: Final[Mapping[str, Any]] = {
    **{key: value for key, value in vars(_GENERATION).items() if key != "eos_token_id"},
    "_anything": 1, "image_token_index": 9, "boi_token_index": 4, "additional_special_tokens": ["<a>"],
    "unk_token": "<unk>", "sep_token_id": 3, "badwordsids": [[5]], "bad_words_ids": [[5]], "temperature": 0.6,
    "max_new_tokens": 5, "repetition_penalty": 1.1, "suppress_tokens": [1], "hidden_dropout_prob": 0.1,
    "attention_dropout": 0.1, "embd_pdrop": 0.1, "initializer_factor": 1.0, "router_aux_loss_coef": 0.1,
    "gradient_checkpointing": True, "use_gradient_checkpointing": "unsloth", "auto_map": {"AutoConfig": "a.B"},
    "attn_implementation": "sdpa", "use_flash_attention_2": True, "flash_attn": True, "_flash_attn_2_enabled": True,
    "torch_dtype": "float16", "params_dtype": "float16", "internal_version": "1.0", "unsloth_fixed": True,
    "model_max_length": 8, "max_sequence_length": 4, "seq_length": 8192, "quantization_config": {}, "num_experts": 0,
    "use_moe": False, "num_local_experts": 0, "sliding_window": 0, "clip_qkv": 0, "final_logit_softcapping": 0.0,
    "qkv_bias": False, "use_dynamic_ntk": False, "use_logn_attn": False, "chat_template": "x", "id2label": {"0": "a"},
    "tokenizer_class": "LlamaTokenizer", "torch_compile": False, "use_liger_kernel": True, "hidden_activation": "swish",
    "position_embedding_type": "rope", "pad_vocab_size_multiple_of": 64, "merge_method": "ties",
    "num_nextn_predict_layers": 0, "use_parallel_residual": False, "attn_drop": 0.1, "drop_path_rate": 0.1,
    "guidance_scale": 1.5, "output_past": True, "logits_to_keep": 0, "is_composition": False, "qk_layernorm": False,
    "cache_implementation": "hybrid", "layer_types": ["full_attention"] * 32,
}  # fmt: skip
CHANGES: Final[Mapping[str, Any]] = {
    "rope_condense_ratio": 8, "logit_scale": 0.5, "embedding_multiplier": 12.0, "attention_multiplier": 0.1,
    "residual_scale": 0.5, "layer_norm_type": "rms", "final_logit_softcapping": 30.0, "sliding_window": 4096,
    "attention_window": 4, "qkv_bias": True, "use_alibi": True, "num_experts": 8, "num_sink_tokens": 4,
    "no_rope_layers": [1, 0], "use_rope": False, "use_rotary_embedding": False, "use_gated_mlp": False,
    "attn_temperature_tuning": 4, "dual_chunk_attention_config": {"chunk_size": 4}, "q_lora_rank": 8,
    "a_setting_of_tomorrow": 1, "use_rms_norm": False, "num_meta_tokens": 4, "key_bias_token": 1, "use_moe": True,
    "layer_types": ["sliding_attention"] * 2, "drop_attn_list": [25, 26], "drop_layers": [1], "attn_drop_layers": [2],
    "prefix_tokens": 4, "memory_tokens": 4, "register_tokens": 4, "cache_sharing": 2, "attn_mode": 4,
    "flash_attn_causal": False, "use_silu": False, "use_attention_mask": False, "use_ffn": False, "no_bias": False,
    "use_embedding_scaling": False,
}  # fmt: skip
"""Each may change logits."""


def refusal(raw: Mapping[str, Any]) -> str:
    """Return the message with which a configuration is refused."""
    with pytest.raises(ModelError) as caught:
        parse_config(raw, {})
    return str(caught.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_loads(name: str) -> None:
    """Without a warning, whatever else the file says."""
    notes: list[str] = []
    parse_config(config_json(name), {}, (), lambda form, *values: notes.append(form % values))
    assert [note for note in notes if "dynamic" not in note] == []


def test_every_family_and_model_has_one() -> None:
    """Of each family, and of each model that docs/models.md names."""
    stems = {f"{stem}ForCausalLM" for stem, _, _ in PUBLISHED.values()}
    assert stems == {family.architecture for family in FAMILIES}
    named = [model.strip() for family in FAMILIES for model in re.split("[,;]", family.models)]
    first = {re.split("[ (]", name)[0] for name in named if name and name[0].isupper()}
    assert {word for word in first if not any(name.startswith(word) for name in PUBLISHED)} == {
        "Nemo", "Small",
    }  # fmt: skip


def test_a_text_model_inside_a_wrapper_is_read_likewise() -> None:
    """The wrapper's own settings are about other modalities."""
    for wrapper in WRAPPERS:
        inner = {"mistral": "Mistral Nemo", "gemma3_text": "Gemma 3 1B", "gemma4_text": "Gemma 4"}[
            wrapper.model_types[0]
        ]
        text = {key: value for key, value in config_json(inner).items() if key != "architectures"}
        outer = {
            "architectures": [wrapper.architecture], "text_config": text, "vision_config": {"hidden_size": 8},
            "image_token_index": 9, "mm_tokens_per_image": 4, "quantization_config": {},
        }  # fmt: skip
        assert parse_config(outer, {}).layers == parse_config(config_json(inner), {}).layers
        message = refusal({**outer, "quantization_config": {"quant_method": "fp8"}})
        assert "quantised by 'fp8'" in message
        assert "--weights int8" in message


@given(st.sets(st.sampled_from(sorted(HARMLESS))))
def test_any_harmless_settings_change_nothing(keys: set[str]) -> None:
    """The network is the same with them."""
    assert parse_config({**LLAMA, **{key: HARMLESS[key] for key in keys}}, {}) == PLAIN


@given(st.sets(st.sampled_from(sorted(CHANGES)), min_size=1), st.sets(st.sampled_from(sorted(HARMLESS))))
def test_all_settings_that_may_change_logits_are_named_at_once(keys: set[str], others: set[str]) -> None:
    """In one sorted message with their values, harmless ones left out."""
    chosen = {key: HARMLESS[key] for key in others if "expert" not in key and "moe" not in key} | {
        key: CHANGES[key] for key in keys
    }
    message = refusal({**LLAMA, **chosen})
    places = [message.index(f"{key} is {repr(CHANGES[key])[:10]}") for key in sorted(keys)]
    assert places == sorted(places)
    assert "--ignore-config-key" in message
    assert not [key for key in others - keys if f" {key} is " in message]


def test_a_message_about_very_many_settings_is_bounded() -> None:
    """Strangers write the files."""
    assert len(refusal({**LLAMA, **{f"{'x' * 300}{index}": "y" * 300 for index in range(999)}})) < 20_000


@pytest.mark.parametrize("key", ["moe" * 400_000 + "!", "dropout_" * 200_000 + "!", "num_experts_" * 100_000 + "!"])
def test_long_keys_take_no_time(key: str) -> None:
    """Rules that backtrack would take hours; many keys about experts take no longer than others."""
    begun = time.process_time()
    refusal({**LLAMA, key: 1, **{f"expert_{index}": 1 for index in range(50_000)}})
    assert time.process_time() - begun < 20


def test_values_that_are_not_supported_are_named_with_unknown_keys() -> None:
    """Also those of rotary positions."""
    scaling = {"type": "linear", "factor": 2.0, "mrope_section": [8, 8]}
    message = refusal({**LLAMA, "hidden_act": "gelu", "zeta": 1, "rope_scaling": scaling, "is_causal": False})
    for part in ("hidden_act is 'gelu' (only 'silu'", "zeta is 1", "mrope_section [8, 8]", "is_causal is False"):
        assert part in message


def test_the_list_of_a_family_wins() -> None:
    """Gemma 2 has an ``hidden_act`` that it does not read; for all others it decides."""
    gemma = config_json("Gemma 2")
    assert parse_config({**gemma, "hidden_act": "gelu", "sliding_window_size": 4096}, {}) == parse_config(gemma, {})
    assert "hidden_act" in refusal({**LLAMA, "hidden_act": "gelu"})
    for family in FAMILIES:
        assert not family.without_effect & (family.only.keys() | family.assumed.keys()), family.model_type


def test_a_setting_of_experts_is_harmless_only_without_experts() -> None:
    """One of a mixture is named."""
    of_experts = {"moe_intermediate_size": 8, "norm_topk_prob": True}
    assert parse_config({**LLAMA, **of_experts, "num_experts": 0}, {}) == PLAIN
    assert parse_config({**LLAMA, **of_experts, "use_moe": False, "num_experts": 8}, {}) == PLAIN
    assert "moe_intermediate_size is 8" in refusal({**LLAMA, **of_experts})
    assert "num_experts is 8" in refusal({**LLAMA, **of_experts, "num_experts": 8})


def test_ignored_keys_count_as_absent_and_are_noted_once() -> None:
    """On the top level, in the text model, and in the settings of rotary positions."""
    notes: list[str] = []

    def note(form: str, *values: object) -> None:
        notes.append(form % values)

    text = {**LLAMA, "zeta": 1, "rope_scaling": {"type": "linear", "factor": 1.0, "xi": 2}}
    assert "zeta is 1" in refusal(text)
    assert "xi 2" in refusal(text)
    parse_config(text, {}, ("zeta", "xi", "psi"), note)
    assert [" ".join(line.split()[:3]) for line in notes] == [
        "event=config_key_absent key=psi (--ignore-config-key",
        "event=config_key_ignored key=xi value=2",
        "event=config_key_ignored key=zeta value=1",
    ]
    inner = config_json("Gemma 3 1B")
    wrapped = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**inner, "zeta": 1}}
    del wrapped["text_config"]["architectures"]  # type: ignore[attr-defined]
    assert parse_config(wrapped, {}, ["zeta"]).layers == parse_config(inner, {}).layers


@pytest.mark.parametrize("found", [32000, [], [-1]])
def test_an_end_of_another_file_counts_where_the_first_has_none(found: Any) -> None:
    """Merges keep generation_config.json of one model and config.json of another."""
    assert parse_config({**LLAMA, "eos_token_id": 2}, {"eos_token_id": found}).eos_ids == (2,)


@pytest.mark.parametrize("found", [32000, [2, 32000], -1, 512])
def test_an_end_outside_the_vocabulary_is_one_warning(found: Any) -> None:
    """It can never be drawn."""
    notes: list[str] = []
    config = parse_config({**LLAMA, "eos_token_id": found}, {}, (), lambda form, *values: notes.append(form % values))
    assert config.eos_ids == ((2,) if isinstance(found, list) else ())
    assert len(notes) == 1
    assert notes[0].startswith("event=eos_outside_vocabulary")


YARN: Final = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("name", "changes", "longest"),
    [
        ("Llama 2", {"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ("Llama 2", {"rope_scaling": {"type": "linear", "factor": 2.5}}, 10240),
        (
            "Llama 2",
            {"rope_scaling": {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 1024}},
            4096,
        ),
        ("Llama 2", {"rope_scaling": {"type": "linear", "factor": 0.5}}, 4096),
        ("Qwen2.5, yarn", {}, 16384),
        ("Qwen3", {"rope_scaling": YARN}, 4096),
        ("Qwen3", {"rope_scaling": YARN, "max_position_embeddings": 1280}, 4096),
        ("Qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 16384),
        ("Gemma 3 4B, its text model", {}, 4096),
        ("OLMo 3", {}, 4096),
        ("Ministral 3", {}, 4096),
        ("Llama 3.1", {}, 4096),
        ("Phi-3.5-mini", {}, 4096),
        ("InternLM as Llama", {}, 4096),
    ],
)
def test_scaling_lengthens_the_longest_sequence(name: str, changes: dict[str, Any], longest: int) -> None:
    """As publishers mean it: what is multiplied, and where the file has multiplied already."""
    assert parse_config({**config_json(name), **changes}, {}).max_positions == longest


def test_a_window_within_the_lengthened_context_is_kept() -> None:
    """It is beyond ``max_position_embeddings``, and not beyond the longest sequence."""
    raw = {**config_json("Mistral 7B v0.1"), "sliding_window": 8192}
    assert parse_config(raw, {}).layers[0].window == 0
    assert parse_config({**raw, "rope_scaling": {"type": "linear", "factor": 4.0}}, {}).layers[0].window == 8192


def test_a_product_beyond_all_models_is_refused() -> None:
    """Strangers write the files."""
    assert "at most" in refusal({**LLAMA, "rope_scaling": {"type": "linear", "factor": 1e30}})


def test_dynamic_scaling_says_where_it_ends() -> None:
    """The reason is a warning of its own."""
    notes: list[str] = []
    parse_config(config_json("InternLM as Llama"), {}, (), lambda form, *values: notes.append(form % values))
    assert notes == [
        "event=dynamic_positions longest=4096 (dynamic scaling would change the KV of earlier tokens beyond)"
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"finetuned": True}, {"attn_factor": 1}, {"llama_4_scaling_beta": 0.0}, {"apply_yarn_scaling": False},
        {"rope_type": None},
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_yarn_without_effect_are_accepted(changes: dict[str, Any]) -> None:
    """As files of Yarn-Llama and Mistral have them."""
    scaled = parse_config({**LLAMA, "rope_scaling": YARN}, {})
    assert parse_config({**LLAMA, "rope_scaling": {**YARN, **changes}}, {}) == scaled


def test_queries_that_do_not_grow_are_accepted() -> None:
    """Zero is off."""
    raw = config_json("Ministral 3")
    rope = {**raw["rope_parameters"], "llama_4_scaling_beta": 0.0}
    assert parse_config({**raw, "rope_parameters": rope}, {}).query_temperature is None
