"""Where ``ferrule top`` looks: at the whole server as an admin, else at what every caller is told."""

from __future__ import annotations

import itertools
import time

from ferrule_cli.top.figures import Look
from ferrule_client.errors import AuthError, DrainingError, FerruleError, StartingError, UnsupportedError
from ferrule_client.sync.client import Client
from ferrule_client.types import CacheMetrics, CacheSummary, Status
from ferrule_client.views import Histogram, SequenceView, ServerView

__all__ = ["Source"]

MAX_SEQUENCES = 256
_MAX_OWN = 256
_NOTHING = Histogram(upper_bounds=(), counts=(0,), sum=0.0)
_NO_ROLE = "without the admin role: status, cache metrics and your own handles"
_NO_NAME = (
    "the proxy shows a whole server by name only, with --instance NAME: status, cache metrics and your own handles"
)
_OLDER = "an older server, which has no server view: status, cache metrics and your own handles"


class Source:
    """Looks at one server.

    Args:
        client: Connected to it.
        timeout_s: Longest wait for one answer.
    """

    def __init__(self, client: Client, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._model_id = ""
        self._max_step_rows = 0
        self._note = ""
        self._is_loaded = False

    def look(self, max_cells: int) -> Look:
        """Look once; what the caller is not told is left out, with a note.

        Raises:
            FerruleError: The server does not answer, or tells this caller nothing.
        """
        try:
            return self._look(max(1, max_cells))
        except FerruleError:
            self._is_loaded = False
            raise

    def _look(self, max_cells: int) -> Look:
        client, timeout = self._client, self._timeout_s
        if not self._is_loaded:  # the other calls would be tried again until they time out
            status = client.status(timeout=timeout)
            self._is_loaded = status.state != "starting"
            self._note = self._model_id = ""
            if not self._is_loaded:
                return Look(time.monotonic(), status)
        if self._note:  # asking again and again would fill the server's log
            return self._look_as_guest()
        try:
            view = client.admin.server_view(max_cells=max_cells, max_sequences=MAX_SEQUENCES, timeout=timeout)
            self._learn()
            return Look(time.monotonic(), view.status, view, "", self._model_id, self._max_step_rows)
        except AuthError as error:
            self._note = _NO_ROLE if error.reason == "ROLE_REQUIRED" else _NO_NAME
        except UnsupportedError:
            self._note = _OLDER
        except (StartingError, DrainingError):
            self._is_loaded = False
            return Look(time.monotonic(), client.status(timeout=timeout))
        return self._look_as_guest()

    def _look_as_guest(self) -> Look:
        client, timeout = self._client, self._timeout_s
        status = client.status(timeout=timeout)
        self._learn()
        metrics = client.admin.cache_metrics(timeout=timeout)
        caches = list(itertools.islice(client.list_caches(timeout=timeout), _MAX_OWN))
        return Look(time.monotonic(), status, _guest_view(status, metrics, caches), self._note, self._model_id)

    def _learn(self) -> None:
        """Ask for what does not change while the server runs."""
        if not self._model_id:
            self._model_id = self._client.model_info(timeout=self._timeout_s).model_id
            self._max_step_rows = self._client.capabilities(timeout=self._timeout_s).max_step_rows


def _guest_view(status: Status, metrics: CacheMetrics, caches: list[CacheSummary]) -> ServerView:
    """Return what a caller without the admin role sees, in the shape of what admins do."""
    sequences = sorted(map(_own_sequence, caches), key=lambda one: one.expires_in_s)
    now = time.time()
    return ServerView(
        time=None,
        uptime_s=0.0 if status.start_time is None else max(0.0, now - status.start_time.timestamp()),
        status=status,
        cache_metrics=metrics,
        running_appends=0,
        queued_jobs=0,
        num_step_rows=0,
        step_ns=0,
        num_refused={},
        block_map=None,
        sequences=tuple(sequences),
        principals=(),
        known_principals=0,
        step_seconds=_NOTHING,
        queue_seconds=_NOTHING,
        first_token_seconds=_NOTHING,
        inter_token_seconds=_NOTHING,
        decode_seconds=_NOTHING,
    )


def _own_sequence(cache: CacheSummary) -> SequenceView:
    age_s = 0.0 if cache.create_time is None else max(0.0, time.time() - cache.create_time.timestamp())
    return SequenceView(
        handle_id=cache.handle_id,
        parent_handle_id="",
        principal="",
        length=cache.length,
        reserved_length=cache.reserved_length,
        num_blocks=cache.num_blocks,
        num_shared_blocks=cache.num_shared_blocks,
        kv_bytes=cache.kv_bytes,
        expires_in_s=cache.lease.expires_in_s,
        ttl_s=cache.lease.ttl_s,
        age_s=age_s,
        num_pending=0,
        is_appending=False,
    )
