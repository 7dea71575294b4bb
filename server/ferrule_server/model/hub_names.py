"""Names of models on the hub: ``org/name``, ``org/name:TAG`` and ``org/name/path/FILE.gguf``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from ferrule_server.errors import ModelError
from ferrule_server.model.gguf.container import part_names
from ferrule_server.model_files import listed

_GGUF: Final = r"\w(?:\.?[\w +/-])*\.gguf"
_NAME: Final = re.compile(
    rf"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<tag>\w[\w.-]*)|/(?P<file>{_GGUF}))?", re.ASCII
)
_MAX_NAME_LENGTH: Final = 96  # the hub's own limit


def is_hub_name(text: str) -> bool:
    """Return whether a text looks like ``org/name``, or a GGUF file of it; a folder of that name may exist."""
    match = _NAME.fullmatch(text)
    return match is not None and len(match[1]) <= _MAX_NAME_LENGTH and ".." not in text and "--" not in match[1]


def repository_of(name: str) -> str:
    """Return the repository of a name; what is no such name as it is."""
    match = _NAME.fullmatch(name)
    return name if match is None else match["repository"]


def named_parts(name: str, paths: Iterable[str]) -> tuple[str, ...]:
    """Return the GGUF file that a name means, of the files of its repository, with its other parts.

    Raises:
        ModelError: There is none, there are several, or a part is missing.
    """
    match, files = _NAME.fullmatch(name), {path for path in paths if re.fullmatch(_GGUF, path, re.ASCII)}
    if match is None or match["tag"] is match["file"]:
        return ()
    tagged = rf"(?!.*mmproj)(.*[-_./])?{re.escape(match['tag'] or '')}(-\d+-of-\d+)?\.gguf"
    wanted = re.compile(re.escape(match["file"]) if match["file"] else tagged, re.IGNORECASE)
    heads = {part_names(path)[0] for path in files if wanted.fullmatch(path)}
    parts = part_names(min(heads, default=""))
    if len(heads) != 1 or not files.issuperset(parts):
        what = "several such files" if len(heads) > 1 else "only a part of that" if heads else "no such file"
        raise ModelError(
            f"--model {name}: the repository has {what}; its GGUF files: {listed(sorted(files)) or 'none'}"
        )
    return tuple(parts)
