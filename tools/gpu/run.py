"""Everything that only a GPU can prove, in one command under ten minutes: lines on the screen, and JSON.

    make test-gpu
    python3 tools/gpu/run.py [--shape Qwen3-8B] [--bundle kernels.bundle] [--stages litmus core] [--output FOLDER]

Stages, what matters most first:

    litmus     chains of kernels that read too early if kernels may not start early on this GPU
    ceiling    how fast anything reads on this GPU: what bandwidths are compared with
    core       the kernels of decode steps at the sizes of the model: against torch, then 1 000 replays of a graph, bit
               for bit; then time, bandwidth, share of the ceiling, and the same op in torch
    trigger    a layer whose kernels start early, late, or behind one another
    others     all other kernels, as in core
    layout     KV in blocks of all layers against a pool per layer, 8 and 100 GiB
    numerics   the tests of layer 1, on the GPU in place of the simulator (needs pytest)
    executor   the tests that are marked gpu: streams, copies and graphs of torch, its attention, what torch selects
    tools      compute-sanitizer and ncu, where the host lets them

The stages down to layout share one process, because torch takes seconds to start. A task that hangs or loses the
context is a failure, and the rest goes on in a new process. A bar that is missed is said, and is no failure.

Without a GPU it says so and makes a dry run: buffers on the CPU, kernels compiled, arguments packed, and a stop where
the driver would be called (``--verbose``: a line for each case). From another machine, without numba-cuda:

    python3 tools/gpu/run.py --build-bundle kernels.bundle --architecture sm_90a      (here)
    PYTHONPATH=server python3 tools/gpu/run.py --bundle kernels.bundle                (there)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
CORE_OPS = ("layer", "gemv", "attention", "head", "gemm", "add_norm", "argmax", "embed", "sample")
"""Kernels of decode steps; ``layer`` is the chain of five that a layer is, in one graph."""
OTHER_OPS = ("log_sum_exp", "top_k")
OPS = (*CORE_OPS, *OTHER_OPS)
CHOICES = re.compile(r" (ring|split|trigger)=(\w+)")
"""What tells the sides of a choice apart in the names of cases."""
WORKER = ("-m", "tools.gpu.worker")
LIMITS_S = {"litmus": 60, "ceiling": 40, "core": 60, "trigger": 60, "others": 60, "layout": 60}
"""Seconds that one task of a stage may take without a result, by stage, in the order they run; one process does all."""
BUDGETS_S = {"numerics": 85, "executor": 30, "tools": 50}
"""Seconds of the stages behind them, which are processes of their own."""
TOTAL_S = 590.0
EXECUTOR_TESTS = (
    "executor/cuda/test_litmus",
    "executor/cuda/test_torch_gpu",
    "executor/test_device_outputs",
    "model/test_flash_attention",
)
"""Modules with tests that are marked ``gpu``."""

_DRY = "up to the driver, nothing is executed; about two minutes, most of it to compile"
_STOPPED = "stopped at the driver"
_TOOL_ERROR = 9
_PLAIN_PYTEST = ["-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "--import-mode=importlib"]
_PLAIN_PYTEST += ["-p", "no:cacheprovider"]
"""Without the project's settings, which want plugins that another machine need not have."""

Result = dict[str, Any]


