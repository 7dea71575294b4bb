"""Plays a case through a runner and judges the replies; the judging is here once, for all languages."""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import struct
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from tests.conformance.cases import Case, fill
from tests.conformance.contract import METHODS, full_name
from tests.conformance.matching import Json, differences
from tests.conformance.servers import PROFILES, TOKENS, Servers

_PATIENCE_S: Final = 45.0
"""A runner that has not answered by then is ended; its own deadlines are 20 s."""

_RELEASED_AT_ONCE: Final = 256
"""Handles in one ReleaseCache at the end of a case; servers accept a limited number."""


class Failed(Exception):
    """The server, or the language, did not do what the case expects."""


class Unable(Exception):
    """The runner cannot express a step; the message says why."""


class Conversation:
    """Commands to a runner and its answers, a line each.

    Args:
        process: The runner, running.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, command: str, *fields: str) -> tuple[str, Json]:
        """Send a command; return the kind of the answer and what it carries.

        Raises:
            Unable: The runner says so.
            Failed: The runner is gone.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        patience = threading.Timer(_PATIENCE_S, self._process.kill)
        patience.start()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\t".join([command, *fields]) + "\n")
            self._process.stdin.flush()
        kind, _, rest = self._process.stdout.readline().rstrip("\n").partition("\t")
        patience.cancel()
        if kind == "unable":
            raise Unable(rest)
        if kind not in ("ok", "message", "end"):
            raise Failed(f"the runner ended at {command} {' '.join(fields)[:300]}")
        return kind, json.loads(rest) if rest else None


class Play:
    """One case with one runner.

    Args:
        case: What to do.
        conversation: With the runner.
        servers: Where the case's server runs.
        shared: What all languages must have alike, by name; the first one writes it.
    """

    def __init__(self, case: Case, conversation: Conversation, servers: Servers, shared: dict[str, Json]) -> None:
        self._case = case
        self._ask = conversation.ask
        self._shared = shared
        self._servers = servers
        self._target = servers.target(case.server) if case.server in PROFILES else servers.own(*case.flags)
        self._saved: dict[str, Json] = {"token": TOKENS, "unique": secrets.token_hex(8)}
        self._handles: dict[tuple[str, ...], dict[str, Json]] = {}

    def run(self) -> None:
        """Play all steps, then release what they made.

        Raises:
            Failed: A reply is not as expected; the message names the step.
            Unable: A step cannot be expressed.
        """
        try:
            for number, step in enumerate(self._case.steps, 1):
                self._step(step, f"step {number}")
        except (LookupError, ValueError) as gone:
            raise Failed(f"step {number} asks for what is not there: {gone!r}") from gone
        finally:
            if self._case.server == "own":
                self._servers.end("own")
            else:
                self._release()

    def _step(self, step: Mapping[str, Json], name: str) -> None:
        metadata = _pairs(fill(step.get("metadata", {}), self._saved))
        if "ended" in step:
            code = self._servers.wait("own")
            if code != step["ended"]:
                raise Failed(f"{name}: the server ended with {code}")
        elif "wait" in step:
            time.sleep(float(step["wait"]))
        elif "open" in step:
            self._ask("open", self._target, full_name(step["open"]), *metadata)
        elif "send" in step:
            self._ask("send", json.dumps(fill(step["send"], self._saved)))
        elif "close" in step or "cancel" in step:
            self._ask("close" if "close" in step else "cancel")
        elif "receive" in step:
            self._judge(step, name, self._receive(step["receive"]), metadata)
        else:
            self._judge(step, f"{name}, {step['call']}", self._call(step, metadata), metadata)

    def _call(self, step: Mapping[str, Json], metadata: tuple[str, ...]) -> tuple[str, Json]:
        method, request = full_name(step["call"]), json.dumps(fill(step.get("request", {}), self._saved))
        if not METHODS[method]:
            return self._ask("unary", self._target, method, request, *metadata)
        self._ask("open", self._target, method, *metadata)
        self._ask("send", request)
        self._ask("close")
        return self._receive("all")

    def _receive(self, wanted: Json) -> tuple[str, Json]:
        """Return one frame, so many results, or all frames up to the end, merged."""
        frames: list[Json] = []
        while not _is_enough(frames, wanted):
            kind, frame = self._ask("receive")
            if kind == "end" and frames and wanted == "end":
                raise Failed(f"{len(frames)} frames came before the end, expected none: {str(frames)[:300]}")
            if kind == "end":
                return (kind, frame) if frame.get("code") or wanted != "all" else ("message", merged(frames))
            frames.append(frame)
        return "message", merged(frames)

    def _judge(self, step: Mapping[str, Json], name: str, answer: tuple[str, Json], metadata: tuple[str, ...]) -> None:
        kind, reply = answer
        self._remember(reply, metadata)
        if "save" in step:
            self._saved[step["save"]] = reply
        if "error" in step:
            wanted = {"$status": fill(step["error"], self._saved)}
            found = list(differences(wanted, reply if kind == "end" else {}, name))
        elif kind == "end" and (step.get("receive") != "end" or reply.get("code")):
            found = [f"{name} ended: {reply}"]
        else:
            found = list(differences(fill(step.get("expect", {}), self._saved), reply, name))
        for key, path in step.get("alike", {}).items():
            value = _comparable(fill(path, self._saved))
            if self._shared.setdefault(f"{self._case.name}: {key}", value) != value:
                found.append(f"{name}: {key} differs from what another language got")
        if found:
            raise Failed("; ".join(found[:5]))

    def _remember(self, reply: Json, metadata: tuple[str, ...]) -> None:
        for handle in _handles_in(reply):
            self._handles.setdefault(metadata, {})[handle["cacheId"]] = handle

    def _release(self) -> None:
        """Leave nothing on a server that other cases use."""
        for metadata, handles in self._handles.items():
            left = list(handles.values())
            for start in range(0, len(left), _RELEASED_AT_ONCE):
                request = json.dumps({"kvCaches": left[start : start + _RELEASED_AT_ONCE]})
                self._ask("unary", self._target, full_name("ReleaseCache"), request, *metadata)


