"""One script, both clients, the same server: the same tokens, numbers, lengths and lineages, and the same errors."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

import pytest

from ferrule import AsyncClient, Client, FerruleError, Handle, Policy, greedy, logits, sample
from ferrule.errors import (
    CallCancelledError,
    PendingTokenError,
    TokenOutOfVocabError,
    TruncateBeyondError,
    UnsupportedError,
)
from ferrule.types import Append, Output, Prompt, Verify
from tests.client.aio_harness import run

# A script yields each call, which is a value or to be awaited, and gets what came of it; it returns what it saw.
Script = Generator[Any, Any, list[Any]]


def seen(output: Output) -> tuple[Any, ...]:
    """Return what must be equal of an output: all but the sequence's secret name and the time it took."""
    arrays = sorted((name, array.shape, array.tobytes()) for name, array in output.arrays.items())
    chosen = output.tokens, output.logprobs, output.sampled_logprobs, output.top_logprobs, output.seed
    return output.handle.length, output.handle.lineage, *chosen, output.replayed, arrays


def place(handle: Handle) -> tuple[int, bytes]:
    """Return what must be equal of a handle."""
    return handle.length, handle.lineage


def decoding(client: Any) -> Script:
    """Prefill, appends, steps, scores, forks, truncates, loops, and a cache that goes from hand to hand."""
    facts: list[Any] = []
    cache = yield client.prefill([5, 6, 7], policy=greedy(logprobs=True, top_logprobs=3))
    facts += [seen(cache.last), cache.pending]
    facts.append(seen((yield cache.append([8, 9], policy=logits()))))
    facts.append(seen((yield cache.append((), policy=sample(seed=4)))))
    facts.append(seen((yield cache.step(sample(seed=5, logprobs=True), redraw=True))))
    facts.append(seen((yield cache.append(cache.last.token, policy=logits("bfloat16")))))
    facts.append(seen((yield cache.step())))
    scores = yield cache.append([1, 2, 3, 4], policy=Policy(target_logprobs=True), all_positions=True)
    facts += [seen(scores), cache.pending, cache.token_ids]
    facts.append((yield collected(cache.generate(6, policy=sample(seed=11)))))
    facts.append((yield cache.truncate(cache.length - 2)))
    facts.append((yield cache.reserve(40)))
    facts.append((yield client.reserve([cache, cache.handle], [60, 1], fitting=70)).new_blocks)
    facts.append(place(cache.handle))
    branches = [*(yield cache.fork(3)), (yield cache.fork(length=4))]
    for number, branch in enumerate(branches):
        facts.append((yield collected(branch.generate(4, policy=sample(temperature=0.9, top_k=20, seed=number)))))
        facts.append((place(branch.handle), branch.pending, branch.token_ids))
    children = yield branches[0].fork(3, redraw=True)
    facts += [(place(child.handle), child.pending) for child in children]
    for number, child in enumerate(children):
        facts.append(seen((yield child.step(sample(seed=number)))))
    branches.append((yield children.keep(children[1])))
    facts.append([child.is_released for child in children])
    info = yield cache.info(token_ids=True)
    facts.append((place(info.handle), info.token_ids, info.num_blocks, info.num_shared_blocks))
    branch = client.adopt((branches.pop()).detach())
    facts.append(seen((yield branch.append(3, policy=greedy()))))
    freed = yield client.release([cache, branch, *branches])
    facts.append(freed)
    return facts


def streaming(client: Any) -> Script:
    """Frames of many caches, branches in a frame, losers that go with one, and every way with a pending token."""
    facts: list[Any] = []
    caches = []
    for number in range(4):
        caches.append((yield client.prefill([5 + number, 6, 7])))  # noqa: PERF401
    stream = client.stream()
    for _ in range(6):
        steps = [Append(cache, policy=sample(seed=number)) for number, cache in enumerate(caches)]
        facts += [seen(output) for output in (yield stream.run(steps))]
    loser = caches.pop()
    children = yield stream.branch([caches[0], caches[0]], [1, 2], policy=greedy(top_logprobs=2), release=[loser])
    facts += [(seen(child.last), child.token_ids, child.pending) for child in children]
    facts.append((stream.num_frames, loser.is_released))
    ways = [
        Append(caches[0], 1, greedy(), pending="drop"),
        Append(caches[1], [2, 3], greedy(), pending="send"),
        Append(caches[2], caches[2].last.token, greedy()),
    ]
    facts += [seen(output) for output in (yield stream.run(ways))]
    facts += [cache.token_ids for cache in caches]
    yield client.release([*caches, children[1]])
    yield stream.close()
    return facts


