"""Runs the steps of conformance cases with ``buf curl``, a process per call; the protocol is in the README above.

What ``buf curl`` cannot express answers ``unable`` with the reason.
"""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import sys
import threading
from typing import IO, Any

from google.protobuf import json_format
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import code_pb2, error_details_pb2, status_pb2

BUF, *SCHEMAS = sys.argv[1:]
OWN_LIMIT = "is larger than configured max 4194304"
DEADLINE_S = 20.0
PATIENCE_S = 3.0
assert error_details_pb2.ErrorInfo.DESCRIPTOR is not None  # its import lets JSON resolve the details of a status


def command_of(target: str, name: str, pairs: tuple[str, ...], data: str) -> list[str]:
    """Return the command line of one call."""
    schemas = [f"--schema={schema}" for schema in SCHEMAS]
    headers = [f"--header={key}: {value}" for key, value in zip(pairs[::2], pairs[1::2], strict=True)]
    flags = ["--protocol=grpc", "--http2-prior-knowledge", f"--timeout={DEADLINE_S}s", *schemas, *headers]
    return [BUF, "curl", *flags, f"--data={data}", f"http://{target}/{name}"]


def end_of(code: int, words: str) -> str:
    """Return the line that tells how a call ended, from what ``buf curl`` says on stderr.

    Raises:
        RuntimeError: It ended for another reason than the server's answer.
    """
    if code == 0:
        return "end\t{}"
    try:
        error = json.loads(words)
    except ValueError as bad:
        raise RuntimeError(words) from bad
    if OWN_LIMIT in error.get("message", ""):
        return "unable\tbuf curl takes no reply beyond 4 MiB"
    name = error["code"].upper().replace("CANCELED", "CANCELLED")
    status = status_pb2.Status(code=code_pb2.Code.Value(name), message=error.get("message", ""))
    for detail in error.get("details", []):
        value = base64.b64decode(detail["value"] + "=" * (-len(detail["value"]) % 4))
        status.details.append(AnyMessage(type_url=f"type.googleapis.com/{detail['type']}", value=value))
    return f"end\t{json_format.MessageToJson(status, indent=None)}"


class Runner:
    """Takes commands; at most one stream is open."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._words: list[str] = []
        self._reader: threading.Thread | None = None

    def unary(self, target: str, name: str, request: str, *pairs: str) -> str:
        """Call a method with one request and one reply; the request goes through stdin, where any size fits."""
        if "grpc-encoding" in pairs:
            return "unable\tbuf curl does not compress requests"
        command = command_of(target, name, pairs, "@-")
        run = subprocess.run(command, input=request, capture_output=True, text=True, timeout=60, check=False)
        if run.returncode != 0:
            return end_of(run.returncode, run.stderr)
        return f"message\t{json.dumps(json.loads(run.stdout))}"

    def open(self, target: str, name: str, *pairs: str) -> str:
        """Begin a stream whose frames go through stdin as they come."""
        self._drop()
        command = command_of(target, name, pairs, "@-")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._words, errors = [], self._process.stderr
        self._reader = threading.Thread(target=lambda: self._words.append(errors.read()))  # type: ignore[union-attr]
        self._reader.start()
        return "ok"

    def _drop(self) -> None:
        """End a stream that nobody has read to its end."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def send(self, request: str) -> str:
        """Write a frame."""
        with contextlib.suppress(BrokenPipeError):  # the call has ended; receive tells how
            self._pipe("stdin").write(request + "\n")
            self._pipe("stdin").flush()
        return "ok"

    def close(self) -> str:
        """Say that no frame follows."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe("stdin").close()
        return "ok"

    def cancel(self) -> str:
        """There is no way but to kill it, and then nobody is left to say how the call ended."""
        self._drop()
        return "unable\tbuf curl has no way to cancel a call and tell how it ended"

    def receive(self) -> str:
        """Wait for a frame, which is printed over several lines, or the end.

        ``buf curl`` tells how a call ended once its input has ended: where nothing comes any more, that is ended.
        """
        text = ""
        patience = threading.Timer(PATIENCE_S, self.close)
        patience.start()
        for line in self._pipe("stdout"):
            patience.cancel()
            text += line
            if line.startswith("}") or line.strip() == "{}":
                return f"message\t{json.dumps(json.loads(text))}"
        patience.cancel()
        assert self._process is not None
        assert self._reader is not None
        code = self._process.wait()
        self._reader.join()
        return end_of(code, self._words[0])

    def _pipe(self, name: str) -> IO[str]:
        pipe: Any = getattr(self._process, name)
        assert pipe is not None
        return pipe  # type: ignore[no-any-return]


def main() -> None:
    """Answer each command line with one line."""
    runner = Runner()
    for line in sys.stdin:
        command, *fields = line.rstrip("\n").split("\t")
        sys.stdout.write(f"{getattr(runner, command)(*fields)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
