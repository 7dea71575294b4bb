"""Chats: one sequence for all turns, on a server with the model that is bundled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ferrule import Client, greedy
from ferrule.types import Prompt

NUM_TOKENS = 12
GREEDY: dict[str, Any] = {"policy": greedy(), "max_tokens": NUM_TOKENS}


@pytest.fixture
def client(shipped_target: str) -> Iterator[Client]:
    """A client; the test must leave no sequence behind."""
    with Client(shipped_target, timeout=30) as client:
        yield client
        assert list(client.list_caches()) == []


def fresh(client: Client, conversation: list[dict[str, str]]) -> list[int]:
    """Return the answer to a conversation by a sequence of its own."""
    ids = client.apply_chat_template(conversation).token_ids
    with client.prefill(ids) as cache:
        return [int(token) for token in cache.generate(NUM_TOKENS, policy=greedy())]


def test_each_turn_sends_what_is_new_and_says_what_a_fresh_sequence_would(client: Client) -> None:
    """One sequence is kept over all turns, and it holds exactly the chat."""
    with client.chat("Be brief.", **GREEDY) as chat:
        held: list[int] = []
        for question in ("What is a queue?", "And a stack?", "def f(x):"):
            before = [*chat.all_messages, {"role": "user", "content": question}]
            prompt = list(client.apply_chat_template(before).token_ids)
            answer = chat.send(question)
            assert answer.tokens == fresh(client, before)
            num_same = answer.num_reused_tokens
            assert held[:num_same] == prompt[:num_same]
            assert held[num_same : num_same + 1] != prompt[num_same : num_same + 1]
            assert num_same >= len(held) // 2
            held = prompt + answer.tokens
            assert len(list(client.list_caches())) == 1


def test_after_an_undo_the_sequence_goes_back(client: Client) -> None:
    """The same question again is a query; another one keeps what is common; a reset keeps the system message's KV."""
    with client.chat("Be brief.", **GREEDY) as chat:
        first = chat.send("What is a queue?")
        second = chat.send("And a stack?")
        assert chat.undo() == 1
        again = chat.send("And a stack?")
        assert (again.tokens, again.num_reused_tokens) == (second.tokens, second.num_prompt_tokens)
        assert chat.undo() == 1
        other = chat.send("And a heap?")
        assert first.num_prompt_tokens + len(first.tokens) <= other.num_reused_tokens < other.num_prompt_tokens
        chat.messages.clear()
        assert chat.all_messages == [{"role": "system", "content": "Be brief."}]
        assert chat.send("What is a queue?").tokens == first.tokens
        assert (chat.undo(5), chat.undo()) == (1, 0)


def test_another_beginning_starts_anew(client: Client) -> None:
    """Where no token is common the old sequence is given back."""
    with client.chat(**GREEDY) as chat:
        chat.send("Hello")
        chat.system = "import os"
        answer = chat.send("Hello")
        assert answer.num_reused_tokens == 0
        assert len(list(client.list_caches())) == 1


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_was_shown(client: Client) -> None:
    """What the server drew beyond is dropped, and the next turn goes on from what was shown."""
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 5:
            raise KeyboardInterrupt

    with client.chat(policy=greedy(), max_tokens=500) as chat:
        answer = chat.send("class Queue:", on_text=show)
        assert (answer.finish_reason, answer.text) == ("closed", "".join(pieces))
        assert chat.messages[-1]["content"] == answer.text
        before = [*chat.all_messages, {"role": "user", "content": "Go on"}]
        chat.max_tokens = NUM_TOKENS
        assert chat.send("Go on").tokens == fresh(client, before)


def test_a_sequence_that_is_lost_is_made_again(client: Client) -> None:
    """As after a restart of the server: the conversation goes on as if nothing had been."""
    with client.chat(**GREEDY) as chat:
        chat.send("What is a queue?")
        for question in ("And a stack?", "And a heap?"):
            assert chat._cache is not None
            client.release([chat._cache.handle])
            asked = [*chat.all_messages, {"role": "user", "content": question}]
            assert chat.send(question).tokens == fresh(client, asked)
        chat.undo()
        assert chat._cache is not None
        client.release([chat._cache.handle])
        asked = [*chat.all_messages, {"role": "user", "content": "Again?"}]
        assert chat.send("Again?").tokens == fresh(client, asked)


