"""Settings of config.json that do not change logits, by rule: training, storage, special tokens, generation, off.

Files hold hundreds of them, and new ones every month, so kinds are listed here and not single keys. No rule accepts a
key that speaks of rotation, scales, norms, windows, biases, sinks or types of layers: a family states those itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

OFF: Final[tuple[object, ...]] = (None, False, 0, [], {}, "", "none")
"""Values that switch a feature off."""

_RULES: Final[Mapping[str, str]] = {
    "ids and texts of special tokens": (
        r"(.+_)?token(_ids?|_index|_idx|_str)?|(.+_)?tokens_(ids?|per_image)|(.*_)?(suppress|special|stop)_tokens"
        r"|bad_?words_?ids|forced_\w+_ids?"
    ),
    "lengths of a text to generate": r"(max|min)_(new_tokens|length|time|cache_len)|no_repeat_ngram_size",
    "choice of the next token": (
        r"do_sample|temperature|top_[hkp]|min_p|(typical|encoder_no_repeat|epsilon|eta)_(p|ngram_size|cutoff)"
        r"|\w+_penalty|penalty_alpha|num_(beams|beam_groups|return_sequences)|early_stopping|constraints|stop_strings"
        r"|sequence_bias|guidance_scale|dola_layers|token_healing|(renormalize|output)_logits|remove_invalid_values"
        r"|exponential_decay_length_penalty|force_words_ids|watermarking_config|low_memory"
    ),
    "drafts of another model": (
        r"(is_)?assistant(_.+)?|num_assistant_tokens_schedule|prompt_lookup_num_tokens|max_matching_ngram_size"
        r"|target_lookbehind|speculation_type|use_mtp"
    ),
    "what a call returns": r"return_\w+|output_(attentions|hidden_states|scores|router_logits|past)",
    "caches and compilation": (
        r"use_cache|cache_(implementation|config|dir)|prefill_chunk_size|(disable_)?compile(_config)?"
        r"|continuous_batching_config|torchscript"
    ),
    "dropout and noise of training": (
        r"(.+_)?(dropout|pdrop|layerdrop)(_(rate|ratio|prob|p))?|drop_path_rate|\w+_jitter_noise|neftune_\w+"
        r"|(attn|attention|embd|embed|resid|hidden|mlp|ffn|proj|classifier)_drop(_(rate|prob|p|out))?"
    ),
    "weights before training": r"(.+_)?(initializer|init)_(range|std|stddev|method|device|factor|cutoff_factor)",
    "what quantises, which is refused elsewhere": r"quantization(_config)?",
    "losses": r"(.+_)?loss(_.+)?|label_smoothing\w*|(use_)?fused?_(linear_)?cross_entropy|(num_)?logits_to_keep",
    "training itself": (
        r"(use_)?gradient_checkpointing(_.+)?|tensor_parallel\w*|pretraining_tp|freeze_\w+|training_\w+"
        r"|chunk_size_feed_forward|use_reentrant|unsloth\w*|torch_compile|(use_)?liger\w*"
    ),
    "other tasks": (
        r"id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params|classifier_\w+|summary_\w+"
        r"|is_(decoder|llama_config|composition)|prefix"
    ),
    "types of stored numbers": r"(.+_)?dtype|use_bfloat16|(use_)?(bf16|fp16|fp32)|\w+_in_fp32",
    "code and names": (
        r"auto_map|custom_pipelines|(.+_)?version|transformers\W\w+|(\w*model_|run_|library_)?name(_or_path)?|license"
        r"|language|tags|pipeline_tag|datasets|merge_method|(pad_vocab_size_)?multiple_of"
    ),
    "how attention is computed": (
        r"(use_)?flash_?att(n|ention)?(_?\d)?(_(enabled|version))?|attn_impl|(attn|attention)_implementation"
        r"|(use_)?(sdpa|xformers|memory_efficient_attention)|use_cache_kernel|fused_(mlp|attn|qkv)"
    ),
    "the tokenizer": r"tokenizer(_\w+)?|chat_template|(padding|truncation)_side|model_max_length|add_prefix_space",
    "lengths that others decide": r"(model_|max_|train_)*(seq|sequence|context)_(len|length|size)|n_ctx|n_positions",
}  # fmt: skip
"""By what they are about: what the whole name of such a key matches."""
_HARMLESS: Final = re.compile("|".join(_RULES.values()))
_DECIDES: Final = re.compile(
    r"rope|rotary|(?<!^guidance_)scal|multiplier|norm|window|(?<!^sequence_)bias|cap(ping)?$|sink|layer_type|^num_\w*(?<!assistant)_tokens"
)
"""No rule accepts a key in which this is found."""
_LACKING: Final = re.compile(
    r"(?!no_)\w*(softcap|window|bias|clip|sink|alibi|lora|mamba|ssm|conv|mtp|nextn|mrope|vision|audio|image)\w*"
    r"|\w*(expert|moe|router|cross_attention|shared|interleaved|parallel|dynamic|logn|chunk|temperature|output_gate|encoder)\w*"
    r"|(use|enable|is|has|with|add|apply)_(?!\w*(rope|rotary|rms|.lu|swish|gated|causal|scal|pos|residual|norm|mlp|ffn|attn$|act|mask|softmax|head|bidirect))\w+"
    r"|\w*scaling_beta|finetuned|hidden_size_per_layer_input|qk_layernorm"
)  # fmt: skip
"""Features that the decoder lacks, or that a family has otherwise: a value of :data:`OFF` changes nothing."""
EXPERTS: Final = r"(num|n|moe_num)_(\w+_)?experts|(use|enable|is|has)_moe\w*"
"""What a key matches that says whether there are experts."""
_OF_EXPERTS: Final = re.compile(r"\w*(expert|moe|router|topk)\w*|decoder_sparse_step|mlp_only_layers|first_k_dense_\w+")
MAX_KEY: Final = 100
"""Longest key that is compared with rules: strangers write them, and a comparison may take the square of its length."""


def is_harmless(key: str, raw: Mapping[str, Any], *, lacks_experts: bool) -> bool:
    """Return whether a setting that a family does not know changes no logits.

    Args:
        key: Its key in ``raw``. Strangers write it: a long one is not compared with the rules, which would take long.
        raw: The object of config.json: settings of windows are harmless if there are none.
        lacks_experts: Settings of experts are harmless.
    """
    if key.startswith("_") or len(key) > MAX_KEY:
        return key.startswith("_")
    if (_HARMLESS.fullmatch(key) and not _DECIDES.search(key)) or (raw[key] in OFF and _LACKING.fullmatch(key)):
        return True
    if key == "layer_types":
        return isinstance(raw[key], list) and all(kind == "full_attention" for kind in raw[key])
    if key in ("sliding_window", "max_window_layers"):
        return raw.get("use_sliding_window") is False
    return lacks_experts and _OF_EXPERTS.fullmatch(key) is not None


def has_experts(raw: Mapping[str, Any]) -> bool | None:
    """Return whether a configuration says that there are experts; None: it says nothing about them."""
    values = [value for key, value in raw.items() if len(key) <= MAX_KEY and re.fullmatch(EXPERTS, key)]
    said = [value for value in values if isinstance(value, int)]
    has = all(value is not False for value in said) and any(value is True or value > 1 for value in said)
    return has if said else None
