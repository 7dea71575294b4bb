"""``ferrule chat``: a conversation in the terminal, or one turn for each line of standard input."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ferrule_cli.common import (
    CommandError,
    add_connection_options,
    connect,
    ending_in_order,
    number,
    print_json,
    wait_for_model,
)
from ferrule_client.errors import FerruleError
from ferrule_client.policy import sample
from ferrule_client.sync.chat import Chat
from ferrule_client.sync.client import Client
from ferrule_client.types import Answer

__all__ = ["EXAMPLES", "add_options", "run"]

_BUNDLED = "demo"
"""The model that is bundled with the server, which was trained on code alone."""

_WORD = re.compile(r"/[a-z]+")
"""What is meant as a command, also where it comes from a file; a path is not."""

EXAMPLES = """\
examples:
  ferrule chat                                      talk; /help lists what else can be typed
  ferrule chat --system "You answer in one word."
  printf 'Hi\\nAnd now?\\n' | ferrule chat --json     one turn for each line, one JSON object for each answer

Each turn sends what is new and keeps the rest of the conversation's KV on the server. Ctrl-C ends an answer,
Ctrl-D the conversation.
"""

_HELP = """\
/system TEXT   give the model a system message from the next turn on; without TEXT show it, with - drop it
/undo          take back the last question and its answer
/reset         take back everything that was said
/save FILE     write the conversation to a file, as JSON
/quit          leave (so does Ctrl-D)
//...          say something that begins with a slash
Ctrl-C         end the answer that is being drawn"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message (none)")
    parser.add_argument(
        "--max-tokens", type=number(int, 1), default=256, metavar="N", help="most tokens of an answer (256)"
    )
    parser.add_argument(
        "--temperature", type=number(float, 0), default=0.7, metavar="T", help="0 is greedy, 1 as the model is (0.7)"
    )
    parser.add_argument("--top-k", type=number(int, 0), metavar="K", help="draw from the K most likely tokens")
    parser.add_argument(
        "--top-p", type=number(float, 0, 1, above_low=True), metavar="P", help="draw from the tokens that make up P"
    )
    parser.add_argument(
        "--min-p", type=number(float, 0, 1), metavar="P", help="draw from tokens at least P times the most likely one"
    )
    parser.add_argument("--seed", type=number(int, 0, 2**64 - 1), metavar="S", help="seed of the draws (random)")
    parser.add_argument(
        "--variables",
        type=_json_object,
        metavar="JSON",
        help="""more variables for the chat template, such as '{"enable_thinking": false}'""",
    )
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends and return 0.

    Raises:
        CommandError: The model cannot chat, or the input is no text.
        FerruleError: A call failed, and nobody is there to be told and to go on.
    """
    policy = sample(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed)
    with ending_in_order(), connect(args) as client:
        wait_for_model(client, args)
        model_id = _check_model(client)
        with client.chat(
            args.system, policy=policy, max_tokens=args.max_tokens, variables=args.variables
        ) as conversation:
            chat = _Dialogue(conversation, is_json=args.json, is_live=sys.stdin.isatty())
            if chat.is_live:
                _note(f"{model_id} at {args.target}; /help lists the commands")
                if model_id == _BUNDLED:
                    _note("this model has seen no conversation and goes on as Python code; serve another with --model")
            for line in _lines(chat.is_live):
                if not chat.take(line):
                    break
    return 0


class _Dialogue:
    """Takes lines: commands and questions.

    Args:
        conversation: What they change.
        is_json: Print an object for each answer.
        is_live: A person types: errors and Ctrl-C end a turn, not the command.
    """

    def __init__(self, conversation: Chat, *, is_json: bool, is_live: bool) -> None:
        self._conversation = conversation
        self._is_json = is_json
        self._has_shown = False
        self.is_live = is_live
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: _note(_HELP),
            "/reset": self._reset,
            "/save": self._save,
            "/system": self._system,
            "/undo": self._undo,
        }

    def take(self, line: str) -> bool:
        """Do what a line says; False: it says to leave."""
        name, _, argument = line.partition(" ")
        if name == "/quit":
            return False
        if name in self._commands:
            self._commands[name](argument.strip())
        elif line.startswith("/") and not line.startswith("//") and (self.is_live or _WORD.fullmatch(name)):
            _note(f"there is no {name}; /help lists the commands, // begins a text with a slash")
        elif line:
            self._say(line[1:] if line.startswith("//") else line)
        return True

    def _say(self, text: str) -> None:
        self._has_shown = False
        try:
            answer = self._conversation.send(text, on_text=self._show)
        except FerruleError as error:
            if not self.is_live:
                raise
            _note(self._complaint(error))
        except KeyboardInterrupt:  # before the first token was asked for
            if not self.is_live:
                raise
            _note("\nstopped; nothing was said")
        else:
            self._finish(answer)

    def _complaint(self, error: FerruleError) -> str:
        """Return why nothing was said, and what to do about it."""
        token, field = error.metadata.get("special_token"), error.metadata.get("field", "")
        if token is None:
            return f"error: {error}"
        is_earlier = not field.startswith(f"messages[{len(self._conversation.all_messages)}]")
        where, remedy = ("the conversation", "/undo or /system -") if is_earlier else ("the text", "reword it")
        return f"not sent: {where} contains the special token {token}, which would end or begin a message; {remedy}"

    def _show(self, piece: str) -> None:
        """Print a piece of the answer; many an answer begins with a space or a line's end that only a model needs."""
        shown = piece if self._has_shown else piece.lstrip()
        self._has_shown = self._has_shown or bool(shown)
        if not self._is_json:
            print(shown, end="", flush=True)

    def _finish(self, answer: Answer) -> None:
        if self._is_json:
            print_json(_facts(answer))
        else:
            print(flush=True)
        if answer.finish_reason == "closed" and not self.is_live:
            raise KeyboardInterrupt
        if not answer.tokens:
            _note(f"no answer ({_reason(answer)}), the question is taken back; /undo or /reset make room")
        elif sys.stderr.isatty():
            _note(f"[{_summary(answer)}]")

    def _reset(self, _: str) -> None:
        self._conversation.messages.clear()
        _note("nothing was said")

    def _undo(self, _: str) -> None:
        said = self._conversation.messages[-2:]
        did = self._conversation.undo()
        _note(f"taken back: {said[0]['content']}" if did else "there is nothing to take back")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = "" if text == "-" else text
        _note(f"system message: {self._conversation.system or 'none'}")

    def _save(self, path: str) -> None:
        messages = self._conversation.all_messages
        if not path:
            _note("/save needs the name of a file")
            return
        try:
            Path(path).expanduser().write_text(json.dumps(messages, indent=2, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            _note(f"{path}: {error.strerror}")
        else:
            _note(f"saved {len(messages)} messages to {path}")


def _lines(is_live: bool) -> Iterator[str]:
    """Yield what is typed, or the lines of standard input, without the white space around.

    Raises:
        CommandError: Standard input is no text, and nobody is there to be told and to go on.
    """
    if is_live:
        with contextlib.suppress(ImportError):  # it makes input() edit lines and remember them, where there is one
            import readline  # noqa: F401
    while True:
        try:
            line = input("> ") if is_live else _piped_line()
        except EOFError:
            if is_live:
                _note("")
            return
        except KeyboardInterrupt:
            if not is_live:
                raise
            _note("\n/quit or Ctrl-D leaves")
            continue
        if not any("\ud800" <= character <= "\udfff" for character in line):  # so Python keeps bytes that are no text
            yield line.strip()
        elif is_live:
            _note("that is no text in UTF-8")
        else:
            raise _not_text("UTF-8")


def _piped_line() -> str:
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise _not_text(error.encoding.upper()) from None
    if not line:
        raise EOFError
    return line


def _not_text(encoding: str) -> CommandError:
    return CommandError(f"the input is no text in {encoding}", "PROMPT_NOT_TEXT", exit_code=2)


def _check_model(client: Client) -> str:
    """Return the model's name.

    Raises:
        CommandError: It has no chat template.
    """
    info = client.model_info()
    if "chat_template" not in client.capabilities().features:
        text = f"{info.model_id} has no chat template, so nothing tells how to talk to it; use ferrule generate"
        raise CommandError(text, "CHAT_TEMPLATE_MISSING")
    return info.model_id


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("no JSON object, such as {}")
    return value


def _reason(answer: Answer) -> str:
    return "stopped" if answer.finish_reason == "closed" else str(answer.finish_reason)


def _facts(answer: Answer) -> dict[str, object]:
    return {
        "text": answer.text,
        "tokens": answer.tokens,
        "finish_reason": _reason(answer),
        "seed": answer.seed,
        "num_prompt_tokens": answer.num_prompt_tokens,
        "num_reused_tokens": answer.num_reused_tokens,
        "tokens_per_s": round(answer.tokens_per_s, 1),
    }


def _summary(answer: Answer) -> str:
    num_new = answer.num_prompt_tokens - answer.num_reused_tokens
    rate = f"{len(answer.tokens)} tokens, {answer.tokens_per_s:.0f} tokens/s"
    return f"{_reason(answer)}, {rate}, prompt {num_new} new + {answer.num_reused_tokens} kept"


def _note(text: str) -> None:
    """Tell the person at the terminal; answers alone go to standard output."""
    print(text, file=sys.stderr, flush=True)
