"""The options of ``ferrule bench`` for loads; apart from what makes them, which takes long to import."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Literal, get_args

from ferrule_cli import common

__all__ = ["MODES", "MOST_IN_FLIGHT", "MOST_REQUESTS", "NEW", "OPTIONS", "PROMPT", "Mode", "add_options", "is_wanted"]

Mode = Literal["generate", "stream"]
MODES: tuple[Mode, ...] = get_args(Mode)

MOST_IN_FLIGHT: dict[Mode, int] = {"generate": 250, "stream": 125}
"""A connection carries 256 calls at a time; further ones would wait in the client, and the figures would be its own.
A request that streams may have two calls: its stream, and the release of its handles."""
_MOST = max(MOST_IN_FLIGHT.values())
MOST_REQUESTS = 1_000_000
"""Most requests of a level: the record of each is kept to its end."""
PROMPT, NEW = 128, 32
OPTIONS = (
    "requests",
    "mode",
    "prompt_tokens",
    "new_tokens",
    "fork",
    "max_in_flight",
    "warm_up",
    "patience",
    "retries",
    "seed",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    about = "With --concurrency or --rate many requests load the server: each a prompt of random tokens, then new ones."
    load = parser.add_argument_group("load", about)
    about = "closed loop: so many requests at a time, such as 1,8,32"
    load.add_argument("--concurrency", type=_numbers(int, 1, _MOST), metavar="N,...", help=about)
    about = "open loop: so many requests per second, at random times, such as 2,4.5"
    load.add_argument("--rate", type=_numbers(float, 0.01, 10_000), metavar="R,...", help=about)
    load.add_argument("--requests", type=common.number(int, 1, MOST_REQUESTS), metavar="N", help="most requests each")
    about = "the server's loop (generate, the default), or a frame for each token (stream)"
    load.add_argument("--mode", choices=MODES, help=about)
    about = f"tokens of a prompt, or a range: lengths spread over its logarithm ({PROMPT})"
    load.add_argument("--prompt-tokens", type=_length_range, metavar="N[-M]", help=about)
    for flag, kind, metavar, text in (
        ("--new-tokens", common.number(int, 1, 100_000), "N", f"tokens drawn in each branch ({NEW})"),
        ("--fork", common.number(int, 1, 256), "N", "branches that continue each prompt (1)"),
        ("--max-in-flight", common.number(int, 1, _MOST), "N", f"with --rate: most at a time ({_MOST}; stream: 125)"),
        ("--warm-up", common.number(float, 0, 600), "S", "seconds of load before each measurement (2)"),
        ("--patience", common.number(float, 0, 600), "S", "seconds that the last requests may take (10)"),
        ("--retries", common.number(int, 0, 100), "N", "times that a refused call is tried again (0)"),
        ("--seed", common.number(int, 0), "S", "seed of prompts and arrivals (1)"),
    ):  # fmt: skip
        load.add_argument(flag, type=kind, metavar=metavar, help=text)


def is_wanted(args: argparse.Namespace) -> bool:
    """Return whether the options ask for a load.

    Raises:
        CommandError: They do not, but one of them belongs to a load.
    """
    if args.concurrency or args.rate:
        return True
    for name in OPTIONS:
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise common.misuse(f"{flag} goes with --concurrency or --rate", "OPTION_ALONE")
    return False


def _numbers(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], list[float]]:
    one = common.number(kind, low, high)
    return lambda text: [one(word) for word in text.split(",")]


def _length_range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None or not 1 <= (low := int(found[1])) <= (high := int(found[2] or low)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens or a range such as 16-1024")
    return low, high
