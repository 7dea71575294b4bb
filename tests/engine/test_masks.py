"""Registered token masks: whose they are, how many fit, which are dropped."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from ferrule_server.engine.masks import OVERHEAD_BYTES, MaskRegistry, make_mask
from ferrule_server.errors import MaskUnknown, QuotaExceeded
from ferrule_server.executor.base import TokenMask
from ferrule_server.quotas import QuotaLimits

VOCAB_SIZE = 77
MASK_BYTES = 10 + OVERHEAD_BYTES


def _mask(token_id: int, vocab_size: int = VOCAB_SIZE) -> TokenMask:
    bits = np.zeros(-(-vocab_size // 8), np.uint8)
    bits[token_id // 8] |= 1 << token_id % 8
    mask = make_mask(bits, vocab_size)
    assert mask is not None
    return mask


def test_a_fingerprint_names_the_content() -> None:
    """Equal bits, equal fingerprint; bits beyond the vocabulary are no part of it, and nothing can be written to."""
    bits = np.full(10, 0xFF, np.uint8)
    full = make_mask(bits, 77)
    bits[9] = 0x1F
    same = make_mask(bits, 77)
    bits[0] = 0
    assert full is not None
    assert full == same
    assert len(full.fingerprint) == 16
    assert full.bits.tolist() == [0xFF] * 9 + [0x1F]
    assert make_mask(bits, 77) != full
    with pytest.raises(ValueError, match="read-only"):
        full.bits[0] = 1


def test_a_mask_that_allows_nothing_is_none() -> None:
    """Bits beyond the vocabulary allow nothing."""
    bits = np.zeros(10, np.uint8)
    assert make_mask(bits, 77) is None
    bits[9] = 0xE0
    assert make_mask(bits, 77) is None
    assert make_mask(bits, 78) is not None


def test_masks_are_found_by_whoever_registered_them_and_nobody_else() -> None:
    """A foreign fingerprint is unknown, exactly as one that never was."""
    registry = MaskRegistry()
    (fingerprint,) = registry.register("alice", [_mask(3)])
    assert registry.find("alice", fingerprint) == _mask(3)
    for principal, name in (("bob", fingerprint), ("alice", bytes(16)), ("alice", b""), ("alice", b"x" * 900)):
        with pytest.raises(MaskUnknown) as caught:
            registry.find(principal, name)
        assert len(caught.value.message) < 100


def test_registering_again_changes_nothing() -> None:
    """Within one request and in the next one."""
    registry = MaskRegistry()
    first = registry.register("alice", [_mask(1), _mask(2), _mask(1)])
    assert registry.register("alice", [_mask(1), _mask(2), _mask(1)]) == first
    assert first[0] == first[2] != first[1]
    assert (registry.num_masks, registry.memory.num_held) == (2, 2 * MASK_BYTES)
    assert registry.register("alice", []) == []


def test_the_least_recently_used_masks_of_a_principal_give_way() -> None:
    """Finding a mask is using it; others' masks stay."""
    registry = MaskRegistry(lambda _: QuotaLimits(mask_bytes=3 * MASK_BYTES))
    (other,) = registry.register("bob", [_mask(9)])
    first, second, third = registry.register("alice", [_mask(1), _mask(2), _mask(3)])
    registry.find("alice", first)
    registry.register("alice", [_mask(4), _mask(5)])
    registry.check_integrity()
    registry.find("alice", first)
    registry.find("bob", other)
    for fingerprint in (second, third):
        with pytest.raises(MaskUnknown):
            registry.find("alice", fingerprint)


def test_what_does_not_fit_by_itself_is_refused_and_drops_nothing() -> None:
    """QUOTA_MASK_BYTES with the numbers, and no time to wait for."""
    registry = MaskRegistry(lambda _: QuotaLimits(mask_bytes=2 * MASK_BYTES))
    kept = registry.register("alice", [_mask(1), _mask(2)])
    with pytest.raises(QuotaExceeded) as caught:
        registry.register("alice", [_mask(3), _mask(4), _mask(5)])
    error = caught.value
    assert error.reason == "QUOTA_MASK_BYTES"
    assert (error.metadata["limit"], error.metadata["needed"], error.retry_after_s) == (
        str(2 * MASK_BYTES),
        str(3 * MASK_BYTES),
        None,
    )
    assert [registry.find("alice", name).fingerprint for name in kept] == kept


def test_all_together_are_bounded_too() -> None:
    """The least recently used of all gives way; a principal without a quota of its own has the bound of all."""
    registry = MaskRegistry(max_bytes=3 * MASK_BYTES)
    (old,) = registry.register("alice", [_mask(1)])
    (used,) = registry.register("bob", [_mask(1)])
    (third,) = registry.register("carol", [_mask(1)])
    registry.find("alice", old)
    registry.register("carol", [_mask(2)])
    registry.check_integrity()
    registry.find("alice", old)
    registry.find("carol", third)
    with pytest.raises(MaskUnknown):
        registry.find("bob", used)
    with pytest.raises(QuotaExceeded):
        registry.register("bob", [_mask(i) for i in range(4)])


def test_a_lower_quota_takes_hold_at_the_next_registration() -> None:
    """Until then nothing is taken away."""
    limits = {"alice": QuotaLimits()}
    registry = MaskRegistry(limits.__getitem__)
    registry.register("alice", [_mask(i) for i in range(5)])
    limits["alice"] = QuotaLimits(mask_bytes=2 * MASK_BYTES)
    assert registry.num_masks == 5
    registry.register("alice", [_mask(6)])
    assert registry.num_masks == 2
    registry.check_integrity()


def test_random_registrations_keep_the_books() -> None:
    """Against a list of what each principal used last."""
    rng = random.Random(5)
    quota = 4
    registry = MaskRegistry(lambda _: QuotaLimits(mask_bytes=quota * MASK_BYTES))
    recent: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(2000):
        principal, token = rng.choice("ab"), rng.randrange(9)
        used = recent[principal]
        if rng.random() < 0.5:
            registry.register(principal, [_mask(token)])
        elif token in used:
            registry.find(principal, _mask(token).fingerprint)
        else:
            with pytest.raises(MaskUnknown):
                registry.find(principal, _mask(token).fingerprint)
            continue
        recent[principal] = [*(each for each in used if each != token), token][-quota:]
        registry.check_integrity()
        assert registry.num_masks == sum(map(len, recent.values()))


@pytest.mark.parametrize("num_principals", [1, 64, 4096])
@pytest.mark.parametrize("vocab_size", [8, 256, 2048, 151_936])
def test_masks_take_no_more_than_what_is_counted(vocab_size: int, num_principals: int) -> None:
    """However small they are, however many principals hold them, and also right after a table has grown."""
    rng = random.Random(7)
    num_masks = 300 if vocab_size > 2048 else 6000
    registry = MaskRegistry()
    tracemalloc.start()
    try:
        for number in range(num_masks):
            bits = np.frombuffer(rng.randbytes(-(-vocab_size // 8)), np.uint8) | np.uint8(1)
            mask = make_mask(bits, vocab_size)
            assert mask is not None
            registry.register(f"principal {number % num_principals}", [mask])
            del bits, mask
            if number % 16 == 0:
                assert tracemalloc.get_traced_memory()[0] <= registry.memory.num_held + (32 << 10)
    finally:
        tracemalloc.stop()
