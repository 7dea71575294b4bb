"""Decode on a GPU: ours beside what the GPU can do at most, and beside its peers on the same tensors.

    make bench-gpu
    python3 benchmarks/bench_gpu.py [--stages a c] [--models Qwen3-8B] [--minutes 9.5] [--output FOLDER]

Stages, of parts that are a process each and end within ten minutes:

    a    ceilings: read-only bandwidth, copies, what a launch and a node of a graph cost
    b    ours against float32 at full size, teacher-forced: every buffer within its limit, tokens where they are decided
    c    ms per decode step at batch 1, 8, 32, 128 and context 256, 2048, 8192: in process; a profile; and through gRPC,
         Generate and StreamDecode apart
    d    peers, in turns with ours: transformers with a static cache and torch.compile, a plain model compiled like
         gpt-fast, the same in a graph captured by hand, transformers' continuous batching, flashinfer's attention
    e    verify, forks, a prompt again, blocks to the host and back

Weights are random, N(0, 0.02), and the same tensors for all. What counts is the share of the read ceiling of this very
run; the bars are compared at the end, and a bar that is missed is said, and no failure. Results of parts stay in the
output folder: a later call of the same commit on the same device goes on where this one ended (``--again`` does not),
so a machine that is lent for ten minutes at a time will do. ``results.json`` has everything, ``share.svg`` is the plot.

Without a GPU it says so and makes a dry run: every part on a tiny model on the CPU, as far as there is something to run
there, in about a minute; its times are no figures, each row is marked, and there is no plot. From another machine,
without a compiler:

    python3 benchmarks/bench_gpu.py --build-bundle kernels.bundle --architecture sm_90a      (here)
    python3 benchmarks/bench_gpu.py --bundle kernels.bundle                                  (there)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts that are asked for; exits with 1 where something failed."""
    args = _parse_arguments(arguments)
    if args.build_bundle:
        from benchmarks.gpu.bundle import build_bundle

        build_bundle(args.build_bundle, args.architecture, args.models)
        return
    raise SystemExit(_run(args))


def _run(args: argparse.Namespace) -> int:
    from benchmarks.gpu import report
    from benchmarks.gpu.parts import STAGES

    began = time.monotonic()
    device, dry = _find_device(args)
    workplace = _workplace(args, device, dry)
    parts, stage = _parts(args, is_dry=bool(dry)), ""
    print(_estimate(parts, is_dry=bool(dry)), flush=True)
    left = []
    for part in parts:
        if part.stage != stage:
            stage = part.stage
            print(f"{stage}  {STAGES[stage]}", flush=True)
        if not args.again and (kept := workplace.kept(part)):
            print(f" {part.name}: from {kept['date']}", flush=True)
        elif args.minutes and time.monotonic() - began + part.limit_s > 60 * args.minutes:
            left.append(part.name)
        else:
            _show(workplace.run(part))
    made = report.make_report(workplace, device)
    problems = report.problems_of(made)
    written = report.save(workplace, made)
    lines = report.lines_of(made) + [f"FAILED report: {problem}" for problem in problems]
    lines += [f"left for the next call: {', '.join(left)}"] if left else []
    print("\n".join(lines))
    print(f"{time.monotonic() - began:.0f} s; {', '.join(str(args.output / name) for name in written)}")
    print(json.dumps({key: value for key, value in made.items() if key != "parts"}))
    return 1 if made["failures"] or problems else 0


def _estimate(parts: Sequence[Any], *, is_dry: bool) -> str:
    """Return how long a run may take, which is known of a dry run; on a GPU only the limits of its parts are."""
    if is_dry:
        return f"{len(parts)} parts, in all about a minute; a row marked (dry) is no figure"
    limits = [part.limit_s / 60 for part in parts]
    return f"{len(parts)} parts, each of at most {max(limits, default=0):.0f} minutes, in all at most {sum(limits):.0f}"


def _show(result: Row) -> None:
    from benchmarks.gpu.report import line_of

    print(f" {result['part']}: {result['seconds']:.0f} s", flush=True)
    for row in result["rows"]:
        print("   " + line_of(row), flush=True)
    for failure in result["failures"]:
        print(f"   FAILED {failure}", flush=True)


def _parts(args: argparse.Namespace, *, is_dry: bool) -> list[Any]:
    from benchmarks.gpu.models import TINY
    from benchmarks.gpu.parts import all_parts, dry_parts

    found = dry_parts() if is_dry else all_parts()
    wanted = [part for part in found if part.stage in args.stages and (part.model in args.models or part.model == TINY)]
    if args.parts:
        wanted = [part for part in wanted if part.name in args.parts or part.name.partition(":")[0] in args.parts]
    return wanted


