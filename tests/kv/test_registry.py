"""Names, strangers and tombstones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ferrule_server.errors import EpochChanged, HandleExpired, HandleUnknown, WrongInstance
from ferrule_server.kv import registry
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.handle import Handle, handle_id_of
from ferrule_server.kv.registry import TOMBSTONE_S
from ferrule_server.kv.sequence_store import SequenceStore
from tests.kv.conftest import Put

Advance = Callable[[float], None]
SECRET = "A" * 22


def handle_named(cache_id: str) -> Handle:
    """Return a handle with this name."""
    return Handle(cache_id, 1, b"\0" * 16)


def test_a_cache_id_is_instance_epoch_and_128_random_bits(store: SequenceStore, put: Put) -> None:
    """Url-safe text; two are never equal; the loggable name is its hash."""
    first, second = put([1]), put([1])
    instance, epoch, secret = first.cache_id.split(".")
    assert (instance, epoch, len(secret)) == ("here", "e1", 22)
    assert first.cache_id != second.cache_id
    assert first.handle_id == handle_id_of(first.cache_id)
    assert first.cache_id not in repr(first)


def test_foreign_released_and_invented_handles_answer_alike(store: SequenceStore, put: Put) -> None:
    """Nobody learns whether a name exists: same class, same reason, same words."""
    foreign, released = put([1]), put([2])
    store.release(released.handle_at(), "alice")
    messages = set()
    for cache_id, principal in (
        (foreign.cache_id, "bob"),
        (released.cache_id, "alice"),
        (released.cache_id, "bob"),
        (f"here.e1.{SECRET}", "alice"),
    ):
        with pytest.raises(HandleUnknown) as caught:
            store.resolve(handle_named(cache_id), principal)
        assert caught.type is HandleUnknown
        messages.add(caught.value.message.replace(handle_id_of(cache_id), "ID"))
    assert len(messages) == 1
    assert store.release(foreign.handle_at(), "bob") is None
    assert store.resolve(foreign.handle_at(), "alice") is foreign


@pytest.mark.parametrize(
    "cache_id", ["", "x", "here", "here.e1", "here.e1.", f"there.e1.{SECRET}.", f"th re.e1.{SECRET}", "there.e1.short"]
)
def test_a_malformed_name_is_simply_unknown(store: SequenceStore, cache_id: str) -> None:
    """Also one that looks as if it were of another server."""
    with pytest.raises(HandleUnknown) as caught:
        store.resolve(handle_named(cache_id), "alice")
    assert caught.type is HandleUnknown


def test_names_of_other_servers_and_other_runs_are_told_apart(store: SequenceStore) -> None:
    """The first belongs elsewhere, the second is gone for good."""
    with pytest.raises(WrongInstance) as elsewhere:
        store.resolve(handle_named(f"there.e1.{SECRET}"), "alice")
    assert elsewhere.value.metadata["instance"] == "there"
    with pytest.raises(EpochChanged):
        store.resolve(handle_named(f"here.e0.{SECRET}"), "alice")


@pytest.mark.parametrize("name", ["", "a.b", "a b", "x" * 65, "ä", "a\n"])
def test_instance_and_epoch_must_fit_into_a_cache_id(name: str) -> None:
    """A dot in either would make names ambiguous."""
    for instance, epoch in ((name, "e"), ("i", name)):
        with pytest.raises(ValueError, match="must be 1 to 64"):
            SequenceStore(BlockPool(4, 4), instance=instance, epoch=epoch, max_context=9, max_ttl_s=60.0)


def test_the_owner_of_an_expired_handle_hears_so_for_a_while(store: SequenceStore, put: Put, advance: Advance) -> None:
    """Then, and to anybody else, it is as unknown as any."""
    sequence = put([1])
    handle = sequence.handle_at()
    advance(60.0)
    assert store.expire() == [sequence.handle_id]
    advance(TOMBSTONE_S - 1.0)
    with pytest.raises(HandleExpired):
        store.resolve(handle, "alice")
    for principal, seconds in (("bob", 0.0), ("alice", 1.0)):
        advance(seconds)
        with pytest.raises(HandleUnknown) as caught:
            store.resolve(handle, principal)
        assert caught.type is HandleUnknown
    assert store.release(handle, "alice") is None


def test_tombstones_are_bounded_in_count(
    store: SequenceStore, put: Put, advance: Advance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest go first."""
    monkeypatch.setattr(registry, "MAX_TOMBSTONES", 2)
    handles = [put([index]).handle_at() for index in range(3)]
    for _ in handles:
        store.renew(store.resolve(handles[-1], "alice"))
    advance(60.0)
    assert len(store.expire()) == 3
    answers = []
    for handle in handles:
        with pytest.raises(HandleUnknown) as caught:
            store.resolve(handle, "alice")
        answers.append(caught.type)
    assert sorted(each.REASON for each in answers) == ["HANDLE_EXPIRED", "HANDLE_EXPIRED", "HANDLE_UNKNOWN"]


