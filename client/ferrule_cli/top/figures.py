"""What ``ferrule top`` shows, computed: rates from two looks at a server, quantiles over the last seconds."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ferrule_client.types import Status
from ferrule_client.views import Histogram, PrincipalView, ServerView

__all__ = ["Figures", "History", "Latency", "Look", "PrincipalFigures", "Rates"]

WINDOW_S = 10.0
"""Quantiles, and the times of principals, are over so many seconds: one second has too few values for a p99."""

_NUM_POINTS = 120
_LATENCIES = ("step", "queue", "first_token", "inter_token", "decode")


@dataclass(frozen=True, slots=True)
class Look:
    """A look at a server.

    Attributes:
        at_s: When, on ``time.monotonic`` of this machine.
        status: How the server is doing.
        view: The rest; None: the model is not loaded.
        note: Why there is less to see than usual, for people; empty: nothing is missing.
        model_id: Name of the model; empty: it is not loaded.
        max_step_rows: Most rows in one step.
    """

    at_s: float
    status: Status
    view: ServerView | None = None
    note: str = ""
    model_id: str = ""
    max_step_rows: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether everything was seen, as admins do."""
        return self.view is not None and self.view.block_map is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What happened between two looks, each per second unless it says otherwise; None: that cannot be told.

    Attributes:
        seconds: Between the looks.
        rows_per_step: Mean rows of a step; None: there was no step.
        busy: Share of the time in which a step was under way.
        refused_by: Requests refused, by reason; those that were.
        prefix_hit_rate: Share of the prompt tokens looked up that were found; None: none were looked up.
    """

    seconds: float
    generated_tokens: float
    prompt_tokens: float
    steps: float
    rows_per_step: float | None
    busy: float | None
    refused: float
    refused_by: Mapping[str, float]
    prefix_hit_rate: float | None
    forks: float
    expired: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Two quantiles, in seconds; None: nothing was measured lately."""

    p50: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrincipalFigures:
    """One principal over the last seconds.

    Attributes:
        tokens: Appended per second.
        queue_s: Mean wait of an append for its first step; None: it finished none.
        run_s: Mean run time of the steps of an append.
    """

    principal: str
    live_sequences: int
    kv_tokens: int
    queued_jobs: int
    tokens: float
    queue_s: float | None
    run_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All that is shown of one look, and of those before it.

    Attributes:
        look: The newest.
        rates: None: there is nothing yet to compare it with.
        latencies: By ``step``, ``queue``, ``first_token``, ``inter_token`` and ``decode``.
        principals: Whose appends wait longest first.
        generated_points: Generated tokens per second between all looks, oldest first.
        restarts: How often the server was restarted while we looked.
    """

    look: Look
    rates: Rates | None
    latencies: Mapping[str, Latency]
    principals: tuple[PrincipalFigures, ...]
    generated_points: tuple[float, ...]
    restarts: int = 0


@dataclass(slots=True)
class History:
    """Looks of the last seconds, all at one run of one server.

    Invariant: the looks are in order of time, of one epoch, and go back WINDOW_S at most, or else there are two.
    """

    _looks: deque[Look] = field(default_factory=deque)
    _points: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_POINTS))
    _rates: Rates | None = None
    _restarts: int = 0

    def add(self, look: Look) -> Figures:
        """Take the newest look and return what is to be shown. A look that tells nothing new changes no rate."""
        if self._looks and _epoch(self._looks[-1]) != _epoch(look):
            self._restarts += bool(_epoch(self._looks[-1]))
            self._looks.clear()
            self._rates = None
        if self._looks and _seconds(self._looks[-1], look) <= 0.0:
            self._looks.pop()
        elif self._looks:
            self._rates = rates(self._looks[-1], look)
            self._points += [] if self._rates is None else [self._rates.generated_tokens]
        self._looks.append(look)
        while len(self._looks) > 2 and _seconds(self._looks[0], look) > WINDOW_S:
            self._looks.popleft()
        return self._figures(look)

    def _figures(self, look: Look) -> Figures:
        oldest = self._looks[0]
        return Figures(
            look=look,
            rates=self._rates,
            latencies=_latencies(oldest.view, look.view),
            principals=_principals(oldest, look),
            generated_points=tuple(self._points),
            restarts=self._restarts,
        )


def rates(before: Look, now: Look) -> Rates | None:
    """Return what happened between two looks; None where the one or the other saw no loaded model, or no time passed.

    A number that is smaller than before was counted anew: all of it happened in between.
    """
    seconds = _seconds(before, now)
    if before.view is None or now.view is None or seconds <= 0.0:
        return None
    old, new = before.view, now.view

    def per_second(name: str) -> float:
        part = "status" if hasattr(new.status, name) else "cache_metrics"
        return _grown(getattr(getattr(old, part), name), getattr(getattr(new, part), name)) / seconds

    is_whole = before.is_whole and now.is_whole
    num_steps = _grown(old.status.num_steps, new.status.num_steps)
    num_rows = _grown(old.num_step_rows, new.num_step_rows)
    looked_up, found = per_second("num_prefix_lookup_tokens"), per_second("num_prefix_hit_tokens")
    by_reason = {why: _grown(old.num_refused.get(why, 0), count) / seconds for why, count in new.num_refused.items()}
    return Rates(
        seconds=seconds,
        generated_tokens=per_second("num_decode_tokens"),
        prompt_tokens=per_second("num_prefill_tokens"),
        steps=num_steps / seconds,
        rows_per_step=num_rows / num_steps if num_steps and is_whole else None,
        busy=min(1.0, _grown(old.step_ns, new.step_ns) * 1e-9 / seconds) if is_whole else None,
        refused=per_second("num_errors"),
        refused_by={why: rate for why, rate in by_reason.items() if rate > 0.0},
        prefix_hit_rate=min(1.0, found / looked_up) if looked_up else None,
        forks=per_second("num_forks"),
        expired=per_second("num_expired"),
    )


def as_dict(figures: Figures) -> dict[str, object]:
    """Return the figures as plain values for scripts; of the picture of the pool only how large its cells are."""
    look = figures.look
    view = look.view
    facts: dict[str, object] = {"state": look.status.state, "instance": look.status.instance, "note": look.note}
    facts["is_whole"] = look.is_whole
    facts["rates"] = None if figures.rates is None else dataclasses.asdict(figures.rates)
    if view is None:
        return facts | {"load_progress": look.status.load_progress, "load_stage": look.status.load_stage}
    facts |= {"uptime_s": round(view.uptime_s, 3), "model_id": look.model_id, "executor": look.status.executor}
    facts |= {"max_step_rows": look.max_step_rows, "running_appends": view.running_appends}
    facts |= {"queued_jobs": view.queued_jobs, "queue_depth": look.status.queue_depth}
    facts["active_streams"] = look.status.active_streams
    facts["kv"] = dataclasses.asdict(view.cache_metrics)
    facts["latencies_s"] = {name: dataclasses.asdict(each) for name, each in figures.latencies.items()}
    facts["live_sequences"] = look.status.live_sequences
    facts["sequences"] = [dataclasses.asdict(each) for each in view.sequences]
    facts["principals"] = [dataclasses.asdict(each) for each in figures.principals]
    return facts


def _epoch(look: Look) -> str:
    return look.status.epoch


def _seconds(before: Look, now: Look) -> float:
    """Seconds between two looks: by the server's clock where it was seen, which no delay on the way bends."""
    if before.is_whole and now.is_whole and before.view is not None and now.view is not None:
        return now.view.uptime_s - before.view.uptime_s
    return now.at_s - before.at_s


