"""Builds the kernels that servers load: one bundle for each architecture, and a wheel of them.

    make kernels                     bundles for all architectures, where a server of this checkout looks for them
    python -m tools.kernels.build --architecture sm_90a --shape ~/models/Qwen3-14B --output kernels/
    python -m tools.kernels.build --wheel dist/

Needs the compiler (pip install '.[kernels]'), but no GPU and no driver. Two cores take about three minutes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ferrule_server import __version__
from ferrule_server.errors import ModelError
from ferrule_server.executor.cuda.bundle import BUNDLES, FORMAT, INDEX, PACKAGE, kernel_key, source_hash
from ferrule_server.kernels.cuda import catalog, litmus
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, Cubin, KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import KernelError
from tools.kernels.compile import (
    ARCHITECTURES,
    CompileError,
    compile_ptx,
    cubins_of,
    toolkit,
    versions,
)

_EPOCH = (1980, 1, 1, 0, 0, 0)
_INIT = '''"""Compiled GPU kernels for servers of ferrule {ferrule}."""

__version__ = "{version}"
'''


def main(arguments: Sequence[str] | None = None) -> None:
    """Build what is asked for; exits with 1 and one line if that is not possible."""
    args = _parse(arguments)
    try:
        specs = [spec for name in args.shape for spec in catalog.kernels_of(_shape(name))]
        paths = {name: args.output / f"{name}.bundle" for name in args.architecture}
        args.output.mkdir(parents=True, exist_ok=True)
        build_bundles(catalog.merged([*specs, *litmus.SPECS]), paths, args.workers)
        if args.wheel:
            print(write_wheel(args.wheel, list(paths.values())))
    except (CompileError, KernelError, ModelError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.kernels.build", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=BUNDLES, metavar="FOLDER", help="(default: %(default)s)")
    parser.add_argument(
        "--architecture",
        nargs="+",
        choices=list(ARCHITECTURES),
        default=list(ARCHITECTURES),
        metavar="NAME",
        help=f"by compute capability: {', '.join(ARCHITECTURES)} (default: all)",
    )
    parser.add_argument(
        "--shape",
        nargs="+",
        default=list(MODEL_SHAPES),
        metavar="MODEL",
        help=f"{', '.join(MODEL_SHAPES)} (default: all), or folders with the config.json of models",
    )
    parser.add_argument("--wheel", type=Path, metavar="FOLDER", help="also write the bundles into a wheel there")
    parser.add_argument("--workers", type=_workers, metavar="N", help="processes that compile (default: one per core)")
    return parser.parse_args(arguments)


def _workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of processes, at least 1")
    return int(text)


def _shape(name: str) -> ModelShape:
    if name in MODEL_SHAPES:
        return MODEL_SHAPES[name]
    from ferrule_server.executor.cuda.kernel_choice import (
        shape_of,  # not in every process that compiles: torch is large
    )
    from ferrule_server.model.config_reader import read_config

    return shape_of(read_config(Path(name).expanduser()))


def build_bundles(specs: Iterable[KernelSpec], paths: Mapping[str, Path], num_workers: int | None = None) -> None:
    """Compile kernels and write a bundle for each architecture, without those that do not fit it; says how far it is.

    Args:
        specs: Kernels.
        paths: Where the bundle of each architecture goes; the folders exist.
        num_workers: Processes that compile; None: one per core.

    Raises:
        KernelError: A kernel's source leaves the language.
        CompileError: The compiler is missing or refuses a kernel.
    """
    specs, console = list(specs), Console(stderr=True)
    console.print(f"compiling {len(specs)} kernels for {', '.join(paths)}", soft_wrap=True)
    with Progress(console=console) as progress:
        bar = progress.add_task("numba", total=len(specs))
        ptx = compile_ptx(specs, num_workers, lambda: progress.advance(bar))
        bar = progress.add_task("ptxas", total=len(paths))
        for architecture, path in paths.items():
            made = cubins_of(ptx, architecture)
            for compiled, _ in made:
                for message in compiled.unfit():
                    console.print(f"{architecture} is without a kernel: {message}", soft_wrap=True)
            write_bundle(path, architecture, {it.spec: cubin for it, cubin in made if not list(it.unfit())})
            progress.advance(bar)
    for path in paths.values():
        console.print(f"{path}: {len(specs)} kernels, {path.stat().st_size / 1e6:.1f} MB", soft_wrap=True)


def write_bundle(
    path: Path,
    architecture: str,
    cubins: Mapping[KernelSpec, Cubin],
    cuda: tuple[int, int] | None = None,
    sources: str | None = None,
) -> None:
    """Write a bundle in place of what is at ``path``; the same kernels give the same bytes.

    Args:
        path: The file.
        architecture: Of all cubins.
        cubins: What it holds.
        cuda: Version of the toolkit; None: the one that is installed.
        sources: Hash of the kernels' sources; None: that of this checkout.
    """
    contents: dict[str, bytes] = {}
    kernels = {kernel_key(spec): list(filter(None, (it.code, it.late_code))) for spec, it in cubins.items()}
    index = {
        "format": FORMAT,
        "architecture": architecture,
        "toolkit": cuda or toolkit(),
        "versions": versions() if cuda is None else "",
        "sources": sources or source_hash(),
        "kernels": {key: [_digest(contents, code) for code in codes] for key, codes in kernels.items()},
    }
    _write_zip(path, {INDEX: json.dumps(index, indent=1).encode(), **dict(sorted(contents.items()))})


def _digest(contents: dict[str, bytes], code: bytes) -> str:
    """Return the name of a member of a bundle, and add it to the contents."""
    name = hashlib.sha256(code).hexdigest()
    contents[name] = code
    return name


def write_wheel(folder: Path, bundles: Iterable[Path]) -> Path:
    """Write the wheel of the package that brings bundles to servers, and return its path.

    Its version is that of ferrule, then the hash of the kernels' sources.

    Args:
        folder: Made if it is missing.
        bundles: Files of this checkout's sources.
    """
    version = f"{__version__}+k{source_hash()}"
    info = f"{PACKAGE}-{version}.dist-info"
    files = {
        f"{PACKAGE}/__init__.py": _INIT.format(ferrule=__version__, version=version).encode(),
        **{f"{PACKAGE}/{path.name}": path.read_bytes() for path in bundles},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: ferrule-kernels\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: ferrule\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{name},sha256={_base64_hash(content)},{len(content)}\n" for name, content in files.items()]
    files[f"{info}/RECORD"] = "".join([*record, f"{info}/RECORD,,\n"]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{PACKAGE}-{version}-py3-none-any.whl"
    _write_zip(path, files)
    return path


def _base64_hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def _write_zip(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a zip file whole, then put it in place."""
    written = path.with_name(f".{path.name}.tmp")
    with zipfile.ZipFile(written, "w") as file:
        for name, content in files.items():
            member = zipfile.ZipInfo(name, _EPOCH)
            member.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(member, content)
    written.replace(path)


if __name__ == "__main__":
    main()
