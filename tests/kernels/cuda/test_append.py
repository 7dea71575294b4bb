"""Rotation and normalisation of a head, and where K and V of new tokens go (the rest is seen in test_attention)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ferrule_server.kernels import reference
from ferrule_server.kernels.cuda.append import kv_address, rope_table, rotate_head
from ferrule_server.kernels.cuda.intrinsics import (
    F32,
    I32,
    Address,
    grid_launch_dependents,
    grid_wait,
    store_u64,
    store_v4,
    thread_id,
)
from ferrule_server.kernels.cuda.specialise import i32, registers
from ferrule_server.model.rope import Llama3Scaling, Rope, rotation_table
from tools.cuda_simulator import Launch, Memory, from_bf16, run, to_bf16

SCALING = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
LOG2 = {64: 2, 128: 3}
EPS = 1e-6


def frequencies_of(head_dim: int, scaling: Llama3Scaling | None) -> torch.Tensor:
    """Return the frequencies of whole heads: float32 [head_dim / 2]."""
    return rotation_table(Rope(500000.0, head_dim // 2, head_dim, scaling), head_dim)[0]


def rotate(
    heads: Address,
    weight: Address,
    rope: Address,
    out: Address,
    eps: F32,
    *,
    HEAD_DIM: int,  # noqa: N803
    QK_NORM: bool,  # noqa: N803
) -> None:
    """Rotate as many heads as a warp holds; head i has position 3 i."""
    grid_launch_dependents()
    grid_wait()
    head = i32(thread_id() >> LOG2[HEAD_DIM])
    lane = i32(thread_id() & (HEAD_DIM // 16 - 1))
    low = registers(4, init=0)
    high = registers(4, init=0)
    rotate_head(
        heads + head * (HEAD_DIM * 2),
        weight,
        rope + head * 3 * (HEAD_DIM * 4),
        lane,
        eps,
        low,
        high,
        HEAD_DIM=HEAD_DIM,
        QK_NORM=QK_NORM,
    )
    place = out + head * (HEAD_DIM * 2) + lane * 16
    store_v4(place, (low[0], low[1], low[2], low[3]))
    store_v4(place + HEAD_DIM, (high[0], high[1], high[2], high[3]))


def address(
    heads: Address,
    block: I32,
    slot: I32,
    stride: Address,
    out: Address,
    *,
    BLOCK_SIZE: int,  # noqa: N803
) -> None:
    """Store where a slot lies."""
    grid_launch_dependents()
    grid_wait()
    if thread_id() == 0:
        store_u64(out, kv_address(heads, block, slot, stride, BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=128))


@pytest.mark.parametrize("scaling", [None, SCALING], ids=["plain", "llama-3"])
@pytest.mark.parametrize(("head_dim", "has_norm"), [(64, False), (64, True), (128, False), (128, True)])
def test_heads_are_normalised_and_rotated(head_dim: int, has_norm: bool, scaling: Llama3Scaling | None) -> None:
    """In float32, rounded once: at most one bf16 step from plain torch, where the two round a tie apart."""
    num_heads = 512 // head_dim
    frequencies = frequencies_of(head_dim, scaling)
    table = rope_table(frequencies, 3 * num_heads)
    heads = torch.randn((num_heads, 1, head_dim), generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = torch.linspace(0.5, 1.5, head_dim).bfloat16()
    memory = Memory()
    arguments = (
        memory.put("heads", to_bf16(heads.float().numpy()), mutable=True, offset=16),
        memory.put("weight", to_bf16(weight.float().numpy()), offset=16),
        memory.put("rope", table.numpy(), offset=16),
        memory.empty("out", (num_heads, 1, head_dim), np.uint16, offset=16),
        EPS,
    )
    constants = {"HEAD_DIM": head_dim, "QK_NORM": has_norm}
    run(memory, [Launch(rotate, constants, arguments, grid=1, num_threads=32)], seed=1)
    angles = reference.rope_angles(3 * torch.arange(num_heads), frequencies)
    expected = reference.qk_norm_rope(heads, weight if has_norm else None, EPS, *angles)
    got, wanted = from_bf16(memory.get("out")), expected.float().numpy()
    np.testing.assert_allclose(got, wanted, rtol=2**-7)
    assert (got == wanted).mean() > 0.99


def test_the_table_is_that_of_the_decoder_at_every_position() -> None:
    """Default and Llama-3 rotation: cosines of all pairs, then sines."""
    for scaling in (None, SCALING):
        frequencies = frequencies_of(64, scaling)
        cos, sin = reference.rope_angles(torch.arange(9000), frequencies)
        assert torch.equal(rope_table(frequencies, 9000), torch.cat((cos, sin), dim=1))


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_slots_lie_beyond_4_gi_elements(block_size: int) -> None:
    """The base of a block is 64 bits wide, whatever its id; inside the block, slots of a head follow each other."""
    heads, stride = 1 << 40, 3 * block_size * 128 * 2 * 8
    for block in (0, (1 << 31) // block_size - 1):
        for offset in (0, 1, block_size - 1):
            memory = Memory()
            arguments = (heads, block, block * block_size + offset, stride, memory.empty("out", 1, np.uint64))
            run(memory, [Launch(address, {"BLOCK_SIZE": block_size}, arguments, grid=1, num_threads=32)])
            assert int(memory.get("out")[0]) == heads + block * stride + offset * 256
