"""The product of a block of rows and a group of 64 outputs: the part of linear layers that depends on their matrix.

It is compiled by itself for each kind of matrix, and called through its address.
"""

from __future__ import annotations

from ferrule_server.kernels.cpu.activations import SCALE_BYTES
from ferrule_server.kernels.cpu.dot import GROUP, dot_group
from ferrule_server.kernels.cpu.kernel import kernel
from ferrule_server.kernels.cpu.lanes import LANES, load, store
from ferrule_server.kernels.cpu.lanes import multiply as multiply_lanes
from ferrule_server.kernels.cpu.plan import Plan


@kernel
def multiply(
    plan: Plan, weight: int, num_tiles: int, num_rows: int, inputs: int, input_bytes: int, sums: int, sum_bytes: int,
    ahead: int,
) -> int:  # fmt: skip
    """Add the products of rows and a group to sums; ``ahead`` is the address of the group that comes next."""
    tile_bytes, input_tile_bytes = plan.kind.tile_bytes, plan.input_tile_bytes
    num_parts = (num_rows + plan.rows_at_once - 1) // plan.rows_at_once
    part_rows = rows_of_part(plan, num_rows, num_parts)
    num_lines = lines_of_part(plan, num_parts)
    for first in range(0, num_tiles, plan.tiles_at_once):
        count = min(plan.tiles_at_once, num_tiles - first)
        next_tiles = weight + (first + count) * tile_bytes if first + count < num_tiles else ahead
        for part in range(num_parts):
            row = part * part_rows
            here = inputs + row * input_bytes
            scales = here + num_tiles * input_tile_bytes + first // plan.tiles_at_once * SCALE_BYTES
            dot_group(
                plan, weight + first * tile_bytes, count, min(part_rows, num_rows - row),
                here + first * input_tile_bytes, input_bytes, scales, sums + row * sum_bytes, sum_bytes,
                next_tiles + part * num_lines * 64 * count, num_lines,
            )  # fmt: skip
    if plan.kind.group_end_bytes:
        _scale(sums, sum_bytes, num_rows, weight + num_tiles * tile_bytes)
    return 0


@kernel
def _scale(sums: int, sum_bytes: int, num_rows: int, scales: int) -> None:
    """Multiply the sums of some rows by a scale for each of 64 outputs."""
    for i in range(0, GROUP, LANES):
        scale = load(scales + 4 * i)
        for row in range(num_rows):
            place = sums + row * sum_bytes + 4 * i
            store(place, multiply_lanes(load(place), scale))


@kernel
def rows_of_part(plan: Plan, num_rows: int, num_parts: int) -> int:
    """Return the rows of each part but the last: about equal ones, and whole tiles.

    A tile that reached into the next part would add to the sums of rows that are added to again there.
    """
    rows = (num_rows + num_parts - 1) // num_parts
    return (rows + plan.rows_stored - 1) // plan.rows_stored * plan.rows_stored


@kernel
def lines_of_part(plan: Plan, num_parts: int) -> int:
    """Return how many cache lines of later weights each part of the rows prefetches, for each tile of inputs."""
    lines = (plan.kind.tile_bytes + 64 * num_parts - 1) // (64 * num_parts)
    return lines if plan.is_quantised else max(32, lines // 32 * 32)
