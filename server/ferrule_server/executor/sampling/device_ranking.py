"""The largest logits of many rows at once, on the device they are on, ties to the lowest id."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["best_ids", "top"]

_RUN = 128
_LAST = torch.iinfo(torch.int64).max


def best_ids(logits: Tensor) -> list[int]:
    """Return the id of each row's largest logit, the lowest among equals, and -1 for a row with NaN or infinity.

    Args:
        logits: float32 [num_rows, vocab_size].
    """
    best = logits.argmax(1)
    # NaN wins argmax, so every bad row shows in its peak or minimum.
    ends = torch.stack((logits.gather(1, best.unsqueeze(1)).squeeze(1), logits.amin(1)))
    ids: list[int] = torch.where(ends.isfinite().all(0), best, -1).tolist()
    return ids


def top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids, int64, and logits, float32, of the ``k`` best tokens: two [num_rows, k], best first.

    Whole rows are read once, for the maximum of each run of 128 logits; the k best tokens lie in the k best runs::

        row      |  run 0  |  run 1  |  run 2  | ...
        maxima       3.1       7.2       0.4

    (Runs rank by their best tokens, tokens by logit and then lowest id. A token outside the k best runs ranks after the
    best token of each of them.)

    Args:
        logits: float32 [num_rows, vocab_size], finite.
        k: At most vocab_size.
    """
    num_rows, vocab_size = logits.shape
    num_whole = vocab_size // _RUN
    maxima = logits[:, : num_whole * _RUN].view(num_rows, num_whole, _RUN).amax(2)
    if num_whole * _RUN < vocab_size:
        maxima = torch.cat((maxima, logits[:, num_whole * _RUN :].amax(1, keepdim=True)), 1)
    runs = _best(maxima, torch.arange(maxima.shape[1], device=logits.device), min(k, maxima.shape[1]))
    ids = (runs.unsqueeze(2) * _RUN + torch.arange(_RUN, device=logits.device)).flatten(1)
    values = logits.gather(1, ids.clamp(max=vocab_size - 1))
    best = _best(values, ids, k, vocab_size)
    return best, logits.gather(1, best)


def _best(values: Tensor, ids: Tensor, k: int, end: int = 1 << 32) -> Tensor:
    """Return the ids below ``end`` of the k best values, by falling value (finite float32), then rising id."""
    bits = (values + 0.0).view(torch.int32)  # adding 0 makes -0.0 and 0.0 the same key
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = torch.where(ids < end, (~rising << 32) | ids, _LAST)
    return keys.topk(k, 1, largest=False).values & 0xFFFFFFFF
