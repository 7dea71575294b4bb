"""The handle as a value."""

from __future__ import annotations

import hashlib

import pytest

from ferrule_server.kv.handle import Handle


def test_a_handle_never_changes() -> None:
    """Equal parts, equal handle; no part can be set."""
    handle = Handle("here.e1.secret", 3, b"\1" * 16)
    assert handle == Handle("here.e1.secret", 3, b"\1" * 16)
    with pytest.raises(AttributeError):
        handle.length = 4  # type: ignore[misc]


def test_a_printed_handle_shows_no_secret() -> None:
    """Neither the name nor the lineage; logs carry the hash of the name."""
    handle = Handle("here.e1.secret", 3, b"\1" * 16)
    assert "secret" not in repr(handle)
    assert "\\x01" not in repr(handle)
    assert handle.handle_id == hashlib.sha256(b"here.e1.secret").hexdigest()[:16]
