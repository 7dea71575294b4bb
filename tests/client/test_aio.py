"""The asyncio client: many tasks, cancellation at any point, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest

from ferrule import AsyncClient, Policy, greedy, sample
from ferrule.errors import (
    CallCancelledError,
    DeadlineExceededError,
    HandleStaleError,
    PendingTokenError,
    StartingError,
    UnavailableError,
)
from ferrule.types import Append, AsyncCache, Output, Tokens
from ferrule_client._status import error_from_call
from tests.client.aio_harness import Hold, run, until
from tests.client.fake_server import Failure, FakeServer

CODES = grpc.StatusCode


def tokens_of(fake: FakeServer, cache: AsyncCache) -> list[int]:
    """Return what the server holds."""
    return fake.sequences[cache.handle.cache_id]


async def run_one(client: AsyncClient, cache: AsyncCache, tokens: Tokens) -> Output:
    """Return what came of an append in a frame of a stream of its own."""
    async with client.stream() as stream:
        (output,) = await stream.run([Append(cache, tokens)])
    return output


def test_a_client_closed_while_a_stream_opens_leaves_nobody_waiting(fake: FakeServer) -> None:
    """A write on a call that is cancelled before its first step is forgotten by gRPC, and waited for ever."""

    async def main() -> None:
        client = AsyncClient(fake.target, timeout=None)
        cache = await client.prefill([1, 2], keep_alive=False)
        append = asyncio.create_task(client.stream().run([Append(cache, 3, greedy())]))
        await asyncio.sleep(0)
        await client.close()
        async with asyncio.timeout(10):
            with pytest.raises(CallCancelledError, match="closed"):
                await append
        cache.detach()

    run(main())


def test_first_lines_of_a_program(fake: FakeServer) -> None:
    """Connect, prefill, steps, loops over tokens and text, an append; leaving the blocks releases all."""

    async def main() -> None:
        async with AsyncClient(fake.target) as client, client.prefill([*b"the"], policy=greedy()) as cache:
            assert cache.pending == cache.last.token == ord(" ")
            assert bytes([(await cache.step()).token for _ in range(2)]) == b"qu"
            assert bytes([token async for token in cache.generate(3, policy=greedy())]) == b"ick"
            assert cache.pending == ord("k")
            assert "".join([piece async for piece in cache.generate(6).pieces()]) == " brown"
            output = await cache.append(await client.tokenize("!"), policy=greedy())
            assert output.handle.length == cache.length == 3 + 12 + 1
            with pytest.raises(PendingTokenError):
                await cache.append(int(output.token))
            assert (await cache.append(output.token)).handle.length == cache.length == 3 + 12 + 2
            assert (await client.model_info()).model_id == "fake"
            assert "forward_verify" in (await client.capabilities()).features
            assert (await client.status()).is_ready
            assert await client.detokenize([*b"the"]) == "the"
            text = client.detokenizer([*b"the"])
            assert await text.push(ord("!")) + await text.finish() == "!"
        assert repr(client).endswith("closed)")
        assert repr(cache).endswith("released)")

    run(main())
    assert fake.sequences == {}


def test_prefill_is_awaited_entered_or_made_a_task(fake: FakeServer) -> None:
    """What it returns is a coroutine in every respect; nothing is sent before one of the three."""

    async def main() -> None:
        async with AsyncClient(fake.target) as client:
            calls = [client.prefill([1, 2]) for _ in range(3)]
            assert fake.calls["Prefill"] == 0
            first = await calls[0]
            async with calls[1] as second, asyncio.TaskGroup() as group:
                task = group.create_task(calls[2])
            assert second.is_released
            third = task.result()
            assert [first.length, third.length] == [2, 2]
            await client.release([first, third])
            client.prefill([1, 2]).close()

    run(main())


def test_each_of_many_tasks_says_what_it_says_alone(target: str) -> None:
    """64 branches decoded at once, each by a task of its own, on one client."""

    async def main() -> None:
        async with AsyncClient(target) as client, client.prefill([5, 6, 7]) as trunk:
            branches, alone = [*await trunk.fork(32)], await trunk.fork(4)
            branches += await trunk.fork(32)

            async def say(branch: AsyncCache, seed: int) -> list[int]:
                return [token async for token in branch.generate(6, policy=sample(seed=seed % 4))]

            said = await asyncio.gather(*(say(branch, seed) for seed, branch in enumerate(branches)))
            expected = [await say(branch, seed) for seed, branch in enumerate(alone)]
            assert said == [expected[seed % 4] for seed in range(64)]
            outputs = await asyncio.gather(*(branch.step(greedy()) for branch in branches))
            assert [output.handle.length for output in outputs] == [9] * 64
            await client.release([*branches, *alone])

    run(main())


def test_cancelled_appends_are_there_once_or_not_at_all(target: str) -> None:
    """Cancellation at any moment of an append, then the same tokens again or others; unary and on the stream."""

    async def main() -> None:
        wanted = Policy(top_logprobs=1)
        async with (
            AsyncClient(target) as client,
            client.prefill([1, 2]) as cache,
            client.stream() as stream,
        ):
            expected, num_cancelled = [1, 2], 0
            for number in range(80):
                token = number % 250
                call = (
                    cache.append(token, policy=wanted) if number % 4 < 2 else stream.run([Append(cache, token, wanted)])
                )
                task: asyncio.Task[object] = asyncio.create_task(call)
                asyncio.get_running_loop().call_later(_delay_s(number), task.cancel)
                try:
                    await task
                    expected.append(token)
                except asyncio.CancelledError:
                    num_cancelled += 1
                    if number % 2:
                        await cache.append(token)
                        expected.append(token)
            await cache.append(251)
            info = await cache.info(token_ids=True)
            assert list(info.token_ids) == [*expected, 251]
            assert num_cancelled > 10

    run(main())


def _delay_s(number: int) -> float:
    """Return after how long an attempt is cancelled: up to 2 ms, longer after many, so that a slow machine ends too."""
    return 1e-4 * (number % 20) * (1 + number // 200)


def test_cancelled_steps_draw_each_token_once(target: str) -> None:
    """The pending token is sent by every attempt and appended by one; a fixed seed draws what a loop alone draws."""

    async def main() -> None:
        policy = sample(seed=5)
        async with AsyncClient(target) as client, client.prefill([1, 2], policy=policy) as cache:
            alone = (await client.generate([1, 2], 41, policy=policy, ignore_eos=True).read()).tokens
            said: list[int] = [cache.last.token]
            num_cancelled = 0
            while len(said) < len(alone):
                task = asyncio.create_task(cache.step())
                asyncio.get_running_loop().call_later(_delay_s(len(said) + num_cancelled), task.cancel)
                try:
                    said.append((await task).token)
                except asyncio.CancelledError:
                    num_cancelled += 1
                    assert cache.pending == said[-1]
            assert said == alone
            info = await cache.info(token_ids=True)
            assert list(info.token_ids) == [1, 2, *said[:-1]] == cache.token_ids
            assert num_cancelled > 3

    run(main())


@pytest.mark.parametrize("rpc", ["unary", "frame"])
def test_a_cancelled_append_is_in_doubt(fake: FakeServer, rpc: str) -> None:
    """What landed is replaced when the cache goes on in another way, and only what is ours."""

    async def append(client: AsyncClient, cache: AsyncCache, tokens: list[int]) -> None:
        if rpc == "unary":
            await cache.append(tokens)
        else:
            await run_one(client, cache, tokens)

    async def main() -> None:
        async with AsyncClient(fake.target) as client, client.prefill([1, 2]) as cache:
            hold = Hold(fake)
            task = asyncio.create_task(append(client, cache, [3, 4]))
            await until(hold.is_reached.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            hold.let_go()
            assert cache.length == 2
            assert cache._tip.doubts == {(3, 4)}
            await append(client, cache, [9])
            assert tokens_of(fake, cache) == [1, 2, 9]
            assert cache._tip.doubts == frozenset()
            tokens_of(fake, cache).append(7)
            with pytest.raises(HandleStaleError):
                await append(client, cache, [8])

    run(main())


def test_two_tasks_on_a_cache_are_told(fake: FakeServer) -> None:
    """Whatever way the second would move it; what only reads is served, and the first is not disturbed."""

    async def main() -> None:
        async with AsyncClient(fake.target) as client, client.prefill([1, 2]) as cache:
            hold = Hold(fake)
            task = asyncio.create_task(run_one(client, cache, 3))
            await until(hold.is_reached.is_set)
            for call in (
                cache.append(4),
                cache.append([4, 5]),
                cache.step(),
                cache.verify([4], tokens=3),
                cache.truncate(1),
                anext(cache.generate()),
                run_one(client, cache, 4),
            ):
                with pytest.raises(RuntimeError, match="two calls at once"):
                    await call
            assert (await cache.info()).handle.cache_id == cache.handle.cache_id
            await (await cache.fork()).release()
            hold.let_go()
            await task
            assert tokens_of(fake, cache) == [1, 2, 3]
            async with cache.fork(2) as branches:
                await asyncio.gather(*(branch.append(5) for branch in branches))

    run(main())


def test_a_frame_has_its_own_limit_and_obeys_those_around_it(fake: FakeServer) -> None:
    """The call's timeout is an error of ours, ``asyncio.timeout`` is the caller's; the cache is good after both."""

    async def main() -> None:
        async with AsyncClient(fake.target) as client, client.prefill([1, 2]) as cache:
            async with client.stream() as stream:
                await stream.run([Append(cache, 3)])
                hold = Hold(fake)
                with pytest.raises(DeadlineExceededError, match="no frame came"):
                    await stream.run([Append(cache, 4)], timeout=0.05)
                with pytest.raises(DeadlineExceededError):
                    await cache.append(4, timeout=0.05)
                calls: list[Coroutine[Any, Any, object]] = [stream.run([Append(cache, 4)]), cache.append(4)]
                for call in calls:
                    with pytest.raises(TimeoutError) as caught:
                        async with asyncio.timeout(0.05):
                            await call
                    assert type(caught.value) is TimeoutError
                hold.let_go()
                await stream.run([Append(cache, 4)])
            assert tokens_of(fake, cache) == [1, 2, 3, 4]

    run(main())


def test_closing_ends_calls_with_an_error_of_ours(fake: FakeServer) -> None:
    """A task that waits while another closes the client was not cancelled, and does not look like it."""

    async def main() -> None:
        hold = Hold(fake)
        client = AsyncClient(fake.target)
        async with client.prefill([1, 2], keep_alive=False) as cache:
            cache.detach()
            other = client.adopt(cache.handle, keep_alive=False)
            task = asyncio.create_task(client.stream().run([Append(other, 3)]))
            await until(hold.is_reached.is_set)
            await client.close()
            with pytest.raises(CallCancelledError):
                await task
            hold.let_go()
            with pytest.raises(CallCancelledError, match="closed"):
                await other.append(4)
            other.detach()
            await client.close()

    run(main())


def test_a_cancelled_loop_leaves_the_cache_usable(fake: FakeServer) -> None:
    """Another loop continues after the last token that was handed out."""

    async def main() -> None:
        async with AsyncClient(fake.target) as client, client.prefill([*b"the"]) as cache:

            async def go_on() -> None:
                async for _ in cache.generate(policy=sample(seed=1)):
                    pass

            hold = Hold(fake)
            task = asyncio.create_task(go_on())
            await until(hold.is_reached.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            hold.let_go()
            assert bytes([token async for token in cache.generate(6)]) == b" quick"
            await cache.append([*b"!"])  # what the server had drawn beyond is dropped
            assert bytes(tokens_of(fake, cache)) == b"the quick!"

    run(main())


def test_waiting_for_a_server_blocks_no_other_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries and polls sleep on the loop, and a server that comes up is found."""

    def never(_: float) -> None:
        raise AssertionError("a blocking sleep on the event loop")

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as place:
            target = f"127.0.0.1:{place.getsockname()[1]}"
        seen: list[object] = []
        async with AsyncClient(target, max_retries=0) as client:
            task = asyncio.create_task(client.wait_until_ready(on_progress=seen.append, timeout=20))
            await until(lambda: len(seen) >= 2)
            server = FakeServer()
            server._server.add_insecure_port(target)
            await asyncio.to_thread(server.__enter__)
            try:
                assert (await task).is_ready
                server.failures["Prefill"] = [Failure(CODES.UNAVAILABLE, reason="STARTING")] * 2
                monkeypatch.setattr(time, "sleep", never)
                await (await client.prefill([1, 2])).release()
                assert server.calls["Prefill"] == 3
                server.failures["GetStatus"] = [Failure(CODES.UNAVAILABLE, reason="STARTING")] * 99
                with pytest.raises(StartingError):
                    await client.status(timeout=0.2)
            finally:
                monkeypatch.undo()
                await asyncio.to_thread(server.__exit__)
            with pytest.raises(UnavailableError):  # it may be sent on the connection that is just ending
                await client.status(timeout=0.2)
            with pytest.raises(UnavailableError, match="no server at"):
                await client.status(timeout=0.2)

    run(main())


