"""Tests whether kernels of a chain may start early on this GPU: ``python -m ferrule_server.executor.cuda.litmus``.

Each kernel lets the next one start in its first lines and trusts ``grid_wait`` of the next one to mean that everything
before has ended and is seen. :func:`run_litmus` launches and replays chains of kernels that read too early if it means
less (:mod:`ferrule_server.kernels.cuda.litmus`), and counts what they found. The verdict is kept for each kind of GPU,
driver and source of the kernels; :mod:`ferrule_server.executor.cuda.early_launch` acts on it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ferrule_server.executor.cuda.bundle import find_bundle, source_hash
from ferrule_server.executor.cuda.driver import GpuInfo
from ferrule_server.executor.cuda.gpu import Gpu, Launch
from ferrule_server.executor.cuda.kernel_set import KernelSet
from ferrule_server.executor.cuda.torch_gpu import TorchGpu
from ferrule_server.executor.fallback.fast_path import sentence
from ferrule_server.kernels.cuda.litmus import CONTROL, ROW_BYTES, SPECS, WAITING
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec

_NUM_RUNS: Final = 100_000
"""Chains that are launched, and chains that are replayed: fewer are no reason to trust a GPU."""
_LENGTH: Final = 5
_BATCH: Final = 64
"""Chains in a graph."""
_NUM_CONTROLS: Final = 16
"""Graphs of the control."""
_CYCLES: Final = (0, 1_300, 0, 1_300, 0, 1_300, 0, 13_000)
"""What CTAs of a chain spin, times 0 to 3; the slowest 0, 2 or 20 us at 2 GHz. One entry per chain, again and again."""
_DRIVER: Final = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the chains have shown.

    Attributes:
        num_runs: Chains that were launched kernel by kernel; as many were replayed in graphs.
        num_stale: Words that were read after a wait, and before what should be there was seen.
        control_stale: Words that the kernel without a wait read too early, in launches or in graphs, whichever are
            fewer.
    """

    num_runs: int
    num_stale: int
    control_stale: int

    @property
    def outcome(self) -> str:
        """Whether kernels may start early; inconclusive: the control did not fail, so nothing overlapped."""
        return "failed" if self.num_stale else "passed" if self.control_stale else "inconclusive"


def run_litmus(gpu: Gpu, cubins: Mapping[KernelSpec, Cubin], num_runs: int = _NUM_RUNS) -> Verdict:
    """Return what chains of kernels show on a GPU that nothing else uses meanwhile; some ten seconds are planned.

    Args:
        gpu: Its stream is idle afterwards.
        cubins: Of ``SPECS``.
        num_runs: Chains that are launched, and that are replayed; rounded up to whole graphs.

    Raises:
        GpuError: The GPU refuses something, or a kernel is missing.
    """
    kernels = KernelSet(gpu, cubins)
    rows = gpu.allocate("litmus rows", (_LENGTH, gpu.info.num_sms * ROW_BYTES), torch.uint8)
    stale = gpu.allocate("litmus counter", (1,), torch.int64)
    batch = min(num_runs, _BATCH)
    num_batches = -(-num_runs // batch)
    counts = {}
    for spec, number in ((WAITING, num_batches), (CONTROL, min(num_batches, _NUM_CONTROLS))):
        launches = [it for i in range(batch) for it in _chain(kernels, spec, rows, stale, _CYCLES[i % len(_CYCLES)])]
        counts[spec] = _stale_words(gpu, launches, stale, number)
    return Verdict(num_batches * batch, sum(counts[WAITING]), min(counts[CONTROL]))


def _chain(kernels: KernelSet, spec: KernelSpec, rows: Tensor, stale: Tensor, cycles: int) -> list[Launch]:
    """Return the launches of a chain: the first waits for the chain before, and the last reads two rows."""
    launches = []
    for i in range(_LENGTH):
        read = {"before": rows[i - 1] if i else 0, "first": rows[0] if i == _LENGTH - 1 else 0}
        arguments = {**read, "own": rows[i], "stale": stale, "cycles": cycles}
        launches.append(kernels.prepare(spec, arguments, kernels.gpu.info.num_sms, starts_early=i > 0))
    return launches


def _stale_words(gpu: Gpu, launches: list[Launch], stale: Tensor, number: int) -> list[int]:
    """Return how many words are read too early where kernels are launched, and where a graph of them is replayed."""
    gpu.synchronize()
    totals = [int(stale)]
    gpu.launch(launches)  # what was never launched cannot be captured
    graph = gpu.capture(launches)
    for submit in (partial(gpu.launch, launches), partial(gpu.replay, graph)):
        for _ in range(number):
            submit()
            gpu.synchronize()
        totals.append(int(stale))
    graph.close()
    return [after - before for before, after in pairwise(totals)]


def default_folder() -> Path:
    """Return where verdicts are kept unless a setting says otherwise: in the user's cache folder."""
    try:
        return Path("~/.cache/ferrule").expanduser()
    except RuntimeError:  # this user has no home
        return Path(tempfile.gettempdir(), "ferrule")


def find_verdict(gpu: GpuInfo, folder: Path) -> Verdict | None:
    """Return the verdict that a cache folder has of this kind of GPU, driver and sources; None if it has none."""
    try:
        return Verdict(**json.loads(_path(gpu, folder).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _path(gpu: GpuInfo, folder: Path) -> Path:
    driver = _DRIVER.read_text() if _DRIVER.exists() else ""
    described = [gpu.name, gpu.capability, driver, source_hash()]
    return folder / f"{hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]}.litmus"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the test, keep and print the verdict, and exit with its status."""
    parser = argparse.ArgumentParser(
        prog="python -m ferrule_server.executor.cuda.litmus",
        description="Test whether kernels may start early on this GPU, and keep the verdict for the server.",
        epilog="exit status: 0 passed, 1 failed, 2 there is no GPU, or nothing overlapped",
    )
    parser.add_argument("--device", type=int, default=0, metavar="N", help="index of the GPU (default: 0)")
    parser.add_argument("--runs", type=int, default=_NUM_RUNS, metavar="N", help="chains (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=default_folder(), help="folder (default: %(default)s)")
    parser.add_argument("--bundle", type=Path, help="its kernels (default: those that a server finds)")
    args = parser.parse_args(arguments)
    try:
        gpu = TorchGpu.open(args.device)
        bundle = find_bundle(args.bundle, gpu.info.capability, gpu.info.cuda_version)
        verdict = run_litmus(gpu, bundle.read(SPECS), args.runs)
    except Exception as error:  # whatever it is, it is no verdict
        print(f"error: {sentence(error)}", file=sys.stderr)
        raise SystemExit(2) from error
    if args.runs >= _NUM_RUNS or verdict.outcome == "failed":
        try:
            args.cache.mkdir(parents=True, exist_ok=True)
            _path(gpu.info, args.cache).write_text(json.dumps(asdict(verdict)))
        except OSError as error:
            print(f"the verdict is not kept: {error}", file=sys.stderr)
    print(f"{verdict.outcome} on {gpu.info.name}: {verdict}")  # the first word is read by early_launch.py
    raise SystemExit({"passed": 0, "failed": 1}.get(verdict.outcome, 2))


if __name__ == "__main__":
    main()
