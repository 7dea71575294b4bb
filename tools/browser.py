"""A headless Chromium that a test drives over a pipe, with what its console said."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WAIT_S = 20.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
    "about:blank",
)


_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""The browser's pipes are its descriptors 3 and 4."""


class Browser:
    """One page of a browser.

    Args:
        to_browser, from_browser: Its pipes, unbuffered: JSON messages, each ended by a zero byte.

    Attributes:
        complaints: Every warning and error of the console, uncaught exceptions and failed requests.
    """

    def __init__(self, to_browser: io.FileIO, from_browser: io.FileIO) -> None:
        self._write = to_browser
        self._read = from_browser
        self._numbers = itertools.count(1)
        self._received = b""
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command of the DevTools protocol."""
        number = next(self._numbers)
        session = {} if self._session is None else {"sessionId": self._session}
        self._write.write(
            json.dumps({"id": number, "method": method, "params": parameters, **session}).encode() + b"\0"
        )
        while (message := self._next()).get("id") != number:
            self._note(message)
        assert "error" not in message, message["error"]
        result: dict[str, Any] = message["result"]
        return result

    def open(self, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Load a page in a window of a size, light or dark."""
        self.resize(width, height)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        """Give the window another size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Return the value of an expression once it is true."""
        deadline = time.monotonic() + _WAIT_S
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}; {self.complaints}"
            time.sleep(0.05)
        return value

    def press(self, key: str) -> None:
        """Press and release a key."""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def screenshot(self, *, is_whole: bool = False) -> bytes:
        """Return the window, or the whole page, as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=is_whole)["data"])

    def close(self) -> None:
        """Have the browser end."""
        self._session = None
        with contextlib.suppress(OSError, EOFError):
            self.call("Browser.close")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            chunk = self._read.read(1 << 20)
            if not chunk:
                raise EOFError("the browser has ended")
            self._received += chunk
        text, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        """Keep what the console would show in yellow or red."""
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"])[:400])
        if message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("warning", "error"):
            self.complaints.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        if message.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in ("warning", "error"):
            self.complaints.append(json.dumps(parameters["args"])[:400])


@contextlib.contextmanager
def browsing(program: str, folder: Path) -> Iterator[Browser]:
    """Give a page of a fresh browser; it is gone afterwards.

    Args:
        program: Path of Chromium.
        folder: Of the test, for the browser's profile.
    """
    from_test, to_browser = os.pipe()
    from_browser, to_test = os.pipe()
    launch = [sys.executable, "-c", _LAUNCH, str(from_test), str(to_test)]
    with subprocess.Popen(
        [*launch, program, f"--user-data-dir={folder}", *_FLAGS],
        pass_fds=(from_test, to_test),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(from_test)
        os.close(to_test)
        try:
            with os.fdopen(to_browser, "wb", buffering=0) as write, os.fdopen(from_browser, "rb", buffering=0) as read:
                browser = Browser(write, read)
                yield browser
                browser.close()
            process.wait(20)
        finally:
            process.kill()
