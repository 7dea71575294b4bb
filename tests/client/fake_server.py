"""A small server that does as it is told: sequences in a dict, bytes as tokens, failures by script."""

from __future__ import annotations

import codecs
import functools
import hashlib
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from ferrule.v1 import (
    cache_pb2,
    executor_pb2,
    executor_pb2_grpc,
    info_pb2,
    policy_pb2,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
    types_pb2,
)
from ferrule_server.text.drawn_text import StopCut

EOS = 256
VOCAB_SIZE = 257


@dataclass(frozen=True)
class Failure:
    """How one call fails.

    Attributes:
        code: Status code.
        message: Its message.
        reason: Reason of the ErrorInfo; empty: an error of gRPC's own, without details.
        after: True: the work is done first and only the reply is lost.
        retry_after_s: Seconds that its RetryInfo asks for, if it has one.
        metadata: That of the ErrorInfo.
    """

    code: grpc.StatusCode
    message: str = "it broke"
    reason: str = ""
    after: bool = False
    retry_after_s: float | None = None
    metadata: tuple[tuple[str, str], ...] = ()

    @property
    def status(self) -> status_pb2.Status:
        """The failure as a status with details."""
        status = status_of(self.code, self.reason, self.message, **dict(self.metadata))
        if self.retry_after_s is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromNanoseconds(int(1e9 * self.retry_after_s))
            status.details.add().Pack(retry)
        return status