def _comparable(value: Json) -> Json:
    """Return a value with its floats as the 32 bits they are, however a language writes them."""
    if isinstance(value, dict):
        return {key: _comparable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_comparable(one) for one in value]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return struct.pack("<f", value).hex() if is_number else value


def _is_enough(frames: list[Json], wanted: Json) -> bool:
    if wanted in ("all", "end"):
        return False
    if wanted == "one":
        return len(frames) == 1
    return all(sum(len(frame.get(key, [])) for frame in frames) >= count for key, count in wanted.items())


def _pairs(metadata: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(text for pair in metadata.items() for text in pair)


def _handles_in(reply: Json) -> Iterator[dict[str, Any]]:
    """Find every handle in a reply."""
    if isinstance(reply, dict):
        if "cacheId" in reply:
            yield reply
        for value in reply.values():
            yield from _handles_in(value)
    elif isinstance(reply, list):
        for value in reply:
            yield from _handles_in(value)


def merged(frames: list[Json]) -> Json:
    """Return the frames of a stream as one message, since how rows are cut into frames is the server's choice.

    Results of ``StreamDecode`` come by ``seq``, outputs of ``Generate`` by branch, rows of ``Forward`` in order.
    """
    if len(frames) == 1 and not {"results", "outputs"} & frames[0].keys():
        return frames[0]
    together: dict[str, Any] = {"frames": len(frames)}
    for frame in frames:
        for key, value in frame.items():
            if key in ("results", "releases"):
                together.setdefault(key, []).extend(value)
            elif key == "outputs" and isinstance(value, list):
                _add_branches(together.setdefault("branches", []), value)
            elif key == "outputs":
                _add_rows(together.setdefault("outputs", {}), value)
            else:
                together[key] = value
    together.get("results", []).sort(key=lambda result: int(result.get("seq", 0)))
    return together


def _add_branches(branches: list[dict[str, Any]], outputs: Iterable[dict[str, Any]]) -> None:
    for output in outputs:
        index = int(output.get("index", 0))
        branches.extend({} for _ in range(index + 1 - len(branches)))
        rows = output.pop("outputs", {})
        text = branches[index].get("text", "") + output.get("text", "")
        branches[index].update(output, text=text)
        _add_rows(branches[index].setdefault("outputs", {}), rows)


def _add_rows(together: dict[str, Any], rows: Mapping[str, Any]) -> None:
    for key, value in rows.items():
        if isinstance(value, list):
            together.setdefault(key, []).extend(value)
        elif key == "numRows":
            together[key] = together.get(key, 0) + value
        elif key in ("logits", "hiddenState"):
            _add_tensor(together.setdefault(key, {"data": ""}), value)
        else:
            together[key] = value


def _add_tensor(together: dict[str, Any], tensor: Mapping[str, Any]) -> None:
    data = base64.b64decode(together["data"]) + base64.b64decode(tensor["data"])
    rows = tensor["shape"][0] + together.get("shape", [0])[0]
    together.update(tensor, data=base64.b64encode(data).decode(), shape=[rows, *tensor["shape"][1:]])
