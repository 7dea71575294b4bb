"""Everything that output rows return, batched on the device that the logits are on: ``sampling.select_rows`` in torch.

Each value is computed for the rows that ask for it and only what was asked crosses to the host: the best ids of all
rows, then, of those that want more, normalisers, single logits, the k best, drawn tokens. So a row costs what it asks
for, and whole rows of logits or hidden states cost their copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrule_server.executor.base import Float32Array, Int32Array, OutputSpec, RowOutput
from ferrule_server.executor.sampling import ranking
from ferrule_server.executor.sampling.device_laws import ChoiceRow, DeviceLaws
from ferrule_server.executor.sampling.ranking import Float64Array
from ferrule_server.executor.sampling.selection import Choice, choose, logprobs, needs_normaliser, select_rows

__all__ = ["DeviceOutputs", "best_ids", "top"]

_GROUP_ELEMENTS = 5 << 17
"""Logits that go through float64 together on a CPU: four rows of 152 000, which stay in its caches and keep two threads
busy (16 rows together are half as fast)."""
_ACCELERATOR_GROUP_ELEMENTS = 1 << 22
"""The same elsewhere: bounds the memory taken, 32 MiB for each float64 copy."""
_RUN = 128
"""Logits of a row whose maximum is taken first in a search for the best."""
_LAST = torch.iinfo(torch.int64).max
_SMALL_ELEMENTS = 1 << 15
"""Steps of so few logits are left to numpy on a CPU: its calls cost a third of torch's."""


