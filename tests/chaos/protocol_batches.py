"""Many appends in one call or one frame: judged in item order, failing alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import rule

from ferrule.v1 import executor_pb2
from tests.chaos.model_policies import Drafts
from tests.chaos.protocol_base import (
    Item,
    ProtocolBase,
    ask_st,
    drafts_st,
    index_st,
    principal_st,
    result_of,
    ttl_st,
)
from tests.chaos.sequential_model import Ask

MAX_ITEMS = 6


@dataclass(frozen=True)
class Entry:
    """One item as it is drawn; ``index`` None makes a new sequence. What its call has no field for is left out."""

    index: int | None
    ask: Ask
    ttl_s: float | None
    drafts: Drafts | None
    is_final: bool
    shift: int | None


entry_st = st.builds(
    Entry,
    st.one_of(index_st, index_st, index_st, st.none()),
    ask_st,
    ttl_st,
    st.one_of(st.none(), drafts_st()),
    st.sampled_from([True, True, False]),
    st.sampled_from([None, None, 0, 0, 0, 1]),
)
entries_st = st.lists(entry_st, min_size=1, max_size=MAX_ITEMS)


class BatchRules(ProtocolBase):
    """Batches, and frames of streams with many items."""

    @rule(
        principal=principal_st,
        entries=entries_st,
        rpc=st.sampled_from(["BatchPrefill", "BatchDecode", "UnifiedDecode", "StreamDecode"]),
        spread=st.sampled_from([1, 1, 1_000]),
        is_lost=st.booleans(),
    )
    def batch(self, *, principal: str, entries: list[Entry], rpc: str, spread: int, is_lost: bool) -> None:
        """Send items together; where ``spread`` is 1 many of them are on one handle."""
        if self.is_full:
            return
        first = entries[0].index or 0
        items: list[Item] = []
        for entry in entries:
            at = entry.index if spread > 1 or entry.index is None or entry.index % 3 else first
            item = self._item(rpc, replace(entry, index=at))
            # Items on different sequences are in no order, so not even a request_id may join them.
            if any(item.ask.request_id == other.ask.request_id and item != other for other in items):
                item = replace(item, ask=replace(item.ask, request_id=""))
            items.append(item)
        messages = [self.message(item, principal) for item in items]
        for is_read in (False, True) if is_lost else (True,):
            answers = self._exchange(rpc, messages, principal)
            for item, got in zip(items, answers, strict=True):
                expected = self.predict(item, principal, got)
                if is_read:
                    self.check(expected, got, item.ask.drafts)
        self.steps[f"{rpc} of many"] += 1

    def _item(self, rpc: str, entry: Entry) -> Item:
        ask, drafts = entry.ask, entry.drafts
        kind = {"BatchPrefill": "prefill", "BatchDecode": "decode", "UnifiedDecode": "unified"}.get(rpc)
        if kind is None:
            kind = "verify" if drafts else ("decode" if entry.is_final and entry.shift is None else "unified")
        issued = None if entry.index is None else self.pick(entry.index)
        if kind in ("prefill", "unified"):
            ask = replace(ask, ttl_s=entry.ttl_s)
        if kind == "verify":
            ask = replace(ask, drafts=drafts)
        if kind != "unified":
            return Item(kind, issued, ask)
        return Item(kind, issued, ask, entry.is_final, entry.shift)

    def _exchange(self, rpc: str, messages: list[Any], principal: str) -> list[Any]:  # inputs; outputs or Refusals
        if rpc == "StreamDecode":
            return self.stream(principal).exchange(messages)
        if rpc == "UnifiedDecode":
            request: Any = executor_pb2.UnifiedDecodeRequest(batch=executor_pb2.UnifiedBatch(items=messages))
        else:
            request = getattr(executor_pb2, f"{rpc}Request")(inputs=messages)
        results = self.call(getattr(self.server.stub, rpc), request, principal).results
        for result, message in zip(results, messages, strict=True):
            assert result.HasField("error") or result.output.request_id == message.request_id
        return [result_of(each) for each in results]