def test_whoever_lets_thousands_expire_changes_nobody_elses_answers(
    store: SequenceStore, put: Put, advance: Advance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of too many tombstones one goes of whoever has most."""
    monkeypatch.setattr(registry, "MAX_TOMBSTONES", 3)
    handle = put([1]).handle_at()
    advance(60.0)
    store.expire()
    for index in range(5):
        put([index], principal="flood")
    advance(60.0)
    assert len(store.expire()) == 5
    with pytest.raises(HandleExpired):
        store.resolve(handle, "alice")
    assert store.registry.num_tombstones == 3


def test_a_tombstone_that_is_over_goes_before_those_that_count(
    store: SequenceStore, put: Put, advance: Advance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one with the most of them."""
    monkeypatch.setattr(registry, "MAX_TOMBSTONES", 2)
    put([1], principal="bob")
    advance(60.0)
    store.expire()
    advance(TOMBSTONE_S)
    handles = [put([index]).handle_at() for index in range(2)]
    advance(60.0)
    assert len(store.expire()) == 2
    for handle in handles:
        with pytest.raises(HandleExpired):
            store.resolve(handle, "alice")
    store.check_integrity()


def test_old_tombstones_go_when_new_ones_come(store: SequenceStore, put: Put, advance: Advance) -> None:
    """Memory is bounded by what expired within the last ten minutes."""
    put([1])
    advance(60.0)
    store.expire()
    put([2])
    advance(TOMBSTONE_S)
    store.expire()
    assert store.registry.num_tombstones == 1


def test_a_list_shows_ones_own_in_order_page_by_page(store: SequenceStore, put: Put) -> None:
    """Pages join without gap or repetition; the sequences of others are not there."""
    own = sorted(put([index]).handle_id for index in range(7))
    put([9], principal="bob")
    seen: list[str] = []
    while page := store.registry.page("alice", seen[-1] if seen else "", 3):
        assert len(page) <= 3
        seen += [each.handle_id for each in page]
    assert seen == own
    assert (store.registry.count("alice"), store.registry.count("bob"), len(store.registry)) == (7, 1, 8)


def test_a_list_looks_at_ones_own_sequences_only(
    store: SequenceStore, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many others have; who has none any more leaves nothing behind."""
    own = [put([1]), put([2])]
    others = [put([3], principal="bob") for _ in range(9)]
    with monkeypatch.context() as patched:
        patched.delattr(registry.Registry, "__iter__")
        assert store.registry.count("alice") == 2
        assert store.registry.page("alice") == sorted(own, key=lambda each: each.handle_id)
        assert store.registry.page("carol") == []
    for each in others:
        store.release(each.handle_at(), "bob")
    assert set(store.registry._own) == {"alice"}


def test_sequences_with_one_handle_id_are_told_apart(store: SequenceStore, put: Put) -> None:
    """64 bits of a hash may collide; which sequence goes does not depend on them."""
    first, second = put([1]), put([2])
    store.registry.remove(second)
    second.handle_id = first.handle_id
    store.registry.add(second)
    store.release(second.handle_at(), "alice")
    assert store.registry.page("alice") == [first]
