"""The command line of the server: reads :class:`ServerConfig` from flags, environment and file, and writes ``--help``.

Flags win over the environment, the environment wins over the file, and the file wins over defaults.
"""

from __future__ import annotations

import argparse
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, Final, NoReturn

from ferrule_server import __version__
from ferrule_server.config import ServerConfig, instance_of_host
from ferrule_server.config_file import config_line, meant, read_config_file
from ferrule_server.errors import ConfigError
from ferrule_server.settings import FILE, NAMES, PREFIX, Setting, setting_of, settings_of, texts_of

CLIENT_VARIABLES: Final = frozenset(
    f"{PREFIX}{name}"
    for name in ("TARGET", "TIMEOUT", "TOKEN", "TLS", "TLS_CA", "CLIENT_CERT", "CLIENT_KEY", "TLS_SERVER_NAME")
)
"""Variables that the commands of the client read."""

_OF_KUBERNETES: Final = re.compile(r"FERRULE_(?:\w+_)?(?:SERVICE_(?:HOST|PORT\w*)|PORT(?:_\d+_\w+)?)")
"""Kubernetes sets these variables for services whose names begin with ``ferrule``."""

_SETTINGS: Final = tuple(settings_of(ServerConfig))
_LOG_FORMAT: Final = next(setting for setting in _SETTINGS if setting.flag == "--log-format")
_CONFIG: Final = Setting("--config", FILE, "", "")
"""The file of settings, which is not a setting itself."""

_InFile = Mapping[str, tuple[str, str]]
"""By the name of a setting: where the file sets it, and the text of the value."""


def parse_config(arguments: Sequence[str], environment: Mapping[str, str]) -> ServerConfig:
    """Return the settings: flags over environment variables over the file over defaults.

    Args:
        arguments: The command line without the name of the program.
        environment: Usually ``os.environ``; only ``FERRULE_*`` is read.

    Raises:
        ConfigError: A flag is unknown, or a value is unusable; the message names it and says what is accepted.
        SystemExit: The arguments contain ``--help`` or ``--version``.
    """
    flags, in_file = _given(arguments, environment)
    values = _of_host() | _values(ServerConfig, flags, environment, in_file)
    if values.get("executor") == "paged-reference":
        values.setdefault("model", None)
    return ServerConfig(**values)


