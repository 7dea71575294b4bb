"""Messages that have the attributes of records: every field is filled, and no error on the way is hidden."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from google.protobuf.message import Message

from ferrule.v1 import admin_pb2, cache_pb2, info_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.responses import describe, outputs, view
from ferrule_server.engine.host_calls import PrincipalSeen
from ferrule_server.engine.jobs import CacheInfo
from ferrule_server.executor.base import ExecutorInfo, ExecutorState, ModelDescription
from ferrule_server.kv.metrics import KvMetrics
from ferrule_server.kv.reserved_slots import SlotAllocation, SlotReservation
from ferrule_server.model.config import ModelConfig


@pytest.mark.parametrize(
    ("message", "records", "writers"),
    [
        (info_pb2.ModelInfo, [ExecutorInfo, ModelDescription, ModelConfig], [describe.model_info]),
        (info_pb2.ExecutorCapabilities, [ApiLimits], [describe.capabilities]),
        (info_pb2.MemoryUsage, [ExecutorState], [describe._memory_usage, describe._fill_executor]),
        (cache_pb2.CacheMetrics, [KvMetrics], [describe.cache_metrics]),
        (cache_pb2.CacheSummary, [CacheInfo], [outputs.cache_summary, outputs.list_response]),
        (cache_pb2.KvSlotReservation, [SlotReservation], [outputs.slot_reservation]),
        (cache_pb2.KvSlotAllocation, [SlotAllocation], [outputs.slot_reservation]),
        (admin_pb2.SequenceView, [CacheInfo], [view._sequence]),
        (admin_pb2.PrincipalView, [PrincipalSeen], [view._principal]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_field_comes_from_a_record_or_is_written_by_name(
    message: type[Message], records: Sequence[type], writers: Iterable[Callable[..., Any]]
) -> None:
    """An attribute that is renamed leaves its field without a source, which nobody else would notice."""
    same = {
        name
        for record in records
        for name in describe.shared_names(message, record)  # type: ignore[arg-type]  # as in same_fields
    }
    written = {name for writer in writers for name in _names_written(writer)}
    assert set(message.DESCRIPTOR.fields_by_name) - same - written == set()


def test_an_error_inside_of_a_property_is_not_hidden() -> None:
    """A field that cannot be computed is a fault, not an empty field."""

    class Info:
        @property
        def numerics_fingerprint(self) -> bytes:
            raise AttributeError("fingerprint")

    with pytest.raises(AttributeError, match="fingerprint"):
        describe.same_fields(info_pb2.ModelInfo, Info())


def _names_written(writer: Callable[..., Any]) -> set[str]:
    """Return the names of keyword arguments, keys of dictionaries, attributes that are assigned or filled by a call."""
    names = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(writer)))):
        if isinstance(node, ast.keyword) and node.arg is not None:
            names.add(node.arg)
        elif isinstance(node, ast.Dict):
            names |= {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
        elif isinstance(node, ast.Assign):
            names |= {target.attr for target in node.targets if isinstance(target, ast.Attribute)}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "").startswith("fill_"):
            names |= {argument.attr for argument in node.args if isinstance(argument, ast.Attribute)}
    return names
