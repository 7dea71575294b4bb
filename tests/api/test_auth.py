"""Who may call: tokens on every method, principals that do not see each other, roles, and streams whose token goes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import os
import secrets
import string
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from ferrule.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    executor_pb2,
    policy_pb2,
    tokenizer_pb2,
    types_pb2,
)
from ferrule_server.api import serve
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.responses.describe import caller_info
from ferrule_server.api.rpc.handlers import OPEN_SERVICES, ROLES
from ferrule_server.api.security.auth import CertificateAccess, OpenAccess, TokenAccess, access_of
from ferrule_server.api.security.principal import Caller
from ferrule_server.api.security.token_file import TokenFile
from ferrule_server.arguments import parse_config
from ferrule_server.config import ServerConfig
from ferrule_server.kv import sequence_store
from ferrule_server.kv.handle import handle_id_of
from ferrule_server.quotas import QuotaLimits
from tests.api.harness import (
    EPOCH,
    GREEDY,
    INSTANCE,
    PROMPT,
    FakeClock,
    RunningServer,
    StreamClient,
    decode_item,
    refusal_of,
    refused,
    wait_until,
)
from tests.fakes import FakeExecutor

pytestmark = pytest.mark.usefixtures("no_pauses")

ALICE, ALICE_TOO, BOB, OPS, GONE = (f"ferrule_{name}" for name in ("alice", "alice2", "bob", "ops", "gone"))
LINES = {
    ALICE: "alice handles=40 retained=1MiB",
    ALICE_TOO: "alice",
    BOB: "bob",
    OPS: "ops admin",
}
SERVICES = [
    executor_pb2.DESCRIPTOR.services_by_name["ModelExecutorService"],
    tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"],
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
]
METHODS: dict[str, MethodDescriptor] = {
    f"{service.full_name}/{method.name}": method for service in SERVICES for method in service.methods
}
HANDLE = types_pb2.KvCacheHandle.DESCRIPTOR


def _write(path: Path, *tokens: str) -> None:
    """Put a token file with these tokens at the path, by renaming."""
    beside = path.with_name("beside")
    beside.write_text("".join(f"{hashlib.sha256(one.encode()).hexdigest()} {LINES[one]}\n" for one in tokens))
    beside.chmod(0o600)
    beside.rename(path)


def _bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


class Secured:
    """A server that wants tokens, and its file."""

    def __init__(self, path: Path, **fields: Any) -> None:  # of RunningServer
        self.path = path
        _write(path, *LINES)
        self.tokens = TokenFile(path, QuotaLimits(kv_tokens=100_000))
        self.clock = FakeClock()
        access = TokenAccess(self.tokens)
        self.server = RunningServer(access=access, has_reflection=True, clock=self.clock, **fields)

    def as_(self, token: str) -> As:
        """Return a client that sends a token."""
        return As(self.server, token)


class As:
    """Calls of one principal; ``reply`` gives what came back in a form that two answers can be compared in."""

    def __init__(self, server: RunningServer, token: str) -> None:
        self._server = server
        self._metadata = _bearer(token)

    def call(self, path: str, *requests: bytes, timeout: float = 20) -> list[bytes]:
        """Send requests to a method of any kind and return its replies."""
        method: Any = self._server.channel.stream_stream(f"/{path}")  # no serializers: bytes in, bytes out
        return list(method(iter(requests), timeout=timeout, metadata=self._metadata))

    def prefill(self, *input_ids: int, **fields: Any) -> types_pb2.KvCacheHandle:  # of PrefillInput
        """Prefill and return the handle."""
        message = executor_pb2.PrefillInput(input_ids=input_ids or PROMPT, logits_policy=GREEDY, **fields)
        request = executor_pb2.PrefillRequest(input=message)
        return self._server.stub.Prefill(request, metadata=self._metadata, timeout=20).output.kv_cache

    def decode(self, handle: types_pb2.KvCacheHandle, *input_ids: int) -> types_pb2.KvCacheHandle:
        """Decode and return the handle."""
        request = executor_pb2.DecodeRequest(input=decode_item(handle, *input_ids))
        return self._server.stub.Decode(request, metadata=self._metadata, timeout=20).output.kv_cache

    def release(self, *handles: types_pb2.KvCacheHandle) -> list[bool]:
        """Release, and return which were."""
        request = cache_pb2.ReleaseCacheRequest(kv_caches=handles)
        reply = self._server.stub.ReleaseCache(request, metadata=self._metadata, timeout=20)
        return [result.released for result in reply.results]

    def listed(self) -> set[str]:
        """Return the handle ids of ListCaches."""
        reply = self._server.stub.ListCaches(cache_pb2.ListCachesRequest(), metadata=self._metadata, timeout=20)
        return {cache.handle_id for cache in reply.caches}

    def reply(self, path: str, request: Message, *handles: types_pb2.KvCacheHandle) -> tuple[object, ...]:
        """Return everything that came back, with the ids of ``handles`` blotted out."""
        try:
            replies = self.call(path, request.SerializeToString())
        except grpc.RpcError as error:
            return tuple(_blotted(text, handles) for text in _texts(error))
        kind = GetMessageClass(METHODS[path].output_type)
        return tuple(_blotted(_shown(kind.FromString(reply)), handles) for reply in replies)


def _texts(error: grpc.RpcError) -> list[str]:
    """Return everything that an error tells."""
    status, call = rpc_status.from_call(error), cast("grpc.Call", error)
    assert status is not None, error
    return [str(call.code()), call.details() or "", str(status), *map(str, _details(status))]


def _details(status: status_pb2.Status) -> list[bytes]:
    return [detail.value for detail in status.details]


def _shown(reply: Message) -> str:
    """Return a reply as text, errors of items unpacked."""
    text = str(reply)
    for result in getattr(reply, "results", ()):
        if "error" in result.DESCRIPTOR.fields_by_name and result.HasField("error"):
            text += "".join(map(str, _details(result.error)))
    return text


def _blotted(text: str, handles: tuple[types_pb2.KvCacheHandle, ...]) -> str:
    for handle in handles:
        text = text.replace(handle_id_of(handle.cache_id), "<the handle that was sent>")
    return text


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A server for all tests that leave its token file as it is."""
    secured = Secured(tmp_path_factory.mktemp("secured") / "tokens")
    with secured.server:
        yield secured