class DeviceOutputs:
    """Selects on one device; keeps nothing of a step.

    Args:
        device: Where logits and hidden states are.
        has_numpy: Leave to numpy what it does faster; by default on a CPU, whose tensors it reads where they are. It
            compares many logits at a time (the largest of 16 rows of 152 000, two threads: 0.8 ms, torch 2.0) and
            partitions where torch sorts.
    """

    def __init__(self, device: torch.device, *, has_numpy: bool | None = None) -> None:
        self._has_numpy = device.type == "cpu" if has_numpy is None else has_numpy
        self._most_elements = _GROUP_ELEMENTS if device.type == "cpu" else _ACCELERATOR_GROUP_ELEMENTS
        self._device = device
        self._laws = DeviceLaws(device)

    def select(
        self,
        logits: Tensor,
        hidden: Tensor,
        positions: Sequence[int],
        specs: Sequence[OutputSpec],
        histories: Sequence[Int32Array | None] = (),
    ) -> list[RowOutput]:
        """Return what each row's spec asks for; the logits are neither changed nor kept.

        Args:
            logits: float32 [num_outputs, vocab_size], raw.
            hidden: [num_outputs, hidden_size], what the output head read.
            positions: Index in its sequence of each row's own token.
            specs: What each row returns.
            histories: As ``StepBatch.histories``.

        Returns:
            As ``sampling.select_rows``.
        """
        if self._has_numpy and logits.numel() <= _SMALL_ELEMENTS:
            states = hidden.float().numpy() if any(spec.hidden_state for spec in specs) else None
            return select_rows(logits.numpy(), positions, specs, histories, states)
        best = ranking.best_ids(logits.numpy()) if self._has_numpy else best_ids(logits)
        rows = [ChoiceRow(position + 1, spec, None) for position, spec in zip(positions, specs, strict=True)]
        if histories:
            rows = [row._replace(history=history) for row, history in zip(rows, histories, strict=True)]
        outputs = [RowOutput(row.position, is_finite=best_id >= 0) for row, best_id in zip(rows, best, strict=True)]
        finite = [i for i, best_id in enumerate(best) if best_id >= 0]
        choices = self._choose(logits, rows, best, finite)
        for i, choice in choices.items():
            outputs[i].token, outputs[i].is_accepted = choice.token, choice.is_accepted
        self._fill_logprobs(logits, specs, best, choices, outputs)
        for i in finite:
            if specs[i].full_logits:
                outputs[i].logits = _own(logits[i])
            if specs[i].hidden_state:
                outputs[i].hidden_state = _own(hidden[i])
        return outputs

    def _choose(
        self, logits: Tensor, rows: Sequence[ChoiceRow], best: Sequence[int], finite: Sequence[int]
    ) -> dict[int, Choice]:
        """Return the tokens of the rows that choose one, by row.

        On a CPU numpy chooses: it partitions where torch sorts (top-k and top-p 7 to 40 times faster), and it is no
        slower elsewhere (16 rows of 152 000, two threads, temperature alone: 4.0 ms, torch 4.5).
        """
        choices: dict[int, Choice] = {}
        batched = []
        for i in finite:
            position, spec, history = rows[i]
            if spec.sample is None and not spec.greedy:
                continue
            if spec.shaping is None and spec.draft is None and (spec.sample is None or spec.sample.temperature == 0):
                choices[i] = Choice(best[i], 0.0)
            elif self._has_numpy:
                choices[i] = choose(logits[i].numpy(), position, spec, best[i], history)
            else:
                batched.append(i)
        for group in self._groups(batched, logits.shape[1]):
            chosen = self._laws.choose(logits[self._places(group)], [rows[i] for i in group])
            choices.update(zip(group, chosen, strict=True))
        return choices

    def _fill_logprobs(
        self,
        logits: Tensor,
        specs: Sequence[OutputSpec],
        best: Sequence[int],
        choices: dict[int, Choice],
        outputs: list[RowOutput],
    ) -> None:
        """Fill in what needs the log softmax at T=1 of finite rows."""
        wanted = [i for i, spec in enumerate(specs) if best[i] >= 0 and needs_normaliser(spec)]
        if not wanted:
            return
        normalisers = self._normalise(logits, specs, wanted, best, outputs)
        self._fill_top(logits, specs, normalisers, outputs)
        asked = {i: _asked_ids(specs[i], choices.get(i)) for i in wanted}
        raw = self._gather(logits, asked)
        for i, token_ids in asked.items():
            values, raw = raw[: len(token_ids)], raw[len(token_ids) :]
            _fill_row(outputs[i], specs[i], choices.get(i), values, normalisers[i])

    def _normalise(
        self,
        logits: Tensor,
        specs: Sequence[OutputSpec],
        rows: Sequence[int],
        best: Sequence[int],
        outputs: list[RowOutput],
    ) -> dict[int, float]:
        """Return log(sum(exp(row))) of rows, by row, and fill in their entropies.

        In float32, relative to the largest logit, but for the last logarithm: exact to about 1e-6.
        """
        figures: dict[int, float] = {}
        for group in self._groups(rows, logits.shape[1]):
            part = logits[self._places(group)]
            peaks = part.gather(1, torch.tensor([best[i] for i in group], device=self._device).unsqueeze(1))
            below = part - peaks
            has_entropy = any(specs[i].entropy for i in group)
            weights = below.exp() if has_entropy else below.exp_()
            sums = weights.sum(1).double()
            figures.update(zip(group, (peaks.squeeze(1) + sums.log()).tolist(), strict=True))
            if has_entropy:
                below.clamp_(min=-1000)  # no weight is left there, and infinity times nothing would be NaN
                entropies = (sums.log() - weights.mul_(below).sum(1) / sums).clamp_(min=0).tolist()
                for i, entropy in zip(group, entropies, strict=True):
                    outputs[i].entropy = entropy if specs[i].entropy else None
        return figures

    def _fill_top(
        self, logits: Tensor, specs: Sequence[OutputSpec], normalisers: dict[int, float], outputs: list[RowOutput]
    ) -> None:
        rows = [i for i in normalisers if specs[i].num_top_logprobs > 0]
        counts = [min(specs[i].num_top_logprobs, logits.shape[1]) for i in rows]
        for i, (token_ids, values) in zip(rows, self._top(logits, rows, counts), strict=True):
            outputs[i].top_ids = token_ids.astype(np.int32)
            outputs[i].top_logprobs = logprobs(values, normalisers[i])

    def _top(
        self, logits: Tensor, rows: Sequence[int], counts: Sequence[int]
    ) -> Iterator[tuple[npt.NDArray[np.int64], Float32Array]]:
        """Yield ids and logits of the best tokens of each row."""
        if self._has_numpy:
            for i, k in zip(rows, counts, strict=True):
                row = logits[i].numpy()
                token_ids = ranking.ranked_largest(row, k)
                yield token_ids, row[token_ids]
        elif rows:
            ids, values = (part.cpu().numpy() for part in top(logits[self._places(rows)], max(counts)))
            for token_ids, best, k in zip(ids, values, counts, strict=True):
                yield token_ids[:k], best[:k]

    def _gather(self, logits: Tensor, asked: dict[int, list[int]]) -> Float64Array:
        """Return single raw logits, row after row: float64."""
        places = [i * logits.shape[1] + token_id for i, token_ids in asked.items() for token_id in token_ids]
        if not places:
            return np.empty(0)
        values: Float64Array = logits.view(-1)[torch.tensor(places, device=self._device)].double().cpu().numpy()
        return values

    def _groups(self, rows: Sequence[int], vocab_size: int) -> Iterator[Sequence[int]]:
        """Split rows into those that go through together."""
        size = max(1, self._most_elements // vocab_size)
        return (rows[begin : begin + size] for begin in range(0, len(rows), size))

    def _places(self, rows: Sequence[int]) -> slice | Tensor:
        """Return what selects ascending rows: without a copy where they follow one another."""
        if rows[-1] - rows[0] == len(rows) - 1:
            return slice(rows[0], rows[-1] + 1)
        return torch.tensor(rows, device=self._device)


def _asked_ids(spec: OutputSpec, choice: Choice | None) -> list[int]:
    """Return the tokens whose log-probabilities a row returns: the chosen one, the target, those asked for."""
    asked = [] if choice is None or choice.token is None or not spec.logprobs else [choice.token]
    if spec.target_id >= 0:
        asked.append(spec.target_id)
    asked += spec.logprob_ids
    return asked


def _fill_row(
    output: RowOutput, spec: OutputSpec, choice: Choice | None, logits: Float64Array, normaliser: float
) -> None:
    """Fill in the log-probabilities of :func:`_asked_ids`, in that order."""
    values = (logits[: len(logits) - len(spec.logprob_ids)] - normaliser).tolist()
    if spec.logprob_ids:
        output.requested_logprobs = logprobs(logits[len(values) :], normaliser)
    if spec.target_id >= 0:
        output.target_logprob = values.pop()
    if values and choice is not None:
        output.model_logprob, output.sampled_logprob = values[0], choice.logprob


def _own(row: Tensor) -> Float32Array:
    """Return a copy of one row on the host: float32, the receiver's own."""
    host = row.to("cpu", torch.float32)
    values: Float32Array = host.numpy()
    return values.copy() if host is row else values  # torch's own copy wakes threads, numpy's does not


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
