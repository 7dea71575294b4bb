"""Frames of the decode loop as messages: merged by branch, cut to size, with text that never has half a character."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ferrule.v1 import executor_pb2
from ferrule_server.api.limits import LOOP_SLICE
from ferrule_server.api.requests.policy import OutputPlan
from ferrule_server.api.rpc.refusals import Refusals
from ferrule_server.api.streams.replies import FINISH_REASONS, GenerateReplies
from ferrule_server.engine.jobs import BranchFrame, Finish, GenerateFrame, OutputRequest, StepTiming
from ferrule_server.errors import NonFiniteLogits
from ferrule_server.executor.base import OutputSpec, RowOutput, SampleSpec
from ferrule_server.kv.handle import Handle
from ferrule_server.text.drawn_text import BranchText, StopCut, StreamDecoder
from ferrule_server.text.tokenizer import Tokenizer
from tests.api.harness import DEMO_FOLDER, read_status

_GREEDY = OutputPlan(OutputRequest(OutputSpec(greedy=True, logprobs=True)), 1, 48)


def _replies(plan: OutputPlan = _GREEDY, max_reply_bytes: int = 1 << 20, **more: Any) -> GenerateReplies:
    return GenerateReplies(plan, "r", max_reply_bytes, more.pop("refusals", Refusals("Generate", "alice")), **more)


def _branch(index: int, *tokens: int, **more: Any) -> BranchFrame:  # fields of BranchFrame
    rows = tuple(
        RowOutput(position, token=token, model_logprob=-float(token), sampled_logprob=0.0)
        for position, token in enumerate(tokens)
    )
    handle = Handle(f"i.e.{index}", sum(tokens) or 1, bytes(16)) if tokens else None
    return BranchFrame(index, handle, rows, **more)


def _frame(*branches: BranchFrame, is_last: bool = False, run_ns: int = 10) -> GenerateFrame:
    return GenerateFrame(branches, StepTiming(5, run_ns, 7), is_last)


def _next(replies: GenerateReplies) -> executor_pb2.GenerateResponse:
    reply = replies.next()
    assert reply is not None
    assert isinstance(reply.message, executor_pb2.GenerateResponse)
    assert reply.num_rows == sum(output.outputs.num_rows for output in reply.message.outputs)
    return reply.message


def test_a_frame_is_a_message() -> None:
    """With everything that a branch's first frame tells."""
    replies = _replies()
    replies.add(_frame(_branch(0, 3, cached_tokens=16, replayed=True), _branch(1, 4)))
    message = _next(replies)
    first, second = message.outputs
    assert message.request_id == "r"
    assert (message.timing.queue_ns, message.timing.run_ns, message.timing.step_rows) == (5, 10, 7)
    assert (first.index, list(first.outputs.tokens), first.cached_tokens, first.replayed) == (0, [3], 16, True)
    assert (second.index, list(second.outputs.model_logprobs)) == (1, [-4.0])
    assert first.finish_reason == executor_pb2.FINISH_REASON_UNSPECIFIED
    assert replies.next() is None


def test_frames_that_wait_merge_by_branch() -> None:
    """Rows in order behind the newest handle, times added up, the end of a branch with its last row."""
    replies = _replies()
    replies.add(_frame(_branch(0, 3), _branch(1, 4), run_ns=10))
    replies.add(_frame(_branch(0, 5), _branch(1, 6, finish=Finish.EOS), run_ns=20))
    replies.add(_frame(_branch(0, 7), run_ns=30))
    message = _next(replies)
    first, second = message.outputs
    assert [list(first.outputs.tokens), list(second.outputs.tokens)] == [[3, 5, 7], [4, 6]]
    assert first.outputs.num_rows == 3
    assert list(first.outputs.model_logprobs) == [-3.0, -5.0, -7.0]
    assert (first.resume_from.cache_id, first.resume_from.length) == ("i.e.0", 7)
    assert (second.resume_from.cache_id, second.resume_from.length) == ("i.e.1", 6)
    assert second.finish_reason == executor_pb2.FINISH_REASON_EOS
    assert message.timing.run_ns == 60