def settings_text(arguments: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return all settings as a file for ``--config`` if ``--print-config`` is among the arguments, else None.

    Raises:
        ConfigError: As of :func:`parse_config`.
    """
    flags, in_file = _given(arguments, environment)
    if not flags["print_config"]:
        return None
    defaults = _of_host()
    lines = [
        config_line(
            replace(setting, default=defaults.get(setting.name, setting.default)),
            setting.given(flags[setting.name], environment) or in_file.get(setting.name),
        )
        for setting in _SETTINGS
        if setting.group
    ]
    return "\n".join(lines) + "\n"


def _of_host() -> dict[str, Any]:
    """Return the defaults, by the names of settings, that depend on this machine."""
    return {"instance": instance_of_host(socket.gethostname())}


def _given(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[dict[str, Any], _InFile]:
    """Return the flags by their names, those that are repeated joined by commas, and what the file sets."""
    parsed = vars(build_parser().parse_args(arguments))
    flags = {name: ",".join(value) if isinstance(value, list) else value for name, value in parsed.items()}
    return flags, _in_file(flags["config"], environment)


def _in_file(flag: str | None, environment: Mapping[str, str]) -> _InFile:
    given = _CONFIG.given(flag, environment)
    return {} if given is None else read_config_file(_CONFIG.value(*given), _SETTINGS)


def _values(
    declared: Any, flags: Mapping[str, str | None], environment: Mapping[str, str], in_file: _InFile
) -> dict[str, Any]:
    """Return the given values by field; a field that holds a dataclass of settings is always among them."""
    values: dict[str, Any] = {}
    for item in fields(declared):
        if (setting := setting_of(item)) is None:
            default: Any = item.default
            values[item.name] = replace(default, **_values(default, flags, environment, in_file))
        elif (given := setting.given(flags[setting.name], environment) or in_file.get(setting.name)) is not None:
            values[item.name] = setting.value(*given)
    return values


def log_format_of(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the format of the log that is asked for, also if the rest of the settings is unusable."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for setting in (_LOG_FORMAT, _CONFIG):
        parser.add_argument(setting.flag)
    flags = argparse.Namespace(log_format=None, config=None)
    with suppress(argparse.ArgumentError):  # a flag has no value
        parser.parse_known_args(arguments, flags)
    given = _LOG_FORMAT.given(flags.log_format, environment)
    with suppress(ConfigError):
        given = given or _in_file(flags.config, environment).get(_LOG_FORMAT.name)
    return _LOG_FORMAT.default if given is None else given[1]


def as_given(message: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a message in which settings from the environment or the file are named as they are there.

    Args:
        message: Names settings by their flags.
        arguments: The command line.
        environment: Usually ``os.environ``.
    """
    try:
        flags, in_file = _given(arguments, environment)
    except ConfigError:  # the message is about the command line or the file itself
        return message
    for setting in _SETTINGS:
        if flags[setting.name] is not None:
            continue
        if value := environment.get(setting.variable):
            message = _renamed(message, setting.flag, value, setting.variable, "=")
        elif setting.name in in_file:
            origin, value = in_file[setting.name]
            message = _renamed(message, setting.flag, value, origin, " = ")
    return message


def _renamed(message: str, flag: str, value: str, name: str, equals: str) -> str:
    """Return a message with another name in place of a flag, and another sign between it and its value."""
    message = re.sub(rf"{flag}[ =](?={re.escape(value)}(?![\w.]))", lambda _: f"{name}{equals}", message)
    return re.sub(rf"{flag}(?![\w-])", lambda _: name, message)


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Return the unknown names ``FERRULE_*``, each with the known name that is most similar.

    Args:
        environment: Names of variables.
    """
    known = CLIENT_VARIABLES | {setting.variable for setting in (*_SETTINGS, _CONFIG)}
    ours = [name for name in environment if name.startswith(PREFIX) and not _OF_KUBERNETES.fullmatch(name)]
    rests = sorted(name.removeprefix(PREFIX) for name in known)  # with the prefix, all names are similar
    return [f"{name}{meant(name.removeprefix(PREFIX), rests, PREFIX)}" for name in sorted(ours) if name not in known]


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ConfigErrors of one line."""

    def format_help(self) -> str:
        """Return the help, with the docstrings of the settings."""
        texts = texts_of(ServerConfig)
        for action in self._actions:
            if action.help == "":
                action.help = texts[action.dest]
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise the ConfigError."""
        unknown = re.match(r"unrecognized arguments: ([^\s=]+)", message)
        if unknown is not None:
            message = f"unknown flag {unknown[1]}{meant(unknown[1], self._option_string_actions)}"
        raise ConfigError(f'{message}; see "{self.prog} --help"')


def build_parser() -> argparse.ArgumentParser:
    """Return the parser. Each value stays text, or texts, or None if the flag is absent: a variable can replace it."""
    parser = _Parser(
        prog="ferrule serve",
        description="Serves a decoder-only language model over gRPC; clients hold handles to its KV cache.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ferrule {__version__}")
    parser.add_argument(_CONFIG.flag, metavar="FILE", help="read settings from this TOML file ($FERRULE_CONFIG)")
    about = "print the settings and where each comes from, as a file for --config, and exit"
    parser.add_argument("--print-config", action="store_true", help=about)
    groups = {heading: parser.add_argument_group(heading) for heading in dict.fromkeys(it.group for it in _SETTINGS)}
    for setting in _SETTINGS:
        metavar, text = setting.kind.metavar, "" if setting.group else argparse.SUPPRESS
        value: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_const", "const": "1"}
        if metavar == NAMES.metavar:
            value["action"] = "append"
        groups[setting.group].add_argument(setting.flag, help=text, **value)
    return parser


_EPILOG: Final = """\
Every flag can be given as an environment variable: --kv-memory as FERRULE_KV_MEMORY, --insecure as
FERRULE_INSECURE=1. An empty variable counts as unset, but an empty FERRULE_TOKEN_FILE or FERRULE_TLS_* is an error.
In the TOML file of --config, the keys are the flags without their dashes: kv-memory = "4GiB", max-context = 8192,
insecure = true. They may be in a table [serve]. Flags win over the environment, the environment wins over the file,
and the file wins over defaults. ~ is expanded in every path.

examples:
  ferrule serve                                        the demo model on 127.0.0.1:50051
  ferrule serve --model ~/models/Qwen3-0.6B --kv-memory 4GiB
  ferrule serve --model Qwen/Qwen3-0.6B                from the hub, unless a folder has that name
  ferrule serve --model ~/models/Qwen3-8B --device cuda --gpu-memory-fraction 0.8
  ferrule serve --executor paged-reference --listen unix:/tmp/ferrule.sock
  ferrule serve --listen 0.0.0.0:50051 --token-file tokens --tls-cert cert.pem --tls-key key.pem
  ferrule serve --listen 0.0.0.0:50051 --insecure      for other machines, on a trusted network
  ferrule serve --metrics-listen 127.0.0.1:9464        metrics, and a page that shows them, at http://127.0.0.1:9464/ui

Without --token-file and --tls-client-ca, all clients are one principal, 'local', and share their handles. This is
allowed on 127.0.0.1, [::1] and unix sockets; on other addresses it requires --insecure.

Kernels exist for GPUs of compute capability 8.0, 8.6, 8.9, 9.0, 10.x and 12.x, as bundles (`make kernels`). If the
kernels cannot be used on a GPU, the model runs in torch; a warning in the log and GetStatus say why.

When the model is loaded, the server prints one line that begins with 'ready' on stdout. SIGTERM or Ctrl-C stops the
server: new prompts are refused, and live handles are served until none is left or --drain-grace is over. A second
signal stops it at once. Exit codes: 0 stopped as asked; 1 a fault, such as a lost GPU: start the server again; 2 a
setting, an address or a model folder is unusable; 130 Ctrl-C before the line 'ready'; 128 + n a second signal n.
"""
