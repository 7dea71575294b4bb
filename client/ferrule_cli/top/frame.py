"""One screen of ``ferrule top``: figures become exactly as many lines as there is room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.cells import cell_len
from rich.text import Text

from ferrule_cli.top.figures import WINDOW_S, Figures, Latency, Look, PrincipalFigures, Rates
from ferrule_cli.top.parts import Column, Glyphs, bar, block_lines, clean, legend, short, span, spark, table
from ferrule_client.views import SequenceView, ServerView

__all__ = ["Frame", "map_cells"]

_STATES = {"ready": "green", "busy": "green", "draining": "yellow", "starting": "yellow", "failed": "bright_red"}
_JOURNALS = {"healthy": "bold green", "lost": "bold bright_red"}
_TIMES = ("step", "queue", "decode", "first_token", "inter_token")
_TWO_COLUMNS = 110
_MIN_LIST = 3
_BLOCKS_TITLE = len("-- blocks  ")
_SOON_S = 10.0
_UNKNOWN = "-"


def map_cells(width: int, height: int) -> int:
    """Return how many cells of the pool's picture a screen has room for."""
    return max(1, width) * _map_height(height)


def _map_height(height: int) -> int:
    return max(1, min(16, (height - 10) // 3))


@dataclass(frozen=True, slots=True)
class Frame:
    """Draws figures on a screen of so many cells."""

    width: int
    height: int
    glyphs: Glyphs

    def lines(self, figures: Figures, *, note: str = "", hint: str = "") -> list[Text]:
        """Return at most ``height`` lines of at most ``width`` cells.

        A note is shown at the top if the server does not answer, because the figures are then out of date. A hint about
        the keys is shown at the bottom.
        """
        lines = [self._header(figures.look, is_away=bool(note))]
        lines += [Text(clean(each), "bold yellow") for each in (note, *_notes(figures)) if each]
        view = figures.look.view
        room = self.height - bool(hint)
        if view is not None:
            lines += [*self._activity(figures, view), self._pool(view), *_journal(figures, view)]
            if view.block_map is not None:
                lines += self._map(view, room - len(lines))
            lines += self._lists(figures, view, room - len(lines))
        lines = lines[:room]
        if hint:
            lines += [Text("")] * (room - len(lines)) + [Text(hint, "dim")]
        for line in lines:
            line.rstrip()
            line.truncate(self.width, overflow="ellipsis" if self.glyphs.rule == "─" else "crop")
            line.no_wrap = True
        return lines

    def _header(self, look: Look, *, is_away: bool) -> Text:
        """Return the first line: the state of the server in any case, the rest as there is room."""
        status, view = look.status, look.view
        shown, style = ("away", "bold yellow") if is_away else (status.state, _STATES.get(status.state, ""))
        name, state = (clean(status.instance), "cyan"), (f"{self.glyphs.dot} {shown}", style)
        line = Text.assemble(("ferrule top", "bold"), "  ", name, "  ", state)
        if cell_len(line.plain) > self.width:
            return Text.assemble(state, "  ", name)
        if view is not None:
            line.append(f"  up {span(view.uptime_s)}", "dim")
            line.append(f"  {clean(look.model_id)} on {clean(status.executor)}")
        return line

    def _activity(self, figures: Figures, view: ServerView) -> list[Text]:
        rates, status = figures.rates, view.status
        tokens = _words(
            ("generated", _rate(rates, "generated_tokens")),
            ("prompt", _rate(rates, "prompt_tokens")),
            ("prefix hits", _hits(rates, view)),
        )
        room = max(0, min(60, self.width - 11 - cell_len(tokens.plain)))
        sparkline = spark(figures.generated_points, room, self.glyphs)
        lines = [_labelled("tokens/s", tokens, (sparkline, "green")), self._steps(figures, view)]
        queue = _words(
            ("jobs", short(view.queued_jobs) if figures.look.is_whole else _UNKNOWN),
            ("waiting", short(status.queue_depth)),
            ("streams", short(status.active_streams)),
            ("refused/s", _rate(rates, "refused")),
        )
        reasons = "" if rates is None else ", ".join(f"{why} {short(rate)}" for why, rate in rates.refused_by.items())
        lines.append(_labelled("queue", queue, (f"  {clean(reasons)}", "red")))
        if figures.look.is_whole:
            lines.append(_labelled("ms p50/p99", self._latencies(figures)))
        return lines

    def _steps(self, figures: Figures, view: ServerView) -> Text:
        rates, levels = figures.rates, self.glyphs.levels
        line = _labelled("steps", _words(("per second", _rate(rates, "steps"))))
        if not figures.look.is_whole:
            return line.append_text(_words(("sequences in the last", short(view.status.current_batch_size))))
        busy = 0.0 if rates is None or rates.busy is None else rates.busy
        rows = f"{_rate(rates, 'rows_per_step')} of {figures.look.max_step_rows}"
        line.append_text(_words(("rows each", rows), ("busy", f"{busy:.0%}")))
        width = max(0, min(30, self.width - cell_len(line.plain)))
        return line.append_text(bar([(busy, levels[0], "green"), (1 - busy, levels[3], "dim")], width))

    def _latencies(self, figures: Figures) -> Text:
        text = Text()
        for name in _TIMES:
            title = name.replace("inter", "next").replace("_", " ")
            each = figures.latencies.get(name, Latency())
            more = _words((title, _UNKNOWN if each.p50 is None else f"{_ms(each.p50)}/{_ms(each.p99)}"))
            if cell_len(text.plain) + cell_len(more.plain) > self.width - 11:
                break
            text.append_text(more)
        return text

    def _pool(self, view: ServerView) -> Text:
        kv, levels = view.cache_metrics, self.glyphs.levels
        num_blocks = kv.used_blocks + kv.cached_blocks + kv.empty_blocks
        total = max(1, num_blocks)
        counts = (kv.shared_blocks, kv.used_blocks - kv.shared_blocks, kv.cached_blocks, kv.empty_blocks)
        shares = [count / total for count in counts]
        parts = zip(shares, levels, ("cyan", "blue", "bright_black", "bright_black"), strict=True)
        picture = bar(list(parts), max(8, min(40, self.width - 74)))
        shared, own, cached, empty = map(short, counts)
        used = _words(("used", f"{kv.used_blocks / total:.0%}"), ("of", short(num_blocks)))
        held = _words(("shared", shared, "bold cyan"), ("own", own, "bold blue"), ("cached", cached), ("empty", empty))
        return _labelled("KV blocks", picture, "  ", used, held)

    def _map(self, view: ServerView, room: int) -> list[Text]:
        assert view.block_map is not None
        height = min(_map_height(self.height), room - 1 - 2 * _MIN_LIST)
        if height < 1:
            return []
        lines, cell_blocks = block_lines(view.block_map, self.width, height, self.glyphs)
        return [self._title("blocks", legend(cell_blocks, self.glyphs, self.width - _BLOCKS_TITLE)), *lines]

    def _lists(self, figures: Figures, view: ServerView, room: int) -> list[Text]:
        """Leases and principals: side by side where it is wide, else one below the other, principals with less."""
        if room < _MIN_LIST:
            return []
        if figures.look.is_whole and self.width >= _TWO_COLUMNS:
            left = (self.width - 3) // 2
            return _beside(self._leases(view, left, room), self._principals(figures, self.width - left - 3, room), left)
        if not figures.look.is_whole or room < 2 * _MIN_LIST:
            return self._leases(view, self.width, room)
        below = min(max(_MIN_LIST, 2 + len(figures.principals)), room // 2)
        leases = self._leases(view, self.width, room - below)
        return leases + self._principals(figures, self.width, room - len(leases))

    def _leases(self, view: ServerView, width: int, height: int) -> list[Text]:
        handles = f"{short(view.status.live_sequences)} handles"
        title = self._title("leases", Text(f"that end soonest, of {handles}", "dim"), width)
        return [title, *table(_LEASES, view.sequences, width, height - 1)][:height]

    def _principals(self, figures: Figures, width: int, height: int) -> list[Text]:
        title = self._title("principals", Text(f"slowest first, means of {WINDOW_S:.0f} s", "dim"), width)
        return [title, *table(_PRINCIPALS, figures.principals, width, height - 1)][:height]

    def _title(self, name: str, rest: Text, width: int | None = None) -> Text:
        line = Text.assemble((self.glyphs.rule * 2 + " ", "dim"), (name, "bold"), "  ").append_text(rest)
        line.truncate(width or self.width)
        return line


def _journal(figures: Figures, view: ServerView) -> list[Text]:
    """Return the line of the journal, if there is one."""
    if (style := _JOURNALS.get(view.journal_state)) is None:
        return []
    sync = figures.latencies.get("sync", Latency())
    words = _words(
        ("journal", view.journal_state, style),
        ("sequences", short(view.durable_sequences)),
        ("cold", short(view.cold_sequences)),
        ("to recompute", short(view.tokens_to_recompute)),
        ("syncs/s", _rate(figures.rates, "syncs")),
        ("ms p50/p99", _UNKNOWN if sync.p50 is None else f"{_ms(sync.p50)}/{_ms(sync.p99)}"),
    )
    return [_labelled("durable", words)]


def _notes(figures: Figures) -> list[str]:
    look = figures.look
    notes = [look.note]
    if look.view is None:
        progress = f" {look.status.load_progress:.0%}" if look.status.load_progress < 1 else ""
        notes.append(f"{look.status.state}{progress} {look.status.load_stage}".rstrip())
    if look.status.fallback_reason:
        notes.append(f"fallback: {look.status.fallback_reason}")
    if figures.restarts:
        notes.append(f"the server was restarted while we looked: {figures.restarts}")
    return notes


def _labelled(label: str, *parts: Text | tuple[str, str] | str) -> Text:
    return Text.assemble((f"{label:<11}", "dim"), *parts)


def _words(*pairs: tuple[str, str] | tuple[str, str, str]) -> Text:
    """Return names and values; a third word is the style of the value."""
    text = Text()
    for name, value, *style in pairs:
        text.append(f"{name} ", "dim").append(value, style[0] if style else "bold").append("  ")
    return text


def _rate(rates: Rates | None, name: str) -> str:
    value = getattr(rates, name, None)
    return _UNKNOWN if value is None else short(value)


def _hits(rates: Rates | None, view: ServerView) -> str:
    """Share of the prompt tokens that the prefix cache had: lately, or since start where no prompt came lately."""
    kv = view.cache_metrics
    if rates is not None and rates.prefix_hit_rate is not None:
        return f"{rates.prefix_hit_rate:.0%}"
    return f"{kv.num_prefix_hit_tokens / kv.num_prefix_lookup_tokens:.0%}" if kv.num_prefix_lookup_tokens else _UNKNOWN


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return _UNKNOWN
    value = seconds * 1e3
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 100 else short(value)


def _beside(left: Sequence[Text], right: Sequence[Text], width: int) -> list[Text]:
    lines = []
    for one, other in zip_longest(left, right, fillvalue=Text()):
        line = one.copy()
        line.pad_right(max(0, width + 3 - cell_len(line.plain)))
        lines.append(line.append_text(other))
    return lines


def _left(sequence: SequenceView) -> str:
    if sequence.num_pending:
        return "in use"
    return ("! " if sequence.expires_in_s < _SOON_S else "") + span(sequence.expires_in_s)


_LEASES: tuple[Column[SequenceView], ...] = (
    Column("handle", 16, lambda one: one.handle_id, is_left=True, style=lambda _: "cyan"),
    Column("ends in", 7, _left, style=lambda one: "bright_red" if _left(one).startswith("!") else ""),
    Column("tokens", 6, lambda one: short(one.length), 1),
    Column("blocks", 6, lambda one: short(one.num_blocks), 3),
    Column("shared", 6, lambda one: short(one.num_shared_blocks), 4),
    Column("principal", 14, lambda one: one.principal, 2, is_left=True),
    Column("age", 5, lambda one: span(one.age_s), 6),
    Column("forked from", 16, lambda one: one.parent_handle_id or _UNKNOWN, 7, is_left=True, style=lambda _: "dim"),
)
_PRINCIPALS: tuple[Column[PrincipalFigures], ...] = (
    Column("principal", 14, lambda one: one.principal, is_left=True, style=lambda _: "cyan"),
    Column("queue ms", 8, lambda one: _ms(one.queue_s)),
    Column("step ms", 7, lambda one: _ms(one.run_s), 5),
    Column("tokens/s", 8, lambda one: short(one.tokens), 1),
    Column("jobs", 4, lambda one: short(one.queued_jobs), 2),
    Column("handles", 7, lambda one: short(one.live_sequences), 3),
    Column("KV tokens", 9, lambda one: short(one.kv_tokens), 4),
)
