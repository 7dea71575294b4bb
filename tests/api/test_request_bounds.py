"""Sizes of requests: each method's largest legal request is within its bound, and bounds are not much larger."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from ferrule.v1 import admin_pb2, executor_pb2, policy_pb2, tokenizer_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.receiving.bounds import (
    SLACK_BYTES,
    WHOLE,
    ModelSizes,
    element_lengths,
    length_of,
    lengths,
    request_bound,
)

FILES = (executor_pb2, tokenizer_pb2, admin_pb2, health_pb2, reflection_pb2)
METHODS: dict[str, MethodDescriptor] = {
    method.full_name: method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
LIMITS = ApiLimits(max_fork_count=8, max_handles_per_request=16, max_items_per_frame=3, max_draft_tokens=3)
MODEL = ModelSizes(vocab_size=300, max_context=200, max_step_rows=4)
LENGTHS, ELEMENT_LENGTHS = lengths(LIMITS, MODEL), element_lengths(LIMITS, MODEL)
_LARGEST: dict[int, Any] = {
    FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1,
    FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1,
    FieldDescriptor.CPPTYPE_INT32: -1,
    FieldDescriptor.CPPTYPE_INT64: -1,
    FieldDescriptor.CPPTYPE_FLOAT: 1.0,
    FieldDescriptor.CPPTYPE_DOUBLE: 1.0,
    FieldDescriptor.CPPTYPE_BOOL: True,
    FieldDescriptor.CPPTYPE_ENUM: 2**31 - 1,
}


def _largest(descriptor: Descriptor) -> Message:
    """Return a message with every field at its largest, of a oneof the last one."""
    message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        _fill(message, field)
    return message


def _fill(message: Message, field: Any) -> None:
    name = f"{field.containing_type.name}.{field.name}"
    if not field.is_repeated:
        value = getattr(message, field.name)
        if field.message_type is not None:
            value.CopyFrom(_largest(field.message_type))
        else:
            setattr(message, field.name, _scalar(field, length_of(field, LENGTHS) if _is_text(field) else None))
        return
    count = length_of(field, LENGTHS)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, field.name).update((2**32 - 1 - index, 1.0) for index in range(count))
    elif name == "GenerateRequest.stop_sequences":
        tokens = policy_pb2.TokenIdList(token_ids=[2**32 - 1] * LIMITS.max_stop_tokens)
        getattr(message, field.name).extend(tokens for _ in range(count))
    elif field.message_type is not None:
        one = _largest(field.message_type)
        getattr(message, field.name).extend(one for _ in range(count))
    else:
        one = _scalar(field, ELEMENT_LENGTHS.get(name))
        getattr(message, field.name).extend(one for _ in range(count))


def _is_text(field: Any) -> bool:
    return field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def _scalar(field: Any, length: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return "x" * length
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes(length)
    return _LARGEST[field.cpp_type]


def _unpacked(message: Message) -> int:
    """Return the size of an encoding that packs no list: one tag more for each entry."""
    size = 0
    for field, value in message.ListFields():
        if field.message_type is not None:
            is_map = field.message_type.GetOptions().map_entry
            each = () if is_map else value if field.is_repeated else (value,)
            size += sum(_unpacked(one) for one in each)
        elif field.is_repeated and field.cpp_type != FieldDescriptor.CPPTYPE_STRING:
            size += len(value) * (1 if field.number < 16 else 2)
    return size


@pytest.mark.parametrize("name", METHODS)
def test_the_largest_legal_request_of_each_method_is_within_its_bound(name: str) -> None:
    """Packed and unpacked; and the bound is no more than a few times that, or it would bound nothing."""
    request_type = METHODS[name].input_type
    bound = request_bound(request_type, LIMITS, MODEL)
    if request_type.name in WHOLE:
        assert bound >= LIMITS.max_text_bytes
        return
    largest = _largest(request_type)
    size = largest.ByteSize() + _unpacked(largest)
    assert size <= bound
    assert bound <= 5 * size + SLACK_BYTES  # of a oneof every member counts


@pytest.mark.parametrize("sizes", [ModelSizes(256, 512, 512), ModelSizes(152_000, 131_072, 2048)])
@pytest.mark.parametrize("name", METHODS)
def test_every_list_of_every_request_has_a_bound(name: str, sizes: ModelSizes) -> None:
    """A new field without a row fails here, and not when the first request comes."""
    limits = ApiLimits()
    assert SLACK_BYTES <= request_bound(METHODS[name].input_type, limits, sizes) <= limits.max_request_bytes


def test_every_row_names_a_field() -> None:
    """What is left of a field that is gone would bound nothing."""
    fields: set[Any] = {
        field for method in METHODS.values() for each in _within(method.input_type) for field in each.fields
    }
    known = {f"{field.containing_type.name}.{field.name}" for field in fields}
    shared = {name for name in LENGTHS if "." not in name}
    assert set(LENGTHS) - shared <= known
    for name in shared:
        assert sum(field.name == name for field in fields) > 1, name
    assert set(ELEMENT_LENGTHS) <= set(LENGTHS)


def _within(descriptor: Descriptor) -> list[Descriptor]:
    """Return a message type and those in it."""
    return [
        descriptor,
        *(each for field in descriptor.fields if field.message_type for each in _within(field.message_type)),
    ]


def _carries(descriptor: Any) -> bool:
    """Return whether distributions or masks may be in a message."""
    if descriptor.name in {"TokenMask", "RegisterTokenMaskRequest", "SparseProbs", "Tensor"}:
        return True
    return any(field.message_type is not None and _carries(field.message_type) for field in descriptor.fields)


@pytest.mark.parametrize("name", METHODS)
def test_only_distributions_and_masks_make_a_request_longer_than_a_text(name: str) -> None:
    """Others are parsed in one go."""
    bound = request_bound(METHODS[name].input_type, ApiLimits(), ModelSizes(152_000, 131_072, 512))
    assert bound <= (1 << 20) + 2 * SLACK_BYTES or _carries(METHODS[name].input_type)
