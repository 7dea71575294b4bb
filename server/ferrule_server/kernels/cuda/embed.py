"""Rows of a table, by the ids that lie on the device: the embedding of a step's tokens, sampled ones among them.

Maths: ``out[r] = table[ids[r]]``, zeros where the id is not one of the table's: -1 stands for a token that could not
be chosen, and the step after it must not read outside the table. An id of ``-2 - j`` stands for ``sampled[j]``: a token
that the step before chose and the host had not seen when it wrote the ids. See ``kernels.reference.embed``.

Bytes moved: ``4 * num_rows * size``. Source: nothing to name.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.constants import CHUNK
from ferrule_server.kernels.cuda.intrinsics import I32, Address
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled

__all__ = ["embed", "spec", "specs"]


def embed(
    token_ids: Address,
    sampled: Address,
    table: Address,
    hidden: Address,
    num_rows: I32,
    num_sampled: I32,
    table_rows: I32,
    size: I32,
    *,
    X: int,
    WARPS: int,
) -> None:
    """Copy rows of a table.

    The table may be written between launches, so that rows of a step are gathered by the same kernel.

    Launch: any grid (one CTA per row at most is of use), ``32 * WARPS`` threads, no shared memory.

    Args:
        token_ids: int32 [num_rows].
        sampled: int32 [num_sampled]; 0 where there are none.
        table: bf16 [table_rows, size].
        hidden: bf16 [num_rows, size], written.
        num_rows: Rows that come out.
        num_sampled: Tokens that an id may stand for; one that stands for none of them gives zeros.
        table_rows: Rows of the table.
        size: Of a row, a multiple of 8.
        X: Chunks of a row that a thread copies at a time.
        WARPS: Per CTA.
    """
    ptx.grid_launch_dependents()
    ptx.grid_wait()
    row = i32(ptx.cta_id())
    while row < num_rows:
        token = ptx.load_i32(token_ids + row * 4)
        if token < -1:
            place = i32(-2 - token)
            token = i32(-1)
            if place < num_sampled:
                token = ptx.load_i32(sampled + place * 4)
        left = i32(size - ptx.thread_id() * CHUNK)
        if token < 0 or token >= table_rows:
            left = i32(0)
        source = table + token * (size * 2) + ptx.thread_id() * (CHUNK * 2)
        target = hidden + row * (size * 2) + ptx.thread_id() * (CHUNK * 2)
        start = i32(0)
        while start < size:
            chunks = registers(X)
            for i in unrolled(X):
                chunks[i] = (0, 0, 0, 0)
                if left > start + 32 * WARPS * CHUNK * i:
                    chunks[i] = ptx.load_v4(source + (start + 32 * WARPS * CHUNK * i) * 2)
            for i in unrolled(X):
                if ptx.thread_id() * CHUNK + start + 32 * WARPS * CHUNK * i < size:
                    ptx.store_v4(target + (start + 32 * WARPS * CHUNK * i) * 2, chunks[i])
            start = i32(start + 32 * WARPS * CHUNK * X)
        row = i32(row + ptx.num_ctas())


def spec(*, X: int = 4, WARPS: int = 4) -> KernelSpec:
    """Return the kernel for rows of any size; the keywords are its constants."""
    constants: dict[str, Constant] = {"WARPS": WARPS, "X": X}
    return KernelSpec(
        kernel=embed,
        constants=tuple(sorted(constants.items())),
        num_threads=32 * WARPS,
        shared_bytes=0,
        min_vector_loads=X,
    )


def specs(shape: ModelShape) -> list[KernelSpec]:  # noqa: ARG001  (one for all)
    """Return what a model needs: one kernel, which copies 4096 values at a time."""
    return [spec()]
