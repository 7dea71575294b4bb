"""Reads DraftProbs: the laws that the drafts of a verify were drawn from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

from ferrule.v1 import executor_pb2, types_pb2
from ferrule_server.errors import InvalidRequest, TokenOutOfVocab
from ferrule_server.executor.base import DraftLaw, Float32Array, Int32Array

_TOLERANCE: Final = 1e-3
"""How far from 1 a law may add up, besides what its type cannot hold."""
_DIGEST_BYTES: Final = 16
_WIRE_TYPES: Final[Mapping[int, np.dtype[np.generic]]] = {
    types_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    types_pb2.DATA_TYPE_BFLOAT16: np.dtype("<u2"),
    types_pb2.DATA_TYPE_FLOAT16: np.dtype("<f2"),
}
_ROUNDINGS: Final[Mapping[int, tuple[float, float]]] = {
    types_pb2.DATA_TYPE_FLOAT32: (0.0, 0.0),
    types_pb2.DATA_TYPE_BFLOAT16: (2.0**-7, 0.0),  # also where the low bits are cut off
    types_pb2.DATA_TYPE_FLOAT16: (2.0**-10, 2.0**-24),  # below 2^-14 the steps no longer shrink
}
"""How far off a probability may be in a type: in its own measure, and besides that absolutely."""


class DraftLawReader:
    """Turns laws as they are sent into one :class:`DraftLaw` for each draft.

    Args:
        vocab_size: Token ids of the model.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def read(self, message: executor_pb2.DraftProbs, draft_ids: Sequence[int], path: str) -> tuple[DraftLaw, ...]:
        """Return the law of each draft, in order.

        Raises:
            InvalidRequest: No form is used, the sizes are wrong, a row is no law, or one gives its own draft no chance.
            TokenOutOfVocab: An id is not in the vocabulary.
        """
        form = message.WhichOneof("probs")
        if form == "dense":
            return self._dense(message.dense, draft_ids, f"{path}.dense")
        if form == "sparse":
            return self._sparse(message.sparse, draft_ids, f"{path}.sparse")
        raise InvalidRequest(path, "one of dense and sparse must be set")

    def _dense(self, tensor: types_pb2.Tensor, draft_ids: Sequence[int], path: str) -> tuple[DraftLaw, ...]:
        rows = _tensor_rows(tensor, (len(draft_ids), self._vocab_size), path)
        relative, absolute = _ROUNDINGS[tensor.dtype]
        tolerance = _TOLERANCE + relative + absolute * self._vocab_size
        laws = []
        for index, (row, draft_id) in enumerate(zip(rows, draft_ids, strict=True)):
            where = f"row {index}"
            _check_law(row, f"{path}.data", where, tolerance)
            if not row[draft_id] > 0.0:
                raise InvalidRequest(f"{path}.data", f"{where} gives its own draft, token {draft_id}, no chance")
            laws.append(_law(None, row))
        return tuple(laws)

    def _sparse(self, message: executor_pb2.SparseProbs, draft_ids: Sequence[int], path: str) -> tuple[DraftLaw, ...]:
        ends = self._row_ends(message, len(draft_ids), path)
        # Half the time of np.array, which asks for each entry by its index.
        ids = np.fromiter(message.token_ids, np.int64, len(message.token_ids))
        probs = np.fromiter(message.probs, np.float32, len(message.probs))
        if (out := np.flatnonzero(ids >= self._vocab_size)).size:
            index = int(out[0])
            raise TokenOutOfVocab(f"{path}.token_ids[{index}]", int(ids[index]), self._vocab_size)
        if (out := np.flatnonzero(~((probs > 0.0) & (probs <= 1.0)))).size:
            raise InvalidRequest(f"{path}.probs[{int(out[0])}]", f"must be in (0, 1], got {probs[out[0]]}")
        laws = []
        for index, (begin, end, draft_id) in enumerate(zip([0, *ends], ends, draft_ids, strict=False)):
            row_ids, row = ids[begin:end], probs[begin:end]
            where = f"row {index}"
            is_named = np.zeros(self._vocab_size, np.bool_)
            is_named[row_ids] = True
            if np.count_nonzero(is_named) != len(row_ids):
                raise InvalidRequest(f"{path}.token_ids", f"{where} has an id twice")
            _check_law(row, f"{path}.probs", where)
            if not is_named[draft_id]:
                raise InvalidRequest(f"{path}.token_ids", f"{where} gives its own draft, token {draft_id}, no chance")
            laws.append(_law(row_ids.astype(np.int32), row))
        return tuple(laws)

    def _row_ends(self, message: executor_pb2.SparseProbs, num_rows: int, path: str) -> list[int]:
        """Return where each row ends, once all sizes agree."""
        sizes = message.row_sizes
        if len(sizes) != num_rows:
            raise InvalidRequest(f"{path}.row_sizes", f"has {len(sizes)} rows for {num_rows} drafts")
        if sizes and max(sizes) > self._vocab_size:
            raise InvalidRequest(
                f"{path}.row_sizes", f"{max(sizes)} is more than the {self._vocab_size} tokens of the vocabulary"
            )
        total = sum(sizes)
        for name, size in (("token_ids", len(message.token_ids)), ("probs", len(message.probs))):
            if size != total:
                raise InvalidRequest(f"{path}.{name}", f"has {size} entries, the row_sizes add up to {total}")
        return list(accumulate(sizes))


def _tensor_rows(tensor: types_pb2.Tensor, shape: tuple[int, int], path: str) -> Float32Array:
    """Return a tensor of the shape expected: float32 [rows, vocab_size]."""
    wire_type = _WIRE_TYPES.get(tensor.dtype)
    if wire_type is None:
        raise InvalidRequest(f"{path}.dtype", f"{tensor.dtype} is none of FLOAT32, BFLOAT16, FLOAT16")
    if tuple(tensor.shape) != shape:
        raise InvalidRequest(f"{path}.shape", f"{list(tensor.shape)[:8]} is not {list(shape)}: drafts, vocabulary")
    num_bytes = shape[0] * shape[1] * wire_type.itemsize
    if len(tensor.data) != num_bytes:
        raise InvalidRequest(f"{path}.data", f"has {len(tensor.data)} bytes, the shape needs {num_bytes}")
    values = np.frombuffer(tensor.data, wire_type).reshape(shape)
    if tensor.dtype == types_pb2.DATA_TYPE_BFLOAT16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


def _check_law(probs: Float32Array, path: str, where: str, tolerance: float = _TOLERANCE) -> None:
    """Refuse a row that is no law: NaN and infinity fail here too."""
    if not (probs >= 0.0).all():
        raise InvalidRequest(path, f"{where} has a value below 0, or none at all")
    total = float(probs.sum(dtype=np.float64))
    if not abs(total - 1.0) <= tolerance:
        raise InvalidRequest(path, f"{where} adds up to {total}, not to 1 within {tolerance:.2g}")


def _law(token_ids: Int32Array | None, row: Float32Array) -> DraftLaw:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"dense" if token_ids is None else b"sparse")
    if token_ids is not None:
        digest.update(token_ids.tobytes())
        token_ids.flags.writeable = False
    digest.update(row.tobytes())
    probs: npt.NDArray[np.float64] = row.astype(np.float64)
    probs.flags.writeable = False
    return DraftLaw(digest.digest(), token_ids, probs)
