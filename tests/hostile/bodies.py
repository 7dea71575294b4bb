"""Serialised requests of attackers: the largest legal ones by the limits that the server publishes, and larger ones."""

from __future__ import annotations

import os
import random
import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.message import Message

from ferrule.v1 import cache_pb2, executor_pb2, info_pb2, policy_pb2, tokenizer_pb2, types_pb2

GREEDY = policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax())
OVERSIZED = 4096
"""Entries of an oversized list, at least: the limit of the server that was attacked first."""
_EXECUTOR = "/ferrule.v1.ModelExecutorService/"
_TOKENIZER = "/ferrule.v1.TokenizerService/"
_SPARE_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class Body:
    """One request as bytes.

    Attributes:
        path: Of the method.
        data: The message.
        vary: Offset, stride and count of places of 8 bytes that are overwritten with a counter before each call.
    """

    path: str
    data: bytes
    vary: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """What requests are made from.

    Attributes:
        limits: What the server publishes.
        vocab_size: Number of token ids.
        max_length: Longest sequence.
        handle: A live handle of the attacker.
        branches: Forks of it, if the attack requires some.
    """

    limits: info_pb2.ExecutorCapabilities
    vocab_size: int
    max_length: int
    handle: types_pb2.KvCacheHandle
    branches: Sequence[types_pb2.KvCacheHandle] = ()

    def unknown(self, count: int, instance: str | None = None) -> list[types_pb2.KvCacheHandle]:
        """Return handles of this server's form that it never gave out, or those of another instance."""
        own_instance, epoch, rest = self.handle.cache_id.split(".")
        start = f"{instance or own_instance}.{epoch}."
        names = (start + secrets.token_urlsafe(len(rest))[: len(rest)] for _ in range(count))
        return [types_pb2.KvCacheHandle(cache_id=name, length=1, lineage=os.urandom(16)) for name in names]

    def sizes(self, limit: int) -> tuple[int, int]:
        """Return the largest legal number of entries, and one that is refused."""
        return limit, max(OVERSIZED, 2 * limit)


Builder = Callable[[Scene], Sequence[Body]]


def _executor(method: str, *messages: Message) -> list[Body]:
    return [Body(_EXECUTOR + method, message.SerializeToString()) for message in messages]


