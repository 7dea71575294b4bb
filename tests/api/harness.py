"""A real server on a thread of its own, and clients with real channels: what the tests of the wire ring stand on."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import queue
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc, policy_pb2, tokenizer_pb2_grpc, types_pb2
from ferrule_server.addresses import ListenAddress
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.requests.inputs import InputReader
from ferrule_server.api.rpc.observe import Observer
from ferrule_server.api.rpc.state import ServerState, Serving, state_of
from ferrule_server.api.security.auth import Access, OpenAccess, TokenAccess
from ferrule_server.api.security.tls import TlsFiles
from ferrule_server.api.security.token_file import TokenFile
from ferrule_server.api.serve import ApiServer
from ferrule_server.engine.assembly.assemble import Setup
from ferrule_server.engine.engine import Engine
from ferrule_server.engine.masks import MaskRegistry
from ferrule_server.engine.settings import EngineSettings
from ferrule_server.executor.base import Executor
from ferrule_server.executor.reference import PagedReferenceExecutor
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.sequence_store import SequenceStore
from ferrule_server.log_format import tell_hang_ups_quietly
from ferrule_server.quotas import UNLIMITED
from ferrule_server.text.chat_template import ChatTemplate
from ferrule_server.text.tokenizer import Tokenizer

T = TypeVar("T")

tell_hang_ups_quietly()  # as every server does

EPOCH = "feedc0ffee00"
INSTANCE = "test"
GREEDY = policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax())
FULL = policy_pb2.LogitsReturnPolicy(full_logits=policy_pb2.FullLogits())
NOTHING = policy_pb2.LogitsReturnPolicy()
PROMPT = tuple(range(1, 20))


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a client reads from an error of ours."""

    code: grpc.StatusCode
    reason: str
    message: str
    metadata: dict[str, str]
    fields: tuple[str, ...] = ()
    retry_after_s: float | None = None


def read_status(status: status_pb2.Status) -> Refusal:
    """Return a google.rpc.Status as a client reads it; it must have exactly one ErrorInfo of our domain."""
    info, bad_request, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), None
    num_infos = 0
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            num_infos += detail.Unpack(info)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            detail.Unpack(bad_request)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
    assert num_infos == 1
    assert info.domain == "ferrule"
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    return Refusal(
        code,
        info.reason,
        status.message,
        dict(info.metadata),
        tuple(violation.field for violation in bad_request.field_violations),
        None if retry is None else retry.retry_delay.ToNanoseconds() / 1e9,
    )


def refusal_of(error: grpc.RpcError) -> Refusal:
    """Return the error of a unary call or of a stream as a client reads it."""
    status = rpc_status.from_call(error)
    assert status is not None, f"no google.rpc.Status: {error}"
    assert len(status.SerializeToString()) <= 4096
    return read_status(status)


@contextmanager
def refused() -> Iterator[list[Refusal]]:
    """The block must end with an error of ours, which is in the list afterwards."""
    caught: list[Refusal] = []
    try:
        yield caught
    except grpc.RpcError as error:
        caught.append(refusal_of(error))
    else:
        raise AssertionError("the call succeeded")


@functools.cache
def _server_loop() -> asyncio.AbstractEventLoop:
    """Return the one loop of all servers: grpc.aio has one poller per process and logs noise when loops share it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="test-servers", daemon=True).start()
    return loop


class FakeClock:
    """Monotonic seconds that can be moved ahead."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return time.monotonic() + self.offset_s


