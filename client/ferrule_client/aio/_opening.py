"""A call that is both awaited for its object and entered with ``async with``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")


class _Enterable(Protocol):
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...


_T_co = TypeVar("_T_co", bound=_Enterable, covariant=True)


class Opening(
    Coroutine[Any, Any, _T_co], AbstractAsyncContextManager[_T_co]
):  # Any: what a loop and its tasks exchange
    """What a call returns that opens something: ``x = await call`` or ``async with call as x``.

    Nothing runs before one of the two. It is a coroutine in every respect, so tasks can be made of it.
    """

    __slots__ = ("_coroutine", "_opened")

    def __init__(self, coroutine: Coroutine[Any, Any, _T_co]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, _T_co]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> _T_co:
        self._opened: _T_co = await self._coroutine
        return self._opened

    def __aexit__(  # no coroutine of its own, so that a warning names the caller's line
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        return self._opened.__aexit__(kind, error, tb)

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()


def opening(method: Callable[_P, Coroutine[Any, Any, _T_co]]) -> Callable[_P, Opening[_T_co]]:
    """Make what a coroutine function returns usable in ``async with`` too."""

    @functools.wraps(method)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> Opening[_T_co]:
        return Opening(method(*args, **kwargs))

    return wrapper
