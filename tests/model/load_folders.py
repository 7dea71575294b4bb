"""Loads model folders one by one, each in a process of its own with little memory and little time; for a test.

``python -m tests.model.load_folders FOLDER...`` prints a line of JSON for each: what came of it and what it took. They
run in torch, so that a process does not load kernels before it reads the weights.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from ferrule_server.config import ServerConfig
from ferrule_server.errors import ConfigError, ModelError
from ferrule_server.executor import torch  # noqa: F401  (imported once for all of them)
from ferrule_server.loading import create_executor
from ferrule_server.model import weights  # noqa: F401
from ferrule_server.text import chat_template, tokenizer  # noqa: F401

MAX_SECONDS = 12
MAX_MORE_BYTES = 1536 << 20


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _outcome(model: str) -> dict[str, object]:
    begin = time.process_time()
    try:
        config = ServerConfig(model=model, executor="torch", kv_memory_bytes=1 << 20, num_threads=1)
        create_executor(config, lambda *_: None)
    except (ConfigError, ModelError) as error:
        name, message = type(error).__name__, str(error)
    except BaseException as error:  # noqa: BLE001  (whatever comes is the result)
        name, message = type(error).__name__, str(error)[:300]
    else:
        name, message = "loaded", ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"outcome": name, "message": message, "seconds": time.process_time() - begin, "peak_bytes": peak}


def _loaded_apart(model: str) -> dict[str, object]:
    """Return what comes of a folder; a process that takes too long is killed by its own timer."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        limit = _mapped_bytes() + MAX_MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
        os.write(writing, json.dumps(_outcome(model)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not text:
        return {"outcome": f"killed by {-os.waitstatus_to_exitcode(status)}", "message": ""}
    outcome: dict[str, object] = json.loads(text)
    return outcome


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        sys.stdout.write(json.dumps(_loaded_apart(argument)) + "\n")