def status_of(code: grpc.StatusCode, reason: str, message: str = "text", **metadata: str) -> status_pb2.Status:
    """Return a status with one ErrorInfo, as the server makes them."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="ferrule", metadata=metadata))
    return status_pb2.Status(code=code.value[0], message=message, details=[detail])


GONE = status_of(grpc.StatusCode.NOT_FOUND, "HANDLE_UNKNOWN", "no such handle", handle_id="0123")
"""What a call on a sequence that is not there is answered."""


class FakeServer(executor_pb2_grpc.ModelExecutorServiceServicer, tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Serves on a free port of this machine while its ``with`` lasts.

    Attributes:
        text: The token after a sequence of n tokens is ``text[n % len(text)]``.
        begin: Tokens that stand before a text.
        failures: What the next calls of an RPC fail with, in order; those of "item" are answers to items of a stream,
            those of "token" end a generation at its next frame, those of "append" a branch of one.
        failures_after_frames: Frames that generations send before the failures of "token" begin.
        metadata: What the last call carried besides its message.
        routes: RPC and ``ferrule-instance`` of each call, None where it named no instance.
        instance: Name in the handles that are made from now on.
        only: The one instance that calls may name, as a server has it; empty: any, as behind a proxy.
        unreachable: Instances that calls cannot reach, as if a proxy said so.
        calls: Number of calls of each RPC, failed ones included.
        frames: Items of every frame that came on a stream.
        sequences: Tokens of every sequence by cache_id.
        ttl_s: Lease that KeepAlive grants.
        delay_s: Seconds that a stream waits before it answers a frame, and a generation before each token.
        tokens_per_frame: Tokens that a generation puts into one frame.
        num_drawn: Tokens that generations have drawn.
        generates: Requests of all generations.
        masks: Packed masks by fingerprint.
        has_request_ids: True: what one request id creates is created once.
        is_durable: True: the capabilities say that handles survive the server.
        is_loading: True: the status says that weights are being read.
        granted_ttl_s: Lease that creations are told to have got; None: they are told nothing, as by older servers.
        lineage: Fingerprint of every handle; another one stands for another model.
        prompts: What was prefilled into new sequences, in order.
        max_handles: Most handles that one request may hold; None: any number.
        names_limit: False: a refusal of too many handles does not say how many it may be, as by older servers.
        advertised: ``max_handles_per_request`` of the capabilities; 0: not there, as in older servers.
        ended: Handles to release, in each request or frame that was accepted.
    """

    def __init__(self, text: list[int] | None = None) -> None:
        self.text = text or list(b"the quick brown fox ")
        self.begin = b""
        self.failures: dict[str, list[Failure]] = defaultdict(list)
        self.failures_after_frames: dict[str, int] = {}
        self.metadata: dict[str, str | bytes] = {}
        self.routes: list[tuple[str, str | bytes | None]] = []
        self.instance = "fake"
        self.only = ""
        self.unreachable: set[str | bytes | None] = set()
        self.calls: Counter[str] = Counter()
        self.frames: list[list[executor_pb2.StreamItem]] = []
        self.sequences: dict[str, list[int]] = {}
        self.kept: list[int] = []
        self.ttl_s = 60.0
        self.delay_s = 0.0
        self.max_length = 10_000
        self.has_request_ids = False
        self.is_durable = False
        self.is_loading = False
        self.granted_ttl_s: float | None = None
        self.lineage = b"l" * 16
        self.prompts: list[executor_pb2.PrefillInput] = []
        self.max_handles: int | None = None
        self.names_limit = True
        self.advertised = 0
        self.ended: list[int] = []
        self.tokens_per_frame = 1
        self.num_drawn = 0
        self.generates: list[executor_pb2.GenerateRequest] = []
        self.masks: dict[bytes, bytes] = {}
        self._made: dict[str, list[types_pb2.KvCacheHandle]] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(8),
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 1 << 20)],
        )
        executor_pb2_grpc.add_ModelExecutorServiceServicer_to_server(self, self._server)
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.target = f"127.0.0.1:{self.port}"

    def __enter__(self) -> FakeServer:
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop(None).wait()

    def _run(self, rpc: str, context: grpc.ServicerContext, work: Callable[[], object]) -> object:
        """Count the call, fail it if that is its turn, else do the work."""
        self.calls[rpc] += 1
        self.metadata = dict(context.invocation_metadata())
        self.routes.append((rpc, self.metadata.get("ferrule-instance")))
        if self.routes[-1][1] in self.unreachable:
            context.abort(grpc.StatusCode.UNAVAILABLE, NO_OWNER)
        if self.only and self.routes[-1][1] not in (None, self.only):
            asked = str(self.routes[-1][1])
            refusal = status_of(grpc.StatusCode.ABORTED, "WRONG_INSTANCE", instance=asked, answered_by=self.only)
            context.abort_with_status(rpc_status.to_status(refusal))
        failure = self.failures[rpc].pop(0) if self.failures[rpc] else None
        if failure is not None and not failure.after:
            self._abort(context, failure)
        result = work()
        if failure is not None:
            self._abort(context, failure)
        return result

    @staticmethod
    def _abort(context: grpc.ServicerContext, failure: Failure) -> None:
        if failure.reason:
            context.abort_with_status(rpc_status.to_status(failure.status))
        context.abort(failure.code, failure.message)

    def _check_length(self, field: str, handles: Sequence[object], context: grpc.ServicerContext) -> None:
        """Refuse a list with too many handles, as the server does."""
        if self.max_handles is not None and len(handles) > self.max_handles:
            told = {"limit": str(self.max_handles)} if self.names_limit else {}
            refusal = status_of(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", field=field, **told)
            context.abort_with_status(rpc_status.to_status(refusal))

    def _handle(self, cache_id: str, length: int | None = None) -> types_pb2.KvCacheHandle:
        return types_pb2.KvCacheHandle(
            cache_id=cache_id,
            length=len(self.sequences[cache_id]) if length is None else length,
            lineage=self.lineage,
            instance=cache_id.split(".", maxsplit=1)[0],
            handle_id=hashlib.sha256(cache_id.encode()).hexdigest()[:16],
        )

    def lose_all(self) -> None:
        """Forget every sequence, as a new run of the server has."""
        self.sequences.clear()
        self._made.clear()

    def _create(self, tokens: list[int], request_id: str = "", count: int = 1) -> list[types_pb2.KvCacheHandle]:
        """Return the handles of new sequences, or of those that this request id has made before."""
        if self.has_request_ids and request_id in self._made:
            return self._made[request_id]
        ids = [f"{self.instance}.epoch.{next(self._ids):022d}" for _ in range(count)]
        self.sequences.update((cache_id, list(tokens)) for cache_id in ids)
        return self._made.setdefault(request_id or ids[0], [self._handle(cache_id) for cache_id in ids])

    def _find(self, handle: types_pb2.KvCacheHandle, context: grpc.ServicerContext) -> list[int]:
        """Return the tokens of a sequence, or end the call as the contract says."""
        if handle.cache_id not in self.sequences:
            context.abort_with_status(rpc_status.to_status(GONE))
        return self.sequences[handle.cache_id]

    @staticmethod
    def _check_fresh(handle: types_pb2.KvCacheHandle, tokens: list[int], context: grpc.ServicerContext) -> None:
        """Refuse a handle that is beyond the end of its sequence."""
        if handle.length > len(tokens):
            context.abort_with_status(rpc_status.to_status(status_of(grpc.StatusCode.ABORTED, "HANDLE_STALE")))

    def _grant(self, reply: executor_pb2.PrefillOutput | cache_pb2.ForkCacheResponse) -> None:
        if self.granted_ttl_s is not None:
            reply.ttl.FromNanoseconds(int(1e9 * self.granted_ttl_s))

    def _outputs(self, length: int, policy: policy_pb2.LogitsReturnPolicy) -> policy_pb2.Outputs | None:
        if not policy.ByteSize():
            return None
        outputs = policy_pb2.Outputs(num_rows=1)
        if policy.WhichOneof("selection"):
            outputs.tokens.append(self.text[length % len(self.text)])
        if policy.sample.HasField("seed"):
            outputs.seed = policy.sample.seed
        return outputs

    def _decode(
        self, item: executor_pb2.DecodeInput | executor_pb2.PrefillInput | executor_pb2.GenerateRequest
    ) -> executor_pb2.DecodeOutput | status_pb2.Status:
        """Append by the contract's append rule, without its finer points."""
        tokens, start = self.sequences.get(item.kv_cache.cache_id), item.kv_cache.length
        new = list(item.input_ids)
        if tokens is None:
            return GONE
        if start + len(new) > self.max_length:
            return status_of(grpc.StatusCode.OUT_OF_RANGE, "CONTEXT_EXCEEDED", "the context is full")
        replayed = bool(new) and tokens[start : start + len(new)] == new
        behind = bool(new) and start != len(tokens) and not replayed
        if start > len(tokens):
            return status_of(grpc.StatusCode.ABORTED, "HANDLE_STALE", "stale", tip_length=str(len(tokens)))
        if behind and item.on_stale == types_pb2.STALE_POLICY_FORK:
            (handle,) = self._create(tokens[:start] + new, item.request_id)
            return executor_pb2.DecodeOutput(kv_cache=handle, outputs=self._outputs(handle.length, item.logits_policy))
        if behind and item.on_stale == types_pb2.STALE_POLICY_REWIND:
            del tokens[start:]
        elif behind:
            return status_of(grpc.StatusCode.ABORTED, "HANDLE_STALE", "stale", tip_length=str(len(tokens)))
        if not replayed:
            tokens.extend(new)
        handle = self._handle(item.kv_cache.cache_id, start + len(new))
        outputs = self._outputs(handle.length, item.logits_policy)
        return executor_pb2.DecodeOutput(kv_cache=handle, outputs=outputs, replayed=replayed)

    def GetModelInfo(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        info = info_pb2.ModelInfo(
            model_id="fake", vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], max_sequence_length=self.max_length
        )
        reply = executor_pb2.GetModelInfoResponse(info=info)
        return self._run("GetModelInfo", context, lambda: reply)

    def GetCapabilities(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        capabilities = info_pb2.ExecutorCapabilities(
            features=[info_pb2.FEATURE_FORWARD_VERIFY, info_pb2.FEATURE_TOKENIZER]
            + [info_pb2.FEATURE_REQUEST_ID] * self.has_request_ids
            + [info_pb2.FEATURE_DURABLE_HANDLES] * self.is_durable,
            max_handles_per_request=self.advertised,
            max_fork_count=256,
        )
        reply = executor_pb2.GetCapabilitiesResponse(capabilities=capabilities)
        return self._run("GetCapabilities", context, lambda: reply)

    def GetCacheInfo(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        tokens = self._find(request.kv_cache, context)
        info = cache_pb2.CacheInfo(kv_cache=self._handle(request.kv_cache.cache_id), token_ids=tokens)
        return self._run("GetCacheInfo", context, lambda: cache_pb2.GetCacheInfoResponse(info=info))

    def TruncateKv(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        def work() -> cache_pb2.TruncateKvResponse:
            tokens = self._find(request.kv_cache, context)
            if request.new_length != len(tokens):  # else it may be the last truncate once more
                self._check_fresh(request.kv_cache, tokens, context)
            del tokens[request.new_length :]
            return cache_pb2.TruncateKvResponse(kv_cache=self._handle(request.kv_cache.cache_id))

        return self._run("TruncateKv", context, work)

    def GetStatus(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        status = info_pb2.ExecutorStatus(state=info_pb2.EXECUTOR_STATE_READY, is_ready=True)
        if self.is_loading:
            state = info_pb2.EXECUTOR_STATE_STARTING
            status = info_pb2.ExecutorStatus(state=state, load_stage="reading weights", load_progress=0.52)
        return self._run("GetStatus", context, lambda: executor_pb2.GetStatusResponse(status=status))

    def Prefill(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        def work() -> executor_pb2.PrefillResponse:
            if request.input.HasField("kv_cache"):
                with self._lock:
                    result = self._decode(request.input)
                if isinstance(result, status_pb2.Status):
                    context.abort_with_status(rpc_status.to_status(result))
                    raise AssertionError("abort raises")
                output = executor_pb2.PrefillOutput(
                    kv_cache=result.kv_cache, outputs=result.outputs, replayed=result.replayed
                )
            else:
                self.prompts.append(request.input)
                (handle,) = self._create(request.input.input_ids, request.input.request_id)
                outputs = self._outputs(handle.length, request.input.logits_policy)
                output = executor_pb2.PrefillOutput(kv_cache=handle, outputs=outputs)
            self._grant(output)
            return executor_pb2.PrefillResponse(output=output)

        return self._run("Prefill", context, work)

    def Decode(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        def work() -> executor_pb2.DecodeResponse:
            with self._lock:
                result = self._decode(request.input)
            if isinstance(result, status_pb2.Status):
                context.abort_with_status(rpc_status.to_status(result))
            return executor_pb2.DecodeResponse(output=result)

        return self._run("Decode", context, work)

    def StreamDecode(self, request_iterator, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        self.calls["StreamDecode"] += 1
        for request in request_iterator:
            self._check_length("release", request.release, context)
            yield self._run("frame", context, functools.partial(self._frame, request))

    def _frame(self, request: executor_pb2.StreamDecodeRequest) -> executor_pb2.StreamDecodeResponse:
        self.frames.append(list(request.items))
        self.ended.append(len(request.release))
        reply = executor_pb2.StreamDecodeResponse(free_blocks=7)
        for handle in request.release:
            released = self.sequences.pop(handle.cache_id, None) is not None
            reply.releases.add(handle_id="x", released=released)
        results = []
        for item in request.items:
            with self._lock:
                refused = self.failures["item"].pop(0).status if self.failures["item"] else None
                result = refused or self._decode(item.decode)
            if isinstance(result, status_pb2.Status):
                results.append(executor_pb2.StreamResult(seq=item.seq, error=result))
            else:
                results.append(executor_pb2.StreamResult(seq=item.seq, decode=result))
        reply.results.extend(reversed(results))  # their order is the server's to choose
        time.sleep(self.delay_s)
        return reply

    def Generate(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        self.generates.append(request)
        branches: list[_Branch] = []
        self._run("Generate", context, lambda: branches.extend(self._begin(request, context)))
        while live := [branch for branch in branches if not branch.has_ended]:
            left = self.failures_after_frames.get("token", 0)
            self.failures_after_frames["token"] = left - 1
            failure = self.failures["token"].pop(0) if left <= 0 and self.failures["token"] else None
            if failure is not None and not failure.after:
                self._abort(context, failure)
            frame = executor_pb2.GenerateResponse(request_id=request.request_id)
            for branch in live:
                branch.fill(frame.outputs.add())
            if failure is not None:
                self._abort(context, failure)
            yield frame

    def _begin(self, request: executor_pb2.GenerateRequest, context: grpc.ServicerContext) -> list[_Branch]:
        """Run the prompt of a generation and return its branches."""
        policy = request.logits_policy
        mask = (policy.sample if policy.WhichOneof("selection") == "sample" else policy.greedy_argmax).token_mask
        if mask.fingerprint and mask.fingerprint not in self.masks:
            context.abort_with_status(rpc_status.to_status(NO_MASK))
        is_replayed = is_at_tip = False
        if request.HasField("kv_cache"):
            with self._lock:
                result = self._decode(request)
            if isinstance(result, status_pb2.Status):
                context.abort_with_status(rpc_status.to_status(result))
                raise AssertionError("abort raises")
            handles = [result.kv_cache]
            is_replayed, is_at_tip = result.replayed, bool(request.input_ids) and not result.replayed
        else:
            handles = self._create(list(request.input_ids), request.request_id)
        prompt = self.sequences[handles[0].cache_id][: handles[0].length]
        handles += self._create(prompt, f"{request.request_id}/forks", request.n - 1) if request.n > 1 else []
        branches = [_Branch(self, request, index, handle, context) for index, handle in enumerate(handles)]
        branches[0].is_replayed = is_replayed
        if is_at_tip:
            branches[0].come_to_tip()
        return branches

    def RegisterTokenMask(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        def work() -> cache_pb2.RegisterTokenMaskResponse:
            names = [hashlib.blake2b(mask, digest_size=16).digest() for mask in request.masks]
            self.masks.update(zip(names, request.masks, strict=True))
            return cache_pb2.RegisterTokenMaskResponse(fingerprints=names)

        return self._run("RegisterTokenMask", context, work)

    def ForkCache(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        def work() -> cache_pb2.ForkCacheResponse:
            tokens = self._find(request.kv_cache, context)
            self._check_fresh(request.kv_cache, tokens, context)
            tokens = tokens[: request.length or request.kv_cache.length]
            reply = cache_pb2.ForkCacheResponse(kv_caches=self._create(tokens, request.request_id, request.count))
            self._grant(reply)
            return reply

        return self._run("ForkCache", context, work)

    def ForwardVerify(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        def work() -> executor_pb2.ForwardVerifyResponse:
            item = request.input
            certain, drafts = list(item.input_ids), list(item.draft_ids)
            tokens = self._find(item.kv_cache, context)
            tokens.extend(certain)
            held = []
            for draft in drafts:
                if draft != self.text[len(tokens) % len(self.text)]:
                    break
                held.append(draft)
                tokens.append(draft)
            next_token = self.text[len(tokens) % len(self.text)]
            return executor_pb2.ForwardVerifyResponse(
                output=executor_pb2.VerifyOutput(
                    kv_cache=self._handle(item.kv_cache.cache_id),
                    outputs=policy_pb2.Outputs(num_rows=len(held) + 1, tokens=[*held, next_token]),
                    accepted_count=len(held),
                    accepted_indices=range(1, len(held) + 1),
                    next_token=next_token,
                )
            )

        return self._run("ForwardVerify", context, work)

    def KeepAlive(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        def work() -> cache_pb2.KeepAliveResponse:
            self._check_length("kv_caches", request.kv_caches, context)
            reply = cache_pb2.KeepAliveResponse()
            self.kept.append(len(request.kv_caches))
            for handle in request.kv_caches:
                result = reply.results.add()
                if handle.cache_id in self.sequences:
                    result.lease.ttl.FromNanoseconds(int(1e9 * self.ttl_s))
                else:
                    result.error.CopyFrom(status_of(grpc.StatusCode.NOT_FOUND, "HANDLE_EXPIRED"))
            return reply

        return self._run("KeepAlive", context, work)

    def ReleaseCache(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        def work() -> cache_pb2.ReleaseCacheResponse:
            self._check_length("kv_caches", request.kv_caches, context)
            self.ended.append(len(request.kv_caches))
            gone = [self.sequences.pop(handle.cache_id, None) for handle in request.kv_caches]
            results = [cache_pb2.ReleaseResult(handle_id="x", released=one is not None) for one in gone]
            return cache_pb2.ReleaseCacheResponse(results=results)

        return self._run("ReleaseCache", context, work)

    def Tokenize(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        begin = self.begin if request.add_begin_tokens or request.add_special_tokens else b""
        reply = tokenizer_pb2.TokenizeResponse(token_ids=begin + request.text.encode())
        return self._run("Tokenize", context, lambda: reply)

    def Detokenize(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        text, ends_mid_character = bytes_to_text(list(request.token_ids))
        reply = tokenizer_pb2.DetokenizeResponse(text=text, ends_mid_character=ends_mid_character)
        return self._run("Detokenize", context, lambda: reply)

    def ApplyChatTemplate(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        text = "".join(f"{one.role}: {one.content}\n" for one in request.messages)
        reply = tokenizer_pb2.ApplyChatTemplateResponse(text=text, token_ids=text.encode())
        return self._run("ApplyChatTemplate", context, lambda: reply)


NO_OWNER = "upstream connect error or disconnect/reset before headers. reset reason: remote connection failure"
"""What Envoy says for a server that takes no connections."""

NO_MASK = status_of(grpc.StatusCode.NOT_FOUND, "MASK_UNKNOWN", "no such mask")
"""What a policy with a fingerprint is answered that is not registered."""


class _Branch:
    """One branch of a generation: draws until something ends it."""

    def __init__(
        self,
        server: FakeServer,
        request: executor_pb2.GenerateRequest,
        index: int,
        handle: types_pb2.KvCacheHandle,
        context: grpc.ServicerContext,
    ) -> None:
        self._server, self._request, self._context = server, request, context
        self._index, self._handle = index, handle
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._on_stale = request.on_stale
        self._tokens: list[int] = []
        self._text, self._num_told = "", 0
        self._cut = StopCut(() if request.include_stop_text else request.stop_strings)
        self._held = list(server.sequences.get(handle.cache_id, [])[: handle.length])
        self.has_ended = False
        self.is_replayed = False

    def come_to_tip(self) -> None:
        """Nothing is committed before it any more, so from here on it drops nothing."""
        self._on_stale = types_pb2.STALE_POLICY_FAIL

    def fill(self, output: executor_pb2.GenerateOutput) -> None:
        """Draw the tokens of one frame."""
        output.index = self._index
        output.replayed, self.is_replayed = self.is_replayed, False
        for _ in range(self._server.tokens_per_frame):
            time.sleep(self._server.delay_s)
            error = self._append()
            if error is not None:
                self._end(output, _reason_of(error), error)
            else:
                self._draw(output)
            if self.has_ended or not self._context.is_active():
                break
        output.resume_from.CopyFrom(self._handle)

    def _append(self) -> status_pb2.Status | None:
        """Append the token drawn last."""
        if not self._tokens:
            return None
        if self._server.failures["append"]:
            return self._server.failures["append"].pop(0).status
        with self._server._lock:
            if self._on_stale != types_pb2.STALE_POLICY_FAIL and not self._context.is_active():  # it drops nothing
                return status_of(grpc.StatusCode.CANCELLED, "CANCELLED")
            held = self._server.sequences.get(self._handle.cache_id)
            if held is not None and held[: self._handle.length] != self._held:  # rewritten by a later call
                return status_of(grpc.StatusCode.ABORTED, "HANDLE_STALE", "stale", tip_length=str(len(held)))
            result = self._server._decode(
                executor_pb2.DecodeInput(input_ids=self._tokens[-1:], kv_cache=self._handle, on_stale=self._on_stale)
            )
        if isinstance(result, status_pb2.Status):
            return result
        if not result.replayed:
            self.come_to_tip()
        self._handle = result.kv_cache
        self._held.append(self._tokens[-1])
        return None

    def _draw(self, output: executor_pb2.GenerateOutput) -> None:
        text = self._server.text
        token = text[self._handle.length % len(text)]
        self._tokens.append(token)
        self._server.num_drawn += 1
        output.outputs.num_rows += 1
        output.outputs.tokens.append(token)
        request = self._request
        if request.return_text or request.stop_strings:
            self._text += self._decoder.decode(bytes([token]) if token < 256 else b"")
        if token == EOS and not request.ignore_eos:
            self._end(output, executor_pb2.FINISH_REASON_EOS)
        elif token in request.stop_token_ids:
            self._end(output, executor_pb2.FINISH_REASON_STOP_TOKEN)
        elif any(stop in self._text for stop in request.stop_strings) or any(
            self._tokens[-len(run.token_ids) :] == list(run.token_ids) for run in request.stop_sequences
        ):
            self._end(output, executor_pb2.FINISH_REASON_STOP_SEQUENCE)
        elif len(self._tokens) == request.max_tokens:
            self._end(output, executor_pb2.FINISH_REASON_MAX_TOKENS)
        else:
            self._tell(output, self._cut.num_certain(self._text))

    def _tell(self, output: executor_pb2.GenerateOutput, num_certain: int) -> None:
        """Put the certain part of the text into the frame, if it is wanted."""
        if self._request.return_text:
            output.text += self._text[self._num_told : num_certain]
            self._num_told = max(self._num_told, num_certain)

    def _end(
        self,
        output: executor_pb2.GenerateOutput,
        reason: executor_pb2.FinishReason,
        error: status_pb2.Status | None = None,
    ) -> None:
        self.has_ended = True
        output.finish_reason = reason
        if reason == executor_pb2.FINISH_REASON_ERROR:
            output.error.CopyFrom(error)
        stop = self._cut.end(self._text) if reason == executor_pb2.FINISH_REASON_STOP_SEQUENCE else None
        self._text += self._decoder.decode(b"", final=True)
        self._tell(output, len(self._text) if stop is None else stop)


def _reason_of(error: status_pb2.Status) -> executor_pb2.FinishReason:
    if error.code == grpc.StatusCode.OUT_OF_RANGE.value[0]:
        return executor_pb2.FINISH_REASON_CONTEXT_FULL
    if error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]:
        return executor_pb2.FINISH_REASON_KV_BLOCKS_EXHAUSTED
    return executor_pb2.FINISH_REASON_ERROR


def bytes_to_text(token_ids: list[int]) -> tuple[str, bool]:
    """Return the text of byte tokens, without the end token, and whether it ends inside a character."""
    data = bytes(token for token in token_ids if token < 256)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return data.decode("utf-8", "replace"), bool(decoder.getstate()[0])


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Return when the condition holds; fail when it does not in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def threads_named(name: str) -> Iterator[threading.Thread]:
    """Yield the live threads of that name."""
    return (thread for thread in threading.enumerate() if thread.name == name)
