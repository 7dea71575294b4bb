"""``ferrule chat``: turns, commands and interruptions, on a server with the model that ships."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ferrule import Client
from ferrule.errors import InvalidRequestError
from tests.client import command_line
from tests.terminal import Terminal


@pytest.fixture
def client(shipped_target: str) -> Iterator[Client]:
    """A client; the test must leave no sequence behind."""
    with Client(shipped_target, timeout=30) as client:
        yield client
        assert list(client.list_caches()) == []


@pytest.fixture
def chat(
    shipped_target: str, no_variables: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Return what runs the command in this process on some input, and returns exit code, output and errors."""

    def run(text: str | bytes, *arguments: str, target: str | None = shipped_target) -> tuple[int, str, str]:
        data = text.encode() if isinstance(text, str) else text
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8", errors="surrogateescape"))
        code = command_line.run("chat", *(["--target", target] if target else []), *arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_lines_of_standard_input_are_turns(chat: Callable[..., tuple[int, str, str]], client: Client) -> None:
    """Answers alone go to standard output; JSON tells the rest; empty lines say nothing."""
    options = ("--max-tokens", "10", "--temperature", "0", "--seed", "3", "--system", "Be brief.")
    code, out, err = chat("Hello\n\nAnd now?", "--json", *options)
    assert (code, err) == (0, "")
    first, second = (json.loads(line) for line in out.splitlines())
    assert (len(first["tokens"]), first["finish_reason"], first["num_reused_tokens"]) == (10, "max_tokens", 0)
    assert second["num_reused_tokens"] == first["num_prompt_tokens"] + 10
    assert second["tokens_per_s"] > 0
    assert chat("Hello\n\nAnd now?\n", *options) == (0, f"{first['text'].lstrip()}\n{second['text'].lstrip()}\n", "")


def test_a_server_of_its_own_ends_with_the_conversation(
    chat: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what any other server with the model says, and nothing is left of it."""
    options = ("--max-tokens", "5", "--temperature", "0")
    said = chat("Hello\n", *options)
    with tempfile.TemporaryDirectory() as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        assert chat("Hello\n", "--model", "demo", *options, target=None) == said
        assert list(Path(place).iterdir()) == []
    code, _, err = chat("", "--model", "demo")
    assert (code, "for a server of its own" in err) == (2, True)


def test_the_same_seed_says_the_same(chat: Callable[..., tuple[int, str, str]]) -> None:
    """And the seed that was drawn is told."""
    answers = [json.loads(chat("Hello", "--json", "--max-tokens", "8", "--seed", "5")[1]) for _ in range(2)]
    assert answers[0]["text"] == answers[1]["text"]
    assert answers[0]["seed"] == 5
    assert json.loads(chat("Hello", "--json", "--max-tokens", "1")[1])["seed"] is not None


def test_piped_command_that_there_is_not_is_no_question(chat: Callable[..., tuple[int, str, str]]) -> None:
    """A mistyped command is told, as at a terminal; a path is a text."""
    code, out, err = chat("/info\n/etc/hosts holds\n", "--max-tokens", "2", "--temperature", "0", "--json")
    assert (code, len(out.splitlines())) == (0, 1)
    assert json.loads(err) == {"note": "there is no /info; /help lists the commands, // begins a text with a slash"}


def test_commands_change_the_conversation(chat: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """System message, undo, reset, save; nothing after /quit is said."""
    path = tmp_path / "talk.json"
    script = [
        "/undo", "/system", "/system Be brief.", "One", "Two", "/undo", f"/save {path}", "/save", "/reset",
        f"/save {tmp_path}/no/such", "/system -", "/help", "//slash", "/quit", "Never",
    ]  # fmt: skip
    code, out, err = chat("\n".join(script), "--max-tokens", "3", "--temperature", "0", "--json")
    assert code == 0
    assert len(out.splitlines()) == 3
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    assert (saved[0]["content"], saved[1]["content"]) == ("Be brief.", "One")
    assert saved[2]["content"] == json.loads(out.splitlines()[0])["text"]
    expected = ["nothing to take back", "message: none", "message: Be brief.", "taken back: Two", "saved 3 messages"]
    expected += ["/save needs", "nothing was said", "No such file", "message: none", "/undo "]
    at = 0
    for part in expected:
        at = err.index(part, at) + len(part)


def test_a_model_without_a_template_says_so(chat: Callable[..., tuple[int, str, str]], target: str) -> None:
    """Before anything is read."""
    code, out, err = chat("Hello", target=target)
    assert (code, out) == (1, "")
    assert err.startswith("error: paged-reference has no chat template")
    assert "use ferrule generate (CHAT_TEMPLATE_MISSING)" in err


def test_errors_end_a_script(chat: Callable[..., tuple[int, str, str]]) -> None:
    """With one line, and what was said before stays said."""
    code, out, err = chat("Hello\n" + "word " * 5000 + "\nHello\n", "--max-tokens", "3", "--temperature", "0")
    assert (code, out.count("\n"), err.count("\n")) == (1, 1, 1)
    assert "context" in err.lower()


def test_text_of_a_special_token_is_text(chat: Callable[..., tuple[int, str, str]]) -> None:
    """Wherever it comes from, and the conversation goes on after it."""
    options = ("--json", "--max-tokens", "3", "--temperature", "0", "--system", "Say <|endoftext|>")
    code, out, _ = chat("What is <|endoftext|>?\nHello\n", *options)
    first, second = map(json.loads, out.splitlines())
    assert (code, first["num_reused_tokens"]) == (0, 0)
    assert second["num_reused_tokens"] >= first["num_prompt_tokens"]


def test_special_tokens_of_a_conversation_are_the_callers_choice(client: Client) -> None:
    """Refused by field and token unless they are allowed, or stay text."""
    messages = [{"role": "user", "content": "x"}, {"role": "tool", "content": "<|endoftext|>"}]
    with pytest.raises(InvalidRequestError) as caught:
        client.apply_chat_template(messages)
    assert (caught.value.field, caught.value.metadata["special_token"]) == ("messages[1].content", "<|endoftext|>")
    parsed = client.apply_chat_template(messages, allow_special_tokens=True)
    assert 0 in parsed.token_ids
    plain = client.apply_chat_template(messages, special_tokens_as_text=True)
    assert 0 not in plain.token_ids
    assert plain.text == parsed.text
    with pytest.raises(InvalidRequestError, match="special_tokens_as_text"):
        client.apply_chat_template(messages, allow_special_tokens=True, special_tokens_as_text=True)


@pytest.mark.parametrize("arguments", [("--variables", "{"), ("--variables", "[]"), ("--max-tokens", "0")])
def test_wrong_use_has_an_exit_code_of_its_own(
    chat: Callable[..., tuple[int, str, str]], arguments: tuple[str, ...]
) -> None:
    """As with every command."""
    assert chat("Hello", *arguments)[0] == 2


def test_input_that_is_no_text_is_refused(chat: Callable[..., tuple[int, str, str]]) -> None:
    """By its encoding."""
    code, _, err = chat(b"\xff\xfe\n")
    assert (code, err) == (2, "error: the input is no text in UTF-8 (PROMPT_NOT_TEXT)\n")


@pytest.fixture
def terminal(shipped_target: str) -> Iterator[Callable[..., Terminal]]:
    """Return what opens a chat on a terminal."""
    command = [sys.executable, "-m", "ferrule_cli.app", "chat", "--target", shipped_target]
    with ExitStack() as stack:
        yield lambda *more: stack.enter_context(Terminal([*command, *more], {**os.environ, "TERM": "dumb"}))


def test_ctrl_c_ends_the_answer_and_not_the_chat(terminal: Callable[..., Terminal], client: Client) -> None:
    """At the prompt it is only noted; errors and unknown commands do not end the chat either."""
    chat = terminal("--max-tokens", "2000", "--temperature", "0")  # drawn, it might soon end by itself
    at = chat.read_until("> ", chat.read_until("demo at "))
    time.sleep(0.3)  # readline notices a signal only once it waits for a key
    chat.process.send_signal(signal.SIGINT)
    at = chat.read_until("> ", chat.read_until("/quit or Ctrl-D leaves", at))
    chat.type("import os\n")
    at = chat.read_until("import os\r\n", at)
    chat.read_while(lambda: len(chat.seen) < at + 200)
    chat.process.send_signal(signal.SIGINT)
    at = chat.read_until("> ", chat.read_until("[stopped, ", at))
    chat.type("/nothing\n")
    at = chat.read_until("> ", chat.read_until("there is no /nothing", at))
    chat.type("/undo\n")
    at = chat.read_until("> ", chat.read_until("taken back: import os", at))
    chat.type("/quit\n")
    assert chat.end() == 0
    assert list(client.list_caches()) == []


def test_a_turn_that_is_refused_does_not_end_the_chat(terminal: Callable[..., Terminal]) -> None:
    """The error is shown, and what caused it can be taken back."""
    chat = terminal("--max-tokens", "3", "--temperature", "0", "--system", "word " * 5000)
    at = chat.read_until("> ", chat.read_until("seen no conversation", chat.read_until("demo at ")))
    chat.type("Hello\n")
    at = chat.read_until("> ", chat.read_until("(CONTEXT_EXCEEDED)", chat.read_until("error: ", at)))
    chat.type("/system -\n")
    at = chat.read_until("> ", chat.read_until("system message: none", at))
    chat.type("Hello\n")
    at = chat.read_until("> ", chat.read_until("tokens/s, prompt ", at))
    chat.type("/quit\n")
    assert chat.end() == 0


def test_the_end_of_input_leaves_and_speed_is_shown(terminal: Callable[..., Terminal]) -> None:
    """Ctrl-D at the prompt is a good end."""
    chat = terminal("--max-tokens", "5")
    chat.read_until("> ")
    chat.type("Hello\n")
    at = chat.read_until("tokens/s, prompt ")
    chat.read_until("> ", at)
    chat.type("\x04")
    assert chat.end() == 0


def test_variables_reach_the_template(chat: Callable[..., tuple[int, str, str]]) -> None:
    """The server judges them; nothing is left out in silence."""
    code, _, err = chat("Hello", "--variables", '{"messages": []}')
    assert code == 1
    assert "variables_json" in err
    assert chat("Hello", "--variables", '{"enable_thinking": false}', "--max-tokens", "1")[0] == 0
