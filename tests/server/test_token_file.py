"""The token file: what a line may say, what a change does, and what never leaves it."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from ferrule_server.api.security.token_file import TokenFile, parse_tokens
from ferrule_server.errors import ConfigError
from ferrule_server.quotas import UNLIMITED, QuotaLimits

OPERATIONS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
TOKENS = ("ferrule_alpha", "ferrule_beta", "ferrule_gamma")
DIGESTS = tuple(hashlib.sha256(token.encode()).hexdigest() for token in TOKENS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with one token."""
    path = tmp_path / "tokens"
    _write(path, f"{DIGESTS[0]} alice")
    return path


def _write(path: Path, *lines: str, mode: int = 0o600) -> None:
    """Put a new file at the path, by renaming."""
    beside = path.with_name("new")
    beside.write_text("".join(f"{line}\n" for line in lines))
    beside.chmod(mode)
    beside.rename(path)


def test_a_line_names_a_principal_its_role_and_its_quotas(path: Path) -> None:
    """In any order behind the name, with comments, blank lines and a byte-order mark."""
    _write(
        path,
        "\ufeff# who may call",
        "",
        f"{DIGESTS[0].upper()} alice",
        f"  {DIGESTS[1]}\tops@example.org handles=4 admin retained=16MiB # the operators",
        f"{DIGESTS[2]} spiffe://example.org/batch kv_tokens=100 queued_rows=20 prefill_rate=30 mask_bytes=1MiB "
        "call_rate=40 request_bytes=2MiB text_rate=3MiB",
    )
    file = TokenFile(path, QuotaLimits(handles=9, kv_tokens=99))
    alice, ops, batch = (file.find(token) for token in TOKENS)
    assert alice is not None
    assert ops is not None
    assert batch is not None
    assert (alice.principal, alice.is_admin) == ("alice", False)
    assert (ops.principal, ops.is_admin) == ("ops@example.org", True)
    assert file.limits_of("alice") == QuotaLimits(handles=9, kv_tokens=99)
    assert file.limits_of("ops@example.org") == QuotaLimits(handles=4, kv_tokens=99, retained_bytes=16 << 20)
    assert file.limits_of(batch.principal) == QuotaLimits(9, 100, 20, 30, None, 1 << 20, 40, 2 << 20, 3 << 20)
    assert file.limits_of("nobody") == QuotaLimits(handles=9, kv_tokens=99)


def test_the_example_of_the_page_is_one() -> None:
    """The server reads it as it stands."""
    (example,) = (block for block in OPERATIONS.split("```text\n") if block.startswith("# sha256"))
    table = parse_tokens(example.partition("```")[0])
    assert [caller.principal for caller in table.callers.values()] == ["alice", "ops", "batch"]
    assert table.quotas["batch"] == {"handles": 8, "kv_tokens": 200_000, "retained_bytes": 16 << 20}


def test_none_lifts_a_limit(path: Path) -> None:
    """The server's own does not hold then."""
    _write(path, f"{DIGESTS[0]} alice handles=none")
    assert TokenFile(path, QuotaLimits(handles=9)).limits_of("alice") == UNLIMITED


def test_a_principal_may_have_several_tokens(path: Path) -> None:
    """As in a rotation; quotas given on one line hold for all of them."""
    _write(path, f"{DIGESTS[0]} alice handles=3", f"{DIGESTS[1]} alice admin", f"{DIGESTS[2]} alice handles=3")
    file = TokenFile(path, UNLIMITED)
    assert {caller.principal for token in TOKENS if (caller := file.find(token))} == {"alice"}
    assert file.limits_of("alice").handles == 3