def _workplace(args: argparse.Namespace, device: Row | None, dry: str | None) -> Any:
    from benchmarks.gpu.process import Workplace

    folder = args.output / "models"
    folder.mkdir(parents=True, exist_ok=True)
    base = {"dry": dry, "bundle": str(args.bundle) if args.bundle else None}
    identity = {"commit": _commit(), "is_dry": dry is not None, "device": device["device"] if device else None}
    return Workplace(args.output, {**base, "models": str(folder)}, identity)


def _find_device(args: argparse.Namespace) -> tuple[Row | None, str | None]:
    """Return what the device says of itself, and the architecture of a dry run where there is none."""
    if args.dry_run:
        print(f"dry run for {args.architecture}, as asked: a tiny model on the CPU", flush=True)
        return None, args.architecture
    from benchmarks.gpu.process import last_line, rows_in, run_limited

    out, log = args.output / "device.jsonl", args.output / "device.log"
    run_limited([sys.executable, "-m", "tools.gpu.worker", '{"task": "device"}'], out, log, 120)
    rows = rows_in(out)
    if rows and rows[0]["status"] == "ok":
        device = {**rows[0], "versions": _versions()}
        print("device: " + "  ".join(f"{key}={value}" for key, value in device.items()), flush=True)
        return device, None
    reason = rows[0]["error"] if rows else last_line(log)
    print(f"no GPU: {reason}\ndry run for {args.architecture}: a tiny model on the CPU", flush=True)
    return None, args.architecture


def _versions() -> dict[str, str]:
    from importlib import metadata

    names = ("torch", "transformers", "triton", "flashinfer-python", "numba-cuda", "cuda-bindings", "grpcio")
    installed = {name: list(metadata.distributions(name=name)) for name in names}
    return {name: found[0].version for name, found in installed.items() if found}


def _commit() -> str:
    """Return what the results are of: the commit, and a digest of the sources where they differ or there is no git."""
    head = _git("rev-parse", "HEAD")
    if head and not _git("status", "--porcelain", "--", "server", "benchmarks"):
        return head
    digest = hashlib.sha256()
    for path in sorted(path for top in ("server", "benchmarks") for path in (ROOT / top).rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{head}+{digest.hexdigest()[:12]}".lstrip("+")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    from benchmarks.gpu.parts import STAGES
    from ferrule_server.kernel_builder.compile import ARCHITECTURES
    from ferrule_server.kernels.cuda.spec import MODEL_SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES), metavar="STAGE")
    parser.add_argument("--models", nargs="+", choices=list(MODEL_SHAPES), default=list(MODEL_SHAPES), metavar="MODEL")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only these, such as decode or decode:Qwen3-8B")
    parser.add_argument("--minutes", type=_minutes, help="start no part that might end later; without: no limit")
    parser.add_argument("--again", action="store_true", help="run parts anew that an earlier call has finished")
    parser.add_argument("--bundle", type=_path, help="compiled kernels (default: those that a server finds)")
    parser.add_argument("--output", type=_path, default=ROOT / "build" / "bench-gpu")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, whether or not there is a GPU")
    parser.add_argument(
        "--architecture", choices=list(ARCHITECTURES), default="sm_90a", help="of a dry run or a bundle"
    )
    parser.add_argument("--build-bundle", type=_path, help="compile all that a run needs into a file, and end")
    args = parser.parse_args(arguments)
    wrong = _what_is_wrong(args)
    if wrong:
        parser.error(wrong)
    return args


def _path(text: str) -> Path:
    """Return a path as meant where the command is run; workers run in the checkout."""
    return Path(text).expanduser().resolve()


def _minutes(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _what_is_wrong(args: argparse.Namespace) -> str | None:
    """Try every file and folder of a run before anything takes time."""
    from ferrule_server.executor.cuda.bundle import Bundle, BundleError

    option = ""
    try:
        if args.bundle:
            option = "--bundle"
            Bundle.open(args.bundle)
        if args.build_bundle:
            option = "--build-bundle"
            with tempfile.TemporaryFile(dir=args.build_bundle.parent):
                pass
        else:
            option = "--output"
            args.output.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=args.output):
                pass
    except (BundleError, OSError) as error:
        return f"argument {option}: {error}"
    return None


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "server"), str(ROOT / "client"), str(ROOT / "protos")]
    main()
