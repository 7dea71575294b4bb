"""What a stream needs to know of torch: calls recorded to be made later, and calls that come at a wrong time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["recorded", "watched"]


def recorded(function: Callable[[], None]) -> list[Callable[[], object]]:
    """Return what a function would have done, call by call; only views are made now.

    Raises:
        AssertionError: It allocates a tensor, or needs a value: a capture can do neither.
    """
    recorder = _Recorder()
    with recorder:
        function()
    return recorder.calls


@contextmanager
def watched(is_forbidden: Callable[[Tensor], bool]) -> Iterator[None]:
    """Raise an AssertionError at whatever is done to a forbidden tensor; views may be made of it."""
    with _Watch(is_forbidden):
        yield


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's, likewise below
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        schema = func._schema
        if any(result.alias_info is None for result in schema.returns):
            raise AssertionError(f"{func} allocates or waits: an operation of a step writes to out= only")
        written = [
            kwargs.get(argument.name, args[place] if place < len(args) else None)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if not written:
            return func(*args, **kwargs)
        self.calls.append(partial(_call, func, args, kwargs))
        return written[0] if len(schema.returns) == 1 else tuple(written[: len(schema.returns)])


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, is_forbidden: Callable[[Tensor], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_forbidden = is_forbidden

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if not _is_view(func._schema):
            for value in tree_leaves((args, kwargs)):
                message = f"{func} on memory of the GPU outside of gpu.current(): in no order with the stream"
                assert not (isinstance(value, Tensor) and self._is_forbidden(value)), message
        return func(*args, **(kwargs or {}))


def _is_view(schema: Any) -> bool:
    aliases = [result.alias_info for result in schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _call(func: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with torch.no_grad():
        func(*args, **kwargs)
