"""``ferrule chat``: a conversation in the terminal, or one turn for each line of standard input."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ferrule_cli import common
from ferrule_cli.connection import add_connection_options, connect, wait_for_model
from ferrule_cli.demo.server import own_server
from ferrule_cli.waiting import Waiting
from ferrule_client.errors import FerruleError
from ferrule_client.policy import sample
from ferrule_client.sync.chat import Chat
from ferrule_client.sync.client import Client
from ferrule_client.types import Answer

__all__ = ["EXAMPLES", "add_options", "run"]

_BUNDLED = "demo"  # the model that is bundled with the server, which was trained on code alone
_WORD = re.compile(r"/[a-z]+")  # what is meant as a command, also where it comes from a file; a path is not

EXAMPLES = """\
examples:
  ferrule chat                                      talk; /help lists what else can be typed
  ferrule chat --system "You answer in one word."
  ferrule chat --model smollm2                      start a server with this model, and end it with the conversation
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
    about = "talk to a server of its own with this model, as of ferrule serve"
    parser.add_argument("--model", metavar="MODEL", help=about)
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message (none)")
    common.add_numbers(parser, ("--max-tokens", common.number(int, 1), 256, "N", "most tokens of an answer (256)"))
    common.add_sampling_options(parser)
    about = """more variables for the chat template, such as '{"enable_thinking": false}'"""
    parser.add_argument("--variables", type=_json_object, metavar="JSON", help=about)
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends and return 0; errors are raised where nobody is there to be told and to go on."""
    policy = sample(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed)
    with common.ending_in_order(), _server(args) as client:
        model_id = client.model_info().model_id
        if "chat_template" not in client.capabilities().features:
            text = f"{model_id} has no chat template, so nothing tells how to talk to it; use ferrule generate"
            raise common.CommandError(text, "CHAT_TEMPLATE_MISSING")
        with client.chat(args.system, policy=policy, max_tokens=args.max_tokens, variables=args.variables) as chat:
            is_live = sys.stdin.isatty()
            dialogue = _Dialogue(chat, is_json=args.json, is_live=is_live)
            dialogue.greet(model_id, args.target)
            for line in _lines(is_live):
                if not dialogue.take(line):
                    break
    return 0


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[Client]:
    """Yield a client of the server to talk to, when its model is loaded."""
    if args.model is None:
        with connect(args) as client:
            wait_for_model(client, args)
            yield client
        return
    if args.target is not None:
        raise common.misuse("--model is for a server of its own, not for --target", "USED_WRONGLY")
    common.need_server()
    with own_server(["--model", args.model, "--log-level", "info"]) as (args.target, client):
        yield client


class _Dialogue:
    """Takes lines: commands and questions. A live one is a person's: errors and Ctrl-C end a turn, not the command."""

    def __init__(self, chat: Chat, *, is_json: bool, is_live: bool) -> None:
        self._chat = chat
        self._is_json = is_json
        self._is_live = is_live
        self._has_shown = False
        self._waiting = Waiting("")

    def greet(self, model_id: str, target: str) -> None:
        """Say on a terminal which model answers, and what to expect of it."""
        if self._is_live:
            self._note(f"{model_id} at {target}; /help lists the commands")
        if model_id == _BUNDLED and (self._is_live or sys.stderr.isatty()):
            self._note("this model has seen no conversation and writes Python code; try ferrule chat --model smollm2")

    def take(self, line: str) -> bool:
        """Do what a line says; False: it says to leave."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name == "/quit":
            return False
        if name == "/help":
            self._note(_HELP)
        elif name == "/reset":
            self._chat.messages.clear()
            self._note("nothing was said")
        elif name == "/save":
            self._note(_save(self._chat.all_messages, argument))
        elif name == "/system":
            if argument:
                self._chat.system = "" if argument == "-" else argument
            self._note(f"system message: {self._chat.system or 'none'}")
        elif name == "/undo":
            said = self._chat.messages[-2:]
            self._note(f"taken back: {said[0]['content']}" if self._chat.undo() else "there is nothing to take back")
        elif line.startswith("/") and not line.startswith("//") and (self._is_live or _WORD.fullmatch(name)):
            self._note(f"there is no {name}; /help lists the commands, // begins a text with a slash")
        elif line:
            self._say(line[1:] if line.startswith("//") else line)
        return True

    def _say(self, text: str) -> None:
        self._has_shown = False
        try:
            with Waiting("the answer") as self._waiting:
                answer = self._chat.send(text, on_text=self._show)
        except FerruleError as error:
            if not self._is_live:
                raise
            self._note(f"error: {error}")
        except KeyboardInterrupt:  # before the first token was asked for
            if not self._is_live:
                raise
            self._note("\nstopped; nothing was said")
        else:
            self._finish(answer)

    def _show(self, piece: str) -> None:
        """Print a piece of the answer; many an answer begins with a space or a line's end that only a model needs."""
        shown = piece if self._has_shown else piece.lstrip()
        self._has_shown = self._has_shown or bool(shown)
        if not self._is_json:
            self._waiting.end()
            print(shown, end="", flush=True)

    def _finish(self, answer: Answer) -> None:
        is_stopped = answer.finish_reason == "closed"
        reason = "stopped" if is_stopped else str(answer.finish_reason)
        num_prompt, num_kept = answer.num_prompt_tokens, answer.num_reused_tokens
        if self._is_json:
            facts = {"text": answer.text, "tokens": answer.tokens, "finish_reason": reason, "seed": answer.seed}
            facts |= {"num_prompt_tokens": num_prompt, "num_reused_tokens": num_kept}
            common.print_json(facts | {"tokens_per_s": round(answer.tokens_per_s, 1)})
        else:
            print(flush=True)
        if is_stopped and not self._is_live:
            raise KeyboardInterrupt
        if not answer.tokens:
            self._note(f"no answer ({reason}), the question is taken back; /undo or /reset make room")
        elif sys.stderr.isatty() and not self._is_json:
            rate = f"{len(answer.tokens)} tokens, {answer.tokens_per_s:.0f} tokens/s"
            self._note(f"[{reason}, {rate}, prompt {num_prompt - num_kept} new + {num_kept} kept]")

    def _note(self, text: str) -> None:
        """Tell the person at the terminal, or what reads standard error as JSON."""
        _note(json.dumps({"note": text}) if self._is_json else text)


