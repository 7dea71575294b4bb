"""Whole steps as the chain lists them, in the simulator, against the decoder in torch on the same tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ferrule_server.executor.base import StepBatch
from ferrule_server.executor.cuda.buffers import DecodeBuffers, Limits
from ferrule_server.executor.cuda.chain import StepChain
from ferrule_server.executor.cuda.inputs import fill_inputs
from ferrule_server.executor.cuda.kernel_choice import attention_grid, shape_of, specs_needed
from ferrule_server.executor.cuda.kernel_set import KernelSet
from ferrule_server.executor.cuda.linears import StepParts
from ferrule_server.executor.cuda.staging import UploadRing
from ferrule_server.executor.cuda.weights import adopt_weights
from ferrule_server.kernels import reference
from tests.executor.cuda.fake_gpu import CUBIN, FakeGpu, FakeLaunch
from tests.executor.cuda.tiny_model import KINDS, tiny_executor
from tests.model.stepping import Piece, PooledSequence, Stepper

TOKENS = [(37 * i + 11) % 67 for i in range(400)]


class Bench:
    """A tiny model in torch and, over the same weights and a pool of its own, on a GPU in the simulator."""

    def __init__(
        self, kind: str = "qwen3", *, max_rows: int = 8, num_layers: int = 2, num_sms: int = 2, simulate: bool = True
    ) -> None:
        executor = tiny_executor(kind, num_layers=num_layers, num_blocks=48)
        assert executor.plain_weights is not None
        self.weights = executor.plain_weights
        self.stepper = Stepper(executor)
        self.torch_pool = executor.pool
        self.shape = shape_of(executor.info.model.config)
        self.gpu = FakeGpu(num_sms=num_sms, simulate=simulate)
        limits = Limits(max_blocks=32, max_rows=max_rows, max_requests=8, max_entries=8)
        self.buffers = DecodeBuffers(self.gpu.allocate, self.shape, limits, attention_grid(self.shape, self.gpu.info))
        self.uploads = UploadRing(self.gpu, "inputs", self.buffers.inputs, self.buffers.input_layout)
        rope = adopt_weights(self.gpu, self.weights, executor.info.model.config, 512)
        specs = specs_needed(self.shape, is_deterministic=False)
        self.pool = executor.pool.clone()
        kernels, eps = KernelSet(self.gpu, dict.fromkeys(specs, CUBIN)), executor.info.model.config.norm_eps
        self.chain = StepChain(StepParts(kernels, self.weights, rope, self.buffers, self.shape, eps), self.pool)

    def prefill(self, *lengths: int) -> list[PooledSequence]:
        """Return sequences of the first tokens of TOKENS, put into both pools by torch."""
        made = [PooledSequence() for _ in lengths]
        for seq, length in zip(made, lengths, strict=True):
            self.stepper.run(Piece(seq, TOKENS[:length]))
        self.pool.copy_(self.torch_pool)
        return made

    def upload(self, batch: StepBatch, bucket: int | None = None) -> int:
        """Put the inputs of a step into the stream; return its bucket."""
        bucket, lists = bucket or batch.num_rows, self.chain.work_lists()
        rows = fill_inputs(self.uploads.fill(), batch, bucket, work_lists=lists, block_size=self.chain.block_size)
        self.uploads.upload(slice(0, self.buffers.input_layout.end_of("work", rows)))
        return bucket

    def run(
        self,
        batch: StepBatch,
        bucket: int | None = None,
        *,
        stores_logits: bool = True,
        is_deterministic: bool = False,
        keeps_hidden: bool = False,
    ) -> Tensor:
        """Run a step on the kernels; return the logits of its rows, or its tokens where no logits are stored."""
        operations = self.chain.operations(
            self.upload(batch, bucket),
            stores_logits=stores_logits,
            is_deterministic=is_deterministic,
            keeps_hidden=keeps_hidden,
        )
        self.gpu.launch(operations)
        self.gpu.synchronize()
        out = self.buffers.logits if stores_logits else self.buffers.result["tokens"]
        return out[: batch.num_rows].clone()

    def expected(self, batch: StepBatch) -> Tensor:
        """Run a step in torch, with every row an output; return the logits."""
        rows = np.arange(batch.num_rows, dtype=np.int32)
        whole = replace(batch, output_rows=rows, output_specs=(batch.output_specs[0],) * batch.num_rows)
        found = self.stepper.executor.run(whole).rows
        return torch.from_numpy(np.stack([row.logits for row in found if row.logits is not None]))


def check(bench: Bench, batch: StepBatch, found: Tensor, *, atol: float) -> None:
    """Check logits, tokens and the pool against torch; a step of bfloat16 at logits of 2 to 4 is 0.016."""
    before = bench.torch_pool.clone()
    expected = bench.expected(batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    assert bench.buffers.result["greedy"][: len(found)].tolist() == found.argmax(-1).tolist()
    torch.testing.assert_close(bench.pool.float(), bench.torch_pool.float(), rtol=0.02, atol=0.04)
    assert torch.equal((bench.pool != before).any(5), (bench.torch_pool != before).any(5))


@pytest.mark.parametrize(
    ("kind", "num_layers", "num_rows", "bucket"),
    [
        pytest.param("qwen3", 2, (1,), 1, id="one row"),
        pytest.param("llama", 1, (1, 1), 2, id="two rows with biases"),
        pytest.param("qwen3", 2, (5, 2), 8, id="verifies, padded"),
        pytest.param("wide group", 1, (1, 1, 1), 3, id="tensor cores attend, with biases"),
    ],
)
def test_a_step_is_one_of_the_decoder(kind: str, num_layers: int, num_rows: Sequence[int], bucket: int) -> None:
    """Logits, best tokens and what is written to the pool, up to rounding; padded rows write nothing."""
    bench = Bench(kind, num_layers=num_layers)
    seqs = bench.prefill(*(13, 33, 1)[: len(num_rows)])
    pieces = [Piece(seq, TOKENS[50 : 50 + count]) for seq, count in zip(seqs, num_rows, strict=True)]
    batch = bench.stepper.batch(*pieces)
    check(bench, batch, bench.run(batch, bucket), atol=0.06)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_long_sequences_are_shared_among_multiprocessors(is_deterministic: bool) -> None:
    """Tables of more blocks than one row of ``work`` holds, partial sums of several splits, beside a short sequence."""
    bench = Bench(num_layers=1, num_sms=3)
    first, second = bench.prefill(300, 3)
    batch = bench.stepper.batch(Piece(second, [7]), Piece(first, [5]))
    check(bench, batch, bench.run(batch, is_deterministic=is_deterministic), atol=0.06)
    assert bench.buffers.attention_partials.any()
    assert not bench.buffers.attention_tickets.any()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_random_steps_are_those_of_the_decoder(seed: int) -> None:
    """Three steps in a row of up to four sequences each, of any length, in any bucket, some rows run as queries."""
    random = np.random.default_rng(seed)
    bench = Bench(list(KINDS)[seed % 3], max_rows=24, num_sms=int(random.integers(1, 5)))
    seqs = bench.prefill(*random.integers(1, 170, size=random.integers(1, 5)).tolist())
    for _ in range(3):
        pieces = [_random_piece(random, seq) for seq in seqs]
        batch = bench.stepper.batch(*pieces)
        bucket = int(random.integers(batch.num_rows, 25))
        found = bench.run(batch, bucket, is_deterministic=bool(random.integers(2)))
        check(bench, batch, found, atol=0.08)
        bench.pool.copy_(bench.torch_pool)


def _random_piece(random: np.random.Generator, seq: PooledSequence) -> Piece:
    """Return one to five new tokens of a sequence, or its last ones once more."""
    count = 1 if random.integers(2) else int(random.integers(2, 6))
    is_query = seq.length >= count and random.random() < 0.2
    start = seq.length - count if is_query else seq.length
    return Piece(seq, TOKENS[start : start + count], is_query=is_query)


def test_many_rows_go_through_torch() -> None:
    """70 rows in a bucket of 72: the linears are torch's, everything between them is ours."""
    bench = Bench("llama", max_rows=72, num_layers=1)
    first, second = bench.prefill(5, 20)
    batch = bench.stepper.batch(Piece(first, TOKENS[:8]), Piece(second, TOKENS[60:122]))
    check(bench, batch, bench.run(batch, 72), atol=0.06)
    kernels = bench.gpu.calls("launch")[-1].kernels
    assert kernels.count("torch") == 5 + 1
    assert {"gemm", "gemv", "head"}.isdisjoint(kernels)


