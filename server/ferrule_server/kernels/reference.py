"""Every operation of the decoder in plain torch: the definition with which faster kernels are compared.

The code is clear rather than fast: it attends sequences one by one, and neither pads nor fuses anything. A *pool* is
``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``, with K at 0 and V at 1. Slot s is offset
``s % block_size`` of block ``s // block_size``. The sums in norms and softmax are float32 for every dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "AttentionRule",
    "activate",
    "apply_rope",
    "best_tokens",
    "clamped_swiglu",
    "embed",
    "gather_kv",
    "is_hidden",
    "kv_append",
    "layer_norm",
    "linear",
    "paged_attention",
    "qk_norm_rope",
    "rms_norm",
    "rope_angles",
    "route",
    "softcap",
]


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How scores are made and which keys a row sees.

    Attributes:
        scale: Multiplies the products of queries and keys.
        window: How many keys a row sees, its own included; 0: all up to its own.
        softcap: Scores become ``cap * tanh(score / cap)``; 0: they do not.
        chunk: Keys of a chunk: a row sees only those of its own chunk; 0: there are no chunks.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    chunk: int = 0


def embed(token_ids: Tensor, table: Tensor, sampled: Tensor | None = None) -> Tensor:
    """Return the row of a table for each token; zeros for an id that is not in the table.

    Args:
        token_ids: Integers [rows]; ``-2 - j`` stands for ``sampled[j]``.
        table: [vocab_size, hidden_size].
        sampled: Integers [number of tokens sampled in the previous step].

    Returns:
        [rows, hidden_size], dtype of ``table``.
    """
    if sampled is not None:
        place = -2 - token_ids.long()
        is_sampled = (place >= 0) & (place < len(sampled))
        token_ids = torch.where(is_sampled, sampled[torch.where(is_sampled, place, 0)], token_ids)
    is_known = (token_ids >= 0) & (token_ids < len(table))
    return table[torch.where(is_known, token_ids, 0).long()] * is_known.unsqueeze(1).to(table.dtype)


def best_tokens(logits: Tensor, *, is_masked: bool) -> Tensor:
    """Return the token with the largest logit of each row; among equals, the lowest.

    Args:
        logits: float32 [rows, vocab_size].
        is_masked: Whether -inf marks a token that is not allowed.

    Returns:
        int32 [rows]; -1 if a logit is NaN or infinite (except for -inf of a mask), or if no token is allowed.
    """
    is_allowed = logits != -torch.inf if is_masked else torch.ones_like(logits, dtype=torch.bool)
    is_valid = (logits.isfinite() | ~is_allowed).all(1) & is_allowed.any(1)
    best = torch.where(is_allowed, logits, -torch.inf)
    is_best = best == best.amax(1, keepdim=True)
    return torch.where(is_valid, is_best.int().argmax(1), -1).int()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``.

    Args:
        x: [rows, in_features].
        weight: [out_features, in_features].
        bias: [out_features], or None.

    Returns:
        [rows, out_features], dtype of ``x``.
    """
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x`` scaled to mean square 1, times ``weight`` ("Root Mean Square Layer Normalization", Zhang, 2019).

    Args:
        x: [..., size].
        weight: [size], dtype of ``x`` or float32.
        eps: Added to the mean square.

    Returns:
        [..., size], dtype of ``x``. As in ``transformers``: rounded to it before the multiplication by a weight of that
        dtype, and after that by a float32 one.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(weight.dtype)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return ``x`` with mean 0 and variance 1, times ``weight``, plus ``bias`` ("Layer Normalization", Ba, 2016).

    Args:
        x: [..., size].
        weight: [size].
        bias: [size], or None.
        eps: Added to the variance.

    Returns:
        [..., size], dtype of ``x``; computed in float32 and rounded once.
    """
    wide_bias = None if bias is None else bias.float()
    return F.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(x.dtype)


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return ``cap * tanh(x / cap)`` ("Gemma 2", 2024)."""
    return cap * torch.tanh(x / cap)


