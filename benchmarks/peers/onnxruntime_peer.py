"""ONNX Runtime GenAI: its own model builder and generator, stepped by hand."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.openvino_peer import write_tokenizer
from benchmarks.peers.worker import Task, random_prompts, work

__all__ = ["OnnxRuntimePeer"]


class OnnxRuntimePeer:
    """A generator for each run; the prompts of a batch are of one length."""

    def __init__(self, task: Task) -> None:
        self._task = task
        # Packages of the peer's environment have no types here.
        self._genai: Any = import_module("onnxruntime_genai")
        self._onnxruntime: Any = import_module("onnxruntime")
        config = self._genai.Config(str(converted(task.folder, task.work_folder, task.variant)))
        options = {"intra_op_num_threads": task.num_threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = self._genai.Model(config)

    def decode(self, batch: int, context: int, num_steps: int) -> float:
        """Prefill ``batch`` sequences of ``context`` tokens, then return greedy tokens/s by the median step."""
        return batch / statistics.median(self._run(batch, context, 1 + num_steps)[1:])

    def prefill(self, num_tokens: int) -> float:
        """Return prefilled tokens per second of one prompt."""
        return num_tokens / sum(self._run(1, num_tokens, 1))

    def versions(self) -> Mapping[str, str]:
        """Return the versions of what computes."""
        return {"onnxruntime-genai": self._genai.__version__, "onnxruntime": self._onnxruntime.__version__}

    def _run(self, batch: int, context: int, num_new_tokens: int) -> list[float]:
        """Return the seconds of each step, the prefill first."""
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(
            max_length=context + num_new_tokens + 1, min_length=context + num_new_tokens + 1, batch_size=batch
        )
        generator = self._genai.Generator(self._model, params)
        prompts = np.stack(list(random_prompts(self._task, batch, context))).astype(np.int32)
        seconds = []
        begin = time.perf_counter()
        generator.append_tokens(prompts)
        for _ in range(num_new_tokens):
            generator.generate_next_token()
            seconds.append(time.perf_counter() - begin)
            begin = time.perf_counter()
        return seconds


def converted(folder: Path, work_folder: Path, variant: str) -> Path:
    """Return the model in the format of ONNX Runtime; it is converted if that has not been done yet."""
    out = work_folder / f"{folder.name}-{variant}"
    if out.exists():
        return out
    unfinished, source = work_folder / f"{out.name}.unfinished", work_folder / f"{folder.name}-source"
    for path in (unfinished, source):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    for path in folder.iterdir():
        (source / path.name).symlink_to(path.resolve())
    write_tokenizer(source)
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(unfinished)]
    cache = ["-c", str(work_folder / "cache")]
    subprocess.run([*builder, "-p", variant, "-e", "cpu", *cache], check=True)
    shutil.rmtree(source)
    unfinished.rename(out)
    return out


if __name__ == "__main__":
    work(OnnxRuntimePeer)