@pytest.fixture
def changing(tmp_path: Path) -> Iterator[Secured]:
    """A server whose token file a test may change."""
    secured = Secured(tmp_path / "tokens")
    with secured.server:
        yield secured


# ---- credentials ----------------------------------------------------------------------------------------------------

NO_CREDENTIALS: dict[str, tuple[tuple[tuple[str, str], ...], str]] = {
    "none": ((), "TOKEN_MISSING"),
    "unknown": (_bearer("ferrule_wrong"), "TOKEN_INVALID"),
    "withdrawn": (_bearer(GONE), "TOKEN_INVALID"),
    "empty": (_bearer(""), "TOKEN_INVALID"),
    "digest": (_bearer(hashlib.sha256(ALICE.encode()).hexdigest()), "TOKEN_INVALID"),
    "another scheme": ((("authorization", f"Basic {ALICE}"),), "TOKEN_INVALID"),
    "no scheme": ((("authorization", ALICE),), "TOKEN_INVALID"),
    "twice": ((*_bearer(ALICE), *_bearer(BOB)), "TOKEN_INVALID"),
    "elsewhere": ((("x-authorization", f"Bearer {ALICE}"),), "TOKEN_MISSING"),
}


@pytest.mark.parametrize("name", NO_CREDENTIALS)
@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.rpartition("/")[2])
def test_every_method_wants_a_token(secured: Secured, path: str, name: str) -> None:
    """Served or not, unary or stream, before the request is looked at: here it is no message."""
    metadata, reason = NO_CREDENTIALS[name]
    method: Any = secured.server.channel.stream_stream(f"/{path}")
    with refused() as refusals:
        list(method(iter([b"\xff\xff"]), timeout=20, metadata=metadata))
    assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNAUTHENTICATED, reason)
    assert refusals[0].metadata == {}


def test_a_stream_is_refused_at_its_open(secured: Secured) -> None:
    """Before it has sent anything."""
    stream = secured.server.open_stream()
    with refused() as refusals:
        stream.read()
    assert refusals[0].reason == "TOKEN_MISSING"
    stream.half_close()


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_token_lets_in(secured: Secured, scheme: str) -> None:
    """The name of the scheme has no case."""
    metadata = (("authorization", f"{scheme}  {ALICE} "),)
    status = secured.server.stub.GetStatus(executor_pb2.GetStatusRequest(), metadata=metadata, timeout=20).status
    assert status.is_ready


def test_credentials_come_before_the_state_of_the_server(tmp_path: Path) -> None:
    """A stranger does not even learn that it starts."""
    secured = Secured(tmp_path / "tokens", is_loaded=False)
    with secured.server as server:
        for metadata, reason in (((), "TOKEN_MISSING"), (_bearer(ALICE), "STARTING")):
            with refused() as refusals:
                server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), metadata=metadata, timeout=20)
            assert refusals[0].reason == reason


