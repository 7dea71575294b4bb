"""The command line of compiled kernels: build, list, verify and prune.

python -m ferrule_server.kernels.cuda.toolchain.cubins build --architecture sm_90a --output kernels.bundle
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ferrule_server.kernels.cuda import litmus
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, KernelSpec
from ferrule_server.kernels.cuda.specialise import KernelError
from ferrule_server.kernels.cuda.toolchain import catalog
from ferrule_server.kernels.cuda.toolchain.build import load_all
from ferrule_server.kernels.cuda.toolchain.bundle import Bundle, BundleError, check_target, write_bundle
from ferrule_server.kernels.cuda.toolchain.compile import ARCHITECTURES, CompileError, Cubin, toolkit
from ferrule_server.kernels.cuda.toolchain.cubin_cache import CubinCache, default_folder
from ferrule_server.kernels.cuda.toolchain.progress import BUILD_TIME, progress_bar, size
from ferrule_server.kernels.cuda.toolchain.sources import source_key

__all__ = ["keyed", "main"]

_DESCRIPTION = f"""\
Compiled kernels: in the cache of this machine, and in bundles for machines without the compiler.

A bundle is one file with all kernels for one architecture. Building it takes {BUILD_TIME} for one
model, shared by the cores, unless the cache has them; no GPU is needed. "build --help" and so on say what a command
takes; docs/kernels.md, "Cubins and bundles", has examples."""

_BUILD_EPILOG = f"With an empty cache this takes {BUILD_TIME} for one model, shared by the cores."
_CARDS = "of the GPU: sm_90a for H100, H200 and GH200 (compute capability 9.0); sm_80 for A100, A10, L4, L40S, RTX 30"
_CARDS += " and 40 (8.x); there are no kernels for others"

_ALL = "all"
_DAY_S = 24 * 3600.0
_MOST_NAMES = 5
_MOST_THREADS = 1024


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
    build = commands.add_parser(
        "build",
        help="compile what is missing, and perhaps put all of it into a bundle",
        epilog=_BUILD_EPILOG,
    )
    build.add_argument("--architecture", choices=sorted(ARCHITECTURES), required=True, help=_CARDS)
    build.add_argument(
        "--shape",
        nargs="+",
        choices=[*MODEL_SHAPES, _ALL],
        default=[_ALL],
        metavar="MODEL",
        help=f"whose kernels: {', '.join(MODEL_SHAPES)} (default: {_ALL})",
    )
    build.add_argument("--output", type=Path, help="of the bundle")
    build.add_argument("--workers", type=_workers, help="processes; one per core unless said otherwise")
    build.set_defaults(run=_build)
    listing = commands.add_parser("list", help="what the cache or a bundle holds")
    listing.add_argument("bundle", type=Path, nargs="?")
    listing.set_defaults(run=_list)
    verify = commands.add_parser("verify", help="read every cubin, and say which kernels of these sources are there")
    verify.add_argument("bundle", type=Path)
    verify.add_argument(
        "--shape",
        nargs="+",
        choices=[*MODEL_SHAPES, _ALL],
        default=[],
        metavar="MODEL",
        help=f"also require all kernels of these models: {', '.join(MODEL_SHAPES)} or {_ALL}",
    )
    verify.set_defaults(run=_verify)
    prune = commands.add_parser("prune", help="delete what has not been used for so long")
    prune.add_argument("--days", type=_days, default=30.0)
    prune.set_defaults(run=_prune)
    for command in (build, listing, prune):
        command.add_argument("--cache", type=Path, default=default_folder(), help="folder (default: %(default)s)")
    return parser.parse_args(arguments)


def _workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of processes, at least 1")
    return int(text)


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1
    if not days >= 0:  # neither is NaN
        raise argparse.ArgumentTypeError(f"{text!r} must be a number and not negative")
    return days


def _build(args: argparse.Namespace) -> None:
    specs, cache = _specs(args), CubinCache(args.cache)
    if args.output:
        check_target(args.output)
    cache.check()
    print(
        f"{len(specs)} kernels for {args.architecture}; compiling what {cache.folder} lacks",
        file=sys.stderr,
        flush=True,
    )
    with progress_bar() as show:
        made = load_all(specs, args.architecture, cache=cache, num_workers=args.workers, progress=show)
    num_bytes = sum(len(cubin.code) for cubin in made.values())
    print(f"{len(made)} kernels ready, {size(num_bytes)}", file=sys.stderr)
    if args.output:
        write_bundle(args.output, args.architecture, toolkit(), keyed(made, args.architecture))
        print(f"{args.output}: {size(args.output.stat().st_size)}", file=sys.stderr)


def keyed(made: dict[KernelSpec, Cubin], architecture: str) -> dict[str, tuple[str, Cubin]]:
    """Return cubins as a bundle wants them: by source key, with the name of their spec."""
    return {source_key(spec, architecture): (spec.name, cubin) for spec, cubin in made.items()}


def _specs(args: argparse.Namespace) -> list[KernelSpec]:
    names = MODEL_SHAPES if _ALL in args.shape else args.shape
    found: dict[KernelSpec, None] = {}
    for name in names:
        found.update(dict.fromkeys([*catalog.kernels_of(MODEL_SHAPES[name]), *litmus.SPECS]))
    return list(found)


def _existing(folder: Path) -> CubinCache:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder, nothing was compiled into it")
    return CubinCache(folder)


def _list(args: argparse.Namespace) -> None:
    if args.bundle:
        bundle = Bundle.open(args.bundle)
        rows = [(key, record["spec"], bundle.architecture, record) for key, record in bundle.records.items()]
    else:
        entries = _existing(args.cache).entries().values()
        rows = [
            (entry["source_key"], entry["spec"], entry["cubin"]["architecture"], entry["cubin"]) for entry in entries
        ]
    for key, name, architecture, numbers in sorted(rows, key=lambda row: row[1:3]):
        print(f"{key[:12]}  {architecture:7}  {numbers['num_registers']:3} registers  {name}")


def _verify(args: argparse.Namespace) -> None:
    bundle = Bundle.open(args.bundle)
    bundle.verify()
    print(f"{args.bundle}: {len(bundle.records)} cubins for {bundle.architecture}, whole; made by {bundle.versions}")
    stale = _of_other_sources(bundle)
    if stale:
        raise BundleError(
            f"{bundle.path}: {len(stale)} of {len(bundle.records)} kernels are of other sources: {_some(stale)}"
        )
    wanted = _specs(args)
    missing = [spec.name for spec in wanted if source_key(spec, bundle.architecture) not in bundle.records]
    if missing:
        raise BundleError(
            f"{bundle.path} lacks {len(missing)} of the {len(wanted)} kernels of {', '.join(args.shape)}: "
            f"{_some(missing)}"
        )


def _of_other_sources(bundle: Bundle) -> list[str]:
    """Return the names in a bundle that these sources have too, under another key; probes and the like have none."""
    shapes = MODEL_SHAPES.values()
    known = {spec.name: spec for shape in shapes for spec in catalog.kernels_of(shape)}
    return [
        record["spec"]
        for key, record in bundle.records.items()
        if record["spec"] in known and not _is_key_of(key, known[record["spec"]], bundle.architecture)
    ]


def _is_key_of(key: str, spec: KernelSpec, architecture: str) -> bool:
    """Return whether a key is of these sources; tests launch shipped kernels with other threads, alone on their SM."""
    if key == source_key(spec, architecture):
        return True
    tested = (replace(spec, num_threads=num, ctas_per_sm=1) for num in range(32, _MOST_THREADS + 1, 32))
    return any(key == source_key(it, architecture) for it in tested)


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _prune(args: argparse.Namespace) -> None:
    deleted = _existing(args.cache).prune(args.days * _DAY_S)
    print(f"{args.cache}: {deleted} kernels deleted", file=sys.stderr)


if __name__ == "__main__":
    main()
