"""The prefix cache: what is found, what is kept, what goes first."""

from __future__ import annotations

import pytest

from ferrule_server.errors import BlocksExhausted, ContextExceeded, QuotaExceeded
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.reservation import Reservation
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import SequenceStore
from ferrule_server.kv.usage import Holding
from ferrule_server.quotas import QuotaLimits
from tests.kv.conftest import Put

PROMPT = list(range(100, 114))  # three full blocks of four slots, and a half


def look_up(store: SequenceStore, prompt: list[int], principal: str = "alice") -> Reservation:
    """Reserve a new sequence, looking for its prompt."""
    return store.reservations.reserve_new(principal, b"model", len(prompt), prompt=prompt)


def num_found(store: SequenceStore, prompt: list[int], principal: str = "alice") -> int:
    """Return how many tokens of a prompt are found; nothing is kept of the attempt."""
    reservation = look_up(store, prompt, principal)
    store.reservations.abort(reservation)
    return reservation.num_cached


def end(store: SequenceStore, sequence: Sequence) -> None:
    """Release a sequence."""
    store.release(sequence.handle_at(), sequence.principal)


def make(block_size: int = 4, num_blocks: int = 16, **settings: object) -> SequenceStore:
    """Return a store of other proportions."""
    return SequenceStore(
        BlockPool(num_blocks, block_size),
        instance="here",
        epoch="e1",
        max_context=100,
        max_ttl_s=100.0,
        **settings,  # type: ignore[arg-type]
    )


def test_a_prompt_finds_the_full_blocks_of_a_released_sequence(store: SequenceStore, put: Put) -> None:
    """Nobody owns them meanwhile: they are free, and not empty."""
    sequence = put(PROMPT)
    table = sequence.block_ids
    end(store, sequence)
    assert (store.pool.num_free, store.pool.num_cached, store.usage.of("alice")) == (15, 3, Holding())
    reservation = look_up(store, PROMPT)
    assert (reservation.num_cached, reservation.block_ids[:3], reservation.start) == (12, table[:3], 0)
    assert (store.pool.num_cached, store.usage.of("alice")) == (0, Holding(1, 4))
    again = store.commit(reservation, PROMPT)
    assert (list(again.token_ids), again.block_ids[:3]) == (PROMPT, table[:3])
    assert again.handle_at().lineage == put(PROMPT).handle_at().lineage


def test_principals_do_not_find_each_others_blocks(store: SequenceStore, put: Put) -> None:
    """How fast a prompt is must not tell what somebody else has sent."""
    sequence = put(PROMPT)
    assert num_found(store, PROMPT, "bob") == 0
    end(store, sequence)
    assert num_found(store, PROMPT, "bob") == 0
    assert num_found(store, PROMPT) == 12


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32])
def test_blocks_of_any_size_are_found(block_size: int) -> None:
    """The chunks of the lineage are of sixteen tokens, whatever the pool's are."""
    store = make(block_size, 128)
    prompt = [index * 7 % 50 for index in range(70)]
    sequence = store.commit(store.reservations.reserve_new("alice", b"model", 70), prompt)
    for length in (1, 15, 16, 17, 33, 64, 70):
        assert num_found(store, prompt[:length]) == length // block_size * block_size
    end(store, sequence)
    assert num_found(store, prompt) == 70 // block_size * block_size
    store.check_integrity()


def test_cached_blocks_are_handed_out_when_no_empty_one_is_left(store: SequenceStore, put: Put) -> None:
    """Not before; the last blocks of a sequence before its first ones, so that prefixes survive."""
    end(store, put(PROMPT))
    filler = put([1] * 48, principal="bob")
    assert (store.pool.num_empty, num_found(store, PROMPT[:12])) == (0, 12)
    for length in (8, 4, 0):
        put([2], principal="bob")
        assert store.pool.num_cached == length // 4
        assert length == 0 or num_found(store, PROMPT[:length]) == length
    assert store.metrics().num_prefix_evictions == 3
    end(store, filler)
    assert num_found(store, PROMPT) == 0