def _save(messages: Sequence[object], path: str) -> str:
    """Write the messages to a file and return what to say of it."""
    if not path:
        return "/save needs the name of a file"
    try:
        Path(path).expanduser().write_text(json.dumps(messages, indent=2, ensure_ascii=False) + "\n", "utf-8")
    except OSError as error:
        return f"{path}: {error.strerror}"
    return f"saved {len(messages)} messages to {path}"


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
            line = input("> ") if is_live else sys.stdin.readline()
        except EOFError:
            _note("")
            return
        except UnicodeDecodeError as error:
            if is_live:
                raise
            raise common.misuse(f"the input is no text in {error.encoding.upper()}", "PROMPT_NOT_TEXT") from None
        except KeyboardInterrupt:
            if not is_live:
                raise
            _note("\n/quit or Ctrl-D leaves")
            continue
        if not is_live and not line:
            return
        if not any("\ud800" <= character <= "\udfff" for character in line):  # so Python keeps bytes that are no text
            yield line.strip()
        elif is_live:
            _note("that is no text in UTF-8")
        else:
            raise common.misuse("the input is no text in UTF-8", "PROMPT_NOT_TEXT")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("no JSON object, such as {}")
    return value


def _note(text: str) -> None:
    """Tell the person at the terminal; answers alone go to standard output."""
    print(text, file=sys.stderr, flush=True)
