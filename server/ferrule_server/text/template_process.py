"""Run the chat templates of a model in a few separate processes, which are replaced when they end."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ferrule_server.text.template_wire import Ended, Outcome, receive_answer, send_request

_NUM_PROCESSES: Final = 2
"""While one process is busy with a slow conversation, the other one serves all others."""
_START_TIMEOUT_S: Final = 30.0
_MAX_BYTES_PER_CHARACTER: Final = 4
_COMPLAINT_BYTES: Final = 1 << 16
_INHERITED: Final = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "LC_TIME", "TZ", "PYTHONHOME")
"""Variables that Python or the clock of a template needs. The processes get no others, which may hold secrets."""


class TookTooLong(Exception):
    """A template exceeded its time, and its process was ended."""


class TookTooMuch(Exception):
    """A template exceeded its memory or ended its process in another way; the message says how."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """The limits on one rendering.

    Attributes:
        max_length: Longest text, in characters.
        max_time_s: Longest time. Compiling the templates is limited to this much processor time.
        max_memory_bytes: Memory that the process which renders may use in addition to that of Python.
    """

    max_length: int = 4 << 20
    max_time_s: float = 2.0
    max_memory_bytes: int = 512 << 20


class TemplateProcesses:
    """The processes that render the templates of one model; safe to share between threads.

    Invariant: there are at most ``_NUM_PROCESSES``, each used by one thread at a time. A process that has ended is
    replaced when it is next needed. All end when this object is collected, or when the server ends.

    Args:
        sources: The templates by name.
        limits: The limits on compiling them and on each rendering.
    """

    def __init__(self, sources: Mapping[str, str], limits: RenderLimits) -> None:
        self._sources, self._limits = dict(sources), limits
        self._max_bytes = max(_COMPLAINT_BYTES, _MAX_BYTES_PER_CHARACTER * limits.max_length)
        self._slots: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(_NUM_PROCESSES):
            self._slots.put(None)

    def compile(self) -> str:
        """Start a process, which compiles the templates. Return its complaint, or an empty text if it has none.

        Raises:
            OSError: No process can be started.
            TookTooLong: They take too long.
            TookTooMuch: They take too much memory.
        """
        process = self._slots.get()
        try:
            process, complaint = self._start()
        finally:
            self._slots.put(process)
        return complaint

    def render(self, name: str, variables: Mapping[str, Any]) -> tuple[Outcome, str]:
        """Render a template; return the outcome and the text.

        Raises:
            OSError: No process can be started.
            ValueError, TypeError, RecursionError: The variables are not JSON.
            TookTooLong: It takes too long.
            TookTooMuch: It takes too much memory.
        """
        request = {"render": name, "variables": variables, "max_length": self._limits.max_length}
        content = json.dumps({**request, "max_cpu_s": self._limits.max_time_s}).encode()
        process = self._slots.get()
        try:
            if process is None or not process.is_running:
                process, complaint = self._start()
                if complaint:  # although they compiled at the start of the server
                    process.close()
                    raise TookTooMuch(complaint)
            return process.ask(content, self._max_bytes, self._limits.max_time_s)
        finally:
            self._slots.put(process)

    def _start(self) -> tuple[_Process, str]:
        """Start a process; return it and its complaint about the templates."""
        process = _Process(self._limits.max_memory_bytes)
        request = {"compile": self._sources, "max_cpu_s": self._limits.max_time_s}
        outcome, text = process.ask(json.dumps(request).encode(), _COMPLAINT_BYTES, _START_TIMEOUT_S)
        return process, "" if outcome is Outcome.DONE else text


class _Process:
    """One process and the socket to it, used by one thread at a time. Every failed request ends the process.

    Attributes:
        close: Ends the process, once; called at the latest when this object is collected or the server ends.
    """

    def __init__(self, max_memory_bytes: int) -> None:
        self._link, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _spawn(theirs, max_memory_bytes)
            except BaseException:
                self._link.close()
                raise
        self.close = weakref.finalize(self, _end, self._process, self._link)

    @property
    def is_running(self) -> bool:
        """Whether it can take another request."""
        return self._process.poll() is None

    def ask(self, content: bytes, max_bytes: int, max_time_s: float) -> tuple[Outcome, str]:
        """Send a request and return its answer.

        Raises:
            TookTooLong: There was no answer in time.
            TookTooMuch: The process ended.
        """
        deadline_s = time.monotonic() + max_time_s
        try:
            send_request(self._link, content, deadline_s)
            outcome, text = receive_answer(self._link, max_bytes, deadline_s)
            if outcome is Outcome.OUT_OF_MEMORY:
                raise TookTooMuch("its memory is used up")
        except TimeoutError as error:
            self.close()
            raise TookTooLong from error
        except Ended as error:
            raise self._failure() from error
        except BaseException:
            self.close()
            raise
        return outcome, text

    def _failure(self) -> TookTooLong | TookTooMuch:
        """Return why a process did not answer, and end it if it still runs."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = 0
        self.close()
        if code == -signal.SIGPROF:
            return TookTooLong()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return TookTooMuch(f"the process that runs it ended ({how})")


def _end(process: subprocess.Popen[bytes], link: socket.socket) -> None:
    link.close()
    process.kill()
    process.wait()


def _spawn(link: socket.socket, max_memory_bytes: int) -> subprocess.Popen[bytes]:
    """Start a process that gets nothing from this one but the socket and the paths of modules.

    It gets its own session, so that Ctrl-C at a terminal does not end it while the server drains.
    """
    variables = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109  (as text)
    return subprocess.Popen(  # noqa: S603  (this interpreter and a module of this package)
        [sys.executable, "-P", "-m", "ferrule_server.text.template_worker", str(max_memory_bytes)],
        stdin=link.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**variables, "PYTHONPATH": paths},
        start_new_session=True,
    )
