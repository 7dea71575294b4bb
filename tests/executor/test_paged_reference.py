"""The paged reference executor against a dense oracle, and what an oracle itself must keep."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from ferrule_server.errors import ConfigError
from ferrule_server.executor.base import Executor, Float32Array, OutputSpec, SampleSpec, Shaping
from ferrule_server.executor.reference import PagedReferenceExecutor
from tests.fakes import SeqRows, make_step

FULL = OutputSpec(full_logits=True)
BLOCK_SIZE = 4


def make_executor(**sizes: int) -> PagedReferenceExecutor:
    """Return a small executor of 64 blocks of 4 slots."""
    defaults = {"vocab_size": 37, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    settings = defaults | sizes
    num_floats = settings["num_layers"] * 2 * settings["num_kv_heads"] * BLOCK_SIZE * settings["head_dim"]
    return PagedReferenceExecutor(**settings, block_size=BLOCK_SIZE, kv_memory_bytes=64 * 4 * num_floats)


def dense_logits(executor: PagedReferenceExecutor, token_ids: Sequence[int]) -> list[float]:
    """Return the logits after the tokens, by loops over plain lists and no cache."""
    model = executor.info.model.config
    width, group = model.num_kv_heads * model.head_dim, model.num_heads // model.num_kv_heads
    embeddings = [[float(i == token % width) for i in range(width)] for token in token_ids]
    logits = [0.0] * model.vocab_size
    for head in range(model.num_heads):
        first = head // group * model.head_dim
        parts = [embedding[first : first + model.head_dim] for embedding in embeddings]
        query = parts[-1]
        weights = [
            math.exp(sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(model.head_dim)) for key in parts
        ]
        for i in range(model.head_dim):
            value = sum(w * part[i] for w, part in zip(weights, parts, strict=True)) / sum(weights)
            logits[(head * model.head_dim + i) % model.vocab_size] += value
    return logits


def run_logits(executor: PagedReferenceExecutor, *seqs: SeqRows) -> list[Float32Array]:
    """Run one step and return the full logits of its output rows."""
    rows = executor.run(make_step(seqs, BLOCK_SIZE)).rows
    return [row.logits for row in rows if row.logits is not None]


def last_logits(executor: PagedReferenceExecutor, token_ids: Sequence[int], block_ids: Sequence[int]) -> Float32Array:
    """Prefill the tokens in one step and return the logits of the last row."""
    return run_logits(executor, SeqRows(token_ids, 0, block_ids, {len(token_ids) - 1: FULL}))[0]


def random_tokens(length: int, seed: int = 0) -> list[int]:
    """Return token ids below 37."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, 37, length).tolist()
    return tokens


@pytest.mark.parametrize("length", [1, 3, 4, 5, 17, 97])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"num_kv_heads": 4},
        {"num_heads": 6, "head_dim": 5, "vocab_size": 7},
        {"num_heads": 1, "num_kv_heads": 1, "head_dim": 1, "num_layers": 1},
    ],
)
def test_logits_are_those_of_the_dense_oracle(length: int, sizes: dict[str, int]) -> None:
    """All positions of a prefill, at awkward lengths, head groups and vocabularies (folding included), within 2e-6."""
    executor = make_executor(**sizes)
    tokens = random_tokens(length)
    logits = run_logits(executor, SeqRows(tokens, 0, range(1, 26), dict.fromkeys(range(length), FULL)))
    assert len(logits) == length
    for i, row in enumerate(logits):
        assert row.tolist() == pytest.approx(dense_logits(executor, tokens[: i + 1]), abs=2e-6)


def test_order_of_earlier_tokens_does_not_matter() -> None:
    """There are no positions in this model: a permuted history gives the same bits."""
    tokens = random_tokens(19)
    shuffled = np.random.default_rng(1).permutation(tokens[:-1]).tolist() + tokens[-1:]
    one = last_logits(make_executor(), tokens, range(1, 6))
    assert np.array_equal(one, last_logits(make_executor(), shuffled, range(1, 6)))


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 9])
def test_prefill_in_chunks_and_decode_give_the_bits_of_a_whole_prefill(chunk: int) -> None:
    """However a sequence was split into steps, logits and pool are the same bits."""
    tokens, blocks = random_tokens(19), [7, 3, 9, 1, 5]
    whole, pieces = make_executor(), make_executor()
    expected = last_logits(whole, tokens, blocks)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        logits = run_logits(pieces, SeqRows(part, start, blocks, {len(part) - 1: FULL}))[0]
    assert np.array_equal(logits, expected)
    used = np.array(blocks, np.int32)
    assert np.array_equal(pieces.read_blocks(used), whole.read_blocks(used))