def is_keeping(client: AsyncClient) -> tuple[bool, bool]:
    """Tell whether a renewal is planned, and whether one is under way."""
    return client._keeper._timer is not None, client._keeper._task is not None


def test_leases_are_renewed_while_a_cache_needs_it(fake: FakeServer) -> None:
    """One call for all caches at a third of the lease; none when there is no cache; what is lost is let go."""

    async def main() -> None:
        fake.ttl_s = 0.3
        async with AsyncClient(fake.target, max_retries=0) as client:
            caches = [await client.prefill([1, 2]) for _ in range(3)]
            for cache in caches:
                cache._tip.ttl_s = 0.3  # as if granted by the prefill
                client._keeper.add(cache._tip)
            await until(lambda: fake.kept.count(3) >= 2)
            fake.failures["KeepAlive"] = [Failure(CODES.UNAVAILABLE)] * 2
            await until(lambda: not fake.failures["KeepAlive"])
            del fake.sequences[caches[0].handle.cache_id]
            await until(lambda: fake.kept.count(2) >= 2)
            await client.release(caches)
            await until(lambda: is_keeping(client) == (False, False))
            async with client.prefill([1, 2], keep_alive=False):
                assert is_keeping(client) == (False, False)
            async with client.prefill([1, 2]) as cache:
                assert is_keeping(client) == (True, False)
                cache._tip.ttl_s = 0.0
                client._keeper.add(cache._tip)
                await until(lambda: is_keeping(client) == (False, True))
        assert is_keeping(client) == (False, False)

    run(main())


