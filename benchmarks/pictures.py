"""Makes the pictures of docs/observing.md anew: a server under a small load, its web page, and ``ferrule top``.

    make pictures

It starts a server with the bundled model and three principals, which decode, generate and fork for a while, and
then looks at it as a person would. It needs Chromium.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import guarded
from ferrule import Client, sample
from ferrule.types import Append
from tools.browser import browsing

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
PRINCIPALS = {"agents": "", "evals": "", "search-team": "", "ops": " admin"}
COLUMNS, LINES, WIDTH = 118, 30, 1600
_MAX_TOKEN = 255


def main() -> int:
    """Write both pictures; 1 if there is no Chromium."""
    options = argparse.ArgumentParser(prog="make pictures", description=__doc__.splitlines()[0])
    options.add_argument("--folder", type=Path, default=FOLDER, help="where to (default: docs/images)")
    options.add_argument("--seconds", type=float, default=75, help="of load before they are made (default: 75)")
    options.add_argument("--widths", type=int, nargs="*", default=[], help="ui-WIDTH.png of other widths too")
    args = options.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.stderr.write("make pictures: chromium is not installed: make test-stack installs it\n")
        return 1
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ferrule-pictures-")))
        target, page = stack.enter_context(_server(folder))
        browser = stack.enter_context(browsing(chromium, folder / "browser"))
        browser.open(f"http://{page}/ui", width=WIDTH, height=1000)
        with _load(target):
            time.sleep(args.seconds)
            sizes = {"COLUMNS": str(COLUMNS), "LINES": str(LINES), "FERRULE_TOKEN": "ops"}
            top = [sys.executable, "-m", "ferrule_cli.app", "top", "--target", target, "--once", "--svg"]
            subprocess.run(
                [*top, str(args.folder / "top.svg")], env=os.environ | sizes, check=True, stdout=subprocess.DEVNULL
            )
            for width in (WIDTH, *args.widths):
                browser.resize(width, 1000)
                time.sleep(1.5)
                name = "ui.png" if width == WIDTH else f"ui-{width}.png"
                (args.folder / name).write_bytes(browser.screenshot(is_whole=True))
    return 0


@contextmanager
def _server(folder: Path) -> Iterator[tuple[str, str]]:
    """Start a server; give its address and the one of its page."""
    tokens = folder / "tokens"
    tokens.touch(mode=0o600)
    # A principal's token is its name: the server is gone in two minutes, and only this machine reaches it.
    lines = [f"{hashlib.sha256(name.encode()).hexdigest()} {name}{role}\n" for name, role in PRINCIPALS.items()]
    tokens.write_text("".join(lines), "utf-8")
    command = [sys.executable, "-m", "ferrule_server", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    command += ["--ui", "on", "--instance", "ferrule-1", "--kv-memory", "16MiB", "--token-file", str(tokens)]
    command += ["--drain-grace", "0s", "--log-level", "error"]
    with guarded.start(command, folder, subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            words = dict(word.partition("=")[::2] for word in process.stdout.readline().decode().split())
            yield words["listen"], words["metrics_listen"]
        finally:
            guarded.end(process)


@contextmanager
def _load(target: str) -> Iterator[None]:
    """Have the principals work until the block is left."""
    ended = threading.Event()
    works: list[tuple[str, Callable[[Client, random.Random], None]]] = [
        *[("agents", _generate)] * 3,
        ("search-team", _search),
        ("search-team", _search),
        ("evals", _score),
    ]

    def work(principal: str, once: Callable[[Client, random.Random], None], seed: int) -> None:
        draw = random.Random(seed)
        with Client(target, token=principal) as client:
            while not ended.is_set():
                once(client, draw)

    threads = [threading.Thread(target=work, args=(*each, seed)) for seed, each in enumerate(works)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _generate(client: Client, draw: random.Random) -> None:
    """Draw a few texts, one after the other, with a pause."""
    client.generate(_prompt(draw, 40), draw.randrange(60, 110), ignore_eos=True, policy=sample(temperature=0.8)).read()
    time.sleep(draw.uniform(0, 0.8))


def _search(client: Client, draw: random.Random) -> None:
    """Grow a tree of three levels, and hold it for a moment."""
    tree = [client.prefill(_prompt(draw, draw.randrange(60, 90)))]
    with client.stream() as stream:
        for width in (draw.randrange(2, 4), draw.randrange(2, 4)):
            for parent in tree[-3:]:
                branches = parent.fork(width)
                for _ in range(draw.randrange(10, 40)):
                    stream.run([Append(branch, draw.randrange(1, _MAX_TOKEN)) for branch in branches])
                tree += branches
    time.sleep(draw.uniform(0.5, 2))
    client.release(tree)


def _score(client: Client, draw: random.Random) -> None:
    """Append to some prompts now and then, and leave one to its lease."""
    caches = [client.prefill(_prompt(draw, draw.randrange(20, 110)), ttl=10) for _ in range(4)]
    for each in caches:
        each.append(7)
        time.sleep(draw.uniform(0.2, 1))
    caches.pop().detach()
    client.release(caches)


def _prompt(draw: random.Random, length: int) -> list[int]:
    """Return one of five beginnings, and behind it what nobody else sends."""
    kind = draw.randrange(1, 6)
    return [kind] * 32 + [draw.randrange(1, _MAX_TOKEN) for _ in range(max(1, length - 32))]


if __name__ == "__main__":
    sys.exit(main())
