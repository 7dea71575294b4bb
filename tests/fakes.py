"""Fakes shared by tests: an executor that notices wrong block tables, and a builder of steps."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ferrule_server.executor.base import (
    NO_SLOT,
    NULL_BLOCK,
    ExecutorInfo,
    Float32Array,
    Int32Array,
    ModelDescription,
    OutputSpec,
    StepBatch,
    StepResult,
)
from ferrule_server.executor.sampling.selection import select_rows
from ferrule_server.model.config import LayerKind, ModelConfig

UNWRITTEN = -1
HIDDEN_SIZE = 3


def fake_logits(token_ids: Sequence[int], vocab_size: int) -> Float32Array:
    """Return the logits FakeExecutor gives after exactly these tokens: float32 [vocab_size], any change shows."""
    seed = zlib.crc32(np.asarray(token_ids, np.int32).tobytes())
    return np.random.default_rng(seed).standard_normal(vocab_size).astype(np.float32)


def fake_next_token(token_ids: Sequence[int], vocab_size: int) -> int:
    """Return the greedy token FakeExecutor gives after exactly these tokens."""
    return int(fake_logits(token_ids, vocab_size).argmax())


def fake_hidden(token_ids: Sequence[int]) -> Float32Array:
    """Return the hidden state FakeExecutor gives after exactly these tokens: float32 [HIDDEN_SIZE]."""
    seed = (zlib.crc32(np.asarray(token_ids, np.int32).tobytes()), HIDDEN_SIZE)
    return np.random.default_rng(seed).standard_normal(HIDDEN_SIZE).astype(np.float32)


@dataclass(frozen=True, slots=True)
class SeqRows:
    """The rows of one sequence in a step made by :func:`make_step`.

    Attributes:
        token_ids: Tokens of the rows.
        start: Position of the first.
        block_ids: The sequence's blocks, in order.
        outputs: Spec of each output row, by index into ``token_ids``.
        writes: False gives the rows no slots, as in a query.
        before: The tokens at the positions before ``start``; needed where penalties count them.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    outputs: Mapping[int, OutputSpec] = field(default_factory=dict)
    writes: bool = True
    before: Sequence[int] = ()

    def history(self, index: int) -> Int32Array | None:
        """Return the tokens that the penalties of the output row at ``index`` count; None where it has none."""
        shaping = self.outputs[index].shaping
        if shaping is None or not shaping.has_penalties:
            return None
        tokens = [*self.before, *self.token_ids]
        assert len(self.before) == self.start, "penalties need the tokens before the first row"
        return np.array(tokens[shaping.penalty_start : self.start + index + 1], np.int32)


