"""Layer 1 of the gather of rows by ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from ferrule_server.kernels import reference
from ferrule_server.kernels.cuda.embed import embed, spec
from ferrule_server.kernels.cuda.specialise import Specialised
from tests.kernels.cuda.mutation import check_mutants
from tests.kernels.cuda.replay import replay
from tools.cuda_simulator import Launch, Memory, run


def _run(
    token_ids: list[int],
    table: Tensor,
    *,
    sampled: Sequence[int] = (),
    grid: int = 2,
    chunks: int = 2,
    warps: int = 1,
    is_mutable: bool = False,
    specialised: Specialised | None = None,
) -> Tensor:
    """Run three times on one state, each in another order, and return what all runs gave."""
    memory = Memory()
    memory.put("token_ids", np.array(token_ids, np.int32), mutable=True)
    memory.put("sampled", np.array([*sampled, 0], np.int32), mutable=True)
    memory.put("table", table.view(torch.uint16).numpy(), offset=16, mutable=is_mutable)
    memory.empty("hidden", (len(token_ids), table.shape[1]), np.uint16, offset=48)
    names = ("token_ids", "sampled", "table", "hidden")
    launch = Launch(
        embed,
        dict(spec(X=chunks, WARPS=warps).constants),
        (*map(memory.address, names), len(token_ids), len(sampled), *table.shape),
        grid=grid,
        num_threads=32 * warps,
        specialised=specialised,
    )
    found = []
    for seed in range(3):
        replay(memory, [launch], outputs=("hidden",), seed=seed)
        found.append(memory.get("hidden"))
    assert all(np.array_equal(found[0], one) for one in found)
    return torch.from_numpy(found[0]).view(torch.bfloat16)


@pytest.mark.parametrize("size", [8, 264, 520, 1032])
@pytest.mark.parametrize(("chunks", "warps", "grid"), [(1, 1, 1), (2, 1, 3), (2, 2, 9)])
def test_rows_are_the_tokens(size: int, chunks: int, warps: int, grid: int) -> None:
    """Every bit, at sizes below, at and above what a CTA copies at a time; ids twice, the first and the last."""
    torch.manual_seed(size)
    table = torch.randn(7, size).bfloat16()
    token_ids = [6, 0, 3, 3, 6]
    found = _run(token_ids, table, grid=grid, chunks=chunks, warps=warps)
    assert torch.equal(found, reference.embed(torch.tensor(token_ids), table))


def test_ids_outside_the_table_give_zeros() -> None:
    """The token of a row that failed is -1; nothing outside the table is read."""
    table = torch.randn(5, 264).bfloat16()
    token_ids = [-1, 5, 4, -(2**31), 2**31 - 1]
    found = _run(token_ids, table)
    assert torch.equal(found, reference.embed(torch.tensor(token_ids), table))
    assert found[[0, 1, 3, 4]].count_nonzero() == 0


def test_ids_may_stand_for_tokens_of_the_step_before() -> None:
    """-2 - j is the j-th of them, each at its own place; a choice that failed, or is none of theirs, gives zeros."""
    table = torch.randn(5, 264).bfloat16()
    token_ids, sampled = [-3, 4, -2, -4, -5, -6, -(2**31), -1, -3], [2, 3, -1, -2]
    found = _run(token_ids, table, sampled=sampled)
    zeros = torch.zeros(264).bfloat16()
    expected = [table[3], table[4], table[2], zeros, zeros, zeros, zeros, zeros, table[3]]
    assert torch.equal(found, torch.stack(expected))
    assert torch.equal(found, reference.embed(torch.tensor(token_ids), table, torch.tensor(sampled)))


def test_nothing_is_read_where_nothing_was_sampled() -> None:
    """No address is needed then."""
    memory = Memory()
    memory.put("token_ids", np.array([-2, 1], np.int32), mutable=True)
    memory.put("table", np.ones((2, 8), np.uint16))
    memory.empty("hidden", (2, 8), np.uint16)
    token_ids, table, hidden = map(memory.address, ("token_ids", "table", "hidden"))
    run(memory, [Launch(embed, dict(spec().constants), (token_ids, 0, table, hidden, 2, 0, 2, 8), 1, 128)])
    assert memory.get("hidden").tolist() == [[0] * 8, [1] * 8]


def test_gathers_rows_of_what_a_kernel_wrote() -> None:
    """The table may be activations: the rows of a step whose logits are wanted."""
    hidden = torch.randn(9, 264).bfloat16()
    assert torch.equal(_run([8, 2], hidden, is_mutable=True), hidden[[8, 2]])


def test_a_large_table_is_addressed_in_64_bits() -> None:
    """Beyond 4 GiB: the last rows of a table of 600 000 rows of 8192 bytes."""
    memory = Memory()
    num_rows, size = 600_000, 4096
    memory.put("token_ids", np.array([num_rows - 1], np.int32), mutable=True)
    table = memory.sparse("table", num_rows * size * 2, mutable=False)
    row = torch.randn(size).bfloat16().view(torch.uint16).numpy()
    memory.write(table + (num_rows - 1) * size * 2, row)
    hidden = memory.empty("hidden", size, np.uint16)
    constants = dict(spec().constants)
    arguments = (memory.address("token_ids"), 0, table, hidden, 1, 0, num_rows, size)
    run(memory, [Launch(embed, constants, arguments, 1, 128)])
    assert np.array_equal(memory.get("hidden"), row)


def test_needs_its_wait() -> None:
    """Token ids come from the kernel before."""
    table = torch.randn(5, 264).bfloat16()

    def simulate(mutant: Specialised) -> None:
        assert torch.equal(_run([4, -2], table, sampled=[1], specialised=mutant), table[[4, 1]])

    found = check_mutants(embed, dict(spec(X=2, WARPS=1).constants), simulate)
    assert [mutation.name for mutation in found] == ["grid_wait"]
