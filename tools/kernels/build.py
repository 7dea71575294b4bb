"""Builds the kernels that servers load: one bundle for each architecture, and a wheel of them.

    make kernels                     bundles for all architectures, where a server of this checkout looks for them
    python -m tools.kernels.build --architecture sm_90a --shape ~/models/Qwen3-14B --output kernels/
    python -m tools.kernels.build --wheel dist/

Needs the compiler (pip install 'ferrule-server[cuda]'), but no GPU and no driver. Two cores take about three minutes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ferrule_server import __version__
from ferrule_server.errors import ModelError
from ferrule_server.executor.cuda.bundle import BUNDLES, PACKAGE, source_hash
from ferrule_server.kernel_builder.bundles import build_bundles, write_zip
from ferrule_server.kernel_builder.compile import ARCHITECTURES, CompileError
from ferrule_server.kernels.cuda import catalog, litmus
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import KernelError

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
        build_with_progress(catalog.merged([*specs, *litmus.SPECS]), paths, args.workers)
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


def build_with_progress(specs: Iterable[KernelSpec], paths: Mapping[str, Path], num_workers: int | None = None) -> None:
    """Build bundles, and say how far it is and what they have."""
    specs, console = list(specs), Console(stderr=True)
    console.print(f"compiling {len(specs)} kernels for {', '.join(paths)}", soft_wrap=True)
    with Progress(console=console) as progress:
        bar = progress.add_task("kernels", total=None)
        build_bundles(
            specs,
            paths,
            num_workers,
            lambda done, total: progress.update(bar, completed=done, total=total),
            lambda text: console.print(text, soft_wrap=True),
        )
    for path in paths.values():
        console.print(f"{path}: {len(specs)} kernels, {path.stat().st_size / 1e6:.1f} MB", soft_wrap=True)


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
    write_zip(path, files)
    return path


def _base64_hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


if __name__ == "__main__":
    main()
