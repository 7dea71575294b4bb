"""The prefix cache: what is found, what is kept, what goes first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ferrule_server.errors import BlocksExhausted, ContextExceeded, QuotaExceeded
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.reservation import Reservation
from ferrule_server.kv.reserved_slots import SlotRequest
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import SequenceStore
from ferrule_server.kv.usage import Holding
from ferrule_server.quotas import QuotaLimits
from tests.kv.conftest import Put

PROMPT = list(range(100, 114))  # three full blocks of four slots, and a half


def look_up(store: SequenceStore, prompt: list[int], principal: str = "alice") -> Reservation:
    """Reserve a new sequence, looking for its prompt."""
    return store.reservations.reserve_new(principal, len(prompt), prompt=prompt)


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
        fingerprint=b"model",
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


def test_a_prompt_finds_the_blocks_of_a_living_sequence(store: SequenceStore, put: Put) -> None:
    """They are shared as by a fork: no block more is used or paid for, and neither disturbs the other."""
    sequence = put(PROMPT)
    other = store.commit(look_up(store, PROMPT[:12]), PROMPT[:12])
    assert other.block_ids == sequence.block_ids[:3]
    assert (store.usage.of("alice"), store.metrics().shared_blocks) == (Holding(2, 4), 3)
    put([1, 2, 3], other)
    assert (list(sequence.token_ids), list(other.token_ids)) == (PROMPT, [*PROMPT[:12], 1, 2, 3])
    end(store, sequence)
    assert (store.pool.num_used, store.pool.num_cached) == (4, 0)


def test_blocks_are_found_as_soon_as_they_are_full(store: SequenceStore, put: Put) -> None:
    """Also those that decodes filled, one token at a time, and those of forks; never a partly filled one."""
    sequence = put(PROMPT[:3])
    for length in range(3, 14):
        assert num_found(store, PROMPT) == length // 4 * 4
        put([PROMPT[length]], sequence)
    (branch,) = store.fork(sequence, 13, 1)
    put([7, 8, 9], branch)
    assert num_found(store, [*PROMPT[:13], 7, 8, 9]) == 16
    assert num_found(store, [*PROMPT[:13], 7, 8, 0]) == 12


def test_only_equal_tokens_from_the_first_on_are_found(store: SequenceStore, put: Put) -> None:
    """The same tokens behind other ones are other KV."""
    put(PROMPT)
    assert num_found(store, [*PROMPT[:4], 0, *PROMPT[5:]]) == 4
    assert num_found(store, [0, *PROMPT[1:]]) == 0
    assert num_found(store, PROMPT[4:]) == 0
    assert num_found(store, PROMPT[:11]) == 8
    assert num_found(store, [*PROMPT, 5, 6, 7]) == 12


def test_a_whole_prompt_can_be_found(store: SequenceStore, put: Put) -> None:
    """Then nothing is left to be written, and the commit takes the prompt all the same."""
    end(store, put(PROMPT))
    reservation = look_up(store, PROMPT[:8])
    assert (reservation.num_cached, reservation.num_tokens, len(reservation.block_ids)) == (8, 8, 2)
    assert store.commit(reservation, PROMPT[:8]).length == 8


def test_principals_do_not_find_each_others_blocks(store: SequenceStore, put: Put) -> None:
    """How fast a prompt is must not tell what somebody else has sent."""
    sequence = put(PROMPT)
    assert num_found(store, PROMPT, "bob") == 0
    end(store, sequence)
    assert num_found(store, PROMPT, "bob") == 0
    assert num_found(store, PROMPT) == 12


def test_without_a_prompt_nothing_is_looked_up(store: SequenceStore, put: Put) -> None:
    """As where the rows of all positions are wanted."""
    put(PROMPT)
    reservation = store.reservations.reserve_new("alice", len(PROMPT))
    assert (reservation.num_cached, store.metrics().num_prefix_lookup_tokens) == (0, 0)
    store.reservations.abort(reservation)


def test_an_unpublished_sequence_is_not_found(store: SequenceStore, put: Put) -> None:
    """Nor its forks and branches; it may find others itself."""
    put(PROMPT[:8])
    sequence = store.commit(store.reservations.reserve_new("alice", 14, prompt=PROMPT, publish=False), PROMPT)
    (branch,) = store.fork(sequence, 14, 1)
    put([7] * 6, branch)
    other = store.commit(store.reservations.reserve_branch(sequence, 14, 6), [8] * 6)
    assert not any(each.is_published for each in (sequence, branch, other))
    for each in (sequence, branch, other):
        assert num_found(store, each.token_ids.tolist()) == 8
        end(store, each)
    assert store.pool.num_cached == 0


def test_a_store_without_a_cache_keeps_and_finds_nothing() -> None:
    """A prompt may be sent, and is not looked up."""
    store = make(has_prefix_cache=False)
    for _ in range(2):
        sequence = store.commit(look_up(store, PROMPT), PROMPT)
        assert not sequence.is_published
        assert num_found(store, PROMPT) == 0
        end(store, sequence)
    assert (store.pool.num_cached, store.metrics().num_prefix_lookup_tokens) == (0, 0)
    store.check_integrity()


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32])
def test_blocks_of_any_size_are_found(block_size: int) -> None:
    """The chunks of the lineage are of sixteen tokens, whatever the pool's are."""
    store = make(block_size, 128)
    prompt = [index * 7 % 50 for index in range(70)]
    sequence = store.commit(store.reservations.reserve_new("alice", 70), prompt)
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


