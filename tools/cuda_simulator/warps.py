"""What 32 threads do together: given the request of each lane, the reply to each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tools.cuda_simulator.errors import Divergence, PromiseBroken

__all__ = ["WARP_OPERATIONS"]

Request = tuple[Any, ...]

_LANES = np.arange(32)
_GROUP, _MEMBER = _LANES // 4, _LANES % 4
# Place of each of the 8 (4, 4) elements of a lane's fragment of a, b, c: rows and columns of the matrix.
_A_ROWS = np.stack([_GROUP, _GROUP, _GROUP + 8, _GROUP + 8, _GROUP, _GROUP, _GROUP + 8, _GROUP + 8], axis=1)
_A_COLUMNS = np.stack([2 * _MEMBER + part for part in (0, 1, 0, 1, 8, 9, 8, 9)], axis=1)
_B_ROWS = np.stack([2 * _MEMBER + part for part in (0, 1, 8, 9)], axis=1)
_B_COLUMNS = np.stack([_GROUP] * 4, axis=1)
_C_ROWS = np.stack([_GROUP, _GROUP, _GROUP + 8, _GROUP + 8], axis=1)
_C_COLUMNS = np.stack([2 * _MEMBER + part for part in (0, 1, 0, 1)], axis=1)
_A_PLACES, _B_PLACES, _C_PLACES = _A_ROWS * 16 + _A_COLUMNS, _B_ROWS * 8 + _B_COLUMNS, _C_ROWS * 8 + _C_COLUMNS


def _shuffle_xor(requests: list[Request]) -> list[Any]:
    mask = requests[0][3]
    if 0 < mask < 32 and all(request[3] == mask for request in requests):
        return [requests[lane ^ mask][2] for lane in range(32)]
    raise Divergence(f"lanes disagree on the mask of a shuffle, or it is out of range: {[r[3] for r in requests]}")


def _shuffle(requests: list[Request]) -> list[Any]:
    for request in requests:
        if not 0 <= request[3] < 32:
            raise Divergence(f"a shuffle from lane {request[3]}")
    return [requests[request[3]][2] for request in requests]


def _word(requests: list[Request]) -> None:
    for request in requests:
        if not 0 <= request[2] <= 0xFFFFFFFF:
            raise PromiseBroken(f"shuffle of {request[2]}, which is no 32-bit word")


def _shuffle_xor_u32(requests: list[Request]) -> list[Any]:
    _word(requests)
    return _shuffle_xor(requests)


def _shuffle_u32(requests: list[Request]) -> list[Any]:
    _word(requests)
    return _shuffle(requests)


def _mma_bf16(requests: list[Request]) -> list[Any]:
    a, b = np.empty(256, np.float32), np.empty(128, np.float32)
    a[_A_PLACES] = _fragments([request[2] for request in requests])
    b[_B_PLACES] = _fragments([request[3] for request in requests])
    product = (a.reshape(16, 16).astype(np.float64) @ b.reshape(16, 8)).reshape(-1)
    sums = product[_C_PLACES] + np.array([request[4] for request in requests], np.float32)
    return list(map(tuple, sums.astype(np.float32).tolist()))


def _fragments(words: list[tuple[int, ...]]) -> Any:
    halves = np.array(words, np.uint32).view(np.uint16)
    return (halves.astype(np.uint32) << 16).view(np.float32)


WARP_OPERATIONS: dict[str, Callable[[list[Request]], list[Any]]] = {
    # Not rounded, as the lane's own value is not: a butterfly then gives all lanes the same bits, as on a GPU.
    "shuffle_xor_f32": _shuffle_xor,
    "shuffle_xor_u32": _shuffle_xor_u32,
    "shuffle_u32": _shuffle_u32,
    "mma_bf16": _mma_bf16,
    "warp_barrier": lambda requests: [None] * 32,
}
"""By name; a request is (name, call site, *arguments)."""
