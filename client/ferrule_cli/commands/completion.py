"""``ferrule completion``: a script with which a shell completes commands, options and their values."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["EXAMPLES", "Option", "Place", "add_options", "places", "run"]

EXAMPLES = """\
to use it, add a line to the start file of the shell:
  bash   source <(ferrule completion bash)
  zsh    source <(ferrule completion zsh)           after compinit
  fish   ferrule completion fish | source

The script is made from the installed version: write it again after an upgrade. It starts no Python while you type.
"""

_FLAG_LINE = re.compile(r"^  (?:-h, )?(?P<flag>--[a-z-]+)(?: (?P<metavar>[^\s]+))?(?:\s{2,}(?P<help>\S.*))?$")
_MAX_HELP = 70
_FILES = re.compile(r"FILE|FOLDER|DIR")


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command.

    Attributes:
        flag: With its dashes.
        help: The beginning of its text.
        values: What it can be followed by; None: it takes no value. Empty: a value that nobody can guess.
        takes_file: Its value can be the name of a file or a folder.
    """

    flag: str
    help: str
    values: tuple[str, ...] | None = None
    takes_file: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """What can come after the words of a command.

    Attributes:
        words: ``""`` for ``ferrule`` itself, ``"admin drain"``.
        words_after: Commands and choices of arguments, each with the beginning of its text.
        options: Of the command.
        takes_file: An argument can be the name of a file or a folder.
    """

    words: str
    words_after: tuple[tuple[str, str], ...]
    options: tuple[Option, ...]
    takes_file: bool = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("shell", choices=tuple(_SCRIPTS), help="the shell that reads the script")


def run(args: argparse.Namespace) -> int:
    """Print the script and return 0."""
    from ferrule_cli.app import build_parser

    print(_SCRIPTS[args.shell](list(places(build_parser()))))
    return 0


def places(parser: argparse.ArgumentParser, words: str = "") -> Iterator[Place]:
    """Yield a parser's place and those of its commands; of ``serve``, what the installed server says itself."""
    if words == "serve":
        yield Place(words, (), tuple(_server_options()))
        return
    after: list[tuple[str, str]] = []
    options: list[Option] = []
    below: dict[str, argparse.ArgumentParser] = {}
    takes_file = False
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to read a parser
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            after += [(each.dest, _short(each.help)) for each in action._choices_actions]  # noqa: SLF001
            below |= action.choices
        elif action.option_strings:
            options.append(_option(action))
        else:
            after += [(str(choice), "") for choice in action.choices or ()]
            takes_file = takes_file or _FILES.search(str(action.metavar)) is not None
    yield Place(words, tuple(after), tuple(options), takes_file)
    for name, command in below.items():
        yield from places(command, f"{words} {name}".strip())


def _option(action: argparse.Action) -> Option:
    metavar = str(action.metavar or "")
    values = None if action.nargs == 0 else tuple(str(choice) for choice in action.choices or ())
    return Option(action.option_strings[-1], _short(action.help), values, _FILES.search(metavar) is not None)


def _server_options() -> Iterator[Option]:
    """Yield the options of ``ferrule serve``; none if the server is not installed."""
    if importlib.util.find_spec("ferrule_server") is None:
        return
    command = [sys.executable, "-m", "ferrule_server", "--help"]
    wide = os.environ | {"COLUMNS": "500"}  # each text on one line
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=wide)  # noqa: S603 - our own program
    lines = done.stdout.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if (found := _FLAG_LINE.match(line)) is not None:
            metavar = found["metavar"] or ""
            values = (
                [each for each in metavar.split("|") if re.fullmatch(r"[a-z0-9-]+", each)] if "|" in metavar else []
            )
            text = _short(found["help"] or following.strip())
            yield Option(found["flag"], text, tuple(values) if metavar else None, _FILES.search(metavar) is not None)


def _short(text: str | None) -> str:
    """Return the first part of a help text, on one line."""
    plain = " ".join((text or "").replace("%%", "%").split())
    return textwrap.shorten(re.split(r"[;:(]| such as ", plain, maxsplit=1)[0], _MAX_HELP, placeholder=" ...")