def test_what_was_used_last_goes_last(store: SequenceStore, put: Put) -> None:
    """A hit is a use, also one that was aborted."""
    prompts = [[index] * 4 for index in (1, 2, 3)]
    for prompt in prompts:
        end(store, put(prompt))
    assert num_found(store, prompts[0]) == 4
    put([8] * 48, principal="bob")
    for prompt in (prompts[1], prompts[2], prompts[0]):
        put([9], principal="bob")
        assert prompt not in [held.token_ids.tolist() for held in store._cache._entries.values()]
    assert len(store._cache._entries) == 12


def test_an_expired_sequence_leaves_its_blocks_to_be_found(
    store: SequenceStore, put: Put, advance: Callable[[float], None]
) -> None:
    """A lease that ran out frees everything, and loses nothing that is still wanted."""
    put(PROMPT)
    advance(100.0)
    store.expire()
    assert (store.pool.num_free, num_found(store, PROMPT)) == (15, 12)


def test_what_a_truncate_drops_can_be_found(store: SequenceStore, put: Put) -> None:
    """And the block it cut in two as well, until somebody writes into it."""
    sequence = put(PROMPT)
    assert store.truncate(sequence, sequence.handle_at(), 6) == 2
    assert (store.pool.num_cached, num_found(store, PROMPT)) == (1, 12)
    put([0], sequence)
    assert num_found(store, PROMPT) == 4
    put([0], sequence)
    assert num_found(store, [*PROMPT[:6], 0, 0]) == 8


def test_a_block_cut_in_two_that_somebody_found_is_copied(store: SequenceStore, put: Put) -> None:
    """Who found it keeps what was found."""
    sequence = put(PROMPT[:8])
    store.truncate(sequence, sequence.handle_at(), 6)
    other = store.commit(look_up(store, PROMPT[:8]), PROMPT[:8])
    reservation = store.reservations.reserve_append(sequence, 1)
    assert reservation.copies == [(other.block_ids[1], reservation.block_ids[1])]
    store.commit(reservation, [0])
    assert num_found(store, PROMPT) == 8


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


@pytest.mark.parametrize("is_rewind", [True, False])
def test_room_is_there_whoever_finds_the_block_it_begins_in(store: SequenceStore, put: Put, is_rewind: bool) -> None:
    """A block cut in two whose owner has room beyond is not found: its copy would take a block nobody set aside."""
    sequence = store.commit(store.reservations.reserve_new("alice", 14, 20), PROMPT)
    if is_rewind:
        store.reservations.abort(store.reservations.reserve_rewind(sequence, 6, 1))
    else:
        store.truncate(sequence, sequence.handle_at(), 6)
    assert num_found(store, PROMPT) == 4
    put([8] * 4 * store.pool.num_free, principal="bob")
    put([0] * 14, sequence)


def test_room_reserved_after_a_truncate_is_there_too(store: SequenceStore, put: Put) -> None:
    """In the other order."""
    sequence = put(PROMPT)
    store.truncate(sequence, sequence.handle_at(), 6)
    store.reserve_slots([SlotRequest(sequence, 14)])
    assert num_found(store, PROMPT) == 4
    put([8] * 4 * store.pool.num_free, principal="bob")
    put([0] * 8, sequence)


def test_the_last_blocks_of_a_tail_become_spares(store: SequenceStore, put: Put) -> None:
    """Those before them can be found without them."""
    sequence = store.commit(store.reservations.reserve_new("alice", 20, 12), [*PROMPT, *range(6)])
    store.truncate(sequence, sequence.handle_at(), 4)
    assert len(sequence.spare_ids) == 2
    assert num_found(store, [*PROMPT, *range(6)]) == 12