def test_a_fork_that_writes_into_its_half_of_a_block_withdraws_it(store: SequenceStore, put: Put) -> None:
    """Once its source is gone it is the last owner, and writes in place; from the reservation on, committed or not."""
    sequence = put(PROMPT)
    (branch,) = store.fork(sequence, 7, 1)
    end(store, sequence)
    assert num_found(store, PROMPT) == 12
    reservation = store.reservations.reserve_append(branch, 1)
    assert (reservation.copies, num_found(store, PROMPT)) == ([], 4)
    store.reservations.abort(reservation)
    assert num_found(store, PROMPT) == 4


def test_a_hit_is_all_or_nothing(store: SequenceStore, put: Put) -> None:
    """A cached block is a free one: it cannot be found and handed out for the rest at once."""
    end(store, put(PROMPT[:12]))
    put([1] * 44, principal="bob")
    assert store.pool.num_free == 4
    with pytest.raises(BlocksExhausted) as caught:
        look_up(store, [*PROMPT, 1, 2, 3])
    assert caught.value.metadata == {"needed_blocks": "5", "free_blocks": "4"}
    with pytest.raises(ContextExceeded):
        look_up(store, [*PROMPT] * 4)
    assert (store.pool.num_cached, store.usage.of("alice")) == (3, Holding())
    store.commit(look_up(store, PROMPT), PROMPT)
    assert store.pool.num_free == 0


def test_a_hit_counts_on_the_account_of_who_uses_it() -> None:
    """Once, however many of its sequences share it; cached blocks count on nobody's."""
    limits = QuotaLimits(kv_tokens=16)
    store = make(limits_of=lambda _principal: limits)
    end(store, store.commit(store.reservations.reserve_new("alice", b"model", 12), PROMPT[:12]))
    assert store.usage.of("alice") == Holding()
    other = store.commit(store.reservations.reserve_new("alice", b"model", 5), [7] * 5)
    with pytest.raises(QuotaExceeded) as caught:
        look_up(store, PROMPT[:12])
    assert (caught.value.metadata["used"], caught.value.metadata["needed"]) == ("8", "12")
    end(store, other)
    for num_sequences in (1, 2, 3):
        store.commit(look_up(store, PROMPT[:12]), PROMPT[:12])
        assert store.usage.of("alice") == Holding(num_sequences, 3)
    store.commit(look_up(store, PROMPT[:14]), PROMPT[:14])
    with pytest.raises(QuotaExceeded):
        look_up(store, PROMPT[:14])
    with pytest.raises(QuotaExceeded, match="more than the quota"):
        look_up(store, [*PROMPT, 1, 2, 3])
    store.check_integrity()


def test_what_is_committed_is_what_was_looked_up(store: SequenceStore, put: Put) -> None:
    """Anything else would put tokens beside KV that is not theirs; fewer are as good, down to what was found."""
    put(PROMPT)
    with pytest.raises(ValueError, match="the prompt has 14 tokens, not 13"):
        store.reservations.reserve_new("alice", b"model", 13, prompt=PROMPT)
    reservation = look_up(store, [*PROMPT, 1])
    for wrong, message in (([*PROMPT, 2], "not those"), ([0] * 12, "not those"), (PROMPT[:11], "12 tokens are cached")):
        with pytest.raises(ValueError, match=message):
            store.commit(reservation, wrong)
    assert list(store.commit(reservation, PROMPT[:13]).token_ids) == PROMPT[:13]


def test_a_lost_device_leaves_nothing_to_be_found(store: SequenceStore, put: Put) -> None:
    """What lies in the pool is not trusted any more, owned or not."""
    end(store, put(PROMPT))
    put([1] * 9)
    look_up(store, PROMPT)
    store.lose_all()
    assert (store.pool.num_empty, num_found(store, PROMPT)) == (15, 0)


def test_integrity_notices_a_block_that_is_registered_with_other_tokens(store: SequenceStore, put: Put) -> None:
    """The check finds what would make a hit wrong."""
    sequence = put(PROMPT)
    entry = store._cache._entries[sequence.block_ids[1]]
    right = entry.token_ids
    entry.token_ids = right[::-1]
    with pytest.raises(AssertionError, match="has others"):
        store.check_integrity()
    entry.token_ids = right
