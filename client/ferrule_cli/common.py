"""What the commands share: errors of their own, an end in order, numbers as options, and JSON."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

__all__ = [
    "CommandError",
    "add_numbers",
    "add_sampling_options",
    "ending_in_order",
    "misuse",
    "need_rich",
    "need_server",
    "number",
    "print_json",
    "show",
]

_ENDINGS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class CommandError(Exception):
    """A command cannot do its work for a reason that is not a call's; ``reason`` is its name in upper case."""

    def __init__(self, message: str, reason: str, exit_code: int = 1) -> None:
        super().__init__(f"{message} ({reason})")
        self.message = message
        self.reason = reason
        self.exit_code = exit_code


def misuse(message: str, reason: str) -> CommandError:
    """Return the error of a command that is used wrongly."""
    return CommandError(message, reason, exit_code=2)


def need_rich(command: str, otherwise: str = "") -> None:
    """Raise CommandError where rich is not installed; ``otherwise`` says what works without it."""
    if importlib.util.find_spec("rich") is None:
        raise CommandError(f"{command} needs rich: pip install 'ferrule[cli]'{otherwise}", "RICH_MISSING")


def need_server() -> None:
    """Raise CommandError where ``ferrule-server``, or the PyTorch that it requires, is not installed."""
    if importlib.util.find_spec("ferrule_server") is None or importlib.util.find_spec("torch") is None:
        advice = "pip install ferrule-server (in a checkout: pip install . ./server)"
        raise misuse(f"the server is not installed: {advice}", "SERVER_MISSING")


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Leave the body by SystemExit when SIGTERM or SIGHUP comes, so that everything it holds is given back.

    The exit code is 128 + N. Further ones are ignored meanwhile; one that was ignored before (nohup) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # Python lets no other one set handlers
        yield
        return
    before = {one: old for one in _ENDINGS if (old := signal.getsignal(one)) is not signal.SIG_IGN}

    def end(number: int, _: FrameType | None) -> NoReturn:
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    for one in before:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one, old in before.items():
            signal.signal(one, old)


def number(
    kind: type[int] | type[float], low: float, high: float = math.inf, *, above_low: bool = False
) -> Callable[[str], float]:
    """Return a parser of option values within a range, for argparse; ``above_low`` leaves the lower end itself out."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high or (above_low and value == low):
            least = f"{'more than' if above_low else 'at least'} {low}"
            bounds = least if high == math.inf else f"{least} and at most {high}"
            raise argparse.ArgumentTypeError(f"{text} is out of range, it must be {bounds}")
        return value

    return parse


def add_numbers(
    parser: argparse.ArgumentParser, *options: tuple[str, Callable[[str], float], object, str, str]
) -> None:
    """Add options with a number each: flag, parser of the value, default, name of the value, help."""
    for flag, kind, default, metavar, text in options:
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)


def add_sampling_options(parser: argparse.ArgumentParser, *, about_seed: str = "") -> None:
    """Add the options of the distribution that tokens are drawn from; ``about_seed`` is added to what --seed says."""
    add_numbers(
        parser,
        ("--temperature", number(float, 0), 0.7, "T", "0 is greedy, 1 as the model is (0.7)"),
        ("--top-k", number(int, 0), None, "K", "draw from the K most likely tokens"),
        ("--top-p", number(float, 0, 1, above_low=True), None, "P", "draw from the tokens that make up P"),
        ("--min-p", number(float, 0, 1), None, "P", "draw from tokens at least P times the most likely one"),
        ("--seed", number(int, 0, 2**64 - 1), None, "S", f"seed of the draws (random){about_seed}"),
    )


def show(args: argparse.Namespace, facts: object, text: str) -> None:
    """Print the facts as JSON where that is wanted, else the text."""
    if args.json:
        print_json(facts)
    else:
        print(text)


def print_json(value: object) -> None:
    """Print one JSON value on a line of its own."""
    print(json.dumps(value, default=str), flush=True)
