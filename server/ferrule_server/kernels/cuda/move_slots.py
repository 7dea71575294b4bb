"""Single slots of the KV pool copied within it, all layers: what keeps the accepted path of a token tree.

Maths: none. ``pool[.., target] = pool[.., source]`` for every pair, layer, K and V and head, byte for byte, every
source being read before any target is written: chains and swaps mean what they say. Two ways:

* ``move_slots``, at most ``capacity`` pairs: a *plane* (one layer, K or V, one head) shares no byte with another, so
  one CTA reads all the sources of a plane into registers, meets at a barrier, and writes. One pass, no memory besides.
* ``stage_slots``, any number: one launch gathers the sources into a buffer, a second one scatters it.

Bytes moved: every moved byte is read once and written once; twice each with a buffer. A slot of a plane is
``2 * head_dim`` bytes, so every slot is whole sectors of 32 bytes: 8 at a width of 128, 4 at 64.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda.constants import LOG2
from ferrule_server.kernels.cuda.intrinsics import (
    I32,
    Address,
    barrier,
    cta_id,
    device,
    grid_launch_dependents,
    grid_wait,
    load_i32,
    load_v4,
    num_ctas,
    store_v4,
    thread_id,
)
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled

__all__ = [
    "capacity",
    "move_slots",
    "num_ctas_needed",
    "spec",
    "specs",
    "stage_ctas_needed",
    "stage_slots",
    "stage_spec",
    "staging_bytes",
    "variants",
]


def move_slots(
    pool: Address,
    block_stride: Address,
    layer_stride: Address,
    pairs: Address,
    num_pairs: I32,
    num_layers: I32,
    num_planes: I32,
    *,
    HEAD_DIM: int,
    BLOCK_SIZE: int,
    U: int,
    THREADS: int,
) -> None:
    """Move few slots, through registers.

    Launch: any grid of at least one CTA (``num_ctas_needed`` at most is of use), THREADS threads, no shared memory.

    Args:
        pool: bf16 [num_blocks, num_layers, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM], changed in place.
        block_stride: Bytes from one block to the next, a multiple of 16.
        layer_stride: Bytes from one layer of a block to the next, a multiple of 16.
        pairs: int32 [num_pairs, 2], (source, target) slots, block * BLOCK_SIZE + offset; targets are distinct.
        num_pairs: At most ``capacity`` of the spec.
        num_layers: Layers of a block.
        num_planes: Of a layer: 2 * num_kv_heads.
        HEAD_DIM: 64 or 128.
        BLOCK_SIZE: 16, 32 or 64.
        U: Accesses in flight per thread.
        THREADS: Per CTA.
    """
    grid_launch_dependents()
    grid_wait()
    chunk = i32(thread_id() & (HEAD_DIM // 8 - 1))
    first = i32(thread_id() >> LOG2[HEAD_DIM // 8])
    sources = registers(U)
    targets = registers(U)
    words = registers(U)
    for u in unrolled(U):
        sources[u] = pool
        targets[u] = pool
        words[u] = (0, 0, 0, 0)
        pair = i32(first + u * (THREADS * 8 // HEAD_DIM))
        if pair < num_pairs:
            source = load_i32(pairs + pair * 8)
            target = load_i32(pairs + pair * 8 + 4)
            sources[u] = slot_address(pool, source, block_stride, HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE) + chunk * 16
            targets[u] = slot_address(pool, target, block_stride, HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE) + chunk * 16
    left = i32(num_pairs - first)
    layer = i32(0)
    plane = cta_id()
    while plane >= num_planes:
        plane = i32(plane - num_planes)
        layer = i32(layer + 1)
    while layer < num_layers:
        inside = layer * layer_stride + plane * (BLOCK_SIZE * HEAD_DIM * 2)
        for u in unrolled(U):
            if left > u * (THREADS * 8 // HEAD_DIM):
                words[u] = load_v4(sources[u] + inside)
        barrier()
        for u in unrolled(U):
            if left > u * (THREADS * 8 // HEAD_DIM):
                store_v4(targets[u] + inside, words[u])
        plane = i32(plane + num_ctas())
        while plane >= num_planes:
            plane = i32(plane - num_planes)
            layer = i32(layer + 1)


def stage_slots(
    pool: Address,
    block_stride: Address,
    layer_stride: Address,
    pairs: Address,
    staging: Address,
    num_pairs: I32,
    num_layers: I32,
    num_planes: I32,
    *,
    DIRECTION: str,
    HEAD_DIM: int,
    BLOCK_SIZE: int,
    U: int,
    THREADS: int,
) -> None:
    """Gather the sources of any number of pairs into a buffer, or scatter the buffer to their targets.

    Launch: ``gather``, then ``scatter`` with the same arguments; any grid of at least one CTA
    (``stage_ctas_needed`` at most is of use), THREADS threads, no shared memory.

    Args:
        pool: As in ``move_slots``; changed by ``scatter``.
        block_stride: As in ``move_slots``.
        layer_stride: As in ``move_slots``.
        pairs: As in ``move_slots``.
        staging: bf16 [num_pairs, num_layers, 2, num_kv_heads, HEAD_DIM]; changed by ``gather``.
        num_pairs: 0 or more.
        num_layers: Layers of a block.
        num_planes: Of a layer: 2 * num_kv_heads.
        DIRECTION: ``gather`` or ``scatter``.
        HEAD_DIM: 64 or 128.
        BLOCK_SIZE: 16, 32 or 64.
        U: Accesses in flight per thread.
        THREADS: Per CTA.
    """
    assert DIRECTION in ("gather", "scatter")
    grid_launch_dependents()
    grid_wait()
    chunk = i32((thread_id() & (HEAD_DIM // 8 - 1)) * 16)
    first = i32(thread_id() >> LOG2[HEAD_DIM // 8])
    words = registers(U)
    for u in unrolled(U):
        words[u] = (0, 0, 0, 0)
    pair = i32(0)
    layer = cta_id()
    while layer >= num_layers:
        layer = i32(layer - num_layers)
        pair = i32(pair + 1)
    while pair < num_pairs:
        slot = load_i32(pairs + pair * 8 + (0 if DIRECTION == "gather" else 4))
        inside = slot_address(pool, slot, block_stride, HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE)
        inside = inside + layer * layer_stride + chunk
        outside = staging + (pair * num_layers + layer) * (num_planes * (HEAD_DIM * 2)) + chunk
        plane = first
        while plane < num_planes:
            for u in unrolled(U):
                other = i32(plane + u * (THREADS * 8 // HEAD_DIM))
                if other < num_planes:
                    if DIRECTION == "gather":
                        words[u] = load_v4(inside + other * (BLOCK_SIZE * HEAD_DIM * 2))
                    else:
                        words[u] = load_v4(outside + other * (HEAD_DIM * 2))
            for u in unrolled(U):
                other = i32(plane + u * (THREADS * 8 // HEAD_DIM))
                if other < num_planes:
                    if DIRECTION == "gather":
                        store_v4(outside + other * (HEAD_DIM * 2), words[u])
                    else:
                        store_v4(inside + other * (BLOCK_SIZE * HEAD_DIM * 2), words[u])
            plane = i32(plane + U * (THREADS * 8 // HEAD_DIM))
        layer = i32(layer + num_ctas())
        while layer >= num_layers:
            layer = i32(layer - num_layers)
            pair = i32(pair + 1)


@device
def slot_address(pool: Address, slot: I32, block_stride: Address, *, HEAD_DIM: int, BLOCK_SIZE: int) -> Address:
    """Return where a slot lies in plane 0 of layer 0."""
    return pool + (slot >> LOG2[BLOCK_SIZE]) * block_stride + (slot & (BLOCK_SIZE - 1)) * (HEAD_DIM * 2)


def spec(shape: ModelShape, *, block_size: int = 16, unroll: int = 4, num_threads: int = 256) -> KernelSpec:
    """Return ``move_slots`` for one choice of its constants."""
    constants: dict[str, Constant] = {
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": block_size,
        "U": unroll,
        "THREADS": num_threads,
    }
    return KernelSpec(
        move_slots,
        tuple(sorted(constants.items())),
        num_threads=num_threads,
        shared_bytes=0,
        ctas_per_sm=2,
        min_vector_loads=unroll,
    )


def stage_spec(
    shape: ModelShape, direction: str, *, block_size: int = 16, unroll: int = 2, num_threads: int = 256
) -> KernelSpec:
    """Return ``stage_slots`` for one choice of its constants."""
    constants: dict[str, Constant] = {
        "DIRECTION": direction,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": block_size,
        "U": unroll,
        "THREADS": num_threads,
    }
    return KernelSpec(
        stage_slots,
        tuple(sorted(constants.items())),
        num_threads=num_threads,
        shared_bytes=0,
        ctas_per_sm=2,
        min_vector_loads=unroll,
    )


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return what a model of this shape needs."""
    return [spec(shape), stage_spec(shape, "gather"), stage_spec(shape, "scatter")]


def variants(shape: ModelShape) -> list[KernelSpec]:
    """Return what is worth measuring."""
    return [spec(shape, unroll=unroll) for unroll in (1, 2, 4)]


def capacity(made: KernelSpec) -> int:
    """Return how many pairs one launch of ``move_slots`` takes."""
    constants = {name: value for name, value in made.constants if isinstance(value, int)}
    return constants["THREADS"] * 8 // constants["HEAD_DIM"] * constants["U"]


def num_ctas_needed(made: KernelSpec, num_layers: int, num_planes: int, num_sms: int) -> int:
    """Return the CTAs of ``move_slots`` that have work, at most one wave of half the GPU."""
    return min(num_layers * num_planes, num_sms * made.ctas_per_sm)


def stage_ctas_needed(made: KernelSpec, num_pairs: int, num_layers: int, num_sms: int) -> int:
    """Return the CTAs of ``stage_slots`` that have work, at most one wave of half the GPU."""
    return max(1, min(num_pairs * num_layers, num_sms * made.ctas_per_sm))


def staging_bytes(shape: ModelShape, num_pairs: int) -> int:
    """Return the size of the buffer of ``stage_slots``."""
    return num_pairs * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * 2
