"""Authenticates calls by a bearer token, by a client certificate, or not at all, as the settings say.

No object here and no log line holds a token, and an answer says only that a credential is missing or wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from ferrule_server.api.security.principal import ANYBODY, LOCAL, Caller, Context
from ferrule_server.api.security.token_file import TokenFile
from ferrule_server.config import ServerConfig
from ferrule_server.errors import TokenInvalid, TokenMissing
from ferrule_server.quotas import UNLIMITED, QuotaLimits

_LOG = logging.getLogger(__name__)

_HEADER: Final = "authorization"
_SCHEME: Final = "bearer"
_CERTIFICATE: Final = "x509_pem_cert"
_MAX_REMEMBERED: Final = 1024
_MAX_REMEMBERED_BYTES: Final = 16 << 10
_NO_PRINCIPAL: Final = (
    "the client certificate must name one principal, by one URI as subject alternative name or, without any, "
    "by its common name, of at most 512 bytes, without control characters and other than -, the name of strangers"
)
_GRPC_LOGGER: Final = "grpc._cython.cygrpc"


class OpenAccess:
    """Admits every caller as the principal ``local``: all clients that can reach the server are trusted.

    Args:
        is_admin: Every caller has the role admin, because only this machine can reach the server.
        quotas: Quotas of all callers together.
    """

    def __init__(self, *, is_admin: bool, quotas: QuotaLimits = UNLIMITED) -> None:
        self._caller = Caller(LOCAL, is_admin)
        self._quotas = quotas

    def admit(self, context: Context) -> Caller:  # noqa: ARG002  (every caller is the same)
        """Return the one caller; credentials are ignored."""
        return self._caller

    def limits_of(self, principal: str) -> QuotaLimits:  # noqa: ARG002  (there is one principal)
        """Return the quotas of all callers together."""
        return self._quotas

    def refresh(self) -> None:
        """Do nothing: there are no files."""


class TokenAccess:
    """Admits calls with one of the tokens of a file, whatever certificate the connection has.

    Args:
        tokens: The file.
    """

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens
        self.limits_of = tokens.limits_of
        self.refresh = tokens.refresh

    def admit(self, context: Context) -> Caller:
        """Return the caller that the call's token belongs to.

        Raises:
            TokenMissing: The call has no credentials.
            TokenInvalid: The credentials are not accepted.
        """
        caller = self._tokens.find(_bearer_token(context.invocation_metadata() or ()))
        if caller is None:
            raise TokenInvalid("the token is not accepted: it is mistyped, was replaced, or is for another server")
        return caller


class CertificateAccess:
    """Admits the principal that the client's certificate names, which TLS has verified.

    The principals of 1024 certificates of at most 16 KiB are remembered. So are certificates that name no principal, so
    that retries of a client are not parsed each time.

    Args:
        admins: Principals with the role admin.
        quotas: Quotas of each principal.
    """

    def __init__(self, admins: Sequence[str], quotas: QuotaLimits = UNLIMITED) -> None:
        # Takes 50 ms, which other servers need not wait.
        from ferrule_server.api.security.client_certificate import principal_of_pem

        self._admins = frozenset(admins)
        self._quotas = quotas
        self._parse = principal_of_pem
        self._remembered = lru_cache(_MAX_REMEMBERED)(principal_of_pem)

    def admit(self, context: Context) -> Caller:
        """Return the principal that the connection's certificate names.

        Raises:
            TokenInvalid: It names none.
        """
        pem = _certificate_of(context)
        principal = (self._remembered if len(pem) <= _MAX_REMEMBERED_BYTES else self._parse)(pem)
        if principal is None or principal == ANYBODY:
            raise TokenInvalid(_NO_PRINCIPAL)
        return Caller(principal, principal in self._admins)

    def limits_of(self, principal: str) -> QuotaLimits:  # noqa: ARG002  (all have the same)
        """Return the quotas of each principal."""
        return self._quotas

    def refresh(self) -> None:
        """Do nothing: the TLS files are read again by ``tls.py``."""


# Every member has
#   admit(context) -> Caller               the caller of a call that begins; raises TokenMissing: it has no credentials,
#                                          TokenInvalid: they are not accepted
#   limits_of(principal) -> QuotaLimits    the quotas of a principal; from any thread, raises nothing
#   refresh() -> None                      applies changes of the files of credentials, and logs what is wrong with
#                                          them; may block, so not on the event loop
Access = OpenAccess | TokenAccess | CertificateAccess
"""Decides which callers are admitted, and how much each may use."""


def access_of(config: ServerConfig) -> Access:
    """Return the access that the settings describe, and log the risks that an operator should know.

    Raises:
        ConfigError: The token file is unusable.
    """
    access: Access
    if config.token_file is not None:
        access = TokenAccess(TokenFile(config.token_file, config.quotas))
    elif config.tls_client_ca is not None:
        access = CertificateAccess(config.admins, config.quotas)
    else:
        access = OpenAccess(is_admin=config.listen.is_local, quotas=config.quotas)
    _warn_of_exposure(config)
    logging.getLogger(_GRPC_LOGGER).addFilter(_without_metadata)
    return access


def _certificate_of(context: Context) -> bytes:
    """Return the client's certificate in PEM; empty if there is none, or several."""
    certificates = list((context.auth_context() or {}).get(_CERTIFICATE, ()))
    return certificates[0] if len(certificates) == 1 else b""


def _bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    values = [value for key, value in metadata if key == _HEADER]
    if not values:
        raise TokenMissing("this server requires a bearer token: send the metadata 'authorization: Bearer TOKEN'")
    scheme, _, token = str(values[0]).partition(" ")
    if len(values) > 1 or scheme.lower() != _SCHEME:
        raise TokenInvalid("the metadata must hold one 'authorization: Bearer TOKEN'")
    return token.strip()


def _without_metadata(record: logging.LogRecord) -> bool:
    """Remove from a log line of gRPC the value of a header that is not UTF-8: it may be a mistyped token."""
    if str(record.msg).startswith("Invalid encoding"):
        record.msg, record.args, record.exc_info = "metadata that is not UTF-8", (), None
    return True


def _warn_of_exposure(config: ServerConfig) -> None:
    """Log what other machines can reach, read or use."""
    has_tokens, has_names = config.token_file is not None, config.tls_client_ca is not None
    _LOG.info(
        "access credentials=%s tls=%s max_connections=%d",
        "token" if has_tokens else "certificate" if has_names else "none",
        "mutual" if has_names else "server" if config.tls_cert is not None else "none",
        config.connection_limit,
    )
    if config.listen.is_local:
        return
    if not (has_tokens or has_names):
        _LOG.warning("insecure: everybody who can reach %s can use this server and its memory", config.listen.target)
    if config.tls_cert is None:
        what = "tokens, prompts and outputs travel" if has_tokens else "prompts and outputs travel"
        _LOG.warning("insecure: %s to and from %s in plain text; use --tls-cert", what, config.listen.target)
