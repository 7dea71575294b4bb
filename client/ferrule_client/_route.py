"""Which instance of several servers a call is for: the one that has the sequence it names.

A proxy in front of several instances reads the metadata ``ferrule-instance`` and needs to know nothing else. Every
handle carries the name of its instance.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ferrule.v1 import cache_pb2, executor_pb2, types_pb2
from ferrule_client.errors import HandleNotFoundError, InstanceUnreachableError, WrongInstanceError
from ferrule_client.types import Handle

INSTANCE_KEY = "ferrule-instance"
"""Key of the metadata that says where a call belongs."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

_Item = TypeVar("_Item")


def instance_of_handle(handle: Handle | types_pb2.KvCacheHandle) -> str:
    """Return the instance that a handle names; empty if it names none, or by a text that metadata cannot carry."""
    return handle.instance if _is_name(handle.instance) else ""


@functools.lru_cache(maxsize=256)  # a frame has many handles of few instances
def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def instance_of(request: object) -> str:
    """Return the instance that has the sequence which a request names; empty, if it names none.

    Of a request with many handles the first decides: who sends it has put those of one instance together.
    """
    find = _FINDERS.get(type(request))
    return instance_of_handle(find(request)) if find is not None else ""


def by_instance(items: Iterable[_Item], instance: Callable[[_Item], str]) -> dict[str, list[int]]:
    """Return the places of items by their instances; those of any ("") go along with the others, if there are."""
    places: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        places.setdefault(instance(item), []).append(place)
    if len(places) > 1 and (free := places.pop("", None)) is not None:
        first = next(iter(places))
        places[first] = sorted(places[first] + free)
    return places


def is_lost(error: object, handle: Handle) -> bool:
    """Return whether an error of a call on a handle says that its sequence cannot be had any more.

    It is gone; or nobody can reach the instance that has it; or the call named that instance, and the way there does
    not lead to it: it was taken out of service, or goes by another name since it was restarted.
    """
    if isinstance(error, WrongInstanceError):
        return bool(error.instance) and error.instance == instance_of_handle(handle)
    return isinstance(error, (HandleNotFoundError, InstanceUnreachableError))


# Any: each message has its own fields. What is unset reads as a handle without a name.
_Finder = Callable[[Any], types_pb2.KvCacheHandle]
_NO_HANDLE = types_pb2.KvCacheHandle()


def _own(request: Any) -> types_pb2.KvCacheHandle:
    return request.kv_cache  # type: ignore[no-any-return]


def _of_input(request: Any) -> types_pb2.KvCacheHandle:
    return request.input.kv_cache  # type: ignore[no-any-return]


def _first(handles: Iterable[types_pb2.KvCacheHandle]) -> types_pb2.KvCacheHandle:
    return next((one for one in handles if one.instance), _NO_HANDLE)


def _first_of_inputs(request: Any) -> types_pb2.KvCacheHandle:
    return _first(one.kv_cache for one in request.inputs)


def _first_of_handles(request: Any) -> types_pb2.KvCacheHandle:
    return _first(request.kv_caches)


_FINDERS: dict[type, _Finder] = {
    cache_pb2.ForkCacheRequest: _own,
    cache_pb2.GetCacheInfoRequest: _own,
    cache_pb2.KeepAliveRequest: _first_of_handles,
    cache_pb2.ReleaseCacheRequest: _first_of_handles,
    cache_pb2.ReserveKvSlotsRequest: lambda request: _first(one.kv_cache for one in request.requests),
    cache_pb2.TruncateKvRequest: _own,
    executor_pb2.BatchDecodeRequest: _first_of_inputs,
    executor_pb2.BatchPrefillRequest: _first_of_inputs,
    executor_pb2.DecodeInput: _own,
    executor_pb2.DecodeRequest: _of_input,
    executor_pb2.ForwardVerifyRequest: _of_input,
    executor_pb2.GenerateRequest: _own,
    executor_pb2.PrefillInput: _own,
    executor_pb2.PrefillRequest: _of_input,
    executor_pb2.UnifiedBatchItem: _own,
    executor_pb2.UnifiedDecodeRequest: lambda request: _first(one.kv_cache for one in request.batch.items),
    executor_pb2.VerifyInput: _own,
}