def test_what_torch_multiplies_is_added_by_the_next_norm() -> None:
    """That of the next layer too; only the first norm of a step has nothing to add."""
    bench = Bench(max_rows=72, num_layers=3, simulate=False)
    made = bench.chain.operations(72, stores_logits=True)
    norms = [one for one in made if isinstance(one, FakeLaunch) and one.kernel == "add_norm"]
    normed = bench.gpu.address(bench.buffers.normed)
    assert [norm.arguments["delta"] for norm in norms] == [0] + [normed] * 6
    assert [dict(norm.spec.constants)["ADD"] for norm in norms] == [False] + [True] * 6


@pytest.mark.parametrize("num_rows", [1, 3])
def test_greedy_steps_need_no_logits(num_rows: int) -> None:
    """The tokens of a step are then where the next one looks for them; a product with vectors stores no logits."""
    bench = Bench(num_layers=1)
    (seq,) = bench.prefill(17)
    batch = bench.stepper.batch(Piece(seq, TOKENS[50 : 50 + num_rows]))
    tokens = bench.run(batch, stores_logits=False)
    assert bool(bench.buffers.logits.any()) == (num_rows > 2)
    assert not bench.buffers.result["greedy"].any()
    assert tokens.tolist() == bench.run(batch).argmax(-1).tolist()


