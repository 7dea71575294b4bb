"""Reads requests about sequences: fork, truncate, reserve, release, keep alive, describe, list."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from ferrule.v1 import cache_pb2, types_pb2
from ferrule_server.api.requests.fields import FieldReader, check_count, lease, require
from ferrule_server.engine import host_calls
from ferrule_server.engine.jobs import CacheInfo, ForkJob, HostCall, ListResult, SlotsWanted, TruncateJob
from ferrule_server.errors import InvalidRequest
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.reserved_slots import SlotReservation


class CacheReader:
    """Turns requests about sequences into jobs and host calls.

    Args:
        fields: Reads the fields that many requests have.
    """

    def __init__(self, fields: FieldReader) -> None:
        self._fields = fields

    def fork(self, request: cache_pb2.ForkCacheRequest, principal: str) -> ForkJob:
        """Return the job of a ForkCache."""
        require(request, "kv_cache")
        self._fields.check_request_id(request.request_id, "")
        handle = self._fields.handle(request.kv_cache, "")
        count = request.count if request.HasField("count") else 1
        if not 1 <= count <= self._fields.limits.max_fork_count:
            raise InvalidRequest("count", f"{count} is outside [1, {self._fields.limits.max_fork_count}]")
        length = request.length if request.HasField("length") else handle.length
        if not 1 <= length <= handle.length:
            raise InvalidRequest("length", f"{length} is outside [1, {handle.length}], the handle's length")
        ttl_s = lease(request.ttl, "ttl")
        return ForkJob(principal, handle, length, count, ttl_s, request.request_id)

    def truncate(self, request: cache_pb2.TruncateKvRequest, principal: str) -> TruncateJob:
        """Return the job of a TruncateKv; the engine checks ``new_length``."""
        require(request, "kv_cache")
        return TruncateJob(principal, self._fields.handle(request.kv_cache, ""), request.new_length)

    def reserve(self, request: cache_pb2.ReserveKvSlotsRequest, principal: str) -> HostCall[SlotReservation]:
        """Return the call of a ReserveKvSlots."""
        limit = self._fields.limits.max_handles_per_request
        check_count("requests", len(request.requests), limit, "send several requests")
        wanted = tuple(self._wanted(each, index) for index, each in enumerate(request.requests))
        return host_calls.reserve(principal, wanted)

    def cache_info(self, request: cache_pb2.GetCacheInfoRequest, principal: str) -> HostCall[CacheInfo]:
        """Return the call of a GetCacheInfo."""
        require(request, "kv_cache")
        handle = self._named(request.kv_cache, "kv_cache")
        return host_calls.describe(principal, handle, with_token_ids=request.include_token_ids)

    def list_caches(self, request: cache_pb2.ListCachesRequest, principal: str) -> HostCall[ListResult]:
        """Return the call of a ListCaches."""
        limit = min(request.page_size or self._fields.limits.default_page_size, self._fields.limits.max_page_size)
        after = _after_handle_id(request.page_token)
        return host_calls.list_caches(principal, after, limit, with_tips=request.with_handles)

    def named(self, handles: Sequence[types_pb2.KvCacheHandle], path: str) -> tuple[Handle, ...]:
        """Return the handles in the list ``path``; only their ``cache_id`` counts.

        Raises:
            InvalidRequest: There are too many handles, or one has an id longer than any that a server returns.
        """
        check_count(path, len(handles), self._fields.limits.max_handles_per_request, "send several requests")
        return tuple(self._named(handle, f"{path}[{index}]") for index, handle in enumerate(handles))

    def _wanted(self, message: cache_pb2.KvSlotRequest, index: int) -> SlotsWanted:
        path = f"requests[{index}].kv_cache"
        require(message, "kv_cache", f"requests[{index}].")
        return SlotsWanted(self._named(message.kv_cache, path), message.target_length, message.admission_target_length)

    def _named(self, message: types_pb2.KvCacheHandle, path: str) -> Handle:
        cache_id, limit = message.cache_id, self._fields.limits.max_cache_id_chars
        if len(cache_id) > limit:
            raise InvalidRequest(f"{path}.cache_id", f"has {len(cache_id)} characters, the limit is {limit}")
        return Handle(cache_id, message.length, message.lineage)


def page_token(handle_id: str) -> str:
    """Return the opaque token of the page after ``handle_id``; empty if that is empty."""
    return base64.urlsafe_b64encode(f"1{handle_id}".encode()).decode() if handle_id else ""


def _after_handle_id(token: str) -> str:
    if not token:
        return ""
    try:
        text = base64.b64decode(token, altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, UnicodeError, ValueError):
        text = ""
    if len(text) != 17 or text[0] != "1" or not set(text[1:]) <= set("0123456789abcdef"):
        raise InvalidRequest("page_token", "is not a next_page_token of this server")
    return text[1:]