@pytest.mark.parametrize("token", ["", "ferrule_alph", "ferrule_alpha ", "FERRULE_ALPHA", DIGESTS[0], "\u4e16\u754c"])
def test_what_is_no_token_is_found_nowhere(path: Path, token: str) -> None:
    """The digest of a token is none either."""
    assert TokenFile(path, UNLIMITED).find(token) is None


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("ferrule_secret alice", "64 hexadecimal digits, never with the token itself; it begins with 14 other"),
        (DIGESTS[1], "the name of a principal must follow"),
        (f"{DIGESTS[1]} al,ice", "the name of a principal must follow"),
        (
            f"{DIGESTS[1]} -",
            "the name of a principal must follow: 1 to 128 of A-Z a-z 0-9 ._@:/+-, first a letter or digit",
        ),
        (f"{DIGESTS[1]} handles=3", "the name of a principal must follow"),
        (f"{DIGESTS[1]} {'x' * 129}", "1 to 128"),
        (f"{DIGESTS[0]} bob", "this token is on line 2 already"),
        (f"{DIGESTS[1]} bob root", "only admin and handles=..., kv_tokens=..., "),
        (f"{DIGESTS[1]} bob admin=yes", "only admin and"),
        (f"{DIGESTS[1]} bob speed=3", "only admin and"),
        (f"{DIGESTS[1]} bob handles=", "handles: must be a whole number"),
        (f"{DIGESTS[1]} bob handles=0", "handles: must be at least 1; none lifts the limit"),
        (f"{DIGESTS[1]} bob handles=-3", "handles: must be a whole number"),
        (f"{DIGESTS[1]} bob retained=16", "retained: must be a number with KiB"),
        (f"{DIGESTS[1]} bob handles=1 handles=2", "handles differs from an earlier line"),
        (f"{DIGESTS[1]} alice handles=2", "handles differs from an earlier line"),
    ],
)
def test_a_bad_line_is_named_by_its_number(path: Path, line: str, hint: str) -> None:
    """And never shown: somebody may have put a token there."""
    _write(path, "# comment", f"{DIGESTS[0]} alice handles=1", "", line)
    with pytest.raises(ConfigError, match=r"^--token-file .*tokens, line 4: ") as caught:
        TokenFile(path, UNLIMITED)
    assert hint in str(caught.value)
    assert not any(secret in str(caught.value) for secret in ("secret", *DIGESTS))


def test_the_digest_of_nothing_is_no_token() -> None:
    """What `sha256sum` makes of a variable that is not set would let in whoever sends an empty token."""
    with pytest.raises(ConfigError, match=r"line 1: .* SHA-256 of nothing"):
        parse_tokens(f"{hashlib.sha256(b'').hexdigest()} alice")


