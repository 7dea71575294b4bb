"""Stand-in on the CPU for torch's flash attention operator: what its documentation and its checks say, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

FlashOutput = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class FlashOperator:
    """Packed sequences, grouped query heads, and a causal mask aligned at the lower right.

    Args:
        is_strict: Refuse the dtypes and head sizes that the operator refuses; otherwise it takes all.
        is_lower_right: Align the mask as the operator does, or at the upper left as others do.

    Attributes:
        num_calls: How often it ran.
    """

    def __init__(self, *, is_strict: bool = True, is_lower_right: bool = True) -> None:
        self._is_strict = is_strict
        self._is_lower_right = is_lower_right
        self.num_calls = 0

    @contextmanager
    def installed(self) -> Iterator[FlashOperator]:
        """Let torch's dispatcher call this for tensors on the CPU, where there is no operator otherwise."""
        with torch.library._scoped_library("aten", "IMPL") as library:
            library.impl("_flash_attention_forward", self, "CPU")
            yield self

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> FlashOutput:
        """Run the operator. The rest of the arguments are those of its schema; only what we use may be given."""
        cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask = args
        assert (dropout_p, is_causal, return_debug_mask) == (0.0, True, False)
        assert {"seqused_k"} <= kwargs.keys() <= {"seqused_k", "scale"}
        seqused_k, scale = kwargs["seqused_k"], kwargs.get("scale")
        scale = query.shape[2] ** -0.5 if scale is None else scale
        self._check(query, key, value)
        num_seqs = len(cum_seq_q) - 1
        for lengths, size in ((cum_seq_q, num_seqs + 1), (cum_seq_k, num_seqs + 1), (seqused_k, num_seqs)):
            assert lengths.dtype == torch.int32
            assert lengths.shape == (size,)
            assert lengths.is_contiguous()
        rows, slots, tokens = cum_seq_q.tolist(), cum_seq_k.tolist(), seqused_k.tolist()
        assert (rows[0], rows[-1], slots[0], slots[-1]) == (0, len(query), 0, len(key))
        assert (max_q, max_k) == (max(end - begin for begin, end in pairwise(rows)), max(tokens))
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for seq, used in enumerate(tokens):
            begin, end, first = rows[seq], rows[seq + 1], slots[seq]
            assert end - begin <= used <= slots[seq + 1] - first
            ahead = used - (end - begin) if self._is_lower_right else 0
            keys = slice(first, first + used)
            out[begin:end] = _attend(query[begin:end], key[keys], value[keys], ahead, scale)
        self.num_calls += 1
        unused = torch.empty(0)
        return out, torch.empty(query.shape[1], len(query)), torch.empty(2, dtype=torch.uint64), unused, unused.clone()

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Refuse what the operator refuses."""
        head_dim = query.shape[2]
        if self._is_strict and query.dtype not in {torch.bfloat16, torch.float16}:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if self._is_strict and (head_dim % 8 or head_dim > 256):
            raise RuntimeError("head_size must be a multiple of 8")
        assert query.dtype == key.dtype == value.dtype
        assert query.shape[1] % key.shape[1] == 0
        assert key.shape == value.shape == (len(key), key.shape[1], head_dim)
        assert query.stride(2) == key.stride(2) == value.stride(2) == 1


def _attend(query: Tensor, key: Tensor, value: Tensor, ahead: int, scale: float) -> Tensor:
    """Attend one sequence: query [rows, num_heads, head_dim], key and value [kv_len, num_kv_heads, head_dim].

    The first row sees ``ahead`` keys and one more; ``scale`` multiplies the products of queries and keys.
    """
    group = query.shape[1] // key.shape[1]
    wide_key, wide_value = (part.float().repeat_interleave(group, 1).transpose(0, 1) for part in (key, value))
    scores = query.float().transpose(0, 1) @ wide_key.transpose(1, 2) * scale
    is_future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + ahead)
    weights = scores.masked_fill(is_future, float("-inf")).softmax(-1)
    out: Tensor = (weights @ wide_value).transpose(0, 1).to(query.dtype)
    return out
