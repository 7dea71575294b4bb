"""Names nobody can guess: where their bits come from, and that a name with any byte changed opens nothing."""

from __future__ import annotations

import base64
import math
import secrets

import numpy as np
import pytest

from ferrule_server.errors import EpochChanged, HandleStale, HandleUnknown, WrongInstance
from ferrule_server.kv import sequence_store
from ferrule_server.kv.append_rule import check_handle, judge
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.lineage import LINEAGE_BYTES
from ferrule_server.kv.registry import SECRET_BYTES, Registry
from ferrule_server.kv.sequence_store import SequenceStore
from tests.kv.conftest import Put

NUM_IDS = 100_000
ALPHABET = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def test_secrets_come_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 bits of the operating system's source for cryptographic keys, and nothing else."""
    asked: list[int] = []

    def token_bytes(count: int) -> bytes:
        asked.append(count)
        return b"\xa5" * count

    monkeypatch.setattr(secrets, "token_bytes", token_bytes)
    assert sequence_store._new_secret() == b"\xa5" * SECRET_BYTES
    assert asked == [16]


def test_ids_are_as_random_as_they_look() -> None:
    """Never the same twice, of the url-safe alphabet, each of the 128 bits and each byte as often as chance has it.

    Bounds of six standard deviations for 130 figures: chance alone breaks one of them in a few million runs.
    """
    registry = Registry("here", "e1", sequence_store._new_secret)
    names = [registry.new_cache_id().removeprefix("here.e1.") for _ in range(NUM_IDS)]
    assert len(set(names)) == NUM_IDS
    assert all(len(name) == 22 for name in names)
    assert set("".join(names)) == ALPHABET
    data = np.frombuffer(b"".join(base64.urlsafe_b64decode(name + "==") for name in names), np.uint8)
    ones = np.unpackbits(data.reshape(NUM_IDS, SECRET_BYTES), axis=1).sum(axis=0, dtype=np.int64)
    assert ones.shape == (128,)
    assert np.abs(ones - NUM_IDS / 2).max() < 6 * math.sqrt(NUM_IDS / 4), "a bit is not balanced"
    expected = len(data) / 256
    chi_squared = float(((np.bincount(data, minlength=256) - expected) ** 2 / expected).sum())
    assert abs(chi_squared - 255) < 6 * math.sqrt(2 * 255), "some bytes are more frequent than others"
    num_repeated = int((data[1:] == data[:-1]).sum())
    assert abs(num_repeated - expected) < 6 * math.sqrt(expected), "bytes depend on those before them"


def test_no_name_with_one_byte_changed_opens_anything(store: SequenceStore, put: Put) -> None:
    """All 255 other values of every byte: unknown, or, where they still look like one, of elsewhere or of before."""
    sequence = put([1, 2, 3])
    name, handle = sequence.cache_id.encode(), sequence.handle_at()
    end_of_instance, start_of_secret = name.index(b"."), name.rindex(b".") + 1
    kinds: dict[str, set[type[Exception]]] = {"instance": set(), "epoch": set(), "secret": set(), "dot": set()}
    for index in range(len(name)):
        part = "instance" if index < end_of_instance else "epoch" if index < start_of_secret else "secret"
        if name[index : index + 1] == b".":
            part = "dot"
        for value in set(range(256)) - {name[index]}:
            changed = (name[:index] + bytes([value]) + name[index + 1 :]).decode("latin-1")
            with pytest.raises((HandleUnknown, WrongInstance)) as caught:
                store.resolve(handle._replace(cache_id=changed), "alice")
            kinds[part].add(caught.type)
            assert store.release(handle._replace(cache_id=changed), "alice") is None
    assert kinds == {
        "instance": {WrongInstance, HandleUnknown},
        "epoch": {EpochChanged, HandleUnknown},
        "secret": {HandleUnknown},
        "dot": {HandleUnknown},
    }
    assert store.resolve(handle, "alice") is sequence


def test_no_name_that_is_longer_or_shorter_opens_anything(store: SequenceStore, put: Put) -> None:
    """Each prefix, each byte left out, anything before or behind it; also what base64 would read as the same bits."""
    sequence = put([1])
    name = sequence.cache_id
    others = {name[:stop] for stop in range(len(name))} | {name[start:] for start in range(1, len(name))}
    others |= {name[:index] + name[index + 1 :] for index in range(len(name))}
    others |= {f"{name}{more}" for more in ("=", "==", "A", ".", " ", "\0")} | {f" {name}", f".{name}", name.upper()}
    others |= {f"{name[:-1]}{last}" for last in ALPHABET - {name[-1]}}  # the last one's low four bits mean nothing
    for other in others - {name}:
        with pytest.raises((HandleUnknown, WrongInstance)):
            store.resolve(Handle(other, 1, b"\0" * LINEAGE_BYTES), "alice")


def test_no_lineage_with_one_bit_changed_passes(store: SequenceStore, put: Put) -> None:
    """At the tip and behind it, whatever is to be done there."""
    sequence = put(list(range(20)))
    for length in (1, 15, 16, 17, 20):
        handle = sequence.handle_at(length)
        check_handle(sequence, handle)
        for bit in range(8 * LINEAGE_BYTES):
            changed = bytearray(handle.lineage)
            changed[bit // 8] ^= 1 << bit % 8
            forged = handle._replace(lineage=bytes(changed))
            for policy in StalePolicy:
                with pytest.raises(HandleStale):
                    judge(sequence, forged, [99], policy)
        for lineage in (b"", handle.lineage[:-1], handle.lineage + b"\0"):
            with pytest.raises(HandleStale):
                check_handle(sequence, handle._replace(lineage=lineage))


def test_a_lineage_is_that_of_its_length_alone(store: SequenceStore, put: Put) -> None:
    """The right bytes with another length are as wrong as any."""
    sequence = put(list(range(20)))
    lineages = {length: sequence.handle_at(length).lineage for length in range(1, 21)}
    for length in lineages:
        for other, lineage in lineages.items():
            if other != length:
                with pytest.raises(HandleStale):
                    check_handle(sequence, Handle(sequence.cache_id, length, lineage))
