"""transformers' continuous batching: its own loop, timed from token to token while all requests are being continued."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.gpu import models
from benchmarks.gpu.decode import decode_row, left_out
from benchmarks.gpu.executors import device_of, fits
from benchmarks.gpu.peers import PeerLeftOut, transformers_model
from benchmarks.gpu.timing import Row, ms_per_step
from ferrule_server.model.config import ModelConfig

ARM = "transformers batching"
_PAGE_TOKENS = 256


def batching(task: Row) -> Iterator[Row]:
    """Yield ms per step of ``generate_batch`` for several batches."""
    config = models.config_of(task["model"])
    try:
        model = transformers_model(task["model"], models.random_weights(task["model"], device_of(task)))
        if not hasattr(model, "generate_batch"):
            raise PeerLeftOut("this version of transformers has no continuous batching")
    except PeerLeftOut as error:
        yield {"arm": ARM, "status": "left out", "reason": str(error)}
        return
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    for cell in task["cells"]:
        batch, context, steps = cell
        if not fits(config, batch, context + steps + _PAGE_TOKENS, task):
            yield left_out(cell, "does not fit the memory", ARM)
            continue
        yield _cell(model, config, cell, task)


def _cell(model: Any, config: ModelConfig, cell: Sequence[int], task: Row) -> Row:
    """Return one cell; a run before the counted ones pays for what is made once."""
    batch, context, steps = cell
    prompts = np.random.default_rng(7).integers(0, config.vocab_size, (batch, context)).tolist()
    rounds = [ms_per_step(_token_times(model, prompts, steps + 1, task)) for _ in range(task["rounds"] + 1)]
    return decode_row(config, cell, ARM, rounds[1:])


def _token_times(model: Any, prompts: list[list[int]], num_tokens: int, task: Row) -> list[list[float]]:
    """Run all prompts together to so many tokens each and return when each token came.

    Raises:
        RuntimeError: Not all of them came.
    """
    from transformers import GenerationConfig

    settings: Any = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
    pages = len(prompts) * -(-(len(prompts[0]) + num_tokens) // _PAGE_TOKENS) + 2
    made = model.generate_batch(
        prompts,
        generation_config=settings,
        continuous_batching_config=_config(pages, max(len(prompts), 64 if task["dry"] else 4096)),
        record_timestamps=True,
    )
    times = [one.timestamps for one in made.values()]
    counts = {len(one) for one in times}
    if len(times) != len(prompts) or counts != {num_tokens}:
        raise RuntimeError(f"{len(times)} of {len(prompts)} requests came back, with {counts} tokens each")
    return times


def _config(num_pages: int, max_rows: int) -> Any:
    """Return what bounds its memory; no kernels from a hub, no prompt found again."""
    from transformers import ContinuousBatchingConfig

    wanted: dict[str, Any] = {
        "page_size": _PAGE_TOKENS,
        "num_blocks": num_pages,
        "max_batch_tokens": max_rows,
        "allow_block_sharing": False,
        "auto_switch_to_flash": importlib.util.find_spec("flash_attn") is not None,
    }
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}  # they differ by version
    return ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})
