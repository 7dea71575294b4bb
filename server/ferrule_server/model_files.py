"""Read the files of a model folder, which strangers write, within bounds on size, time and memory.

Every file of a folder is read through this module. It must be in that folder after all links are resolved, or among
the blobs of the same repository in the cache of the hub: chat templates and tokenizers are shown to clients, and a link
could show them any file of this machine. Only regular files are opened, because a pipe or a device may block, or may
never end. The number of bytes is limited. JSON that Python cannot hold (nesting, digits) is refused.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from io import FileIO
from pathlib import Path
from reprlib import Repr
from typing import Any, Final

from ferrule_server.errors import ModelError

MAX_CONFIG_BYTES: Final = 4 << 20
"""Largest ``config.json`` and ``generation_config.json``; the usual ones have a few KiB."""
MAX_TOKENIZER_CONFIG_BYTES: Final = 16 << 20
"""Largest ``tokenizer_config.json``; one that lists every added token has about 1 MiB."""
MAX_TOKENIZER_BYTES: Final = 64 << 20
"""Largest ``tokenizer.json``; vocabularies of 256 000 tokens take about 35 MiB."""
MAX_TEMPLATE_BYTES: Final = 4 << 20
"""Largest chat template."""
MAX_HEADER_BYTES: Final = 16 << 20
"""Largest safetensors header or index: 100 000 tensors."""

_MAX_SHOWN: Final = 80
_MAX_NAME: Final = 200
_MAX_LISTED: Final = 50
_ABSENT: Final = (errno.ENOENT, errno.ENOTDIR)
_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
_FOLDER_FLAGS: Final = getattr(os, "O_PATH", 0) | os.O_DIRECTORY | _FLAGS
_SNAPSHOT: Final = re.compile(r"(.*/models--[^/]+)/snapshots/[^/]+(/.*)?", re.DOTALL)


class FileMissing(ModelError):
    """There is no such file."""


class _Unusable(ValueError):
    """The JSON is well-formed but refused; the message says why."""


def is_folder(path: Path) -> bool:
    """Return whether a path names a folder; False if the system does not accept it as a path."""
    return os.path.isdir(path)  # noqa: PTH112  (Path.is_dir raises for some paths)


def is_file(path: Path) -> bool:
    """Return whether a path names a regular file; False if the system does not accept it as a path."""
    return os.path.isfile(path)  # noqa: PTH113  (as above)


def open_file(folder: Path, name: str) -> FileIO:
    """Open a regular file of a model folder for reading, without a buffer.

    Nothing else is opened: opening a pipe blocks until there is a writer, and opening some devices has effects. The
    kind is checked again after the file is open, in case the file was replaced in between.

    Args:
        folder: The model folder, which may itself be a link.
        name: The file, relative to the folder.

    Raises:
        FileMissing: There is no such file.
        ModelError: It leads out of the folder, is not a regular file, or cannot be opened.
    """
    path = folder / name
    try:
        place, real = _resolve(folder, path)
        _check_regular(path, real.lstat())
        file = FileIO(real, opener=lambda *_: _open_below(place, real))
    except (OSError, ValueError) as error:
        kind = FileMissing if isinstance(error, OSError) and error.errno in _ABSENT else ModelError
        raise kind(f"{name_of(path)} cannot be read: {_short(error)}") from error
    try:
        _check_regular(path, os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def read_up_to(file: FileIO, max_bytes: int) -> bytes:
    """Return the next bytes of an unbuffered file; fewer than ``max_bytes`` only at its end.

    Raises:
        OSError: They cannot be read.
    """
    pieces, num_bytes = [], 0
    while num_bytes < max_bytes and (piece := file.read(min(1 << 20, max_bytes - num_bytes))):
        pieces.append(piece)
        num_bytes += len(piece)
    return b"".join(pieces)


def read_bytes(folder: Path, name: str, max_bytes: int) -> bytes:
    """Return the content of a regular file of a model folder.

    Raises:
        FileMissing: There is no such file.
        ModelError: :func:`open_file` refuses it, it cannot be read, or it has more than ``max_bytes``.
    """
    path = folder / name
    with open_file(folder, name) as file:
        try:
            num_bytes = os.fstat(file.fileno()).st_size
            content = b"" if num_bytes > max_bytes else read_up_to(file, max_bytes + 1)
        except (OSError, MemoryError) as error:
            raise ModelError(f"{name_of(path)} cannot be read: {_short(error)}") from error
    if max(num_bytes, len(content)) > max_bytes:
        raise ModelError(f"{name_of(path)} cannot be read: it has more than {max_bytes} bytes, the limit")
    return content


def read_text(folder: Path, name: str, max_bytes: int) -> str:
    """Return the content of a regular file of a model folder that holds UTF-8.

    Raises:
        FileMissing: There is no such file.
        ModelError: It cannot be read, has more than ``max_bytes``, or is not UTF-8.
    """
    try:
        return read_bytes(folder, name, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{name_of(folder / name)} cannot be read: it is not UTF-8 ({error.reason})") from error


def read_object(folder: Path, name: str, max_bytes: int, *, has_unique_keys: bool = False) -> dict[str, Any]:
    """Return the JSON object that a file of a model folder holds.

    Args:
        folder: The model folder.
        name: The file, relative to the folder.
        max_bytes: The most bytes that are read.
        has_unique_keys: Refuse an object that has a key twice; Python would silently keep the last one.

    Raises:
        FileMissing: There is no such file.
        ModelError: It cannot be read, or it does not hold a JSON object.
    """
    return parse_object(read_bytes(folder, name, max_bytes), folder / name, has_unique_keys=has_unique_keys)


def parse_object(content: bytes, path: Path, *, has_unique_keys: bool = False) -> dict[str, Any]:
    """Return the JSON object in the bytes of a file.

    Raises:
        ModelError: They hold something else, or JSON that Python cannot hold.
    """
    hook = _unique_keys if has_unique_keys else None
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=hook)
    except RecursionError as error:
        raise ModelError(f"{name_of(path)} cannot be read: its JSON is nested too deeply") from error
    except (json.JSONDecodeError, UnicodeDecodeError, _Unusable, MemoryError) as error:
        raise ModelError(f"{name_of(path)} cannot be read: {_short(error)}") from error
    except ValueError as error:  # Python does not convert longer ones
        raise ModelError(f"{name_of(path)} cannot be read: a number in it has thousands of digits") from error
    if not isinstance(value, dict):
        raise ModelError(f"{name_of(path)} cannot be read: it does not hold a JSON object")
    return value


def shown(value: object) -> str:
    """Return a value from a file for a message: in one line of bounded length."""
    shortener = Repr()
    shortener.maxstring = shortener.maxother = shortener.maxlong = _MAX_SHOWN
    shortener.maxlevel = 2
    return " ".join(shortener.repr(value).splitlines())  # an array has several


def name_of(value: object) -> str:
    """Return a name from a file, or a path, for a message: unchanged unless it is long or not printable."""
    text = str(value)
    return text if len(text) <= _MAX_NAME and text.isprintable() else shown(text)


def listed(names: list[str]) -> str:
    """Return names for a message: all of them if they are few, else the first."""
    rest = len(names) - _MAX_LISTED
    text = ", ".join(map(name_of, names[:_MAX_LISTED]))
    return f"{text} and {rest} more" if rest > 0 else text


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{name_of(path)} cannot be read: it is not a regular file")


def _resolve(folder: Path, path: Path) -> tuple[Path, Path]:
    """Return the real path of a file, after the real path of the place that may hold it.

    Raises:
        ModelError: The file is in neither place that may.
        OSError: There is no such file.
    """
    place, real = Path(os.path.realpath(folder)), Path(os.path.realpath(path, strict=True))
    if not real.is_relative_to(place) and (snapshot := _SNAPSHOT.fullmatch(str(place))):
        place = Path(snapshot[1]) / "blobs"
    if not real.is_relative_to(place):
        raise ModelError(
            f"{name_of(path)} cannot be read: it leads to {name_of(real)}, outside the model folder; copy or hard-link"
            " the file into the folder, or name its own folder with --model"
        )
    return place, real


def _open_below(place: Path, real: Path) -> int:
    """Open a file without following a link, in case a part of its real path was replaced by one in the meantime."""
    descriptor = os.open(place, _FOLDER_FLAGS)
    *folders, name = real.relative_to(place).parts
    for part, flags in [*((folder, _FOLDER_FLAGS) for folder in folders), (name, _FLAGS)]:
        above = descriptor
        try:
            descriptor = os.open(part, flags, dir_fd=above)
        finally:
            os.close(above)
    return descriptor


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise _Unusable(f"duplicate entries {listed(sorted(key for key, count in counts.items() if count > 1))}")
    return found


def _short(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= _MAX_LISTED * _MAX_NAME else lines[0][:_MAX_NAME] + "..."