@dataclass
class Run:
    """One run: what it was asked, what it has found, how much time is left.

    Attributes:
        given: What every worker is told.
        dry: Architecture of a dry run; None: there is a GPU.
        output: Folder of results.
        is_verbose: A dry run too has a line for each case.
        results: By stage.
        failures: One line each.
        deadline: When the stage that runs must end.
    """

    given: Result
    dry: str | None
    output: Path
    is_verbose: bool = False
    started: float = field(default_factory=time.monotonic)
    results: dict[str, list[Result]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    deadline: float = float("inf")

    def work(self, tasks: Sequence[Result]) -> None:
        """Do tasks one after the other in a worker; where it hangs or dies, the rest is done in another one."""
        done = 0
        while done < len(tasks):
            if time.monotonic() >= self.deadline:
                self.failures += [f"{subject_of(task)}: not run, the time is over" for task in tasks[done:]]
                return
            done += self._work(tasks[done:])

    def _work(self, tasks: Sequence[Result]) -> int:
        """Return how many tasks a worker has done, the one that it did not survive among them."""
        reads_gbs = [result["gbs"] for result in self.results.get("ceiling", []) if "gbs" in result]
        given = {**self.given, "ceiling_gbs": max(reads_gbs, default=None), "tasks": tasks}
        command = [sys.executable, *WORKER, json.dumps(given)]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=errors, text=True
            ) as worker,
        ):
            current = self._follow(worker, tasks)
            if worker.wait() == 0:
                return len(tasks)
            errors.seek(0)
            last = " | ".join(errors.read().strip().splitlines()[-3:])
        if worker.returncode > 0:
            self.failures.append(f"{subject_of(tasks[current])}: exit status {worker.returncode}: {last}")
        return current + 1

    def _follow(self, worker: subprocess.Popen[str], tasks: Sequence[Result]) -> int:
        """Note what a worker says until it ends, or hangs and is killed; return the task that it was at."""
        lines = _lines_of(worker)
        current, limit_s = 0, 60.0
        while True:
            try:
                line = lines.get(timeout=max(0.1, min(limit_s, self.deadline - time.monotonic())))
            except queue.Empty:
                worker.kill()
                self.failures.append(f"{subject_of(tasks[current])}: stopped after {limit_s:.0f} s")
                return current
            if line is None:
                return current
            if "begin" in line:
                current = line["begin"]
                limit_s = 600.0 if self.dry else LIMITS_S.get(tasks[current]["stage"], 60.0)
            else:
                self.note(tasks[current], line)

    def note(self, task: Result, result: Result) -> None:
        """Keep a result of a task, and say it."""
        self.results.setdefault(task["stage"], []).append({**task, **result})
        if result.get("status") not in (None, "ok", _STOPPED):
            self.failures.append(f"{subject_of(task)}: {json.dumps(result)}")
        if self.is_verbose or result.get("status") != _STOPPED:
            print(f"  {line_of(result)}", flush=True)

    def process(
        self, command: Sequence[str], subject: str, limit_s: float, failing: Sequence[int] | None = None
    ) -> str:
        """Run a process and return what it wrote; a failing exit status is noted, any but 0 unless said otherwise."""
        limit_s = min(limit_s, self.deadline - time.monotonic())
        if limit_s <= 1:
            self.failures.append(f"{subject}: not run, the time is over")
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


def _lines_of(worker: subprocess.Popen[str]) -> queue.Queue[Result | None]:
    """Return a queue of what a worker says, None at its end."""
    lines: queue.Queue[Result | None] = queue.Queue()

    def read(pipe: IO[str]) -> None:
        for line in pipe:
            if line.startswith("{"):
                lines.put(json.loads(line))
        lines.put(None)

    assert worker.stdout is not None
    threading.Thread(target=read, args=(worker.stdout,), daemon=True).start()
    return lines


def subject_of(task: Result) -> str:
    """Return a task in words."""
    return " ".join(str(task[name]) for name in ("stage", "op") if name in task)


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
    given: Result = {"shape": shape, "dry": dry, "bundle": str(args.bundle) if args.bundle else None}
    run = Run(given, dry, args.output, args.verbose)
    if args.bundle:
        _check_bundle(run, dry or device["architecture"], args.ops)
    elif not dry:
        given["bundle"] = _compiled(run, device["architecture"], args.ops)
    later_s = sum(limit_s for stage, limit_s in BUDGETS_S.items() if stage in args.stages)
    run.deadline = float("inf") if dry else run.started + TOTAL_S - later_s
    run.work(tasks_of(args.stages, args.ops))
    if dry:
        for stage, results in run.results.items():
            print(f"{stage}: {len(results)} up to the driver", flush=True)
    for stage in [stage for stage in BUDGETS_S if stage in args.stages]:
        print(stage, flush=True)
        later_s -= BUDGETS_S[stage]
        run.deadline = float("inf") if dry else run.started + TOTAL_S - later_s
        STAGES[stage](run, args.ops)
    _write(run, device)
    raise SystemExit(1 if run.failures else 0)


def tasks_of(stages: Sequence[str], ops: Sequence[str]) -> list[Result]:
    """Return what workers do in the order of :data:`LIMITS_S`."""
    of_ops = {"core": CORE_OPS, "others": OTHER_OPS}
    tasks: list[Result] = []
    for stage in [stage for stage in LIMITS_S if stage in stages]:
        if stage in of_ops:
            tasks += [{"stage": stage, "task": "op", "op": op} for op in of_ops[stage] if op in ops]
        else:
            tasks.append({"stage": stage, "task": stage})
    return tasks


