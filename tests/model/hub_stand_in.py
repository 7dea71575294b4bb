"""A stand-in for the hub on 127.0.0.1: repositories as folders, the calls huggingface_hub makes, and what can go wrong.

As on the real one, small files are answered where they are asked for, large ones by a redirect to another host (here:
another port), which knows ranges and must never see a token; a repository nobody may know of is answered 401.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_stand_in"
_LARGE = (".safetensors", ".bin", ".gguf")


@dataclass
class Faults:
    """What goes wrong.

    Attributes:
        cut_after_bytes: A large file's connection is cut behind so many bytes.
        num_cuts: How often; 0: never.
        has_ranges: Large files can be asked for from an offset on.
        is_down: Everything is answered 503.
        is_damaged: The first byte of large files is another one.
        pause_s: Behind every 64 KiB of a large file.
        is_gated: Files need the token, the list of them does not.
    """

    cut_after_bytes: int = 0
    num_cuts: int = 0
    has_ranges: bool = True
    is_down: bool = False
    is_damaged: bool = False
    pause_s: float = 0.0
    is_gated: bool = False


@dataclass
class Seen:
    """One request: its path, its offset, and whether it had a token."""

    path: str
    offset: int
    has_token: bool


@dataclass
class Hub:
    """A running stand-in.

    Attributes:
        endpoint: For HF_ENDPOINT.
        repositories: Folder by name.
        faults: May be changed at any time.
        seen: GETs in order.
        sent_bytes: Of large files.
    """

    endpoint: str = ""
    storage: str = ""
    repositories: dict[str, Path] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    seen: list[Seen] = field(default_factory=list)
    sent_bytes: int = 0

    def commit(self, name: str) -> str:
        """Return the commit of a repository: it follows from what is in it."""
        folder = self.repositories[name]
        parts = [f"{path}\0{etag_of(folder / path)}" for path in files_of(folder)]
        return hashlib.sha1("\n".join(parts).encode(), usedforsecurity=False).hexdigest()

    def files_got(self) -> list[str]:
        """Return the files that were asked for, each once, in order."""
        found = (re.search(r"/resolve/[0-9a-f]+/(.+)", seen.path) for seen in self.seen)
        return list(dict.fromkeys(match[1] for match in found if match))


def files_of(folder: Path) -> list[str]:
    """Return the files of a repository, as the hub names them."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def etag_of(path: Path) -> str:
    """Return SHA-256 for large files, what git says for others."""
    return _etag(path.read_bytes(), path.suffix in _LARGE)


@functools.cache
def _etag(content: bytes, is_large: bool) -> str:
    if is_large:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


@contextmanager
def serving(**repositories: Path) -> Iterator[Hub]:
    """Run a stand-in; a repository ``org/name`` is given as ``org__name``."""
    hub = Hub(repositories={name.replace("__", "/"): folder for name, folder in repositories.items()})
    handlers = [type(name, (handler,), {"hub": hub}) for name, handler in (("Api", _Api), ("Storage", _Storage))]
    servers = [_Server(("127.0.0.1", 0), handler) for handler in handlers]
    hub.endpoint, hub.storage = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that went away."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the name of the base class)
        """Say nothing."""

    def _answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def _note(self) -> bool:
        """Note the request; return whether it has the token."""
        offset = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        token = self.headers.get("Authorization")
        if self.command == "GET":
            self.hub.seen.append(Seen(self.path, offset, token is not None))
        return token == f"Bearer {TOKEN}"


