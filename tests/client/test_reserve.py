"""Room in advance: for one cache, for several together, and again after a recovery."""

from __future__ import annotations

import pytest

from ferrule import Client, HandleNotFoundError
from ferrule.errors import BlocksExhaustedError, ContextExceededError, OutOfRangeError

BLOCK = 16


def test_room_is_taken_once_and_kept_until_release(client: Client) -> None:
    """The length is absolute; a truncate keeps the room, and a fork has none of it."""
    total = client.capabilities().total_blocks
    with client.prefill([1, 2, 3]) as cache:
        assert cache.reserve(3 * BLOCK) == 2
        assert cache.reserve(3 * BLOCK) == cache.reserve(1) == 0
        assert cache.info().reserved_length == 3 * BLOCK
        assert client.status().free_blocks == total - 3
        cache.truncate(1)
        assert client.status().free_blocks == total - 3
        with cache.fork() as branch:
            assert branch.info().reserved_length == 0


def test_room_for_several_is_all_or_nothing(client: Client) -> None:
    """One length for all or one for each; what does not fit changes nothing."""
    caches = [client.prefill([n]) for n in range(2)]
    free = client.status().free_blocks
    reserved = client.reserve([caches[0], caches[1].handle], [2 * BLOCK, 3 * BLOCK])
    assert (reserved.new_blocks, reserved.free_blocks) == ((1, 2), free - 3)
    assert client.reserve(caches, BLOCK).new_blocks == (0, 0)
    assert client.reserve([], 5).free_blocks == free - 3
    branches = caches[0].fork(4)
    free = client.status().free_blocks
    with pytest.raises(BlocksExhaustedError):
        client.reserve(branches, 512)
    with pytest.raises(BlocksExhaustedError):
        client.reserve(branches, 1, fitting=512)
    assert client.status().free_blocks == free
    client.release([*branches, *caches])


def test_mistakes_are_named(client: Client) -> None:
    """Those of arguments before anything is sent."""
    with client.prefill([1]) as cache:
        for wrong in (-1, 1.5, None, 2**32):
            with pytest.raises(ValueError, match="whole number"):
                cache.reserve(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="one entry per cache"):
            client.reserve([cache], [1, 2])
        with pytest.raises(ContextExceededError):
            cache.reserve(513)
        with pytest.raises(OutOfRangeError):
            client.reserve([cache], 1, fitting=10_000)
    with pytest.raises(RuntimeError, match="released"):
        client.reserve([cache], 1)
    with pytest.raises(HandleNotFoundError):
        client.reserve([cache.handle], 1)


def test_a_recovered_sequence_has_its_room_again(client: Client) -> None:
    """Lost in the middle of the reservation, or after it."""
    with client.prefill([1, 2, 3], recover=True) as cache:
        client.release([cache.handle])
        assert cache.reserve(3 * BLOCK) == 2
        client.release([cache.handle])
        cache.append([4])
        assert cache.num_recoveries == 2
        assert cache.info().reserved_length == 3 * BLOCK
        client.reserve([cache], 4 * BLOCK)
        client.release([cache.handle])
        cache.append([5])
        assert cache.info().reserved_length == 4 * BLOCK


def test_the_caller_is_told_who_it_is(client: Client) -> None:
    """A server without credentials knows one caller, without limits."""
    caller = client.capabilities().caller
    assert caller is not None
    assert (caller.principal, caller.is_admin) == ("local", True)
    assert caller.quotas.handles is caller.quotas.kv_tokens is caller.quotas.prefill_tokens_per_second is None