def _parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    from ferrule_server.kernel_builder.compile import ARCHITECTURES
    from ferrule_server.kernels.cuda.spec import MODEL_SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(MODEL_SHAPES), help="the model; Qwen3-8B, in a dry run Qwen3-0.6B")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), metavar="OP")
    stages = [*LIMITS_S, *BUDGETS_S]
    parser.add_argument("--stages", nargs="+", choices=stages, default=stages, metavar="STAGE")
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
        option = "--build-bundle" if args.build_bundle else "--output"
        folder = args.build_bundle.parent if args.build_bundle else args.output
        if args.build_bundle and args.build_bundle.is_dir():
            raise IsADirectoryError(f"{args.build_bundle} is a folder, not a file")
        if not args.build_bundle:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (BundleError, OSError) as error:
        return f"argument {option}: {error}"
    return None


def _find_device(args: argparse.Namespace) -> tuple[Result, str | None]:
    """Return what the device says of itself, and the architecture of a dry run where there is none."""
    reason = "as asked"
    if not args.dry_run:
        probe = Run({"bundle": None, "dry": None, "shape": None}, None, args.output)
        probe.work([{"stage": "device", "task": "device"}])
        (device,) = probe.results.get("device") or [{"error": "; ".join(probe.failures)}]
        if "device" in device:
            print("this takes up to ten minutes", flush=True)
            return device, None
        reason = f"no GPU: {device['error']}"
    print(f"dry run for {args.architecture}, {reason}: {_DRY}", flush=True)
    return {"device": None, "reason": reason}, args.architecture


def _check_bundle(run: Run, architecture: str, ops: Sequence[str]) -> None:
    """Refuse a bundle that serves nothing of this run; say what it lacks."""
    run.work([{"stage": "bundle", "task": "bundle", "architecture": architecture, "ops": list(ops)}])
    result = run.results["bundle"][-1] if "bundle" in run.results else {"error": "; ".join(run.failures)}
    if "error" in result:
        raise SystemExit(f"error: {result['error']}")
    whole = f"of the {result['kernels']} kernels of this run, {run.given['shape']}"
    if not result["in_bundle"]:
        raise SystemExit(f"error: {run.given['bundle']}: none {whole}; it is of another model")
    if result["in_bundle"] < result["kernels"]:
        has = f"{run.given['bundle']}: only {result['in_bundle']} {whole}"
        print(f"WARNING {has}; the others are compiled", flush=True)


def _compiled(run: Run, architecture: str, ops: Sequence[str]) -> str | None:
    """Compile what the run needs into a bundle in the output folder, and return its path."""
    bundle = run.output / "kernels.bundle"
    print("compile", flush=True)
    command = [sys.executable, "-m", "tools.gpu.build_bundle", "--output", str(bundle), "--without-tests"]
    command += ["--architecture", architecture, "--shape", run.given["shape"], "--ops", *ops]
    run.process(command, "compile", 300)
    return str(bundle) if bundle.exists() else None


def _numerics(run: Run, ops: Sequence[str]) -> None:
    """Run the tests of layer 1 with the GPU in the simulator's place, one process per file."""
    if not _has_pytest():
        return
    if not run.dry and not run.given["bundle"]:
        print("  left out: no --bundle; make one with --build-bundle")
        return
    for name in _test_files(run, ops):
        options = ["--gpu", *(["--gpu-bundle", run.given["bundle"]] if run.given["bundle"] else [])]
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


def _executor(run: Run, _: Sequence[str]) -> None:
    """Run the tests that are marked ``gpu``; one that is left out on a machine with a GPU has failed."""
    if not _has_pytest():
        return
    for name in EXECUTOR_TESTS:
        command = [sys.executable, "-m", "pytest", "-q", *_PLAIN_PYTEST, "-m", "gpu", "-r", "fEs", f"tests/{name}.py"]
        lines = run.process(command, f"executor {name}", 60).strip().splitlines()
        summary = lines[-1] if lines else "nothing"
        run.results.setdefault("executor", []).append({"tests": name, "summary": summary})
        if not run.dry and ("passed" not in summary or "skipped" in summary):
            run.failures.append(f"executor {name}: {summary}")
        print(f"  {name}: {summary}", flush=True)


