"""One script, both clients, the same server: the same tokens, numbers, lengths and lineages, and the same errors."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

import pytest

from ferrule import AsyncClient, Client, FerruleError, Handle, Policy, greedy, sample
from ferrule.errors import TokenOutOfVocabError, TruncateBeyondError, UnsupportedError
from ferrule.types import Append, Output, Verify
from tests.client.aio_harness import run

# A script yields each call, which is a value or to be awaited, and gets what came of it; it returns what it saw.
Script = Generator[Any, Any, list[Any]]


def seen(output: Output) -> tuple[Any, ...]:
    """Return what must be equal of an output: all but the sequence's secret name and the time it took."""
    logits = None if output.logits is None else output.logits.tobytes()
    scores = None if output.target_logprobs is None else output.target_logprobs.tobytes()
    place = output.handle.length, output.handle.lineage
    return (*place, output.tokens, output.logprobs, output.top_logprobs, output.seed, output.replayed, logits, scores)


def place(handle: Handle) -> tuple[int, bytes]:
    """Return what must be equal of a handle."""
    return handle.length, handle.lineage


def decoding(client: Any) -> Script:
    """Prefill, appends, queries, scores, forks, truncates, loops, and a cache that goes from hand to hand."""
    facts: list[Any] = []
    cache = yield client.prefill([5, 6, 7], policy=greedy(logprobs=True, top_logprobs=3))
    facts.append(seen(cache.last))
    facts.append(seen((yield cache.decode([8, 9]))))
    facts.append(seen((yield cache.append((), policy=sample(seed=4)))))
    scores = yield cache.append([1, 2, 3, 4], policy=Policy(target_logprobs=True), all_positions=True)
    facts.append(seen(scores))
    facts.append((yield collected(cache.generate(6, policy=sample(seed=11)))))
    facts.append((yield cache.truncate(cache.length - 2)))
    facts.append((yield cache.reserve(40)))
    facts.append((yield client.reserve([cache, cache.handle], [60, 1], fitting=70)).new_blocks)
    facts.append(place(cache.handle))
    branches = yield cache.fork(3)
    branches += yield cache.fork(length=4)
    for number, branch in enumerate(branches):
        facts.append((yield collected(branch.generate(4, policy=sample(temperature=0.9, top_k=20, seed=number)))))
        facts.append((place(branch.handle), branch.pending, branch.token_ids))
    info = yield cache.info(token_ids=True)
    facts.append((place(info.handle), info.token_ids, info.num_blocks, info.num_shared_blocks))
    branch = client.adopt((branches.pop()).detach())
    facts.append(seen((yield branch.decode(3, policy=greedy()))))
    freed = yield client.release([cache, branch, *branches])
    facts.append(freed)
    return facts


def streaming(client: Any) -> Script:
    """Frames of many caches, branches in a frame, losers that go with one, and a step on the client's own stream."""
    facts: list[Any] = []
    caches = []
    for number in range(4):
        caches.append((yield client.prefill([5 + number, 6, 7])))  # noqa: PERF401
    stream = client.stream()
    policies = [sample(seed=number) for number in range(4)]
    outputs = yield stream.decode(caches, [()] * 4, policy=policies)
    for _ in range(5):
        outputs = yield stream.decode(caches, [output.token for output in outputs], policy=policies)
        facts += [seen(output) for output in outputs]
    loser = caches.pop()
    children = yield stream.branch([caches[0], caches[0]], [1, 2], policy=greedy(top_logprobs=2), release=[loser])
    facts += [(seen(child.last), child.token_ids) for child in children]
    facts.append((stream.num_frames, loser.is_released))
    facts += [seen(output) for output in (yield client.decode_many(caches, [1, [2, 3], ()], policy=greedy()))]
    yield client.release([*caches, children[1]])
    yield stream.close()
    return facts