def _grown(before: float, now: float) -> float:
    return now - before if now >= before else now


def _latencies(old: ServerView | None, new: ServerView | None) -> dict[str, Latency]:
    if new is None:
        return {}

    def lately(name: str) -> Latency:
        total: Histogram = getattr(new, f"{name}_seconds")
        part = total if old is None or old is new else total.since(getattr(old, f"{name}_seconds"))
        return Latency(part.quantile(0.5), part.quantile(0.99))

    return {name: lately(name) for name in _LATENCIES}


def _principals(oldest: Look, look: Look) -> tuple[PrincipalFigures, ...]:
    if look.view is None:
        return ()
    seconds = _seconds(oldest, look)
    old = oldest.view
    if old is None or seconds <= 0.0:
        figures = [_principal(None, one, look.view.uptime_s) for one in look.view.principals]
    else:
        known = {one.principal: one for one in old.principals}
        is_complete = old.known_principals <= len(old.principals)
        figures = [
            _principal(known.get(one.principal, None if is_complete else one), one, seconds)
            for one in look.view.principals
        ]
    return tuple(sorted(figures, key=lambda one: (-(one.queue_s or 0.0), -one.queued_jobs, one.principal)))


def _principal(old: PrincipalView | None, new: PrincipalView, seconds: float) -> PrincipalFigures:
    """What a principal did since an earlier look; with None since ever: it was not there then."""

    def grown(name: str) -> int:
        before = 0 if old is None or old.num_appends > new.num_appends else getattr(old, name)
        return int(getattr(new, name)) - before

    num_appends = grown("num_appends")
    return PrincipalFigures(
        principal=new.principal,
        live_sequences=new.live_sequences,
        kv_tokens=new.kv_tokens,
        queued_jobs=new.queued_jobs,
        tokens=grown("num_tokens") / seconds if seconds > 0.0 else 0.0,
        queue_s=grown("queue_ns") * 1e-9 / num_appends if num_appends else None,
        run_s=grown("run_ns") * 1e-9 / num_appends if num_appends else None,
    )