def _has_pytest() -> bool:
    has_pytest = importlib.util.find_spec("pytest") is not None
    if not has_pytest:
        print("  left out: pytest is not installed")
    return has_pytest


def launching_tests() -> list[str]:
    """Return the test modules of layer 1 that launch kernels."""
    paths = sorted((ROOT / "tests" / "kernels" / "cuda").glob("test_*.py"))
    launching = [path.stem for path in paths if "cuda_simulator import" in path.read_text(encoding="utf-8")]
    return [name for name in launching if not name.startswith("test_simulator")]


def _test_files(run: Run, ops: Sequence[str]) -> list[str]:
    """Return what is tested: a dry run, which compiles each kernel, takes the modules of its ops."""
    few = {f"test_{op}" for op in (ops if len(ops) < len(OPS) else ("embed",))}
    return [name for name in launching_tests() if not run.dry or name in few]


def _tools(run: Run, ops: Sequence[str]) -> None:
    """Run some ops under the tools of CUDA; an error that a sanitizer finds fails the run."""
    wanted = [op for op in ("embed", "attention", "gemm", "sample") if op in ops]
    tasks = [{"stage": "tools", "task": "brief", "op": op} for op in wanted]
    worker = [sys.executable, *WORKER, json.dumps({**run.given, "tasks": tasks})]
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


STAGES: dict[str, Callable[[Run, Sequence[str]], None]] = {
    "numerics": _numerics,
    "executor": _executor,
    "tools": _tools,
}


def _write(run: Run, device: Result) -> None:
    """Write all results; say what failed."""
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "seconds": round(time.monotonic() - run.started, 1),
        "is_dry": run.dry is not None,
        "shape": run.given["shape"],
        **device,
        "results": run.results,
        "choices": choices_of(run.results),
        "failures": run.failures,
    }
    for name, sides in report["choices"].items():
        print(f"{name}: {', '.join(f'{side} {us} us' for side, us in sides.items())}")
    (run.output / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    for failure in run.failures:
        print(f"FAILED {failure}")
    outcome = f"{len(run.failures)} failures" if run.failures else "nothing failed"
    limits = " (a dry run: nothing was executed on a GPU)" if run.dry else ""
    print(f"{outcome} in {report['seconds']:.0f} s{limits}; {run.output / 'results.json'}")
    print(json.dumps({key: value for key, value in report.items() if key not in ("results", "choices")}))


def choices_of(results: dict[str, list[Result]]) -> dict[str, dict[str, float]]:
    """Return us of each side by case, where cases differ in nothing but a choice; of gemm also those of torch."""
    found: dict[str, dict[str, float]] = {}
    for result in (it for stage in results.values() for it in stage if "us" in it):
        name = CHOICES.sub("", result["case"])
        for choice, side in CHOICES.findall(result["case"]):
            found.setdefault(f"{choice} of {name}", {})[side] = result["us"]
        if result["case"].startswith("gemm ") and "torch_us" in result:
            found[f"border of {name}"] = {"ours": result["us"], "cuBLAS": result["torch_us"]}
    return {name: sides for name, sides in found.items() if len(sides) > 1}


def _commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def line_of(result: Result) -> str:
    """Return one row of the table."""
    if "us" not in result:
        return "  ".join(f"{key}={value}" for key, value in result.items())
    share = f"{100 * result['share_of_ceiling']:5.1f} %" if "share_of_ceiling" in result else "       "
    bar = f"  bar {100 * result['bar']:.0f} %" if "bar" in result else ""
    bar += " MISSED" if "bar" in result and result.get("share_of_ceiling", 0) < result["bar"] else ""
    versus = f"  torch x{result['times_torch']:.2f}" if "times_torch" in result else ""
    return f"{result['case']:44} {result['us']:9.2f} us {result['gbs']:8.1f} GB/s {share}{versus}{bar}"


def _build_bundle(args: argparse.Namespace) -> int:
    """Compile what a run needs, the kernels of the tests of layer 1 included, into one file."""
    command = [sys.executable, "-m", "tools.gpu.build_bundle", "--output", str(args.build_bundle)]
    command += ["--architecture", args.architecture, "--ops", *args.ops, "--shape", args.shape or "Qwen3-8B"]
    return subprocess.run(command, cwd=ROOT, env=_environment(), check=False).returncode


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "server")]
    main()
