"""Prefill a prompt, decode it on a stream, fork it, decode both branches in the same frames, release."""

import queue
import sys
import uuid

import grpc

from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

channel = grpc.insecure_channel((sys.argv[1:] or ["127.0.0.1:50051"])[0])
executor = executor_pb2_grpc.ModelExecutorServiceStub(channel)
tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
text = tokenizer_pb2.TokenizeRequest(text="def read_file(path):", add_begin_tokens=True)
try:
    ids = tokenizer.Tokenize(text, timeout=30).token_ids
except grpc.RpcError as error:
    sys.exit(f"no answer: {error.details()}")
start = executor_pb2.PrefillInput(input_ids=ids, logits_policy={"greedy_argmax": {}}, request_id=str(uuid.uuid4()))
out = executor.Prefill(executor_pb2.PrefillRequest(input=start), timeout=30).output
owner = (("ferrule-instance", out.kv_cache.instance),)  # for the proxy on the way
sent: queue.SimpleQueue[executor_pb2.StreamDecodeRequest | None] = queue.SimpleQueue()
results = (result for reply in executor.StreamDecode(iter(sent.get, None), metadata=owner) for result in reply.results)


def step(branches: list[executor_pb2.DecodeInput]) -> list[int]:
    """Move every branch by the token that was chosen for it, in one frame, and return what is chosen next."""
    items = [executor_pb2.StreamItem(seq=seq, decode=branch) for seq, branch in enumerate(branches)]
    sent.put(executor_pb2.StreamDecodeRequest(items=items))
    for result in (next(results) for _ in items):  # in any order
        if result.HasField("error"):
            raise RuntimeError(result.error.message)  # the other items of the frame went on
        branches[result.seq].kv_cache.CopyFrom(result.decode.kv_cache)
        branches[result.seq].input_ids[:] = result.decode.outputs.tokens
    return [branch.input_ids[0] for branch in branches]


trunk = executor_pb2.DecodeInput(kv_cache=out.kv_cache, input_ids=out.outputs.tokens, logits_policy=start.logits_policy)
tokens = [*out.outputs.tokens, *(step([trunk])[0] for _ in range(4))]
forked = executor.ForkCache(cache_pb2.ForkCacheRequest(kv_cache=trunk.kv_cache, count=2), timeout=30, metadata=owner)
branches = [executor_pb2.DecodeInput(kv_cache=handle, input_ids=tokens[-1:]) for handle in forked.kv_caches]
for seed, branch in enumerate(branches):
    branch.logits_policy.sample.temperature, branch.logits_policy.sample.seed = 0.8, seed
for said in zip(*(step(branches) for _ in range(8)), strict=True):
    whole = tokenizer_pb2.DetokenizeRequest(token_ids=[*tokens, *said])
    sys.stdout.write(f"{tokenizer.Detokenize(whole, timeout=30).text}\n--\n")
sent.put(None)
release = cache_pb2.ReleaseCacheRequest(kv_caches=[branch.kv_cache for branch in (trunk, *branches)])
released = executor.ReleaseCache(release, timeout=30, metadata=owner).results
sys.stdout.write(f"released {sum(result.released for result in released)}\n")