def test_an_end_without_a_token_keeps_the_handle_of_the_row_before() -> None:
    """Merged with it; alone it has no handle and no rows."""
    replies = _replies()
    replies.add(_frame(_branch(0, 3)))
    replies.add(_frame(_branch(0, finish=Finish.CONTEXT_FULL)))
    replies.add(_frame(_branch(1, finish=Finish.KV_BLOCKS_EXHAUSTED), is_last=True))
    first, second = _next(replies).outputs
    assert (first.resume_from.length, first.finish_reason) == (3, executor_pb2.FINISH_REASON_CONTEXT_FULL)
    assert not second.HasField("resume_from")
    assert not second.HasField("outputs")
    assert second.finish_reason == executor_pb2.FINISH_REASON_KV_BLOCKS_EXHAUSTED


def test_a_message_is_cut_to_size_between_outputs() -> None:
    """Below the limit as long as one output is; nothing is lost, nothing comes twice."""
    replies = _replies(max_reply_bytes=2000)
    for token in range(1, 12):
        replies.add(_frame(_branch(0, token), _branch(1, token)))
    tokens: dict[int, list[int]] = {0: [], 1: []}
    num_messages = 0
    while (reply := replies.next()) is not None:
        assert isinstance(reply.message, executor_pb2.GenerateResponse)
        assert reply.message.ByteSize() <= 2000
        num_messages += 1
        for output in reply.message.outputs:
            tokens[output.index] += output.outputs.tokens
    assert tokens == {0: list(range(1, 12)), 1: list(range(1, 12))}
    assert 4 < num_messages < 11


def test_a_message_has_no_more_rows_than_one_turn_of_the_loop_writes() -> None:
    """However many wait: others want to be served too."""
    replies = _replies()
    for _ in range(LOOP_SLICE + 5):
        replies.add(_frame(_branch(0, 1)))
    assert _next(replies).outputs[0].outputs.num_rows == LOOP_SLICE
    assert _next(replies).outputs[0].outputs.num_rows == 5


def test_the_seed_is_told_once() -> None:
    """In the first frame of a branch; later ones have none."""
    plan = OutputPlan(OutputRequest(OutputSpec(sample=SampleSpec())), 1, 48)
    replies = _replies(plan)
    replies.add(_frame(_branch(0, 3, seed=0)))
    replies.add(_frame(_branch(0, 4)))
    merged = _next(replies).outputs[0].outputs
    assert (merged.seed, merged.HasField("seed"), merged.num_rows) == (0, True, 2)
    replies.add(_frame(_branch(0, 5)))
    assert not _next(replies).outputs[0].outputs.HasField("seed")


def test_the_error_of_a_branch_is_told_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """As a status with its reason, beside branches that go on."""
    refusals = Refusals("Generate", "alice")
    replies = _replies(refusals=refusals)
    with caplog.at_level(logging.WARNING):
        replies.add(_frame(_branch(0, 3), _branch(1, finish=Finish.ERROR, error=NonFiniteLogits(4))))
        refusals.log()
        refusals.log()
    good, bad = _next(replies).outputs
    assert not good.HasField("error")
    assert bad.finish_reason == executor_pb2.FINISH_REASON_ERROR
    assert read_status(bad.error).reason == "NON_FINITE_LOGITS"
    assert len(caplog.records) == 1


def test_every_end_has_a_name_on_the_wire() -> None:
    """Each one its own."""
    assert set(FINISH_REASONS) == set(Finish)
    assert len(set(FINISH_REASONS.values())) == len(Finish)
    assert executor_pb2.FINISH_REASON_UNSPECIFIED not in FINISH_REASONS.values()