def _quoted(text: str) -> str:
    """Return a text as one word of a shell, between single quotes."""
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _cases(rows: Sequence[tuple[str, str]], indent: str = "        ") -> str:
    """Return the branches of a ``case``, one for all patterns that do the same."""
    patterns: dict[str, list[str]] = {}
    for pattern, does in rows:
        patterns.setdefault(does, []).append(f'"{pattern}"')
    return "\n".join(f"{indent}{'|'.join(names)}) {does} ;;" for does, names in patterns.items())


def _words_cases(found: Sequence[Place], variable: str) -> str:
    return _cases([(f" {place.words}".rstrip(), f"{variable}='{place.words}'") for place in found if place.words])


def _bash(found: Sequence[Place]) -> str:
    values, words = [], []
    for place in found:
        for option in place.options:
            if option.values is not None:
                does = f'choices="{" ".join(option.values)}"; is_value=1'
                values.append((f"{place.words} {option.flag}", does))
        names = [word for word, _ in place.words_after] + [option.flag for option in place.options]
        words.append((place.words, f'choices="{" ".join(names)}"'))
    return f"""\
# Completion of ferrule for bash: source <(ferrule completion bash)
_ferrule() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD - 1]}}" at="" choices="" is_value="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "${{at:+ $at}} ${{COMP_WORDS[i]}}" in
{_words_cases(found, "at")}
        esac
    done
    case "$at $before" in
{_cases(values)}
    esac
    [ -n "$is_value" ] || case "$at" in
{_cases(words)}
    esac
    COMPREPLY=($(compgen -W "$choices" -- "$current"))
}}
complete -o default -F _ferrule ferrule"""


def _zsh(found: Sequence[Place]) -> str:
    values, words = [], []
    for place in found:
        for option in place.options:
            if option.values is not None:
                does = f"compadd -- {' '.join(option.values)}; " if option.values else ""
                values.append(
                    (f"{place.words} {option.flag}", f"{does}{'_files; ' if option.takes_file else ''}return")
                )
        rows = [*place.words_after, *((option.flag, option.help) for option in place.options)]
        entries = " ".join(_quoted(f"{word}:{text}" if text else word) for word, text in rows)
        words.append((place.words, f"found=({entries}){'; _files' if place.takes_file else ''}"))
    return f"""\
#compdef ferrule
# Completion of ferrule for zsh: source <(ferrule completion zsh), after compinit
_ferrule() {{
    local at="" i
    local -a found
    for ((i = 2; i < CURRENT; i++)); do
        case "${{at:+ $at}} ${{words[i]}}" in
{_words_cases(found, "at")}
        esac
    done
    case "$at ${{words[CURRENT - 1]}}" in
{_cases(values)}
    esac
    case "$at" in
{_cases(words)}
    esac
    _describe ferrule found
}}
if [ "${{funcstack[1]}}" = _ferrule ]; then _ferrule "$@"; else compdef _ferrule ferrule; fi"""


def _fish(found: Sequence[Place]) -> str:
    lines = []
    for place in found:
        begin = f"complete -c ferrule -n '__ferrule_at \"{place.words}\"'"
        if not place.takes_file:
            lines.append(f"{begin} -f")
        for word, text in place.words_after:
            lines.append(f"{begin} -a {_fish_quoted(word)} -d {_fish_quoted(text)}")
        for option in place.options:
            takes = ""
            if option.values is not None:
                takes = " -r -F" if option.takes_file else " -x"
                takes += f" -a {_fish_quoted(' '.join(option.values))}" if option.values else ""
            lines.append(f"{begin} -l {option.flag[2:]}{takes} -d {_fish_quoted(option.help)}")
    newline = "\n"
    return f"""\
# Completion of ferrule for fish: ferrule completion fish | source
function __ferrule_at
    set -l at
    for word in (commandline -opc)[2..-1]
        switch (string trim -- "$at $word")
            case {" ".join(_fish_quoted(place.words) for place in found if place.words)}
                set at (string trim -- "$at $word")
        end
    end
    test "$at" = "$argv[1]"
end
{newline.join(lines)}"""


_SCRIPTS: dict[str, Callable[[Sequence[Place]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
