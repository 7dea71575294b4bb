"""A start with a bundle: quick, and without anything that compiles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ferrule_server.executor.cuda.kernel_choice import shape_of, specs_needed
from ferrule_server.kernel_builder.bundles import write_bundle
from ferrule_server.kernels.cuda.spec import Cubin
from tests.executor.cuda.tiny_model import tiny_config

ROOT = Path(__file__).parents[3]
LIMIT_S = 3.0

_START = """
import sys, time
from pathlib import Path

import torch

class NoCompiler:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "numba_cuda", "llvmlite", "nvidia"):
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, NoCompiler())
began = time.process_time()
from tests.executor.cuda.fake_gpu import FakeGpu
from tests.executor.cuda.tiny_model import tiny_config, tiny_model
from tests.executor.cuda.toy_runner import rows_of
from ferrule_server.executor.cuda import compose
from ferrule_server.executor.cuda.options import GpuOptions

compose.TorchExecutor = __import__("functools").partial(compose.TorchExecutor, is_plain=True)
gpu = FakeGpu()
options = GpuOptions(
    device="cpu", free_bytes=1 << 32, total_bytes=1 << 32, dtype=torch.bfloat16, max_context=256,
    kv_memory_bytes=1 << 20, kernel_bundle=Path(sys.argv[1]),
)
executor = compose.prepare(tiny_config(), options, open_gpu=lambda _: gpu).finish(tiny_model())
executor.run(rows_of([1], [0]))
executor.tend()
assert executor.runner is not None, executor.state
executor.run(rows_of([2], [1]))
loaded = {call.subject for call in gpu.calls("load")}
assert {"embed", "gemv", "attention", "head"} <= loaded, loaded
print(time.process_time() - began)
"""


def test_a_start_from_a_bundle_needs_no_compiler_and_little_time(tmp_path: Path) -> None:
    """Beside the import of torch: from the bundle to the first step on the kernels."""
    specs = specs_needed(shape_of(tiny_config()), is_deterministic=False)
    write_bundle(tmp_path / "sm_90a.bundle", "sm_90a", {spec: Cubin("kernel", b"code") for spec in specs}, (12, 9))
    command = [sys.executable, "-c", _START, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < LIMIT_S
