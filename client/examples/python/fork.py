"""Prefill a prompt, decode it on a stream, fork it, decode both branches in the same frames, release.

The stubs alone, without the client library: ``python client/examples/python/fork.py [TARGET]``.
"""

import queue
import sys
import uuid

import grpc

from ferrule.v1 import (
    cache_pb2,
    executor_pb2,
    executor_pb2_grpc,
    policy_pb2,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
    types_pb2,
)

GREEDY = policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax())
OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.keepalive_time_ms", 20_000)]


class Branch:
    """The newest handle of a sequence, its tokens, the last of which is not in the cache yet, and how one is chosen."""

    def __init__(
        self, handle: types_pb2.KvCacheHandle, tokens: list[int], policy: policy_pb2.LogitsReturnPolicy
    ) -> None:
        self.handle, self.tokens, self.policy = handle, tokens, policy

    def item(self, seq: int) -> executor_pb2.StreamItem:
        """Return what moves it by a token."""
        decode = executor_pb2.DecodeInput(input_ids=self.tokens[-1:], kv_cache=self.handle, logits_policy=self.policy)
        return executor_pb2.StreamItem(seq=seq, decode=decode)


def owner(handle: types_pb2.KvCacheHandle) -> tuple[tuple[str, str]]:
    """Say which server has a handle, for the proxy on the way."""
    return (("ferrule-instance", handle.cache_id.partition(".")[0]),)


def main() -> None:
    """Print what both branches say."""
    channel = grpc.insecure_channel((sys.argv[1:] or ["127.0.0.1:50051"])[0], options=OPTIONS)
    executor = executor_pb2_grpc.ModelExecutorServiceStub(channel)
    tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    ids = tokenizer.Encode(tokenizer_pb2.EncodeRequest(text="def read_file(path):"), timeout=30).token_ids
    prompt = executor_pb2.PrefillInput(input_ids=ids, logits_policy=GREEDY, request_id=str(uuid.uuid4()))
    output = executor.Prefill(executor_pb2.PrefillRequest(input=prompt), timeout=30).output
    trunk = Branch(output.kv_cache, list(output.outputs.tokens), GREEDY)
    to_owner = owner(trunk.handle)
    frames: queue.SimpleQueue[executor_pb2.StreamDecodeRequest | None] = queue.SimpleQueue()
    replies = executor.StreamDecode(iter(frames.get, None), metadata=to_owner)

    def step(branches: list[Branch]) -> None:
        """Move every branch by the token that was chosen for it, in one frame, and have the next one chosen."""
        frames.put(executor_pb2.StreamDecodeRequest(items=[branch.item(seq) for seq, branch in enumerate(branches)]))
        missing = len(branches)
        while missing:
            for result in next(replies).results:
                if result.HasField("error"):
                    raise RuntimeError(result.error.message)  # the other items of the frame went on
                branches[result.seq].handle = result.decode.kv_cache
                branches[result.seq].tokens.extend(result.decode.outputs.tokens)
                missing -= 1

    for _ in range(4):
        step([trunk])
    fork = cache_pb2.ForkCacheRequest(kv_cache=trunk.handle, count=2)
    handles = executor.ForkCache(fork, timeout=30, metadata=to_owner).kv_caches
    policies = [policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(temperature=0.8, seed=seed)) for seed in (0, 1)]
    branches = [Branch(handle, list(trunk.tokens), policy) for handle, policy in zip(handles, policies, strict=True)]
    for _ in range(8):
        step(branches)
    for branch in branches:
        request = tokenizer_pb2.TokenizerServiceDecodeRequest(token_ids=branch.tokens)
        sys.stdout.write(f"{tokenizer.Decode(request, timeout=30).text}\n--\n")
    frames.put(None)
    release = cache_pb2.ReleaseCacheRequest(kv_caches=[trunk.handle, *handles])
    results = executor.ReleaseCache(release, timeout=30, metadata=to_owner).results
    sys.stdout.write(f"released {sum(result.released for result in results)}\n")
    channel.close()


if __name__ == "__main__":
    main()