def test_equal_prompts_at_once_each_have_their_own_blocks(store: SequenceStore) -> None:
    """The first to be committed is found; what the other appends is found too once the first is gone."""
    first, second = (look_up(store, PROMPT) for _ in range(2))
    assert (first.num_cached, second.num_cached) == (0, 0)
    one, two = store.commit(first, PROMPT), store.commit(second, PROMPT)
    store.commit(store.reservations.reserve_append(two, 2), [5, 6])
    longer = [*PROMPT, 5, 6]
    assert look_up(store, longer).block_ids[:3] == one.block_ids[:3]
    assert num_found(store, longer) == 12  # the fourth block has another before it
    end(store, two)
    assert num_found(store, longer) == 16


def test_a_newer_block_takes_the_place_of_one_that_nobody_owns(store: SequenceStore, put: Put) -> None:
    """It will be there for longer; the other is empty then."""
    end(store, put(PROMPT))
    sequence = put(PROMPT)
    assert (store.pool.num_cached, store.pool.num_empty) == (0, 11)
    reservation = look_up(store, PROMPT)
    assert reservation.block_ids[:3] == sequence.block_ids[:3]
    store.reservations.abort(reservation)


def test_an_aborted_hit_goes_back(store: SequenceStore, put: Put) -> None:
    """To the cache, or to its other owners; never to the empty blocks."""
    sequence = put(PROMPT)
    assert num_found(store, PROMPT) == 12
    assert store.pool.refcount(sequence.block_ids[0]) == 1
    end(store, sequence)
    assert num_found(store, PROMPT) == 12
    assert (store.pool.num_cached, store.usage.of("alice")) == (3, Holding())


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


def test_a_hit_on_ones_own_living_blocks_takes_none(store: SequenceStore, put: Put) -> None:
    """With not one block free."""
    put(PROMPT)
    put([1] * 44, principal="bob")
    other = store.commit(look_up(store, PROMPT[:12]), PROMPT[:12])
    assert (other.length, store.pool.num_free) == (12, 0)


def test_a_hit_counts_on_the_account_of_who_uses_it() -> None:
    """Once, however many of its sequences share it; cached blocks count on nobody's."""
    limits = QuotaLimits(kv_tokens=16)
    store = make(limits_of=lambda _principal: limits)
    end(store, store.commit(store.reservations.reserve_new("alice", 12), PROMPT[:12]))
    assert store.usage.of("alice") == Holding()
    other = store.commit(store.reservations.reserve_new("alice", 5), [7] * 5)
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


def test_room_comes_with_a_hit(store: SequenceStore, put: Put) -> None:
    """The rest of it is set aside, cached blocks are not."""
    end(store, put(PROMPT))
    reservation = store.reservations.reserve_new("alice", 12, 20, prompt=PROMPT[:12])
    assert (reservation.num_cached, len(reservation.block_ids), len(reservation.held_ids)) == (12, 3, 5)
    sequence = store.commit(reservation, PROMPT[:12])
    assert len(sequence.spare_ids) == 2
    put([8] * 4 * store.pool.num_free, principal="bob")
    put([1] * 8, sequence)


def test_what_is_committed_is_what_was_looked_up(store: SequenceStore, put: Put) -> None:
    """Anything else would put tokens beside KV that is not theirs; fewer are as good, down to what was found."""
    put(PROMPT)
    with pytest.raises(ValueError, match="the prompt has 14 tokens, not 13"):
        store.reservations.reserve_new("alice", 13, prompt=PROMPT)
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


def test_rejected_drafts_are_not_found(store: SequenceStore, put: Put) -> None:
    """A block is full when it was committed to its end, not when its rows were written."""
    sequence = put(PROMPT[:6])
    store.commit(store.reservations.reserve_append(sequence, 8), PROMPT[6:7])
    assert num_found(store, PROMPT) == 4
    store.commit(store.reservations.reserve_append(sequence, 7), PROMPT[7:14])
    assert num_found(store, PROMPT) == 12


def test_integrity_notices_a_block_that_is_registered_with_other_tokens(store: SequenceStore, put: Put) -> None:
    """The check finds what would make a hit wrong."""
    sequence = put(PROMPT)
    entry = store._cache._entries[sequence.block_ids[1]]
    right = entry.token_ids
    entry.token_ids = right[::-1]
    with pytest.raises(AssertionError, match="has others"):
        store.check_integrity()
    entry.token_ids = right
