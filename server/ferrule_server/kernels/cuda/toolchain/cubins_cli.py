"""The command line of compiled kernels: build, list, verify and prune."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, KernelSpec
from ferrule_server.kernels.cuda.specialise import KernelError
from ferrule_server.kernels.cuda.toolchain import catalog
from ferrule_server.kernels.cuda.toolchain.bundle import Bundle, BundleError, write_bundle
from ferrule_server.kernels.cuda.toolchain.compile import ARCHITECTURES, CompileError, Cubin, toolkit
from ferrule_server.kernels.cuda.toolchain.cubin_cache import CubinCache, default_folder
from ferrule_server.kernels.cuda.toolchain.cubins import load_all
from ferrule_server.kernels.cuda.toolchain.sources import source_key

__all__ = ["main"]

_DESCRIPTION = """\
Compiled kernels: in the cache of this machine, and in bundles for machines without the compiler.

A bundle is one file with all kernels for one architecture. Building it takes minutes unless the cache has them; no
GPU is needed. "build --help" and so on say what a command takes; docs/kernels.md, "Cubins and bundles", has
examples."""

_ALL = "all"
_DAY_S = 24 * 3600.0
_BAR = 30


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exits with 1 and one line where it cannot be done."""
    args = _parse(arguments)
    try:
        args.run(args)
    except (BundleError, CompileError, KernelError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ferrule_server.kernels.cuda.toolchain.cubins",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    build = commands.add_parser("build", help="compile what is missing, and perhaps put all of it into a bundle")
    build.add_argument("--architecture", choices=sorted(ARCHITECTURES), required=True)
    build.add_argument("--shape", nargs="+", choices=[*MODEL_SHAPES, _ALL], default=[_ALL], metavar="MODEL")
    build.add_argument("--variants", action="store_true", help="also those that are there to be measured")
    build.add_argument("--output", type=Path, help="of the bundle")
    build.add_argument("--workers", type=int, help="processes; one per core unless said otherwise")
    build.set_defaults(run=_build)
    listing = commands.add_parser("list", help="what the cache or a bundle holds")
    listing.add_argument("bundle", type=Path, nargs="?")
    listing.set_defaults(run=_list)
    verify = commands.add_parser("verify", help="read every cubin, and say which kernels of these sources are there")
    verify.add_argument("bundle", type=Path)
    verify.add_argument("--shape", nargs="+", choices=[*MODEL_SHAPES, _ALL], default=[_ALL], metavar="MODEL")
    verify.add_argument("--variants", action="store_true", help="also those that are there to be measured")
    verify.set_defaults(run=_verify)
    prune = commands.add_parser("prune", help="delete what has not been used for so long")
    prune.add_argument("--days", type=float, default=30.0)
    prune.set_defaults(run=_prune)
    for command in (build, listing, prune):
        command.add_argument("--cache", type=Path, default=default_folder(), help="folder (default: %(default)s)")
    return parser.parse_args(arguments)


def _build(args: argparse.Namespace) -> None:
    specs = _specs(args)
    made = load_all(
        specs, args.architecture, cache=CubinCache(args.cache), num_workers=args.workers, progress=_show_progress
    )
    num_bytes = sum(len(cubin.code) for cubin in made.values())
    print(f"{len(made)} kernels for {args.architecture}, {num_bytes / 1e6:.1f} MB", file=sys.stderr)
    if args.output:
        write_bundle(args.output, args.architecture, toolkit(), keyed(made, args.architecture))
        print(f"{args.output}: {args.output.stat().st_size / 1e6:.1f} MB", file=sys.stderr)


def keyed(made: dict[KernelSpec, Cubin], architecture: str) -> dict[str, tuple[str, Cubin]]:
    """Return cubins as a bundle wants them: by source key, with the name of their spec."""
    return {source_key(spec, architecture): (spec.name, cubin) for spec, cubin in made.items()}


def _specs(args: argparse.Namespace) -> list[KernelSpec]:
    names = MODEL_SHAPES if _ALL in args.shape else args.shape
    found: dict[KernelSpec, None] = {}
    for name in names:
        found.update(dict.fromkeys(catalog.kernels_of(MODEL_SHAPES[name])))
        if args.variants:
            found.update(dict.fromkeys(catalog.variants_of(MODEL_SHAPES[name])))
    return list(found)


def _show_progress(done: int, total: int, name: str) -> None:
    """Draw a bar on a terminal; elsewhere, say nothing until the end."""
    if not sys.stderr.isatty():
        return
    filled = _BAR * done // total
    end = "\n" if done == total else ""
    print(f"\r\033[K[{'#' * filled:{_BAR}}] {done}/{total} {name[:60]}", end=end, file=sys.stderr, flush=True)


def _list(args: argparse.Namespace) -> None:
    if args.bundle:
        bundle = Bundle.open(args.bundle)
        rows = [(key, record["spec"], bundle.architecture, record) for key, record in bundle.records.items()]
    else:
        entries = CubinCache(args.cache).entries().values()
        rows = [
            (entry["source_key"], entry["spec"], entry["cubin"]["architecture"], entry["cubin"]) for entry in entries
        ]
    for key, name, architecture, numbers in sorted(rows, key=lambda row: row[1:3]):
        print(f"{key[:12]}  {architecture:7}  {numbers['num_registers']:3} registers  {name}")


def _verify(args: argparse.Namespace) -> None:
    bundle = Bundle.open(args.bundle)
    bundle.verify()
    missing = [spec.name for spec in _specs(args) if source_key(spec, bundle.architecture) not in bundle.records]
    print(f"{args.bundle}: {len(bundle.records)} cubins for {bundle.architecture}, whole; made by {bundle.versions}")
    if missing:
        raise BundleError(f"{args.bundle} lacks {len(missing)} kernels of these sources: {', '.join(missing[:5])} ...")


def _prune(args: argparse.Namespace) -> None:
    deleted = CubinCache(args.cache).prune(args.days * _DAY_S)
    print(f"{args.cache}: {deleted} kernels deleted", file=sys.stderr)
