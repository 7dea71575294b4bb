"""Everything that only a GPU can prove, in one command under ten minutes: a table on the screen, and JSON.

    make test-gpu
    python3 tools/gpu/run.py [--shape Qwen3-8B] [--bundle kernels.bundle] [--output FOLDER]

Stages, each with its share of the time; every piece is a process of its own, so that one that hangs or breaks the
context costs its own result only:

    compile    without --bundle: everything, into a bundle in the output folder
    ceiling    how fast anything reads on this GPU: what bandwidths are compared with
    kernels    each at the sizes of the model against torch; 1 000 replays of a graph, bit for bit; then time,
               bandwidth, share of the ceiling, and the same op in torch; a bar that is missed is said, and no failure
    layout     KV in blocks of all layers against a pool per layer, 8 and 100 GiB
    numerics   the tests of layer 1, on the GPU in place of the simulator (needs pytest, and a bundle, because
               their kernels take longer to compile than the rest of the run takes)
    executor   the tests of the executor that need a GPU: streams, copies and graphs of torch, what torch selects
    tools      compute-sanitizer and ncu, where the host lets them

Without a GPU it says so and makes a dry run: buffers on the CPU, kernels compiled, arguments packed, and a stop where
the driver would be called; about three minutes the first time, and a count for each op (``--verbose``: a line for each
case). From another machine, without numba-cuda and under other versions:

    python3 tools/gpu/run.py --build-bundle kernels.bundle --architecture sm_90a      (here)
    PYTHONPATH=server python3 tools/gpu/run.py --bundle kernels.bundle                (there)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OPS = (
    "embed",
    "gemv",
    "gemm",
    "add_norm",
    "attention",
    "head",
    "argmax",
    "sample",
    "log_sum_exp",
    "top_k",
    "copy_blocks",
    "layer",
)
"""Modules of kernels; ``layer`` is the chain of five that a layer is, in one graph."""
BUDGETS_S = {
    "compile": 120,
    "ceiling": 25,
    "kernels": 160,
    "layout": 35,
    "numerics": 85,
    "executor": 30,
    "tools": 50,
}
"""Seconds of each stage, in the order they run; what one leaves over the later ones may use."""
TOTAL_S = 590.0
EXECUTOR_TESTS = ("executor/cuda/test_torch_gpu", "executor/test_device_outputs")
"""Modules with tests that are marked ``gpu``."""

_DRY = "up to the driver, nothing is executed; about three minutes, half of it to compile"
_STOPPED = "stopped at the driver"
_TOOL_ERROR = 9
_PLAIN_PYTEST = (
    "-c",
    os.devnull,
    "--rootdir",
    str(ROOT),
    "--noconftest",
    "--import-mode=importlib",
    "-p",
    "no:cacheprovider",
)
"""Without the project's settings, which want plugins that another machine need not have."""

Result = dict[str, Any]


@dataclass
class Run:
    """One run: what it was asked, what it has found, how much time is left.

    Attributes:
        task: What every worker is told.
        ops: That are run.
        dry: Architecture of a dry run; None: there is a GPU.
        output: Folder of results.
        stages: That are run.
        is_verbose: A dry run too has a line for each case.
        results: By stage.
        failures: One line each.
    """

    task: Result
    ops: Sequence[str]
    dry: str | None
    output: Path
    stages: Sequence[str]
    is_verbose: bool = False
    started: float = field(default_factory=time.monotonic)
    results: dict[str, list[Result]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    deadline: float = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the stage must end."""
        return self.deadline - time.monotonic()

    def work(self, stage: str, limit_s: float, **task: Any) -> list[Result]:
        """Run one worker and keep what it says; it is killed at its limit or the stage's."""
        command = [sys.executable, "-m", "tools.gpu.worker", json.dumps({**self.task, "task": stage, **task})]
        subject = " ".join([stage, *([str(task["op"])] if "op" in task else [])])
        results = [{**task, **result} for result in self._lines(command, subject, limit_s)]
        self.results.setdefault(stage, []).extend(results)
        for result in results:
            if result.get("status") not in (None, "ok", _STOPPED):
                self.failures.append(f"{subject}: {json.dumps(result)}")
        for line in lines_of(results, task.get("op", ""), is_folded=bool(self.dry) and not self.is_verbose):
            print("  " + line, flush=True)
        return results

    def _lines(self, command: Sequence[str], subject: str, limit_s: float) -> Iterator[Result]:
        done = self.process(command, subject, limit_s)
        for line in done.splitlines():
            if line.startswith("{"):
                yield json.loads(line)

    def process(
        self, command: Sequence[str], subject: str, limit_s: float, failing: Sequence[int] | None = None
    ) -> str:
        """Run a process and return what it wrote; a failing exit status is noted, any but 0 unless said otherwise."""
        limit_s = min(limit_s, self.left_s)
        if limit_s <= 1:
            self.failures.append(f"{subject}: not run, the time of the stage is over")
            return ""
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            self.failures.append(f"{subject}: stopped after {limit_s:.0f} s")
            return error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        if done.returncode in failing if failing else done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-3:]
            self.failures.append(f"{subject}: exit status {done.returncode}: {' | '.join(last)}")
        return done.stdout


