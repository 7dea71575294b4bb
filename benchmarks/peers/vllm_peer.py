"""vLLM on the processor: bfloat16, compiled, its engine in this process, stepped by hand."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from importlib import import_module, metadata
from typing import Any

from benchmarks.peers.worker import Task, random_prompts, work

__all__ = ["VllmPeer"]


class VllmPeer:
    """An engine of vLLM; the first step after a request holds its whole prompt."""

    def __init__(self, task: Task) -> None:
        self._task = task
        # Packages of the peer's environment have no types here.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(
            map(str, sorted(os.sched_getaffinity(0))[: task.num_threads])
        )
        self._vllm: Any = import_module("vllm")
        self._engine = self._vllm.LLM(
            model=str(task.folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=min(task.max_length, task.config["max_position_embeddings"]),
            max_num_seqs=task.max_batch,
            max_num_batched_tokens=task.max_tokens,
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine
        num_threads = import_module("torch").get_num_threads()
        if num_threads != task.num_threads:
            raise RuntimeError(f"vLLM computes with {num_threads} threads instead of {task.num_threads}")
        self._num_requests = 0

    def decode(self, batch: int, context: int, num_steps: int) -> float:
        """Prefill ``batch`` sequences of ``context`` tokens, then return greedy tokens/s by the median step."""
        seconds = self._run(batch, context, 1 + num_steps)
        return batch / statistics.median(seconds[-num_steps:])

    def prefill(self, num_tokens: int) -> float:
        """Return prefilled tokens per second of one prompt."""
        return num_tokens / sum(self._run(1, num_tokens, 1))

    def versions(self) -> Mapping[str, str]:
        """Return the versions of what computes."""
        return {name: metadata.version(name) for name in ("vllm-cpu", "torch")}

    def _run(self, batch: int, context: int, num_new_tokens: int) -> list[float]:
        """Run requests to their end and return the seconds of each step."""
        sampling = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True, detokenize=False
        )
        for prompt in random_prompts(self._task, batch, context):
            self._engine.add_request(str(self._num_requests), {"prompt_token_ids": prompt.tolist()}, sampling)
            self._num_requests += 1
        seconds = []
        while self._engine.has_unfinished_requests():
            begin = time.perf_counter()
            self._engine.step()
            seconds.append(time.perf_counter() - begin)
        return seconds


if __name__ == "__main__":
    work(VllmPeer)