class _Api(_Handler):
    """The hub itself."""

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer lists and small files; send on to the storage for large ones."""
        has_token, path = self._note(), unquote(urlsplit(self.path).path)
        if self.hub.faults.is_down:
            self._answer(503)
        elif "Authorization" in self.headers and not has_token:
            self._answer(401, X_Error_Message="Invalid credentials in Authorization header")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._list(match[1], match[2] or "revision", match[3] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[2], match[3], has_token)
        else:
            self._answer(404)

    def _is_known(self, name: str, revision: str) -> bool:
        if name not in self.hub.repositories:
            self._answer(401, X_Error_Message="Invalid username or password.")
            return False
        if revision not in ("main", self.hub.commit(name), *self.hub.tags):
            self._answer(404, X_Error_Code="RevisionNotFound")
            return False
        return True

    def _list(self, name: str, kind: str, revision: str) -> None:
        if not self._is_known(name, revision):
            return
        folder = self.hub.repositories[name]
        if kind == "tree":
            content: Any = [_tree_entry(folder, path) for path in files_of(folder)]
        else:
            siblings = [_sibling(folder, path) for path in files_of(folder)]
            content = {"id": name, "sha": self.hub.commit(name), "siblings": siblings}
        self._answer(200, json.dumps(content).encode(), Content_Type="application/json")

    def _file(self, name: str, revision: str, path: str, has_token: bool) -> None:
        if not self._is_known(name, revision):
            return
        file, commit = self.hub.repositories[name] / path, self.hub.commit(name)
        if self.hub.faults.is_gated and not has_token:
            self._answer(403, X_Error_Code="GatedRepo", X_Error_Message="Access to it is restricted.")
        elif not file.is_file():
            self._answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        elif file.suffix in _LARGE:
            etag, size = f'"{etag_of(file)}"', str(file.stat().st_size)
            location = f"{self.hub.storage}/{name}/resolve/{commit}/{path}"
            self._answer(302, Location=location, X_Repo_Commit=commit, X_Linked_Etag=etag, X_Linked_Size=size)
        else:
            self._answer(200, file.read_bytes(), ETag=f'"{etag_of(file)}"', X_Repo_Commit=commit)


class _Storage(_Handler):
    """Where large files lie."""

    def do_GET(self) -> None:
        """Answer with the bytes that are asked for, or what goes wrong instead."""
        self._note()
        faults = self.hub.faults
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if faults.has_ranges else None
        begin, end = (0, "") if asked is None else (int(asked[1]), asked[2])
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", unquote(self.path))
        assert match is not None
        content = (self.hub.repositories[match[1]] / match[2]).read_bytes()
        if faults.is_damaged:
            content = bytes([content[0] ^ 1]) + content[1:]
        content = content[begin : int(end) + 1 if end else None]
        self.send_response(200 if asked is None else 206)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self._send(content)

    def _send(self, content: bytes) -> None:
        faults, is_cut = self.hub.faults, self.hub.faults.num_cuts > 0
        if is_cut:
            faults.num_cuts -= 1
            content = content[: faults.cut_after_bytes]
        for begin in range(0, len(content), 1 << 16):
            self.wfile.write(content[begin : begin + (1 << 16)])
            self.hub.sent_bytes += len(content[begin : begin + (1 << 16)])
            time.sleep(faults.pause_s)
        self.close_connection = is_cut


def _sibling(folder: Path, path: str) -> dict[str, Any]:
    size, etag = (folder / path).stat().st_size, etag_of(folder / path)
    if not path.endswith(_LARGE):
        return {"rfilename": path, "size": size, "blobId": etag}
    pointer = {"sha256": etag, "size": size, "pointerSize": 134}
    sibling = {"rfilename": path, "blobId": "0" * 40, "lfs": pointer}
    # A mirror may give the size of a large file with its pointer alone.
    return sibling if path.startswith("model-00001") else sibling | {"size": size}


def _tree_entry(folder: Path, path: str) -> dict[str, Any]:
    sibling, size = _sibling(folder, path), (folder / path).stat().st_size
    entry = {"type": "file", "path": path, "size": size, "oid": sibling["blobId"]}
    if "lfs" in sibling:
        entry["lfs"] = {"oid": sibling["lfs"]["sha256"], "size": size, "pointerSize": 134}
    return entry