def _environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "server"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


def main() -> None:
    """Run all stages; exits with 1 where something failed."""
    args = _parse_arguments()
    if args.build_bundle:
        raise SystemExit(_build_bundle(args))
    device, dry = _find_device(args)
    shape = args.shape or ("Qwen3-0.6B" if dry else "Qwen3-8B")
    task: Result = {"shape": shape, "dry": dry, "architecture": dry or device["architecture"]}
    task["bundle"] = str(args.bundle) if args.bundle else None
    run = Run(task, args.ops, dry, args.output, args.stages, args.verbose)
    if args.bundle:
        _check_bundle(run)
    for stage in [stage for stage in BUDGETS_S if stage in args.stages]:
        _run_stage(run, stage)
    _write(run, device)
    raise SystemExit(1 if run.failures else 0)


def _run_stage(run: Run, stage: str) -> None:
    began = time.monotonic()
    whole = run.started + TOTAL_S
    later = sum(BUDGETS_S[name] for name in list(BUDGETS_S)[list(BUDGETS_S).index(stage) + 1 :] if name in run.stages)
    run.deadline = began + 3600 if run.dry else min(whole, max(began + BUDGETS_S[stage], whole - later))
    print(stage, flush=True)
    STAGES[stage](run)
    print(f"  {time.monotonic() - began:.0f} s", flush=True)


def _parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    from ferrule_server.kernels.cuda.spec import MODEL_SHAPES
    from tools.kernels.compile import ARCHITECTURES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(MODEL_SHAPES), help="the model; Qwen3-8B, in a dry run Qwen3-0.6B")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), metavar="OP")
    parser.add_argument("--stages", nargs="+", choices=list(BUDGETS_S), default=list(BUDGETS_S), metavar="STAGE")
    parser.add_argument("--bundle", type=_path, help="kernels that were compiled elsewhere")
    parser.add_argument("--output", type=_path, default=ROOT / "build" / "test-gpu")
    parser.add_argument("--dry-run", action="store_true", help="up to the driver, whether or not there is a GPU")
    parser.add_argument(
        "--architecture", choices=list(ARCHITECTURES), default="sm_90a", help="of a dry run, and of a bundle"
    )
    parser.add_argument("--verbose", action="store_true", help="a line for each case, in a dry run too")
    parser.add_argument("--build-bundle", type=_path, help="compile all that a run needs into a file, and end")
    args = parser.parse_args(arguments)
    wrong = _what_is_wrong(args)
    if wrong:
        parser.error(wrong)
    return args


def _path(text: str) -> Path:
    """Return a path as meant where the command is run; workers run in the checkout."""
    return Path(text).expanduser().resolve()


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


def _check_bundle(run: Run) -> None:
    """Refuse a bundle that serves nothing of this run; say what it lacks."""
    run.deadline = time.monotonic() + 60
    task = json.dumps({**run.task, "task": "bundle", "ops": list(run.ops)})
    results = list(run._lines([sys.executable, "-m", "tools.gpu.worker", task], "bundle", 60))
    run.results["bundle"] = results
    for result in results:
        if "error" in result:
            raise SystemExit(f"error: {result['error']}")
        whole = f"of the {result['kernels']} kernels of this run, {run.task['shape']}"
        if not result["in_bundle"]:
            raise SystemExit(f"error: {run.task['bundle']}: none {whole}; it is of other sources or another model")
        if result["in_bundle"] < result["kernels"]:
            has = f"{run.task['bundle']}: only {result['in_bundle']} {whole}"
            print(f"WARNING {has}; the others are compiled", flush=True)


