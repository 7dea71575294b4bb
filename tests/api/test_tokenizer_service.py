"""TokenizerService through a real server, with the tokenizer of the model that ships."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest

from ferrule.v1 import executor_pb2, tokenizer_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.text.tokenizer import Tokenizer
from tests.api.harness import DEMO_FOLDER, RunningServer, refused


@pytest.fixture(scope="module")
def texts() -> Iterator[RunningServer]:
    """A server with a tokenizer; the executor plays no part."""
    with RunningServer(tokenizer=Tokenizer.load(DEMO_FOLDER)) as server:
        yield server


def _encode(server: RunningServer, text: str) -> list[int]:
    return list(server.text.Encode(tokenizer_pb2.EncodeRequest(text=text)).token_ids)


def _decode(server: RunningServer, token_ids: list[int]) -> tokenizer_pb2.TokenizerServiceDecodeResponse:
    return server.text.Decode(tokenizer_pb2.TokenizerServiceDecodeRequest(token_ids=token_ids))


@pytest.mark.parametrize("text", ["", "def f(x):\n    return x\n", "na\u00efve \u2615 \U0001f980", "x = 1\n" * 2000])
def test_text_survives_the_round_trip(texts: RunningServer, text: str) -> None:
    """Short texts and such as go to a thread."""
    token_ids = _encode(texts, text)
    assert _decode(texts, token_ids).text == text
    assert bool(token_ids) is bool(text)


def test_half_a_character_is_told(texts: RunningServer) -> None:
    """A streaming client holds tokens back until the character is whole."""
    token_ids = _encode(texts, "\U0001f980")
    assert len(token_ids) > 1
    assert _decode(texts, token_ids[:-1]).ends_mid_character
    assert not _decode(texts, token_ids).ends_mid_character


def test_a_token_beyond_the_vocabulary_is_named(texts: RunningServer) -> None:
    """By its place."""
    with refused() as refusals:
        _decode(texts, [1, 10**6])
    assert (refusals[0].reason, refusals[0].fields) == ("TOKEN_OUT_OF_VOCAB", ("token_ids[1]",))


def test_model_info_tells_that_there_is_a_tokenizer(texts: RunningServer) -> None:
    """And that there is no chat template to apply."""
    info = texts.stub.GetModelInfo(executor_pb2.GetModelInfoRequest()).info
    assert info.has_tokenizer
    assert not info.has_chat_template


def test_without_a_tokenizer_every_call_is_unsupported(server: RunningServer) -> None:
    """The paged reference has none."""
    for call in (lambda: _encode(server, "x"), lambda: _decode(server, [1])):
        with refused() as refusals:
            call()
        assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNIMPLEMENTED, "FEATURE_UNSUPPORTED")


def test_long_texts_and_lists_are_bounded() -> None:
    """By bytes of UTF-8 and by ids; the limits themselves are served."""
    limits = ApiLimits(max_text_bytes=4000, max_text_tokens=2000)
    with RunningServer(tokenizer=Tokenizer.load(DEMO_FOLDER), limits=limits) as server:
        assert _encode(server, "\u00e9" * 2000)
        assert len(_decode(server, [300] * 2000).text) >= 2000
        calls = (
            (lambda: _encode(server, "\u00e9" * 2001), "text"),
            (lambda: _decode(server, [300] * 2001), "token_ids"),
        )
        for call, field in calls:
            with refused() as refusals:
                call()
            assert (refusals[0].reason, refusals[0].fields) == ("INVALID_FIELD", (field,))


def test_a_long_text_freezes_nobody_else(texts: RunningServer) -> None:
    """While a text of 1 MiB is encoded, another caller is answered, again and again."""
    text = "def f(x):\n  return x\n" * 60_000
    encoding = texts.text.Encode.future(tokenizer_pb2.EncodeRequest(text=text), timeout=60)
    worst_s, last = 0.0, time.monotonic()
    while not encoding.done():
        texts.stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=10)
        last, before = time.monotonic(), last  # from reply to reply: this thread is frozen with the others
        worst_s = max(worst_s, last - before)
    assert len(encoding.result().token_ids) > 100_000
    assert worst_s < 0.4
