"""What both clients need to open a channel: options, credentials, and the metadata of calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import grpc

from ferrule_client._route import INSTANCE_KEY
from ferrule_client.types import TlsConfig

_MAX_REPLY_BYTES = 256 << 20

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # What we may send is the server's to decide; what we take is bounded, as a guard against nonsense.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", _MAX_REPLY_BYTES),
    # Tokens and floats do not shrink, and a compressed message may hide a huge one: neither sent nor accepted.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Notice a dead peer while calls are open. Servers refuse pings more often than every 10 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # gRPC waits at least this long for the answer to a ping: 60 s unless set
    ("grpc.http2.max_pings_without_data", 0),
    # Retries are ours, where they can tell an append from a creation.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
"""Called with an empty request, bytes in and bytes out."""

Metadata = tuple[tuple[str, str | bytes], ...]
"""What travels with a call besides its message."""

Extra = Callable[[], Iterable[tuple[str, str | bytes]]]
"""Returns what the caller wants to travel with the call that is made now."""

_MOST_KNOWN = 256


class Labels:
    """Makes what travels with each call: the token, the instance that it is for, and what the caller adds.

    Each call also says how large a reply the channel takes, else the server would refuse replies beyond 4 MiB.
    ``extra`` is called for each attempt, in the thread that makes the call; what we set ourselves it cannot change.
    """

    def __init__(self, token: str | None, extra: Extra | None) -> None:
        self._always: Metadata = (("ferrule-max-reply-bytes", str(_MAX_REPLY_BYTES)),)
        if token:
            self._always = (*self._always, ("authorization", f"Bearer {token}"))
        self._extra = extra
        self._known: dict[str, Metadata] = {}

    def of(self, instance: str) -> Metadata:
        """Return the metadata of a call for an instance, or if that is empty, for any."""
        known = self._always if not instance else self._known.get(instance) or self._of_new(instance)
        if self._extra is None:
            return known
        ours = [key for key, _ in known]
        return (*known, *((key, value) for key, value in self._extra() if key not in ours))

    def _of_new(self, instance: str) -> Metadata:
        if len(self._known) > _MOST_KNOWN:  # handles that came from elsewhere may name anything
            self._known.clear()
        made = self._known[instance] = (*self._always, (INSTANCE_KEY, instance))
        return made


def secrets_of(tls: bool | TlsConfig) -> tuple[grpc.ChannelCredentials, list[tuple[str, int | str]]]:
    """Return the credentials of an encrypted channel, and all its options."""
    config = tls if isinstance(tls, TlsConfig) else TlsConfig()
    options: list[tuple[str, int | str]] = list(CHANNEL_OPTIONS)
    if config.server_name:
        options.append(("grpc.ssl_target_name_override", config.server_name))
    keys = (config.root_certificates, config.private_key, config.certificate_chain)
    return grpc.ssl_channel_credentials(*keys), options


def warn_of_plain_token(target: str) -> None:
    """Warn where ``connect`` was called, if the token would leave this machine unencrypted."""
    host = target.rpartition(":")[0].strip("[]")
    is_local = target.startswith("unix:") or host in ("localhost", "::1") or host.startswith("127.")
    if not is_local:
        warnings.warn(f"the token travels to {target} in plain text; use tls", stacklevel=6)
