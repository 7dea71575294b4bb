"""What ``ferrule top`` shows, computed: rates from two looks at a server, quantiles over the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ferrule_client.types import Status
from ferrule_client.views import Histogram, PrincipalView, ServerView

__all__ = ["LATENCIES", "Figures", "History", "Latency", "Look", "PrincipalFigures", "Rates"]

WINDOW_S = 10.0
"""Quantiles, and the times of principals, are over so many seconds: one second has too few values for a p99."""

LATENCIES = ("step", "queue", "first_token", "inter_token", "decode", "sync")

_NUM_POINTS = 120


@dataclass(frozen=True, slots=True)
class Look:
    """A look at a server."""

    at_s: float  # when, on time.monotonic of this machine
    status: Status
    view: ServerView | None = None  # None: the model is not loaded
    note: str = ""  # why there is less to see than usual, for people; empty: nothing is missing
    model_id: str = ""  # empty: it is not loaded
    max_step_rows: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether everything was seen, as admins do."""
        return self.view is not None and self.view.block_map is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What happened between two looks, each per second unless it says otherwise; None: that cannot be told."""

    seconds: float  # between the looks
    generated_tokens: float
    prompt_tokens: float
    steps: float
    rows_per_step: float | None  # mean; None: there was no step
    busy: float | None  # share of the time in which a step was under way
    refused: float
    refused_by: Mapping[str, float]  # requests refused, by reason; those that were
    prefix_hit_rate: float | None  # share of the prompt tokens looked up that were found; None: none were looked up
    forks: float
    expired: float
    syncs: float  # of the journal


@dataclass(frozen=True, slots=True)
class Latency:
    """Two quantiles, in seconds; None: nothing was measured lately."""

    p50: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrincipalFigures:
    """One principal over the last seconds."""

    principal: str
    live_sequences: int
    kv_tokens: int
    queued_jobs: int
    tokens: float  # appended per second
    queue_s: float | None  # mean wait of an append for its first step; None: it finished none
    run_s: float | None  # mean run time of the steps of an append


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All that is shown of one look, and of those before it."""

    look: Look
    rates: Rates | None  # None: there is nothing yet to compare the look with
    latencies: Mapping[str, Latency]  # by the names of LATENCIES
    principals: tuple[PrincipalFigures, ...]  # whose appends wait longest first
    generated_points: tuple[float, ...]  # generated tokens per second between all looks, oldest first
    restarts: int = 0  # how often the server was restarted while we looked


class History:
    """Looks of the last seconds, all at one run of one server.

    Invariant: the looks are in order of time, of one epoch, and go back WINDOW_S at most, or else there are two.
    """

    def __init__(self) -> None:
        self._looks: deque[Look] = deque()
        self._points: deque[float] = deque(maxlen=_NUM_POINTS)
        self._rates: Rates | None = None
        self._restarts = 0

    def add(self, look: Look) -> Figures:
        """Take the newest look and return what is to be shown. A look that tells nothing new changes no rate."""
        looks = self._looks
        if looks and looks[-1].status.epoch != look.status.epoch:
            self._restarts += bool(looks[-1].status.epoch)
            looks.clear()
            self._rates = None
        if looks and _seconds(looks[-1], look) <= 0.0:
            looks.pop()
        elif looks:
            self._rates = rates(looks[-1], look)
            self._points += [] if self._rates is None else [self._rates.generated_tokens]
        looks.append(look)
        while len(looks) > 2 and _seconds(looks[0], look) > WINDOW_S:
            looks.popleft()
        return Figures(
            look=look,
            rates=self._rates,
            latencies=_latencies(looks[0].view, look.view),
            principals=_principals(looks[0], look),
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
        syncs=_grown(old.sync_seconds.count, new.sync_seconds.count) / seconds,
    )


def as_dict(figures: Figures) -> dict[str, object]:
    """Return the figures as plain values for scripts; of the picture of the pool only how large its cells are."""
    look, view, status = figures.look, figures.look.view, figures.look.status
    facts: dict[str, object] = {"state": status.state, "instance": status.instance, "note": look.note}
    facts |= {"is_whole": look.is_whole, "rates": figures.rates and asdict(figures.rates)}
    if view is None:
        return facts | {"load_progress": status.load_progress, "load_stage": status.load_stage}
    return facts | {
        "uptime_s": round(view.uptime_s, 3),
        "model_id": look.model_id,
        "executor": status.executor,
        "max_step_rows": look.max_step_rows,
        "running_appends": view.running_appends,
        "queued_jobs": view.queued_jobs,
        "queue_depth": status.queue_depth,
        "active_streams": status.active_streams,
        "kv": asdict(view.cache_metrics),
        "journal": _journal(view),
        "latencies_s": {name: asdict(each) for name, each in figures.latencies.items()},
        "live_sequences": status.live_sequences,
        "sequences": list(map(asdict, view.sequences)),
        "principals": list(map(asdict, figures.principals)),
    }


def _journal(view: ServerView) -> dict[str, object] | None:
    """Return the state of the journal; None: there is none, or the caller is not told."""
    if view.journal_state not in ("healthy", "lost"):
        return None
    names = ("durable_sequences", "cold_sequences", "tokens_to_recompute")
    return {"state": view.journal_state} | {name: getattr(view, name) for name in names}


def _seconds(before: Look, now: Look) -> float:
    """Seconds between two looks: by the server's clock where it was seen, which no delay on the way bends."""
    if before.is_whole and now.is_whole and before.view is not None and now.view is not None:
        return now.view.uptime_s - before.view.uptime_s
    return now.at_s - before.at_s


def _grown(before: float, now: float) -> float:
    return now - before if now >= before else now


def _latencies(old: ServerView | None, new: ServerView | None) -> dict[str, Latency]:
    latencies = {}
    for name in LATENCIES if new is not None else ():
        part: Histogram = getattr(new, f"{name}_seconds")
        if old is not None and old is not new:
            part = part.since(getattr(old, f"{name}_seconds"))
        latencies[name] = Latency(part.quantile(0.5), part.quantile(0.99))
    return latencies


def _principals(oldest: Look, look: Look) -> tuple[PrincipalFigures, ...]:
    if look.view is None:
        return ()
    seconds, old = _seconds(oldest, look), oldest.view
    known: dict[str, PrincipalView] = {}
    is_complete = True
    if old is None or seconds <= 0.0:
        seconds = look.view.uptime_s
    else:
        known = {one.principal: one for one in old.principals}
        is_complete = old.known_principals <= len(old.principals)
    figures = [
        _principal(known.get(one.principal, None if is_complete else one), one, seconds) for one in look.view.principals
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
