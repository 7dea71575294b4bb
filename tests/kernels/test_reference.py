"""The reference ops against their definitions, written out with other means."""

from __future__ import annotations

import math

import pytest
import torch

from ferrule_server.kernels import reference

NUM_BLOCKS, NUM_LAYERS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM = 9, 2, 3, 4, 6


@pytest.fixture
def pool() -> torch.Tensor:
    """A pool that is NaN wherever nothing was written."""
    return torch.full((NUM_BLOCKS, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), float("nan"))


def test_rms_norm_gives_mean_square_one_times_weight() -> None:
    """Row by row, in plain Python."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 17), torch.rand(17)
    for row, out in zip(x.tolist(), reference.rms_norm(x, weight, 1e-6).tolist(), strict=True):
        scale = 1 / math.sqrt(sum(v * v for v in row) / 17 + 1e-6)
        assert out == pytest.approx([v * scale * w for v, w in zip(row, weight.tolist(), strict=True)], rel=1e-5)


def test_rms_norm_of_bfloat16_sums_in_float32() -> None:
    """4097 equal values: a bfloat16 sum would stop growing long before the end."""
    x = torch.full((1, 4097), 3.0, dtype=torch.bfloat16)
    assert torch.equal(reference.rms_norm(x, torch.ones(4097, dtype=torch.bfloat16), 0.0), torch.ones_like(x))


def test_rope_turns_pairs_half_a_head_apart() -> None:
    """Pair (i, i + head_dim / 2) is multiplied by e^(i * angle)."""
    torch.manual_seed(0)
    heads, frequencies = torch.randn(5, 2, 6), torch.tensor([1.0, 0.3, 0.01])
    positions = torch.tensor([0, 1, 7, 100, 3])
    cos, sin = reference.rope_angles(positions, frequencies)
    out = reference.apply_rope(heads, cos, sin)
    turned = torch.complex(heads[..., :3], heads[..., 3:]) * torch.exp(
        1j * positions[:, None, None].double() * frequencies.double()
    )
    torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), -1).float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(out[0], heads[0])


def test_swiglu_gates_the_second_half_by_the_first() -> None:
    """The product is gate * sigmoid(gate) * up."""
    gate_up = torch.tensor([[0.0, 2.0, 5.0, 3.0]])
    expected = torch.tensor([[0.0, 2 / (1 + math.exp(-2)) * 3]])
    torch.testing.assert_close(reference.activate(gate_up, "silu", is_gated=True), expected)


def test_a_clamped_swiglu_clamps_the_gate_above_and_the_other_half_on_both_sides() -> None:
    """The product is (up + 1) * gate * sigmoid(alpha * gate)."""
    gates, ups = [-9.0, 0.5, 9.0, 0.5], [0.25, -9.0, 9.0, 0.25]
    clamped = [(-9.0, 0.25), (0.5, -2.0), (2.0, 2.0), (0.5, 0.25)]
    expected = [(up + 1) * gate / (1 + math.exp(-1.5 * gate)) for gate, up in clamped]
    found = reference.clamped_swiglu(torch.tensor([gates + ups]), 2.0, 1.5)
    torch.testing.assert_close(found, torch.tensor([expected]))


def test_rows_of_a_chunk_see_it_up_to_themselves() -> None:
    """A window inside a chunk hides more."""
    keys, positions = torch.arange(7), torch.arange(7).unsqueeze(1)
    seen = {rule: ~reference.is_hidden(keys, positions, rule) for rule in _SEEN}
    assert {rule: ["".join(map(str, row)) for row in found.int().tolist()] for rule, found in seen.items()} == _SEEN


_SEEN = {
    reference.AttentionRule(1.0, chunk=3): [
        "1000000", "1100000", "1110000", "0001000", "0001100", "0001110", "0000001",
    ],
    reference.AttentionRule(1.0, window=2, chunk=3): [
        "1000000", "1100000", "0110000", "0001000", "0001100", "0000110", "0000001",
    ],
}  # fmt: skip
"""For each rule, the keys that each of seven rows sees."""


def test_linear_adds_its_bias() -> None:
    """The sum is x @ weight.T + bias."""
    x, weight, bias = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([0.5, 0.25])
    assert reference.linear(x, weight, bias).tolist() == [[11.5, 17.25]]
    assert reference.linear(x, weight).tolist() == [[11.0, 17.0]]


def test_kv_append_writes_only_its_slots(pool: torch.Tensor) -> None:
    """Rows without a slot, other layers and other slots stay as they were; gather finds the rest in order."""
    key, value = torch.randn(2, 4, NUM_KV_HEADS, HEAD_DIM)
    reference.kv_append(pool, 1, key, value, torch.tensor([5, -1, 30, 6], dtype=torch.int32))
    assert int((~pool.isnan()).sum()) == 3 * 2 * NUM_KV_HEADS * HEAD_DIM
    assert torch.equal(pool[1, 1, 0, :, 1], key[0])
    assert torch.equal(pool[1, 1, 1, :, 2], value[3])
    assert torch.equal(pool[7, 1, 1, :, 2], value[2])


def test_gather_follows_the_block_table(pool: torch.Tensor) -> None:
    """Blocks out of order, the last one partly used."""
    key, value = torch.randn(2, 7, NUM_KV_HEADS, HEAD_DIM)
    table = torch.tensor([6, 2, 0], dtype=torch.int32)
    slots = torch.tensor([int(table[i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE for i in range(7)])
    reference.kv_append(pool, 0, key, value, slots)
    gathered_key, gathered_value = reference.gather_kv(pool, 0, table, 7)
    assert torch.equal(gathered_key, key.transpose(0, 1))
    assert torch.equal(gathered_value, value.transpose(0, 1))


def test_paged_attention_equals_dense_attention_per_row(pool: torch.Tensor) -> None:
    """Two sequences, grouped heads, rows in the middle of a sequence: a softmax over exactly the own past."""
    torch.manual_seed(2)
    num_heads, lengths, tables = 6, (6, 3), [[3, 5], [8, 0]]
    dense = [torch.randn(2, length, NUM_KV_HEADS, HEAD_DIM) for length in lengths]
    for (key, value), table in zip(dense, tables, strict=True):
        slots = torch.tensor([table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(len(key))])
        reference.kv_append(pool, 1, key, value, slots)
    query, positions = torch.randn(3, num_heads, HEAD_DIM), torch.tensor([4, 5, 2])
    out = reference.paged_attention(
        query,
        pool,
        1,
        positions=positions,
        cu_seqlens_q=torch.tensor([0, 2, 3]),
        kv_lens=torch.tensor(lengths),
        block_tables=torch.tensor(tables),
    )
    for row, seq in enumerate((0, 0, 1)):
        key, value = dense[seq][:, : int(positions[row]) + 1]
        for head in range(num_heads):
            weights = torch.softmax(key[:, head // 2] @ query[row, head] / math.sqrt(HEAD_DIM), 0)
            torch.testing.assert_close(out[row, head], weights @ value[:, head // 2], rtol=1e-5, atol=1e-6)


def test_embedding_of_no_token_is_zero() -> None:
    """-1 stands for a token that could not be chosen; nothing outside the table is read, not even its NaN."""
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert reference.embed(torch.tensor([1, -1, 0, 2]), table).tolist() == [[3, 4], [0, 0], [1, 2], [0, 0]]


def test_embedding_of_a_token_of_the_step_before() -> None:
    """-2 - j stands for the j-th; where that is none, for none."""
    table, sampled = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, -1])
    found = reference.embed(torch.tensor([-3, -2, 0, -4]), table, sampled)
    assert found.tolist() == [[0, 0], [3, 4], [1, 2], [0, 0]]


def test_best_token_is_the_lowest_of_the_largest() -> None:
    """-0 equals 0; a row with NaN or infinity has none."""
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[-0.0, 0.0, -1], [1, 3, 3], [-inf, 2, 1], [inf, 0, 0], [nan, 0, 0], [-inf, -inf, -inf]])
    assert reference.best_tokens(logits, is_masked=False).tolist() == [0, 1, -1, -1, -1, -1]
    assert reference.best_tokens(logits, is_masked=True).tolist() == [0, 1, 1, -1, -1, -1]
