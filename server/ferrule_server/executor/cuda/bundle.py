"""A bundle: all kernels for one architecture in one file. A server loads its kernels from one and compiles nothing.

``kernel_builder`` writes bundles. A bundle is a zip file of ``bundle.json``, whose fields are those of
:class:`Bundle`, and one member per cubin, which is named by its SHA-256. A kernel is there twice: *early* as it is
written, and *late*, without ``griddepcontrol.launch_dependents``: the kernel after it starts at its end. Before sm_90
both are the same.

This module imports no torch: the settings are checked on machines without a GPU too.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from ferrule_server.errors import ConfigError
from ferrule_server.kernels import cuda
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec

FORMAT = 2
INDEX = "bundle.json"
PACKAGE = "ferrule_kernels"
"""The package that brings bundles as its data, if it is installed."""

_KERNELS = Path(cuda.__path__[0])
BUNDLES = _KERNELS / "bundles"
"""The folder that ``make kernels`` fills in a checkout."""

_FIRST_DRIVERS = {12: 525, 13: 580}
"""By major version of CUDA: the first driver that loads its machine code, whatever the minor version. Source: NVIDIA,
"CUDA Compatibility", "Minor Version Compatibility", table 1."""
_UNREADABLE = (
    OSError,
    EOFError,
    AttributeError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What reading a damaged zip file may raise."""
ADVICE = "install the ferrule-kernels of this version, or run `make kernels` in a checkout of it"


class BundleError(Exception):
    """No bundle serves: there is none, or it is damaged, of other sources, or for another GPU or driver."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """An open bundle.

    Attributes:
        path: The file.
        architecture: The architecture of all kernels, such as ``sm_90a``.
        toolkit: Version of the CUDA toolkit that assembled them: decides which drivers load them.
        versions: Versions of everything that made them, for people.
        sources: The :func:`source_hash` of the kernels.
        kernels: By :func:`kernel_key`: SHA-256 of the cubin, and of the late one if it is another.
    """

    path: Path
    architecture: str
    toolkit: tuple[int, int]
    versions: str
    sources: str
    kernels: Mapping[str, list[str]]

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Return the bundle in a file.

        Raises:
            BundleError: There is no such file, or it is not a bundle of this format.
        """
        try:
            with zipfile.ZipFile(path) as file:
                index = json.loads(file.read(INDEX))
            if index["format"] != FORMAT:
                raise BundleError(f"{path} is a bundle of format {index['format']}, not {FORMAT}")
            major, minor = index["toolkit"]
            kernels = {key: list(digests) for key, digests in index["kernels"].items()}
            return cls(path, index["architecture"], (major, minor), index["versions"], index["sources"], kernels)
        except _UNREADABLE as error:
            raise BundleError(f"{path} is not a bundle of kernels: {error}") from error

    def check(self, capability: tuple[int, int], cuda_version: tuple[int, int]) -> None:
        """Refuse a bundle that does not serve these sources, a GPU and its driver.

        Args:
            capability: Compute capability of the GPU.
            cuda_version: The newest CUDA that the driver knows.

        Raises:
            BundleError: The message says what does not fit, and what to do.
        """
        if self.architecture not in architectures_for(capability):
            raise BundleError(f"{self.path} is for {self.architecture}, the GPU has {_named(capability)}")
        if self.sources != source_hash():
            raise BundleError(f"{self.path} is of other sources ({self.sources}, not {source_hash()})")
        major = self.toolkit[0]
        if cuda_version[0] < major:
            newer = f"driver {_FIRST_DRIVERS[major]}" if major in _FIRST_DRIVERS else f"a driver for CUDA {major}.0"
            raise BundleError(
                f"{self.path} is made with CUDA {_dotted(self.toolkit)}, and the NVIDIA driver knows CUDA up to "
                f"{_dotted(cuda_version)}; install {newer} or newer"
            )

    def read(self, specs: Iterable[KernelSpec]) -> dict[KernelSpec, Cubin]:
        """Return the cubins of those kernels that the bundle has.

        Raises:
            BundleError: The file is damaged.
        """
        keys = {spec: key for spec in specs if (key := kernel_key(spec)) in self.kernels}
        try:
            with zipfile.ZipFile(self.path) as file:
                codes = {key: [_content(file, digest) for digest in self.kernels[key]] for key in keys.values()}
        except _UNREADABLE as error:
            raise BundleError(f"{self.path} is damaged: {error}") from error
        return {spec: Cubin(spec.kernel.__name__, *codes[key]) for spec, key in keys.items()}