def whole_contract(client: Any) -> Script:
    """Verifies, batches, chunks, forward passes, branches, masks and counters."""
    facts: list[Any] = []
    cache = yield client.prefill([5, 6, 7], policy=greedy())
    check = yield cache.verify([1, 2], tokens=cache.last.token, acceptance="greedy", row_handles=True)
    facts += [check.accepted_count, check.next_token, [place(handle) for handle in check.row_handles]]
    distributions = [{3: 0.5, 4: 0.5}]
    check = yield cache.verify([3], policy=sample(seed=2), draft_probs=distributions, masks=[[3, 4], [3, 4]])
    facts += [check.accepted_count, check.output.tokens, cache.token_ids]
    many = yield client.batch_prefill([[1, 2], [999], [3]], policy=greedy(top_logprobs=2))
    facts += [seen(one.last) if hasattr(one, "last") else told(one) for one in many]
    outputs = yield client.batch_decode([many[0], many[2]], [4, [5, 6]], policy=greedy())
    facts += [seen(output) for output in outputs]
    chunks = yield client.unified([Append([1] * 9, is_final=False), Append(7, many[0], greedy(), pos_offset=3)])
    facts += [(place(one.handle), one.last.tokens) for one in chunks]
    stream = client.stream()
    mixed = yield stream.run([Append(many[0], 1, greedy()), Verify(many[2], [1], 2, greedy()), Append([1, 2])])
    facts += [seen(mixed[0]), seen(mixed[1].output), place(mixed[2].handle)]
    facts.append([seen(one.output) for one in (yield stream.verify([many[0]], [[2]], tokens=[3], policy=greedy()))])
    yield stream.close()
    rows = yield collected(client.forward([1, 2, 3], policy=sample(seed=1, entropy=True), pooling="last"))
    facts += [(row.tokens, row.entropies.tolist(), row.pooled_hidden_state.tolist()) for row in rows]
    facts += [(yield client.score([1, 2, 3])).tolist(), (yield client.embed([1, 2, 3])).tolist()]
    mask = yield client.register_mask([1, 2, 3])
    facts.append(mask)
    loop = client.generate([5, 6], 6, n=3, policy=sample(seed=4, mask=mask, repetition_penalty=1.5), keep=True)
    yield loop.read()
    facts += [(one.tokens, one.seed, one.finish_reason, place(one.cache.handle)) for one in loop.branches]
    early = cache.generate(30, tokens=[9], policy=sample(seed=3))
    for _ in range(4):
        facts.append((yield early.advance()))
    yield early.close()
    yield cache.truncate(cache.length)
    facts.append((place(cache.handle), cache.token_ids))
    facts.append((yield client.admin.warmup([1])).batch_sizes)
    facts.append((yield client.capabilities()).block_size)
    yield client.release([cache, many[0], many[2], chunks[0], mixed[2], *loop.caches])
    return facts


def asking(client: Any) -> Script:
    """Everything that can be asked of a server without decoding."""
    facts: list[Any] = [(yield client.wait_until_ready()).state]
    facts.append((yield client.model_info()))
    facts.append((yield client.capabilities()))
    facts.append((yield client.admin.health()))
    facts.append((yield client.admin.health("ferrule.v1.ModelExecutorService")))
    facts.append((yield client.capabilities()).total_blocks)
    cache = yield client.prefill([1, 2, 3], ttl=30)
    other = yield client.prefill([1, 2, 3, 4], keep_alive=False)
    facts.append([round(lease.ttl_s) for lease in (yield client.keep_alive([cache, other.handle], ttl=77))])
    listed = yield collected(client.list_caches(page_size=1))
    facts.append(sorted((one.length, one.num_blocks, round(one.lease.ttl_s)) for one in listed))
    facts.append((yield client.release([cache, other])))
    facts.append((yield cache.release()))
    return facts


def mistakes(client: Any) -> Script:
    """Errors of arguments, of the server and of the client come in the same words."""
    facts: list[Any] = []
    cache = yield client.prefill([1, 2, 3])
    other = yield client.prefill([1, 2, 3])
    for make in (
        lambda: client.prefill([999]),
        lambda: client.prefill("text"),
        lambda: client.prefill(b"text"),
        lambda: client.prefill([1], ttl=-1),
        lambda: cache.decode([999]),
        lambda: cache.decode(1, on_stale="panic"),
        lambda: cache.truncate(9),
        lambda: cache.truncate(-1),
        lambda: cache.fork(0),
        lambda: cache.reserve(-1),
        lambda: client.reserve([cache], [1, 2]),
        lambda: cache.verify([1], tokens=[2], parents=[0], acceptance="always"),
        lambda: cache.verify([1, 2], tokens=[2], parents=[0, 0]),
        lambda: collected(cache.generate(policy=Policy())),
        lambda: collected(cache.generate(-1)),
        lambda: client.decode_many([cache, cache], [1, 2]),
        lambda: client.decode_many([cache, other], [1]),
        lambda: client.tokenize("text"),
        lambda: client.status(timeout=0),
    ):
        facts.append((yield make))  # noqa: PERF401
    yield client.release([cache, other])
    facts.append((yield lambda: cache.decode(1)))
    return facts


