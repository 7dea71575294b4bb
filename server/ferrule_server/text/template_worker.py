"""The process that runs chat templates: ``python -m ferrule_server.text.template_worker MAX_MEMORY_BYTES``.

A template is code of the model. One call of a Jinja filter or of a method of ``str`` can take gigabytes or hours, and
nothing interrupts it, so no check inside the interpreter can bound it. The system bounds it: the memory that this
process can map is limited, and a timer ends the process once a request has used its processor time. The server waits no
longer than that; it then reports the reason and starts another process.
"""

from __future__ import annotations

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
"""Steps of the model have priority over templates on the same core."""
_STATISTICS: Final = Path("/proc/self/statm")


class _Templates:
    """The templates of one model, compiled."""

    def __init__(self) -> None:
        self._environment = ChatEnvironment()
        self._templates: dict[str, jinja2.Template] = {}

    def answer(self, request: dict[str, Any]) -> tuple[Outcome, str]:
        """Return the outcome of a request and its text; raise nothing but MemoryError."""
        # If the time runs out, the default action of SIGPROF ends this process.
        signal.setitimer(signal.ITIMER_PROF, request["max_cpu_s"])
        try:
            if "compile" in request:
                return self._compile(request["compile"])
            return self._render(request["render"], request["variables"], request["max_length"])
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _compile(self, sources: dict[str, str]) -> tuple[Outcome, str]:
        for name, source in sources.items():
            try:
                self._templates[name] = self._environment.from_string(source)
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001  (Jinja computes constants, which may fail in any way)
                place = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
                return Outcome.REFUSED, f"chat template {name[:80]!r}{place}: {_complaint(error)}"
        return Outcome.DONE, ""

    def _render(self, name: str, variables: dict[str, Any], max_length: int) -> tuple[Outcome, str]:
        template = self._templates[name]
        try:
            text = _joined(template.root_render_func(template.new_context(variables)), max_length)
            if text is None:
                return Outcome.TOO_LONG, ""
            text.encode()
        except MemoryError:
            raise
        except UnicodeEncodeError:
            return Outcome.NOT_UTF8, ""
        except Exception as error:  # noqa: BLE001  (a template may fail in any way)
            return Outcome.REFUSED, _complaint(error)
        return Outcome.DONE, text


def main() -> None:
    """Answer requests until the server is gone or no memory is left."""
    link = socket.socket(fileno=0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal: the server drains first
    _limit_memory(int(sys.argv[1]))
    os.nice(_NICENESS)
    templates = _Templates()
    outcome = Outcome.DONE
    while outcome is not Outcome.OUT_OF_MEMORY:
        try:
            content = receive_request(link)
        except Ended:
            return
        try:
            outcome, text = templates.answer(json.loads(content))
        except MemoryError:
            outcome, text = Outcome.OUT_OF_MEMORY, ""
        send_answer(link, outcome, text)


def _limit_memory(max_bytes: int) -> None:
    """Limit how many more bytes this process may map, and disable core files."""
    num_pages = int(_STATISTICS.read_text().split()[0]) if _STATISTICS.exists() else 0
    limit = num_pages * resource.getpagesize() + max_bytes
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if allowed == resource.RLIM_INFINITY else min(limit, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _joined(pieces: Iterator[str], max_length: int) -> str | None:
    """Return the pieces as one text; None if it would be longer than ``max_length``."""
    text, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > max_length:
            return None
        text.append(piece)
    return "".join(text)


def _complaint(error: Exception) -> str:
    """Return the message of a template, or of Python, in one line of bounded length."""
    text = " ".join(str(error)[: 4 * _MAX_COMPLAINT_LENGTH].split()) or type(error).__name__
    return text if len(text) <= _MAX_COMPLAINT_LENGTH else text[:_MAX_COMPLAINT_LENGTH] + "..."


if __name__ == "__main__":
    main()
