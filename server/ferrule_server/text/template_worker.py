"""The process that runs chat templates: ``python -m ferrule_server.text.template_worker MAX_MEMORY_BYTES``.

A template is code of the model's. Any of Jinja's filters and any method of a text can take gigabytes, or hours, in one
call that nothing interrupts, so no check inside the interpreter bounds it. The system does: this process can map only
so much memory, and a timer ends it once a request has taken its share of processor time. The server, which waits for
it no longer than that, reports what happened and starts another one.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jinja2

from ferrule_server.text.template_environment import ChatEnvironment
from ferrule_server.text.template_wire import Ended, Outcome, receive_request, send_answer

_MAX_COMPLAINT_LENGTH: Final = 500
_NICENESS: Final = 10
"""Steps come first where a template and the model want the same core."""
_STATISTICS: Final = Path("/proc/self/statm")


class _TooLong(Exception):
    """The text is longer than it may be."""


class _Templates:
    """The templates of one model, compiled."""

    def __init__(self) -> None:
        self._environment = ChatEnvironment()
        self._templates: dict[str, jinja2.Template] = {}

    def answer(self, request: dict[str, Any]) -> tuple[Outcome, str]:
        """Return what comes of a request; nothing is raised but MemoryError."""
        with _time_limit(request["max_cpu_s"]):
            if "compile" in request:
                return self._compile(request["compile"])
            return self._render(request["render"], request["variables"], request["max_length"])

    def _compile(self, sources: dict[str, str]) -> tuple[Outcome, str]:
        for name, source in sources.items():
            try:
                self._templates[name] = self._environment.from_string(source)
            except MemoryError:
                raise
            except jinja2.TemplateSyntaxError as error:
                return Outcome.REFUSED, f"chat template {name[:80]!r}, line {error.lineno}: {_complaint(error)}"
            except Exception as error:  # noqa: BLE001  (of constants that Jinja works out beforehand)
                return Outcome.REFUSED, f"chat template {name[:80]!r}: {_complaint(error)}"
        return Outcome.DONE, ""

    def _render(self, name: str, variables: dict[str, Any], max_length: int) -> tuple[Outcome, str]:
        template = self._templates[name]
        try:
            text = _joined(template.root_render_func(template.new_context(variables)), max_length)
            text.encode()
        except MemoryError:
            raise
        except _TooLong:
            return Outcome.TOO_LONG, ""
        except UnicodeEncodeError:
            return Outcome.NOT_UTF8, ""
        except Exception as error:  # noqa: BLE001  (the template is code of the model's and may fail in any way)
            return Outcome.REFUSED, _complaint(error)
        return Outcome.DONE, text


def main() -> None:
    """Answer requests until the server is gone or the memory is used up."""
    link = socket.socket(fileno=0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, where the server drains first
    _limit_memory(int(sys.argv[1]))
    os.nice(_NICENESS)
    templates = _Templates()
    is_usable = True
    while is_usable:
        try:
            content = receive_request(link)
        except Ended:
            return
        outcome, text = Outcome.OUT_OF_MEMORY, ""
        with contextlib.suppress(MemoryError):
            outcome, text = templates.answer(json.loads(content))
        send_answer(link, outcome, text)
        is_usable = outcome is not Outcome.OUT_OF_MEMORY


def _limit_memory(max_bytes: int) -> None:
    """Let this process map so many bytes more than it has mapped already, and leave no core file."""
    num_pages = int(_STATISTICS.read_text().split()[0]) if _STATISTICS.exists() else 0
    limit = num_pages * resource.getpagesize() + max_bytes
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if allowed == resource.RLIM_INFINITY else min(limit, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def _time_limit(max_cpu_s: float) -> Iterator[None]:
    """End this process, by SIGPROF's default action, once the body has taken so much processor time."""
    signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _joined(pieces: Iterator[str], max_length: int) -> str:
    text, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > max_length:
            raise _TooLong
        text.append(piece)
    return "".join(text)


def _complaint(error: Exception) -> str:
    """Return what a template says, or what Python says of it, in one line that is not too long."""
    text = " ".join(str(error)[: 4 * _MAX_COMPLAINT_LENGTH].split()) or type(error).__name__
    return text if len(text) <= _MAX_COMPLAINT_LENGTH else text[:_MAX_COMPLAINT_LENGTH] + "..."


if __name__ == "__main__":
    main()
