"""Everything that output rows return, batched on the device of the logits: ``selection.select_rows`` in torch.

Each value is computed only for the rows that request it, and only requested values are copied to the host: the best ids
of all rows, then normalisers, single logits, the k best and drawn tokens of the rows that need them. So the cost of a
row depends on what it requests. For whole rows of logits or hidden states it is their copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrule_server.executor.base import Float32Array, Int32Array, OutputSpec, RowOutput
from ferrule_server.executor.sampling import ranking
from ferrule_server.executor.sampling.device_sampler import ChoiceRow, DeviceSampler
from ferrule_server.executor.sampling.distributions import Choice
from ferrule_server.executor.sampling.ranking import Float64Array
from ferrule_server.executor.sampling.selection import (
    fill_logprobs,
    logprobs,
    needs_normaliser,
    requested_ids,
    select_rows,
)

_GROUP_ELEMENTS = 5 << 17
"""Logits that are processed together on a CPU: four rows of 152 000, which stay in its caches and occupy two threads
(16 rows together are half as fast)."""
_ACCELERATOR_GROUP_ELEMENTS = 1 << 22
"""The same on other devices: bounds the memory to 32 MiB for each float64 copy."""
_RUN = 128
"""Logits per run; the search for the best tokens of a row begins with the maximum of each run."""
_LAST = torch.iinfo(torch.int64).max
_SMALL_ELEMENTS = 1 << 15
"""On a CPU, numpy handles steps of at most this many logits: its calls cost a third of torch's."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """The rows of one call.

    Attributes:
        logits: float32 [num_rows, vocab_size], raw.
        rows: What each row returns, and how it chooses a token.
        best: The id of each row's largest logit; -1 for a row with NaN or infinity.
        outputs: The results, filled in step by step.
    """

    logits: Tensor
    rows: Sequence[ChoiceRow]
    best: Sequence[int]
    outputs: list[RowOutput]

    @property
    def finite(self) -> list[int]:
        """The rows without NaN and infinity."""
        return [i for i, best_id in enumerate(self.best) if best_id >= 0]


class DeviceOutputs:
    """Selects the outputs of rows on one device; keeps nothing of a step.

    Args:
        device: Where logits and hidden states are.
        is_exact: Choose with the bits of the definition, by default on a CPU, whose tensors numpy reads in place (and
            compares faster: the largest of 16 rows of 152 000, two threads: 0.8 ms, torch 2.0).
    """

    def __init__(self, device: torch.device, *, is_exact: bool | None = None) -> None:
        self._is_exact = device.type == "cpu" if is_exact is None else is_exact
        self._most_elements = _GROUP_ELEMENTS if device.type == "cpu" else _ACCELERATOR_GROUP_ELEMENTS
        self._device = device
        self._sampler = DeviceSampler(device, is_exact=self._is_exact)

    def select(
        self,
        logits: Tensor,
        hidden: Tensor | None,
        positions: Sequence[int],
        specs: Sequence[OutputSpec],
        histories: Sequence[Int32Array | None] = (),
        *,
        best: Sequence[int] | None = None,
    ) -> list[RowOutput]:
        """Return what each row's spec requests; the logits are neither changed nor kept.

        Args:
            logits: float32 [num_outputs, vocab_size], raw.
            hidden: [num_outputs, hidden_size], the input of the output head; None: neither whole rows of logits nor
                hidden states are returned, even if a spec asks for them.
            positions: Index in its sequence of each row's own token.
            specs: What each row returns.
            histories: As ``StepBatch.histories``.
            best: The id of each row's largest logit, -1 for a row with NaN or infinity; None: to be found.

        Returns:
            As ``selection.select_rows``.
        """
        if self._is_exact and hidden is not None and logits.numel() <= _SMALL_ELEMENTS:
            states = hidden.float().numpy() if any(spec.hidden_state for spec in specs) else None
            return select_rows(logits.numpy(), positions, specs, histories, states)
        if best is None:
            best = ranking.best_ids(logits.numpy()) if self._is_exact else best_ids(logits)
        histories = histories or [None] * len(specs)
        rows = [ChoiceRow(at + 1, spec, history) for at, spec, history in zip(positions, specs, histories, strict=True)]
        outputs = [RowOutput(row.position, is_finite=best_id >= 0) for row, best_id in zip(rows, best, strict=True)]
        tile = _Tile(logits, rows, best, outputs)
        self._fill_logprobs(tile, self._choose(tile))
        if hidden is not None:
            logit_rows = [i for i in tile.finite if specs[i].full_logits]
            for i, row in zip(logit_rows, _own_rows(logits, logit_rows), strict=True):
                outputs[i].logits = row
            hidden_rows = [i for i in tile.finite if specs[i].hidden_state]
            for i, row in zip(hidden_rows, _own_rows(hidden, hidden_rows), strict=True):
                outputs[i].hidden_state = row
        return outputs

    def _choose(self, tile: _Tile) -> dict[int, Choice]:
        """Choose the tokens of the rows that request one, and return the choices by row."""
        choices: dict[int, Choice] = {}
        batched = []
        for i in tile.finite:
            spec = tile.rows[i].spec
            if spec.sample is None and not spec.greedy:
                continue
            if spec.shaping is None and spec.draft is None and (spec.sample is None or spec.sample.temperature == 0):
                choices[i] = Choice(tile.best[i], 0.0)
            else:
                batched.append(i)
        for group, logits in self._groups(tile.logits, batched):
            choices.update(zip(group, self._sampler.choose(logits, [tile.rows[i] for i in group]), strict=True))
        for i, choice in choices.items():
            tile.outputs[i].token, tile.outputs[i].is_accepted = choice.token, choice.is_accepted
        return choices

    def _fill_logprobs(self, tile: _Tile, choices: dict[int, Choice]) -> None:
        """Fill in everything that needs the log softmax at T=1 of finite rows."""
        specs = {i: tile.rows[i].spec for i in tile.finite if needs_normaliser(tile.rows[i].spec)}
        if not specs:
            return
        normalisers = self._normalise(tile, specs)
        self._fill_top(tile, specs, normalisers)
        requested = {i: requested_ids(spec, choices.get(i)) for i, spec in specs.items()}
        raw = self._gather(tile.logits, requested)
        for i, token_ids in requested.items():
            values, raw = raw[: len(token_ids)], raw[len(token_ids) :]
            fill_logprobs(tile.outputs[i], specs[i], choices.get(i), values - normalisers[i])

    def _normalise(self, tile: _Tile, specs: dict[int, OutputSpec]) -> dict[int, float]:
        """Return log(sum(exp(row))) of the rows of ``specs``, by row, and fill in their entropies.

        Everything but the last logarithm is float32, relative to the largest logit: exact to about 1e-6.
        """
        normalisers: dict[int, float] = {}
        for group, logits in self._groups(tile.logits, list(specs)):
            peaks = logits.gather(1, torch.tensor([tile.best[i] for i in group], device=self._device).unsqueeze(1))
            below = logits - peaks
            has_entropy = any(specs[i].entropy for i in group)
            weights = below.exp() if has_entropy else below.exp_()
            sums = weights.sum(1).double()
            normalisers.update(zip(group, (peaks.squeeze(1) + sums.log()).tolist(), strict=True))
            if has_entropy:
                below.clamp_(min=-1000)  # the weight is 0 there, and 0 times infinity would be NaN
                entropies = (sums.log() - weights.mul_(below).sum(1) / sums).clamp_(min=0).tolist()
                for i, entropy in zip(group, entropies, strict=True):
                    tile.outputs[i].entropy = entropy if specs[i].entropy else None
        return normalisers

    def _fill_top(self, tile: _Tile, specs: dict[int, OutputSpec], normalisers: dict[int, float]) -> None:
        rows = [i for i, spec in specs.items() if spec.num_top_logprobs > 0]
        counts = [min(specs[i].num_top_logprobs, tile.logits.shape[1]) for i in rows]
        for i, (token_ids, values) in zip(rows, self._top(tile.logits, rows, counts), strict=True):
            tile.outputs[i].top_ids = token_ids.astype(np.int32)
            tile.outputs[i].top_logprobs = logprobs(values, normalisers[i])

    def _top(
        self, logits: Tensor, rows: Sequence[int], counts: Sequence[int]
    ) -> Iterator[tuple[npt.NDArray[np.int64], Float32Array]]:
        """Yield ids and logits of the best tokens of each row."""
        if rows:
            ids, values = (part.cpu().numpy() for part in top(rows_of(logits, rows), max(counts)))
            for token_ids, best, k in zip(ids, values, counts, strict=True):
                yield token_ids[:k], best[:k]

    def _gather(self, logits: Tensor, requested: dict[int, list[int]]) -> Float64Array:
        """Return single raw logits, row after row: float64."""
        places = [i * logits.shape[1] + token_id for i, token_ids in requested.items() for token_id in token_ids]
        if not places:
            return np.empty(0)
        values: Float64Array = logits.view(-1)[torch.tensor(places, device=self._device)].double().cpu().numpy()
        return values

    def _groups(self, logits: Tensor, rows: Sequence[int]) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield the rows that are processed together, and their logits."""
        size = max(1, self._most_elements // logits.shape[1])
        for begin in range(0, len(rows), size):
            group = rows[begin : begin + size]
            yield group, rows_of(logits, group)


def rows_of(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return ascending rows of a tensor; consecutive ones are not copied."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return tensor[rows[0] : rows[-1] + 1]
    return tensor[torch.tensor(rows, device=tensor.device)]


def _own_rows(tensor: Tensor, rows: Sequence[int]) -> list[Float32Array]:
    """Return copies of rows on the host, after one copy from the device: float32, owned by the receiver."""
    if not rows or tensor.device.type == "cpu":
        return [tensor[i].float().numpy().copy() for i in rows]  # torch's own copy wakes threads, numpy's does not
    return [row.copy() for row in rows_of(tensor, rows).cpu().float().numpy()]


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

    Whole rows are read once, for the maximum of each run of 128 logits. The k best tokens are in the k best runs::

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
