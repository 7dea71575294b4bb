"""Read the files of a model folder, or those that a GGUF file stands for: a path to such a file plays their folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ferrule_server import model_files
from ferrule_server.model.gguf.files import made_file
from ferrule_server.model_files import is_file, parse_object


def read_text(model: Path, name: str, max_bytes: int) -> str:
    """Return the text in a file of a model; see :func:`ferrule_server.model_files.read_text`."""
    return made_file(model, name).decode() if is_file(model) else model_files.read_text(model, name, max_bytes)


def read_object(model: Path, name: str, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file of a model; see :func:`ferrule_server.model_files.read_object`."""
    if is_file(model):
        return parse_object(made_file(model, name), model)
    return model_files.read_object(model, name, max_bytes)
