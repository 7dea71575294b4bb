"""Hugging Face transformers: bfloat16, sdpa, a static cache, and the logits of the last position only."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from benchmarks.peers.worker import Task, random_prompts, work

__all__ = ["TransformersPeer"]


class TransformersPeer:
    """A model of transformers, stepped by hand."""

    def __init__(self, task: Task) -> None:
        self._task = task
        # Packages of the peer's environment have no types here.
        self._torch: Any = import_module("torch")
        self._transformers: Any = import_module("transformers")
        self._torch.set_num_threads(task.num_threads)
        self._model = self._transformers.AutoModelForCausalLM.from_pretrained(
            task.folder, dtype=self._torch.bfloat16, attn_implementation="sdpa"
        ).eval()

    def decode(self, batch: int, context: int, num_steps: int) -> float:
        """Prefill ``batch`` sequences of ``context`` tokens, then return greedy tokens/s by the median step."""
        with self._torch.inference_mode():
            cache = self._new_cache(context + num_steps)
            tokens = self._forward(random_prompts(self._task, batch, context), cache).argmax(-1)
            seconds = []
            for _ in range(num_steps):
                begin = time.perf_counter()
                tokens = self._forward(tokens, cache).argmax(-1)
                seconds.append(time.perf_counter() - begin)
        return batch / statistics.median(seconds)

    def prefill(self, num_tokens: int) -> float:
        """Return prefilled tokens per second of one prompt."""
        with self._torch.inference_mode():
            cache = self._new_cache(num_tokens)
            prompt = random_prompts(self._task, 1, num_tokens)
            begin = time.perf_counter()
            self._forward(prompt, cache).argmax(-1)
            return num_tokens / (time.perf_counter() - begin)

    def versions(self) -> Mapping[str, str]:
        """Return the versions of what computes."""
        return {"transformers": self._transformers.__version__, "torch": self._torch.__version__}

    def _new_cache(self, length: int) -> Any:
        return self._transformers.StaticCache(config=self._model.config, max_cache_len=length)

    def _forward(self, token_ids: Any, cache: Any) -> Any:
        ids = self._torch.as_tensor(token_ids)
        return self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits


if __name__ == "__main__":
    work(TransformersPeer)