def test_text_never_has_half_a_character_and_is_whole_at_the_end() -> None:
    """Branch by branch, whatever way the frames are merged; bytes without end become U+FFFD when the branch ends."""
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    assert tokenizer is not None
    text = "caf\u00e9 \U0001f600 ok"
    token_ids = tokenizer.encode(text)
    broken = tokenizer.encode("\U0001f600")[:1]
    for num_merged in (1, 3, 100):
        replies = _replies(new_text=lambda: BranchText(StreamDecoder(tokenizer)))
        pieces: dict[int, list[str]] = {0: [], 1: []}
        frames = [_frame(_branch(0, token), _branch(1, token)) for token in token_ids]
        frames.append(_frame(_branch(0, finish=Finish.MAX_TOKENS), _branch(1, *broken, finish=Finish.MAX_TOKENS)))
        for start in range(0, len(frames), num_merged):
            for frame in frames[start : start + num_merged]:
                replies.add(frame)
            for output in _next(replies).outputs:
                pieces[output.index].append(output.text)
        assert "".join(pieces[0]) == text
        assert "\ufffd" not in "".join(pieces[1][:-1])
        assert "".join(pieces[1]) == tokenizer.decode([*token_ids, *broken])
        assert "".join(pieces[1]).startswith(text + "\ufffd")


@pytest.mark.parametrize(
    ("finish", "ends_text"),
    [
        (Finish.EOS, True),
        (Finish.STOP_TOKEN, True),
        (Finish.STOP_SEQUENCE, False),
        (Finish.MAX_TOKENS, False),
        (Finish.CONTEXT_FULL, False),
    ],
)
@pytest.mark.parametrize("skips", [True, False])
def test_the_token_that_ends_a_branch_adds_no_text(finish: Finish, ends_text: bool, skips: bool) -> None:
    """Special or not, skipped or not; it is returned, and a character before it that stayed incomplete is U+FFFD."""
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    assert tokenizer is not None
    half, last = tokenizer.encode("\U0001f600")[0], tokenizer.encode("!")[0]
    for frames in ([(half,), (last,)], [(half, last)]):
        replies = _replies(new_text=lambda: BranchText(StreamDecoder(tokenizer, skips)))
        for token_ids in frames:
            replies.add(_frame(_branch(0, *token_ids, finish=finish if last in token_ids else None)))
        (output,) = _next(replies).outputs
        assert output.text == ("\ufffd" if ends_text else "\ufffd!")
        assert list(output.outputs.tokens) == [half, last]


@pytest.mark.parametrize("num_merged", [1, 2, 100])
def test_the_stop_text_that_ends_a_branch_is_left_out(num_merged: int) -> None:
    """Of each branch for itself; what may begin a stop waits, and comes if the branch ends otherwise."""
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    assert tokenizer is not None
    replies = _replies(new_text=lambda: BranchText(StreamDecoder(tokenizer), StopCut(["\n\nUser:", "nothing"])))
    branches = {
        0: (tokenizer.encode("one\n\ntwo\n\nUser:"), Finish.STOP_SEQUENCE),
        1: (tokenizer.encode("one\n\nUs"), Finish.MAX_TOKENS),
    }
    frames = [
        _frame(_branch(index, token, finish=finish if place == len(ids) - 1 else None))
        for index, (ids, finish) in branches.items()
        for place, token in enumerate(ids)
    ]
    texts = {0: "", 1: ""}
    for start in range(0, len(frames), num_merged):
        for frame in frames[start : start + num_merged]:
            replies.add(frame)
        for output in _next(replies).outputs:
            texts[output.index] += output.text
            assert "one\n\ntwo".startswith(texts[0])
    assert texts == {0: "one\n\ntwo", 1: "one\n\nUs"}


def test_a_run_of_tokens_that_ends_a_branch_is_text() -> None:
    """It ends with the same reason as a stop text, but is what was drawn."""
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    assert tokenizer is not None
    replies = _replies(new_text=lambda: BranchText(StreamDecoder(tokenizer), StopCut(["end."])))
    replies.add(_frame(_branch(0, *tokenizer.encode("the end"), finish=Finish.STOP_SEQUENCE)))
    assert _next(replies).outputs[0].text == "the end"


def test_no_text_is_made_where_none_is_asked_for() -> None:
    """The field stays empty."""
    replies = _replies()
    replies.add(_frame(_branch(0, 3)))
    assert _next(replies).outputs[0].text == ""
