"""Measure the memory that a stretch of torch code takes for its intermediate tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode

__all__ = ["LiveBytes"]


class LiveBytes(TorchFunctionMode):
    """Keeps the most bytes that tensors made within it have taken at one time.

    Views and results in place are not counted, because they are not new memory. What a library takes inside one call is
    not seen. (A ``TorchDispatchMode`` would see more, but its first use imports torch's compiler, which takes seconds.)

    Attributes:
        peak: In bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: WeakValueDictionary[int, UntypedStorage] = WeakValueDictionary()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run a function of torch and count the memory of what it returns."""
        result = func(*args, **(kwargs or {}))
        known = _storages(args)
        self._live.update({key: storage for key, storage in _storages(result).items() if key not in known})
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._live.values()))
        return result


def _storages(value: object) -> dict[int, UntypedStorage]:
    """Return the memory of every tensor in a value by its identity."""
    if isinstance(value, Tensor) and not value.is_mkldnn:
        storage = value.untyped_storage()
        return {id(storage): storage}
    if not isinstance(value, list | tuple):
        return {}
    return {key: storage for item in value for key, storage in _storages(item).items()}
