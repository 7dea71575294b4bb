"""``python -m ferrule_server``: read the settings, set the process up, and serve until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from ferrule_server import console, log_format, process
from ferrule_server.arguments import as_given, log_format_of, parse_config, settings_text, unknown_variables
from ferrule_server.config import ServerConfig
from ferrule_server.errors import ConfigError, ModelError

_LOG = logging.getLogger("ferrule_server")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until a signal stops it, and return the exit code: 0 stopped as asked, 2 unusable settings.

    This function does not return in two cases. Ctrl-C before the server is ready ends the process with 130. A fault
    ends it with 1, because the normal exit of the interpreter may abort or hang if the GPU context is broken.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if log_format_of(given, os.environ) == "json":
        log_format.set_up("info", "json")  # what is wrong with the settings is a line of JSON too
    try:
        return _run(parse_config(given, os.environ), settings_text(given, os.environ))
    except (ConfigError, ModelError) as error:
        problem = as_given(str(error), given, os.environ)
    except KeyboardInterrupt:  # before or after the loop, which has a handler of its own
        return process.EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ferrule"):
            raise
        problem = f"the module {error.name!r} is missing: install ferrule-server"
    console.say_unusable(problem)
    return process.EXIT_UNUSABLE


def _run(config: ServerConfig, printed: str | None) -> int:
    """Do what the settings say, and return the exit code; ``printed``: the settings as text, if they are asked for."""
    process.set_up(config)
    if unknown := unknown_variables(os.environ):
        _LOG.warning("unknown FERRULE_* variables are ignored variables=%s", ", ".join(unknown))
    if printed is not None:
        sys.stdout.write(printed)
        return 0
    if config.is_download_only:
        return _download(config)
    code = asyncio.run(_serve(config))
    return code if code != process.EXIT_FAULT else process.exit_now(code)


async def _serve(config: ServerConfig) -> int:
    stopping = process.stop_signal()  # before the imports, which take a second
    from ferrule_server.composition import serve

    try:
        return await serve(config, stopping)
    finally:
        stopping.cancel()
        process.ignore_signals()


def _download(config: ServerConfig) -> int:
    """Fetch the model and print its folder. Ctrl-C ends the process at once; the next download resumes."""
    from ferrule_server.loading import download

    def on_interrupt(*_: object) -> NoReturn:
        console.show_cursor()
        process.exit_now(process.EXIT_INTERRUPTED)

    signal.signal(signal.SIGINT, on_interrupt)
    with console.bar() as show:
        folder = download(config, show)
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    # Everything is closed by now. A normal exit of the interpreter would only wait 2 s longer: gRPC with certificates
    # waits for objects that are never freed.
    process.exit_now(main())