def make_step(seqs: Sequence[SeqRows], block_size: int) -> StepBatch:
    """Return the StepBatch of these sequences, block tables padded with the null block."""
    starts = np.cumsum([0, *(len(seq.token_ids) for seq in seqs)]).astype(np.int32)
    tables = np.full((len(seqs), max((len(seq.block_ids) for seq in seqs), default=0)), NULL_BLOCK, np.int32)
    positions, slots, output_rows, specs = [], [], [], []
    histories: list[Int32Array | None] = []
    for seq, table, first_row in zip(seqs, tables, starts.tolist(), strict=False):
        table[: len(seq.block_ids)] = seq.block_ids
        for i in range(len(seq.token_ids)):
            position = seq.start + i
            positions.append(position)
            slot = int(table[position // block_size]) * block_size + position % block_size
            slots.append(slot if seq.writes else NO_SLOT)
        output_rows += [first_row + i for i in sorted(seq.outputs)]
        specs += [seq.outputs[i] for i in sorted(seq.outputs)]
        histories += [seq.history(i) for i in sorted(seq.outputs)]
    return StepBatch(
        token_ids=np.array([token for seq in seqs for token in seq.token_ids], np.int32),
        positions=np.array(positions, np.int32),
        slot_mapping=np.array(slots, np.int32),
        cu_seqlens_q=starts,
        kv_lens=np.array([seq.start + len(seq.token_ids) for seq in seqs], np.int32),
        block_tables=tables,
        output_rows=np.array(output_rows, np.int32),
        output_specs=tuple(specs),
        histories=() if all(history is None for history in histories) else tuple(histories),
    )


class FakeExecutor:
    """An executor whose pool holds token ids, so a row that reads through a wrong table gives wrong logits.

    It asserts what the engine owes an executor: one thread, no write to the null block, no slot written twice in a
    step, no read of a slot nobody wrote, consistent lengths, histories that are the tokens in the pool. Invariant:
    ``batches`` holds a deep copy of each step, in order, also of those that failed.

    Args:
        vocab_size: Small, so that logits are cheap.
        num_blocks: Blocks of the pool, the null block included.
        block_size: Slots per block.
        max_context: Longest sequence in tokens.
        step_time_s: Each step sleeps this long.
        eos_ids: Tokens that end a text.
        window: Tokens that a row reads, itself included; 0: all.

    Attributes:
        batches: The steps run so far.
        copied_blocks: Every (source, destination) of ``copy_blocks``, in order.
        errors: Raised by the n-th run (1 is the first), after spoiling the slots it was to write.
        bad_token_ids: A row with one of these tokens gives NaN logits.
        gate: When set to an event, each run waits for it; ``is_waiting`` tells that one does.
        is_closed: Whether ``close`` was called.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 32,
        num_blocks: int = 64,
        block_size: int = 4,
        max_context: int = 256,
        step_time_s: float = 0.0,
        eos_ids: tuple[int, ...] = (),
        window: int = 0,
    ) -> None:
        config = ModelConfig(
            architecture="Fake",
            hidden_size=HIDDEN_SIZE,
            num_heads=1,
            vocab_size=vocab_size,
            max_positions=max_context,
            layers=(LayerKind(head_dim=1, num_kv_heads=1, window=window),),
            eos_ids=eos_ids,
        )
        model = ModelDescription(
            config=config,
            model_id="fake",
            num_parameters=0,
            max_context=max_context,
            dtype="float32",
            fingerprint=bytes(range(32)),
        )
        self.info = ExecutorInfo(
            name="fake",
            device="cpu",
            kv_dtype="int32",
            block_size=block_size,
            num_blocks=num_blocks,
            bytes_per_block=4 * block_size,
            model=model,
        )
        self.step_time_s = step_time_s
        self.batches: list[StepBatch] = []
        self.copied_blocks: list[tuple[int, int]] = []
        self.errors: dict[int, Exception] = {}
        self.bad_token_ids: set[int] = set()
        self.gate: threading.Event | None = None
        self.is_waiting = threading.Event()
        self.is_closed = False
        self._pool = np.full((num_blocks, block_size), UNWRITTEN, np.int32)
        self._thread_id: int | None = None

    def run(self, batch: StepBatch) -> StepResult:
        """Write the step's tokens and return the logits of the tokens read back; fail or wait if told to."""
        self._check_thread()
        self.batches.append(_copy_of(batch))
        self._wait()
        self._check(batch)
        slots = batch.slot_mapping[batch.slot_mapping != NO_SLOT]
        error = self.errors.get(len(self.batches))
        if error is not None:
            self._pool.reshape(-1)[slots] = UNWRITTEN
            raise error
        self._pool.reshape(-1)[slots] = batch.token_ids[batch.slot_mapping != NO_SLOT]
        tokens = [self._tokens(batch, row) for row in batch.output_rows.tolist()]
        self._check_histories(batch, tokens)
        logits = np.array([self._logits(row) for row in tokens], np.float32)
        hidden = np.array([fake_hidden(row) for row in tokens], np.float32)
        positions = batch.positions[batch.output_rows].tolist()
        return StepResult(select_rows(logits, positions, batch.output_specs, batch.histories, hidden))

    def copy_blocks(self, block_pairs: Int32Array) -> None:
        """Copy whole blocks and record the pairs."""
        self._check_thread()
        assert NULL_BLOCK not in block_pairs, "a copy touches the null block"
        assert len(set(block_pairs[:, 1].tolist())) == len(block_pairs), "two copies into one block"
        self.copied_blocks += [(int(source), int(destination)) for source, destination in block_pairs]
        self._pool[block_pairs[:, 1]] = self._pool[block_pairs[:, 0]]

    def copy_slots(self, slot_pairs: Int32Array) -> None:
        """Copy single slots."""
        self._check_thread()
        slots = self._pool.reshape(-1)
        slots[slot_pairs[:, 1]] = slots[slot_pairs[:, 0]]

    def read_blocks(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the raw bytes of blocks."""
        return self._pool[block_ids].view(np.uint8)

    def write_blocks(self, block_ids: Int32Array, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite blocks with raw bytes."""
        self._check_thread()
        self._pool[block_ids] = np.ascontiguousarray(data).view(np.int32)

    def close(self) -> None:
        """Remember that the executor was closed."""
        self.is_closed = True

    def tokens_at(self, block_ids: Sequence[int], length: int) -> list[int]:
        """Return the first ``length`` token ids that lie in these blocks, UNWRITTEN where nothing was written."""
        tokens: list[int] = self._pool[list(block_ids)].reshape(-1)[:length].tolist()
        return tokens

    def _wait(self) -> None:
        """Sleep and stop at the gate."""
        if self.gate is not None:
            self.is_waiting.set()
            assert self.gate.wait(timeout=30), "the gate was not opened within 30 s"
            self.is_waiting.clear()
        if self.step_time_s > 0:
            time.sleep(self.step_time_s)

    def _check_thread(self) -> None:
        """Assert that one thread alone steps and writes."""
        assert not self.is_closed, "used after close"
        current = threading.get_ident()
        self._thread_id = self._thread_id or current
        assert current == self._thread_id, "the executor belongs to one thread"

    def _check(self, batch: StepBatch) -> None:
        """Assert what every step owes its executor."""
        slots = [slot for slot in batch.slot_mapping.tolist() if slot != NO_SLOT]
        assert len(set(slots)) == len(slots), "a slot is written twice"
        assert all(slot >= self.info.block_size for slot in slots), "a write to the null block"
        assert batch.cu_seqlens_q[0] == 0
        assert batch.cu_seqlens_q[-1] == batch.num_rows
        assert len(batch.output_rows) == len(batch.output_specs)
        assert np.all(np.diff(batch.output_rows) > 0), "output rows must ascend"
        for seq in range(batch.num_seqs):
            positions = batch.positions[batch.cu_seqlens_q[seq] : batch.cu_seqlens_q[seq + 1]]
            assert len(positions) > 0, "a sequence without rows"
            assert np.all(np.diff(positions) == 1), "positions must be consecutive"
            assert batch.kv_lens[seq] == positions[-1] + 1, "kv_lens is the last position + 1"

    def _tokens(self, batch: StepBatch, row: int) -> list[int]:
        """Return the tokens that the row reads through its block table, its own last."""
        seq = int(batch.cu_seqlens_q.searchsorted(row, side="right")) - 1
        length = int(batch.positions[row]) + 1
        table = batch.block_tables[seq, : -(-length // self.info.block_size)].tolist()
        if not any(table) and not np.any(batch.slot_mapping[batch.cu_seqlens_q[seq] : batch.cu_seqlens_q[seq + 1]] + 1):
            return [0] * length  # a warm-up: all it reads is the null block, and nothing is written
        first = max(0, length - (self.info.model.config.attention_window or length))
        assert NULL_BLOCK not in table[first // self.info.block_size :], "a row reads the null block"
        tokens = self.tokens_at(table, length)[first:]
        assert UNWRITTEN not in tokens, "a row reads a slot nobody wrote"
        assert tokens[-1] == batch.token_ids[row], "the row's own token is not in its slot"
        return tokens

    def _check_histories(self, batch: StepBatch, tokens: list[list[int]]) -> None:
        """Assert that penalties count exactly the tokens of the sequence from their start to the row's own."""
        histories = batch.histories or (None,) * len(tokens)
        assert len(histories) == len(tokens), "a history, or None, for each output row"
        for spec, history, seen in zip(batch.output_specs, histories, tokens, strict=True):
            if spec.shaping is None or not spec.shaping.has_penalties:
                assert history is None, "a history that nothing counts"
            else:
                assert history is not None, "penalties without a history"
                assert history.dtype == np.int32
                assert history.tolist() == seen[spec.shaping.penalty_start :], "the history is not the row's"

    def _logits(self, tokens: list[int]) -> Float32Array:
        """Return the logits after these tokens, NaN where the last one is bad."""
        vocab_size = self.info.model.config.vocab_size
        if tokens[-1] in self.bad_token_ids:
            return np.full(vocab_size, np.nan, np.float32)
        return fake_logits(tokens, vocab_size)


def _copy_of(batch: StepBatch) -> StepBatch:
    """Return a deep copy: the engine may use its arrays again."""
    return StepBatch(
        token_ids=batch.token_ids.copy(),
        positions=batch.positions.copy(),
        slot_mapping=batch.slot_mapping.copy(),
        cu_seqlens_q=batch.cu_seqlens_q.copy(),
        kv_lens=batch.kv_lens.copy(),
        block_tables=batch.block_tables.copy(),
        output_rows=batch.output_rows.copy(),
        output_specs=batch.output_specs,
        histories=tuple(None if history is None else history.copy() for history in batch.histories),
    )
