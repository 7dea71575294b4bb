"""What is printed for people: the line ``ready``, what to do next, progress, and why the server cannot serve."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from ferrule_server import log_format
from ferrule_server.addresses import ListenAddress
from ferrule_server.config import ServerConfig

if TYPE_CHECKING:  # imported after the process is set up, because they import libraries that start threads
    from ferrule_server.executor.base import ExecutorInfo
    from ferrule_server.loading import OnProgress

_LOG = logging.getLogger("ferrule_server")
_USUAL_TARGET: Final = "127.0.0.1:50051"
"""What commands use without ``--target``."""


def say_unusable(message: str) -> None:
    """Report on stderr why the server cannot serve."""
    if log_format.is_json():
        _LOG.error("cannot serve: %s", message)
    else:
        sys.stderr.write(f"ferrule serve: {message}\n")


def say_ready(
    addresses: Mapping[str, ListenAddress], info: ExecutorInfo, config: ServerConfig, commit: str | None
) -> None:
    """Print the line ``ready`` on stdout, as JSON if the log is, and log the same values."""
    values = {
        **{name: address.target for name, address in addresses.items()},
        "model": info.model.model_id,
        **({} if commit is None else {"commit": commit}),
        "executor": info.name,
        "device": info.device,
        "dtype": info.model.dtype,
        **({"weights": "+".join(info.model.packed_types)} if info.model.packed_types else {}),
        **({"kernel_set": info.kernel_set} if info.kernel_set else {}),
        "blocks": info.num_blocks - 1,
        "block_size": info.block_size,
        "max_context": info.model.max_context,
        "instance": config.instance,
    }
    if log_format.is_json():  # containers mix stdout with the log, where each line is to be JSON
        sys.stdout.write(json.dumps({"message": "ready", **values}) + "\n")
    else:
        line = " ".join(f"{key}={shlex.quote(str(value))}" for key, value in values.items())
        sys.stdout.write(f"ready {line}\n")
    sys.stdout.flush()
    if is_watched():
        _say_next(addresses, has_ui=config.has_ui)
    _LOG.info(f"model loaded {' '.join(f'{key}=%s' for key in values)}", *values.values())


def _say_next(addresses: Mapping[str, ListenAddress], *, has_ui: bool) -> None:
    """Write on a terminal what can be done with a server that is ready."""
    target = addresses["listen"].target
    option = "" if target == _USUAL_TARGET else f" --target {target}"
    sys.stderr.write(f'ferrule serve: try `ferrule generate{option} "def area("` in another terminal\n')
    if (metrics := addresses.get("metrics_listen")) is not None and has_ui:
        sys.stderr.write(f"ferrule serve: the page is http://{metrics.target}/ui\n")


def say_draining(num_sequences: int, grace_s: float, *, has_failed: bool) -> None:
    """Log that the server drains; on a terminal, write what it waits for and how to stop it at once."""
    _LOG.info("draining live_sequences=%d grace_s=%.1f has_failed=%s", num_sequences, grace_s, has_failed)
    if is_watched() and num_sequences and not has_failed:
        handles = "1 live handle" if num_sequences == 1 else f"{num_sequences} live handles"
        sys.stderr.write(f"ferrule serve: serving {handles} for up to {grace_s:g} s more; Ctrl-C stops at once\n")


def is_watched() -> bool:
    """Whether stderr is a terminal, and the log on it is text."""
    return sys.stderr.isatty() and not log_format.is_json()


def show_cursor() -> None:
    """Show the cursor of a terminal again, which a bar hides, in a new line."""
    if is_watched():
        sys.stderr.write("\x1b[?25h\n")


@contextlib.contextmanager
def bar() -> Iterator[OnProgress]:
    """Yield a callable that moves a bar on a terminal; elsewhere it logs each stage once."""
    if not is_watched():
        yield _log_stage()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<22}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading", total=1.0)
        with log_format.written_by(lambda text: progress.console.out(text, end="", highlight=False)):
            yield lambda stage, share: progress.update(task, description=stage, completed=share)


def _log_stage() -> OnProgress:
    """Return a callable that logs each stage once."""
    seen: set[str] = set()

    def show(stage: str, share: float) -> None:
        if stage not in seen:
            seen.add(stage)
            _LOG.info("loading stage=%r progress=%.2f", stage, share)

    return show
