"""Where ``ferrule top`` looks: at the whole server as an admin, else at what every caller is told."""

from __future__ import annotations

import itertools
import time
from datetime import datetime

from ferrule_cli.top.figures import LATENCIES, Look
from ferrule_client.errors import AuthError, DrainingError, FerruleError, StartingError, UnsupportedError
from ferrule_client.sync.client import Client
from ferrule_client.types import CacheMetrics, CacheSummary, Status
from ferrule_client.views import Histogram, SequenceView, ServerView

__all__ = ["Source"]

_MAX_SEQUENCES = 256
_NOTHING = Histogram(upper_bounds=(), counts=(0,), sum=0.0)
_NO_NAME = "the proxy shows a whole server by name only, with --instance NAME"


class Source:
    """Looks at the server of a client; ``timeout_s`` is the longest wait for one answer."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._model_id = ""
        self._max_step_rows = 0
        self._note = ""
        self._is_loaded = False

    def look(self, max_cells: int) -> Look:
        """Look once; what the caller is not told is left out, with a note."""
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
            view = client.admin.server_view(max_cells=max_cells, max_sequences=_MAX_SEQUENCES, timeout=timeout)
            self._learn()
            return Look(time.monotonic(), view.status, view, "", self._model_id, self._max_step_rows)
        except AuthError as error:
            self._note = "without the admin role" if error.reason == "ROLE_REQUIRED" else _NO_NAME
        except UnsupportedError:
            self._note = "an older server, which has no server view"
        except (StartingError, DrainingError):
            self._is_loaded = False
            return Look(time.monotonic(), client.status(timeout=timeout))
        return self._look_as_guest()

    def _look_as_guest(self) -> Look:
        client, timeout = self._client, self._timeout_s
        status = client.status(timeout=timeout)
        self._learn()
        metrics = client.admin.cache_metrics(timeout=timeout)
        caches = list(itertools.islice(client.list_caches(timeout=timeout), _MAX_SEQUENCES))
        note = f"{self._note}: status, cache metrics and your own handles"
        return Look(time.monotonic(), status, _guest_view(status, metrics, caches), note, self._model_id)

    def _learn(self) -> None:
        """Ask for what does not change while the server runs."""
        if not self._model_id:
            self._model_id = self._client.model_info(timeout=self._timeout_s).model_id
            self._max_step_rows = self._client.capabilities(timeout=self._timeout_s).max_step_rows


def _guest_view(status: Status, metrics: CacheMetrics, caches: list[CacheSummary]) -> ServerView:
    """Return what a caller without the admin role sees, in the shape of what admins do."""
    return ServerView(
        time=None,
        uptime_s=_age_s(status.start_time),
        status=status,
        cache_metrics=metrics,
        running_appends=0,
        queued_jobs=0,
        num_step_rows=0,
        step_ns=0,
        num_refused={},
        block_map=None,
        sequences=tuple(sorted(map(_own_sequence, caches), key=lambda one: one.expires_in_s)),
        principals=(),
        known_principals=0,
        journal_state="unspecified",
        durable_sequences=0,
        cold_sequences=0,
        tokens_to_recompute=0,
        **{f"{name}_seconds": _NOTHING for name in LATENCIES},
    )


def _own_sequence(cache: CacheSummary) -> SequenceView:
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
        age_s=_age_s(cache.create_time),
        num_pending=0,
        is_appending=False,
        durability=cache.durability,
        tokens_to_recompute=cache.tokens_to_recompute,
    )


def _age_s(start: datetime | None) -> float:
    return 0.0 if start is None else max(0.0, time.time() - start.timestamp())
