"""Records what a function does through torch, so that it can run later and again: what a stream and a capture do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["recorded"]


def recorded(function: Callable[[], None]) -> list[Callable[[], object]]:
    """Return what a function would have done, call by call; only views are made now.

    Raises:
        AssertionError: It allocates a tensor, or needs a value: a capture can do neither.
    """
    recorder = _Recorder()
    with recorder:
        function()
    return recorder.calls


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


def _call(func: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with torch.no_grad():
        func(*args, **kwargs)
