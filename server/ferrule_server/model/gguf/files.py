"""The files of a model folder that one GGUF file stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from ferrule_server.errors import ModelError
from ferrule_server.model.gguf.container import Gguf, read_gguf
from ferrule_server.model.gguf.network import settings_of
from ferrule_server.model.gguf.vocabulary import stop_ids, tokenizer_config, tokenizer_json
from ferrule_server.model_files import FileMissing, name_of

_Source = TypeVar("_Source")


def opened(path: Path) -> Gguf:
    """Return what a GGUF file holds, without the lists of its vocabulary, which are large.

    Raises:
        ModelError: The file, or another part of it, is missing, cannot be read, or does not follow the format.
    """
    return _opened(path, _stamp(path))[0]


def made_file(path: Path, name: str) -> bytes:
    """Return the content of a file that a model folder would have.

    Raises:
        FileMissing: There would be no such file.
        ModelError: The GGUF file cannot be read, or what it says cannot be said in such a file.
    """
    found: dict[str, Any] | ModelError | None
    if name == "tokenizer.json":
        found = tokenizer_json(read_gguf(path).metadata)
    else:
        found = _opened(path, _stamp(path))[1].get(name)
    if found is None:
        raise FileMissing(f"{name_of(path)} holds no {name_of(name)}")
    if isinstance(found, ModelError):
        raise found
    return json.dumps(found).encode()


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes if a file is written again."""
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{name_of(path)} cannot be read: {error.strerror}") from error
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=1)
def _opened(path: Path, _stamp: tuple[int, int, int]) -> tuple[Gguf, dict[str, dict[str, Any] | ModelError]]:
    """Return a file without its vocabulary, and the small files made from it by name, or why one cannot be made."""
    gguf = read_gguf(path)
    kept = {key: value for key, value in gguf.metadata.items() if not (key.startswith("tok") and type(value) is list)}
    files = {
        "config.json": _made(settings_of, gguf),
        "generation_config.json": _made(lambda metadata: {"eos_token_id": stop_ids(metadata)}, gguf.metadata),
        "tokenizer_config.json": _made(tokenizer_config, gguf.metadata),
    }
    return replace(gguf, metadata=kept), files


def _made(make: Callable[[_Source], dict[str, Any]], source: _Source) -> dict[str, Any] | ModelError:
    try:
        return make(source)
    except ModelError as error:
        return error