def test_forgotten_cache_warns_and_is_kept_no_longer(fake: FakeServer) -> None:
    """Whichever thread finds it; and so does one that is left after its client."""

    async def main() -> None:
        client = AsyncClient(fake.target)
        held = [await client.prefill([1, 2]) for _ in range(2)]
        with pytest.warns(ResourceWarning, match="never released"):
            held.pop()

        def forget() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                held.clear()

        await asyncio.to_thread(forget)
        await until(lambda: is_keeping(client) == (False, False))
        with pytest.warns(ResourceWarning, match="after its client was closed") as caught:
            async with client.prefill([1, 2]):
                await client.close()
        assert caught[0].filename == __file__

    run(main())


def test_forgotten_stream_ends_its_call(fake: FakeServer) -> None:
    """A stream that nobody closed leaves no task, though it was in use."""

    async def main() -> None:
        async with AsyncClient(fake.target) as client, client.prefill([1, 2]) as cache:
            streams = [client.stream() for _ in range(2)]
            for token, stream in zip([3, 4], streams, strict=True):
                await stream.run([Append(cache, token)])
            del stream
            streams.pop()
            await asyncio.to_thread(streams.clear)  # a finaliser on another thread
            gc.collect()
            await until(lambda: len(asyncio.all_tasks()) == 1)

    run(main())