def architectures_for(capability: tuple[int, int]) -> list[str]:
    """Return whose cubins a GPU runs, the best first: its own, then lower minor versions without a suffix."""
    major, minor = capability
    return [f"sm_{major}{minor}a", *(f"sm_{major}{lower}" for lower in range(minor, -1, -1))]


def find_bundle(named: Path | None, capability: tuple[int, int], cuda_version: tuple[int, int]) -> Bundle:
    """Return the bundle for a GPU: the one that is named, else from the installed package, else from the checkout.

    Args:
        named: A bundle, or a folder of bundles; if there is one, nothing else is looked at.
        capability: Compute capability of the GPU.
        cuda_version: The newest CUDA that its driver knows.

    Raises:
        BundleError: None serves; the message says why, place by place, and what to do.
    """
    reasons = []
    for place in [named] if named is not None else _places():
        try:
            bundle = Bundle.open(_file_in(place, capability))
            bundle.check(capability, cuda_version)
        except BundleError as error:
            reasons.append(str(error))
        else:
            return bundle
    raise BundleError(f"{'; '.join(reasons) or 'no compiled kernels are installed'}; {ADVICE}")


def check_bundle_file(path: Path) -> None:
    """Refuse a setting that names neither a bundle nor a folder, on a machine without a GPU too.

    Raises:
        ConfigError: It names neither.
    """
    if not path.is_dir():
        try:
            Bundle.open(path)
        except BundleError as error:
            raise ConfigError(f"--kernel-bundle: {error}") from error


def kernel_key(spec: KernelSpec) -> str:
    """Return what names a kernel in a bundle: all that shapes its machine code besides the sources.

    A kernel outside of ``kernels/cuda``, as tests and measurements have, is named by the hash of its file too.
    """
    path = Path(spec.kernel.__code__.co_filename)
    origin = "" if path.parent == _KERNELS else f" {_hash(path)}"
    return f"{spec.name} {spec.num_threads}x{spec.ctas_per_sm}{origin}"


@cache
def source_hash() -> str:
    """Return the hash of the files of ``kernels/cuda``, by which a server knows the bundles made for it."""
    listing = "".join(f"{path.name} {_hash(path)}\n" for path in sorted(_KERNELS.glob("*.py")))
    return hashlib.sha256(listing.encode()).hexdigest()[:12]


@cache
def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _places() -> list[Path]:
    """Return the folders that there are: of the installed package, and of the checkout."""
    try:
        package = [Path(str(resources.files(PACKAGE)))]
    except ModuleNotFoundError:
        package = []
    return [*package, *([BUNDLES] if BUNDLES.is_dir() else [])]


def _file_in(place: Path, capability: tuple[int, int]) -> Path:
    """Return the bundle of a folder that serves a GPU best; a file stands for itself."""
    if not place.is_dir():
        return place
    for path in (place / f"{architecture}.bundle" for architecture in architectures_for(capability)):
        if path.exists():
            return path
    found = ", ".join(sorted(path.stem for path in place.glob("*.bundle"))) or "nothing"
    raise BundleError(f"no kernels for {_named(capability)} in {place}, which has {found}")


def _content(file: zipfile.ZipFile, digest: str) -> bytes:
    code = file.read(digest)
    if hashlib.sha256(code).hexdigest() != digest:
        raise ValueError(f"cubin {digest[:12]} holds something else")
    return code


def _named(capability: tuple[int, int]) -> str:
    return f"compute capability {_dotted(capability)}"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