def test_health_needs_no_token(secured: Secured) -> None:
    """Probes have none; what is no message is refused all the same."""
    health = health_pb2_grpc.HealthStub(secured.server.channel)
    request = health_pb2.HealthCheckRequest()
    assert health.Check(request, timeout=20).status == health_pb2.HealthCheckResponse.SERVING
    watch = health.Watch(request, timeout=20)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    call: Any = secured.server.channel.unary_unary("/grpc.health.v1.Health/Check")
    with refused() as refusals:
        call(b"\xff\xff", timeout=20)
    assert refusals[0].reason == "INVALID_FIELD"
    assert set(OPEN_SERVICES) == {"grpc.health.v1.Health"}


def test_every_service_is_open_or_wants_credentials(secured: Secured) -> None:
    """Reflection lists what the tests above walk; what is no message is refused."""
    stub = reflection_pb2_grpc.ServerReflectionStub(secured.server.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (reply,) = stub.ServerReflectionInfo(iter([request]), metadata=_bearer(BOB), timeout=20)
    names = {service.name for service in reply.list_services_response.service}
    assert names == {service.full_name for service in SERVICES} | OPEN_SERVICES
    with refused() as refusals:
        secured.as_(BOB).call("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", b"\xff\xff")
    assert refusals[0].reason == "INVALID_FIELD"


def test_every_quota_is_told_to_whom_it_binds() -> None:
    """Each under its name on the wire; a limit that is not there is 0."""
    told = caller_info(Caller("alice"), QuotaLimits(1, 2, 3, 4, 5, 6, 7, 8, 9)).quotas
    assert [value for _, value in told.ListFields()] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert len(told.DESCRIPTOR.fields) == len(told.ListFields())
    assert not caller_info(Caller("alice"), QuotaLimits()).quotas.ListFields()


def test_nothing_that_is_logged_or_answered_holds_a_token(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    """Refused or served, at the most talkative level; who is refused is named by address."""
    time.sleep(1.1)  # the lines of a second may have been written for the test before
    caplog.set_level(logging.DEBUG)
    answers = [
        secured.as_(token).reply(path, GetMessageClass(METHODS[path].input_type)())
        for token in (ALICE, "ferrule_wrong")
        for path in METHODS
    ]
    assert not any("ferrule_alice" in str(answer) or "ferrule_wrong" in str(answer) for answer in answers)
    assert "ferrule_" not in caplog.text.replace("ferrule_server", "")
    assert hashlib.sha256(ALICE.encode()).hexdigest() not in caplog.text
    assert "reason=TOKEN_INVALID peer=ipv4:127.0.0.1:" in caplog.text.replace("%3A", ":")
    assert "principal=alice" in caplog.text


# ---- roles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", list(SERVICES[2].methods), ids=lambda method: method.name)
def test_administration_needs_the_role(changing: Secured, method: MethodDescriptor) -> None:
    """Whoever lacks it changes nothing."""
    path = f"{method.containing_service.full_name}/{method.name}"
    with refused() as refusals:
        changing.as_(ALICE).call(path, b"")
    assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE_REQUIRED")
    changing.as_(ALICE).prefill()
    changing.as_(OPS).call(path, b"")


def test_roles_are_of_services_that_exist() -> None:
    """A misspelt name would protect nothing."""
    assert set(ROLES) <= {service.full_name for service in SERVICES}


@pytest.mark.parametrize("is_admin", [True, False])
def test_without_credentials_everybody_is_local(is_admin: bool) -> None:
    """An administrator only where no other machine can reach the server; a token sent all the same does not matter."""
    access = OpenAccess(is_admin=is_admin, quotas=QuotaLimits(handles=3))
    with RunningServer(access=access) as server:
        caller = server.stub.GetCapabilities(
            executor_pb2.GetCapabilitiesRequest(), metadata=_bearer("whatever"), timeout=20
        ).capabilities.caller
        assert (caller.principal, caller.is_admin, caller.quotas.handles) == ("local", is_admin, 3)
        admin = admin_pb2_grpc.AdminServiceStub(server.channel)
        if is_admin:
            admin.Warmup(admin_pb2.WarmupRequest(), timeout=20)
            return
        with refused() as refusals:
            admin.Warmup(admin_pb2.WarmupRequest(), timeout=20)
        assert refusals[0].reason == "ROLE_REQUIRED"


# ---- handles of others ----------------------------------------------------------------------------------------------


def _handle_paths(descriptor: Descriptor, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every field below a message that takes a handle."""
    for one in descriptor.fields:
        if one.message_type == HANDLE:
            yield (*above, one.name)
        elif one.message_type is not None and one.name not in above:
            yield from _handle_paths(one.message_type, (*above, one.name))


HANDLE_FIELDS = {
    f"{path.rpartition('/')[2]} {'.'.join(fields)}": (path, fields)
    for path, method in METHODS.items()
    for fields in _handle_paths(method.input_type)
}
"""Every way to name a sequence, by descriptor: a new one must get a row below."""

_APPEND = {"input_ids": [5], "logits_policy": GREEDY}
_NEW: dict[str, dict[str, Any]] = {  # of the message that holds the handle, what else makes it a good request
    "Prefill input.kv_cache": _APPEND,
    "BatchPrefill inputs.kv_cache": _APPEND,
    "Decode input.kv_cache": _APPEND,
    "BatchDecode inputs.kv_cache": _APPEND,
    "StreamDecode items.decode.kv_cache": _APPEND,
    "StreamDecode items.verify.kv_cache": _APPEND,
    "StreamDecode items.unified.kv_cache": {"q_tokens": [5], "logits_policy": GREEDY},
    "StreamDecode release": {},
    "UnifiedDecode batch.items.kv_cache": {"q_tokens": [5], "logits_policy": GREEDY},
    "ForwardVerify input.kv_cache": _APPEND,
    "Generate kv_cache": {**_APPEND, "max_tokens": 3},
    "ForkCache kv_cache": {},
    "TruncateKv kv_cache": {"new_length": 1},
    "ReserveKvSlots requests.kv_cache": {"target_length": 40},
    "ReleaseCache kv_caches": {},
    "KeepAlive kv_caches": {},
    "GetCacheInfo kv_cache": {"include_token_ids": True, "include_blocks": True},
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {name: {"plain": fields} for name, fields in _NEW.items()}
for _variants in VARIANTS.values():
    if _variants["plain"] and _variants["plain"].keys() & {"input_ids", "q_tokens"}:
        for _policy in (types_pb2.STALE_POLICY_FORK, types_pb2.STALE_POLICY_REWIND):
            _variants[types_pb2.StalePolicy.Name(_policy)] = {**_variants["plain"], "on_stale": _policy}
for _name in ("ForwardVerify input.kv_cache", "StreamDecode items.verify.kv_cache"):
    VARIANTS[_name]["accepted"] = {**_APPEND, "draft_ids": [6], "acceptance": executor_pb2.ACCEPTANCE_RULE_EXACT}
for _name in ("UnifiedDecode batch.items.kv_cache", "StreamDecode items.unified.kv_cache"):
    VARIANTS[_name]["not final"] = {"q_tokens": [5], "is_final_chunk": False}
VARIANTS["Generate kv_cache"]["branches"] = {**_NEW["Generate kv_cache"], "n": 2, "input_ids": []}


def _request(path: str, fields: tuple[str, ...], handle: types_pb2.KvCacheHandle, more: dict[str, Any]) -> Message:
    """Return a request that has a handle at a path, and ``more`` beside it."""
    request = GetMessageClass(METHODS[path].input_type)()
    message: Any = request
    for name in fields[:-1]:
        below = getattr(message, name)
        message = below.add() if _is_repeated(message, name) else below
    for name, value in more.items():
        _set(message, name, value)
    if _is_repeated(message, fields[-1]):
        getattr(message, fields[-1]).append(handle)
    else:
        getattr(message, fields[-1]).CopyFrom(handle)
    return request


def _is_repeated(message: Message, name: str) -> bool:
    return bool(message.DESCRIPTOR.fields_by_name[name].is_repeated)


def _set(message: Message, name: str, value: object) -> None:
    if isinstance(value, list):
        getattr(message, name).extend(value)
    elif isinstance(value, Message):
        getattr(message, name).CopyFrom(value)
    else:
        setattr(message, name, value)


def test_every_field_that_takes_a_handle_is_tried() -> None:
    """A new RPC or field needs a row in the table."""
    assert set(HANDLE_FIELDS) == set(_NEW)


@pytest.fixture(scope="module")
def theirs(secured: Secured) -> dict[str, types_pb2.KvCacheHandle]:
    """Alice's handles, in every state that a handle can be in."""
    alice = secured.as_(ALICE)
    expired = alice.prefill(cache=executor_pb2.CacheOptions(ttl={"seconds": 5}))
    secured.clock.offset_s += 6
    wait_until(lambda: handle_id_of(expired.cache_id) not in alice.listed())
    live, moved, released = alice.prefill(), alice.prefill(), alice.prefill()
    alice.decode(moved, 7)
    assert alice.release(released) == [True]
    wrong = types_pb2.KvCacheHandle(cache_id=live.cache_id, length=live.length, lineage=bytes(16))
    beyond = types_pb2.KvCacheHandle(cache_id=live.cache_id, length=900, lineage=live.lineage)
    return {
        "live": live,
        "moved": moved,
        "released": released,
        "expired": expired,
        "wrong lineage": wrong,
        "beyond": beyond,
    }


@pytest.mark.parametrize("state", ["live", "moved", "released", "expired", "wrong lineage", "beyond"])
@pytest.mark.parametrize("name", HANDLE_FIELDS)
def test_a_foreign_handle_is_answered_like_an_unknown_one(
    secured: Secured, theirs: dict[str, types_pb2.KvCacheHandle], name: str, state: str
) -> None:
    """Code, reason, message, details, counts: nothing differs but the id that the caller sent itself."""
    (path, fields), foreign = HANDLE_FIELDS[name], theirs[state]
    unknown = types_pb2.KvCacheHandle(
        cache_id=f"{INSTANCE}.{EPOCH}.{secrets.token_urlsafe(16)}", length=foreign.length, lineage=foreign.lineage
    )
    for more in VARIANTS[name].values():
        answers = [
            secured.as_(BOB).reply(path, _request(path, fields, handle, more), foreign, unknown)
            for handle in (foreign, unknown)
        ]
        assert answers[0] == answers[1]


@pytest.mark.parametrize("name", HANDLE_FIELDS)
def test_its_owner_gets_another_answer(secured: Secured, name: str) -> None:
    """So the test above compares answers that could differ; with any of the owner's tokens."""
    path, fields = HANDLE_FIELDS[name]
    answers = []
    for token in (ALICE_TOO, BOB):
        handle = secured.as_(ALICE).prefill()
        answers.append(secured.as_(token).reply(path, _request(path, fields, handle, _NEW[name]), handle))
        secured.as_(ALICE).release(handle)
    assert answers[0] != answers[1]
    assert "FEATURE_UNSUPPORTED" not in str(answers[0])
    assert ("HANDLE_UNKNOWN" in str(answers[0])) is False


def test_a_handle_with_one_character_changed_is_refused(secured: Secured) -> None:
    """Wherever it is changed: nobody comes by a handle but by being given it."""
    alice = secured.as_(ALICE)
    handle = alice.prefill()
    for index, character in enumerate(handle.cache_id):
        for other in ({"A", "z", "0", "_", ".", chr(ord(character) ^ 1)} - {character}) & set(string.printable):
            cache_id = handle.cache_id[:index] + other + handle.cache_id[index + 1 :]
            changed = types_pb2.KvCacheHandle(cache_id=cache_id, length=handle.length, lineage=handle.lineage)
            with refused() as refusals:
                alice.decode(changed, 7)
            expected = {"HANDLE_UNKNOWN", "EPOCH_CHANGED", "WRONG_INSTANCE", "INVALID_FIELD"}
            assert refusals[0].reason in expected, cache_id
    for index in range(len(handle.lineage)):
        lineage = bytearray(handle.lineage)
        lineage[index] ^= 1
        changed = types_pb2.KvCacheHandle(cache_id=handle.cache_id, length=handle.length, lineage=bytes(lineage))
        with refused() as refusals:
            alice.decode(changed, 7)
        assert refusals[0].reason == "HANDLE_STALE"
    assert alice.decode(handle) == handle


def test_ids_are_drawn_from_the_random_numbers_of_the_system(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 bits of them and nothing else; as many ones as zeros, none seen twice."""
    alice, drawn = secured.as_(ALICE), []

    def token_bytes(num_bytes: int) -> bytes:
        drawn.append(os.urandom(num_bytes))
        return drawn[-1]

    monkeypatch.setattr(secrets, "token_bytes", token_bytes)
    handles = [alice.prefill() for _ in range(3)]
    secret_parts = [handle.cache_id.rpartition(".")[2] for handle in handles]
    assert [base64.urlsafe_b64decode(part + "==") for part in secret_parts] == drawn
    monkeypatch.undo()
    assert alice.release(*handles) == [True] * 3
    sample = [sequence_store._new_secret() for _ in range(20_000)]
    assert {len(secret) for secret in sample} == {16}
    assert len(set(sample)) == len(sample)
    num_ones = sum(int.from_bytes(secret).bit_count() for secret in sample)
    num_bits = 128 * len(sample)
    assert abs(num_ones - num_bits / 2) < 5 * (num_bits / 4) ** 0.5  # five standard deviations


def test_foreign_calls_changed_nothing(secured: Secured, theirs: dict[str, types_pb2.KvCacheHandle]) -> None:
    """Alice's sequences are where she left them, whatever Bob tried on them."""
    alice = secured.as_(ALICE)
    for name, (path, fields) in HANDLE_FIELDS.items():
        secured.as_(BOB).reply(path, _request(path, fields, theirs["live"], _NEW[name]))
    request = cache_pb2.GetCacheInfoRequest(kv_cache=theirs["live"], include_token_ids=True)
    info = secured.server.stub.GetCacheInfo(request, metadata=_bearer(ALICE), timeout=20).info
    assert tuple(info.token_ids) == PROMPT
    assert alice.decode(theirs["live"]) == theirs["live"]
    secured.server.store.check_integrity()


def test_a_list_holds_ones_own(secured: Secured) -> None:
    """By whatever token of the principal; pages of one do not reach into the other's."""
    alice, bob = secured.as_(ALICE), secured.as_(BOB)
    hers, his = [alice.prefill() for _ in range(3)], [bob.prefill() for _ in range(2)]
    assert {handle_id_of(handle.cache_id) for handle in hers} <= alice.listed()
    assert secured.as_(ALICE_TOO).listed() == alice.listed()
    assert bob.listed() == {handle_id_of(handle.cache_id) for handle in his}
    assert secured.as_(OPS).listed() == set()
    first = secured.server.stub.ListCaches(
        cache_pb2.ListCachesRequest(page_size=1), metadata=_bearer(ALICE), timeout=20
    )
    second = secured.server.stub.ListCaches(
        cache_pb2.ListCachesRequest(page_size=100, page_token=first.next_page_token), metadata=_bearer(BOB), timeout=20
    )
    assert {cache.handle_id for cache in second.caches} <= bob.listed()
    assert bob.release(*his) == [True, True]
    assert alice.release(*hers) == [True] * 3


def test_masks_and_prompts_of_another_are_not_there(secured: Secured) -> None:
    """A fingerprint is unknown to others as if nobody had it, and a prompt of another is no prefix of one's own."""
    bits, prompt = bytes([1] * 32), range(90, 130)
    stub = secured.server.stub
    masks = cache_pb2.RegisterTokenMaskRequest(masks=[bits])
    (fingerprint,) = stub.RegisterTokenMask(masks, metadata=_bearer(ALICE), timeout=20).fingerprints
    secured.as_(ALICE).release(secured.as_(ALICE).prefill(*prompt))
    found, answers = {}, []
    for token in (ALICE_TOO, BOB):
        message = executor_pb2.PrefillInput(input_ids=prompt, logits_policy=GREEDY)
        output = stub.Prefill(executor_pb2.PrefillRequest(input=message), metadata=_bearer(token), timeout=20).output
        found[token] = output.cached_tokens
        for named in (fingerprint, fingerprint[::-1]):
            policy = policy_pb2.LogitsReturnPolicy(greedy_argmax={"token_mask": {"fingerprint": named}})
            request = executor_pb2.DecodeRequest(input=decode_item(output.kv_cache, policy=policy))
            answers.append(secured.as_(token).reply("ferrule.v1.ModelExecutorService/Decode", request))
        secured.as_(token).release(output.kv_cache)
    assert found == {ALICE_TOO: 32, BOB: 0}
    assert "MASK_UNKNOWN" not in str(answers[0])
    assert all("MASK_UNKNOWN" in str(answer) for answer in answers[1:])
    shown = [
        str(answer).replace(fingerprint.hex(), "<it>").replace(fingerprint[::-1].hex(), "<it>") for answer in answers
    ]
    assert shown[2] == shown[3]


def test_quotas_hold_for_a_principal_and_follow_the_file(changing: Secured) -> None:
    """All its tokens together, nobody else's; a limit that is raised is there at once."""
    alice, handle = changing.as_(ALICE), changing.as_(ALICE).prefill()
    request = cache_pb2.ForkCacheRequest(kv_cache=handle, count=39)
    changing.server.stub.ForkCache(request, metadata=_bearer(ALICE_TOO), timeout=20)
    for client in (alice, changing.as_(ALICE_TOO)):
        with refused() as refusals:
            client.prefill()
        assert (refusals[0].reason, refusals[0].metadata["limit"]) == ("QUOTA_HANDLES", "40")
    changing.as_(BOB).prefill()
    changing.path.write_text(changing.path.read_text().replace("handles=40", "handles=41"))
    changing.tokens.refresh()
    alice.prefill()


# ---- tokens that go -------------------------------------------------------------------------------------------------


def _opened(server: RunningServer, token: str) -> StreamClient:
    return StreamClient(server.stub, metadata=_bearer(token))


def _exchange(stream: StreamClient, handle: types_pb2.KvCacheHandle, token_id: int) -> types_pb2.KvCacheHandle:
    """Append a token and return the new handle."""
    stream.send(decode_item(handle, token_id))
    return stream.read().results[0].decode.kv_cache


def test_a_stream_ends_when_its_token_goes_and_its_sequences_live_on(changing: Secured) -> None:
    """With the next frame, which is not run; another token of the principal goes on where it stopped."""
    handle = changing.as_(ALICE).prefill()
    stream, other = _opened(changing.server, ALICE), _opened(changing.server, ALICE_TOO)
    handle = _exchange(stream, handle, 7)
    _write(changing.path, ALICE_TOO, BOB)
    changing.tokens.refresh()
    with refused() as refusals:
        _exchange(stream, handle, 8)
    assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_INVALID")
    with refused() as refusals:
        changing.as_(ALICE).decode(handle, 8)
    assert refusals[0].reason == "TOKEN_INVALID"
    moved = _exchange(other, handle, 9)
    assert moved.length == handle.length + 1
    stream.half_close()
    other.half_close()


def _endless(server: RunningServer, rpc: str, token: str) -> Any:
    """Return a call that is answered piece by piece, for longer than any test."""
    policy = policy_pb2.LogitsReturnPolicy(greedy_argmax={}, full_logits={})
    if rpc == "Generate":
        request = executor_pb2.GenerateRequest(input_ids=[1, 2, 3], logits_policy=policy)
        return server.stub.Generate(request, metadata=_bearer(token), timeout=60)
    forward = executor_pb2.ForwardRequest(input_ids=range(900), logits_policy=policy)
    return server.stub.Forward(forward, metadata=_bearer(token), timeout=60)


@pytest.mark.parametrize("rpc", ["Generate", "Forward"])
def test_an_answer_piece_by_piece_ends_when_its_token_goes(
    tmp_path: Path, rpc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it runs, or is parked because nobody reads; that of another goes on."""
    monkeypatch.setattr(serve, "_REFRESH_S", 0.01)
    executor = FakeExecutor(vocab_size=16384, num_blocks=1024, max_context=1024, step_time_s=0.002)
    limits = ApiLimits(stream_window_bytes=1 << 20, max_stream_frame_bytes=256 << 10)
    secured = Secured(tmp_path / "tokens", executor=executor, limits=limits)
    with secured.server as server:
        running, parked, other = (_endless(server, rpc, token) for token in (ALICE, ALICE, ALICE_TOO))
        for call in (running, parked, other):
            next(call)
        _write(secured.path, ALICE_TOO)
        for call in (running, parked):
            with refused() as refusals:
                list(call)
            assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_INVALID")
        next(other)
        wait_until(lambda: len(server.state.streams) == 1)
        other.cancel()
        wait_until(lambda: server.engine.snapshot().num_streams == 0)


def test_a_quiet_stream_ends_too_when_its_token_goes(
    changing: Secured, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a frame of the client's; the streams of others go on. A fault on the way is logged and passes."""
    handle = changing.as_(BOB).prefill()
    quiet, other = _opened(changing.server, ALICE), _opened(changing.server, BOB)
    _exchange(quiet, changing.as_(ALICE).prefill(), 7)
    _exchange(other, handle, 7)
    _write(changing.path, BOB)
    faults = [RuntimeError("a bug")]

    def refresh() -> None:
        if faults:
            raise faults.pop()
        changing.tokens.refresh()

    monkeypatch.setattr(changing.server.access, "refresh", refresh)
    monkeypatch.setattr(serve, "_REFRESH_S", 0.01)
    changing.server.run(_restarted(changing.server.server))
    with refused() as refusals:
        next(quiet.call)
    assert "tokens not read" in caplog.text
    assert refusals[0].reason == "TOKEN_INVALID"
    assert _exchange(other, handle, 7) == _exchange(other, handle, 7)
    quiet.half_close()
    other.half_close()


async def _restarted(server: serve.ApiServer) -> None:
    """Look at the token file at the pace set now."""
    assert server._refreshing is not None
    server._refreshing.cancel()
    server._refreshing = asyncio.create_task(server._refresh_access())


def test_a_reflection_stream_ends_when_its_token_goes(changing: Secured) -> None:
    """Every stream there is, not the decoding one alone."""
    requests = threading.Semaphore(1)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(changing.server.channel)
    sent = iter(lambda: request if requests.acquire(timeout=20) else None, None)
    call = stub.ServerReflectionInfo(sent, timeout=20, metadata=_bearer(ALICE))
    next(call)
    _write(changing.path, BOB)
    changing.tokens.refresh()
    requests.release()
    with refused() as refusals:
        next(call)
    assert refusals[0].reason == "TOKEN_INVALID"
    requests.release()


def test_a_running_server_reads_its_tokens_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, within the time it says; new tokens are let in as old ones are refused."""
    monkeypatch.setattr(serve, "_REFRESH_S", 0.01)
    secured = Secured(tmp_path / "tokens")
    _write(secured.path, ALICE)
    with secured.server:
        wait_until(lambda: _reason(secured.as_(BOB)) == "TOKEN_INVALID")
        assert _reason(secured.as_(ALICE)) is None
        _write(secured.path, BOB)
        wait_until(lambda: _reason(secured.as_(BOB)) is None)
        assert _reason(secured.as_(ALICE)) == "TOKEN_INVALID"


def _reason(client: As) -> str | None:
    """Return why a client is refused; None: it is not."""
    try:
        client.listed()
    except grpc.RpcError as error:
        return refusal_of(error).reason
    return None


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "hints"),
    [
        ([], []),
        (["--listen", "unix:/tmp/f.sock"], []),
        (["--listen", "0.0.0.0:1", "--insecure"], ["everybody who can reach 0.0.0.0:1", "prompts and outputs travel"]),
        (["--listen", "0.0.0.0:1", "--token-file", "T"], ["tokens, prompts and outputs travel to and from 0.0.0.0:1"]),
        (["--listen", "[::]:1", "--token-file", "T", "--tls-cert", "C", "--tls-key", "K"], []),
        (["--listen", "[::]:1", "--tls-cert", "C", "--tls-key", "K", "--tls-client-ca", "A"], []),
        (["--listen", "0.0.0.0:1", "--insecure", "--tls-cert", "C", "--tls-key", "K"], ["everybody who can reach"]),
    ],
)
def test_the_log_says_what_is_open_to_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arguments: list[str], hints: list[str]
) -> None:
    """One WARNING for each thing, none on this machine."""
    path = tmp_path / "tokens"
    _write(path, ALICE)
    caplog.set_level(logging.INFO)
    access_of(parse_config([str(path) if argument == "T" else argument for argument in arguments], {}))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == len(hints)
    for warning, hint in zip(warnings, hints, strict=True):
        assert hint in warning
    assert "access credentials=" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ([], OpenAccess),
        (["--token-file", "T"], TokenAccess),
        (["--tls-cert", "C", "--tls-key", "K"], OpenAccess),
        (["--tls-cert", "C", "--tls-key", "K", "--tls-client-ca", "A", "--admins", "ops"], CertificateAccess),
        (["--tls-cert", "C", "--tls-key", "K", "--tls-client-ca", "A", "--token-file", "T"], TokenAccess),
    ],
)
def test_settings_decide_what_is_asked_for(tmp_path: Path, arguments: list[str], kind: type) -> None:
    """With a token file always a token."""
    path = tmp_path / "tokens"
    _write(path, ALICE)
    assert isinstance(
        access_of(parse_config([str(path) if argument == "T" else argument for argument in arguments], {})), kind
    )


def test_a_caller_is_nobody_where_nothing_was_authenticated() -> None:
    """A method that went past the registrar fails instead of acting for everybody."""
    from ferrule_server.api.security.principal import principal_of

    with pytest.raises(LookupError):
        principal_of(cast("Any", None))


def test_a_header_that_is_no_text_leaves_nothing_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """As gRPC itself would log it, value and traceback: a token with one wrong byte."""
    access_of(ServerConfig())
    try:
        b"Bearer ferrule_s\xf6cret".decode()
    except UnicodeDecodeError:
        logging.getLogger("grpc._cython.cygrpc").exception("Invalid encoding on %s", b"Bearer ferrule_s\xf6cret")
    assert "metadata that is not UTF-8" in caplog.text
    assert "ferrule_s" not in caplog.text
    assert "Traceback" not in caplog.text
