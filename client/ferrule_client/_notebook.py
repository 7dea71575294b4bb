"""How a notebook shows caches and outputs: small pictures in HTML, made of what the client knows, without a call."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ferrule_client._tip import Tip
    from ferrule_client.types import Output, TokenLogprob

_MAX_BLOCKS = 256
_CELL = "display:inline-block;width:10px;height:10px;margin:1px;border:1px solid #0f766e;background:"
_FULL, _PENDING = "#0f766e", "#c2410c"


def cache_html(tip: Tip, block_size: int) -> str:
    """Return a sequence as a row of blocks of ``block_size`` tokens, the last one as full as it is."""
    num_full, num_rest = divmod(tip.length, block_size)
    cells = [f'<span style="{_CELL}{_FULL}"></span>' for _ in range(min(num_full, _MAX_BLOCKS))]
    if num_full > _MAX_BLOCKS:
        cells.append(f" and {num_full - _MAX_BLOCKS} more ")
    if num_rest:
        share = round(100 * num_rest / block_size)
        gradient = f"linear-gradient(to right,{_FULL} {share}%,transparent {share}%)"
        cells.append(f'<span style="{_CELL}{gradient}"></span>')
    facts = [f"{tip.length} tokens in blocks of {block_size}"]
    if tip.pending:
        facts.append(f'<span style="color:{_PENDING}">pending: {tip.pending[-1]}</span>')
    if tip.durability == "journaled":
        facts.append("durable")
    if tip.is_released:
        facts.append("released")
    return f"<div><code>{escape(tip.handle.handle_id)}</code> {', '.join(facts)}<br>{''.join(cells)}</div>"


def output_html(output: Output) -> str:
    """Return an output as a table of its fields, the most likely tokens of its newest row with bars."""
    rows = [("length", f"{output.handle.length}")]
    if output.tokens:
        rows.append(("token", f"{output.tokens[-1]}"))
    if output.logprobs:
        rows.append(("log-probability", f"{output.logprobs[-1]:.3f}"))
    rows += [(name, " by ".join(map(str, array.shape))) for name, array in output.arrays.items()]
    if output.replayed:
        rows.append(("replayed", "yes"))
    rows.append(("on the server", f"{output.timing.run_ns / 1e6:.2f} ms, {output.timing.queue_ns / 1e6:.2f} ms queued"))
    rows += [(f"{one.token}", _bar(one)) for one in (output.top_logprobs[-1] if output.top_logprobs else ())]
    return f"<table>{''.join(f'<tr><th>{name}</th><td>{text}</td></tr>' for name, text in rows)}</table>"


def _bar(one: TokenLogprob) -> str:
    probability = math.exp(one.logprob)
    width = round(100 * probability)
    bar = f'<span style="display:inline-block;height:10px;width:{width}px;background:{_FULL}"></span>'
    return f"{bar} {probability:.1%}"
