"""A bundle: all cubins for one architecture in one file, to be run where they were not compiled.

A zip file with ``bundle.json`` (format, architecture, versions of the toolkit, and one record per kernel by its
``sources.source_key``) and one member per cubin, named by its SHA-256. A machine with
the same sources finds its kernels in it under any version of Python or numba, or without numba at all.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrule_server.kernels.cuda.toolchain.compile import Cubin

__all__ = ["Bundle", "BundleError", "check_target", "write_bundle"]

_FORMAT = 1
_INDEX = "bundle.json"
_NUMBERS = ("num_registers", "num_spilled_bytes", "num_stack_bytes")
_EPOCH = (1980, 1, 1, 0, 0, 0)


class BundleError(Exception):
    """A bundle cannot be read, or holds something else than it says; names the file."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """An open bundle.

    Attributes:
        path: Of the file.
        architecture: That all its kernels are for.
        versions: Of the toolkit that made them.
        records: By source key: ``spec``, ``name``, ``code`` (SHA-256), registers, spills and stack.
    """

    path: Path
    architecture: str
    versions: str
    records: Mapping[str, Mapping[str, Any]]

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Return the bundle in a file.

        Raises:
            BundleError: There is no such file, or it is no bundle of this format.
        """
        try:
            with zipfile.ZipFile(path) as file:
                index = json.loads(file.read(_INDEX))
            if index["format"] != _FORMAT:
                raise BundleError(f"{path}: bundles of format {index['format']} are not read here; build it anew")
            return cls(path, index["architecture"], index["versions"], index["kernels"])
        except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise BundleError(f"{path} is no bundle of kernels: {error}") from error

    def find(self, key: str) -> Cubin | None:
        """Return the cubin of a source key, without PTX; None where the bundle has none.

        Raises:
            BundleError: The file holds something else than was put in.
        """
        record = self.records.get(key)
        if record is None:
            return None
        code = self._content(record["code"])
        return Cubin(record["name"], self.architecture, code, "", *(int(record[name]) for name in _NUMBERS))

    def verify(self) -> None:
        """Read every cubin.

        Raises:
            BundleError: One is missing or altered.
        """
        for key in self.records:
            self.find(key)

    def check_architecture(self, wanted: Collection[str]) -> None:
        """Refuse to serve other GPUs than the bundle was built for.

        Raises:
            BundleError: Its architecture is not among those that are wanted.
        """
        if self.architecture not in wanted:
            raise BundleError(f"{self.path}: for {self.architecture}, wanted are kernels for {', '.join(wanted)}")

    def _content(self, digest: str) -> bytes:
        try:
            with zipfile.ZipFile(self.path) as file:
                code = file.read(digest)
        except (OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            raise BundleError(f"{self.path}: cubin {digest[:12]} cannot be read: {error}") from error
        if hashlib.sha256(code).hexdigest() != digest:
            raise BundleError(f"{self.path}: cubin {digest[:12]} holds something else")
        return code


def write_bundle(
    path: Path, architecture: str, versions: str, kernels: Mapping[str, tuple[str, Cubin]]
) -> Mapping[str, Mapping[str, Any]]:
    """Write a bundle, in place of what is at ``path``; the same kernels give the same bytes.

    Args:
        path: Of the file; its folder exists.
        architecture: Of all the kernels.
        versions: Of the toolkit.
        kernels: By source key: the spec's name and the cubin.

    Returns:
        The records that were written.
    """
    records = {
        key: {
            "spec": name,
            "name": cubin.name,
            "code": hashlib.sha256(cubin.code).hexdigest(),
            **{number: getattr(cubin, number) for number in _NUMBERS},
        }
        for key, (name, cubin) in sorted(kernels.items())
    }
    index = {"format": _FORMAT, "architecture": architecture, "versions": versions, "kernels": records}
    contents = {str(records[key]["code"]): cubin.code for key, (_, cubin) in kernels.items()}
    written = _beside(path)
    with zipfile.ZipFile(written, "w") as file:
        file.writestr(_member(_INDEX), json.dumps(index, indent=1))
        for digest, code in sorted(contents.items()):
            file.writestr(_member(digest), code)
    written.replace(path)
    return records


def check_target(path: Path) -> None:
    """Find out whether a file can be written, before the work whose result goes there.

    Raises:
        BundleError: Its folder is missing or cannot be written, or there is a folder in its place.
    """
    if path.is_dir():
        raise BundleError(f"{path} is a folder, not a file")
    try:
        _beside(path).touch()
        _beside(path).unlink()
    except OSError as error:
        raise BundleError(f"{path} cannot be written: {error}") from error


def _beside(path: Path) -> Path:
    """Return where a file is written before it is put in place whole."""
    return path.with_name(f".{path.name}.tmp")


def _member(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name, _EPOCH)
    member.compress_type = zipfile.ZIP_DEFLATED
    return member
