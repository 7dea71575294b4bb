"""Runs the chat templates of a model in processes of their own, a few that are started again when they end."""

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
"""A conversation that takes its whole time keeps one of them busy; the others wait for the second one meanwhile."""
_START_TIMEOUT_S: Final = 30.0
_MAX_BYTES_PER_CHARACTER: Final = 4
_COMPLAINT_BYTES: Final = 1 << 16
_INHERITED: Final = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "LC_TIME", "TZ", "PYTHONHOME")
"""Variables that Python, or the clock of a template, needs. The others may hold secrets and stay here."""


class TookTooLong(Exception):
    """A template was ended because its time was used up."""


class TookTooMuch(Exception):
    """A template was ended because its memory was used up; or it ended the process in another way."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one rendering may take.

    Attributes:
        max_length: Longest text, in characters.
        max_time_s: Longest time; also the processor time that compiling the templates may take.
        max_memory_bytes: Memory that the process which renders may take, beyond what Python needs.
    """

    max_length: int = 4 << 20
    max_time_s: float = 2.0
    max_memory_bytes: int = 512 << 20


class TemplateProcesses:
    """The processes that render the templates of one model; safe to share between threads.

    Invariant: there are at most ``_NUM_PROCESSES``, each used by one thread at a time. One that has ended, or had to be
    ended, is replaced when it is needed next. All end with this object, or with the server.

    Args:
        sources: The templates by name.
        limits: On compiling them, and on each rendering.
    """

    def __init__(self, sources: Mapping[str, str], limits: RenderLimits) -> None:
        self._sources, self._limits = dict(sources), limits
        self._running: set[_Process] = set()
        self._slots: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(_NUM_PROCESSES):
            self._slots.put(None)
        weakref.finalize(self, _close_all, self._running)

    def compile(self) -> str:
        """Start a process, which compiles the templates; return what is wrong with them, an empty text if nothing is.

        Raises:
            OSError: No process can be started.
            TookTooLong: They take too long.
            TookTooMuch: They take too much memory.
        """
        process = self._slots.get()
        try:
            process, complaint = self._started()
        finally:
            self._slots.put(process)
        return complaint

    def render(self, name: str, variables: Mapping[str, Any]) -> tuple[Outcome, str]:
        """Return what comes of rendering a template.

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
            process = self._usable(process)
            return process.ask(content, self._max_bytes, self._limits.max_time_s)
        finally:
            self._slots.put(self._kept(process))

    @property
    def _max_bytes(self) -> int:
        return max(_COMPLAINT_BYTES, _MAX_BYTES_PER_CHARACTER * self._limits.max_length)

    def _usable(self, process: _Process | None) -> _Process:
        """Return a process that runs and has the templates."""
        if process is not None and process.is_running:
            return process
        self._kept(process)
        started, complaint = self._started()
        if complaint:  # they compiled before
            self._running.discard(started)
            started.close()
            raise TookTooMuch(complaint)
        return started

    def _kept(self, process: _Process | None) -> _Process | None:
        """Return a process to be used again, None in place of one that has ended."""
        if process is None or process.is_running:
            return process
        process.close()
        self._running.discard(process)
        return None

    def _started(self) -> tuple[_Process, str]:
        """Start a process and return it with what it says of the templates."""
        process = _Process(self._limits.max_memory_bytes)
        self._running.add(process)
        request = {"compile": self._sources, "max_cpu_s": self._limits.max_time_s}
        try:
            outcome, text = process.ask(json.dumps(request).encode(), _COMPLAINT_BYTES, _START_TIMEOUT_S)
        except BaseException:
            self._kept(process)
            raise
        return process, "" if outcome is Outcome.DONE else text


class _Process:
    """One process and the socket to it. It is asked by one thread at a time, and ended by whatever goes wrong."""

    def __init__(self, max_memory_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _spawn(theirs, max_memory_bytes)
            except BaseException:
                ours.close()
                raise
        self._link = ours

    @property
    def is_running(self) -> bool:
        """Whether it may be asked again."""
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
        except TimeoutError as error:
            self.close()
            raise TookTooLong from error
        except Ended as error:
            raise self._end_of_it() from error
        except BaseException:
            self.close()
            raise
        if outcome is Outcome.OUT_OF_MEMORY:
            self.close()
            raise TookTooMuch("its memory is used up")
        return outcome, text

    def close(self) -> None:
        """End the process, if it has not ended, and forget it."""
        self._link.close()
        self._process.kill()
        self._process.wait()

    def _end_of_it(self) -> TookTooLong | TookTooMuch:
        """Return why a process ended that should have answered; one that goes on without answering is ended."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = 0
        self.close()
        if code == -signal.SIGPROF:
            return TookTooLong()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return TookTooMuch(f"the process that runs it ended ({how})")


def _spawn(link: socket.socket, max_memory_bytes: int) -> subprocess.Popen[bytes]:
    """Start a process with nothing of this one but the socket and where modules are found.

    It gets a session of its own, so that Ctrl-C at a terminal does not end it while the server drains.
    """
    variables = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109  (as text)
    return subprocess.Popen(  # noqa: S603  (this interpreter and a module of ours)
        [sys.executable, "-P", "-m", "ferrule_server.text.template_worker", str(max_memory_bytes)],
        stdin=link.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**variables, "PYTHONPATH": paths},
        start_new_session=True,
    )


def _close_all(processes: set[_Process]) -> None:
    for process in list(processes):
        process.close()