def test_tokens_of_the_step_before_are_fed_back() -> None:
    """A step that names a place in the last step gives the bits of one that is told the token."""
    bench = Bench(num_layers=1)
    first, second = bench.prefill(17, 9)
    tokens = bench.run(bench.stepper.batch(Piece(first, [5]), Piece(second, [6])), stores_logits=False)
    assert tokens[0] != tokens[1]
    unknown = bench.stepper.batch(Piece(first, [0]), Piece(second, [0]))
    crossed = replace(unknown, feedback=np.array([1, 0], np.int32))
    found = bench.run(crossed)
    told = replace(unknown, token_ids=tokens.flip(0).numpy())
    assert torch.equal(found, bench.run(told))


def test_hidden_states_are_kept_on_request() -> None:
    """Also where the norm is inside of the output head."""
    bench = Bench(num_layers=1)
    (seq,) = bench.prefill(17)
    batch = bench.stepper.batch(Piece(seq, [5]))
    bench.run(batch, keeps_hidden=True)
    final_norm = bench.weights.final_norm
    expected = reference.rms_norm(bench.buffers.hidden[:1], final_norm, 1e-6)
    torch.testing.assert_close(bench.buffers.normed[:1], expected, rtol=0.01, atol=0)


def test_deterministic_rows_do_not_notice_their_neighbours() -> None:
    """Logits and KV have the same bits for a row alone, among others, and together with the next of its sequence."""
    bench = Bench(num_layers=1)
    first, second = bench.prefill(17, 33)
    begun = bench.pool.clone()
    together = bench.stepper.batch(Piece(first, [5, 6]), Piece(second, [7]))
    logits = bench.run(together, 8, is_deterministic=True)
    pool = bench.pool.clone()
    bench.pool.copy_(begun)
    alone = [bench.run(part, is_deterministic=True) for part in _rows_of(together)]
    assert torch.equal(torch.cat(alone), logits)
    assert torch.equal(bench.pool, pool)


def _rows_of(batch: StepBatch) -> Iterator[StepBatch]:
    """Yield every row as a step of its own."""
    for row in range(batch.num_rows):
        seq = int(np.searchsorted(batch.cu_seqlens_q, row, side="right")) - 1
        yield StepBatch(
            token_ids=batch.token_ids[row : row + 1],
            positions=batch.positions[row : row + 1],
            slot_mapping=batch.slot_mapping[row : row + 1],
            cu_seqlens_q=np.array([0, 1], np.int32),
            kv_lens=batch.positions[row : row + 1] + 1,
            block_tables=batch.block_tables[seq : seq + 1],
            output_rows=np.zeros(1, np.int32),
            output_specs=batch.output_specs[:1],
        )


@pytest.mark.parametrize("num_rows", [1, 2, 5, 64, 72])
def test_only_the_first_launch_waits_for_all_before_it(num_rows: int) -> None:
    """Kernels load weights before they wait; whoever wrote those is done when the first kernel of a step starts."""
    bench = Bench(max_rows=72, simulate=False)
    operations = bench.chain.operations(num_rows, stores_logits=True)
    launches = [operation for operation in operations if isinstance(operation, FakeLaunch)]
    assert launches[0].kernel == "embed"
    assert [launch.starts_early for launch in launches] == [False] + [True] * (len(launches) - 1)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_the_output_head_has_room_for_every_cta(num_rows: int) -> None:
    """Each leaves its best token of each row; one too many would write over what lies behind."""
    bench = Bench(num_layers=1, num_sms=4, simulate=False)
    made = bench.chain.operations(num_rows, stores_logits=False)[-1]
    assert isinstance(made, FakeLaunch)
    assert made.grid == 4
    partials = bench.buffers.head_partials.view(-1)
    bench.buffers.head_partials = partials[: 4 * num_rows]
    bench.chain.operations(num_rows, stores_logits=False)
    bench.buffers.head_partials = partials[: 4 * num_rows - 1]
    with pytest.raises(AssertionError, match="4 CTAs of the output head"):
        bench.chain.operations(num_rows, stores_logits=False)


def test_without_outputs_a_step_ends_behind_the_last_layer() -> None:
    """The first pieces of a long prompt want KV alone."""
    bench = Bench(max_rows=72, simulate=False)
    for num_rows in (1, 5, 72):
        step = {"stores_logits": False}
        whole, body = (bench.chain.operations(num_rows, **step, has_outputs=one) for one in (True, False))
        kernels = [one.kernel if isinstance(one, FakeLaunch) else "torch" for one in whole]
        assert kernels[len(body) :] in (["head"], ["add_norm", "gemm", "argmax"], ["add_norm", "torch", "argmax"])


def test_steps_that_promise_bits_are_small() -> None:
    """Torch's order of sums depends on the number of rows, and that of products with vectors is another one."""
    bench = Bench(max_rows=72, simulate=False)
    for num_rows in (1, 64):
        made = bench.chain.operations(num_rows, stores_logits=True, is_deterministic=True)
        kernels = {operation.kernel for operation in made if isinstance(operation, FakeLaunch)}
        assert kernels == {"embed", "add_norm", "gemm", "attention", "argmax"}
    with pytest.raises(ValueError, match="65 rows"):
        bench.chain.operations(65, stores_logits=True, is_deterministic=True)
