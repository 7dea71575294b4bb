"""One model in the hub's cache on this disk: blobs, snapshots that link to them, and refs.

The layout is that of huggingface_hub, documented there under "Understand caching", so that all tools find the models
that any of them fetched::

    models--org--name/blobs/ETAG                    the bytes, under the name that the hub gives them
    models--org--name/snapshots/COMMIT/config.json  a link to a blob
    models--org--name/refs/main                     the commit a branch or tag meant when it was last looked up

Each fetch writes to its own file beside the blobs, ETAG.HOST.FETCH.ferrule.incomplete. HOST stands for one boot of a
kernel, whose processes see each other's locks.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
from pathlib import Path
from typing import Final

from ferrule_server.errors import ModelError
from ferrule_server.model.checkpoint import SINGLE_FILE, read_index
from ferrule_server.model_files import is_file, read_text

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_MAX_REF_BYTES: Final = 4096
_PART_SUFFIX: Final = ".ferrule.incomplete"
_LOCK_SUFFIX: Final = ".ferrule.lock"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class HubCache:
    """One model in the cache.

    Invariant: a file in ``snapshots`` is complete; an incomplete one lies in ``blobs`` under another name.

    Args:
        root: The cache, usually ``~/.cache/huggingface/hub``.
        name: The model, ``org/name``.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.folder = root / f"models--{name.replace('/', '--')}"

    def commit_of(self, revision: str) -> str | None:
        """Return the commit of a revision when it was last looked up, or of a commit itself; None if it is unknown."""
        if _COMMIT.fullmatch(revision):
            return revision
        try:
            commit = read_text(self.folder, f"refs/{revision}", _MAX_REF_BYTES).strip()
        except ModelError:
            return None
        return commit if _COMMIT.fullmatch(commit) else None

    def snapshot(self, commit: str) -> Path:
        """Return the folder of a commit, which need not exist."""
        return self.folder / "snapshots" / commit

    def blob(self, etag: str) -> Path:
        """Return the path of a file's bytes once they are complete."""
        return self.folder / "blobs" / etag

    def parts(self, etag: str) -> list[Path]:
        """Return the partial files of all fetches of a file."""
        return sorted((self.folder / "blobs").glob(f"{etag}*{_PART_SUFFIX}"))

    def new_part(self, etag: str) -> Path:
        """Return a new path for the partial file of one fetch."""
        return self.folder / "blobs" / f"{etag}.{_host()}.{secrets.token_hex(6)}{_PART_SUFFIX}"

    def is_of_this_host(self, part: Path) -> bool:
        """Return whether a partial file was made on this host since its last boot."""
        return part.name.split(".")[1] == _host()

    def lock(self, etag: str) -> Path:
        """Return the lock file of a fetch, beside the locks of huggingface_hub."""
        return self.folder.parent / ".locks" / self.folder.name / f"{etag}{_LOCK_SUFFIX}"

    def complete(self, revision: str) -> Path | None:
        """Return the folder of the stored commit of a revision; None if it lacks its configuration or weights.

        Weights are linked last, so the folder of a fetch that ended then has all files.
        """
        commit = self.commit_of(revision)
        if commit is None:
            return None
        folder = self.snapshot(commit)
        return folder if is_file(folder / "config.json") and has_weights(folder) else None

    def newest(self) -> Path | None:
        """Return the folder of a commit with weights: that of the main branch, else any; None if there is none."""
        commits = sorted(path.name for path in (self.folder / "snapshots").glob("*"))
        return next((folder for name in ("main", *commits) if (folder := self.complete(name)) is not None), None)

    def disk_bytes(self) -> int:
        """Return the size of all files of the model on the disk, those of all its commits together."""
        return sum(size_of(path) for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())

    def link(self, commit: str, path: str, etag: str) -> None:
        """Give a complete blob its name in a snapshot; the blob is moved there if the disk has no links.

        Raises:
            OSError: The cache cannot be written.
        """
        file = self.snapshot(commit) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        blob = self.blob(etag)
        target = os.path.relpath(blob, file.parent)
        try:
            file.symlink_to(target)
        except FileExistsError:
            if not file.exists():  # a link to a blob that was removed
                file.unlink()
                file.symlink_to(target)
        except OSError:
            if file.exists():  # another server moved the same bytes there
                blob.unlink(missing_ok=True)
            else:
                shutil.move(blob, file)

    def point(self, revision: str, commit: str) -> None:
        """Store the commit of a revision, for the next start without a network.

        Raises:
            OSError: The cache cannot be written.
        """
        if revision == commit or self.commit_of(revision) == commit:
            return
        ref = self.folder / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        beside = ref.with_name(f"{ref.name}.{secrets.token_hex(6)}")
        beside.write_text(commit, encoding="utf-8")
        beside.replace(ref)

    def missing_bytes(self, sizes: dict[str, int]) -> int:
        """Return how many bytes of blobs are still to be fetched, given their sizes by etag."""
        missing = {etag: size for etag, size in sizes.items() if not self.blob(etag).exists()}
        here = {etag: max(map(size_of, self.parts(etag)), default=0) for etag in missing}
        return sum(max(0, size - here[etag]) for etag, size in missing.items())


def weights_of(folder: Path) -> list[str]:
    """Return the names of the files with the weights of a folder: the single file, or those of a readable index."""
    return [SINGLE_FILE] if is_file(folder / SINGLE_FILE) else sorted(set(_weight_map(folder).values()))


def tensors_of(folder: Path) -> frozenset[str]:
    """Return the names of the tensors in the index of a model folder; none if it has no readable index."""
    return frozenset(_weight_map(folder))


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        return read_index(folder)
    except ModelError:
        return {}


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has its tokenizer; another tool may have fetched the weights alone."""
    return is_file(folder / "tokenizer.json")


def has_weights(folder: Path) -> bool:
    """Return whether a folder has all its files with weights."""
    weights = weights_of(folder)
    return bool(weights) and all(is_file(folder / name) for name in weights)


def free_bytes(folder: Path) -> int:
    """Return the free space on the disk of a folder, which need not exist."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _host() -> str:
    """Return a name for this boot of this host."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip().replace("-", "")[:16]
    except OSError:
        return re.sub(r"[^A-Za-z0-9-]", "-", platform.node()) or "host"


def size_of(path: Path) -> int:
    """Return the size of a file; 0 if it is not accessible."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
