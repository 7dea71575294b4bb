"""Compiled kernels on disk, for the second start.

A cache is a folder with one ``<key>.json`` per kernel, which names the content files beside it by their hash. Files
are put in place whole (written elsewhere, then renamed) and the JSON last, so any number of processes may share a
folder; what is missing, cut short or altered counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrule_server.kernels.cuda.toolchain.compile import Cubin

__all__ = ["CubinCache", "default_folder"]

_log = logging.getLogger(__name__)


def default_folder() -> Path:
    """Return where cubins are kept unless somebody says otherwise: in the user's cache folder."""
    return Path("~/.cache/ferrule/cubins").expanduser()


@dataclass(frozen=True, slots=True)
class CubinCache:
    """A folder of cubins.

    Invariant: an entry that ``find`` returns is byte for byte what was stored under that key.

    Attributes:
        folder: Made at the first ``store`` or ``check``.
    """

    folder: Path

    def check(self) -> None:
        """Make the folder and find out whether it can be written, before the work whose results go there.

        Raises:
            OSError: It cannot.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".", suffix=".tmp"):
            pass

    def find(self, key: str) -> Cubin | None:
        """Return what is stored under a key; None where nothing whole is."""
        entry = self._entry(key)
        try:
            described = json.loads(entry.read_bytes())
            code = self._content(described["code"])
            ptx = zlib.decompress(self._content(described["ptx"])).decode()
            found = Cubin(code=code, ptx=ptx, **described["cubin"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, zlib.error) as error:
            _log.warning("event=cubin_damaged entry=%s error=%r", entry, error)
            return None
        _touch(entry)
        return found

    def store(self, key: str, cubin: Cubin, description: Mapping[str, object]) -> None:
        """Keep a cubin, in place of any other under that key.

        Args:
            key: 32 hexadecimal digits.
            cubin: Whole.
            description: Said beside it, for people; can be JSON.

        Raises:
            OSError: The folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        names = ("name", "architecture", "num_registers", "num_spilled_bytes", "num_stack_bytes")
        described = {
            **description,
            "cubin": {name: getattr(cubin, name) for name in names},
            "code": self._keep(cubin.code),
            "ptx": self._keep(zlib.compress(cubin.ptx.encode())),
        }
        _write_whole(self._entry(key), json.dumps(described, indent=1).encode())

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return the JSON of every entry by key; damaged ones are left out."""
        found = {}
        for path in sorted(self.folder.glob("*.json")):
            try:
                found[path.stem] = json.loads(path.read_bytes())
            except (OSError, ValueError):
                continue
        return found

    def prune(self, unused_s: float) -> int:
        """Delete entries that nobody stored or found for so many seconds, and content nobody names; return how many.

        A process that stores at the same time may lose content that it has just written; it is compiled anew later.
        """
        if not self.folder.exists():
            return 0
        limit = time.time() - unused_s
        stale = [path for path in self.folder.glob("*.json") if path.stat().st_mtime < limit]
        for path in stale:
            path.unlink(missing_ok=True)
        named = {entry.get(part) for entry in self.entries().values() for part in ("code", "ptx")}
        for path in self.folder.iterdir():
            if path.suffix != ".json" and path.name not in named and path.stat().st_mtime < limit:
                path.unlink(missing_ok=True)
        return len(stale)

    def _entry(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _keep(self, content: bytes) -> str:
        name = hashlib.sha256(content).hexdigest()
        _write_whole(self.folder / name, content)
        return name

    def _content(self, name: str) -> bytes:
        content = (self.folder / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != name:
            raise ValueError(f"{name} holds something else")
        return content


def _write_whole(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".tmp", delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError:
        _log.debug("event=cubin_not_touched entry=%s", path)