def _find_device(args: argparse.Namespace) -> tuple[Result, str | None]:
    """Return what the device says of itself, and the architecture of a dry run where there is none."""
    if args.dry_run:
        print(f"dry run for {args.architecture}, as asked: {_DRY}", flush=True)
        return {"device": None}, args.architecture
    probe = Run({}, (), None, args.output, (), deadline=time.monotonic() + 60)
    results = list(probe._lines([sys.executable, "-m", "tools.gpu.worker", '{"task": "device"}'], "device", 60))
    if results and results[0]["status"] == "ok":
        print(f"device: {_line(results[0])}\nthis takes up to ten minutes", flush=True)
        return results[0], None
    reason = results[0]["error"] if results else "; ".join(probe.failures)
    print(f"no GPU: {reason}\ndry run for {args.architecture}: {_DRY}", flush=True)
    return {"device": None, "reason": reason}, args.architecture


def _compile(run: Run) -> None:
    if run.task["bundle"]:
        return
    bundle = run.output / "kernels.bundle"
    command = [sys.executable, "-m", "tools.gpu.build_bundle", "--output", str(bundle), "--without-tests"]
    command += ["--architecture", run.task["architecture"], "--shape", run.task["shape"], "--ops", *run.ops]
    run.process(command, "compile", run.left_s)
    run.task["bundle"] = str(bundle) if bundle.exists() else None


def _ceiling(run: Run) -> None:
    run.work("ceiling", run.left_s)


def _each_op(task: str, limit_s: float) -> Callable[[Run], None]:
    def stage(run: Run) -> None:
        more = {"ceiling_gbs": _best_read(run)} if task == "kernels" else {}
        for op in run.ops:
            run.work(task, 600 if run.dry else limit_s, op=op, **more)

    return stage


def _best_read(run: Run) -> float | None:
    return max((result["gbs"] for result in run.results.get("ceiling", []) if "gbs" in result), default=None)


def _layout(run: Run) -> None:
    run.work("layout", run.left_s)


def _numerics(run: Run) -> None:
    """Run the tests of layer 1 with the GPU in the simulator's place, one process per file."""
    if importlib.util.find_spec("pytest") is None:
        print("  left out: pytest is not installed")
        return
    if not run.dry and not run.task["bundle"]:
        print("  left out: no --bundle; make one with --build-bundle")
        return
    for name in _test_files(run):
        options = ["--gpu"]
        options += ["--gpu-bundle", run.task["bundle"]] if run.task["bundle"] else []
        options += ["--gpu-dry", run.dry] if run.dry else []
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.gpu.plugin", *_PLAIN_PYTEST]
        command += ["-m", "not slow", "-r", "fE", *options, f"tests/kernels/cuda/{name}.py"]
        lines = run.process(command, f"numerics {name}", 60).strip().splitlines()
        ran = next((line for line in lines if line.startswith("gpu: ")), "gpu: 0 chains")
        summary = f"{lines[-1] if lines else 'nothing'}; {ran}"
        run.results.setdefault("numerics", []).append({"tests": name, "summary": summary})
        if ran.startswith("gpu: 0 chains"):
            run.failures.append(f"numerics {name}: no kernel ran ({summary})")
        for line in [line for line in lines if line.startswith(("FAILED", "ERROR"))]:
            run.failures.append(f"numerics {name}: {line}")
        print(f"  {name}: {summary}", flush=True)


def _executor(run: Run) -> None:
    """Run the tests that are marked ``gpu``; one that is left out on a machine with a GPU has failed."""
    if importlib.util.find_spec("pytest") is None:
        print("  left out: pytest is not installed")
        return
    for name in EXECUTOR_TESTS:
        command = [sys.executable, "-m", "pytest", "-q", *_PLAIN_PYTEST, "-m", "gpu", "-r", "fEs", f"tests/{name}.py"]
        lines = run.process(command, f"executor {name}", 60).strip().splitlines()
        summary = lines[-1] if lines else "nothing"
        run.results.setdefault("executor", []).append({"tests": name, "summary": summary})
        if not run.dry and ("passed" not in summary or "skipped" in summary):
            run.failures.append(f"executor {name}: {summary}")
        print(f"  {name}: {summary}", flush=True)


def launching_tests() -> list[str]:
    """Return the test modules of layer 1 that launch kernels."""
    paths = sorted((ROOT / "tests" / "kernels" / "cuda").glob("test_*.py"))
    launching = [path.stem for path in paths if "cuda_simulator import" in path.read_text(encoding="utf-8")]
    return [name for name in launching if not name.startswith("test_simulator")]


