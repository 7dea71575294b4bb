"""A parser of commands that says in one line what is wrong with them, and what was probably meant."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ferrule_cli.common import misuse

__all__ = ["Parser"]

_CHOICES = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)$")


class Parser(argparse.ArgumentParser):
    """Raises a CommandError of one line, with exit code 2, for a command that is used wrongly."""

    # Any: as argparse types it, whose overloads differ by version.
    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Return what was given; there is nothing that another parser could know more about."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [one.partition("=")[0] for one in unknown if one.startswith("-")]
            if not options:
                self.error(f"unexpected argument {unknown[0]!r}")
            self.error(f"unknown option {options[0]}{_meant(options[0], self._option_string_actions)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        if (found := _CHOICES.search(message)) is not None:
            message += _meant(found["given"], re.findall(r"[\w-]+", found["known"]))
        raise misuse(f'{message}; see "{self.prog} --help"', "USED_WRONGLY")


def _meant(given: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, list(known), 1, 0.75)
    return f", did you mean {near[0]}?" if near else ""
