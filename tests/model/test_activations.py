"""Memory of intermediate tensors: what the server says of a row is what rows of real steps take."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.make_random_model import SHAPES, write_model
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.model.activations import LiveBytes
from ferrule_server.model.weights import DTypeName, load_model
from tests.model.stepping import Piece, PooledSequence, Stepper


class EveryOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of every operation below torch's Python functions, temporary or not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.live: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage()._cdata for tensor in tensors(args)}
        new = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors(result)}
        self.live.update({key: storage for key, storage in new.items() if key not in known})
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.live.values()))
        return result


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and not leaf.is_mkldnn]


def peak_of_step(executor: TorchExecutor, num_rows: int) -> int:
    """Return the most memory that tensors of a step over one prompt take."""
    batch = Stepper(executor).batch(Piece(PooledSequence(), range(num_rows)))
    counted = EveryOperation()
    with counted:
        executor.run(batch)
    return counted.peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_takes_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: DTypeName) -> None:
    """Models that differ in one width alone differ in the bytes of a row, and so do their steps.

    They are so wide there that the feed-forward part takes most, rather than attention, which depends on the context.
    """
    found = []
    for intermediate_size in (4096, 8192):
        monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["tiny"], "intermediate_size": intermediate_size})
        write_model(tmp_path / str(intermediate_size), "tiny")
        model = load_model(tmp_path / str(intermediate_size), dtype=dtype)
        executor = TorchExecutor(model, kv_memory_bytes=4 * TorchExecutor.min_kv_bytes(model), max_context=256)
        measured = (peak_of_step(executor, 96) - peak_of_step(executor, 32)) / 64
        assert executor.info.activation_bytes_per_row == pytest.approx(measured, rel=0.06)
        found.append(executor.info.activation_bytes_per_row)
        executor.close()
    assert found[1] - found[0] >= 2 * 4096 * model.torch_dtype.itemsize


def test_only_new_memory_is_counted_and_only_while_it_lives() -> None:
    """A view and a result in place are no memory; what is dropped makes room."""
    given = torch.zeros(1000)
    with LiveBytes() as live:
        given.view(10, 100).add_(1)
        assert live.peak == 0
        for _ in range(3):
            sums = given + 1
            del sums
        assert live.peak == 4000
        parts = [given * 2, *torch.unique(given, return_inverse=True)]
        assert live.peak == 4000 + 4 + 8000
        del parts
    torch.zeros(5000)
    assert live.peak == 12004
