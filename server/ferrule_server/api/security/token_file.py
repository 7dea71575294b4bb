"""The file of bearer tokens: one line for each with its SHA-256 and its rights; read again when it changes.

    <sha256 in hex> <principal> [admin] [handles=N] [kv_tokens=N] [queued_rows=N] [prefill_rate=N] [retained=SIZE]
        [mask_bytes=SIZE] [call_rate=N] [request_bytes=SIZE] [text_rate=SIZE]

Quotas belong to the principal, not to the token: any of its lines may set them, two lines must not contradict each
other, and ``none`` removes a limit. ``#`` begins a comment.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from ferrule_server.api.security.file_watch import FileWatch, read_small
from ferrule_server.api.security.principal import ADMIN, Caller
from ferrule_server.errors import ConfigError
from ferrule_server.quotas import QuotaLimits
from ferrule_server.settings import setting_of

_LOG = logging.getLogger(__name__)

_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")
_NO_TOKEN: Final = hashlib.sha256(b"").digest()
_PRINCIPAL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:/+-]{0,127}")


_QUOTAS: Final[Mapping[str, tuple[str, Callable[[str], int | None]]]] = {
    setting.name.removeprefix("quota_"): (field.name, setting.kind.read)
    for field in dataclasses.fields(QuotaLimits)
    if (setting := setting_of(field)) is not None
}
"""Name in the file: field of QuotaLimits, and the function that parses its value."""


@dataclasses.dataclass(slots=True)
class TokenTable:
    """The contents of one version of the file.

    Attributes:
        callers: The caller of each token, by its SHA-256.
        quotas: The fields of QuotaLimits that the lines of a principal set.
        lines: The line number of each token, by its SHA-256.
    """

    callers: dict[bytes, Caller] = dataclasses.field(default_factory=dict, repr=False)
    quotas: dict[str, dict[str, int | None]] = dataclasses.field(default_factory=dict)
    lines: dict[bytes, int] = dataclasses.field(default_factory=dict, repr=False)


class TokenFile:
    """The tokens accepted now.

    Invariant: a caller returned by :meth:`find` is withdrawn as soon as the table in use no longer has its token for
    its principal.

    Args:
        path: Path of the file.
        quotas: Quotas of principals whose lines set none.

    Raises:
        ConfigError: The file cannot be read, a line of it is wrong, or it holds no token.
    """

    def __init__(self, path: Path, quotas: QuotaLimits) -> None:
        self._path = path
        self._quotas = quotas
        self._watch = FileWatch((path,), self._read, "token file refused, the tokens read before stay valid")
        self._table = TokenTable()
        self._limits: dict[str, QuotaLimits] = {}
        self._is_open_to_others = False
        table = self._read()
        if not table.callers:
            raise self._empty()
        self._take(table)

    def __repr__(self) -> str:
        return f"TokenFile({str(self._path)!r}, {len(self._table.callers)} tokens)"

    def find(self, token: str) -> Caller | None:
        """Return the caller of a token, or None.

        A look-up by digest needs no comparison in constant time: its duration depends on the digest of what was sent,
        and a client cannot choose a token by the first bits of its SHA-256.
        """
        return self._table.callers.get(hashlib.sha256(token.encode()).digest())

    def limits_of(self, principal: str) -> QuotaLimits:
        """Return the limits of a principal; callable from any thread."""
        return self._limits.get(principal, self._quotas)

    def refresh(self) -> None:
        """Read the file again if it has changed; an unusable file is logged once and changes nothing. May block."""
        table = self._watch.read_if_changed()
        if table is not None and not _are_equal(table, self._table):
            self._take(table)

    @property
    def _named(self) -> str:
        return f"--token-file {self._path}"

    def _empty(self) -> ConfigError:
        return ConfigError(f"{self._named} holds no token; `ferrule token NAME` makes one and prints its line")

    def _read(self) -> TokenTable:
        try:
            text = read_small(self._path).decode("utf-8-sig")
            mode = stat.S_IMODE(self._path.stat().st_mode)
        except OSError as error:
            raise ConfigError(f"{self._named}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{self._named}: is not UTF-8 text") from None
        if not text.strip():  # a file that is being rewritten is empty; comments alone do withdraw all tokens
            raise self._empty()
        self._warn_of_mode(mode)
        try:
            return parse_tokens(text)
        except ConfigError as error:
            raise ConfigError(f"{self._named}, {error}") from None

    def _take(self, table: TokenTable) -> None:
        """Use a new table and withdraw the callers that it no longer has; streams of the others go on."""
        before, withdrawn = self._table, []
        for digest, caller in before.callers.items():
            kept = table.callers.get(digest)
            if kept is not None and kept.principal == caller.principal:
                caller.is_admin = kept.is_admin
                table.callers[digest] = caller
            else:
                withdrawn.append(caller)
        self._limits = {name: dataclasses.replace(self._quotas, **given) for name, given in table.quotas.items()}
        self._table = table  # before the flags, so that `find` returns no withdrawn caller
        for caller in withdrawn:
            caller.is_withdrawn = True
        _LOG.info(
            "tokens read path=%s tokens=%d principals=%d added=%d withdrawn=%d",
            self._path,
            len(table.callers),
            len(table.quotas),
            len(table.callers.keys() - before.callers.keys()),
            len(withdrawn),
        )

    def _warn_of_mode(self, mode: int) -> None:
        """Log once that users other than the owner can access the file."""
        is_open = bool(mode & 0o077)
        if is_open and not self._is_open_to_others:
            what = "change" if mode & 0o022 else "read"
            _LOG.warning("token file open to others path=%s mode=%04o: they can %s it", self._path, mode, what)
        self._is_open_to_others = is_open


def parse_tokens(text: str) -> TokenTable:
    """Return the table of the text of a token file.

    Raises:
        ConfigError: A line is wrong; the message has its number and nothing that could be a token.
    """
    table = TokenTable()
    for number, line in enumerate(text.splitlines(), start=1):
        if words := line.partition("#")[0].split():
            try:
                _add_line(table, number, words)
            except ValueError as error:
                raise ConfigError(f"line {number}: {error}") from None
    return table


def _add_line(table: TokenTable, number: int, words: list[str]) -> None:
    digest_text, name, options = words[0], words[1] if len(words) > 1 else "", words[2:]
    if not _DIGEST.fullmatch(digest_text):
        raise ValueError(
            "must begin with the SHA-256 of a token in 64 hexadecimal digits, never with the token itself; "
            f"it begins with {len(digest_text)} other characters"
        )
    if not _PRINCIPAL.fullmatch(name):
        raise ValueError(
            "the name of a principal must follow: 1 to 128 of A-Z a-z 0-9 ._@:/+-, first a letter or digit"
        )
    digest = bytes.fromhex(digest_text)
    if digest == _NO_TOKEN:
        raise ValueError("this is the SHA-256 of nothing: every client with an empty token would be admitted")
    if digest in table.callers:
        raise ValueError(f"this token is on line {table.lines[digest]} already")
    caller = Caller(name)
    quotas = table.quotas.setdefault(name, {})
    for option in options:
        if option == ADMIN:
            caller.is_admin = True
        else:
            _add_quota(quotas, option)
    table.callers[digest], table.lines[digest] = caller, number


def _add_quota(quotas: dict[str, int | None], option: str) -> None:
    key, equals, text = option.partition("=")
    if not equals or key not in _QUOTAS:
        raise ValueError(f"after the name come only {ADMIN} and {'=..., '.join(_QUOTAS)}=...")
    name, read = _QUOTAS[key]
    try:
        value = None if text == "none" else read(text)
    except ValueError as error:
        raise ValueError(f"{key}: {error}; none lifts the limit") from None
    if quotas.setdefault(name, value) != value:
        raise ValueError(f"{key} differs from an earlier line of the same principal")


def _are_equal(table: TokenTable, other: TokenTable) -> bool:
    return table.quotas == other.quotas and {
        digest: (caller.principal, caller.is_admin) for digest, caller in table.callers.items()
    } == {digest: (caller.principal, caller.is_admin) for digest, caller in other.callers.items()}
