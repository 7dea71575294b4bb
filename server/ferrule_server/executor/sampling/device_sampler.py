"""Choose tokens for many rows at once on their device: shaping, distribution, draft and draw in one batch.

Every row becomes float64 weights over the whole vocabulary, with 0 where a token is dropped. For a greedy choice only
one token has a weight. So rows of all kinds go together. The definition is the one in numpy (``selection.choose``). On
a CPU the choice is the same bit for bit: exp and the sums, top-k and top-p are those of the definition, row by row.
Elsewhere exp, and sums in another order, may differ from it in the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrule_server.executor.base import DraftSpec, Int32Array, OutputSpec, SampleSpec, TokenMask
from ferrule_server.executor.sampling.distributions import (
    SMALLEST_TEMPERATURE,
    Choice,
    Distribution,
    keep_top,
    total_of,
)
from ferrule_server.executor.sampling.drafts import proposal
from ferrule_server.executor.sampling.exponential import exp_of
from ferrule_server.executor.sampling.philox import Purpose, uniform

_GREEDY = SampleSpec(temperature=0)


class ChoiceRow(NamedTuple):
    """The arguments of a choice other than the logits: see ``selection.choose``."""

    position: int
    spec: OutputSpec
    history: Int32Array | None

    @property
    def sample(self) -> SampleSpec:
        """How the token is drawn; a greedy choice is a draw at temperature 0."""
        return self.spec.sample or _GREEDY

    def uniform(self, purpose: Purpose) -> float:
        """Return the random number of one draw."""
        return uniform(self.sample.seed, self.position, purpose)


class DeviceSampler:
    """Chooses tokens on one device.

    Invariant: keeps nothing but the packed bits of masks that are still referred to elsewhere.

    Args:
        device: Where the logits are.
        is_exact: Choose with the bits of the definition, on a CPU.
    """

    def __init__(self, device: torch.device, *, is_exact: bool = False) -> None:
        self._device, self._is_exact = device, is_exact
        self._masks: WeakKeyDictionary[TokenMask, Tensor] = WeakKeyDictionary()

    def choose(self, logits: Tensor, rows: Sequence[ChoiceRow]) -> list[Choice]:
        """Return the token that each row gives.

        Args:
            logits: float32 [num_rows, vocab_size], finite, not changed.
            rows: How to choose; each with ``greedy`` or ``sample``.
        """
        values = self._shape(logits, rows)
        weights = self._weights(values, rows)
        totals = self._column([total_of(row) for row in weights.numpy()])[:, 0] if self._is_exact else weights.sum(1)
        drawn, accepted_ids = self._judge(weights, totals, rows)
        is_accepted = accepted_ids >= 0
        tokens = torch.where(is_accepted, accepted_ids, self._draw(drawn, rows))
        chosen = weights.gather(1, tokens.unsqueeze(1)).squeeze(1)
        figures = torch.stack((tokens.double(), chosen, totals, is_accepted.double()), 1).tolist()
        return [
            _choice(row, *figure) if figure[1] > 0 else _redraw(row, drawn[i], weights[i])
            for i, (row, figure) in enumerate(zip(rows, figures, strict=True))
        ]

    def _shape(self, logits: Tensor, rows: Sequence[ChoiceRow]) -> Tensor:
        """Return the logits to choose from: those given, or a float64 copy with -inf where a mask forbids a token."""
        if all(row.spec.shaping is None for row in rows):
            return logits
        values = logits.double()
        penalties = _penalties(rows, logits.shape[1])
        if penalties is not None:
            places, factors, amounts = (torch.from_numpy(part).to(self._device) for part in penalties)
            occurred = values.view(-1)[places]
            occurred = torch.where(occurred > 0, occurred / factors, occurred * factors)
            values.view(-1)[places] = occurred - amounts
        bias = [
            (i * logits.shape[1] + token_id, amount)
            for i, row in enumerate(rows)
            if row.spec.shaping is not None
            for token_id, amount in row.spec.shaping.bias
        ]
        if bias:
            places = self._tensor([place for place, _ in bias], torch.int64)
            values.view(-1)[places] += self._tensor([amount for _, amount in bias], torch.float64)
        self._apply_masks(values, rows)
        return values

    def _apply_masks(self, values: Tensor, rows: Sequence[ChoiceRow]) -> None:
        masks = [(i, row.spec.shaping.mask) for i, row in enumerate(rows) if row.spec.shaping is not None]
        packed = [(i, self._packed(mask)) for i, mask in masks if mask is not None]
        if not packed:
            return
        bits = torch.stack([part for _, part in packed]).unsqueeze(2) >> torch.arange(8, device=self._device)
        is_forbidden = (bits & 1).flatten(1)[:, : values.shape[1]] == 0
        places = self._tensor([i for i, _ in packed], torch.int64)
        values[places] = values[places].masked_fill_(is_forbidden, -math.inf)

    def _packed(self, mask: TokenMask) -> Tensor:
        packed = self._masks.get(mask)
        if packed is None:
            packed = self._masks[mask] = torch.tensor(mask.bits, device=self._device)
        return packed

    def _weights(self, values: Tensor, rows: Sequence[ChoiceRow]) -> Tensor:
        """Return probabilities up to a factor per row: float64 [num_rows, vocab_size], the largest 1."""
        peaks = values.amax(1, keepdim=True).double()
        weights = values - peaks
        samples = [row.sample for row in rows]
        factors = [1 / max(sample.temperature, SMALLEST_TEMPERATURE) if sample.temperature else 1 for sample in samples]
        if any(factor != 1 for factor in factors):
            weights *= self._column(factors)
        weights = torch.from_numpy(exp_of(weights.numpy())) if self._is_exact else weights.exp_()
        self._cut(weights, values, samples, peaks)
        if any(sample.min_p > 0 for sample in samples):
            weights.masked_fill_(weights < self._column([sample.min_p for sample in samples]), 0)
        cold = [i for i, sample in enumerate(samples) if sample.temperature == 0]
        if cold:
            best = values[cold].argmax(1)
            weights[cold] = torch.nn.functional.one_hot(best, values.shape[1]).double()
        return weights

    def _cut(self, weights: Tensor, values: Tensor, samples: Sequence[SampleSpec], peaks: Tensor) -> None:
        """Set the weights of tokens that top-k and top-p drop to 0, in place."""
        cut = [i for i, sample in enumerate(samples) if sample.top_k > 0 or sample.top_p < 1]
        if self._is_exact:
            for i in cut:
                keep_top(weights[i].numpy(), values[i].numpy(), samples[i], peaks[i].item())
        elif cut:
            self._cut_sorted(weights, values, samples, cut)

    def _cut_sorted(self, weights: Tensor, values: Tensor, samples: Sequence[SampleSpec], cut: Sequence[int]) -> None:
        order = (values[cut] + 0.0).sort(dim=1, descending=True, stable=True).indices  # -0.0 equals 0.0
        vocab_size = values.shape[1]
        counts = self._column([samples[i].top_k or vocab_size for i in cut])
        shares = self._column([samples[i].top_p if samples[i].top_p < 1 else math.inf for i in cut])
        falling = weights[cut].gather(1, order)
        falling.masked_fill_(torch.arange(vocab_size, device=self._device) >= counts, 0)
        reached = falling.cumsum(1)
        before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
        falling.masked_fill_(before >= shares * reached[:, -1:], 0)
        weights[cut] = torch.zeros_like(falling).scatter_(1, order, falling)

    def _judge(self, weights: Tensor, totals: Tensor, rows: Sequence[ChoiceRow]) -> tuple[Tensor, Tensor]:
        """Return the weights that each row draws from (see ``drafts.residual``), and its draft if accepted, else -1."""
        accepted_ids = torch.full((len(rows),), -1, device=self._device)
        drafts = [(i, row.spec.draft) for i, row in enumerate(rows) if row.spec.draft is not None]
        if not drafts:
            return weights, accepted_ids
        places = self._tensor([i for i, _ in drafts], torch.int64)
        target = weights[places] / totals[places].unsqueeze(1)
        proposed = self._proposals([draft for _, draft in drafts], weights.shape[1])
        draft_ids = self._tensor([draft.token_id for _, draft in drafts], torch.int64).unsqueeze(1)
        p, q = (probs.gather(1, draft_ids).squeeze(1) for probs in (target, proposed))
        ratio = torch.where(q == 0, (p > 0).double(), p / q)
        numbers = self._tensor([rows[i].uniform(Purpose.ACCEPT) for i, _ in drafts], torch.float64)
        accepted_ids[places] = torch.where(numbers < ratio, draft_ids.squeeze(1), -1)
        residual = (target - proposed).clamp_(min=0)
        drawn = weights.clone()
        drawn[places] = torch.where(residual.amax(1, keepdim=True) > 0, residual, weights[places])
        return drawn, accepted_ids

    def _proposals(self, drafts: Sequence[DraftSpec], vocab_size: int) -> Tensor:
        """Return q of each draft: float64 [num_drafts, vocab_size]."""
        proposed = torch.zeros(len(drafts), vocab_size, dtype=torch.float64, device=self._device)
        for row, draft in zip(proposed, drafts, strict=True):
            token_ids, probs = proposal(draft)
            places = slice(None) if token_ids is None else self._tensor(token_ids.tolist(), torch.int64)
            row[places] = torch.from_numpy(probs).to(self._device)
        return proposed

    def _draw(self, weights: Tensor, rows: Sequence[ChoiceRow]) -> Tensor:
        """Return the first token of each row whose cumulative probability exceeds its number: int64 [num_rows]."""
        if self._is_exact:
            pairs = zip(weights.numpy(), rows, strict=True)
            return self._tensor([Distribution(own).draw(_number(row)).token for own, row in pairs], torch.int64)
        sums = weights.cumsum(1)
        return torch.searchsorted(
            sums, self._column([_number(row) for row in rows]) * sums[:, -1:], right=True
        ).squeeze(1)

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _column(self, values: Sequence[float]) -> Tensor:
        return self._tensor(values, torch.float64).unsqueeze(1)


Penalties = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]


def _penalties(rows: Sequence[ChoiceRow], vocab_size: int) -> Penalties | None:
    """Return places in the flattened rows, with factors and amounts to subtract; None if no row has penalties."""
    parts = []
    for i, (_, spec, history) in enumerate(rows):
        if spec.shaping is not None and spec.shaping.has_penalties:
            assert history is not None, "penalties without a history"
            token_ids, counts = np.unique(history, return_counts=True)
            amounts = counts * spec.shaping.frequency_penalty + spec.shaping.presence_penalty
            parts.append((i * vocab_size + token_ids.astype(np.int64), spec.shaping.repetition_penalty, amounts))
    if not parts:
        return None
    factors = [np.full(len(places), factor) for places, factor, _ in parts]
    return np.concatenate([part[0] for part in parts]), np.concatenate(factors), np.concatenate([p[2] for p in parts])


def _number(row: ChoiceRow) -> float:
    return row.uniform(Purpose.SAMPLE if row.spec.draft is None else Purpose.RESIDUAL)


def _choice(row: ChoiceRow, token: float, weight: float, total: float, is_accepted: float) -> Choice:
    return Choice(int(token), math.log(weight) - math.log(total), None if row.spec.draft is None else is_accepted > 0)


def _redraw(row: ChoiceRow, drawn: Tensor, weights: Tensor) -> Choice:
    """Return the token that the definition draws.

    A parallel sum may be too small in its last bits where one of its parts begins. Then a token with weight 0 can
    appear to begin there. If the random number hits such a gap, about 1e-16 wide, the row is summed again in order.
    """
    token = Distribution(drawn.cpu().numpy()).draw(_number(row)).token
    host = weights.cpu().numpy()
    return _choice(row, token, float(host[token]), float(host.sum()), 0.0)
