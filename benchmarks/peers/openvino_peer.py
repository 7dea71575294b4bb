"""OpenVINO GenAI: its continuous batching with paged attention, computing in bfloat16, stepped by hand."""

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

from benchmarks.peers.worker import Task, random_prompts, work

__all__ = ["OpenVinoPeer"]

_CACHE_GB = 3


class OpenVinoPeer:
    """A pipeline of continuous batching.

    Requests that are added together are prefilled in one step, because a step may hold the tokens of all of them; every
    later step decodes one token of each.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        # Packages of the peer's environment have no types here.
        self._openvino: Any = import_module("openvino")
        self._genai: Any = import_module("openvino_genai")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GB
        scheduler.max_num_batched_tokens = task.max_tokens
        scheduler.max_num_seqs = task.max_batch
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": task.num_threads}
        folder = converted(task.folder, task.work_folder, task.variant)
        self._pipeline = self._genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._num_requests = 0

    def decode(self, batch: int, context: int, num_steps: int) -> float:
        """Prefill ``batch`` sequences of ``context`` tokens, then return greedy tokens/s by the median step."""
        seconds = self._run(batch, context, 1 + num_steps)
        if len(seconds) != 1 + num_steps:
            raise RuntimeError(f"{len(seconds)} steps for a prefill and {num_steps} decodes")
        return batch / statistics.median(seconds[1:])

    def prefill(self, num_tokens: int) -> float:
        """Return prefilled tokens per second of one prompt."""
        return num_tokens / sum(self._run(1, num_tokens, 1))

    def versions(self) -> Mapping[str, str]:
        """Return the versions of what computes."""
        return {"openvino-genai": self._genai.__version__, "openvino": self._openvino.__version__}

    def _run(self, batch: int, context: int, num_new_tokens: int) -> list[float]:
        """Run requests to their end and return the seconds of each step, the prefill first."""
        config = self._genai.GenerationConfig(max_new_tokens=num_new_tokens, ignore_eos=True, do_sample=False)
        handles = []
        for prompt in random_prompts(self._task, batch, context):
            ids = self._openvino.Tensor(np.ascontiguousarray(prompt[None]))
            handles.append(self._pipeline.add_request(self._num_requests, ids, config))
            self._num_requests += 1
        seconds = []
        while self._pipeline.has_non_finished_requests():
            begin = time.perf_counter()
            self._pipeline.step()
            seconds.append(time.perf_counter() - begin)
        del handles
        return seconds


def converted(folder: Path, work_folder: Path, variant: str) -> Path:
    """Return the model in OpenVINO's format; it is converted if that has not been done yet."""
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
    exporter = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(source)]
    flags = ["--task", "text-generation-with-past", "--weight-format", variant]
    if variant == "int4":
        flags += ["--sym", "--group-size", "32", "--ratio", "1.0"]
    subprocess.run([*exporter, *flags, str(unfinished)], check=True)
    shutil.rmtree(source)
    unfinished.rename(out)
    return out


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of a few words if there is none: the pipeline does not open without one, but is given ids."""
    if (folder / "tokenizer.json").exists():
        return
    model = {"type": "WordLevel", "vocab": {"<unk>": 0, "<eos>": 1, "a": 2}, "unk_token": "<unk>"}
    special = [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": True}
        for number, text in enumerate(("<unk>", "<eos>"))
    ]
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    tokenizer = {"version": "1.0", "added_tokens": special, "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | parts), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


if __name__ == "__main__":
    work(OpenVinoPeer)