def test_a_question_that_fails_was_not_said(client: Client) -> None:
    """The messages are as before, and the next question is answered as if it had not been."""
    with client.chat(**GREEDY) as chat:
        chat.send("Hello")
        before = chat.all_messages
        for _ in range(2):
            try:
                answer = chat.send("word " * 3000)
            except Exception as error:  # noqa: BLE001 - which error it is depends on where the context ends
                assert "CONTEXT" in str(error)  # noqa: PT017
            else:
                assert (answer.finish_reason, answer.tokens) == ("context_full", [])
            assert chat.all_messages == before
        asked = [*before, {"role": "user", "content": "Still there?"}]
        assert chat.send("Still there?").tokens == fresh(client, asked)


def test_a_fork_goes_on_by_itself(client: Client) -> None:
    """Both have what was said, and what follows is each one's own."""
    with client.chat("Be brief.", **GREEDY) as chat:
        chat.send("What is a queue?")
        with chat.fork() as other:
            said = [*chat.all_messages, {"role": "user", "content": "And a stack?"}]
            assert other.send("And a stack?").tokens == fresh(client, said)
            assert len(chat.messages) == 2
            said[-1] = {"role": "user", "content": "And a heap?"}
            answer = chat.send("And a heap?")
            assert answer.tokens == fresh(client, said)
            assert answer.num_reused_tokens > 0
            assert chat.handle != other.handle


def test_messages_may_be_edited(client: Client) -> None:
    """The next turn runs from the first token that differs."""
    with client.chat(**GREEDY) as chat:
        chat.send("What is a queue?")
        chat.send("And a stack?")
        chat.messages[2]["content"] = "And a heap?"
        said = [*chat.all_messages, {"role": "user", "content": "Go on"}]
        answer = chat.send("Go on")
        assert answer.tokens == fresh(client, said)
        assert 0 < answer.num_reused_tokens < answer.num_prompt_tokens


@pytest.mark.parametrize("start", ["A queue is", "A queue is "])
def test_the_model_continues_an_answer_that_was_begun(client: Client, start: str) -> None:
    """The prompt ends with it; a template may cut the spaces at its end."""
    asked = [{"role": "user", "content": "What is a queue?"}, {"role": "assistant", "content": start}]
    prompt = client.apply_chat_template(asked, continue_final_message=True)
    assert prompt.text.endswith((f"Assistant: {start}", f"Assistant: {start.strip()}"))


def test_a_rendered_conversation_is_a_prompt(client: Client) -> None:
    """As it is, for every call that takes tokens; its answer comes as text."""
    asked = [{"role": "user", "content": "What is a queue?"}]
    prompt = client.apply_chat_template(asked)
    assert (list(prompt), len(prompt), prompt[:2]) == ([*prompt.token_ids], len(prompt.token_ids), prompt.token_ids[:2])
    with client.stream() as stream, client.prefill(prompt) as cache, stream.run([Prompt(prompt)])[0] as other:
        assert cache.token_ids == other.token_ids == list(prompt.token_ids)
        cache.append(prompt)
        assert cache.length == 2 * len(prompt)
    answer = client.generate(prompt, NUM_TOKENS, policy=greedy()).read()
    assert answer.tokens == fresh(client, asked)
    assert answer.text
    np.testing.assert_array_equal(client.score(prompt), client.score(prompt.token_ids))


def test_a_conversation_that_is_not_rendered_is_no_prompt(client: Client) -> None:
    """The error names the call that renders it."""
    for call in (client.prefill, client.generate):
        with pytest.raises(TypeError, match=r"use client\.apply_chat_template\(messages\)"):
            call([{"role": "user", "content": "Hello"}])  # type: ignore[list-item]


def test_tools_that_the_template_ignores_are_reported(client: Client) -> None:
    """That of the bundled model knows none."""
    asked = [{"role": "user", "content": "What time is it?"}]
    assert client.apply_chat_template(asked, tools=[{"name": "clock"}]).tools_ignored
    assert not client.apply_chat_template(asked).tools_ignored