def whole_contract(client: Any) -> Script:
    """Verifies, prompts in frames, pieces, forward passes, branches, masks and counters."""
    facts: list[Any] = []
    cache = yield client.prefill([5, 6, 7], policy=greedy())
    check = yield cache.verify([1, 2], tokens=cache.last.token, acceptance="greedy", row_handles=True)
    facts += [check.accepted_count, check.next_token, [place(handle) for handle in check.row_handles]]
    distributions = [{3: 0.5, 4: 0.5}]
    check = yield cache.verify([3], policy=sample(seed=2), draft_probs=distributions, masks=[[3, 4], [3, 4]])
    facts += [check.accepted_count, check.output.tokens, cache.token_ids]
    stream = client.stream()
    prompts = [Prompt([1, 2], greedy(top_logprobs=2)), Prompt([999]), Prompt([3], ttl=30)]
    many = yield stream.run(prompts, errors="return")
    facts += [seen(one.last) if hasattr(one, "last") else told(one) for one in many]
    outputs = yield stream.run([Append(many[0], 4, greedy()), Append(many[2], [5, 6], greedy())])
    facts += [seen(output) for output in outputs]
    pieces = yield stream.run([Prompt([1] * 9, is_final=False), Append(many[0], [7, 8], logits(), all_positions=True)])
    facts += [place(pieces[0].handle), pieces[0].last.tokens, seen(pieces[1])]
    mixed = yield stream.run([Append(many[0], 1, greedy()), Verify(many[2], [1], 2, greedy()), Prompt([1, 2])])
    facts += [seen(mixed[0]), seen(mixed[1].output), place(mixed[2].handle)]
    (check,) = yield stream.run([Verify(many[0], [2], tokens=[3], policy=greedy())])
    facts += [seen(check.output), [one.token_ids for one in (many[0], many[2])]]
    yield stream.close()
    rows = yield collected(client.forward([1, 2, 3], policy=sample(seed=1, entropy=True), pooling="last"))
    facts += [(row.tokens, row.entropies.tolist(), row.pooled_hidden_state.tolist()) for row in rows]
    facts += [(yield client.score([1, 2, 3])).tolist(), (yield client.embed([1, 2, 3])).tolist()]
    mask = yield client.register_mask([1, 2, 3])
    facts.append(mask)
    loop = client.generate([5, 6], 6, n=3, policy=sample(seed=4, mask=mask, repetition_penalty=1.5), keep=True)
    yield loop.read()
    facts += [(one.tokens, one.seed, one.finish_reason, place(one.cache.handle)) for one in loop.branches]
    stopped = yield client.generate([5, 6], 50, policy=greedy(), stop=[loop.tokens[0], [1, 2, 3]]).read()
    facts += [stopped.tokens, stopped.finish_reason]
    early = cache.generate(30, tokens=[9], policy=sample(seed=3))
    for _ in range(4):
        facts.append((yield early.advance()))
    yield early.close()
    yield cache.truncate(cache.length)
    facts.append((place(cache.handle), cache.token_ids))
    facts.append((yield client.admin.warmup([1])).batch_sizes)
    facts.append((yield client.capabilities()).block_size)
    yield client.release([cache, many[0], many[2], pieces[0], mixed[2], *loop.caches])
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
    other = yield client.prefill([1, 2, 3], policy=greedy())
    stream = client.stream()
    for make in (
        lambda: client.prefill([999]),
        lambda: client.prefill("text"),
        lambda: client.prefill(b"text"),
        lambda: client.prefill([1], ttl=-1),
        lambda: client.prefill([1], policy=greedy),
        lambda: client.prefill([1, 2], policy=Policy(target_logprobs=True)),
        lambda: cache.append([999]),
        lambda: cache.append(1, on_stale="panic"),
        lambda: cache.append(1, pending="panic"),
        lambda: cache.append([1, 2], policy="greedy"),
        lambda: other.append(int(other.pending)),
        lambda: other.step(logits()),
        lambda: cache.last.token,
        lambda: cache.last.logits,
        lambda: cache.truncate(9),
        lambda: cache.truncate(-1),
        lambda: cache.fork(0),
        lambda: cache.reserve(-1),
        lambda: client.reserve([cache], [1, 2]),
        lambda: cache.verify([1]),
        lambda: cache.verify([1], tokens=[2], parents=[0], acceptance="always"),
        lambda: cache.verify([1, 2], tokens=[2], parents=[0, 0]),
        lambda: collected(cache.generate(policy=Policy())),
        lambda: collected(cache.generate(-1)),
        lambda: collected(cache.generate(1).pieces()),
        lambda: stream.run([Append(cache, 1), Append(cache, 2)]),
        lambda: stream.run([Append(cache, 1), Append(other, [999])]),
        lambda: stream.run([3]),
        lambda: stream.run([Append(cache, 1)], errors="ignore"),
        lambda: stream.branch([cache, cache], [1, 1]),
        lambda: stream.branch([cache, other], [1]),
        lambda: client.tokenize("text"),
        lambda: client.status(timeout=0),
    ):
        facts.append((yield make))  # noqa: PERF401
    yield stream.close()
    facts.append((yield lambda: stream.run([Append(cache, 1)])))
    facts.append((cache.token_ids, other.token_ids))
    yield client.release([cache, other])
    facts.append((yield lambda: cache.append(1)))
    facts.append((yield lambda: cache.fork(2)))
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
    """Text, special tokens, seeds and the chat template: one generation by each client, and one conversation."""

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
        chat = client.chat("Answer briefly.", policy=sample(seed=1), max_tokens=8)
        for _ in range(2):
            answer = yield chat.send("Hello")
            facts.append((answer.text, answer.tokens, answer.finish_reason, answer.seed, chat.messages[-1]))
            facts.append((answer.num_prompt_tokens, answer.num_reused_tokens, chat.handle.length))
        other = yield chat.fork()
        facts += [chat.undo(), (yield chat.send("Bye")).text, (yield other.send("Bye")).text]
        yield chat.close()
        yield other.close()
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
        kinds = {told[0] for told in run_sync(mistakes(client)) if isinstance(told[0], type)}
    ours = {CallCancelledError, PendingTokenError, TokenOutOfVocabError, TruncateBeyondError, UnsupportedError}
    assert kinds == ours | {AttributeError, RuntimeError, TypeError, ValueError}
