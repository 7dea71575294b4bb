"""The records that the kernels behind the logits read, filled in for the output rows of a step.

Record i of the choices and of the scores is output i. The records of the rows that return their largest
log-probabilities follow those of all outputs, one after the other. A shaped row is drawn from its place after the raw
rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ferrule_server.executor.base import Int32Array, OutputSpec, SampleSpec, Shaping, StepBatch
from ferrule_server.executor.cuda.choices import (
    CHOSEN,
    OutputKind,
    are_same,
    chooses,
    requested_ids,
    shaping_of,
)
from ferrule_server.executor.cuda.graphs import GraphKey
from ferrule_server.executor.sampling.selection import needs_normaliser
from ferrule_server.kernels.cuda.radix_select import PROBABILITY_BITS
from ferrule_server.kernels.cuda.sample import LARGEST, RECORD, mask_bytes

Views = Mapping[str, npt.NDArray[Any]]
Records = npt.NDArray[np.void]

_NUM_CACHED = 4096
_NOTHING_TO_DO = -1
_SMALLEST = float(np.finfo(np.float32).tiny)


class DrawMemo:
    """The records of the last step's choices: the next step's differ in positions alone, if its rows want the same.

    Records with shapings are never kept: a mask must go when nothing else refers to it.
    """

    def __init__(self) -> None:
        self._specs: tuple[OutputSpec, ...] = ()
        self._rows = b""
        self._records = np.zeros(0, RECORD)

    def records(self, batch: StepBatch, vocab_size: int) -> Records:
        """Return how each token is chosen but for positions and shapings; not to be changed."""
        specs, rows = batch.output_specs, batch.output_rows.tobytes()
        if rows == self._rows and are_same(specs, self._specs):
            return self._records
        draws = b"".join([pack_draw(spec.sample, vocab_size) for spec in specs])
        records = np.frombuffer(draws, RECORD).copy()
        has_token = np.fromiter(map(chooses, specs), np.bool_, len(specs))
        records["row"] = records["source"] = np.where(has_token, batch.output_rows, _NOTHING_TO_DO)
        if all(spec.shaping is None for spec in specs):
            self._specs, self._rows, self._records = specs, rows, records
        return records


def fill_choices(
    views: Views,
    batch: StepBatch,
    key: GraphKey,
    *,
    vocab_size: int,
    draws: DrawMemo | None = None,
) -> dict[str, int]:
    """Fill in the records of every kernel that the kind runs.

    Args:
        views: Fields of the staged inputs by name.
        batch: The step, with the outputs that kernels choose for.
        key: Of the step: kernels look at a record for each row of its bucket; nothing is filled for GREEDY.
        vocab_size: Logits of a row.
        draws: Remembers the records of the last step, of the same vocabulary and fields.

    Returns:
        How many rows of which fields the step uses, of the inputs that were filled and of the results.
    """
    kind, num_rows_bucket = key.kind, key.num_rows
    used = {"greedy" if key.stores_logits else "tokens": batch.num_rows}
    if kind is OutputKind.GREEDY:
        return used
    records, num_outputs = views["choice_records"].view(RECORD)[:, 0], len(batch.output_specs)
    records["row"][num_outputs:num_rows_bucket] = _NOTHING_TO_DO
    records[:num_outputs] = (draws or DrawMemo()).records(batch, vocab_size)
    records["position"][:num_outputs] = batch.positions[batch.output_rows] + 1
    used |= {"choice_records": num_rows_bucket, "tokens": num_outputs}
    used["entries"], used["masks"] = _fill_shapings(records, views, batch, vocab_size)
    if kind >= OutputKind.SCORE:
        used |= {"score_records": num_rows_bucket, "chosen_logprobs": num_outputs, "figures": num_outputs}
        used["request_ids"] = used["requested"] = _fill_scores(views, batch, num_rows_bucket)
    if kind >= OutputKind.TOP:
        tops = records[num_rows_bucket : 2 * num_rows_bucket]
        used["choice_records"] = 2 * num_rows_bucket
        used["top_ids"] = used["top_logits"] = _fill_tops(tops, batch, vocab_size)
    return used


@lru_cache(_NUM_CACHED)
def pack_draw(spec: SampleSpec | None, vocab_size: int) -> bytes:
    """Return the record of a choice but for its row and position: the same for every token of a text.

    Args:
        spec: How the token is drawn; None, or at temperature 0: it is the largest.
        vocab_size: Logits of a row.
    """
    record = np.zeros((), RECORD)
    record["row"] = record["source"] = record["mask"] = _NOTHING_TO_DO
    if spec is None or spec.temperature == 0:
        record["is_greedy"], record["scale"], record["bound"] = 1, 1.0, -LARGEST
        return record.tobytes()
    record["k"] = spec.top_k if 0 < spec.top_k < vocab_size else 0
    record["top_p"] = max(1, round(spec.top_p * 2.0**PROBABILITY_BITS)) if spec.top_p < 1 else 0
    record["scale"] = min(max(math.log2(math.e) / spec.temperature, _SMALLEST), LARGEST)
    record["bound"] = max(spec.temperature * math.log(spec.min_p), -LARGEST) if spec.min_p > 0 else -LARGEST
    record["seed"] = spec.seed
    return record.tobytes()


def _fill_shapings(records: Records, views: Views, batch: StepBatch, vocab_size: int) -> tuple[int, int]:
    """Fill in what changes logits before a draw, and return the numbers of entries and masks.

    Args:
        records: One for each row of the largest step, twice: a shaped row lies as far after the raw ones.
        views: Fields of the staged inputs.
        batch: The step.
        vocab_size: Logits of a row.
    """
    shapings = {i: shaping_of(spec) for i, spec in enumerate(batch.output_specs) if spec.shaping is not None}
    found = {i: shaping for i, shaping in shapings.items() if shaping is not None}
    if not found:
        return 0, 0
    borders = _fill_entries(views["entries"], batch, found, vocab_size)
    masks, slots = views["masks"].view(np.uint8), dict[bytes, int]()
    for i, shaping in found.items():
        mask = -1
        if shaping.mask is not None:
            slot = slots.setdefault(shaping.mask.fingerprint, len(slots))
            masks[slot, : len(shaping.mask.bits)] = shaping.mask.bits
            mask = slot * mask_bytes(vocab_size) // 16
        records["source"][i] = len(records) // 2 + i
        pack_shaping(records[i : i + 1], shaping, mask, borders[i : i + 2])
    return borders[-1], len(slots)


def pack_shaping(record: Records, shaping: Shaping, mask: int, entries: Sequence[int]) -> None:
    """Write what shapes a row into its record.

    Args:
        record: RECORD [1].
        shaping: Of the row.
        mask: Place of its mask in units of 16 bytes, -1: it has none.
        entries: Index of its first entry, and of the one after the last.
    """
    record["mask"] = mask
    record["first_entry"], record["end_entry"] = entries
    repetition = shaping.repetition_penalty
    record["repetition"], record["inverse_repetition"] = _float32(repetition), _float32(1 / repetition)
    record["frequency"], record["presence"] = _float32(shaping.frequency_penalty), _float32(shaping.presence_penalty)


def _float32(value: float) -> float:
    return min(max(value, -LARGEST), LARGEST)


def _fill_entries(
    entries: Int32Array, batch: StepBatch, shapings: Mapping[int, Shaping], vocab_size: int
) -> Sequence[int]:
    """Fill in the tokens that penalties or a bias name, output by output; return where each begins, and the end.

    All outputs are packed at once: token t of output i goes as ``i * vocab_size + t``, which orders them.
    """
    num_outputs = len(batch.output_specs)
    histories = [
        history + np.int32(i * vocab_size)
        for i, history in enumerate(batch.histories)
        if history is not None and i in shapings
    ]
    bias = [(i * vocab_size + token, amount) for i, shaping in shapings.items() for token, amount in shaping.bias]
    if not histories and not bias:
        return [0] * (num_outputs + 1)
    packed = pack_entries(np.concatenate(histories) if histories else np.empty(0, np.int32), bias)
    begins: list[int] = packed[:, 0].searchsorted(np.arange(num_outputs + 1) * vocab_size).tolist()
    packed[:, 0] %= vocab_size
    entries[: len(packed)] = packed
    return begins


def pack_entries(history: Int32Array, bias: Sequence[tuple[int, float]]) -> Int32Array:
    """Return one entry for each token that occurred or has a bias, ascending: int32 [n, 4].

    Args:
        history: int32 [n], the tokens that penalties count.
        bias: Token and what is added to its logit; tokens are distinct.
    """
    token_ids, counts = np.unique(history, return_counts=True)
    amounts = np.zeros(len(token_ids), np.float32)
    if bias:  # without, which is the rule, this takes a third of the time
        occurred, occurrences = token_ids, counts
        biased = np.array([token_id for token_id, _ in bias], np.int32)
        token_ids = np.union1d(occurred, biased)
        counts, amounts = np.zeros(len(token_ids), np.int32), np.zeros(len(token_ids), np.float32)
        counts[token_ids.searchsorted(occurred)] = occurrences
        amounts[token_ids.searchsorted(biased)] = [amount for _, amount in bias]
    entries = np.zeros((len(token_ids), 4), np.int32)
    entries[:, 0], entries[:, 1], entries[:, 2] = token_ids, counts, amounts.view(np.int32)
    return entries


def _fill_scores(views: Views, batch: StepBatch, num_slots: int) -> int:
    """Fill in whose log-probabilities are asked for; return the number of requests."""
    records: list[tuple[int, int, int, int]] = []
    requests: list[int] = []
    for i, (row, spec) in enumerate(zip(batch.output_rows.tolist(), batch.output_specs, strict=True)):
        begin = len(requests)
        requests += [-1 - i if token == CHOSEN else token for token in requested_ids(spec)]
        records.append((row if needs_normaliser(spec) else _NOTHING_TO_DO, begin, len(requests), 0))
    views["score_records"][len(records) : num_slots, 0] = _NOTHING_TO_DO
    views["score_records"][: len(records)] = records
    views["request_ids"][: len(requests)] = requests
    return len(requests)


def _fill_tops(records: Records, batch: StepBatch, vocab_size: int) -> int:
    """Fill in which rows return their largest log-probabilities, one after the other; return how many do."""
    wanted = [
        (row, spec.num_top_logprobs)
        for row, spec in zip(batch.output_rows.tolist(), batch.output_specs, strict=True)
        if spec.num_top_logprobs > 0
    ]
    records["row"][len(wanted) :] = _NOTHING_TO_DO
    for i, (row, k) in enumerate(wanted):
        records[i] = np.frombuffer(pack_draw(SampleSpec(top_k=k), vocab_size), RECORD)[0]
        records["row"][i] = records["source"][i] = row
    return len(wanted)