def _test_files(run: Run) -> list[str]:
    """Return what is tested: a dry run, which compiles each kernel, takes the modules of its ops."""
    few = {f"test_{op}" for op in (run.ops if len(run.ops) < len(OPS) else ("copy_blocks",))}
    return [name for name in launching_tests() if not run.dry or name in few]


def _tools(run: Run) -> None:
    """Run some ops under the tools of CUDA; an error that a sanitizer finds fails the run."""
    wanted = [op for op in ("copy_blocks", "attention", "gemm", "sample") if op in run.ops]
    worker = [sys.executable, "-m", "tools.gpu.worker", json.dumps({**run.task, "task": "brief", "ops": wanted})]
    tools = {
        "memcheck": ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", str(_TOOL_ERROR)],
        "racecheck": ["compute-sanitizer", "--tool", "racecheck", "--error-exitcode", str(_TOOL_ERROR)],
        "ncu": ["ncu", "--launch-count", "1", "--metrics", "dram__bytes_read.sum"],
    }
    for name, (program, *options) in tools.items():
        path = shutil.which(program) or shutil.which(program, path="/usr/local/cuda/bin")
        if path is None or run.dry:
            said = f"{program} is not on this machine" if path is None else "not run without a GPU"
        else:
            said = run.process([path, *options, *worker], name, 30, failing=(_TOOL_ERROR,)).strip()[-300:]
        run.results.setdefault("tools", []).append({"tool": name, "said": said})
        print(f"  {name}: {said.splitlines()[-1] if said else 'did not run'}", flush=True)


STAGES: dict[str, Callable[[Run], None]] = {
    "ceiling": _ceiling,
    "compile": _compile,
    "executor": _executor,
    "kernels": _each_op("kernels", 50),
    "layout": _layout,
    "numerics": _numerics,
    "tools": _tools,
}


def _write(run: Run, device: Result) -> None:
    """Write all results; say what failed."""
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "seconds": round(time.monotonic() - run.started, 1),
        "is_dry": run.dry is not None,
        "shape": run.task["shape"],
        **device,
        "results": run.results,
        "failures": run.failures,
    }
    run.output.mkdir(parents=True, exist_ok=True)
    (run.output / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    for failure in run.failures:
        print(f"FAILED {failure}")
    outcome = f"{len(run.failures)} failures" if run.failures else "nothing failed"
    limits = " (a dry run: nothing was executed on a GPU)" if run.dry else ""
    print(f"{outcome} in {report['seconds']:.0f} s{limits}; {run.output / 'results.json'}")
    print(json.dumps({key: value for key, value in report.items() if key != "results"}))


def _commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def lines_of(results: Sequence[Result], subject: str, *, is_folded: bool) -> list[str]:
    """Return what a worker said for people; folded, all that went well up to the driver is one line with a count."""
    stopped = [result for result in results if result.get("status") == _STOPPED] if is_folded else []
    lines = [_line(result) for result in results if result not in stopped]
    if stopped:
        lines.append(f"{subject}: {len(stopped)} up to the driver".removeprefix(": "))
    return lines


def _line(result: Result) -> str:
    """Return one row of the table."""
    if "us" not in result:
        return "  ".join(f"{key}={value}" for key, value in result.items() if key not in ("op", "spec", "ceiling_gbs"))
    share = f"{100 * result['share_of_ceiling']:5.1f} %" if "share_of_ceiling" in result else "       "
    bar = f"  bar {100 * result['bar']:.0f} %" if "bar" in result else ""
    bar += " MISSED" if "bar" in result and result.get("share_of_ceiling", 0) < result["bar"] else ""
    versus = f"  torch x{result['times_torch']:.2f}" if "times_torch" in result else ""
    return f"{result['case']:44} {result['us']:9.2f} us {result['gbs']:8.1f} GB/s {share}{versus}{bar}"


def _build_bundle(args: argparse.Namespace) -> int:
    """Compile what a run needs, the kernels of the tests of layer 1 included, into one file."""
    command = [sys.executable, "-m", "tools.gpu.build_bundle", "--output", str(args.build_bundle)]
    command += ["--architecture", args.architecture, "--ops", *args.ops]
    command += ["--shape", args.shape or "Qwen3-8B"]
    return subprocess.run(command, cwd=ROOT, env=_environment(), check=False).returncode


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "server")]
    main()