def _repeated(field_number: int, payload: bytes, size: int) -> bytes:
    """Return a repeated message field with equal elements, up to a size."""
    assert len(payload) < 128
    element = bytes([field_number << 3 | 2, len(payload)]) + payload
    return element * (size // len(element))


def _full(scene: Scene) -> int:
    """Return the size of the largest message that the server takes."""
    return scene.limits.max_request_bytes - _SPARE_BYTES


def keep_alive(scene: Scene) -> Sequence[Body]:
    """KeepAlive of unknown handles."""
    sizes = scene.sizes(scene.limits.max_handles_per_request)
    return _executor("KeepAlive", *(cache_pb2.KeepAliveRequest(kv_caches=scene.unknown(count)) for count in sizes))


def release_cache(scene: Scene) -> Sequence[Body]:
    """ReleaseCache of unknown handles."""
    sizes = scene.sizes(scene.limits.max_handles_per_request)
    messages = (cache_pb2.ReleaseCacheRequest(kv_caches=scene.unknown(count)) for count in sizes)
    return _executor("ReleaseCache", *messages)


def reserve_slots(scene: Scene) -> Sequence[Body]:
    """ReserveKvSlots of unknown handles."""

    def request(count: int) -> cache_pb2.ReserveKvSlotsRequest:
        slots = (cache_pb2.KvSlotRequest(kv_cache=each, target_length=64) for each in scene.unknown(count))
        return cache_pb2.ReserveKvSlotsRequest(requests=slots)

    return _executor("ReserveKvSlots", *map(request, scene.sizes(scene.limits.max_handles_per_request)))


def stream_frames(scene: Scene) -> Sequence[Body]:
    """Frames of bad items and of handles to release."""

    def frame(num_items: int, num_handles: int) -> executor_pb2.StreamDecodeRequest:
        items = (executor_pb2.StreamItem(seq=seq, decode=each) for seq, each in enumerate(_decodes(scene, num_items)))
        return executor_pb2.StreamDecodeRequest(items=items, release=scene.unknown(num_handles))

    items = scene.sizes(scene.limits.max_items_per_frame)
    return _executor("StreamDecode", *map(frame, items, scene.sizes(scene.limits.max_handles_per_request)))


def _decodes(scene: Scene, count: int, instance: str | None = None) -> Iterable[executor_pb2.DecodeInput]:
    for handle in scene.unknown(count, instance):
        yield executor_pb2.DecodeInput(kv_cache=handle, input_ids=[1], logits_policy=GREEDY)


def batch_decode(scene: Scene) -> Sequence[Body]:
    """BatchDecode of unknown handles."""
    sizes = scene.sizes(scene.limits.max_batch_size)
    messages = (executor_pb2.BatchDecodeRequest(inputs=_decodes(scene, count)) for count in sizes)
    return _executor("BatchDecode", *messages)


def unified_decode(scene: Scene) -> Sequence[Body]:
    """UnifiedDecode of as many rows as a step holds, each time others, so that none is a repetition."""
    num_rows = min(scene.limits.max_step_rows, scene.max_length - scene.handle.length)

    def request(token_id: int) -> executor_pb2.UnifiedDecodeRequest:
        chunk = executor_pb2.UnifiedBatchItem(
            kv_cache=scene.handle,
            q_tokens=[token_id] * num_rows,
            logits_policy=GREEDY,
            on_stale=types_pb2.STALE_POLICY_REWIND,
        )
        return executor_pb2.UnifiedDecodeRequest(batch=executor_pb2.UnifiedBatch(items=[chunk]))

    return _executor("UnifiedDecode", *map(request, range(1, 65)))


def register_masks(scene: Scene) -> Sequence[Body]:
    """RegisterTokenMask of as many new masks as it takes."""
    count, length = scene.limits.max_masks_per_request, (scene.vocab_size + 7) // 8
    masks = [bytes([255]) * length] * count
    (body,) = _executor("RegisterTokenMask", cache_pb2.RegisterTokenMaskRequest(masks=masks))
    stride = len(body.data) // count
    return [Body(body.path, body.data, (stride - length, stride, count))]


def prefill_16m(scene: Scene) -> Sequence[Body]:
    """Prefill of as many tokens as a message holds."""
    message = executor_pb2.PrefillInput(input_ids=[1] * _full(scene), logits_policy=GREEDY)
    return _executor("Prefill", executor_pb2.PrefillRequest(input=message))


def logit_bias(scene: Scene) -> Sequence[Body]:
    """Decode with 1.2 million biases."""
    num_biases = min(1_200_000, _full(scene) // 13)
    bias = dict.fromkeys(range(num_biases), 1.0)
    policy = policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(logit_bias=bias))
    message = executor_pb2.DecodeInput(kv_cache=scene.handle, input_ids=[1], logits_policy=policy)
    return _executor("Decode", executor_pb2.DecodeRequest(input=message))


def encode_10mb(scene: Scene) -> Sequence[Body]:
    """Tokenize of a text beyond the limit."""
    message = tokenizer_pb2.TokenizeRequest(text="ab " * (10_000_000 // 3))
    return [Body(_TOKENIZER + "Tokenize", message.SerializeToString())]


def encode_longest(scene: Scene) -> Sequence[Body]:
    """Tokenize of the longest text."""
    line = "The quick brown fox jumps over the lazy dog, again and again. "
    text = (line * (scene.limits.max_text_bytes // len(line) + 1))[: scene.limits.max_text_bytes]
    return [Body(_TOKENIZER + "Tokenize", tokenizer_pb2.TokenizeRequest(text=text).SerializeToString())]


def tokenizer_decode(scene: Scene) -> Sequence[Body]:
    """TokenizerService Detokenize of as many ids as it takes."""
    ids = [300 + index % 1000 for index in range(scene.limits.max_text_tokens)]
    message = tokenizer_pb2.DetokenizeRequest(token_ids=ids)
    return [Body(_TOKENIZER + "Detokenize", message.SerializeToString())]


def get_cache_info(scene: Scene) -> Sequence[Body]:
    """GetCacheInfo of unknown handles."""
    messages = (cache_pb2.GetCacheInfoRequest(kv_cache=handle) for handle in scene.unknown(64))
    return _executor("GetCacheInfo", *messages)


def list_caches(scene: Scene) -> Sequence[Body]:
    """ListCaches with the largest page."""
    return _executor("ListCaches", cache_pb2.ListCachesRequest(page_size=1000))


def idle_streams(scene: Scene) -> Sequence[Body]:
    """Streams with one empty frame."""
    return _executor("StreamDecode", executor_pb2.StreamDecodeRequest())


def forward(scene: Scene) -> Sequence[Body]:
    """Forward of 2 000 tokens."""
    num_tokens = min(2000, scene.max_length)
    return _executor("Forward", executor_pb2.ForwardRequest(input_ids=range(num_tokens), logits_policy=GREEDY))


def chat_template(scene: Scene) -> Sequence[Body]:
    """ApplyChatTemplate of a long conversation, of many messages, and of a message full of empty ones."""
    text = "A long message. " * (scene.limits.max_text_bytes // 32)
    long = tokenizer_pb2.ApplyChatTemplateRequest(messages=[{"role": "user", "content": text}])
    many = tokenizer_pb2.ApplyChatTemplateRequest(messages=[{"role": "user", "content": "Hello."}] * 4096)
    empty = _repeated(1, b"", _full(scene))
    return [
        Body(_TOKENIZER + "ApplyChatTemplate", data)
        for data in (long.SerializeToString(), many.SerializeToString(), empty)
    ]


def verify_dense(scene: Scene) -> Sequence[Body]:
    """ForwardVerify with a dense distribution for each draft."""
    count = scene.limits.max_draft_tokens
    dense = types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=[count, scene.vocab_size])
    dense.data = struct.pack("<f", 1.0 / scene.vocab_size) * (count * scene.vocab_size)
    message = executor_pb2.VerifyInput(
        kv_cache=scene.handle,
        input_ids=[7],
        draft_ids=[8] * count,
        logits_policy=policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(seed=1)),
        acceptance=executor_pb2.ACCEPTANCE_RULE_REJECTION,
        draft_probs=executor_pb2.DraftProbs(dense=dense),
        on_stale=types_pb2.STALE_POLICY_REWIND,
    )
    return _executor("ForwardVerify", executor_pb2.ForwardVerifyRequest(input=message))


def status(scene: Scene) -> Sequence[Body]:
    """GetStatus, GetCapabilities and GetModelInfo, all of them empty requests."""
    return [Body(_EXECUTOR + method, b"") for method in ("GetStatus", "GetCapabilities", "GetModelInfo")]


def bad_instance(scene: Scene) -> Sequence[Body]:
    """Calls with handles of another instance."""
    decode = executor_pb2.BatchDecodeRequest(inputs=_decodes(scene, scene.limits.max_batch_size, "elsewhere"))
    one = executor_pb2.DecodeRequest(input=next(iter(_decodes(scene, 1, "elsewhere"))))
    handles = scene.unknown(scene.limits.max_handles_per_request, "elsewhere")
    keep = cache_pb2.KeepAliveRequest(kv_caches=handles)
    return [*_executor("BatchDecode", decode), *_executor("Decode", one), *_executor("KeepAlive", keep)]


def empty_handles(scene: Scene) -> Sequence[Body]:
    """KeepAlive of millions of empty handles, as many as a message holds."""
    return [Body(_EXECUTOR + "KeepAlive", _repeated(1, b"", _full(scene)))]


def _heaviest(scene: Scene, num_top: int) -> policy_pb2.LogitsReturnPolicy:
    """Return a policy that makes choosing cost as much as it can, and returns so many alternatives."""
    count = min(scene.limits.max_logprob_token_ids, scene.vocab_size)
    biases = min(scene.limits.max_logit_biases, scene.vocab_size)
    sample = policy_pb2.Sample(
        temperature=3.0, top_p=0.95, min_p=1e-6, seed=1, logit_bias=dict.fromkeys(range(biases), 0.5)
    )
    sample.repetition_penalty, sample.frequency_penalty, sample.presence_penalty = 2.0, 2.0, 2.0
    return policy_pb2.LogitsReturnPolicy(
        sample=sample, logprobs=True, top_logprobs=num_top, logprob_token_ids=range(count), entropy=True
    )


def generate_outputs(scene: Scene) -> Sequence[Body]:
    """Generate in 56 branches with the largest policy, inside the quotas of handles and slots."""
    policy = _heaviest(scene, min(scene.limits.max_top_logprobs, scene.vocab_size))

    def request(first_id: int) -> executor_pb2.GenerateRequest:
        return executor_pb2.GenerateRequest(
            input_ids=[first_id, 2, 3],
            logits_policy=policy,
            cache=executor_pb2.CacheOptions(ttl=scene.limits.min_ttl),
            max_tokens=256,
            n=56,
            ignore_eos=True,
        )

    return _executor("Generate", *map(request, range(1, 9)))


def forward_outputs(scene: Scene) -> Sequence[Body]:
    """Forward of 2 000 tokens with a draw, logprobs and alternatives for each."""
    policy = policy_pb2.LogitsReturnPolicy(
        sample=policy_pb2.Sample(temperature=3.0, top_k=1000, top_p=0.95, seed=1),
        logprobs=True,
        top_logprobs=64,
        target_logprobs=True,
        entropy=True,
    )
    num_tokens = min(2000, scene.max_length)
    ids = [index % scene.vocab_size for index in range(num_tokens)]
    return _executor("Forward", executor_pb2.ForwardRequest(input_ids=ids, logits_policy=policy))


def prompts(scene: Scene) -> Sequence[Body]:
    """Prefill of 2 000 tokens, each time others, kept as shortly as the server allows."""
    chance, requests = random.Random(7), []
    for _ in range(64):
        ids = [chance.randrange(scene.vocab_size) for _ in range(min(2000, scene.max_length))]
        message = executor_pb2.PrefillInput(input_ids=ids, logits_policy=GREEDY)
        message.cache.ttl.CopyFrom(scene.limits.min_ttl)
        requests.append(executor_pb2.PrefillRequest(input=message))
    return _executor("Prefill", *requests)


def _cohort(scene: Scene, policy: policy_pb2.LogitsReturnPolicy) -> Sequence[Body]:
    """Return BatchDecodes of all branches, each time of another token."""

    def request(token_id: int) -> executor_pb2.BatchDecodeRequest:
        inputs = [
            executor_pb2.DecodeInput(
                kv_cache=branch, input_ids=[token_id], logits_policy=policy, on_stale=types_pb2.STALE_POLICY_REWIND
            )
            for branch in scene.branches
        ]
        return executor_pb2.BatchDecodeRequest(inputs=inputs)

    return _executor("BatchDecode", *map(request, range(1, 33)))


def cohort_greedy(scene: Scene) -> Sequence[Body]:
    """BatchDecode of 512 rows, greedy."""
    return _cohort(scene, GREEDY)


def cohort_drawn(scene: Scene) -> Sequence[Body]:
    """BatchDecode of 512 rows, drawn."""
    return _cohort(scene, policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(seed=1)))


def cohort_hot(scene: Scene) -> Sequence[Body]:
    """BatchDecode of 512 rows, drawn from nearly flat distributions, most of whose tokens are kept."""
    return _cohort(scene, policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(temperature=3.0, top_p=0.95, seed=1)))


def generate(space_id: int, stop_strings: Sequence[str]) -> Sequence[Body]:
    """Return a Generate of 16 branches whose text is one character, again and again."""
    mask = policy_pb2.TokenMask(allowed_ids=policy_pb2.TokenIdList(token_ids=[space_id]))
    request = executor_pb2.GenerateRequest(
        input_ids=[1],
        logits_policy=policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax(token_mask=mask)),
        max_tokens=900,
        n=16,
        stop_strings=stop_strings,
        ignore_eos=True,
        return_text=True,
    )
    return _executor("Generate", request)


def worst_stops(limits: info_pb2.ExecutorCapabilities) -> list[str]:
    """Return stop strings that a naive search looks for in quadratic time, as many and as long as are taken."""
    half, longest = limits.max_stop_tokens // 4, limits.max_stop_bytes
    strings = [" " * (half - 1 - index) + "b" + " " * (half + index) for index in range(limits.max_stops - 1)]
    return [*strings, " " * (longest // 2) + "b" + " " * (longest - longest // 2 - 1)]