def test_row_does_not_depend_on_its_batch_mates() -> None:
    """Forty sequences of many lengths in one step, past the chunk of rows: each as if alone, bit for bit."""
    executor = make_executor()
    free = iter(range(1, 64))
    seqs = []
    for i in range(40):
        length = 1 + 5 * i % 7
        blocks = [next(free) for _ in range(-(-length // BLOCK_SIZE))]
        seqs.append(SeqRows(random_tokens(length, i), 0, blocks, {length - 1: FULL}))
    together = run_logits(executor, *seqs)
    for seq, logits in zip(seqs, together, strict=True):
        assert np.array_equal(logits, last_logits(make_executor(), seq.token_ids, seq.block_ids))


def test_query_reads_the_pool_and_writes_nothing() -> None:
    """A row without a slot is run again over what lies there; no byte of the pool changes."""
    executor = make_executor()
    tokens, blocks = random_tokens(6), [2, 3]
    expected = last_logits(executor, tokens, blocks)
    everything = np.arange(64, dtype=np.int32)
    before = executor.read_blocks(everything)
    again = run_logits(executor, SeqRows(tokens[-1:], 5, blocks, {0: FULL}, writes=False))[0]
    assert np.array_equal(again, expected)
    assert np.array_equal(executor.read_blocks(everything), before)


def test_write_touches_its_slots_alone() -> None:
    """All layers, K and V of the written slot change and nothing else does."""
    executor = make_executor()
    run_logits(executor, SeqRows([5], 2, [9], {}))
    pool = executor.read_blocks(np.arange(64, dtype=np.int32)).view(np.float32).reshape(64, 2, 2, 2, BLOCK_SIZE, 8)
    written = np.argwhere(pool).tolist()
    assert written == [[9, layer, kv, 0, 2, 5] for layer in range(2) for kv in range(2)]


def test_wrong_block_table_shows() -> None:
    """KV is really read through the table: other blocks, other logits."""
    executor = make_executor()
    tokens = random_tokens(8)
    right = last_logits(executor, tokens, [1, 2])
    last_logits(executor, random_tokens(8, 5), [3, 4])
    wrong = run_logits(executor, SeqRows(tokens[-1:], 7, [3, 2], {0: FULL}, writes=False))[0]
    assert not np.array_equal(wrong, right)


def test_copied_block_diverges_without_touching_its_source() -> None:
    """Copy-on-write: a branch writes into its copy, the trunk keeps its bits."""
    executor = make_executor()
    trunk = random_tokens(6)
    expected = last_logits(executor, trunk, [1, 2])
    executor.copy_blocks(np.array([[2, 8]], np.int32))
    branch = run_logits(executor, SeqRows([30], 6, [1, 8], {0: FULL}))[0]
    assert np.array_equal(branch, last_logits(make_executor(), [*trunk, 30], [1, 2]))
    again = run_logits(executor, SeqRows(trunk[-1:], 5, [1, 2], {0: FULL}, writes=False))[0]
    assert np.array_equal(again, expected)
    assert dense_logits(executor, [*trunk, 30]) == pytest.approx(branch.tolist(), abs=2e-6)


def test_copy_slots_reads_every_source_before_it_writes() -> None:
    """Two slots of different blocks trade places in one call."""
    executor = make_executor()
    last_logits(executor, [3, 4, 5, 6, 7], [1, 2])
    executor.copy_slots(np.array([[5, 8], [8, 5]], np.int32))
    swapped = executor.read_blocks(np.array([1, 2], np.int32))
    other = make_executor()
    last_logits(other, [3, 7, 5, 6, 4], [1, 2])
    assert np.array_equal(swapped, other.read_blocks(np.array([1, 2], np.int32)))


def poisoned(executor: PagedReferenceExecutor) -> PagedReferenceExecutor:
    """Fill the whole pool, null block included, with NaN."""
    blocks = np.arange(executor.info.num_blocks, dtype=np.int32)
    data: npt.NDArray[np.uint8] = np.full((len(blocks), executor.info.bytes_per_block // 4), np.nan, np.float32).view(
        np.uint8
    )
    executor.write_blocks(blocks, data)
    return executor


def test_unused_slots_cannot_reach_a_row() -> None:
    """NaN in every slot the row may not see, its own block's tail and the null block included, changes no bit."""
    tokens = random_tokens(6)
    clean, dirty = make_executor(), poisoned(make_executor())
    long, short = SeqRows(tokens, 0, [1, 2], {2: FULL, 5: FULL}), SeqRows([9], 0, [5], {0: FULL})
    expected = run_logits(clean, long, short)
    rows = dirty.run(make_step([long, short], BLOCK_SIZE)).rows
    assert all(row.is_finite for row in rows)
    assert [row.logits.tolist() for row in rows if row.logits is not None] == [row.tolist() for row in expected]


def test_missing_kv_shows_as_a_row_that_is_not_finite() -> None:
    """A row that reads a slot nobody wrote is no silent success on a poisoned pool."""
    rows = poisoned(make_executor()).run(make_step([SeqRows([1], 3, [1], {0: FULL})], BLOCK_SIZE)).rows
    assert not rows[0].is_finite


def test_blocks_written_back_are_the_blocks_read() -> None:
    """read_blocks and write_blocks move KV between pools without changing a bit."""
    tokens = random_tokens(7)
    source, target = make_executor(), make_executor()
    expected = last_logits(source, tokens, [4, 2])
    target.write_blocks(np.array([8, 9], np.int32), source.read_blocks(np.array([4, 2], np.int32)))
    moved = run_logits(target, SeqRows(tokens[-1:], 6, [8, 9], {0: FULL}, writes=False))[0]
    assert np.array_equal(moved, expected)


def test_rows_return_what_their_specs_ask_for() -> None:
    """Selection runs on the output rows with the index of the token they predict."""
    executor = make_executor()
    specs = {1: OutputSpec(greedy=True), 4: OutputSpec(sample=SampleSpec(seed=3), logprobs=True)}
    first, second = executor.run(make_step([SeqRows(random_tokens(5), 0, [1, 2], specs)], BLOCK_SIZE)).rows
    assert (first.position, second.position) == (2, 5)
    assert first.token is not None
    assert second.sampled_logprob is not None
    assert first.logits is None


def test_hidden_state_is_what_the_logits_are_folded_from() -> None:
    """The flattened attention output of the row, the receiver's own; folded modulo the vocabulary it is the logits."""
    executor = make_executor(vocab_size=7)
    spec = OutputSpec(full_logits=True, hidden_state=True)
    first, second = executor.run(make_step([SeqRows(random_tokens(5), 0, [1, 2], {1: spec, 4: spec})], BLOCK_SIZE)).rows
    for row in (first, second):
        assert row.hidden_state is not None
        assert row.logits is not None
        assert row.hidden_state.shape == (executor.info.model.config.hidden_size,)
        folded = np.bincount(np.arange(32) % 7, weights=row.hidden_state, minlength=7)
        assert row.logits.tolist() == pytest.approx(folded.tolist(), abs=1e-6)
    assert first.logits is not None
    assert second.logits is not None
    assert not np.array_equal(first.logits, second.logits)


def test_penalties_count_the_history_of_the_step() -> None:
    """Shaping reaches the choice and nothing else of the row."""
    executor, tokens = make_executor(), random_tokens(6)
    plain = OutputSpec(greedy=True, full_logits=True)
    (before,) = executor.run(make_step([SeqRows(tokens, 0, [1, 2], {5: plain})], BLOCK_SIZE)).rows
    assert before.token is not None
    shaping = Shaping(bias=((before.token, -100.0),), presence_penalty=0.5)
    shaped = OutputSpec(greedy=True, full_logits=True, shaping=shaping)
    (after,) = executor.run(make_step([SeqRows(tokens, 0, [1, 2], {5: shaped})], BLOCK_SIZE)).rows
    assert after.token != before.token
    assert after.logits is not None
    assert before.logits is not None
    assert np.array_equal(after.logits, before.logits)


def test_step_without_output_rows_returns_none() -> None:
    """A chunk that is not the last writes its KV and computes no row."""
    assert make_executor().run(make_step([SeqRows([1, 2], 0, [1])], BLOCK_SIZE)).rows == []


def test_description_is_that_of_the_contract() -> None:
    """The defaults of the contract; the pool counts whole blocks."""
    executor: Executor = PagedReferenceExecutor(kv_memory_bytes=(1 << 20) + 5)
    info = executor.info
    model = info.model
    assert (info.name, info.kv_dtype, info.block_size, info.bytes_per_block) == (
        "paged-reference",
        "float32",
        16,
        8192,
    )
    assert info.num_blocks == 128
    assert (model.model_id, model.config.architecture, model.config.eos_ids) == (
        "paged-reference",
        "PagedReference",
        (),
    )
    config = model.config
    sizes = (config.vocab_size, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    assert sizes == (256, 2, 4, 4, 8)
    assert (model.max_context, len(model.fingerprint)) == (512, 32)


def test_fingerprint_follows_what_decides_the_kv() -> None:
    """Executors whose KV differs have different fingerprints; the vocabulary and the pool size do not matter."""
    base = make_executor().info.model.fingerprint
    assert make_executor(vocab_size=40).info.model.fingerprint == base
    assert make_executor(head_dim=4).info.model.fingerprint != base
    assert make_executor(num_layers=3).info.model.fingerprint != base


def test_memory_for_less_than_two_blocks_is_refused() -> None:
    """A typed error that names the size, before anything is allocated."""
    with pytest.raises(ConfigError, match="2 blocks"):
        PagedReferenceExecutor(kv_memory_bytes=16383)