@dataclass
class RunningServer:
    """A server in this process. Enter it to start, leave it to drain and stop.

    Attributes:
        executor: Owned from now on; the paged reference by default.
        settings: By default prompts are not cut to the time of a step, which differs from machine to machine.
        is_loaded: False leaves the server in its STARTING phase.
        access: Everybody may do everything, unless told otherwise.
        clock: What leases are told on. epoch: name of this run.
        has_prefix_cache: Prompts find the blocks of released sequences again.
        is_deterministic: The capabilities say so.
        observers: Are told of every call.
    """

    executor: Executor = field(default_factory=lambda: PagedReferenceExecutor(kv_memory_bytes=4 << 20))
    limits: ApiLimits = field(default_factory=ApiLimits)
    settings: EngineSettings = field(default_factory=lambda: EngineSettings(max_step_time_s=60.0))
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    is_loaded: bool = True
    has_reflection: bool = False
    access: Access = field(default_factory=lambda: OpenAccess(is_admin=True))
    tls: TlsFiles | None = None
    listen: ListenAddress = field(default_factory=lambda: ListenAddress("127.0.0.1", 0))
    clock: FakeClock = field(default_factory=FakeClock)
    epoch: str = EPOCH
    has_prefix_cache: bool = True
    is_deterministic: bool = False
    observers: Sequence[Observer] = ()

    def __enter__(self) -> RunningServer:
        self.loop = _server_loop()
        self.state = ServerState(INSTANCE, self.epoch, "0.0.0", self.limits, self.access.limits_of)
        self.run(self._start())
        self.channel = grpc.insecure_channel(
            self.address.target,
            options=[("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
        )
        self.stub = executor_pb2_grpc.ModelExecutorServiceStub(self.channel)
        self.text = tokenizer_pb2_grpc.TokenizerServiceStub(self.channel)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.channel.close()
        self.run(self.server.drain(0.0))
        self.engine.close()
        self.run(self.server.stop())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=20)

    async def _start(self) -> None:
        self.server = ApiServer(self.state, self.access, has_reflection=self.has_reflection, observers=self.observers)
        self.address = self.server.bind(self.listen, self.tls)
        info = self.executor.info
        self.store = SequenceStore(
            BlockPool(info.num_blocks, info.block_size),
            instance=INSTANCE,
            epoch=self.epoch,
            max_context=info.model.max_context,
            max_ttl_s=self.limits.max_ttl_s,
            clock=self.clock,
            limits_of=self.access.limits_of,
            has_prefix_cache=self.has_prefix_cache,
        )
        self.engine = Engine(
            Setup(
                self.executor,
                self.store,
                self.settings,
                self.loop.call_soon_threadsafe,
                later=self.loop.call_later,
                limits_of=self.access.limits_of,
                shares=self.state.shares,
            )
        )
        self.engine.start()
        await self.server.start()
        if self.is_loaded:
            await self.make_ready()

    async def make_ready(self) -> None:
        """Leave the STARTING phase."""
        inputs = InputReader(
            self.executor.info.model,
            self.limits,
            max_step_rows=self.settings.max_step_rows,
            masks=MaskRegistry(self.access.limits_of),
            tokenizer=self.tokenizer,
            is_durable=self.engine.is_durable,
        )
        serving = Serving(
            self.engine,
            inputs,
            self.chat_template,
            self.has_prefix_cache,
            self.is_deterministic,
            state_of(self.executor),
        )
        await self.server.ready(serving)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody owns."""
        return self.engine.snapshot().free_blocks

    # ---- calls ------------------------------------------------------------------------------------------------------

    def prefill(
        self,
        input_ids: Sequence[int] = PROMPT,
        policy: policy_pb2.LogitsReturnPolicy = GREEDY,
        **fields: Any,  # of PrefillInput
    ) -> executor_pb2.PrefillOutput:
        """Prefill and return the output."""
        message = executor_pb2.PrefillInput(input_ids=input_ids, logits_policy=policy, **fields)
        return self.stub.Prefill(executor_pb2.PrefillRequest(input=message), timeout=20).output

    def decode(
        self,
        handle: types_pb2.KvCacheHandle,
        *input_ids: int,
        policy: policy_pb2.LogitsReturnPolicy = GREEDY,
        **fields: Any,  # of DecodeInput
    ) -> executor_pb2.DecodeOutput:
        """Decode and return the output."""
        message = executor_pb2.DecodeInput(input_ids=input_ids, kv_cache=handle, logits_policy=policy, **fields)
        return self.stub.Decode(executor_pb2.DecodeRequest(input=message), timeout=20).output

    def fork(self, handle: types_pb2.KvCacheHandle, count: int = 1) -> list[types_pb2.KvCacheHandle]:
        """Fork and return the branches."""
        request = cache_pb2.ForkCacheRequest(kv_cache=handle, count=count)
        return list(self.stub.ForkCache(request, timeout=20).kv_caches)

    def truncate(self, handle: types_pb2.KvCacheHandle, new_length: int) -> cache_pb2.TruncateKvResponse:
        """Truncate and return the response."""
        request = cache_pb2.TruncateKvRequest(kv_cache=handle, new_length=new_length)
        return self.stub.TruncateKv(request, timeout=20)

    def release(self, *handles: types_pb2.KvCacheHandle) -> cache_pb2.ReleaseCacheResponse:
        """Release and return the response."""
        return self.stub.ReleaseCache(cache_pb2.ReleaseCacheRequest(kv_caches=handles), timeout=20)

    def info(self, handle: types_pb2.KvCacheHandle, **fields: bool) -> cache_pb2.CacheInfo:
        """Return what is known about a sequence."""
        request = cache_pb2.GetCacheInfoRequest(kv_cache=handle, **fields)
        return self.stub.GetCacheInfo(request, timeout=20).info

    def raw_unary(self, method: str, message: bytes) -> bytes:
        """Call a method by its path below the package, with a message as bytes."""
        call: Any = self.channel.unary_unary(f"/ferrule.v1.{method}")  # no serializers: bytes in, bytes out
        reply: bytes = call(message, timeout=10)
        return reply

    def raw_stream(self, *frames: bytes) -> Iterator[bytes]:
        """Send StreamDecode frames as bytes, half-close, and return the frames that come back."""
        call: Any = self.channel.stream_stream("/ferrule.v1.ModelExecutorService/StreamDecode")
        replies: Iterator[bytes] = call(iter(frames), timeout=10)
        return replies

    def open_stream(self) -> StreamClient:
        """Open a StreamDecode call."""
        return StreamClient(self.stub)


def token_access(folder: Path, lines: dict[str, str]) -> TokenAccess:
    """Return access by a token file that is made in a folder: for each token the rest of its line."""
    path = folder / "tokens"
    path.touch(mode=0o600)
    path.write_text("".join(f"{hashlib.sha256(token.encode()).hexdigest()} {line}\n" for token, line in lines.items()))
    return TokenAccess(TokenFile(path, UNLIMITED))


class StreamClient:
    """A StreamDecode call that is written to and read from frame by frame."""

    def __init__(
        self,
        stub: executor_pb2_grpc.ModelExecutorServiceStub,
        timeout_s: float = 300.0,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._frames: queue.SimpleQueue[executor_pb2.StreamDecodeRequest | None] = queue.SimpleQueue()
        self.call = stub.StreamDecode(iter(self._frames.get, None), timeout=timeout_s, metadata=metadata)

    def send(
        self,
        *items: executor_pb2.DecodeInput | executor_pb2.VerifyInput | executor_pb2.UnifiedBatchItem | None,
        release: Sequence[types_pb2.KvCacheHandle] = (),
        first_seq: int = 0,
    ) -> None:
        """Send one frame; items are numbered from ``first_seq`` on, None is an item without input."""
        frame = executor_pb2.StreamDecodeRequest(release=release)
        for seq, item in enumerate(items, start=first_seq):
            sent = frame.items.add(seq=seq)
            if isinstance(item, executor_pb2.DecodeInput):
                sent.decode.CopyFrom(item)
            elif isinstance(item, executor_pb2.VerifyInput):
                sent.verify.CopyFrom(item)
            elif isinstance(item, executor_pb2.UnifiedBatchItem):
                sent.unified.CopyFrom(item)
        self._frames.put(frame)

    def read(self) -> executor_pb2.StreamDecodeResponse:
        """Return the next frame."""
        return next(self.call)

    def half_close(self) -> None:
        """Send nothing more."""
        self._frames.put(None)

    def rest(self) -> list[executor_pb2.StreamDecodeResponse]:
        """Half-close and return every frame up to the end."""
        self.half_close()
        return list(self.call)


def decode_item(
    handle: types_pb2.KvCacheHandle,
    *input_ids: int,
    policy: policy_pb2.LogitsReturnPolicy = GREEDY,
    **fields: Any,  # of DecodeInput
) -> executor_pb2.DecodeInput:
    """Return a decode item of a stream."""
    return executor_pb2.DecodeInput(input_ids=input_ids, kv_cache=handle, logits_policy=policy, **fields)


def wait_until(holds: Any, timeout_s: float = 60.0) -> None:  # any callable
    """Wait until ``holds()`` is true."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


def is_parked(server: RunningServer) -> bool:
    """Whether the one stream there is has its window closed, and has had for a moment: gRPC takes no more of it."""
    (stream,) = server.state.streams
    window = stream._job.window  # type: ignore[attr-defined]
    taken_bytes = window.taken_bytes
    time.sleep(0.1)
    return not window.is_open and window.taken_bytes == taken_bytes and server.engine.snapshot().num_running == 0


DEMO_FOLDER = Path(__file__).parents[2] / "server" / "ferrule_server" / "demo_model"