def rope_angles(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of the rotation of each row.

    Args:
        positions: Integers [rows].
        inverse_frequencies: float32 [head_dim / 2], radians per position.

    Returns:
        Two float32 [rows, head_dim / 2].
    """
    angles = torch.outer(positions.float(), inverse_frequencies)
    return angles.cos(), angles.sin()


def apply_rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads with each pair (i, i + head_dim / 2) rotated by the angle of its position.

    The pairing is that of ``transformers``, not the interleaved one of "RoFormer" (Su et al., 2021).

    Args:
        heads: [..., rows, num_heads, head_dim].
        cos: float32 [rows, head_dim / 2].
        sin: float32 [rows, head_dim / 2].

    Returns:
        [..., rows, num_heads, head_dim], dtype of ``heads``; computed in float32.
    """
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def qk_norm_rope(heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads normalised, if there is a weight, and rotated; computed in float32 and rounded once.

    Args:
        heads: [rows, num_heads, head_dim].
        weight: [head_dim]; None: heads are not normalised.
        eps: Added to the mean square.
        cos: float32 [rows, head_dim / 2].
        sin: float32 [rows, head_dim / 2].

    Returns:
        [rows, num_heads, head_dim], dtype of ``heads``.
    """
    wide = heads.float()
    if weight is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return apply_rope(wide, cos, sin).to(heads.dtype)


def activate(x: Tensor, activation: str, *, is_gated: bool) -> Tensor:
    """Return the activation of a projection, times another ("GLU Variants Improve Transformer", Shazeer, 2020).

    Args:
        x: [rows, 2 * size], the activated half first; [rows, size] without a gate.
        activation: ``silu``, or ``gelu_tanh``, the approximation of GELU by a tanh.
        is_gated: Whether there are two halves.

    Returns:
        [rows, size].
    """
    first, second = x.chunk(2, dim=-1) if is_gated else (x, None)
    activated = F.silu(first) if activation == "silu" else F.gelu(first, approximate="tanh")
    return activated if second is None else activated * second


def clamped_swiglu(x: Tensor, limit: float, alpha: float) -> Tensor:
    """Return ``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped projections ("gpt-oss", OpenAI, 2025).

    Args:
        x: [rows, 2 * size]; ``gate`` first, then ``up``.
        limit: ``gate`` is at most this, and ``up`` is between minus this and this.
        alpha: Multiplies ``gate`` inside the sigmoid.

    Returns:
        [rows, size].
    """
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def route(scores: Tensor, used: int, gate: str, *, is_normalised: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return which experts each row passes and what multiplies their outputs ("Switch Transformers", 2021).

    Args:
        scores: float32 [rows, experts].
        used: Experts of a row: those of its highest scores, of equal ones the first.
        gate: How scores become weights: ``softmax`` over all experts, ``softmax_of_used``, or ``sigmoid`` of each.
        is_normalised: The weights of a row are divided by their sum.
        scale: Multiplies the weights.

    Returns:
        Weights, float32, and numbers of experts, int64: both [rows, used], the highest scores first.
    """
    best, ids = (part[:, :used] for part in torch.sort(scores, dim=1, descending=True, stable=True))
    if gate == "sigmoid":
        weights = torch.sigmoid(best)
    elif gate == "softmax":
        weights = torch.exp(best - torch.logsumexp(scores, 1, keepdim=True))
    else:
        weights = torch.softmax(best, 1)
    if is_normalised:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * scale, ids


def kv_append(pool: Tensor, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Write the K and V of the rows that have a slot; all other slots of the pool stay unchanged.

    Args:
        pool: Changed in place.
        layer: Index of the layer.
        key: [rows, num_kv_heads, head_dim].
        value: Like ``key``.
        slot_mapping: Integers [rows]; -1 writes nothing. No slot occurs twice.
    """
    is_kept = slot_mapping >= 0
    slots = slot_mapping[is_kept].long()
    block_size = pool.shape[4]
    blocks, offsets = slots // block_size, slots % block_size
    pool[blocks, layer, 0, :, offsets] = key[is_kept]
    pool[blocks, layer, 1, :, offsets] = value[is_kept]


def gather_kv(pool: Tensor, layer: int, block_table: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
    """Return copies of the first ``kv_len`` keys and values of one sequence.

    Args:
        pool: Not changed.
        layer: Index of the layer.
        block_table: Integers [>= ceil(kv_len / block_size)], block ids in order.
        kv_len: Number of tokens.

    Returns:
        Two [num_kv_heads, kv_len, head_dim].
    """
    num_blocks = -(-kv_len // pool.shape[4])
    kv = pool[block_table[:num_blocks].long(), layer]  # [blocks, 2, num_kv_heads, block_size, head_dim]
    kv = kv.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :kv_len]
    return kv[0], kv[1]


def paged_attention(
    query: Tensor,
    pool: Tensor,
    layer: int,
    *,
    positions: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    rule: AttentionRule | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the causal softmax attention of each row over its own sequence.

    Args:
        query: [rows, num_heads, head_dim]; query head h reads kv head ``h // (num_heads // num_kv_heads)``.
        pool: Not changed; it already contains the K and V of the rows.
        layer: Index of the layer.
        positions: Integers [rows]; row r attends to positions 0..positions[r] of its sequence.
        cu_seqlens_q: Integers [num_seqs + 1], the first row of each sequence, and the number of rows.
        kv_lens: Integers [num_seqs].
        block_tables: Integers [num_seqs, max_blocks].
        rule: Scale, window, chunks and cap of the scores; None: scale 1 / sqrt(head_dim), and nothing else.
        sinks: [num_heads], a score of each head that joins the softmax and has no value; None: there is none.

    Returns:
        [rows, num_heads, head_dim], dtype of ``query``.
    """
    rule = rule or AttentionRule(query.shape[-1] ** -0.5)
    out = torch.empty_like(query)
    for seq, (begin, end) in enumerate(zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)):
        key, value = gather_kv(pool, layer, block_tables[seq], int(kv_lens[seq]))
        out[begin:end] = _attend(query[begin:end], key, value, positions[begin:end], rule, sinks=sinks)
    return out


def is_hidden(keys: Tensor, positions: Tensor, rule: AttentionRule) -> Tensor:
    """Return whether a row does not see a key.

    Args:
        keys: Integers, positions of keys.
        positions: Integers, positions of rows; both broadcast.
        rule: Its window and chunk are read.
    """
    hidden = keys > positions
    if rule.window:
        hidden = hidden | (keys <= positions - rule.window)
    if rule.chunk:
        hidden = hidden | (keys < positions - positions % rule.chunk)
    return hidden


def _attend(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, rule: AttentionRule, *, sinks: Tensor | None
) -> Tensor:
    """Attend the rows of one sequence: query [rows, num_heads, head_dim], key [num_kv_heads, kv_len, head_dim]."""
    num_queries_per_kv = query.shape[1] // key.shape[0]
    key, value = (part.repeat_interleave(num_queries_per_kv, dim=0) for part in (key, value))
    scores = torch.einsum("rhd,htd->hrt", query.float(), key.float()) * rule.scale
    if rule.softcap:
        scores = softcap(scores, rule.softcap)
    hidden = is_hidden(torch.arange(key.shape[1], device=query.device), positions.unsqueeze(1), rule)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, len(positions), 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[1]]
    seen = value.float().masked_fill(hidden.all(0).view(1, -1, 1), 0)  # what no row sees may be anything
    return torch.einsum("hrt,htd->rhd", weights, seen).to(query.dtype)
