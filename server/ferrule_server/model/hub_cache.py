"""The part of the hub's cache on this disk that holds one model: blobs, snapshots that link to them, and refs.

The layout is huggingface_hub's own, documented there under "Understand caching", so that whatever else fetched a model
is found here, and the other way round::

    models--org--name/blobs/ETAG                    the bytes, under the name the hub gives them
    models--org--name/snapshots/COMMIT/config.json  a link to a blob
    models--org--name/refs/main                     the commit a branch or tag meant when it was last looked up
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Final

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_PART_SUFFIX: Final = ".ferrule.incomplete"


class HubCache:
    """One model in the cache.

    Invariant: a file in ``snapshots`` is whole; what is still being fetched lies in ``blobs`` under another name.

    Args:
        root: The cache, usually ``~/.cache/huggingface/hub``.
        name: Of the model, ``org/name``.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.folder = root / f"models--{name.replace('/', '--')}"

    def commit_of(self, revision: str) -> str | None:
        """Return the commit a revision meant when it was last looked up; a commit means itself, None: unknown."""
        if _COMMIT.fullmatch(revision):
            return revision
        try:
            commit = (self.folder / "refs" / revision).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return commit if _COMMIT.fullmatch(commit) else None

    def snapshot(self, commit: str) -> Path:
        """Return the folder of a commit, which need not exist."""
        return self.folder / "snapshots" / commit

    def blob(self, etag: str) -> Path:
        """Return where the bytes of a file lie once they are whole."""
        return self.folder / "blobs" / etag

    def part(self, etag: str) -> Path:
        """Return where the bytes of a file lie until they are whole."""
        return self.folder / "blobs" / f"{etag}{_PART_SUFFIX}"

    def is_complete(self, commit: str) -> bool:
        """Whether configuration and weights of a commit are there; they are linked last, so the rest is then too."""
        folder = self.snapshot(commit)
        if not (folder / "config.json").is_file():
            return False
        if (folder / SINGLE_FILE).is_file():
            return True
        shards = shards_of(folder)
        return bool(shards) and all((folder / name).is_file() for name in shards)

    def has_tokenizer(self, commit: str) -> bool:
        """Whether a commit's tokenizer is there; another tool may have fetched the weights alone."""
        return (self.snapshot(commit) / "tokenizer.json").is_file()

    def link(self, commit: str, path: str, etag: str) -> None:
        """Give a whole blob its name in a snapshot; where the disk knows no links, the blob moves there.

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
            if not file.exists():  # a link to a blob that somebody removed
                file.unlink()
                file.symlink_to(target)
        except OSError:
            shutil.move(blob, file)

    def point(self, revision: str, commit: str) -> None:
        """Remember what a revision means, for the next start without a network.

        Raises:
            OSError: The cache cannot be written.
        """
        if revision == commit or self.commit_of(revision) == commit:
            return
        ref = self.folder / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        beside = ref.with_name(f"{ref.name}.{os.getpid()}")
        beside.write_text(commit, encoding="utf-8")
        beside.replace(ref)

    def missing_bytes(self, sizes: dict[str, int]) -> int:
        """Return how many bytes are still to be fetched of blobs, given their sizes by etag."""
        return sum(
            max(0, size - _size_of(self.part(etag))) for etag, size in sizes.items() if not self.blob(etag).exists()
        )


def shards_of(folder: Path) -> list[str]:
    """Return the files that the index of a model folder names, in order; none where there is no index to be read."""
    try:
        weight_map = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
        return sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def free_bytes(folder: Path) -> int:
    """Return the room on the disk that a folder is on, or would be on."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