def test_a_client_belongs_to_its_loop(fake: FakeServer) -> None:
    """Without a loop, and on another one, it says so; closing it from there is fine."""
    with pytest.raises(RuntimeError, match="needs a running event loop"):
        AsyncClient(fake.target)

    async def connect() -> AsyncClient:
        client = AsyncClient(fake.target)
        await client.status()
        return client

    async def use_elsewhere(client: AsyncClient) -> None:
        with pytest.raises(RuntimeError, match="another event loop"):
            await client.status()
        await client.close()
        with pytest.raises(CallCancelledError, match="closed"):
            await client.status()

    client = asyncio.run(connect())
    run(use_elsewhere(client))


def test_a_frame_that_could_not_be_written_is_a_broken_connection() -> None:
    """grpc.aio hides the cause behind an INTERNAL of its own; nothing else says so."""
    error = grpc.aio.AioRpcError(CODES.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "Internal error from Core")
    assert error_from_call(error).reason == "CONNECTION_LOST"
    error = grpc.aio.AioRpcError(CODES.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "a bug")
    assert error_from_call(error).reason == "INTERNAL"


def test_programs_that_forget_everything_end(target: str) -> None:
    """The loop is closed before client, stream and cache are; the leak is said, nothing hangs or crashes."""
    script = f"""
import asyncio
from ferrule import AsyncClient
from ferrule.types import Append
async def main():
    client = AsyncClient({target!r})
    cache = await client.prefill([1, 2, 3], ttl=5)
    loop = cache.generate(20)
    await anext(loop)
    stream = client.stream()
    await stream.run([Append(cache, 4)])
    await client.release([cache.handle])
    return client, cache, loop, stream
kept = asyncio.run(main())
del kept
print("end of script", flush=True)
"""
    command = [sys.executable, "-X", "dev", "-c", script]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True, check=False)
    assert done.stdout == "end of script\n"
    assert done.returncode == 0, done.stderr
    assert "ResourceWarning: AsyncCache" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_importing_loads_what_is_used() -> None:
    """The sync client loads nothing of the asyncio one, and neither loads a framework."""
    script = """
import sys
import ferrule.v1.executor_pb2
assert not [name for name in sys.modules if name.startswith("ferrule_client")]
from ferrule import Branches, Cache, Chat, Client, FerruleError, Handle, Policy, Stream, greedy, logits, sample
assert not [name for name in sys.modules if name.startswith("ferrule_client.aio")]
from ferrule import AsyncClient
import ferrule.admin, ferrule.errors, ferrule.types
assert not {"torch", "numba", "ferrule_server", "rich"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], timeout=300, check=True)


def test_an_encrypted_channel_is_freed_before_the_process_ends() -> None:
    """Else gRPC would wait for it, 2 s. Functions that are to run at exit run in the reverse order."""
    code = """\
import asyncio, atexit, gc, weakref
channels = []
atexit.register(lambda: print("freed:", [channel() is None for channel in channels]))
from ferrule import AsyncClient
async def main():
    async with AsyncClient("127.0.0.1:1", tls=True) as client:
        channels.append(weakref.ref(client._connection.wire.channel))
        client.itself = client, client.stream()  # a cycle, and an object with __del__
gc.disable()
asyncio.run(main())
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "freed: [True]\n", done.stderr