def test_a_file_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    """Missing, a folder, a pipe, no text, empty, without a token."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "comments").write_text("# nobody\n")
    for name, hint in {
        "missing": "No such file",
        ".": "Is a directory|is not a regular file",
        "pipe": "is not a regular file",
        "binary": "not UTF-8 text",
        "empty": "holds no token; `ferrule token NAME`",
        "comments": "holds no token; `ferrule token NAME`",
    }.items():
        with pytest.raises(ConfigError, match=hint):
            TokenFile(tmp_path / name, UNLIMITED)


def test_a_change_is_taken_up_and_withdraws_what_is_gone(path: Path) -> None:
    """Whoever holds the caller of a withdrawn token learns of it; the others go on as they are."""
    _write(path, f"{DIGESTS[0]} alice", f"{DIGESTS[1]} bob", f"{DIGESTS[2]} carol")
    file = TokenFile(path, UNLIMITED)
    alice, bob, carol = (file.find(token) for token in TOKENS)
    assert alice is not None
    assert bob is not None
    assert carol is not None
    _write(path, f"{DIGESTS[0]} alice admin handles=7", f"{DIGESTS[2]} dave")
    file.refresh()
    assert (file.find(TOKENS[0]), file.find(TOKENS[1])) == (alice, None)
    assert alice.is_admin
    assert [caller.is_withdrawn for caller in (alice, bob, carol)] == [False, True, True]
    assert file.limits_of("alice").handles == 7
    dave = file.find(TOKENS[2])
    assert dave is not None
    assert (dave.principal, dave.is_withdrawn) == ("dave", False)


def test_a_token_that_comes_back_does_not_revive_what_was_withdrawn(path: Path) -> None:
    """A stream that ended stays ended; new calls are let in."""
    file = TokenFile(path, UNLIMITED)
    before = file.find(TOKENS[0])
    assert before is not None
    for lines in ([f"{DIGESTS[1]} bob"], [f"{DIGESTS[0]} alice"]):
        _write(path, *lines)
        file.refresh()
    after = file.find(TOKENS[0])
    assert after is not None
    assert (before.is_withdrawn, after.is_withdrawn) == (True, False)


def test_every_way_of_replacing_the_file_is_noticed(path: Path, tmp_path: Path) -> None:
    """By swapping a symbolic link as Kubernetes does, and in place with the same length and time."""
    folders = [tmp_path / f"..version{number}" for number in (1, 2)]
    for folder, digest in zip(folders, DIGESTS, strict=False):
        folder.mkdir()
        (folder / "tokens").write_text(f"{digest} alice\n")
    data = tmp_path / "..data"
    data.symlink_to(folders[0])
    link = tmp_path / "secret"
    link.symlink_to(Path("..data") / "tokens")
    file = TokenFile(link, UNLIMITED)
    (tmp_path / "..data_tmp").symlink_to(folders[1])
    (tmp_path / "..data_tmp").rename(data)
    file.refresh()
    assert [file.find(token) is not None for token in TOKENS] == [False, True, False]
    status = link.stat()
    link.resolve().write_text(f"{DIGESTS[2]} alice\n")
    os.utime(link, ns=(status.st_atime_ns, status.st_mtime_ns))
    file.refresh()
    assert [file.find(token) is not None for token in TOKENS] == [False, False, True]


@pytest.mark.parametrize("text", ["", "\n", "nonsense", f"{DIGESTS[1]} bob\n{DIGESTS[1]} bob\n", None])
def test_a_broken_file_keeps_the_old_tokens(path: Path, caplog: pytest.LogCaptureFixture, text: str | None) -> None:
    """An ERROR says so once; the next good file is taken."""
    file = TokenFile(path, UNLIMITED)
    caller = file.find(TOKENS[0])
    assert caller is not None
    path.unlink()
    if text is not None:
        path.write_text(text)
        path.chmod(0o600)
    for _ in range(3):
        file.refresh()
    assert file.find(TOKENS[0]) is caller
    assert [caller.is_withdrawn] == [False]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "the tokens read before stay valid" in errors[0].getMessage()
    _write(path, f"{DIGESTS[1]} bob")
    file.refresh()
    assert caller.is_withdrawn
    assert file.find(TOKENS[1]) is not None


def test_a_file_of_comments_withdraws_every_token(path: Path) -> None:
    """Whoever wants that can have it; an empty file is what a write under way looks like."""
    file = TokenFile(path, UNLIMITED)
    _write(path, "# closed")
    file.refresh()
    assert file.find(TOKENS[0]) is None


def test_a_file_that_did_not_change_is_not_taken_anew(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Callers stay the same, the log stays quiet."""
    file = TokenFile(path, UNLIMITED)
    caplog.set_level(logging.DEBUG)
    caller = file.find(TOKENS[0])
    caplog.clear()
    _write(path, f"{DIGESTS[0]} alice")
    file.refresh()
    assert file.find(TOKENS[0]) is caller
    assert caplog.records == []


@pytest.mark.parametrize(("mode", "what"), [(0o640, "read"), (0o604, "read"), (0o620, "change"), (0o666, "change")])
def test_a_file_open_to_others_is_warned_of(path: Path, caplog: pytest.LogCaptureFixture, mode: int, what: str) -> None:
    """Once for each time it becomes so."""
    file = TokenFile(path, UNLIMITED)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    _write(path, f"{DIGESTS[1]} bob", mode=mode)
    file.refresh()
    _write(path, f"{DIGESTS[0]} bob", mode=mode)
    file.refresh()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"mode={mode:04o}: they can {what} it" in warning


def test_nothing_shows_a_token_or_its_digest(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither repr nor the log, whatever happens."""
    caplog.set_level(logging.DEBUG)
    file = TokenFile(path, UNLIMITED)
    path.write_text(f"{DIGESTS[1]} bob\n{DIGESTS[1]} bob\n")
    file.refresh()
    shown = f"{file!r} {file.find(TOKENS[0])!r} {parse_tokens(f'{DIGESTS[0]} alice')!r} {caplog.text}"
    for token, digest in zip(TOKENS, DIGESTS, strict=True):
        assert token not in shown
        assert digest not in shown
        assert repr(bytes.fromhex(digest))[2:-1] not in shown