def collected(loop: Any) -> Any:
    """Return everything an iterator yields, to be awaited if it is an asyncio one."""
    if isinstance(loop, Iterator):
        return list(loop)

    async def collect(loop: AsyncIterator[Any]) -> list[Any]:
        return [one async for one in loop]

    return collect(loop)


def told(error: Exception) -> tuple[Any, ...]:
    """Return what an error says, without the names that differ from sequence to sequence."""
    reason = error.reason if isinstance(error, FerruleError) else ""
    metadata = error.metadata if isinstance(error, FerruleError) else {}
    words = [word for word in str(error).split() if not any(letter.isdigit() for letter in word)]
    return type(error), reason, sorted(set(metadata) - {"handle_id"}), words


def run_sync(script: Script) -> list[Any]:
    """Run a script by the sync client; what it yields as a function may fail, and the error is the answer."""
    answer: Any = None
    while True:
        try:
            call = script.send(answer)
        except StopIteration as end:
            facts: list[Any] = end.value
            return facts
        try:
            answer = call() if inspect.isfunction(call) else call
        except Exception as error:  # noqa: BLE001 - whatever it is, the other client must raise it too
            answer = told(error)


async def run_async(script: Script) -> list[Any]:
    """Run a script by the asyncio client."""
    answer: Any = None
    while True:
        try:
            call = script.send(answer)
        except StopIteration as end:
            facts: list[Any] = end.value
            return facts
        may_fail = inspect.isfunction(call)
        try:
            answer = call() if may_fail else call
            answer = await answer if inspect.isawaitable(answer) else answer
        except Exception as error:
            if not may_fail:
                raise
            answer = told(error)


@pytest.mark.parametrize(
    "script", [decoding, streaming, whole_contract, asking, mistakes], ids=lambda script: script.__name__
)
def test_the_same_script_sees_the_same(target: str, script: Any) -> None:
    """With the paged reference, bit by bit."""
    with Client(target, timeout=20) as client:
        expected = run_sync(script(client))

    async def main() -> list[Any]:
        async with AsyncClient(target, timeout=20) as client:
            return await run_async(script(client))

    assert run(main()) == expected
    assert len(expected) >= 8


def test_the_model_that_ships_says_the_same(shipped_target: str) -> None:
    """Text, special tokens and seeds: one generation by each client, and one over many."""

    def script(client: Any) -> Script:
        ids = yield client.tokenize("def read_file(path):")
        cache = yield client.prefill(ids, policy=greedy())
        facts: list[Any] = [ids, seen(cache.last)]
        pieces = yield collected(cache.generate(12, policy=sample(temperature=0.7, seed=3)).pieces())
        facts.append("".join(pieces))  # how many come together is a matter of time
        facts.append((cache.pending, place(cache.handle), cache.token_ids))
        facts.append((yield client.detokenize(cache.token_ids)))
        text = client.detokenizer(ids)
        facts.append((yield text.push(facts[1][2][0])))
        yield cache.release()
        return facts

    with Client(shipped_target) as client:
        expected = run_sync(script(client))

    async def main() -> list[Any]:
        async with AsyncClient(shipped_target) as client:
            return await run_async(script(client))

    assert run(main()) == expected


def test_the_errors_of_the_script_are_those_meant(target: str) -> None:
    """So that equality proves something."""
    with Client(target, timeout=20) as client:
        kinds = [told[0] for told in run_sync(mistakes(client))]
    assert {TokenOutOfVocabError, TypeError, ValueError, TruncateBeyondError, UnsupportedError, RuntimeError} <= set(
        kinds
    )
